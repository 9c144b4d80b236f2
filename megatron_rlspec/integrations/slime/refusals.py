"""What `rlspec slime` refuses in a slime command line, each in one line, before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from megatron_rlspec.config import ConfigError, DrafterConfig
from megatron_rlspec.conversion.eagle3 import check_drafter, environment_of
from megatron_rlspec.integrations.slime.flags import (
    DRAFT_MODEL,
    SAMPLER,
    Flags,
    whole_number,
)
from megatron_rlspec.models.config import CheckpointError
from megatron_rlspec.models.directory import read_config
from megatron_rlspec.rollout.sglang.scheduler.versions import without_eagle3
from megatron_rlspec.rollout.sglang.settings import APART, MIXED_CHUNK, REJECTION

ALGORITHM = "--sglang-speculative-algorithm"
MULTI_LAYER = "--sglang-enable-multi-layer-eagle"
UNSUPPORTED = {
    "--sglang-enable-mixed-chunk": MIXED_CHUNK,
    "--sglang-speculative-use-rejection-sampling": REJECTION,
}
REMOVE = "remove the flag, or run slime without rlspec"
HIDDEN_MTP = (
    "holds no MTP layer itself, so slime would train it with the policy; run slime without rlspec"
)
LOSSY = (
    "--sglang-speculative-accept-threshold-single",
    "--sglang-speculative-accept-threshold-acc",
)
VIRTUAL_STAGES = (
    "--num-layers-per-virtual-pipeline-stage",
    "--num-virtual-stages-per-pipeline-rank",
)


def refuse(given: Flags, drafter: DrafterConfig) -> None:
    """Raise ConfigError for flags of slime that this drafter cannot be trained or served with."""
    servers = given.get("--prefill-num-servers")
    if servers not in (None, "0"):
        raise ConfigError(f"--prefill-num-servers {servers}: {APART}; {REMOVE}")
    engines = given.get("--sglang-config") or ""
    if _prefills_apart(engines):
        raise ConfigError(f"--sglang-config {engines}: {APART}; {REMOVE}")
    if given.get("--spec") == "slime_plugins.models.qwen3_5_vl":
        raise ConfigError(f"--spec {given['--spec']}: the model {HIDDEN_MTP}")
    if "--fp16" in given:
        raise ConfigError(
            "--fp16: the drafter is trained in bfloat16 or float32; expected --bf16, or run slime without rlspec"
        )
    for flag, why in UNSUPPORTED.items():
        if flag in given:
            raise ConfigError(f"{flag}: {why}; {REMOVE}")
    for flag in LOSSY:
        if given.get(flag) not in (None, "1", "1.0"):
            raise ConfigError(
                f"{flag} {given[flag]} accepts tokens the policy would not draw; set 1.0"
            )
    for flag in VIRTUAL_STAGES:
        if flag in given:
            raise ConfigError(
                f"{flag}: virtual pipeline stages are not supported with a drafter; remove the flag"
            )
    if drafter.kind == "eagle3":
        _refuse_beside_eagle3(given, drafter)
    else:
        _refuse_beside_mtp(given)
    _refuse_expert_copies(given)


def _prefills_apart(path: str) -> bool:
    """Return whether a file of --sglang-config has engines that prefill and decode apart; False if it is not here."""
    if not Path(path).is_file():
        return False
    for model in yaml.safe_load(Path(path).read_text())["sglang"]:
        for group in model.get("server_groups") or model.get("engine_groups") or []:
            if group["worker_type"] in ("prefill", "decode"):
                return True
    return False


def _refuse_beside_mtp(given: Flags) -> None:
    algorithm = given.get(ALGORITHM)
    if algorithm not in (None, "EAGLE", "NEXTN"):
        remedy = "set EAGLE"
        if algorithm == "EAGLE3":
            remedy = "set EAGLE; for a drafter of its own give --drafter.kind eagle3"
        raise ConfigError(f"{ALGORITHM} {algorithm} does not draft with the MTP layer; {remedy}")
    if given.get("--mtp-num-layers", "1") != "1":
        raise ConfigError(
            f"--mtp-num-layers {given['--mtp-num-layers']}: rlspec repeats one layer; set 1"
        )


def _refuse_beside_eagle3(given: Flags, drafter: DrafterConfig) -> None:
    algorithm = given.get(ALGORITHM)
    if algorithm not in (None, "EAGLE3"):
        raise ConfigError(f"{ALGORITHM} {algorithm} with --drafter.kind eagle3; set EAGLE3")
    served = given.get(DRAFT_MODEL)
    if served is not None and str(Path(served).absolute()) != drafter.path:
        raise ConfigError(
            f"{DRAFT_MODEL} {served}, but --drafter.path {drafter.path}; give one of them"
        )
    layers = given.get("--mtp-num-layers")
    if layers:
        raise ConfigError(
            f"--mtp-num-layers {layers}: --drafter.kind eagle3 trains no MTP layer; remove the flag"
        )
    if given.get("--update-weight-mode") == "delta":
        raise ConfigError(
            "--update-weight-mode delta: an EAGLE-3 drafter is pushed in full updates only; expected full"
        )
    if "--allgather-cp" in given:
        raise ConfigError(
            "--allgather-cp with --drafter.kind eagle3 is not implemented; remove the flag"
        )


def _refuse_expert_copies(given: Flags) -> None:
    """Refuse experts that are split otherwise than the rest of the model, without expert parallelism.

    Megatron sums the gradients of experts over the experts' own replicas only under expert parallelism. Without it,
    copies of one expert would learn from different tokens.
    """
    if "--num-experts" not in given:
        return
    tensor = whole_number(given.get("--tensor-model-parallel-size")) or 1
    expert = whole_number(given.get("--expert-model-parallel-size")) or 1
    expert_tensor = whole_number(given.get("--expert-tensor-parallel-size")) or tensor
    if expert == 1 and expert_tensor != tensor:
        raise ConfigError(
            f"--expert-tensor-parallel-size {expert_tensor} with --tensor-model-parallel-size {tensor} needs "
            "--expert-model-parallel-size above 1; set it, or set the first two equal"
        )


def attention_ranks(given: Flags) -> str:
    """Return the flag by which an engine's ranks attend to requests of their own; "" if there is none."""
    for flag in ("--sglang-enable-dp-attention", "--sglang-attn-dp-size"):
        if flag in given and given[flag] != "1":
            return flag
    return ""


