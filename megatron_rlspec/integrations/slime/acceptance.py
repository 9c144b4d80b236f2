"""Acceptance of slime's samples, counted from SGLang's histogram.

slime keeps of SGLang's `meta_info` only what `Sample.SpecInfo.add` reads, and it reads keys that SGLang no longer
sends. So `rollout.py` replaces that method by `with_histogram`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from megatron_rlspec.rollout.sglang.settings import DRAFTED
from megatron_rlspec.speculation.acceptance import accept_length, delivered, pooled, runs_of_ones


def of_samples(samples: Iterable[Any]) -> float:
    """Return the accept length of slime's samples: tokens delivered a verify round; NaN without rounds."""
    return accept_length(pooled(getattr(s.spec_info, "histogram", ()) for s in samples))


def with_histogram(slimes_add: Callable[..., None]) -> Callable[..., None]:
    """Wrap `SpecInfo.add`, which then also adds the histogram of one answer of SGLang to `histogram`.

    A sample that was aborted and continued has more than one answer.
    """

    def add(self: Any, meta_info: Mapping[str, Any]) -> None:
        slimes_add(self, meta_info=meta_info)
        histogram = meta_info.get("spec_correct_drafts_histogram") or ()
        if DRAFTED in meta_info:
            # SGLang's histogram counts drafts past the end of the sample, too. Its sum is the number of rounds.
            drafted = meta_info[DRAFTED]
            histogram = delivered(sum(histogram), runs_of_ones(drafted), len(drafted))
        self.histogram = pooled([getattr(self, "histogram", ()), histogram]).tolist()

    return add
