"""Comparisons that show a fault after a push, besides those that a push makes itself."""

import numpy as np


def differing(pusher, names=None):
    """Compare again, without a push, what engines hold. Returns a detector's name for each engine that differs."""
    engines = [pusher.engines[name] for name in names or pusher.engines]
    return ["fingerprint" for engine in engines if not pusher.compare_with(engine)[1].empty]


def logprobs_differ(samples, recomputed, bound=1e-3):
    """Return ["logprobs"] if engine and trainer differ by more than `bound` nats a response token on average."""
    gaps = []
    for sample, values in zip(samples, recomputed, strict=True):
        response = slice(sample.prompt_len, len(sample.tokens))
        gaps.append(np.abs(sample.behaviour_logprobs[response] - values[response]))
    return [] if np.concatenate(gaps).mean() <= bound else ["logprobs"]
