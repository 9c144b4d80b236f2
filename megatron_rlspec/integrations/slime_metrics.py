"""Acceptance inside slime: counted from SGLang's histogram, reported as ratios of sums. Runs in slime's RolloutManager.

slime keeps `meta_info` only as far as `Sample.SpecInfo.add` reads it, and reads keys that SGLang no longer sends. The
manager imports this module, as its rollout function, before the first sample is drawn.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from slime.observability import logging_utils
from slime.utils.misc import load_function
from slime.utils.types import Sample

SLIMES_OWN = "slime.rollout.sglang_rollout.generate_rollout"
_add = Sample.SpecInfo.add


def generate_rollout(args: Namespace, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """`--rollout-function-path` and `--eval-function-path`: the user's own, or slime's."""
    inner = getattr(args, "rlspec_inner_rollout_path", None) or SLIMES_OWN
    if evaluation:
        inner = getattr(args, "rlspec_inner_eval_path", None) or inner
    return load_function(inner)(args, rollout_id, data_source, evaluation)


def log_rollout(rollout_id: int, args: Namespace, samples: Sequence[Sample], extra: Any, seconds: float) -> bool:
    """`--custom-rollout-log-function-path`: acceptance in slime's own logging; then slime's metrics as ever."""
    metrics = {f"rollout/{name}": value for name, value in acceptance(s.spec_info for s in samples).items()}
    if metrics:
        logging_utils.log(args, {**metrics, "rollout/step": rollout_id}, step_key="rollout/step")
    inner = getattr(args, "rlspec_inner_log_path", None)
    return bool(load_function(inner)(rollout_id, args, samples, extra, seconds)) if inner else False


def acceptance(infos: Iterable[Any]) -> dict[str, float]:
    """Of all samples together: tokens per round, and per depth d the share of rounds that accepted draft d among those
    that accepted d - 1. The latter is a lower bound where engines drafted fewer than d steps in some rounds.
    """
    total: list[int] = []
    for info in infos:
        histogram = getattr(info, "histogram", [])
        total += [0] * (len(histogram) - len(total))
        for accepted, rounds in enumerate(histogram):
            total[accepted] += rounds
    rounds = sum(total)
    if not rounds:
        return {}
    drafts = sum(accepted * n for accepted, n in enumerate(total))
    metrics = {"accept_length": 1 + drafts / rounds, "accept_rounds": float(rounds)}
    for depth in range(1, len(total)):
        reached = sum(total[depth - 1 :])
        metrics[f"accept_depth_{depth}"] = sum(total[depth:]) / reached if reached else 0.0
    return metrics


def add(self: Any, meta_info: Mapping[str, Any]) -> None:
    """In place of `SpecInfo.add`: slime's counts from the keys that SGLang sends, and the histogram."""
    renamed = dict(meta_info)
    for theirs, ours in (
        ("spec_num_correct_drafts", "spec_accept_token_num"),
        ("spec_num_proposed_drafts", "spec_draft_token_num"),
    ):
        if theirs in renamed:
            renamed.setdefault(ours, renamed[theirs])
    _add(self, meta_info=renamed)
    histogram = list(getattr(self, "histogram", []))
    for accepted, rounds in enumerate(meta_info.get("spec_correct_drafts_histogram") or []):
        histogram += [0] * (accepted + 1 - len(histogram))
        histogram[accepted] += rounds
    self.histogram = histogram


Sample.SpecInfo.add = add
