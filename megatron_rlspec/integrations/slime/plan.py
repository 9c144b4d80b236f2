"""Decide what `rlspec slime` adds to a slime command line. Imports nothing of slime and starts nothing.

`launch.py` calls `plan` and writes the additions into the command. Flags are those of slime's parser; `--sglang-X`
becomes SGLang's option `--X`. slime's processes read `Additions.settings` by `options.py`, whose fields give the names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_rlspec.config import ConfigError, DrafterConfig, SpecSection
from megatron_rlspec.integrations.slime import refusals
from megatron_rlspec.integrations.slime.flags import (
    DRAFT_MODEL,
    NUM_STEPS,
    SAMPLER,
    Flags,
    read_flags,
    whole_number,
)
from megatron_rlspec.rollout.sglang.settings import Settings
from megatron_rlspec.speculation import graphs
from megatron_rlspec.speculation.graphs import chains
from megatron_rlspec.types import Verifier

HOOKS = "megatron_rlspec.integrations.slime.hooks"
ROLLOUT = "megatron_rlspec.integrations.slime.rollout"
# slime's flag -> our function, which calls the user's own
FUNCTIONS = {
    "--custom-megatron-init-path": f"{HOOKS}.init",
    "--custom-model-provider-path": f"{HOOKS}.model_provider",
    "--rollout-function-path": f"{ROLLOUT}.generate_rollout",
    "--eval-function-path": f"{ROLLOUT}.generate_rollout",
    "--custom-rollout-log-function-path": f"{ROLLOUT}.log_rollout",
}
ADAPTIVE = "--sglang-speculative-adaptive"
DELTA_NET = "--attention-output-gate"  # slime's models with delta nets have it, and no other
# Flags of models whose attention cannot be unrolled: `SlimeMTP` trains one depth through Megatron's own layer.
ONE_DEPTH = ("--multi-latent-attention", DELTA_NET)
# Flags that name the largest batch of a CUDA graph. Of those that are given, the first one here counts.
MAX_BATCH = (
    "--sglang-cuda-graph-max-bs-decode",
    "--sglang-cuda-graph-max-bs",
    "--sglang-max-running-requests",
)


@dataclass
class Additions:
    """What is added to a command.

    flags        words for slime's driver, after the user's own, which they replace where a flag is repeated
    settings     `args.rlspec` (`options.Options`), without the folder, which `launch.complete` adds
    environment  variables of all processes
    adaptive     content of the file of --sglang-speculative-adaptive-config; empty: no such file
    notes        one line for each decision that was made for the user
    """

    flags: list[str] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    adaptive: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add_flag(self, user_flags: Flags, name: str, *value: str) -> None:
        """Add a flag, unless the user's command has it."""
        if name not in user_flags:
            self.flags += [name, *value]


def plan(
    arguments: Sequence[str],
    drafter: DrafterConfig,
    candidate_steps: Sequence[int] | None = None,
    verifier: Verifier | None = None,
) -> Additions:
    """Decide what to add to `arguments`, which follow slime's driver.

    drafter          section [drafter]; a depth that is not set follows from the attention
    candidate_steps  numbers of drafts a round that the engines may choose from; None: the default, or one number if
                     SGLang cannot adapt it
    verifier         None: position_keyed, which gives each sample a seed, where the engines can do it

    Raises ConfigError if slime's own flags contradict one of these, or cannot be run with a drafter (`refusals.py`).
    """
    user_flags = read_flags(arguments)
    refusals.refuse(user_flags, drafter)
    added = Additions()
    verifier = _verifier(user_flags, verifier, added.notes)
    if verifier == "position_keyed":
        added.add_flag(user_flags, SAMPLER, "pytorch")
    fixed = _why_fixed(user_flags)
    start = _starting_steps(user_flags, candidate_steps)
    candidates = _candidates(candidate_steps, start, fixed)
    if fixed:
        added.notes.append(f"the number of draft steps is fixed at {start}: {fixed}")
    _add_speculation(added, user_flags, drafter, start)
    _add_functions(added, user_flags)
    if len(candidates) > 1 and ADAPTIVE not in user_flags:
        added.flags.append(ADAPTIVE)
        if f"{ADAPTIVE}-config" not in user_flags:
            added.adaptive = _captured_graphs(user_flags, candidates)
    added.environment |= Settings(verifier).to_environment()
    depth = _depth(user_flags, drafter, added.notes)
    added.settings |= {
        "drafter": drafter.model_dump() | {"depth": depth},
        "candidate_steps": candidates,
        "verifier": verifier,
    }
    return added


def _add_functions(added: Additions, user_flags: Flags) -> None:
    """Put our functions in place of the user's. Ours call the user's, which `Options.user_functions` names.

    Our flags are added although the user's command has them: they come last, and slime takes the last one.
    """
    user_functions = {}
    for flag, function in FUNCTIONS.items():
        if user_flags.get(flag):
            user_functions[flag] = user_flags[flag]
        added.flags += [flag, function]
    added.settings["user_functions"] = user_functions


