"""Plan FlashInfer's attention for what a round of drafts is: equal rows for all requests, lengths that the host knows.

In a round of drafts every request has equally many rows (query tokens), one more than its drafts. FlashInfer's planner
does not know that. It sizes the tiles of a CUDA graph for the most uneven batch that the graph could get: 4 tokens of
each of 256 requests take tiles of 128 rows, of which 16 are used (`PrefillSplitQOKVIndptr` in `scheduler.cuh` of
FlashInfer 0.7.2). The planner's argument `uniform_q_len` promises equal rows, and the planner refuses a batch that has
others. SGLang 0.5.23 and FlashInfer's own wrapper pass 0, which promises nothing. A graph keeps the tiles with which it
was captured, so its capture and every replay must make the same promise. They do, because both call `Promise._plan`.

SGLang reads the lengths back from the GPU before each pass, unless two switches of SGLang are on. `hooks` turns these
switches on.

Rounds whose rows differ (`ragged.py`) never plan here: `ragged.why_unsupported` refuses FlashInfer's attention.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from megatron_rlspec.compat.installed import locate

PLAN = "sglang.srt.layers.attention.flashinfer_backend.FlashInferIndicesUpdaterPrefill.call_begin_forward"
MODULE = "flashinfer.prefill.get_batch_prefill_module"
# SGLang's switches, by which it makes these plans from lengths on the host.
SWITCHES = ("SGLANG_OPT_FLASHINFER_VERIFY_HOST_PLAN", "SGLANG_OPT_FLASHINFER_DRAFT_HOST_INDPTR")

# Indices of arguments of the FA2 planner (`plan` of FlashInfer's prefill module), which takes them by position.
_ROW_STARTS = 3  # [requests + 1], on the host
_IN_GRAPH = 11  # whether the plan is for a CUDA graph
_UNIFORM_Q_LEN = 19  # the last argument; a planner with another number of arguments is left alone


def hooks() -> Iterator[tuple[str, Callable, str]]:
    """Yield the hooks if FlashInfer is installed, and turn on the switches that the environment does not name."""
    if locate("flashinfer") is not None:
        for name in SWITCHES:
            os.environ.setdefault(name, "1")
        promise = Promise()
        yield PLAN, promise.in_rounds, "AROUND"
        yield MODULE, promise.planned, "AROUND"


class Promise:
    """Knows whether the pass that is being planned belongs to a round of drafts, and promises equal rows for it.

    `in_rounds` runs around SGLang's planning, and `_plan` inside that. `in_rounds` tells `_plan` by `holds`, which is
    safe because a scheduler plans in one thread.

    holds  whether all requests of the pass that is being planned have equally many rows
    """

    def __init__(self) -> None:
        self.holds = False

    def in_rounds(self, original: Callable, *args: Any, **kwargs: Any) -> Any:
        """Wrap SGLang's planning of a pass. A pass with a `SpecInput` argument belongs to a round of drafts."""
        from sglang.srt.speculative.spec_info import SpecInput

        self.holds = any(isinstance(value, SpecInput) for value in (*args, *kwargs.values()))
        try:
            return original(*args, **kwargs)
        finally:
            self.holds = False

    def planned(self, original: Callable, backend: str, *args: Any) -> Any:
        """Wrap FlashInfer's look-up of a kernel's functions, and replace its `plan` by ours.

        FlashInfer caches its modules, so the same module can come again. Then it has our `plan` already.
        """
        module = original(backend, *args)
        if backend == "fa2" and not isinstance(module.plan, partial):
            module.plan = partial(self._plan, module.plan)
        return module

    def _plan(self, original: Callable, *args: Any) -> Any:
        # Only plans for a graph are sized for the most uneven batch (see the head of the file).
        if self.holds and len(args) == _UNIFORM_Q_LEN + 1 and args[_IN_GRAPH]:
            starts = args[_ROW_STARTS]  # All requests have as many rows as the first one.
            args = (*args[:_UNIFORM_Q_LEN], int(starts[1] - starts[0]))
        return original(*args)
