"""What `rlspec slime` refuses in a slime command line, each in one line, before anything starts.

`plan.py` calls `refuse`, and asks `attention_ranks` and `why_not_keyed`, which refuse nothing. `launch.py` calls
`check_eagle3`.
"""

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
REMOVE = "remove the flag, or run slime without rlspec"
# The end of a message that begins with a model; `hooks.model_provider` raises it, too, when the model is built.
HIDDEN_MTP = (
    "holds no MTP layer itself, so slime would train it with the policy; run slime without rlspec"
)
_NEVER_RUN = "never run with a drafter that is trained"
_STAGES = "virtual pipeline stages are not supported with a drafter"
_LOSSY = "accepts tokens the policy would not draw"
# A flag of slime -> the values that it may have, and why not others. Without values, the flag may not be given. Values
# are compared as texts: 1.00 is refused where 1.0 is allowed.
Limits = dict[str, tuple[tuple[str, ...], str]]
LIMITS: Limits = {
    "--prefill-num-servers": (("0",), APART),
    "--sglang-enable-mixed-chunk": ((), MIXED_CHUNK),
    "--sglang-speculative-use-rejection-sampling": ((), REJECTION),
    "--sglang-enable-two-batch-overlap": ((), _NEVER_RUN),
    "--sglang-enable-multi-layer-eagle": ((), _NEVER_RUN),
    "--sglang-enable-pdmux": ((), _NEVER_RUN),
    "--sglang-speculative-eagle-topk": (("1",), "drafts are chains"),
    "--sglang-speculative-accept-threshold-single": (("1.0", "1"), _LOSSY),
    "--sglang-speculative-accept-threshold-acc": (("1.0", "1"), _LOSSY),
    "--num-layers-per-virtual-pipeline-stage": ((), _STAGES),
    "--num-virtual-stages-per-pipeline-rank": ((), _STAGES),
    "--update-weight-mode": (("full",), "engines are compared with full updates"),
    "--fp16": ((), "the drafter is trained in bfloat16 or float32"),
    "--allgather-cp": ((), "the drafter learns from sequences that are split in zigzag"),
    "--release-train": ((), _NEVER_RUN),
}
MTP_LIMITS: Limits = {
    ALGORITHM: (
        ("EAGLE", "NEXTN"),
        "an MTP layer drafts, or give --drafter.kind eagle3 for a drafter of its own",
    ),
    "--mtp-num-layers": (("1",), "rlspec repeats one layer"),
    "--only-train-params-name-list": ((), "it would let the policy's optimizer train the drafter"),
}
EAGLE3_LIMITS: Limits = {
    ALGORITHM: (("EAGLE3",), "--drafter.kind is eagle3"),
    DRAFT_MODEL: ((), "give it as --drafter.path"),
    "--mtp-num-layers": ((), "--drafter.kind eagle3 trains no MTP layer"),
}


def refuse(user_flags: Flags, drafter: DrafterConfig) -> None:
    """Raise ConfigError for flags of slime that this drafter cannot be trained or served with.

    A file of --sglang-config that this machine does not have is not checked.
    """
    of_kind = EAGLE3_LIMITS if drafter.kind == "eagle3" else MTP_LIMITS
    for flag, (values, why) in {**LIMITS, **of_kind}.items():
        if flag in user_flags and user_flags[flag] not in values:
            remedy = f"set {values[0]}" if values else REMOVE
            given = f"{flag} {user_flags[flag]}" if user_flags[flag] else flag
            raise ConfigError(f"{given}: {why}; {remedy}")
    # slime's file of engine groups. A group of prefill engines is found in the text of the parsed YAML, at any depth.
    engines = Path(user_flags.get("--sglang-config") or "")
    if engines.is_file() and "'worker_type': 'prefill'" in str(yaml.safe_load(engines.read_text())):
        raise ConfigError(f"--sglang-config {engines}: {APART}; {REMOVE}")
    if user_flags.get("--spec") == "slime_plugins.models.qwen3_5_vl":
        raise ConfigError(f"--spec {user_flags['--spec']}: the model {HIDDEN_MTP}")
    _refuse_expert_copies(user_flags)


def _refuse_expert_copies(user_flags: Flags) -> None:
    """Raise ConfigError if experts have another tensor-parallel size than the model, without expert parallelism.

    Megatron sums the gradients of experts over the experts' own replicas only under expert parallelism. Without it,
    copies of one expert would learn from different tokens.
    """
    if "--num-experts" not in user_flags:
        return
    # The defaults are Megatron's.
    tensor = whole_number(user_flags.get("--tensor-model-parallel-size")) or 1
    expert = whole_number(user_flags.get("--expert-model-parallel-size")) or 1
    expert_tensor = whole_number(user_flags.get("--expert-tensor-parallel-size")) or tensor
    if expert == 1 and expert_tensor != tensor:
        raise ConfigError(
            f"--expert-tensor-parallel-size {expert_tensor} with --tensor-model-parallel-size {tensor} needs "
            "--expert-model-parallel-size above 1; set it, or set the first two equal"
        )


def attention_ranks(user_flags: Flags) -> str:
    """Return the flag by which an engine's ranks attend to requests of their own; "" if there is none."""
    for flag in ("--sglang-enable-dp-attention", "--sglang-attn-dp-size"):
        if flag in user_flags and user_flags[flag] != "1":
            return flag
    return ""


def why_not_keyed(user_flags: Flags) -> str:
    """Return why these engines cannot run the verifier position_keyed; "" if they can.

    position_keyed gives each sample a seed.
    """
    flag = attention_ranks(user_flags)
    if flag:
        return f"position_keyed was never run with {flag}"
    # Other samplers end an engine at a request that has a seed and top-p or top-k.
    sampler = user_flags.get(SAMPLER, "pytorch")
    if sampler != "pytorch":
        return f"{SAMPLER} {sampler} samples without seeds; position_keyed expects pytorch"
    return ""


def check_eagle3(user_flags: Flags, drafter_path: str) -> dict[str, str]:
    """Raise ConfigError if the EAGLE-3 drafter does not fit the policy of --hf-checkpoint.

    Returns the environment variables that its engines need. Where this machine does not have the policy, nothing is
    checked and {} is returned: the train ranks check it again (`eagle3.SlimeEagle3`).
    """
    policy = user_flags.get("--hf-checkpoint") or ""
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
