"""Options that a user gave and that have no effect: beside other settings (`Needs`), or on a command (`unread`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic.fields import FieldInfo

from megatron_rlspec.config.base import Needs, Section

# Prefixes of options that a command does not read.
UNREAD = {
    "train": "sft. answer. replay.fresh_drafter replay.policy_step",
    "sft": "algorithm. answer. replay. health.logprob_gap data.path "
    "rollout.prompts_per_step rollout.samples_per_prompt rollout.staleness rollout.partial "
    "rollout.mask_offpolicy drafter.reward_ drafter.share drafter.update_ "
    "drafter.overlap drafter.replay train.steps train.updates_per_rollout train.eval_every "
    "train.drift_every train.record",
    "answer": "model.moe_ data.eval_ data.shuffle reward. rollout.function "
    "rollout.prompts_per_step rollout.restarts rollout.staleness rollout.partial "
    "rollout.mask_offpolicy tail. "
    "placement. push. health. algorithm. optimizer. drafter.train "
    "drafter.fresh drafter.depth drafter.loss "
    "drafter.reward_ drafter.share drafter.update_ drafter.overlap drafter.replay drafter.lr "
    "drafter.warmup_steps parallel. sft. train.steps train.updates_per_rollout train.tokens train.deterministic "
    "train.run_dir train.save_every train.resume train.eval_ train.drift_every train.record "
    "train.max_bad_steps train.export_every train.save_best log. replay.",
    "replay": "sft. answer. drafter.fresh health.logprob_gap data.eval_sets train.eval_ train.drift_every",
}
# What is read only where engines generate.
GENERATING = "data.eval_ train.eval_ data.label_key data.metadata_key reward. rollout. spec. tail. placement. push."
DATA = "data."
POLICY = "optimizer.lr optimizer.warmup_steps optimizer.weight_decay model.moe_"


def unread(config: Any, command: str, name: str) -> str:
    """Return where the option `name` has no effect, such as `rlspec sft`; "" if this run of the command reads it."""
    prefixes, found = UNREAD[command], f"rlspec {command}"
    if name.startswith(tuple(prefixes.split())):
        return found
    frozen = command == "replay" or (command == "sft" and config.sft.drafter_only)
    if frozen and name.startswith(tuple(POLICY.split())):
        return f"{found}, which trains the drafter only"
    # The temperature is that of the drafter's loss; the lengths of prompt and response fit into model.max_length.
    taught = name == "rollout.max_new_tokens" or (frozen and name == "rollout.temperature")
    if command == "sft" and not config.generates("sft") and not taught:
        if name.startswith(tuple(GENERATING.split())):
            return f"{found} without evaluations by an engine (sft.eval_every, data.eval_path)"
    if command == "replay" and config.replay.policy_step < 0 and not taught:
        drawn = config.drafter.separate or config.drafter.learns_part or config.replay.fresh_drafter
        seed = name == "train.seed" and not drawn
        if seed or name.startswith((DATA, *GENERATING.split())):
            return "a replay that follows the recorded rollouts"
    return ""


def useless(config: Section, given: Mapping[str, int]) -> Iterator[str]:
    """Yield a line for every option that the other settings leave without effect.

    given  options that a user gave -> rank of their source. Where a source of higher rank switched off what an option
           needs, the option is no mistake: a command line changes what a file says.
    """
    for name, rank in given.items():
        value, field = option(config, name)
        if field is None or value == field.default:
            continue
        for needs in lacking(config, field):
            others = list(dict.fromkeys(_name(setting) for setting in needs.settings))
            if not any(given.get(other, 0) > rank for other in others):
                now = " and ".join(f"{other}={_text(option(config, other)[0])}" for other in others)
                yield f"{name}={_text(value)} has no effect while {now}"


def lacking(config: Section, field: FieldInfo) -> Iterator[Needs]:
    """Yield what a field needs and the other settings do not give."""
    for needs in field.metadata:
        if isinstance(needs, Needs) and not any(
            _holds(config, setting) for setting in needs.settings
        ):
            yield needs


def option(config: Section, name: str) -> tuple[Any, FieldInfo | None]:
    """Return the value and the field of `section.key`; (None, None) for a name that is no option."""
    section, _, key = name.partition(".")
    table = getattr(config, section, None)
    if not isinstance(table, Section) or key not in type(table).model_fields:
        return None, None
    return getattr(table, key), type(table).model_fields[key]


def _text(value: Any) -> str:
    text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return (text.lower() if isinstance(value, bool) else text)[:100]


def _name(setting: str) -> str:
    return setting.partition("=")[0].removesuffix("!")


def _holds(config: Section, setting: str) -> bool:
    name, equals, wanted = setting.partition("=")
    value, field = option(config, name.removesuffix("!"))
    if field is None:
        raise ValueError(f"Needs({setting!r}): no such option")
    if not equals:
        return value if isinstance(value, bool) else bool(value != field.default)
    texts = [str(part) for part in value] or [""] if isinstance(value, tuple) else [str(value)]
    return (wanted in texts) != name.endswith("!")
