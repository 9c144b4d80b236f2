"""Turn observations of engines into findings. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from megatron_rlspec.push.fingerprint import Difference
from megatron_rlspec.types import Sample

FLOOR_SHARE = 0.5  # of the predicted accepted drafts per round, which a canary must reach
Z = 4.0  # a canary fails if its mean is so many standard errors below the floor

Detector = Literal["session", "fingerprint", "stamp", "canary"]


@dataclass(frozen=True)
class Finding:
    """A problem of one engine. `target`: the target may be wrong, not only the drafter."""

    detector: Detector
    message: str
    target: bool


@dataclass(frozen=True)
class HealthSettings:
    """Thresholds of the checks.

    canary_steps   drafts per round of the canary; the engine must be able to run such a chain
    canary_tokens  the longest answer of a canary; many prompts with short answers take less time than few long ones
    canary_first   the first pushes of a run, which all run a canary
    canary_share   share of the time since the first canary that canaries may take. A later push beyond it runs no
                   canary, unless an engine is held or accepted drafts have fallen
    """

    canary_steps: int = 3
    canary_tokens: int = 8
    canary_first: int = 5
    canary_share: float = 0.02


def stamp_finding(samples: Sequence[Sample], oldest: int, newest: int) -> Finding | None:
    """Check that every response token carries a version in [oldest, newest], before training on the samples."""
    for sample in samples:
        spans = sorted(sample.policy_versions, key=lambda span: span[1])
        for version, first, end in spans:
            if not oldest <= version <= newest:
                allowed = str(newest) if oldest == newest else f"{oldest} to {newest}"
                message = f"{sample.request_id}: tokens {first} to {end} drawn by version {version}, expected {allowed}"
                return Finding("stamp", message, target=True)
        covered = sum(end - first for _, first, end in spans)
        if covered != len(sample.response):
            message = f"{sample.request_id}: versions cover {covered} of {len(sample.response)} response tokens"
            return Finding("stamp", message, target=True)
    return None


def fingerprint_finding(
    difference: Difference, is_drafter: Callable[[str], bool]
) -> Finding | None:
    """Return the finding of an engine that does not hold what it was sent; None if it does.

    The target is sound if only tensors of the drafter differ.
    """
    if difference.empty:
        return None
    return Finding(
        "fingerprint", str(difference), target=not all(map(is_drafter, difference.names))
    )


def canary_finding(accepted: Sequence[int], predicted: float | None) -> Finding | None:
    """Check that a histogram of accepted drafts per round (index = accepted) reaches its floor.

    `predicted` is the expected accept length: tokens per round, with the target's own token. With None the canary only
    has to speculate. The floor is `1 + FLOOR_SHARE (predicted - 1)`. The canary fails if the observed mean is more than
    `Z` standard errors below it.
    """
    counts = np.asarray(accepted, dtype=np.float64)
    rounds = counts.sum()
    if rounds == 0:
        return Finding("canary", "speculation is on, but no round was verified", target=False)
    if predicted is None:
        return None
    values = np.arange(len(counts))
    mean = float(counts @ values / rounds)
    # Without accepted drafts the sample's variance is 0. The Bernoulli variance of the floor is a lower bound.
    floor = FLOOR_SHARE * (predicted - 1)
    variance = max(float(counts @ (values - mean) ** 2 / rounds), min(floor, 0.25))
    if mean + Z * math.sqrt(variance / rounds) >= floor:
        return None
    message = (
        f"accept length {1 + mean:.2f} over {int(rounds)} rounds, expected at least {1 + floor:.2f} "
        f"({predicted:.2f} was predicted)"
    )
    if mean == 0:
        message += "; no draft is accepted, as when an EAGLE-3 drafter reads other layers than it was trained on"
    return Finding("canary", message, target=False)
