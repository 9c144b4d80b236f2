"""A real off: rounds without any drafter pass, and one pass that catches up when drafting starts again.

At SGLang's step 0 the drafter still extends its cache every round. While off we keep what that pass would have read,
the target's hidden state h_t and the token x_t of every new position, and feed the whole gap in one extend on
re-enabling (ReSpec, section 5.2).
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from megatron_rlspec.rollout.sglang import versions


class DrafterGap:
    """What the drafter of one `EAGLEWorkerV2` has not seen. Rounds that are off add one position per request.

    Every `every` rounds what was kept moves to host memory, without the requests that have ended. Past `most_tokens`
    positions `full` asks to close the gap even while off, so that memory stays bounded.
    """

    def __init__(self, worker: Any, every: int = 64, most_tokens: int = 1 << 18) -> None:
        self.worker = worker
        self.every, self.most_tokens = every, most_tokens
        self._reset()

    def _reset(self) -> None:
        self.rounds = 0
        self._hidden: list[torch.Tensor] = []
        self._tokens: list[torch.Tensor] = []
        self._rows: dict[str, list[int]] = {}
        self._size = 0

    @property
    def full(self) -> bool:
        return self._size >= self.most_tokens

    def record(self, reqs: list[Any], hidden: torch.Tensor, tokens: torch.Tensor) -> None:
        """hidden [B, H] of the position that each request just passed, tokens [B] at that position."""
        self._hidden.append(hidden.clone())  # CUDA graphs write into the same buffer every round.
        self._tokens.append(tokens.clone())
        for i, req in enumerate(reqs):
            self._rows.setdefault(req.rid, []).append(self._size + i)
        self._size += len(reqs)
        self.rounds += 1
        if self.rounds % self.every == 0:
            self._store({req.rid for req in reqs})

    def forget(self, reqs: list[Any]) -> None:
        """A prefill rebuilds the drafter's cache from the prompt on."""
        for req in reqs:
            self._rows.pop(req.rid, None)

    def close(self, batch: Any) -> None:
        """Feed the gap of every request of this decode batch, and put the drafts' first step into `batch.spec_info`."""
        rows = [self._rows.get(req.rid) for req in batch.reqs]
        behind = [i for i, r in enumerate(rows) if r]
        if behind:
            counts = [len(rows[i]) for i in behind]
            device = batch.seq_lens.device
            hidden, tokens = self._take([row for i in behind for row in rows[i]])
            self._extend(batch, behind, counts, hidden.to(device), tokens.to(device, torch.int64))
        self._reset()

    def _store(self, running: set[str]) -> None:
        self._rows = {rid: rows for rid, rows in self._rows.items() if rid in running}
        hidden, tokens = self._take([row for rows in self._rows.values() for row in rows])
        self._hidden, self._tokens, self._size = [hidden.cpu()], [tokens.cpu()], len(tokens)
        start = 0
        for rid, rows in self._rows.items():
            self._rows[rid] = list(range(start, start + len(rows)))
            start += len(rows)

    def _take(self, rows: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """These rows of all that was kept, on the device of the first part."""
        device = self._hidden[0].device
        index = torch.tensor(rows, dtype=torch.int64, device=device)
        return tuple(torch.cat([part.to(device) for part in parts])[index] for parts in (self._hidden, self._tokens))

    def _extend(
        self, batch: Any, behind: list[int], counts: list[int], hidden: torch.Tensor, tokens: torch.Tensor
    ) -> None:
        """One prefill of the drafter over `counts[j]` positions of request `behind[j]`, flat in `hidden`, `tokens`."""
        from sglang.srt.model_executor.forward_batch_info import ForwardMode
        from sglang.srt.speculative import eagle_worker_v2 as eagle

        index = torch.tensor(behind, device=batch.seq_lens.device)
        seq_lens = batch.seq_lens if batch.seq_lens_cpu is None else batch.seq_lens_cpu
        ends = [seq_lens.tolist()[i] for i in behind]
        starts = [end - count for end, count in zip(ends, counts, strict=True)]
        positions = torch.cat([torch.arange(a, b) for a, b in zip(starts, ends, strict=True)]).to(index.device)
        slots = batch.req_pool_indices[index]
        owner = slots.repeat_interleave(torch.tensor(counts, device=index.device))
        spec = batch.spec_info

        part = copy.copy(batch)  # Shallow: the scheduler's batch must not notice this forward pass.
        part.forward_mode = ForwardMode.EXTEND
        part.reqs = [batch.reqs[i] for i in behind]
        part.input_ids = tokens
        part.out_cache_loc = batch.req_to_token_pool.req_to_token[owner, positions].to(torch.int64)
        part.req_pool_indices = slots
        part.seq_lens, part.seq_lens_cpu, part.seq_lens_sum = batch.seq_lens[index], torch.tensor(ends), sum(ends)
        part.orig_seq_lens = part.seq_lens.to(torch.int32)
        part.prefix_lens, part.extend_lens, part.extend_num_tokens = starts, counts, sum(counts)
        part.extend_logprob_start_lens = counts
        part.return_logprob = False
        part.multimodal_inputs = batch.multimodal_inputs and [batch.multimodal_inputs[i] for i in behind]

        drafter = self.worker.draft_worker
        with (
            versions.installed().drafting(drafter),
            eagle.speculative_moe_backend_context(),
            eagle.speculative_moe_a2a_backend_context(),
        ):
            caught_up = drafter._draft_extend_for_prefill(part, hidden, spec.bonus_tokens[index])
        for name in ("topk_p", "topk_index", "hidden_states"):
            values = getattr(spec, name).clone()
            values[index] = getattr(caught_up, name).to(values.dtype)
            setattr(spec, name, values)
