"""One decision for all ranks under attention data parallelism, where each rank has requests of its own.

A pass of the model has collectives over all ranks. So every rank must run the same configuration in every decode round,
with or without requests. Before a round each rank sends a row of numbers to all others, in one all-reduce over SGLang's
CPU group. Each rank's rule then chooses by the same sums. SGLang gives commands to all ranks between the same rounds.

The rules learn from the accepted drafts of all ranks, which travel in the rows, too: those of round n with the row of
round n + 2. By then every rank has processed round n, with and without the overlap scheduler.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

MIXED = "SGLANG_ENABLE_DP_SPEC_PREFILL_COORDINATION"  # some ranks prefill while others decode
# the shortest lags of a rank that travel: the most requests of a probe, if it is not of all requests
KEPT = 128


@dataclass(frozen=True)
class Share:
    """What one rank adds to a decision.

    context        tokens of its requests
    plain          whether its round can run without SGLang's verify path
    open           whether some of its drafter's inputs were left out
    needed         whether some request must catch up for another reason than drafting
    lags           tokens that the drafter of each request has missed
    accepted       drafts that each of its drafting requests accepted in the round that is due (`LateRounds`)
    others         its requests of that round that did not draft
    """

    context: int
    plain: bool
    open: bool
    needed: bool
    lags: Sequence[int]
    accepted: Sequence[int] = ()
    others: int = 0

    def row(self, deepest: int) -> list[int]:
        """Return the numbers that travel. `deepest`: the most drafts of a round."""
        histogram = [self.accepted.count(n) for n in range(deepest + 1)]
        nearest = sorted(self.lags)[:KEPT]
        missing = [-1] * (KEPT - len(nearest))
        numbers = [
            len(self.lags),
            self.context,
            not self.plain,
            self.open,
            self.needed,
            sum(self.lags),
            self.others,
        ]
        return [int(n) for n in numbers] + histogram + nearest + missing


class Joint:
    """The sums of all ranks' shares. rows [ranks, numbers]: those of `Share.row`; `rank`: this one."""

    def __init__(self, rows: np.ndarray, rank: int) -> None:
        totals = rows.sum(axis=0)
        self.batch, self.context, against, opened, needed, self._lag, self.others = map(
            int, totals[:7]
        )
        self.plain, self.open, self.needed = not against, bool(opened), bool(needed)
        self.accepted = [
            n for n, requests in enumerate(totals[7:-KEPT].tolist()) for _ in range(requests)
        ]
        self._rank, self._requests = rank, int(rows[rank, 0])
        lags = rows[:, -KEPT:]
        owners, places = np.nonzero(lags >= 0)
        found = lags[owners, places]
        order = np.argsort(found, kind="stable")  # equal lags: the lower rank first, on every rank
        self._lags, self._owners = found[order], owners[order]

    def missed(self, n: int) -> int:
        """Return the tokens that the n least behind requests of all ranks have missed; of all requests if n > KEPT."""
        return self._lag if n > KEPT else int(self._lags[:n].sum())

    def own(self, n: int) -> int:
        """Return how many of the n least behind requests are this rank's."""
        return self._requests if n > KEPT else int((self._owners[:n] == self._rank).sum())


class AttentionRanks:
    """The ranks of this engine. `parallel`: SGLang's sizes, ranks and groups."""

    def __init__(self, parallel: Any, deepest: int) -> None:
        self.size, self.rank = parallel.attn_dp_size, parallel.attn_dp_rank
        self._deepest = deepest
        # of those with the same requests
        self._first = parallel.attn_tp_rank == 0 and parallel.attn_cp_rank == 0
        self._group = parallel.tp_group.cpu_group

    def gather(self, row: Sequence[int]) -> np.ndarray:
        """Return the rows [ranks, numbers] of all ranks. Every rank must call it."""
        rows = torch.zeros(self.size, len(row), dtype=torch.int64)
        if self._first:
            rows[self.rank] = torch.tensor(row)
        torch.distributed.all_reduce(rows, group=self._group)
        return rows.numpy()

    def join(self, share: Share) -> Joint:
        """Return the sums of all ranks' shares. Every rank must call it before every decode round."""
        return Joint(self.gather(share.row(self._deepest)), self.rank)


def keep_adaptive(original: Callable, server_args: Any) -> str | None:
    """Return SGLang's reasons against adaptive speculation but that its ranks would decide apart."""
    from sglang.srt.speculative import adaptive_spec_params

    # commands reach ranks between different rounds
    apart = server_args.enable_dp_attention_local_control_broadcast
    if apart or os.environ.get(MIXED, "0").lower() not in ("", "0", "false"):
        return original(server_args)
    enabled = adaptive_spec_params.attn_dp_enabled_of
    adaptive_spec_params.attn_dp_enabled_of = lambda view: False
    try:
        return original(server_args)
    finally:
        adaptive_spec_params.attn_dp_enabled_of = enabled
