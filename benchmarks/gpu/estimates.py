"""What was expected of each figure before it was measured, and why. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]


@dataclass(frozen=True)
class Estimate:
    """An expected range, and its origin."""

    low: float
    high: float
    origin: str

    def __str__(self) -> str:
        return f"{self.low:g}" if self.low == self.high else f"{self.low:g} to {self.high:g}"


_TABLE = "round times of an H100 at short contexts, the KV cache at 2.7 TB/s, three of four first drafts accepted"
_MEASURED = "measured on an H100 without Transformer Engine: 177 ms for all samples, 4 layers"
_STEP = "rounds as measured at short contexts, 3,072 tokens a response, training at 400 TFLOP/s"
_UNEVEN = "simulated with an H100's rounds; 1.07 and 1.10 for the quickstart's policy"
# Of the default plan on an H100 or H200. (part, what) -> estimate. The parts profile and steady know their own.
ESTIMATES: dict[tuple[str, str], Estimate] = {
    ("engines-wide", "answer after"): Estimate(60, 130, "measured on an H100: 95 to 103 s"),
    ("steady", "64 requests of 4,096: adaptive / off"): Estimate(1.9, 2.2, _TABLE),
    ("steady", "256 requests of 1,024: adaptive / off"): Estimate(1.4, 1.55, _TABLE),
    ("steady", "64 requests of 256: adaptive / off"): Estimate(1.55, 1.75, _TABLE),
    ("steady", "8 requests of 4,096: adaptive / off"): Estimate(1.8, 2.2, _TABLE),
    ("steady", "1 requests of 16,384: adaptive / off"): Estimate(1.9, 2.3, _TABLE),
    ("trace", "off: the GPU works"): Estimate(7.0, 7.4, "measured on an H100: 7.17 ms"),
    ("trace", "k3: the GPU works"): Estimate(10.5, 11.3, "measured on an H100: 10.87 ms"),
    ("trace", "k3: the GPU waits"): Estimate(0, 1.6, "a round of 12.5 ms on an H100, of which 10.9 were work"),
    ("catchup", "catching up on a token"): Estimate(0.5, 1.2, "11 us before rows were gathered in pinned memory"),
    ("catchup", "a round without drafts, at first"): Estimate(11, 12, "measured on an H100: 11.5 ms"),
    ("train", "drafter.share 1: added to the step"): Estimate(0.55, 0.8, _MEASURED),
    ("train", "drafter.share 0.25: added to the step"): Estimate(0.14, 0.22, "a quarter of that of all samples"),
    ("train", "drafter.share 0.25, recomputing: added to the step"): Estimate(0.1, 0.17, "a third more for the policy"),
    ("variants", "as served, 64 requests: equal texts"): Estimate(0.2, 0.5, "measured on an H100: 0.25, 36 layers"),
    ("variants", "as served, 256 requests: equal texts"): Estimate(0.9, 1, "measured on an H100: 0.97, 36 layers"),
    ("variants", "as served, 1 requests: equal texts"): Estimate(1, 1, "measured on an H100"),
    ("variants", "deterministic, 64 requests: equal texts"): Estimate(1, 1, "if every pass is batch-invariant"),
    ("variants", "deterministic, 256 requests: equal texts"): Estimate(1, 1, "if every pass is batch-invariant"),
    ("variants", "deterministic, 1 requests: equal texts"): Estimate(1, 1, "if every pass is batch-invariant"),
    ("variants", "draft vocabulary, 64 requests: a round is shorter by"): Estimate(
        0.9, 1.2, "three products of 1.35 ms together, of which 78 % go"
    ),
    ("variants", "draft vocabulary, 256 requests: a round is shorter by"): Estimate(1.3, 1.7, "of about 2 ms"),
    ("lossless", "drafts: probability of such a difference"): Estimate(0.001, 1, "drafts change no distribution"),
    ("lossless", "plain again: probability of such a difference"): Estimate(0.001, 1, "no difference"),
    ("lossless", "plain at temperature 0.7: probability of such a difference"): Estimate(0, 1e-6, "it must be seen"),
    ("uneven", "64 requests: equal texts"): Estimate(0.2, 0.5, "0.25 of even drafts on an H100, 36 layers"),
    ("uneven", "64 requests of 128: uneven / even"): Estimate(1.03, 1.08, _UNEVEN),
    ("uneven", "256 requests of 128: uneven / even"): Estimate(1.06, 1.11, _UNEVEN),
    ("rl", "plain / co-trained, a step"): Estimate(1.1, 1.4, "accept lengths from 1.8 to 2.7"),
    ("rl", "plain: a step"): Estimate(18, 34, _STEP),
}


def verdict(value: float | None, expected: Estimate, tolerance: float = 0.1) -> str:
    """Compare a figure with its estimate. None as value: there was not enough memory for it."""
    if value is None:
        return "did not fit"
    if expected.low * (1 - tolerance) <= value <= expected.high * (1 + tolerance):
        return "as estimated"
    bound = expected.high if value > expected.high else expected.low
    return f"{value / bound:.2g} x the estimate" if bound else f"{value:g} in place of {bound:g}"


def beside(row: Row, *, estimated: bool) -> Row:
    """Return the row with its estimate. `estimated`: the plan is the one that the table above is about."""
    own = row.get("estimate")
    expected = ESTIMATES.get((row["part"], row["what"])) if estimated else None
    if own and (estimated or row["part"] == "train"):
        expected = Estimate(*own)
    if expected is None or row["state"] == "failed":
        return row | {"estimate": "", "origin": "", "verdict": ""}
    value = row["value"] if row["state"] == "measured" else None
    return row | {"estimate": str(expected), "origin": expected.origin, "verdict": verdict(value, expected)}


def shown(row: Mapping[str, Any]) -> str:
    """Format what was measured."""
    return f"{row['value']:.4g} {row['unit']}".strip() if row["state"] == "measured" else row["state"]
