"""What the ranks of a slime test do: real slime and its Megatron on the CPU, started by `test_slime.py`.

slime's parser, `get_batch`, model provider, DDP, optimizer, policy loss and `train_one_step` are its own. Replaced are
what needs a GPU (attention kernels: ours, see `slime_cpu.py`), a checkpoint (`load_checkpoint`: seeded weights) and
bf16.
"""

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import slime_cpu
import tiny_mimo
import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps

from megatron_rlspec import files
from megatron_rlspec.config import Config
from megatron_rlspec.models.names import LAYER, later
from megatron_rlspec.push.contract import HealthError
from megatron_rlspec.push.push import PushError

HOOKS = "megatron_rlspec.integrations.slime.hooks"
OURS = ("--custom-megatron-init-path", f"{HOOKS}.init", "--custom-model-provider-path", f"{HOOKS}.model_provider")
LAYERS = 2
# Megatron saves moments of several stages beside an MTP layer only with norms of 64 (docs/slime-reference.md).
HIDDEN = 64 if "--pipeline-model-parallel-size" in sys.argv and sys.argv[1].startswith("frozen") else 32
HEADS = 4
GROUPS = 2
VOCABULARY = 64
HF_CONFIG = tiny_mimo.config(hidden=HIDDEN, layers=LAYERS, heads=HEADS, kv_heads=GROUPS, ffn=64, vocab=VOCABULARY)
HF_CONFIG |= {"rms_norm_eps": 1e-6, "rope_theta": 10000.0}
DRAFTER = "--mtp-num-layers 1 --enable-mtp-training"
COMMAND = f"""train.py --debug-train-only --actor-num-nodes 1 --num-layers {LAYERS} --hidden-size {HIDDEN}
 --ffn-hidden-size 64 --num-attention-heads {HEADS} --group-query-attention --num-query-groups {GROUPS}
 --max-position-embeddings 512 --seq-length 128 --micro-batch-size 1 --vocab-size {VOCABULARY}
 --tokenizer-type NullTokenizer --swiglu --disable-bias-linear --add-qkv-bias
 --normalization RMSNorm --norm-epsilon 1e-6
 --position-embedding-type none --untie-embeddings-and-output-weights --transformer-impl local
 --make-vocab-size-divisible-by 1 --no-persist-layer-norm --no-gradient-accumulation-fusion --no-masked-softmax-fusion
 --no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion --attention-dropout 0 --hidden-dropout 0
 {DRAFTER} --lr 1e-3 --n-samples-per-prompt 2 --num-rollout 1 --load none --advantage-estimator grpo --prompt-data none
 --use-cpu-initialization --cp-comm-type all_gather --data-pad-size-multiplier 8"""
EXPERTS = 4  # in cases with `--num-experts`
# Two groups of two samples. One is multi-turn, with a gap in its mask; one is short, so that some rank has no token.
LENGTHS = (23, 14, 17, 9)
RESPONSES = (15, 6, 3, 4)


def arguments(folder, cp, extra="", drafter=True):
    """slime's own parser on a small model; float32 instead of bf16."""
    files.write(Path(folder, "config.json"), json.dumps(HF_CONFIG))  # another rank may be reading it
    world = dist.get_world_size() if dist.is_initialized() else int(os.environ["WORLD_SIZE"])
    replicas = world // int(cp)
    command = (
        f"{COMMAND} --rollout-batch-size {2 * replicas} --global-batch-size {4 * replicas} --hf-checkpoint {folder} "
        f"--context-parallel-size {cp} --actor-num-gpus-per-node {world} --spec slime_cpu layer_spec {extra}"
    )
    sys.argv = (command if drafter else command.replace(DRAFTER, "")).split()
    from slime.utils.arguments import parse_args

    args = parse_args()
    args.bf16, args.params_dtype, args.load = False, torch.float32, folder
    args.rlspec = {"folder": folder, **getattr(args, "rlspec", {})}
    return args


def start(args):
    """Do what slime's `initialize.init` does, except its assertion on numpy 1 and its tokenizer; then call the hook."""
    from megatron.training.global_vars import set_args
    from slime.backends.megatron_utils import initialize

    slime_cpu.install()
    set_args(args)
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    initialize._initialize_distributed(args)
    initialize._set_random_seed(args.seed)
    if args.custom_megatron_init_path:
        from slime.utils.misc import load_function

        load_function(args.custom_megatron_init_path)(args)


