"""`--dry-run` agrees with a real trainer's tensors, and with parameters counted by hand."""

import json
import os
import subprocess
import tomllib
from pathlib import Path

import pytest
from published import PUBLISHED
from train_ranks import HF_CONFIG, batches, config, on_ranks, samples

from megatron_rlspec.commands import training
from megatron_rlspec.config import ConfigError, load
from megatron_rlspec.memory_estimate import GIB, engine_memory, engine_share
from megatron_rlspec.train import dry_run, stages
from megatron_rlspec.train.step import Trainer

RECIPES = Path(__file__).parents[2] / "examples/torchrun"
QWEN = PUBLISHED["Qwen2.5-7B-Instruct"]
MIMO = PUBLISHED["MiMo-7B-RL"]
GLM = PUBLISHED["GLM-4.5-Air"]
MODELS = {"mimo-7b-rl": MIMO, "qwen2.5-7b-add-mtp": QWEN, "glm-4.5-air": GLM}
RANKS = {"mimo-7b-rl": 4, "qwen2.5-7b-add-mtp": 4, "glm-4.5-air": 64}
SCRIPTS = sorted(p.stem for p in RECIPES.glob("*.sh") if p.stem != "recipe")


def counted(model):
    """Count the parameters of (policy, drafter) by the shapes in config.json, layer by layer."""
    width = model["hidden_size"]
    heads = model["num_attention_heads"]
    groups = model["num_key_value_heads"]
    channels = model.get("head_dim", width // heads)
    qkv = (heads + 2 * groups) * channels
    attention = qkv * width + qkv + heads * channels * width
    dense = 3 * width * model["intermediate_size"]
    experts = model.get("n_routed_experts", 0)
    routed = experts * width + (experts + 1) * 3 * width * model.get("moe_intermediate_size", 0)
    block = attention + 2 * width
    first = model["first_k_dense_replace"] if experts else model["num_hidden_layers"]
    layers = model["num_hidden_layers"] * block + first * dense + (model["num_hidden_layers"] - first) * routed
    drafter = block + (routed if experts else dense) + 2 * width * width + 3 * width
    return layers + 2 * model["vocab_size"] * width + width, drafter


def arguments(recipe, folder, *extra, engines="http://127.0.0.1:30004"):
    """Return the arguments that the script gives to `rlspec`, or to torchrun without --dry-run."""
    for name in ("rlspec", "torchrun"):
        stub = folder / name
        stub.write_text(f'#!/bin/sh\nprintf "%s\\n" {name} "$@"\n')
        stub.chmod(0o755)
    (folder / "config.json").write_text(json.dumps(MODELS[recipe]))
    env = {k: v for k, v in os.environ.items() if k not in ("NODES", "GPUS", "NODE_RANK", "MASTER_ADDR")}
    env |= {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "MODEL": str(folder), "DATA": "prompts.jsonl"}
    env |= {"RUN": str(folder / "run"), "ENGINES": engines, "NODE_RANK": "0", "MASTER_ADDR": "one"}
    done = subprocess.run(
        ["bash", str(RECIPES / f"{recipe}.sh"), *extra], env=env, capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()


def printed(*argv):
    """Return what `rlspec train` prints, or the error's message."""
    lines: list[str] = []
    training.print = lambda line: lines.append(line)
    try:
        training.train(list(argv))
    except ConfigError as error:
        return str(error)
    return lines


@pytest.mark.slow
@pytest.mark.parametrize("recipe", SCRIPTS)
def test_recipe_launches_and_its_dry_run_is_plausible(recipe, tmp_path):
    ranks = RANKS[recipe]
    launched = arguments(recipe, tmp_path, "--train.steps", "2")
    assert launched[0] == "torchrun" and launched[launched.index("--rollout.urls") + 1].startswith("http://")
    nodes, gpus = (int(launched[launched.index(flag) + 1]) for flag in ("--nnodes", "--nproc-per-node"))
    assert nodes * gpus == ranks
    assert training.parse("train", launched[launched.index("train") + 1 :], ranks).train.steps == 2
    if nodes == 1:
        own = arguments(recipe, tmp_path, engines="")
        assert own[own.index("--rollout.engines") + 1] == str(8 - gpus) and "--rollout.urls" not in own
        assert training.parse("train", own[own.index("train") + 1 :], ranks).rollout.engines == 8 - gpus
    program, command, *asked = arguments(recipe, tmp_path, "--dry-run")
    assert (program, command) == ("rlspec", "train")
    (lines,) = on_ranks(1, printed, *asked)
    policy, drafter = counted(MODELS[recipe])
    assert lines[0] == f"{MODELS[recipe]['architectures'][0]}: {policy:,} parameters, its drafter {drafter:,}"
    rows = [line.split() for line in lines[4:]]
    parallel = tomllib.loads((RECIPES / f"{recipe}.toml").read_text())["parallel"]
    assert [int(row[0]) for row in rows] == list(range(parallel.get("pipeline", 1)))
    assert all(20 < float(row[-1]) < 75 for row in rows), "GiB of a GPU of 80 GB"
    held = parallel["tensor"] * sum(int(row[2].replace(",", "")) for row in rows)
    assert policy < held < policy * 1.01, "shards, and what every tensor-parallel rank repeats"


SIZES = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1}
SMALL = {
    "mimo": HF_CONFIG,
    "tied": HF_CONFIG | {"tie_word_embeddings": True},
    "glm": HF_CONFIG
    | {"architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "n_shared_experts": 1}
    | SIZES,
}
LAYOUTS = [
    {"tensor": 2, "sequence": True},
    {"pipeline": 2},
    {"tensor": 2, "pipeline": 4, "sequence": True},
    {"context": 2},
]
EXPERT_LAYOUTS = [{"expert": 4}, {"tensor": 2, "pipeline": 4, "expert": 2, "sequence": True}]


def sums():
    counts = {}
    for name, hf in SMALL.items():
        layouts = [{}, *LAYOUTS]
        if name == "glm":
            layouts += EXPERT_LAYOUTS
        counts[name] = []
        for layout in layouts:
            cfg = config(parallel=layout)
            counts[name].append(stages.parameters(stages.build(cfg, hf, 16)))
    return counts


def test_shards_sum_to_the_model_under_every_layout():
    (counts,) = on_ranks(1, sums)
    for name, each in counts.items():
        policy, drafter = counted(SMALL[name])
        policy -= HF_CONFIG["vocab_size"] * HF_CONFIG["hidden_size"] if name == "tied" else 0
        assert each == [(policy, drafter)] * len(each), name


CELLS = [
    ({"dtype": "bfloat16"}, {"tensor": 2, "sequence": True}, False, "mimo"),
    ({"dtype": "float32"}, {"pipeline": 2}, False, "mimo"),
    ({"dtype": "bfloat16"}, {"expert": 2}, True, "glm"),
]


def cell(index):
    model, parallel, distributed, family = CELLS[index]
    return config(model=model, parallel=parallel, optimizer={"distributed": distributed, "lr": 1e-3}), SMALL[family]


def held(index):
    """Count the bytes that a trainer holds after a step: weights, gradients, optimizer."""
    cfg, hf = cell(index)
    trainer = Trainer(cfg, hf)
    trainer.train_step(batches(samples(8), cfg), objective="sft")
    modules = [module for module in (trainer.policy, trainer.drafter) if module is not None]
    weights = [p for module in modules for p in module.parameters()]
    own = {p.untyped_storage().data_ptr() for p in weights}
    gradients = sum(p.main_grad.nbytes for p in weights)
    replica = [trainer.embedding] if trainer.embedding.untyped_storage().data_ptr() not in own else []
    state = 0
    for learner in trainer.learners().values():
        for part in learner.parts:
            for parameter in (p for group in part.groups for p in group["params"]):
                moments = part.optimizer.optimizer.state[parameter]
                state += sum(t.nbytes for name, t in moments.items() if name != "step")
                state += 0 if parameter.untyped_storage().data_ptr() in own else parameter.nbytes
    return sum(p.nbytes for p in [*weights, *replica]), gradients, state


def promised(index):
    cfg, hf = cell(index)
    found = [stage.memory for stage in stages.build(cfg, hf, 2)]
    return [(b.weights, b.gradients, b.optimizer) for b in found]


@pytest.mark.parametrize("index", range(len(CELLS)))
def test_memory_equals_that_of_a_real_trainer(index):
    (expected,) = on_ranks(1, promised, index)
    for rank, (weights, gradients, state) in enumerate(on_ranks(2, held, index)):
        here = expected[rank if len(expected) == 2 else 0]
        assert here[:2] == (weights, gradients)
        # the distributed optimizer cuts the buffer where it falls, padding included
        assert here[2] == (pytest.approx(state, rel=0.02) if CELLS[index][2] else state)


def test_a_rank_that_does_not_fit_is_refused_in_one_line(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(HF_CONFIG))
    words = ["--dry-run", "--ranks", "8", "--model.path", str(tmp_path), "--data.path", "x.jsonl", "--gpu-gib", "0.001"]
    (message,) = on_ranks(1, printed, *words)
    assert "--gpu-gib 0.001: a rank of pipeline stage 0 needs" in message and "\n" not in message


def engine_lines():
    """Return the last lines for 8 ranks with 8 engines of one GPU, by `placement.mode`."""
    lines = {}
    for mode in ("auto", "colocated"):
        cfg = config(
            model={"dtype": "bfloat16", "max_length": 16384},
            parallel={"tensor": 2, "sequence": True},
            optimizer={"distributed": True},
            rollout={"engine": "sglang", "engines": 8},
            placement={"mode": mode},
        )
        lines[mode] = list(dry_run.report(cfg, MIMO, 8, 79.2))[-3:]
    return lines


def test_a_dry_run_says_how_many_samples_an_engine_holds_at_once():
    """The tokens are those that a run gives the engine (`placement.with_memory`)."""
    (lines,) = on_ranks(1, engine_lines)
    own, beside = lines["auto"][1:]
    assert own.startswith("on GPUs of its own: KV cache of ")
    assert lines["colocated"][-1] == beside
    cfg = load(None, {"parallel.tensor": "2", "optimizer.distributed": "true", "model.max_length": "16384"})
    gpu = int(79.2 * GIB)
    engine = engine_memory(cfg, MIMO, gpu, sum(counted(MIMO)))
    found = [int(line.partition("KV cache of ")[2].partition(" tokens")[0].replace(",", "")) for line in (own, beside)]
    assert found[0] == pytest.approx(engine_share(engine, gpu, None).kv_tokens, abs=100) and found[1] < found[0]
    for line, tokens in zip((own, beside), found, strict=True):
        assert f"{tokens / 16384:.1f} samples of 16,384 tokens at once" in line