def _add_speculation(
    added: Additions, user_flags: Flags, drafter: DrafterConfig, start: int
) -> None:
    """Add the flags by which slime builds an MTP layer and SGLang drafts chains of `start` tokens."""
    if drafter.kind == "eagle3":
        added.add_flag(user_flags, refusals.ALGORITHM, "EAGLE3")
        added.flags += [DRAFT_MODEL, drafter.path]  # `refusals.refuse` lets no other path pass
    else:
        added.add_flag(user_flags, "--mtp-num-layers", "1")
        added.add_flag(user_flags, refusals.ALGORITHM, "EAGLE")
    added.add_flag(user_flags, NUM_STEPS, str(start))
    added.add_flag(user_flags, "--sglang-speculative-eagle-topk", "1")
    # SGLang expects num_steps + 1 for chains (topk 1)
    added.add_flag(user_flags, "--sglang-speculative-num-draft-tokens", str(start + 1))


def _starting_steps(user_flags: Flags, candidate_steps: Sequence[int] | None) -> int:
    """Return the draft steps at the start: the command's own, the only candidate, or the default."""
    user_value = whole_number(user_flags.get(NUM_STEPS))
    if user_value is not None:
        return user_value
    if candidate_steps is not None and len(candidate_steps) == 1:
        return candidate_steps[0]
    return SpecSection().num_steps


def _candidates(candidate_steps: Sequence[int] | None, start: int, fixed: str) -> list[int]:
    """Return the draft steps that engines may choose from, ascending, `start` among them. Raises ConfigError.

    fixed  `_why_fixed`: why the engines cannot change the number; "" if they can
    """
    if candidate_steps is None:
        return [start] if fixed else sorted({*SpecSection().candidate_steps, start})
    listed = ",".join(map(str, candidate_steps))
    if fixed and len(candidate_steps) > 1:
        raise ConfigError(f"--candidate-steps {listed}: {fixed}; give one number")
    if not any(candidate_steps):
        raise ConfigError(
            "--candidate-steps 0 never drafts; run slime without rlspec, or give another number"
        )
    if start not in candidate_steps:
        raise ConfigError(
            f"--candidate-steps {listed}: expected {start} among them, the steps at the start ({NUM_STEPS})"
        )
    return sorted(candidate_steps)


def _verifier(user_flags: Flags, wanted: Verifier | None, notes: list[str]) -> Verifier:
    """Return the verifier. If the engines cannot do the default, position_keyed, `notes` gets a line that says why.

    wanted  of --verifier; None: not given. Raises ConfigError for one that the engines cannot do.
    """
    reason = refusals.why_not_keyed(user_flags)
    if wanted == "position_keyed" and reason:
        raise ConfigError(f"--verifier position_keyed: {reason}; give --verifier target_only")
    if wanted or not reason:
        return wanted or "position_keyed"
    notes.append(f"the verifier is target_only, so texts depend on drafts: {reason}")
    return "target_only"


def _why_fixed(user_flags: Flags) -> str:
    """Return why the number of steps cannot change while the engines run; "" if it can."""
    flag = refusals.attention_ranks(user_flags)
    if flag:
        return f"under {flag} SGLang does not adapt it"
    if DELTA_NET in user_flags:
        return "a changing number was never tested with the state of this model's delta nets"
    return ""


def _depth(user_flags: Flags, drafter: DrafterConfig, notes: list[str]) -> int:
    """Return the depth that the drafter is trained to: 1 where the attention allows no other. Raises ConfigError."""
    limiting = [flag for flag in ONE_DEPTH if flag in user_flags]
    if not limiting:
        return drafter.depth
    if "depth" not in drafter.model_fields_set:
        notes.append(f"the drafter is trained to depth 1: {limiting[0]} supports no other")
    elif drafter.depth > 1:
        raise ConfigError(
            f"{limiting[0]} with depth={drafter.depth}: it supports only depth 1; set --drafter.depth 1"
        )
    return 1


def _captured_graphs(user_flags: Flags, candidates: Sequence[int]) -> dict[str, Any]:
    """Return the content of SGLang's adaptive file: from each batch size on, the step counts to capture graphs for.

    SGLang reads the keys as batch sizes (`speculation/graphs.py`, `adaptive_config`).
    """
    gpus = whole_number(user_flags.get("--rollout-num-gpus-per-engine")) or 1
    max_batch = 512 if gpus >= 4 else 256  # SGLang's own on GPUs of 60 to 160 GiB
    # the last assignment stays: that of the first flag of MAX_BATCH that is given
    for flag in reversed(MAX_BATCH):
        max_batch = whole_number(user_flags.get(flag)) or max_batch
    layers = whole_number(user_flags.get("--num-layers"))
    if layers is None:  # which counts pay at which batch is not known: capture all at every batch
        return {"1": {"candidate_steps": list(candidates)}}
    largest = graphs.largest_batches(chains(candidates), max_batch, layers)
    return graphs.adaptive_config(largest, max_batch)
