"""What a session runs: the parts in their order, and the sizes of what they do. Standard library only."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any


@dataclass(frozen=True)
class Part:
    """A part of a session.

    session  "a" or "b"
    answers  what it measures
    seconds  about how long it takes on an H200 with the default plan, an estimate. It does not begin with less left
    limit    seconds after which it is killed; what it has measured stays
    engines  the engines that it asks, by their name in `serving.engine_set`; "": none
    needs    the part that writes its models
    """

    session: str
    answers: str
    seconds: int
    limit: int
    engines: str = ""
    needs: str = ""


# In each session by value: what a machine that goes away early leaves behind decides most.
PARTS: dict[str, Part] = {
    "model": Part("a", "writes the model that is profiled", 35, 150),
    "profile": Part("a", "ms of a round by requests, context and drafts", 110, 200, "wide", "model"),
    "steady": Part("a", "tokens/s off and adaptive while ended requests are replaced", 85, 160, "wide", "model"),
    "catchup": Part("a", "the first drafts after many rounds without", 20, 60, "wide", "model"),
    # Last of its engines: torch's profiler can end one with a segmentation fault.
    "trace": Part("a", "where the time of a round of 64 requests goes", 15, 60, "wide", "model"),
    "train": Part("a", "a training step with and without the drafter, and with recomputation", 50, 120),
    "small": Part("a", "writes a model with fewer layers for the next parts", 15, 60),
    "variants": Part(
        "a",
        "equal texts and speed: as served, deterministic, by FlashInfer, with a draft vocabulary",
        30,
        150,
        "variants",
        "small",
    ),
    "lossless": Part("a", "the distribution of drafted tokens, in bfloat16", 15, 60, "variants", "small"),
    "peaked": Part("a", "writes a model that is certain of most tokens", 40, 150),
    "uneven": Part("a", "tokens/s with the drafts worth it, and with one number for all", 45, 120, "uneven", "peaked"),
    "widened": Part("b", "widens the policy and its drafter", 60, 200),
    "rl": Part("b", "RL steps that alternate plain, frozen and co-trained", 250, 400, "widened", "widened"),
    "stale": Part("b", "the same, sampling while it trains", 130, 250, "widened", "widened"),
}
START = 110  # seconds that engines take to answer on a GPU


@dataclass(frozen=True)
class Shape:
    """A model: MiMo-7B's, unless it says otherwise. `layers`: of the target; there is one drafter layer."""

    layers: int = 36
    hidden: int = 4096
    ffn: int = 11008
    heads: int = 32
    groups: int = 8
    vocab: int = 151680


@dataclass(frozen=True)
class Wide:
    """Sizes of the widened policy: arguments of `widen.widened_shape`."""

    times: int = 4
    head_size: int = 128
    kv_heads: int = 6
    ffn: int = 9216
    layers: int = 32