def build(args):
    """Call slime's set-up of model, DDP, optimizer and scheduler, with seeded weights in place of a checkpoint."""
    from slime.backends.megatron_utils import model as slime_model

    model, optimizer, scheduler = slime_model.setup_model_and_optimizer(args)
    model[0].role = "actor"
    slime_model.load_checkpoint(model, optimizer, scheduler, checkpointing_context={}, skip_load_to_model_and_opt=False)
    return model, optimizer, scheduler


def seeded(model, optimizer, *_, **__):
    """Stands in for `load_checkpoint`. Weights depend on name and shape alone."""
    fill(model[0].named_parameters())
    optimizer.reload_model_params()
    return 0, 0


def fill(named_parameters):
    with torch.no_grad():
        for name, parameter in named_parameters:
            name = of_all_ranks(plain(name))
            split = ps.get_tensor_model_parallel_rank() if getattr(parameter, "tensor_model_parallel", False) else 0
            generator = torch.Generator().manual_seed(sum(name.encode()) * 7919 + parameter.numel() + split)
            noise = torch.randn(parameter.shape, generator=generator) * 0.08
            parameter.copy_(noise + (1 if parameter.dim() == 1 and "norm" in name else 0))


def of_all_ranks(name):
    """A parameter's name with the numbers that its layer and expert have among those of all ranks.

    Slices of tensor-parallel ranks differ.
    """
    before = LAYERS // ps.get_pipeline_model_parallel_world_size() * ps.get_pipeline_model_parallel_rank()
    name = later(LAYER, name, before)
    if ".local_experts." not in name:
        return name
    parts = name.split(".")
    at = parts.index("local_experts") + 1
    held = EXPERTS // ps.get_expert_model_parallel_world_size()
    parts[at] = str(int(parts[at]) + held * ps.get_expert_model_parallel_rank())
    return ".".join(parts)


def rollout_data():
    """Make one step of two micro-batches, as slime's RolloutManager sends it to a rank; replicas get different ones."""
    replica = ps.get_data_parallel_rank() if dist.is_initialized() else 0
    generator = torch.Generator().manual_seed(3 + replica)
    tokens = [torch.randint(1, VOCABULARY, (n,), generator=generator) for n in LENGTHS]
    masks = [torch.ones(n, dtype=torch.int) for n in RESPONSES]
    masks[0][5:8] = 0 if LENGTHS[0] == 23 else 1
    from slime.backends.megatron_utils.cp_utils import slice_log_prob_with_cp

    def per_token(low):
        rows = [low + torch.rand(n, generator=generator) for n in RESPONSES]
        return [slice_log_prob_with_cp(r, t, n) for r, t, n in zip(rows, LENGTHS, RESPONSES, strict=True)]

    return {
        "tokens": tokens,
        "loss_masks": masks,
        "total_lengths": list(LENGTHS),
        "response_lengths": list(RESPONSES),
        "log_probs": per_token(-4.5),
        "advantages": per_token(-0.5),
        "rollout_mask_sums": torch.tensor([float(m.sum()) for m in masks]),
        "micro_batch_indices": [[0, 2], [1, 3]],
    }


def train_step(args, model, optimizer, scheduler):
    """Run one `train_one_step` of slime on `rollout_data`; return (its loss dict, its gradient norm)."""
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.utils import get_model_config
    from slime.backends.megatron_utils import model as slime_model
    from slime.backends.megatron_utils.data import get_data_iterator

    config = get_model_config(model[0])
    config.grad_scale_func, config.finalize_model_grads_func = optimizer.scale_loss, finalize_model_grads
    model[0].train()
    data = rollout_data()
    samples = 4 * ps.get_data_parallel_world_size()
    return slime_model.train_one_step(
        args, 0, 0, get_data_iterator(data), model, optimizer, scheduler, len(data["micro_batch_indices"]), samples
    )


def parameters(model):
    return {of_all_ranks(plain(n)): p.detach().clone() for n, p in model[0].named_parameters()}


def plain(name):
    return name.removeprefix("module.").removeprefix("module.")


