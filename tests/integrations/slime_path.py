"""slime's own train.py from its command line to its end on a machine without GPUs: `python slime_path.py FOLDER`.

Real Ray, slime's own actors, router, engines, data source, reward, conversion, training and weight updates; what takes
the place of a GPU is in `cpu_machine/sitecustomize.py`. FOLDER gets checkpoints, data and `rollouts.jsonl`.
`--sglang 0.5.15.post1`, which slime pins, is imported from RLSPEC_SGLANG_OLD.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from megatron_rlspec.rollout.sglang.scheduler import versions

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
PINNED = "0.5.15.post1"  # by slime
PYTHON = os.environ.get("RLSPEC_SLIME_PYTHON", sys.executable)
HIDDEN = 64
LAYERS = 2
HEADS = 4
GROUPS = 2
FFN = 128
BOXED = [f"\\boxed{{{digit}}}" for digit in range(10)]
VOCABULARY = ["<pad>", "<eos>", "<unk>", *"=+-", *"0123456789", *BOXED, *(f"<spare{i}>" for i in range(6))]


def write_task(folder, modulus=10, rows=512):
    """Sums, modulo `modulus`. slime's reward `math` reads answers from a `\\boxed{}`, in the tokenizer one token."""
    rng = random.Random(1)
    lines = []
    for _ in range(rows):
        numbers = [rng.randrange(10) for _ in range(rng.randint(2, 6))]
        lines.append({"prompt": "+".join(map(str, numbers)) + "=", "label": str(sum(numbers) % modulus)})
    (folder / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "eval.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines[:8]))


def write_tokenizer(folder):
    tokenizer = Tokenizer(models.WordLevel({t: i for i, t in enumerate(VOCABULARY)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\\boxed\{\d\}|."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(VOCABULARY[:3])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>", "eos_token": "<eos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"unk_token": "<unk>"}))


def write_drafter(folder):
    """Make the model a Qwen2, which has no MTP layer, and write a fresh EAGLE-3 drafter beside it."""
    from megatron_rlspec.conversion.drafter_files import make_drafter
    from megatron_rlspec.models.hf_files import read_hf, write_hf

    config, tensors = read_hf(folder)
    config |= {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "num_nextn_predict_layers": 0}
    del config["auto_map"]
    kept = {name: tensors[name] for name in tensors if ".mtp_layers." not in name}
    shutil.rmtree(folder)
    write_hf(folder, config, kept, tokenizer_from=folder.parent / "tokenizer")
    make_drafter(folder, folder.parent / "drafter")


MIXTURE = {
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "moe_intermediate_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "vocab_size": len(VOCABULARY),
    "max_position_embeddings": 512,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.0,
    "use_qk_norm": False,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "torch_dtype": "float32",
}
# As slime has it for GLM-4.5-Air, with experts split over two ranks.
EXPERTS = """ --rotary-percent 0.5 --num-experts 4 --moe-ffn-hidden-size 32 --moe-shared-expert-intermediate-size 32
 --moe-router-pre-softmax --moe-router-score-function sigmoid --moe-router-enable-expert-bias
 --moe-router-bias-update-rate 0 --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0
 --moe-token-dispatcher-type alltoall --moe-router-topk 2 --moe-layer-freq [0,1] --moe-router-dtype fp32
 --expert-model-parallel-size 2 --expert-tensor-parallel-size 1"""


def write_mixture(folder):
    """Replace the model by a GLM4-MoE with a NextN drafter, random but for the cycle in its output layer."""
    from megatron_rlspec.models.hf_files import read_hf, write_hf

    sys.path[:0] = [str(ROOT / "tests/models")]
    from moe_oracles import GLM4_MOE, checkpoint

    head = read_hf(folder)[1]["lm_head.weight"]
    embedding = read_hf(folder)[1]["model.embed_tokens.weight"]
    shutil.rmtree(folder)
    config = GLM4_MOE | MIXTURE
    tensors = checkpoint(config, folder.parent / "made")
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor *= 0.2  # into the residual stream, which so begins as the embedding
        if name.endswith("embed_tokens.weight"):
            tensor.copy_(embedding)
        if name.endswith(("lm_head.weight", "shared_head.head.weight")):
            tensor.copy_(head)
    write_hf(folder, config, tensors, tokenizer_from=folder.parent / "tokenizer")


def write_model(folder):
    """Write a model of MiMo's shape, with its configuration class in the checkpoint, as MiMo has it.

    The decoder is nearly a cycle through the vocabulary, so that there is something to predict; the drafter is random.
    """
    from megatron_rlspec.models.hf_files import write_hf

    sys.path.insert(0, str(ROOT / "examples/quickstart"))
    import make_model

    tokenizer = folder.parent / "tokenizer"
    tokenizer.mkdir()
    write_tokenizer(tokenizer)
    shape = argparse.Namespace(hidden=HIDDEN, layers=LAYERS, ffn=FFN, heads=HEADS, kv_heads=GROUPS, max_length=512)
    config = make_model.describe(shape, len(VOCABULARY), eos=1, pad=0)
    config |= {"model_type": "mimo", "auto_map": {"AutoConfig": "configuration_mimo.MiMoConfig"}}
    tensors = dict(make_model.initial(config, seed=1))
    embedding = tensors["model.embed_tokens.weight"]
    order = torch.randperm(len(VOCABULARY) - 3, generator=torch.Generator().manual_seed(2)) + 3
    following = torch.arange(len(VOCABULARY))
    following[order] = order.roll(-1)
    tensors["lm_head.weight"][following[3:]] += 0.15 * embedding[3:]
    write_hf(folder, config, tensors, tokenizer_from=tokenizer)
    (folder / "configuration_mimo.py").write_text(
        "from transformers import Qwen2Config\n\n\nclass MiMoConfig(Qwen2Config):\n    model_type = 'mimo'\n"
    )


def command(folder, slime, driver, train, context, rollouts, kind, extra=()):
    """Return a recipe's command line for this small size. Goes on from what `folder/save` has."""
    model = folder / "model"
    load = folder / "save" if (folder / "save").exists() else model
    experts = EXPERTS if kind == "mixture" else ""
    data = folder / "train.jsonl"
    text = f"""{slime}/{driver} --num-layers {LAYERS} --hidden-size {HIDDEN} --ffn-hidden-size {FFN}
 --num-attention-heads {HEADS} --group-query-attention --num-query-groups {GROUPS} --kv-channels {HIDDEN // HEADS}
 --max-position-embeddings 512 --seq-length 128 --vocab-size {len(VOCABULARY)} --make-vocab-size-divisible-by 1
 --swiglu --disable-bias-linear --add-qkv-bias --normalization RMSNorm --norm-epsilon 1e-5 --rotary-base 10000
 --position-embedding-type none --untie-embeddings-and-output-weights --transformer-impl local
 --no-persist-layer-norm --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-swiglu-fusion
 --no-bias-dropout-fusion --no-rope-fusion --attention-dropout 0 --hidden-dropout 0 --use-cpu-initialization
 --cp-comm-type all_gather --data-pad-size-multiplier 8 --spec slime_cpu layer_spec
 --hf-checkpoint {model} --load {load} --ref-load {model}
 --actor-num-nodes 1 --actor-num-gpus-per-node {train} --context-parallel-size {context}
 --rollout-num-gpus 1 --rollout-num-gpus-per-engine 1
 --prompt-data {data} --input-key prompt --label-key label --rollout-shuffle --rm-type math
 --num-rollout {rollouts} --rollout-batch-size 4 --over-sampling-batch-size 6 --n-samples-per-prompt 8
 --rollout-max-response-len 24 --rollout-temperature 1 --global-batch-size 32 --balance-data --partial-rollout
 --dynamic-sampling-filter-path slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std
 --eval-interval 1 --eval-prompt-data sums {folder}/eval.jsonl --n-samples-per-eval-prompt 1
 --eval-max-response-len 24 --advantage-estimator grpo --eps-clip 0.2 --eps-clip-high 0.28 --entropy-coef 0
 --optimizer adam --lr 1e-3 --lr-decay-style constant --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.98
 --use-dynamic-batch-size --max-tokens-per-gpu 512 --save {folder}/save --save-interval 2
 --update-weight-transport disk --update-weight-disk-dir {folder}/weights --update-weight-disk-keep-files
 --custom-config-path {folder}/user.yaml
 --custom-megatron-init-path slime_path_hooks.init --custom-rollout-log-function-path slime_path_hooks.log_rollout
 --sglang-device cpu --sglang-disable-cuda-graph
 --sglang-grammar-backend none --sglang-sampling-backend pytorch --sglang-max-total-tokens 16384
 --sglang-max-running-requests 64 --sglang-sleep-on-idle{experts}"""
    return [PYTHON, *text.split(), *extra]


def environment(folder, slime, sglang):
    """Return the environment of Ray's workers and their children. Of ours it has only what a CPU needs."""
    old = [os.environ["RLSPEC_SGLANG_OLD"]] if sglang == PINNED else []
    path = [HERE / "cpu_machine", *old, os.environ["RLSPEC_SLIME_MEGATRON"], slime, ROOT, HERE]
    return versions.KNOWN[sglang].cpu_environment | {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "OMP_NUM_THREADS": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "SGLANG_USE_CPU_ENGINE": "1",
        "SLIME_HOST_IP": "127.0.0.1",
        "HF_HOME": str(folder / "hf"),
        "RAY_AUTH_MODE": "disabled",
        "RAY_DEDUP_LOGS": "0",
        "RAY_memory_monitor_refresh_ms": "0",  # else Ray ends actors when other programs have the machine's memory
        # slime gives every engine the number of a GPU, and SGLang 0.5.23 would look for the socket of that number.
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join(
            [",".join(map(str, sorted(os.sched_getaffinity(0))))] * (1 if sglang == PINNED else 8)
        ),
        "RLSPEC_CPU_MODEL": str(folder / "model"),
        "RLSPEC_PATH_FOLDER": str(folder),
        "PYTHONWARNINGS": "ignore",
    }


CLUSTER = """import ray, sys
ray.init(num_cpus=16, num_gpus=8, include_dashboard=False, _temp_dir=sys.argv[1], object_store_memory=10**8)
print(ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()"""


@contextmanager
def cluster(folder, env):
    """Start a Ray cluster before slime, with pretended GPUs, in the given environment."""
    scratch = tempfile.mkdtemp(prefix="ray")  # paths of sockets must be short
    process = subprocess.Popen(
        [PYTHON, "-c", CLUSTER, scratch],
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=open(folder / "cluster.log", "w"),
        text=True,
    )
    try:
        yield process.stdout.readline().strip()
    finally:
        process.communicate(timeout=60)
        shutil.rmtree(scratch, ignore_errors=True)


def checkout(folder, sglang):
    """Copy slime; for a newer SGLang than the one it pins, with the patch that this needs."""
    slime = folder / "slime"
    shutil.copytree(os.environ["RLSPEC_SLIME"], slime, ignore=shutil.ignore_patterns(".git", "tests", "docs", "imgs"))
    if sglang != PINNED:
        patch = ROOT / "patches/slime/624b824a8/0003-server-args-as-struct.patch"
        subprocess.run(["git", "apply", str(patch)], cwd=slime, check=True)
    return slime


def main():
    parser = argparse.ArgumentParser(epilog="Any other option is slime's own; in it FOLDER is replaced.")
    parser.add_argument("folder", type=Path, help="a new one, or that of a run that goes on")
    parser.add_argument("--driver", default="train.py")
    parser.add_argument("--train", type=int, default=2, help="train ranks")
    parser.add_argument("--context", type=int, default=1, help="context-parallel size")
    parser.add_argument("--rollouts", type=int, default=4)
    parser.add_argument("--verifier", choices=("target_only", "position_keyed"), default="target_only")
    parser.add_argument("--kind", choices=("mtp", "eagle3", "mixture"), default="mtp", help="of the drafter")
    parser.add_argument("--modulus", type=int, default=10, help="of the sums that are asked for")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--sglang", choices=sorted(versions.KNOWN), default="0.5.23")
    options, extra = parser.parse_known_args()
    folder = options.folder.absolute()
    slime = folder / "slime"
    if not folder.exists():
        folder.mkdir(parents=True)
        write_task(folder, options.modulus)
        write_model(folder / "model")
        if options.kind == "eagle3":
            write_drafter(folder / "model")
        if options.kind == "mixture":
            write_mixture(folder / "model")
        (folder / "user.yaml").write_text(f"bf16: {str(options.dtype == 'bfloat16').lower()}\n")
        slime = checkout(folder, options.sglang)
    for argument in versions.KNOWN[options.sglang].cpu_arguments:
        extra += argument.replace("--", "--sglang-", 1).split("=")
    extra = [word.replace("FOLDER", str(folder)) for word in extra] + ["--sglang-dtype", options.dtype]
    whole = command(
        folder, slime, options.driver, options.train, options.context, options.rollouts, options.kind, extra
    )
    ours = ["--folder", str(folder / "rlspec"), "--drafter.depth", "3", "--drafter.lr", "1e-2"]
    ours += ["--drafter.warmup_steps", "0"]  # four steps would all be warm-up
    ours += ["--verifier", options.verifier]
    if options.kind == "eagle3":
        ours += ["--drafter.kind", "eagle3", "--drafter.path", str(folder / "drafter")]
    ours += ["--candidate-steps", "0,1,2,3"]
    prefix = [sys.executable, "-m", "megatron_rlspec.cli", "slime", *ours, "--"]
    env = environment(folder, slime, options.sglang)
    with cluster(folder, env) as address:
        driver = subprocess.run([*prefix, *whole], env=env | {"RAY_ADDRESS": address}, cwd=folder)
    sys.exit(driver.returncode)


if __name__ == "__main__":
    main()