@dataclass(frozen=True)
class Plan:
    """What the parts run. Lengths are in tokens.

    shape         of the model of session A
    small_layers  layers of the model of `variants`, of which several engines fit on the card
    steps         the engine's candidates
    drafts        of a round, where they are fixed
    pool          tokens of the KV cache of the engine that is profiled
    batches, contexts, long  grid of the profile, and one more point (requests, context)
    profile_seconds
    points        (requests, context) of `steady`, with responses of `tokens`
    turns, settle, window    of each contestant: how often, seconds that do not count, seconds that count
    uneven_points, uneven_steps  (requests, context) of `uneven`, and the candidates there
    round_batch   requests of a traced round
    off           (requests, rounds without drafts before they draft)
    texts         requests whose texts are compared, `text_tokens` each
    draft_vocabulary
    draws         samples of one prompt whose distributions are compared
    train_layers, train_depth, train_sequences, train_length, train_share  of the training step
    policy        directory with the policy of session B, or the parts of its file; "": the quickstart's random model
    wide          sizes that the policy gets
    prompts, samples, response  of an RL step
    blocks        of three RL steps each: plain, frozen, co-trained, in an order that rotates
    stale_steps   RL steps of each kind with rollout.staleness=1
    engine        further options of SGLang, for all engines
    """

    device: str = "cuda"
    dtype: str = "bfloat16"
    shape: Shape = Shape()
    small_layers: int = 8
    steps: tuple[int, ...] = (0, 1, 2, 3, 5)
    drafts: int = 3
    pool: int = 340_000
    batches: tuple[int, ...] = (1, 8, 32, 64, 128, 256)
    contexts: tuple[int, ...] = (256, 1024, 4096)
    long: tuple[int, int] = (1, 16384)
    profile_seconds: int = 85
    points: tuple[tuple[int, int], ...] = ((64, 4096), (256, 1024), (64, 256), (8, 4096), (1, 16384))
    tokens: int = 128
    turns: int = 3
    settle: float = 0.5
    window: float = 1.5
    uneven_points: tuple[tuple[int, int], ...] = ((64, 128), (256, 128))
    uneven_steps: tuple[int, ...] = (0, 1, 2, 3, 4, 6)
    round_batch: int = 64
    off: tuple[int, int] = (256, 600)
    texts: tuple[int, ...] = (64, 256, 1)
    text_tokens: int = 128
    draft_vocabulary: int = 32768
    draws: int = 4096
    train_layers: int = 8
    train_depth: int = 3
    train_sequences: int = 8
    train_length: int = 1024
    train_share: float = 0.25
    policy: str = ""
    wide: Wide = Wide()
    prompts: int = 8
    samples: int = 4
    response: int = 3072
    blocks: int = 3
    stale_steps: int = 2
    engine: tuple[str, ...] = ()

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"


TINY = Plan(
    device="cpu",
    dtype="float32",
    shape=Shape(layers=2, hidden=32, ffn=96, heads=4, groups=2, vocab=512),
    small_layers=1,
    steps=(0, 1, 3),
    pool=8192,
    batches=(1, 4),
    contexts=(16, 64),
    long=(1, 128),
    profile_seconds=10,
    points=((4, 64), (1, 128)),
    tokens=32,
    turns=2,
    settle=0.2,
    window=0.5,
    uneven_points=((4, 16), (8, 16)),
    uneven_steps=(0, 1, 3),
    round_batch=4,
    off=(4, 20),
    texts=(4, 1),
    text_tokens=24,
    draft_vocabulary=64,
    draws=96,
    train_layers=2,
    train_sequences=4,
    train_length=32,
    wide=Wide(times=4, head_size=48, kv_heads=4, ffn=384, layers=13),
    prompts=2,
    samples=2,
    response=24,
    blocks=2,
    stale_steps=2,
)


def planned(*, cpu: bool = False, layers: int = 0, policy: str = "", engine: Sequence[str] = ()) -> Plan:
    """Return what to run.

    layers  of the model of session A, in place of 36; the smaller models have at most that many
    policy  as `Plan.policy`
    engine  further options of SGLang
    """
    plan = TINY if cpu else Plan()
    if layers:
        plan = replace(
            plan,
            shape=replace(plan.shape, layers=layers),
            small_layers=min(plan.small_layers, layers),
            train_layers=min(plan.train_layers, layers),
        )
    return replace(plan, policy=policy, engine=tuple(engine))


def to_json(plan: Plan) -> dict[str, Any]:
    """Return the plan as JSON would read it back, for comparisons."""
    values = {field.name: getattr(plan, field.name) for field in fields(plan)}
    return json.loads(json.dumps(values, default=vars))


def from_json(values: Mapping[str, Any]) -> Plan:
    """Return the plan that `to_json` described."""
    flat = {name: _tuples(value) for name, value in values.items() if name not in ("shape", "wide")}
    return Plan(**flat, shape=Shape(**values["shape"]), wide=Wide(**values["wide"]))


def _tuples(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_tuples(element) for element in value)
    return value
