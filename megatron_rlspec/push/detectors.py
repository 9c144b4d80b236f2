"""Turn what was observed of one engine into a `Finding`, or None if it is healthy. Pure functions.

`health.py` and `canary.py` call them after a push; `run/rollouts.py` checks a rollout's samples by `stamp_finding`.
`contract.py` decides what follows from the findings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from megatron_rlspec.push.fingerprint import Difference
from megatron_rlspec.types import Sample

# A canary must accept at least this share of the predicted accepted drafts per round. The share is below 1, because
# drafts are accepted at another rate on the first tokens of answers, and a canary has only these.
FLOOR_SHARE = 0.5
# A canary fails only if its mean is more than Z standard errors below the floor. Z is large, because a false alarm
# costs a second push of all tensors.
Z = 4.0

Detector = Literal["session", "fingerprint", "stamp", "canary"]


@dataclass(frozen=True)
class Finding:
    """A problem of one engine.

    detector  "session" (the push itself failed), "fingerprint", "stamp" (a wrong version) or "canary"
    message   one line for the log
    target    True: the target model may be wrong, so the engine must not generate samples if the problem remains.
              False: only the drafter may be wrong. Texts are then right, and only speed is lost
    """

    detector: Detector
    message: str
    target: bool


@dataclass(frozen=True)
class HealthSettings:
    """When a canary runs, and how long it is.

    canary_steps   drafts per round of the canary, which the engine must be able to draft; inside slime at most so many
    canary_tokens  the longest answer of a canary, in tokens. Many prompts with short answers take less time than few
                   prompts with long ones
    canary_first   number of canaries at the start of a run that run whatever they cost
    canary_share   later ones run only while all canaries together took at most this share of the time since the first
                   one began. `Health.push` runs a canary nevertheless if an engine is held or new, or if its caller
                   passes `suspicious`
    """

    canary_steps: int = 3
    canary_tokens: int = 8
    canary_first: int = 5
    canary_share: float = 0.02


def stamp_finding(samples: Sequence[Sample], oldest: int, newest: int) -> Finding | None:
    """Check that every response token carries a policy version in [oldest, newest], both included.

    Returns the first problem; None also without samples. A sample without response tokens needs no version.
    """
    for sample in samples:
        # spans (version, first token, last token + 1) of the response, see `types.Sample`; overlaps are not looked for
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

    is_drafter  returns whether a Hugging Face name is a tensor of the drafter. If only such tensors differ, the target
                is sound
    """
    if difference.empty:
        return None
    return Finding(
        "fingerprint", str(difference), target=not all(map(is_drafter, difference.names))
    )


def canary_finding(accepted: Sequence[int], predicted: float | None) -> Finding | None:
    """Check that the canary of an engine that speculates accepts enough drafts.

    accepted   histogram: accepted[i] rounds accepted i drafts
    predicted  expected accept length: tokens per round, of which 1 is the target's own token. None: any verified round
               is enough

    The floor is FLOOR_SHARE · (predicted - 1) accepted drafts per round. A finding has `target=False`: texts do not
    depend on what is drafted. A target that computes wrong logits, too, shows here as a loss of drafts only.
    """
    counts = np.asarray(accepted, dtype=np.float64)
    rounds = counts.sum()
    if rounds == 0:
        return Finding("canary", "speculation is on, but no round was verified", target=False)
    if predicted is None:
        return None
    drafts = np.arange(len(counts))
    mean = float(counts @ drafts / rounds)
    floor = FLOOR_SHARE * (predicted - 1)
    # If no round accepts a draft, the observed variance is 0, and one round would be enough to fail. So at least the
    # variance of rounds that accept one draft with probability p = `floor` is taken, by its bound
    # p (1 - p) <= min(p, 1/4).
    variance = max(float(counts @ (drafts - mean) ** 2 / rounds), min(floor, 0.25))
    if mean + Z * math.sqrt(variance / rounds) >= floor:
        return None
    message = (
        f"accept length {1 + mean:.2f} over {int(rounds)} rounds, expected at least {1 + floor:.2f} "
        f"({predicted:.2f} was predicted)"
    )
    if mean == 0:
        message += "; no draft is accepted, as when an EAGLE-3 drafter reads other layers than it was trained on"
    return Finding("canary", message, target=False)
