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


_SLICES = "two processes without MPS have time slices in turn"
_LINEAR = "queries, keys, output and their gradients; no score matrix, counted on meta tensors"
_CHUNK = "bytes of the elementwise passes at 2.8 TB/s, products at 700 TFLOP/s, for 8,192 rows"
_ATOMICS = "flash attention's backward adds with atomics; a drafter adds nothing"
_TIES = "they differ where scores are within 1e-6, or a limit within 1e-6 of a token's edge"
_KERNELS = "products at 700 TFLOP/s; 2 bytes a word for each pass over the logits, counted on meta tensors, at 2.8 TB/s"
# Of the default plan on an H100 or H200. (part, what) -> estimate
ESTIMATES: dict[tuple[str, str], Estimate] = {
    ("decode", "speculating: the engine answers after"): Estimate(
        60, 130, "measured on an H100: 103 s, three at once, 12 layers"
    ),
    ("decode", "capturing graphs"): Estimate(30, 90, "measured on an H100: 50 s beside two others, 12 layers"),
    ("decode", "memory of graphs"): Estimate(2.6, 6, "measured on an H100: 2.6 GB with 12 layers"),
    ("decode", "off / plain, batch 256"): Estimate(
        0.35, 1.0, "measured on an H100: 0.76 by FlashInfer with 36 layers, 0.37 by Triton with 12"
    ),
    ("shared", "beside a process that spins / alone"): Estimate(0.4, 0.6, _SLICES),
    ("shared", "beside a process that waits / alone"): Estimate(
        0.97, 1.0, "a context without kernels has no time slice"
    ),
    ("fit", "share of the memory for weights and KV cache"): Estimate(0.8, 0.9, "SGLang's own default is about 0.83"),
    ("fit", "capturing graphs"): Estimate(20, 90, "0.05 s a graph with 8 layers on an H100"),
    ("fit", "memory of graphs"): Estimate(2.9, 8, "2.9 GB with 8 layers on an H100"),
    ("push", "http"): Estimate(0.6, 0.8, "measured on an H100: 0.66 for 5 GB, beside tests"),
    ("push", "handles"): Estimate(30, 60, "measured on an H100: 34 for 5 GB, beside tests"),
    ("push", "group over gloo"): Estimate(0.8, 1.1, "measured on an H100: 0.93 for 5 GB, beside tests"),
    ("draws", "peaked, argmax: a round"): Estimate(0.2, 0.3, "measured on an H100: 0.24 ms"),
    ("draws", "peaked, ours at T = 1: a round"): Estimate(3.5, 4.5, "measured on an H100: 3.9 ms"),
    ("draws", "peaked, ours with top-p: a round"): Estimate(10, 14, "measured on an H100: 12.1 ms"),
    ("draws", "peaked, kernel at T = 1: a round"): Estimate(0.55, 0.7, "measured on an H100: 0.66 ms; 0.37 in a loop"),
    ("draws", "peaked, kernel with top-p: a round"): Estimate(1.1, 1.3, "measured on an H100: 1.27 ms; 0.89 in a loop"),
    ("draws", "flat, kernel at T = 1: a round"): Estimate(0.5, 0.7, "measured on an H100: 0.55 ms; 0.38 in a loop"),
    ("draws", "flat, kernel with top-p: a round"): Estimate(1.5, 1.8, "measured on an H100: 1.62 ms; 1.48 in a loop"),
    ("draws", "peaked, kernel at T = 1: tokens equal to plain torch's"): Estimate(1023, 1024, _TIES),
    ("draws", "peaked, kernel with top-p: tokens equal to plain torch's"): Estimate(1023, 1024, _TIES),
    ("draws", "peaked, SGLang's at T = 1: a round"): Estimate(1.7, 2, "measured on an H100: 1.83 ms"),
    ("draws", "peaked, SGLang's with top-p: a round"): Estimate(5, 6, "measured on an H100: 5.6 ms"),
    ("draws", "peaked, log-probs: a round"): Estimate(1.5, 2.2, "5 GB of elementwise passes"),
    ("draws", "flat, ours with top-p: a round"): Estimate(50, 65, "measured on an H100: 58 ms; rows are sorted whole"),
    ("draws", "flat, ours at T = 1: peak beyond the logits"): Estimate(0.3, 0.5, "measured on an H100: 0.38 GiB"),
    ("head", "drafter, ce, chunks of 1,024"): Estimate(60, 75, _CHUNK),
    ("head", "drafter, forward_kl, chunks of 1,024"): Estimate(140, 155, "measured on an H100: 149 ms"),
    ("head", "policy with entropy, chunks of 1,024"): Estimate(150, 180, _CHUNK),
    ("head", "policy with entropy, chunks of 4,096"): Estimate(130, 165, "a quarter of the additions to the gradient"),
    ("head", "drafter, ce, kernels"): Estimate(31, 38, _KERNELS),
    ("head", "drafter, forward_kl, kernels"): Estimate(58, 68, "measured on an H100: 63.7 ms"),
    ("head", "policy with entropy, kernels"): Estimate(
        66, 78, f"{_KERNELS}; two chunks add to the gradient of the output layer"
    ),
    ("head", "a chunk: the first pass"): Estimate(
        0.2, 0.5, "measured on an H100: 0.47 ms with entropy, 0.20 in a loop of many"
    ),
    ("head", "a chunk: the second pass"): Estimate(0.22, 0.35, "0.31 GB read and written"),
    ("head", "drafter, ce, kernels: the gradient's distance from plain torch's"): Estimate(
        0, 0.01, "rounding of bfloat16; 0.004 in Triton's interpreter"
    ),
    ("head", "drafter, ce, compiled"): Estimate(33, 50, "one pass in place of about ten"),
    ("sleep", "accept length after / before"): Estimate(0.9, 1.1, "the same weights, other seeds"),
    ("catchup", "catching up"): Estimate(
        300, 1500, "512,000 tokens of one layer in 63 passes; to find the rows takes 0.1 s of a CPU core"
    ),
    ("identity", "with and without: tensors that differ, train.deterministic"): Estimate(0, 0, "by construction"),
    ("identity", "twice without a drafter: tensors that differ, train.deterministic"): Estimate(0, 0, _ATOMICS),
    ("attention", "forward, one sequence of 9,216: peak"): Estimate(0.12, 0.25, _LINEAR),
    ("attention", "backward, one sequence of 9,216: peak"): Estimate(0.17, 0.42, "measured on an H100: 0.42 GiB"),
    ("attention", "forward, one sequence of 32,768: peak"): Estimate(0.4, 0.9, _LINEAR),
    ("attention", "backward, one sequence of 32,768: peak"): Estimate(0.6, 1.5, "measured on an H100: 1.49 GiB"),
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
    expected = Estimate(*own) if own else ESTIMATES.get((row["part"], row["what"])) if estimated else None
    if expected is None or row["state"] == "failed":
        return row | {"estimate": "", "origin": "", "verdict": ""}
    value = row["value"] if row["state"] == "measured" else None
    return row | {"estimate": str(expected), "origin": expected.origin, "verdict": verdict(value, expected)}


def shown(row: Mapping[str, Any]) -> str:
    """Format what was measured."""
    return f"{row['value']:.4g} {row['unit']}".strip() if row["state"] == "measured" else row["state"]
