"""What a session runs: the parts in their order, and the sizes of what they do. Standard library only."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from megatron_rlspec import files


@dataclass(frozen=True)
class Part:
    """A part of a session.

    answers  what it measures
    seconds  about how long it takes on an H200 with the default plan, an estimate. It does not begin with less left
    limit    seconds after which it is killed; what it has measured stays
    """

    answers: str
    seconds: int
    limit: int


# By value: what a machine that goes away early leaves behind decides most. `model` makes what the others serve.
PARTS: dict[str, Part] = {
    "model": Part("writes the model that engines serve, unless --model names one", 30, 180),
    "decode": Part(
        "tokens/s: plain, off, fixed steps, adaptive, at three batch sizes; CUDA graphs; ms of a round, and a profile",
        340,
        600,
    ),
    "shared": Part("decoding alone, beside a process that waits, beside one whose kernel spins", 80, 200),
    "fit": Part("memory: graphs, a round of 256 x 4, a long prefill, with the share that placement computes", 100, 300),
    "push": Part("GB/s of each transport that works with one card", 120, 300),
    "draws": Part("sampling after a round: ours and SGLang's, with peaked and with flat logits; log-probs", 40, 120),
    "head": Part(
        "the output layer: losses of policy and drafter by kernels and plain torch, chunks, compiled", 70, 180
    ),
    "sleep": Part("an engine beside a trainer: sleep, wake, push, canary; memory that comes free", 90, 240),
    "catchup": Part("rounds without drafts, and the first rounds that draft again", 110, 300),
    "identity": Part("policy with and without a drafter at 4,096 tokens, and twice without", 60, 240),
    "train": Part("a training step with and without the drafter: ms, peak memory", 60, 240),
    "attention": Part("the drafter's attention, forward and backward: ms, peak memory", 20, 90),
}
MOST_FOR_THREE = 24  # layers of a model of which three engines fit into 80 GB
SERVING = ("decode", "shared", "push", "sleep", "catchup")  # these need the part `model`


@dataclass(frozen=True)
class Shape:
    """A model: MiMo-7B's, unless it says otherwise. `layers`: of the target; there is one drafter layer."""

    layers: int = 36
    hidden: int = 4096
    ffn: int = 11008
    heads: int = 32
    groups: int = 8
    vocab: int = 151680

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Shape:
        """Return the shape that a config.json states."""
        heads = int(config["num_attention_heads"])
        return cls(
            int(config["num_hidden_layers"]),
            int(config["hidden_size"]),
            int(config["intermediate_size"]),
            heads,
            int(config.get("num_key_value_heads") or heads),
            int(config["vocab_size"]),
        )


@dataclass(frozen=True)
class Plan:
    """What the parts run. Lengths are in tokens.

    model         a checkpoint to serve; "": the part `model` makes one of `shape`
    whole         shape of the engine whose memory `fit` measures; it gets weights from nowhere
    batches       requests that decode at the same time, one measurement each; every request generates `tokens` tokens
    repetitions   counted ones of each contestant, after one that is not
    steps         the engine's candidates; `fixed` are also contestants by themselves
    shared_batch  requests that decode beside the other process, and whose rounds are profiled
    fit           (requests, drafts a round, tokens of a prefill)
    push_rounds   pushes of each transport, the first one included
    draws         (requests, nodes of each), in a vocabulary of `shape`
    head          (rows, chunks of rows)
    moved         tokens of the sample that changes engines
    off           (requests, rounds without drafts before they draft)
    identity      (layers, samples, tokens of each)
    train_layers  layers of the trained policy: all 36 with optimizer need 137 GB
    attention     (query heads, key/value heads, tokens of one sequence)
    engine        further options of SGLang, for all engines
    """

    device: str = "cuda"
    dtype: str = "bfloat16"
    model: str = ""
    shape: Shape = Shape(layers=18)
    whole: Shape = Shape()
    batches: tuple[int, ...] = (64, 256, 1)
    tokens: int = 256
    repetitions: int = 2
    steps: tuple[int, ...] = (0, 1, 2, 3)
    fixed: tuple[int, ...] = (1, 2, 3)
    profile_seconds: int = 60
    shared_batch: int = 64
    fit: tuple[int, int, int] = (256, 3, 8192)
    push_rounds: int = 2
    draws: tuple[int, int] = (256, 4)
    head: tuple[int, tuple[int, ...]] = (8192, (1024, 4096))
    moved: int = 8192
    off: tuple[int, int] = (256, 2000)
    identity: tuple[int, int, int] = (4, 4, 4096)
    train_layers: int = 8
    train_depth: int = 3
    train_sequences: int = 9
    train_length: int = 1024
    attention: tuple[tuple[int, int, int], ...] = ((16, 4, 9216), (16, 4, 32768))
    head_dim: int = 128
    repeats: int = 5
    engine: tuple[str, ...] = ()

    @property
    def likeliest(self) -> bool:
        """Whether a third engine, which drafts the likeliest tokens, decodes, too."""
        return self.shape.layers <= MOST_FOR_THREE

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"


def planned(*, cpu: bool = False, layers: int = 0, model: str = "", engine: Sequence[str] = ()) -> Plan:
    """Return what to run.

    layers  of the made model, and at most that many of the trained ones
    model   directory of a checkpoint to serve instead
    engine  further options of SGLang
    """
    plan = Plan()
    if cpu:
        tiny = Shape(layers=2, hidden=32, ffn=96, heads=4, groups=2, vocab=512)
        plan = Plan(
            device="cpu",
            dtype="float32",
            shape=tiny,
            whole=tiny,
            batches=(4,),
            tokens=16,
            repetitions=1,
            steps=(0, 1, 3),
            fixed=(1, 3),
            profile_seconds=5,
            shared_batch=4,
            fit=(4, 3, 64),
            draws=(4, 4),
            head=(64, (16, 64)),
            moved=64,
            off=(4, 20),
            identity=(2, 2, 48),
            train_layers=2,
            train_sequences=2,
            train_length=32,
            attention=((4, 2, 96), (4, 2, 160)),
            head_dim=8,
            repeats=2,
        )
    if layers:
        plan = replace(
            plan,
            shape=replace(plan.shape, layers=layers),
            train_layers=min(plan.train_layers, layers),
            identity=(min(plan.identity[0], layers), *plan.identity[1:]),
        )
    if model:
        plan = replace(plan, model=model, shape=Shape.of(files.read_json(Path(model) / "config.json")))
    return replace(plan, engine=tuple(engine))


def to_json(plan: Plan) -> dict[str, Any]:
    """Return the plan as JSON would read it back, for comparisons."""
    values = {field.name: getattr(plan, field.name) for field in fields(plan)}
    return json.loads(json.dumps(values, default=vars))


def from_json(found: Mapping[str, Any]) -> Plan:
    """Return the plan that `to_json` described."""
    flat = {name: _tuples(value) for name, value in found.items() if name not in ("shape", "whole")}
    return Plan(**flat, shape=Shape(**found["shape"]), whole=Shape(**found["whole"]))


def _tuples(value: Any) -> Any:
    return tuple(_tuples(one) for one in value) if isinstance(value, list) else value
