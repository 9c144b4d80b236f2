"""What `rlspec slime` refuses in a command line of slime's, each in one line, before anything starts.

`hooks.py` asks again on the train ranks, for runs that were started by a YAML file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from megatron_rlspec.config import ConfigError
from megatron_rlspec.conversion.eagle3 import check_drafter
from megatron_rlspec.models.config import ModelConfigError
from megatron_rlspec.models.directory import read_object
from megatron_rlspec.rollout.sglang.scheduler.versions import without_eagle3
from megatron_rlspec.rollout.sglang.settings import APART, ATTENTION_RANKS, MIXED_CHUNK
from megatron_rlspec.speculation.cost_table import CostTable
from megatron_rlspec.speculation.rule import SpecRule
from megatron_rlspec.types import OFF, SpecConfig

EAGLE3 = "EAGLE3"  # SGLang's name of the algorithm
DRAFT_MODEL = "--sglang-speculative-draft-model-path"
MIXED = "--sglang-enable-mixed-chunk"
SAMPLER = "--sglang-sampling-backend"
RELATIVES = ("miles", "vime")
FLOAT16 = "--fp16: the drafter is trained in bfloat16 or float32; expected --bf16, or run slime without rlspec"
HIDDEN = (
    "holds no MTP layer itself, so slime would train it with the policy; run slime without rlspec"
)
LOSSY = (
    "--sglang-speculative-accept-threshold-single",
    "--sglang-speculative-accept-threshold-acc",
)


def refuse(given: Mapping[str, str | None], drafter: Mapping[str, Any]) -> None:
    """Raise ConfigError for flags of slime that this drafter cannot be trained or served with."""
    if (servers := given.get("--prefill-num-servers")) not in (None, "0"):
        raise ConfigError(
            f"--prefill-num-servers {servers}: {APART}; remove the flag, or run slime without rlspec"
        )
    if _apart(config := given.get("--sglang-config") or ""):
        raise ConfigError(
            f"--sglang-config {config}: {APART}; remove them, or run slime without rlspec"
        )
    for flag in ("--sglang-enable-dp-attention", "--sglang-attn-dp-size"):
        if flag in given and given[flag] != "1":
            raise ConfigError(
                f"{flag}: {ATTENTION_RANKS}; remove the flag, or run slime without rlspec"
            )
    if given.get("--spec") == "slime_plugins.models.qwen3_5_vl":
        raise ConfigError(f"--spec {given['--spec']}: the model {HIDDEN}")
    if "--fp16" in given:
        raise ConfigError(FLOAT16)
    if MIXED in given:
        raise ConfigError(f"{MIXED}: {MIXED_CHUNK}; remove the flag, or run slime without rlspec")
    for flag in LOSSY:
        if flag in given and given[flag] not in (None, "1", "1.0"):
            raise ConfigError(
                f"{flag} {given[flag]} accepts tokens the policy would not draw; set 1.0"
            )
    algorithm = given.get("--sglang-speculative-algorithm")
    if drafter["kind"] == "eagle3":
        if algorithm not in (None, EAGLE3):
            raise ConfigError(
                f"--sglang-speculative-algorithm {algorithm} with --drafter.kind eagle3; set {EAGLE3}"
            )
        theirs = given.get(DRAFT_MODEL)
        if theirs is not None and str(Path(theirs).absolute()) != drafter["path"]:
            raise ConfigError(
                f"{DRAFT_MODEL} {theirs}, but --drafter.path {drafter['path']}; give one of them"
            )
        stages = whole_number(given.get("--pipeline-model-parallel-size"))
        if problem := outside(
            given.get("--mtp-num-layers"), stages, given.get("--update-weight-mode")
        ):
            raise ConfigError(problem)
        if "--allgather-cp" in given:
            raise ConfigError(
                "--allgather-cp with --drafter.kind eagle3 is not implemented; remove the flag"
            )
    elif algorithm not in (None, "EAGLE", "NEXTN"):
        remedy = (
            "; for a drafter of its own give --drafter.kind eagle3" if algorithm == EAGLE3 else ""
        )
        raise ConfigError(
            f"--sglang-speculative-algorithm {algorithm} does not draft with the MTP layer; set EAGLE{remedy}"
        )
    elif given.get("--mtp-num-layers", "1") != "1":
        raise ConfigError(
            f"--mtp-num-layers {given['--mtp-num-layers']}: rlspec repeats one layer; set 1"
        )
    sizes = (
        "--expert-model-parallel-size",
        "--expert-tensor-parallel-size",
        "--tensor-model-parallel-size",
    )
    expert, expert_tensor, tensor = (whole_number(given.get(flag)) for flag in sizes)
    if problem := split_experts(
        expert, expert_tensor if "--num-experts" in given else None, tensor
    ):
        raise ConfigError(problem)


def _apart(config: str) -> bool:
    """Return whether a file of --sglang-config has engines that prefill and decode apart; False if it is not here."""
    try:
        models = yaml.safe_load(Path(config).read_text())["sglang"]
        groups = [
            group
            for model in models
            for group in model.get("server_groups") or model.get("engine_groups") or []
        ]
        return any(group["worker_type"] in ("prefill", "decode") for group in groups)
    except (OSError, UnicodeError, yaml.YAMLError, LookupError, TypeError, AttributeError):
        return False  # slime itself says what is wrong with it


def refuse_relative(driver: str) -> None:
    """Raise ConfigError for the driver of a relative of slime's, whose package lies beside it under another name."""
    folder = Path(driver).parent
    for name in RELATIVES:
        if (folder / name / "backends").is_dir() and not (folder / "slime").is_dir():
            raise ConfigError(
                f"{driver} is {name}'s, which rlspec does not run inside; expected slime's (docs/slime.md)"
            )


