"""Format a run's progress for its terminal: one line for each step, and at the end one about what speculation saved.

This file only makes texts. `run/recording.py` prints the lines, and `commands/report/` uses `saving` and `duration`.
The records are those of `metrics.jsonl`. `metric_names.toml` describes their keys. If a key is renamed, rename it in
this file, too: an unknown key is left out without an error.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from megatron_rlspec.texts import printable

# Key of a record -> the name shown for it, and its format. The most important first: what does not fit at the end of a
# line is left out.
SHOWN = {
    "rollout/reward": ("reward", "{:.3f}"),
    "rollout/failed_rewards": ("failed rewards", "{:.0f}"),
    "rollout/groups_without_advantage": ("no advantage", "{:.0%}"),
    "rollout/accept_length": ("accept length", "{:.2f}"),
    "policy/loss": ("loss", "{:.3f}"),
    "drafter/loss_1": ("drafter's loss", "{:.3f}"),
    "seconds_generate": ("generate", "{:.1f} s"),
    "seconds_train": ("train", "{:.1f} s"),
    "seconds_push": ("push", "{:.1f} s"),
    "rollout/truncated": ("truncated", "{:.0%}"),
    "rollout/response_length": ("length", "{:.0f}"),
    "rollout/tokens_per_second": ("tokens/s", "{:.0f}"),
}
# keys that are shown only for steps without a reward, as those of supervised training
LOSSES = ("policy/loss", "drafter/loss_1")
# keys that are left out if their value is 0, the normal one
WARNINGS = ("rollout/failed_rewards", "rollout/groups_without_advantage", "rollout/truncated")
WIDEST = 120  # characters of a line, at most
FRESH_SECONDS = "drafter/seconds_fresh"  # written by `extensions/drafter_schedules/fresh.py`
CLEAR_SHARE = 0.05  # of the decoding time: smaller savings are within the error of the estimate
Numbers = Mapping[str, float]  # the record of a step, by key


def line(step: int, total: int, values: Numbers, seconds_left: float = 0.0) -> str:
    """Return one step as a line of at most `WIDEST` characters. What does not fit is left out, but never the time left.

    step          from 0, as in the record; the line counts from 1
    total         steps of the run
    seconds_left  until the run's end; 0: not shown
    """
    end = f"  {duration(seconds_left)} left" if seconds_left else ""
    text = f"step {step + 1}/{total}"
    for part in _parts(values):
        if len(text) + 2 + len(part) + len(end) > WIDEST:
            break
        text += f"  {part}"
    return text + end


def _parts(values: Numbers) -> Iterator[str]:
    """Yield what a line shows of a record, the most important first."""
    for key, (name, number_format) in SHOWN.items():
        value = values.get(key, math.nan)  # A missing key counts as NaN, and NaN is left out.
        if math.isnan(value) or (key in WARNINGS and not value):
            continue
        if key in LOSSES and "rollout/reward" in values:
            continue
        part = f"{name} {number_format.format(value)}"
        if key == "seconds_train" and FRESH_SECONDS in values:
            part += f" ({values[FRESH_SECONDS]:.1f} s of it the fresh drafter)"
        yield part
    if shares := config_shares(values):
        yield shares


def duration(seconds: float) -> str:
    """Return a duration as `40 s`, `12 min` or `3 h 20 min`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 90:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min"


class Saving(NamedTuple):
    """How much of a run's decoding time speculation saved, as estimated (`speculation/learning.py`).

    spent   seconds of the engines' decode rounds, in the steps that have an estimate
    saved   seconds that decoding without drafts would have taken in addition; negative: speculation took longer
    steps   number of steps that have an estimate
    """

    spent: float
    saved: float
    steps: int

    @property
    def effect(self) -> str:
        """Return what speculation did, in words."""
        if abs(self.saved) < CLEAR_SHARE * self.spent:
            return "neither saved nor cost a clear part"
        if self.saved > 0:
            return f"saved about {self.saved:.1f} s"
        return f"cost about {-self.saved:.1f} s"


def saving(records: Sequence[Numbers]) -> Saving | None:
    """Return what speculation saved in a run, from the records of its steps; None if no step has an estimate."""
    # `speculation/learning.py` writes "spec/saved_seconds" only for steps with timed rounds. So the two keys below have
    # numbers in these records, too.
    estimated = [values for values in records if "spec/saved_seconds" in values]
    if not estimated:
        return None
    saved = sum(values["spec/saved_seconds"] for values in estimated)
    spent = sum(values["spec/rounds"] * values["spec/ms_per_round"] for values in estimated) / 1e3
    return Saving(spent, saved, len(estimated))


def saved_line(records: Sequence[Numbers]) -> str:
    """Return what speculation saved in a run as a line; "" if no step has an estimate."""
    total = saving(records)
    if total is None:
        return ""
    return (
        f"speculation {total.effect} of the engines' decoding in {total.steps} steps: {total.spent:.1f} s with drafts, "
        f"about {total.spent + total.saved:.1f} s without. This is an estimate from its rounds and their costs; "
        "prefill, and training and pushing the drafter, are not counted"
    )


def config_shares(values: Numbers) -> str:
    """Return each configuration's share of the decode rounds, the largest first: "k3 84%, off 16%"."""
    prefix = "spec/share_"
    shares = []
    for key, share in values.items():
        if key.startswith(prefix) and share > 0:
            shares.append((share, key.removeprefix(prefix)))
    shares.sort(key=lambda pair: -pair[0])
    return printable(", ".join(f"{name} {share:.0%}" for share, name in shares))