def why_not_keyed(given: Flags) -> str:
    """Return why these engines cannot sample by the seed of a sample; "" if they can."""
    flag = attention_ranks(given)
    if flag:
        return f"position_keyed was never run with {flag}"
    if MULTI_LAYER in given:
        return f"{MULTI_LAYER} drafts without the seeds of position_keyed"
    topk = given.get("--sglang-speculative-eagle-topk", "1")
    if topk != "1":
        return f"--sglang-speculative-eagle-topk {topk}: position_keyed drafts chains only"
    # Other samplers end an engine at a seed beside top-p or top-k.
    sampler = given.get(SAMPLER, "pytorch")
    if sampler != "pytorch":
        return f"{SAMPLER} {sampler} samples without seeds; position_keyed expects pytorch"
    return ""


def refuse_unfit_eagle3(given: Flags, drafter_path: str) -> dict[str, str]:
    """Raise ConfigError if the EAGLE-3 drafter does not fit the policy of --hf-checkpoint, if this machine has that.

    Returns the variables that its engines need.
    """
    policy = given.get("--hf-checkpoint") or ""
    if not Path(policy, "config.json").is_file():
        return {}
    try:
        hf_config: dict[str, Any] = read_config(Path(policy))
        typed = check_drafter(drafter_path, hf_config, policy)
    except CheckpointError as error:
        raise ConfigError(f"--drafter.path: {error}") from None
    if problem := without_eagle3(hf_config):
        raise ConfigError(f"--drafter.kind eagle3: {problem}")
    return environment_of(typed, hf_config)