def prepare(folder, cp, extra="", drafter=True, loading=seeded):
    """Set up arguments, groups, stand-ins and model for `train_step`."""
    from slime.backends.megatron_utils import model as slime_model

    slime_cpu.install()
    slime_model.load_checkpoint = loading
    args = arguments(folder, cp, extra, drafter)
    slime_model.get_batch = slime_cpu.packed_for_cpu(slime_model.get_batch, args)
    start(args)
    return args, *build(args)


def capture(model, optimizer):
    """Record gradients as each optimizer is about to use them: slime's, and the drafter's own if it has one."""
    from megatron_rlspec.integrations.slime import hooks as slime_hooks

    seen = {}

    def before(step, prefix):
        def wrapped(*args, **kwargs):
            for name, parameter in model[0].named_parameters():
                if getattr(parameter, "main_grad", None) is not None and (".mtp." in name) == bool(prefix):
                    seen[of_all_ranks(plain(name))] = parameter.main_grad.detach().clone()
            return step(*args, **kwargs)

        return wrapped

    drafter = slime_hooks._drafter
    if drafter is not None and drafter.learner is not None:
        drafter.learner.step = before(drafter.learner.step, "drafter")
        optimizer.step = before(optimizer.step, "")
    else:
        original = optimizer.step
        optimizer.step = before(before(original, "drafter"), "")
    return seen


def one_step(folder, cp, *extra, drafter=True):
    """Train one step; save gradients, parameters and metrics for the test to compare."""
    args, model, optimizer, scheduler = prepare(folder, int(cp), " ".join(extra), drafter)
    gradients = capture(model, optimizer)
    losses, norm = train_step(args, model, optimizer, scheduler)
    result = {"gradients": gradients, "parameters": parameters(model), "losses": losses, "norm": norm}
    torch.save(result, Path(folder, f"rank{dist.get_rank()}.pt"))


def load_if_saved(saved):
    """Return what stands in for `load_checkpoint`: slime's own once there is a checkpoint, `seeded` before."""
    from slime.backends.megatron_utils import model as slime_model

    load = slime_cpu.with_new_moments(slime_model.load_checkpoint)

    def loading(model, optimizer, *rest, **kwargs):
        if not (saved / "latest_checkpointed_iteration.txt").exists():
            return seeded(model, optimizer)
        return load(model, optimizer, *rest, **kwargs)

    return loading


def resumed(folder, cp, *extra):
    """Two steps, slime's `save`, a third step; and that third step again from the checkpoint, by fresh models: once as
    saved, once after the drafter's own folder was lost.
    """
    from slime.backends.megatron_utils import model as slime_model

    from megatron_rlspec.integrations.slime import hooks as slime_hooks

    saved = Path(folder, "saved")
    args, *built = prepare(
        folder, int(cp), " ".join([f"--save {saved} --save-interval 1", *extra]), loading=load_if_saved(saved)
    )
    for _ in range(2):
        train_step(args, *built)
    slime_model.save(7, *built)
    train_step(args, *built)
    written = saved / "iter_0000007" / slime_hooks.FOLDER
    found = {"through": parameters(built[0]), "layout": json.loads((written / "layout.json").read_text())}
    found["files"] = sorted(file.name for file in written.glob("drafter-*"))
    resume = resuming(folder, cp, saved, extra)
    for name in ("resumed", "lost"):
        if name == "lost":
            dist.barrier()
            if dist.get_rank() == 0:
                written.rename(saved / "elsewhere")
            dist.barrier()
        built = build(resume)
        train_step(resume, *built)
        found[name] = parameters(built[0])
    torch.save(found, Path(folder, f"rank{dist.get_rank()}.pt"))


def frozen(folder, cp, *extra, drafter=True, resumes=True):
    """Three steps, with slime's `save` before the third; and that third step again by fresh models.

    `drafter`: MTP layers, in slime's model.
    """
    from slime.backends.megatron_utils import model as slime_model

    saved = Path(folder, "saved")
    rate = "--lr 0.003 --lr-decay-style constant"
    given = f"--save {saved} --save-interval 1 {rate} {' '.join(extra)}"
    args, *built = prepare(folder, int(cp), given, drafter, loading=load_if_saved(saved))
    found = {"steps": []}
    for number in range(3):
        if number == 2 and resumes:
            slime_model.save(number + 1, *built)
        found["steps"].append(train_step(args, *built)[0])
    found["parameters"] = parameters(built[0])
    if resumes:
        resume = resuming(folder, cp, saved, [rate, *extra], drafter)
        built = build(resume)
        found["steps"].append(train_step(resume, *built)[0])
        found["resumed"] = parameters(built[0])
    torch.save(found, Path(folder, f"rank{dist.get_rank()}.pt"))


