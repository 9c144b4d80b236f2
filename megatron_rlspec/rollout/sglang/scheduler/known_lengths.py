"""Know the lengths of requests after a round without drafts: each has one token more.

Attention that is planned on the host, as FlashInfer's is, needs the lengths before a round is launched
(`needs_cpu_seq_lens`). SGLang's overlap scheduler reads them back from the GPU, because a round may accept any number
of drafts. So it waits for the verification of the round before. The GPU in turn waits for the launch, which takes a few
milliseconds: after the verification of a round without drafts it has nothing else to do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

RESOLVE = "sglang.srt.managers.overlap_utils.FutureMap.resolve_seq_lens_cpu"


class KnownLengths:
    """The lengths after the newest round, if it ran without drafts."""

    def __init__(self) -> None:
        self._reqs: list[Any] = []
        self._lengths: torch.Tensor | None = None  # [B], on the host

    def after_off(self, batch: Any) -> None:
        """Note a round without drafts that is being launched."""
        if batch.reqs and batch.seq_lens_cpu is not None:
            self._reqs = list(batch.reqs)
            self._lengths = batch.seq_lens_cpu + 1

    def resolve(
        self, original: Callable, futures: Any, batch: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Wrap SGLang's read of the lengths before any round. Requests that came or went make it read once."""
        lengths = self._lengths if batch.reqs == self._reqs else None
        self._lengths = None
        if lengths is None or not futures.needs_cpu_seq_lens:
            return original(futures, batch, *args, **kwargs)
        futures.needs_cpu_seq_lens = False
        try:
            original(futures, batch, *args, **kwargs)
        finally:
            futures.needs_cpu_seq_lens = True
        if batch.seq_lens_cpu is None:
            batch.seq_lens_cpu = lengths
            batch.seq_lens_sum = int(lengths.sum())


known_lengths = KnownLengths()
