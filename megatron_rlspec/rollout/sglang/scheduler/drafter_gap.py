"""Rounds without any drafter pass, and the pass that brings the drafter's cache up to date before it drafts again.

At SGLang's step 0 the drafter still runs in every round, to extend its KV cache. In a round of `OFF` the drafter does
not run. `DrafterGap` keeps what the drafter would have read: hidden state h_t of the target and token x_t of each new
position. When drafting starts again, the drafter reads all of them in prefills of limited size (ReSpec, section 5.2).

"The drafter of a request" means the part of the one drafter's KV cache that belongs to that request. To try drafts,
only the drafters of a few requests catch up. The other requests get random drafts in those rounds. Their texts are
still right, because the target verifies every draft. The rows that their drafters miss are kept, too.

`controller.py` makes the only `DrafterGap` of a scheduler process, and decides when to record and when to catch up. It
calls the methods when it launches a round, on the stream of the forward passes. The host does not know the results of
the round before yet: the overlap scheduler processes them later. Only `close` waits for the device: it needs the
accepted counts, and the sequence lengths if SGLang has not copied them to the host.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_rlspec.rollout.sglang.scheduler import versions
from megatron_rlspec.rollout.sglang.scheduler.stash import (
    Rows,
    SkippedRound,
    Stash,
    gather,
    split_by_request,
)


@dataclass(frozen=True)
class Pass:
    """What one pass of the drafter reads: consecutive positions of some requests, n tokens of all together.

    behind          indices of the requests in the batch
    starts, sizes   of each request: its first position in this pass, and how many of its tokens the pass reads
    hidden, tokens  h_t [n, H] and x_t [n] int64 on the device; rows of one request after those of the other
    next_tokens     [requests] int64: the token that follows each request's last row of this pass. The drafter reads h_t
                    together with the token after it
    """

    behind: list[int]
    starts: list[int]
    sizes: list[int]
    hidden: Tensor
    tokens: Tensor
    next_tokens: Tensor


class DrafterGap:
    """The inputs that the drafter of one `EAGLEWorkerV2` has not read, by request.

    `_clock` counts tokens: it rises by a round's width, its number of rows of each request. Each row has the clock of
    its round, and a request has missed the rows since the clock at which its drafter was last up to date.

    Call `record` for every decode round that the drafter of some request does not read: the first call opens the gap.
    While the gap is open, call `mark_read` for every prefill: a request that was never marked counts as behind since
    the gap opened.

    every  number of recorded rounds on the device at which their rows move to host memory (`Stash`)
    most   largest number of tokens in one pass of the drafter, which limits the memory that the pass takes
    """

    def __init__(self, worker: Any, every: int = 64, most: int = 8192) -> None:
        self.worker = worker
        self.every = every
        self.most = most
        self._stash = Stash()
        self._reset()

    def _reset(self) -> None:
        """Begin anew, with no drafter behind."""
        self._clock = 0  # also the largest number of tokens that one request can have missed
        # request id -> `_clock` when its drafter last was up to date. Absent: 0, so behind since the gap opened
        self._since: dict[str, int] = {}
        # recorded rounds that are still on the device, not in the stash
        self._rounds: list[SkippedRound] = []
        # request id -> the number by which the stash knows the request; made at the first look-up
        self._number: defaultdict[str, int] = defaultdict(count().__next__)
        self._running: list[str] = []  # ids of the newest round's requests
        # the numbers of `_running`; rounds of the same requests share one array
        self._running_numbers = np.empty(0, np.int64)
        self._stash.clear()

    @property
    def open(self) -> bool:
        """Return whether any round was recorded since the last complete catch-up."""
        return self._clock > 0

    def record(
        self,
        reqs: Sequence[Any],
        hidden: Tensor,
        tokens: Tensor,
        counts: Tensor | None = None,
        current: Collection[int] = (),
    ) -> None:
        """Keep the inputs of a round of B requests with w rows each. Opens the gap.

        The tensors are not copied, so no later pass may overwrite them.

        reqs     SGLang's `Req`, at least one
        hidden   [B * w, H], the rows of one request after those of the other
        tokens   [B * w], in the same order
        counts   [B] on the device, where it stays, so that the host does not wait: the first `counts` rows of each
                 request are valid; None: all are
        current  indices of the requests whose drafter has read these inputs
        """
        width = len(tokens) // len(reqs)
        running = [req.rid for req in reqs]
        if running != self._running:
            self._running = running
            self._running_numbers = np.array([self._number[rid] for rid in running])
        self._rounds.append(
            SkippedRound(self._clock, self._running_numbers, hidden, tokens, width, counts)
        )
        self._clock += width
        for i in current:  # After `_clock` has risen: these drafters have read this round's rows.
            self._since[reqs[i].rid] = self._clock
        if len(self._rounds) == self.every:
            self._store()

    def mark_read(self, reqs: Sequence[Any]) -> None:
        """Note that the drafter's cache of these requests is complete, as after a prefill."""
        for req in reqs:
            self._since[req.rid] = self._clock

    def lags(self, reqs: Sequence[Any]) -> list[int]:
        """Return an upper bound of how many tokens each request has missed.

        Refused drafts count as well, because only the device knows how many drafts were accepted.
        """
        return [self._clock - self._since.get(req.rid, 0) for req in reqs]

    def missed(self, reqs: Sequence[Any], n: int) -> int:
        """Return how many tokens the n requests that are least behind have missed together, by `lags`.

        `SpecRule.choose` weighs it against what drafts would gain.
        """
        return sum(sorted(self.lags(reqs))[:n])

    def close(self, batch: Any, n: int) -> list[int] | None:
        """Let the drafter read what it missed of the n requests that are least behind. Call it before a drafting round.

        Returns the indices of these n requests, or None if they are all of the batch: then no drafter is behind any
        more, and the gap is closed.

        The drafts that these passes give go into `batch.spec_info`, in place: only the round that is being launched
        reads that object. Every tensor-parallel rank must call it for the same batch and n, because the drafter's
        passes are collective.

        batch  SGLang's `ScheduleBatch` in decode mode
        n      0: no drafter catches up, and [] is returned; the batch's size or more: all catch up
        """
        reqs = batch.reqs
        lags = self.lags(reqs)
        # The sort is stable, so all ranks choose the same of several requests with equal lags.
        order = sorted(range(len(reqs)), key=lags.__getitem__)
        chosen = sorted(order[:n])
        behind = [i for i in chosen if lags[i] > 0]
        for read in self._passes(batch, behind):
            self._extend(batch, read)
        if len(chosen) == len(reqs):
            # Requests outside the batch have no rows to keep: a prefill comes before they decode again.
            self._reset()
            return None
        self.mark_read([reqs[i] for i in behind])
        return chosen

    def _store(self) -> None:
        """Move the rounds to the stash, and forget requests that are not in the newest round.

        A forgotten request can decode again, but only after a prefill, in which its drafter reads everything
        (`mark_read`). Until then it needs no rows.
        """
        running = set(self._running)
        self._since = {rid: self._since[rid] for rid in running if rid in self._since}
        for rid in self._number.keys() - running:
            del self._number[rid]
        self._stash.put(self._rounds)
        self._stash.keep(set(self._number.values()))
        self._rounds = []

    def _missed_by(self, reqs: Sequence[Any]) -> list[list[Rows]]:
        """Return the rows that each of these requests missed, in the order of time. Waits for the device.

        A request has [] if all the rows that it missed were refused drafts.
        """
        numbers = [self._number[req.rid] for req in reqs]
        newest: dict[int, Rows] = {}
        if self._rounds:
            counts = [skipped.counts for skipped in self._rounds if skipped.counts is not None]
            newest = split_by_request(
                self._rounds,
                torch.cat([skipped.hidden for skipped in self._rounds]),
                torch.cat([skipped.tokens.long() for skipped in self._rounds]),
                # one wait for the device, for the counts of all rounds
                np.array(torch.cat(counts).tolist() if counts else []),
                wanted=numbers,
            )
        missed = []
        for req, number in zip(reqs, numbers, strict=True):
            since = self._since.get(req.rid, 0)
            parts = self._stash.find(number, since)  # older than the rounds on the device, so first
            if number in newest and newest[number].clocks[-1] >= since:
                parts.append(newest[number].since(since))
            missed.append(parts)
        return missed

    def _passes(self, batch: Any, behind: Sequence[int]) -> Iterator[Pass]:
        """Yield the drafter's passes over what these requests missed, each of at most `most` tokens.

        Requests follow one another, and their rows are cut into passes. So a request can be in several passes.

        behind  indices of the requests in the batch
        """
        missed = self._missed_by([batch.reqs[i] for i in behind])
        parts = [rows for of_request in missed for rows in of_request]
        if not parts:
            return
        # `lags` may have counted refused drafts only, so some requests have no rows.
        missing = [
            (i, of_request) for i, of_request in zip(behind, missed, strict=True) if of_request
        ]
        # of each request with rows: its index in the batch, its number of rows, and the end of its rows in `tokens`
        requests = np.array([i for i, _ in missing])
        counts = np.array(
            [sum(len(rows.clocks) for rows in of_request) for _, of_request in missing]
        )
        ends = np.cumsum(counts)
        lengths = batch.seq_lens if batch.seq_lens_cpu is None else batch.seq_lens_cpu
        # Lengths count the tokens in the target's KV cache, which the newest token is not in yet. So a request's last
        # missed row is its position length - 1, and row j of `tokens` is its position j + shift.
        shift = np.array(lengths.tolist())[requests] - ends

        device = batch.seq_lens.device
        tokens = gather([rows.tokens for rows in parts], device)
        # the token that follows each row; a request's newest token follows its last row
        next_tokens = tokens.roll(-1)
        bonus = batch.spec_info.bonus_tokens.to(torch.int64)
        next_tokens[_to_device(ends - 1, device)] = bonus[_to_device(requests, device)]

        hidden = [rows.hidden for rows in parts]
        for first in range(0, int(ends[-1]), self.most):
            last = min(first + self.most, int(ends[-1]))
            # each request's rows [begin, stop) within this pass
            begins = np.maximum(ends - counts, first)
            stops = np.minimum(ends, last)
            within = np.flatnonzero(begins < stops)
            yield Pass(
                requests[within].tolist(),
                (begins + shift)[within].tolist(),
                (stops - begins)[within].tolist(),
                gather(_between(hidden, first, last), device),
                tokens[first:last],
                next_tokens[_to_device(stops[within] - 1, device)],
            )

    def _prefill_batch(self, batch: Any, read: Pass) -> tuple[Any, Tensor]:
        """Return a `ScheduleBatch` for one prefill of the drafter, and the indices of its requests in `batch`.

        It is set as SGLang sets a prefill of `sizes` new tokens behind `starts` cached ones. The slots of all these
        tokens exist already: the target's cache has them, and the drafter's uses the same ones.
        """
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        behind, starts, sizes = read.behind, read.starts, read.sizes
        device = batch.seq_lens.device
        index, first, counts = torch.tensor([behind, starts, sizes], device=device)
        # of each token: its request's index in `behind`. With `output_size` the host does not wait for the sum.
        owner = torch.arange(len(behind), device=device).repeat_interleave(
            counts, output_size=len(read.tokens)
        )
        # of each token: its request's first position, plus its own place among the request's tokens
        positions = (
            torch.arange(len(read.tokens), device=device)
            + (first + counts - counts.cumsum(0))[owner]
        )
        slots = batch.req_pool_indices[index]

        # A shallow copy: the forward pass must not change the scheduler's batch.
        part = copy.copy(batch)
        part.forward_mode = ForwardMode.EXTEND
        part.reqs = [batch.reqs[i] for i in behind]
        part.input_ids = read.tokens
        part.out_cache_loc = batch.req_to_token_pool.req_to_token[slots[owner], positions].to(
            torch.int64
        )
        part.req_pool_indices = slots
        # A host copy of `req_pool_indices`, which not every supported SGLang has. 0.5.23 pads it to the same number of
        # rows as the other tensors (`ForwardBatch`), so it must have the rows of `part`, not those of `batch`.
        if getattr(batch, "req_pool_indices_cpu", None) is not None:
            part.req_pool_indices_cpu = batch.req_pool_indices_cpu[behind]
        part.seq_lens_cpu = torch.tensor(starts) + torch.tensor(sizes)
        part.seq_lens = (first + counts).to(batch.seq_lens)
        part.seq_lens_sum = int(part.seq_lens_cpu.sum())
        part.orig_seq_lens = part.seq_lens.to(torch.int32)
        part.prefix_lens = starts
        part.extend_lens = sizes
        part.extend_num_tokens = len(read.tokens)
        part.extend_logprob_start_lens = sizes  # no token needs log-probs
        part.return_logprob = False
        part.multimodal_inputs = batch.multimodal_inputs and [
            batch.multimodal_inputs[i] for i in behind
        ]
        part.sampling_info = _rows_of(batch.sampling_info, index, len(batch.reqs))
        return part, index

    def _extend(self, batch: Any, read: Pass) -> None:
        """Run one prefill of the drafter, and put the drafts that it gives into `batch.spec_info`. Collective.

        A draft is right only after a request's last pass. Until then the request's next pass replaces it.
        """
        from sglang.srt.speculative import eagle_worker_v2 as eagle

        part, index = self._prefill_batch(batch, read)
        drafter = self.worker.draft_worker
        with (
            versions.installed().drafting(drafter),
            eagle.speculative_moe_backend_context(),
            eagle.speculative_moe_a2a_backend_context(),
        ):
            caught_up = drafter._draft_extend_for_prefill(part, read.hidden, read.next_tokens)
        spec = batch.spec_info
        for name in ("topk_p", "topk_index", "hidden_states"):
            if getattr(caught_up, name) is not None:
                values = getattr(spec, name).clone()  # a copy: SGLang may hold the old tensor
                values[index] = getattr(caught_up, name).to(values.dtype)
                setattr(spec, name, values)


def _between(parts: Sequence[Tensor], first: int, last: int) -> list[Tensor]:
    """Return rows [first, last) of the concatenation of parts, as views in a list."""
    selected = []
    begin = 0
    for part in parts:
        end = begin + len(part)
        if begin < last and first < end:
            selected.append(part[max(first - begin, 0) : last - begin])
        begin = end
    return selected


def _to_device(index: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(index).to(device)


def _rows_of(info: Any, index: Tensor, batch: int) -> Any:
    """Return a copy of a `SamplingBatchInfo` of `batch` requests, with the requests at `index` only.

    A tensor counts as per-request if its first dimension is `batch`; this is a guess by shape. All other fields are
    shared with `info`, and still describe the whole batch.
    """
    part = copy.copy(info)
    for name, value in vars(info).items():
        if isinstance(value, Tensor) and value.shape[:1] == (batch,):
            setattr(part, name, value[index])
    return part