def refuse_keyed(given: Mapping[str, str | None]) -> None:
    """Raise ConfigError for flags of slime with which engines do not sample by the seed of a sample."""
    # others end an engine at a seed beside top-p or top-k
    if (sampler := given.get(SAMPLER, "pytorch")) != "pytorch":
        raise ConfigError(
            f"{SAMPLER} {sampler} samples without seeds; --verifier position_keyed expects pytorch"
        )
    if (seed := given.get("--rollout-seed") or "0").startswith("-"):
        raise ConfigError(f"--rollout-seed {seed}: --verifier position_keyed expects 0 or more")


def outside(mtp_layers: Any, stages: int | None, mode: str | None) -> str:
    """Return why an EAGLE-3 drafter is refused beside these MTP layers, pipeline stages and weight updates, or ""."""
    if mtp_layers:
        return f"--mtp-num-layers {mtp_layers}: --drafter.kind eagle3 trains no MTP layer; remove the flag"
    if (stages or 1) > 1:
        needed = "expected 1: --drafter.kind eagle3 reads hidden states of several layers, which must be on one rank"
        return f"--pipeline-model-parallel-size {stages}: {needed}"
    if mode == "delta":
        return "--update-weight-mode delta: an EAGLE-3 drafter is pushed in full updates only; expected full"
    return ""


def split_experts(expert: int | None, expert_tensor: int | None, tensor: int | None) -> str:
    """Return why these parallel sizes of a model with experts are refused, or "". None means Megatron's default.

    Megatron sums the gradients of experts over the experts' own replicas only under expert parallelism. Without it,
    copies of one expert would learn from different tokens.
    """
    if (expert or 1) == 1 and expert_tensor is not None and expert_tensor != (tensor or 1):
        sizes = f"--expert-tensor-parallel-size {expert_tensor} with --tensor-model-parallel-size {tensor or 1}"
        return f"{sizes} needs --expert-model-parallel-size above 1; set it, or set the first two equal"
    return ""


def whole_number(value: str | None) -> int | None:
    """Return a flag's whole number; None for anything else, which slime's own parser refuses."""
    return int(value) if value and value.isdigit() else None


def engine_gpus(given: Mapping[str, str | None]) -> int:
    """Return the number of an engine's GPUs, which is its tensor-parallel size."""
    return whole_number(given.get("--rollout-num-gpus-per-engine")) or 1


def check_table(cost_table: str, steps: Sequence[int], tp: int = 1) -> None:
    """Raise CostTableError or ConfigError if the rule of engines of size `tp` could not read the table."""
    size = CostTable.load(cost_table).of_engine(tp).tps[0]
    try:
        SpecRule.from_json(rule(cost_table, steps) | {"tp": size})
    except ValueError as error:
        raise ConfigError(f"--cost-table {cost_table}: {error}") from None


def check_target(given: Mapping[str, str | None], drafter: str) -> None:
    """Raise ConfigError if the EAGLE-3 drafter does not fit the policy of --hf-checkpoint, if this machine has that."""
    policy = given.get("--hf-checkpoint") or ""
    if not Path(policy, "config.json").is_file():
        return
    try:
        target = read_object(Path(policy, "config.json"))
        check_drafter(drafter, target, policy)
    except ModelConfigError as error:
        raise ConfigError(f"--drafter.path: {error}") from None
    if problem := without_eagle3(target):
        raise ConfigError(f"--drafter.kind eagle3: {problem}")


def rule(cost_table: str, steps: Sequence[int]) -> dict[str, Any]:
    """Return the argument of `speculation.rule.SpecRule.from_json`; 0 steps mean off."""
    candidates = [SpecConfig(n) if n else OFF for n in sorted(steps)]
    return {
        "table": cost_table,
        "candidates": [[c.num_steps, c.topk, c.num_draft_tokens] for c in candidates],
    }


def flags(command: Sequence[str]) -> dict[str, str | None]:
    """Read `--flag value`, `--flag=value` and bare flags. Of a repeated flag the last one counts, as in argparse."""
    found: dict[str, str | None] = {}
    for i, word in enumerate(command):
        if not word.startswith("--"):
            continue
        name, equals, value = word.partition("=")
        following = command[i + 1] if i + 1 < len(command) else "--"
        found[name] = value if equals else (None if following.startswith("--") else following)
    return found
