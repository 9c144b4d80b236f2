"""Acceptance of slime's samples, counted from SGLang's histogram.

Of `meta_info`, slime keeps only what `Sample.SpecInfo.add` reads, and that reads keys that SGLang no longer sends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from megatron_rlspec.rollout.sglang.settings import DRAFTED
from megatron_rlspec.speculation.acceptance import accept_length, delivered, pooled, runs


def of_samples(samples: Iterable[Any]) -> float:
    """Return the tokens of a round that slime's samples got, on average; NaN without rounds."""
    return accept_length(pooled(getattr(s.spec_info, "histogram", ()) for s in samples))


def with_histogram(slimes_add: Callable[..., None]) -> Callable[..., None]:
    """Wrap `SpecInfo.add`, which then also keeps SGLang's histogram."""

    def add(self: Any, meta_info: Mapping[str, Any]) -> None:
        slimes_add(self, meta_info=meta_info)
        histogram = meta_info.get("spec_correct_drafts_histogram") or ()
        if DRAFTED in meta_info:
            # SGLang's histogram counts drafts past the end of the sample, too.
            drafted = meta_info[DRAFTED]
            histogram = delivered(sum(histogram), runs(drafted), len(drafted))
        self.histogram = pooled([getattr(self, "histogram", ()), histogram]).tolist()

    return add
