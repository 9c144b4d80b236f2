"""The Protocol between the loop and whatever generates: SGLang over HTTP, or the embedded engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from megatron_rlspec.types import Request, RoundStats, Sample, Sampling, Scope, SpecSchedule

if TYPE_CHECKING:
    import torch


class EngineError(RuntimeError):
    """The engine refused, failed or is gone. The message is one line: which engine, what was asked, what it said."""


class RolloutEngine(Protocol):
    """One engine. Calls block; `rollout/pool.py` spreads them over threads and engines."""

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, on_sample: Callable[[Sample], None] | None = None
    ) -> list[Sample]:
        """Draw one sample per request, returned in the order of the requests.

        Every sample carries log-probs, acceptance histogram and policy versions; aborted ones keep what they have.
        `on_sample` is called once per sample, at the latest before this returns, perhaps from another thread.
        """

    def update_weights(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]], scope: Scope = "all") -> None:
        """Replace weights by full, unsharded tensors under Hugging Face checkpoint names, as one versioned session.

        On error the engine raises `EngineError` and serves nothing until a later update succeeds.
        """

    def set_schedule(self, schedule: SpecSchedule) -> None:
        """Choose the speculative configuration of every later decode round by this schedule."""

    def pause(self) -> None:
        """Stop decoding; running samples are kept and recomputed on `resume` (SGLang: retract)."""

    def resume(self) -> None: ...

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """End the named samples, or all of them: their `generate` returns what they have, `status = "aborted"`."""

    def stats(self) -> list[RoundStats]:
        """Drain what was observed since the last call, aggregated by (config, batch)."""

    def fingerprints(self) -> dict[str, int]:
        """`weights.fingerprint` of every tensor that the engine holds, under Hugging Face names."""

    def close(self) -> None: ...
