"""Rounds without any drafter pass, and a pass that fills the drafter's cache when drafting starts again.

At SGLang's step 0 the drafter still extends its cache in every round. While speculation is off, this file keeps the
inputs of that pass instead: the target's hidden state h_t and the token x_t of every new position. When drafting starts
again, the drafter reads all of them in one extend (ReSpec, section 5.2). To try drafts, a few requests catch up. In
those rounds the drafts of the others are random, and their texts are right all the same, since the target verifies
every draft. The inputs that they miss are kept too.

All of this runs when a round is launched, in launch order, on the stream of the forward passes. Results on the host are
not needed: under SGLang's overlap scheduler they come a round late. Only `close` waits for the device, where it needs
accepted counts, and sequence lengths that SGLang has not copied to the host.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from typing import Any

import torch

from megatron_rlspec.rollout.sglang.server import versions
from megatron_rlspec.rollout.sglang.server.stash import SkippedRound, Stash

_Kept = dict[str, tuple[torch.Tensor, torch.Tensor]]  # request id -> hidden [n, H], tokens [n]
# Index into the batch, first position, hidden [n, H] and tokens [n] from there on, and the token after them [1].
_Part = tuple[int, int, torch.Tensor, torch.Tensor, torch.Tensor]


class DrafterGap:
    """The inputs that the drafter of one `EAGLEWorkerV2` has not read, by request.

    Every `every` rounds their rows move to host memory (`Stash`). One pass of the drafter reads at most `most` tokens.
    """

    def __init__(self, worker: Any, every: int = 64, most: int = 8192) -> None:
        self.worker = worker
        self.every = every
        self.most = most
        self._stash = Stash()
        self._reset()

    def _reset(self) -> None:
        self._total = 0  # the most tokens that one request can have missed
        self._since: dict[str, int] = {}  # `_total` when a request's drafter last was up to date; 0 if absent
        self._rounds: list[SkippedRound] = []  # on the device
        self._stash.keep(())

    @property
    def open(self) -> bool:
        """Return whether any round was recorded since the last complete catch-up."""
        return self._total > 0

    def record(
        self,
        reqs: Sequence[Any],
        hidden: torch.Tensor,
        tokens: torch.Tensor,
        counts: torch.Tensor | None = None,
        current: Collection[int] = (),
    ) -> None:
        """Keep the inputs of a round: hidden [B * w, H], tokens [B * w], of which `counts` [B] (None: all) are valid.

        The tensors are not copied, so no later pass may overwrite them. `current`: indices of the requests whose
        drafter has read them.
        """
        width = len(tokens) // len(reqs)
        self._rounds.append(SkippedRound(self._total, [req.rid for req in reqs], hidden, tokens, width, counts))
        self._total += width
        for i in current:
            self._since[reqs[i].rid] = self._total
        if len(self._rounds) == self.every:
            self._store([req.rid for req in reqs])

    def forget(self, reqs: Sequence[Any]) -> None:
        """Note that these requests' drafter cache is complete, as after a prefill."""
        for req in reqs:
            self._since[req.rid] = self._total

    def missed(self, reqs: Sequence[Any], n: int) -> int:
        """Return how many tokens the n least behind requests have missed in all. Refused drafts count as well."""
        behind = [self._total - self._since.get(req.rid, 0) for req in reqs]
        return sum(behind) if n >= len(behind) else sum(sorted(behind)[:n])

    def close(self, batch: Any, n: int, also: Collection[int] = ()) -> list[int] | None:
        """Let the drafter read what requests missed, and put their first drafts into `spec_info`.

        These are the n least behind requests and `also`, indices into the batch.

        Changes `batch.spec_info` in place; SGLang restores its own state of the batch after the round. Returns the
        requests' indices, or None if no request is behind any more.
        """
        reqs = batch.reqs
        lags = [self._total - self._since.get(req.rid, 0) for req in reqs]
        order = sorted(range(len(reqs)), key=lags.__getitem__)
        chosen = sorted({*order[:n], *also})
        behind = [i for i in chosen if lags[i] > 0]
        kept = self._take([reqs[i].rid for i in behind], batch.spec_info.bonus_tokens.device)
        if self._samples_drafts():
            _be_certain(batch, sorted(set(chosen) - set(behind)))
        self._feed(batch, [(i, *kept[reqs[i].rid]) for i in behind if reqs[i].rid in kept])
        if len(chosen) == len(reqs):
            self._reset()
            return None
        self.forget([reqs[i] for i in behind])
        return chosen

    def _samples_drafts(self) -> bool:
        return versions.installed().samples_drafts(self.worker)

    def _take(self, rids: Sequence[str], device: torch.device) -> _Kept:
        """Return what each of these requests missed, in order, without the requests that missed nothing."""
        stored = self._select(list(self._stash.rounds()), rids, device, whole=False)
        latest = self._select(self._rounds, rids, device, whole=True)
        taken: _Kept = {}
        for rid in rids:
            if parts := [kept[rid] for kept in (stored, latest) if rid in kept]:
                taken[rid] = (torch.cat([part for part, _ in parts]), torch.cat([part for _, part in parts]))
        return taken

    def _select(self, rounds: Sequence[SkippedRound], rids: Sequence[str], device: torch.device, whole: bool) -> _Kept:
        """Return the same for these rounds, whose tensors are on one device, moved to `device`.

        `whole`: select from all rows at once, which copies more rows, but sends the device only one list of places.
        """
        rows: dict[str, list[int]] = {rid: [] for rid in rids}  # places in the concatenation of what is selected
        hidden: list[torch.Tensor] = []
        tokens: list[torch.Tensor] = []
        size = 0
        known = [kept.counts for kept in rounds if kept.counts is not None]
        read = iter(torch.cat(known).tolist() if known else ())  # one wait for the device
        for kept in rounds:
            counts = [kept.width if kept.counts is None else next(read) for _ in kept.rids]
            selected: list[int] = []
            for i, rid in enumerate(kept.rids):
                if rid in rows and kept.at >= self._since.get(rid, 0):
                    first = size + (i * kept.width if whole else len(selected))
                    rows[rid] += range(first, first + counts[i])
                    selected += range(i * kept.width, i * kept.width + counts[i])
            if selected and whole:
                hidden.append(kept.hidden)
                tokens.append(kept.tokens.to(torch.int64))
                size += len(kept.tokens)
            elif selected:
                index = torch.tensor(selected, device=kept.hidden.device)
                hidden.append(kept.hidden[index])
                tokens.append(kept.tokens[index].to(torch.int64))
                size += len(selected)
        if not size:
            return {}
        rows = {rid: numbers for rid, numbers in rows.items() if numbers}
        index = torch.tensor([n for numbers in rows.values() for n in numbers], device=hidden[0].device)
        parts = (torch.cat(all_)[index].to(device).split([len(n) for n in rows.values()]) for all_ in (hidden, tokens))
        return dict(zip(rows, zip(*parts, strict=True), strict=True))

    def _store(self, running: Sequence[str]) -> None:
        self._stash.put(self._rounds)
        self._stash.keep(set(running))
        self._since = {rid: self._since[rid] for rid in running if rid in self._since}
        self._rounds = []

    def _feed(self, batch: Any, missed: Sequence[tuple[int, torch.Tensor, torch.Tensor]]) -> None:
        """Run as few drafter passes as `most` allows. missed: (index into the batch, hidden [n, H], tokens [n])."""
        ends = (batch.seq_lens if batch.seq_lens_cpu is None else batch.seq_lens_cpu).tolist() if missed else []
        parts: list[_Part] = []
        room = self.most
        for i, hidden, tokens in missed:
            following = torch.cat([tokens[1:], batch.spec_info.bonus_tokens[i : i + 1].to(tokens)])
            start = ends[i] - len(tokens)
            done = 0
            while done < len(tokens):
                stop = min(done + room, len(tokens))
                parts.append((i, start + done, hidden[done:stop], tokens[done:stop], following[stop - 1 : stop]))
                room -= stop - done
                done = stop
                if room == 0:
                    self._extend(batch, parts)
                    parts = []
                    room = self.most
        if parts:
            self._extend(batch, parts)

    def _extend(self, batch: Any, parts: Sequence[_Part]) -> None:
        """Run one prefill of the drafter over parts of requests, at most one part of each."""
        from sglang.srt.model_executor.forward_batch_info import ForwardMode
        from sglang.srt.speculative import eagle_worker_v2 as eagle

        behind, starts, hidden, tokens, following = map(list, zip(*parts, strict=True))
        device = batch.seq_lens.device
        index = torch.tensor(behind, device=device)
        counts = [len(part) for part in tokens]
        ends = [start + count for start, count in zip(starts, counts, strict=True)]
        positions = torch.cat([torch.arange(a, b) for a, b in zip(starts, ends, strict=True)]).to(device)
        slots = batch.req_pool_indices[index]
        owner = slots.repeat_interleave(torch.tensor(counts, device=device), output_size=sum(counts))
        spec = batch.spec_info

        part = copy.copy(batch)  # A shallow copy: the forward pass must not change the scheduler's batch.
        part.forward_mode = ForwardMode.EXTEND
        part.reqs = [batch.reqs[i] for i in behind]
        part.input_ids = torch.cat(tokens).to(device)
        part.out_cache_loc = batch.req_to_token_pool.req_to_token[owner, positions].to(torch.int64)
        part.req_pool_indices = slots
        part.seq_lens_cpu = torch.tensor(ends)
        part.seq_lens = part.seq_lens_cpu.to(batch.seq_lens)
        part.seq_lens_sum = sum(ends)
        part.orig_seq_lens = part.seq_lens.to(torch.int32)
        part.prefix_lens = starts
        part.extend_lens = counts
        part.extend_num_tokens = sum(counts)
        part.extend_logprob_start_lens = counts
        part.return_logprob = False
        part.multimodal_inputs = batch.multimodal_inputs and [batch.multimodal_inputs[i] for i in behind]
        part.sampling_info = _rows_of(batch.sampling_info, index, len(batch.reqs))

        drafter = self.worker.draft_worker
        with (
            versions.installed().drafting(drafter),
            eagle.speculative_moe_backend_context(),
            eagle.speculative_moe_a2a_backend_context(),
        ):
            caught_up = drafter._draft_extend_for_prefill(
                part, torch.cat(hidden).to(device), torch.cat(following).to(device)
            )
        for name in ("topk_p", "topk_index", "hidden_states", "draft_probs"):
            if getattr(caught_up, name) is not None:
                values = getattr(spec, name).clone()
                values[index] = getattr(caught_up, name).to(values.dtype)
                setattr(spec, name, values)


def _be_certain(batch: Any, current: Sequence[int]) -> None:
    """Set q to one-hot at the first draft x of all but the `current` requests, so that x is accepted with p(x).

    Rejection sampling is exact only with the distribution that a draft was drawn from. A round without drafts leaves
    none. Under the overlap scheduler an older round's remains in the buffer between rounds (`FutureMap`).
    """
    spec = batch.spec_info
    drawn = spec.draft_probs
    certain = torch.zeros(len(batch.reqs), batch.model_config.vocab_size, device=spec.topk_index.device)
    certain.scatter_(1, spec.topk_index[:, :1], 1.0)
    if drawn is not None:
        certain[list(current)] = drawn[list(current)].to(certain)
    spec.draft_probs = certain


def _rows_of(info: Any, index: torch.Tensor, batch: int) -> Any:
    """Return a `SamplingBatchInfo` with the rows at `index` of what drafting reads."""
    part = copy.copy(info)
    for name, value in vars(info).items():
        if isinstance(value, torch.Tensor) and value.shape[:1] == (batch,):
            setattr(part, name, value[index])
    return part