def resuming(folder, cp, saved, extra, drafter=True):
    """Return the arguments of a run that goes on from `saved`, in place of this process' own."""
    from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
    from megatron.training.global_vars import set_args

    args = arguments(folder, int(cp), " ".join([f"--load {saved}", *extra]), drafter)
    args.load = str(saved)
    args.enable_mtp_training = False  # as hooks.init
    set_args(args)
    init_num_microbatches_calculator(0, None, 4, 1, ps.get_data_parallel_world_size())  # as slime's initialize.init
    return args


def own_loop(folder, _):
    """Compute the drafter's gradients in our own loop from the same samples and weights, without slime."""
    from megatron_rlspec.packing.pack import pack
    from megatron_rlspec.train.step import Trainer
    from megatron_rlspec.types import Prompt, Sample

    slime_cpu.install()
    sections = {"model": {"dtype": "float32"}, "drafter": {"depth": 3}, "train": {"tokens_per_micro_batch": 64}}
    trainer = Trainer(Config.model_validate(sections), HF_CONFIG)
    fill([*trainer.policy.named_parameters(), *trainer.drafter.named_parameters()])
    data = rollout_data()
    samples = []
    for i, tokens in enumerate(data["tokens"]):
        mask = torch.zeros(len(tokens))
        mask[-RESPONSES[i] :] = data["loss_masks"][i].float()
        prompt = Prompt(i, tokens[: -RESPONSES[i]].numpy())
        samples.append(Sample(f"s{i}", prompt, tokens.numpy(), mask.numpy(), torch.zeros(len(tokens)).numpy()))
    gradients = {}
    step = trainer.drafter_learner.step

    def capture_step(*args, **kwargs):
        gradients.update({n: p.main_grad.clone() for n, p in trainer.drafter.named_parameters()})
        return step(*args, **kwargs)

    trainer.drafter_learner.step = capture_step
    metrics = trainer.train_step(
        pack(samples, depth=3, tokens_per_micro_batch=64, advantages=[0.0] * len(samples)), objective="sft"
    )
    torch.save({"gradients": gradients, "losses": metrics}, Path(folder, "rank0.pt"))


def empty_rank(folder, cp, *extra):
    """Train one step on a sample whose few response tokens are all on one of the context-parallel ranks."""
    global LENGTHS, RESPONSES
    LENGTHS = (64, 64, 64, 64)
    RESPONSES = (12, 12, 12, 12)
    one_step(folder, cp, *extra)


class Handle:
    """A stand-in for a Ray actor's handle on slime's engine client: HTTP requests run in threads, as in actors."""

    threads = ThreadPoolExecutor(4)

    def __init__(self, port):
        from slime.backends.sglang_utils.sglang_engine import SGLangEngine

        self._engine = SGLangEngine(None, 0)
        self._engine.node_rank, self._engine.server_host, self._engine.server_port = 0, "127.0.0.1", int(port)

    def __getattr__(self, name):
        method = getattr(self._engine, name)
        return SimpleNamespace(remote=lambda *args, **kwargs: self.threads.submit(method, *args, **kwargs))


def get(calls):
    return [call.result() for call in calls] if isinstance(calls, list) else calls.result()


def _under_transformer_engine_names(convert):
    """Wrap slime's converter, which knows the layer norms by Transformer Engine's names; our layers have others."""

    def renamed(args, model_name, name, *rest, **options):
        name = name.replace(".input_layernorm.weight", ".self_attention.linear_qkv.layer_norm_weight")
        name = name.replace(".pre_mlp_layernorm.weight", ".mlp.linear_fc1.layer_norm_weight")
        return convert(args, model_name, name, *rest, **options)

    return renamed


def pushed(folder, ranks, way, port, *extra):
    """Run slime's own weight update into a live engine; then with a drafter tensor left out once, and twice.

    way: `tensor` (colocated) or `distributed` (NCCL, here gloo). With `extra` options, the drafter is one of EAGLE-3.
    """
    from megatron_rlspec.rollout.sglang.cpu import stand_ins as cpu_stand_ins

    cpu_stand_ins.install()
    if extra:
        HF_CONFIG["architectures"] = ["Qwen2ForCausalLM"]
    args, model, *_ = prepare(folder, int(ranks), " ".join([*OURS, *extra]), drafter=not extra)
    from slime.backends.megatron_utils.update_weight import (
        hf_weight_iterator_direct,
        update_weight_from_distributed,
        update_weight_from_tensor,
    )
    from slime.backends.megatron_utils.update_weight.common import named_params_and_buffers
    from slime.utils.distributed_utils import init_gloo_group

    from megatron_rlspec.integrations.slime import hooks as slime_hooks
    from megatron_rlspec.integrations.slime import push as slime_push

    init_gloo_group()
    address = SimpleNamespace(services=SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1"))
    for module in (slime_push, update_weight_from_distributed, update_weight_from_tensor):
        module.ray = SimpleNamespace(get=get, _private=address)
    convert = _under_transformer_engine_names(hf_weight_iterator_direct.convert_to_hf)
    hf_weight_iterator_direct.convert_to_hf = convert
    update_weight_from_distributed.convert_to_hf = convert
    hf_weight_iterator_direct.monkey_patch_torch_reductions = lambda: None  # renumbers CUDA devices
    # CPU tensors are shared under a file name, unlike CUDA's handles.
    torch.multiprocessing.set_sharing_strategy("file_system")
    left_out = []

    def without(send, at):
        def wrapped(*given, **options):
            given = list(given)
            given[at] = [(n, t) for n, t in given[at] if n not in left_out]
            return send(*given, **options)

        return wrapped

    args.colocate = way != "distributed"
    if args.colocate:
        updater_class, module, sender, at = (
            update_weight_from_tensor.UpdateWeightFromTensor,
            update_weight_from_tensor,
            "_send_to_colocated_engine",
            0,
        )
    else:
        updater_class, module, sender, at = (
            update_weight_from_distributed.UpdateWeightFromDistributed,
            update_weight_from_distributed,
            "update_weights_from_distributed",
            4,
        )
    setattr(module, sender, without(getattr(module, sender), at))
    slime_push.wrap(args, slime_hooks._eagle3_tensors if extra else None)
    weights = dict(named_params_and_buffers(args, model))
    name = "qwen2" if extra else "mimo"
    updater = updater_class(args, model, lambda: weights, model_name=name, quantization_config=None)
    lock = SimpleNamespace(
        acquire=SimpleNamespace(remote=lambda: Handle.threads.submit(bool, 1)),
        release=SimpleNamespace(remote=lambda: Handle.threads.submit(bool)),
    )
    updater.connect_rollout_engines([Handle(port)], lock, engine_gpu_counts=[1], engine_gpu_offsets=[0])
    found = []

    def push(*missing):
        with torch.no_grad():
            for parameter in [*model[0].parameters(), *slime_hooks._drafter.block.parameters()]:
                parameter.add_(1e-3)
        pushes = iter(missing)

        def before(pause):
            def wrapped(*rest, **options):
                left_out[:] = [x for x in [next(pushes)] if x]
                return pause(*rest, **options)

            return wrapped

        original, slime_push._push = slime_push._push, before(slime_push._push)
        try:
            updater.update_weights()
            error = ""
        except (HealthError, PushError) as failure:
            error = str(failure)
        slime_push._push = original
        found.append((updater.pop_metrics(), error, updater.weight_version))

    stale = "eagle3.fc.weight" if extra else "model.mtp_layers.0.input_proj.weight"
    norm = "model.norm.weight"
    for missing in ([""], [stale, ""], [stale, stale], [""], [norm, norm]):
        push(*missing)
    torch.save(found, Path(folder, f"rank{dist.get_rank()}.pt"))


if __name__ == "__main__":
    {
        "pushed": pushed,
        "one_step": one_step,
        "no_drafter": partial(one_step, drafter=False),
        "empty_rank": empty_rank,
        "frozen": frozen,
        "frozen_beside": partial(frozen, drafter=False),
        "frozen_no_drafter": partial(frozen, drafter=False, resumes=False),
        "own_loop": own_loop,
        "resumed": resumed,
    }[sys.argv[1]](*sys.argv[2:])
