"""Drafts with the verifier's own noise: SGLang's drafter proposes argmax(s · log q + noise) instead of argmax q.

q are the drafter's probabilities, p the target's, and s is the sharpness, a factor (`decisions.decider.sharpness`).
The position-keyed verifier samples the target's token as argmax(log p + noise) with noise of (seed, position, token).
With the same noise the draft equals that token more often (docs/losslessness.md, Coupled drafts). The text does not
change, because the target's token never depends on a draft.

SGLang takes the argmax of the drafter's logits in three places:

- after the prefill, and after each round's pass over the accepted tokens. There the hooks choose the draft again, from
  the logits of that pass.
- in the loop over further drafts, which CUDA graphs capture. There the hooks replace the logits by others whose argmax
  is the draft. A graph reads its inputs at fixed addresses. So seeds, temperatures, top-k and the sharpness are copied
  into buffers before each round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_rlspec.config.spec import MOST_DRAFTS
from megatron_rlspec.kernels import chosen
from megatron_rlspec.noise import draw
from megatron_rlspec.rollout.sglang.scheduler import decisions, ragged
from megatron_rlspec.rollout.sglang.scheduler.verifier import limited
from megatron_rlspec.rollout.sglang.settings import Settings
from megatron_rlspec.token_filter import filtered

DRAFT_WORKER = "sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker"
# The fields of `_Rows` that captured graphs read at fixed addresses.
BUFFERED = ("seeds", "temperatures", "top_ks", "sharpness")
# A sharpness at which the noise cannot change the draft: it is the likeliest token.
GREEDY = 1e8


def hooks(settings: Settings) -> Iterator[tuple[str, Callable, str]]:
    """Yield the hook that changes every `EagleDraftWorker` when it is built."""
    if active(settings):
        yield f"{DRAFT_WORKER}.__init__", _install, "AFTER"


def active(settings: Settings) -> bool:
    """Return whether drafts take the verifier's noise."""
    return settings.verifier == "position_keyed" and settings.drafts == "coupled"


def _install(returned: Any, drafter: Any, *args: Any, **kwargs: Any) -> None:
    # The first call compares the kernel with plain torch and waits for the device. A graph's capture must not wait, so
    # make that call before SGLang captures graphs.
    chosen.sampling(torch.empty(0, device=drafter.draft_runner.device))
    CoupledDrafts(drafter)


@dataclass(frozen=True)
class _Rows:
    """How the drafts of B requests are chosen.

    seeds         [B] int64
    temperatures  [B, 1]
    top_ks        [B]; 1: a greedy request, whose draft is the likeliest token
    sharpness     [B, 1], the factor s of log q, the same for all requests
    info          SGLang's `SamplingBatchInfo` with top-k, top-p and min-p. None in a CUDA graph, which cannot branch on
                  these limits: there, drafts are chosen from all tokens
    """

    seeds: Tensor
    temperatures: Tensor
    top_ks: Tensor
    sharpness: Tensor
    info: Any = None

    def leading(self, rows: int, info: Any) -> _Rows:
        """Return views of the first `rows` rows, with `info`."""
        columns = {name: getattr(self, name)[:rows] for name in BUFFERED}
        return _Rows(**columns, info=info)

    @classmethod
    def from_info(cls, info: Any) -> _Rows:
        """Return the rows of all requests of a `SamplingBatchInfo`, at the sharpness in force."""
        sharpness = torch.full_like(info.temperatures, decisions.decider.sharpness)
        return cls(info.sampling_seed, info.temperatures, info.top_ks, sharpness, info)


class CoupledDrafts:
    """Replaces methods of one `EagleDraftWorker` and of its model runner, and calls SGLang's own ones inside.

    Make one for each worker: a second one would wrap the methods of the first.

    A round: `_fill_and_draft` fills the buffers and calls SGLang's `draft`. That replays a graph, or runs the loop
    `_further_drafts`, which calls `_run_model` for each further draft. After the verification `_after_extend` chooses
    the first draft of the next round.
    """

    def __init__(self, drafter: Any) -> None:
        self.drafter = drafter
        # the inputs of captured graphs, at fixed addresses, with a row for each possible request
        self._buffers: _Rows | None = None
        # the rows of the loop over further drafts while it runs, else None
        self._loop: _Rows | None = None
        self._step = 0  # passes of that loop so far, which is the column of `_logq` that the next pass writes
        # log q [rows, MOST_DRAFTS - 1] of the drafts behind the first one, at a fixed address, which graphs write
        self._logq = torch.empty(0)
        self._logits: Any = None  # LogitsProcessorOutput of the drafter's last pass
        # SGLang's own methods; ours take their place
        runner = drafter.draft_runner
        self._forward = runner.forward
        self._prefill = drafter._draft_extend_for_prefill
        self._extend = drafter._draft_extend_for_decode
        self._draft = drafter.draft
        self._further = drafter.draft_forward
        runner.forward = self._run_model
        drafter._draft_extend_for_prefill = self._after_prefill
        drafter._draft_extend_for_decode = self._after_extend
        drafter.draft = self._fill_and_draft
        drafter.draft_forward = self._further_drafts

    def _run_model(self, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Wrap a pass of the drafter's model. In the loop over further drafts, replace its logits."""
        result = self._forward(forward_batch, *args, **kwargs)
        self._logits = result.logits_output
        if self._loop is not None:
            logits = self._logits.next_token_logits
            # The drafter at position t predicts the token that the target samples at t + 1, with the noise of t + 1.
            keys = forward_batch.positions[: len(logits)] + 1
            drafts, logq = self._choose(logits, keys, self._loop)
            # Only ragged rounds read log q. A graph keeps what this branch did when the graph was captured. `why_even`
            # may be set later. Then graphs still write log q, and it is not read.
            if not decisions.decider.why_even:
                self._logq[: len(logq), self._step] = logq
                self._step += 1
            # SGLang takes the argmax of these logits, which is the draft.
            self._logits.next_token_logits = torch.zeros_like(logits).scatter_(1, drafts, 1.0)
        return result

    def _after_prefill(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        drafted = self._prefill(batch, *args, **kwargs)
        self._choose_first(batch, batch.seq_lens, drafted)
        return drafted

    def _after_extend(self, batch: Any, result: Any, *args: Any, **kwargs: Any) -> Any:
        graphs = self.drafter.cuda_graph_runner_for_draft_extend
        # A graph's replay does not call `_run_model`, so its logits are taken from `execute`. SGLang has another graph
        # runner for each number of drafts and swaps them, so each is wrapped at its first use. The attribute
        # `rlspec_execute` marks a wrapped one.
        if graphs is not None and not hasattr(graphs, "rlspec_execute"):
            graphs.rlspec_execute = graphs.execute
            graphs.execute = self._keeping_logits(graphs.execute)
        returned = self._extend(batch, result, *args, **kwargs)
        self._choose_first(batch, result.new_seq_lens, result.next_draft_input)
        return returned

    def _keeping_logits(self, execute: Callable) -> Callable:
        """Wrap a graph runner's `execute`, and keep its output in `_logits`."""

        def run(*args: Any, **kwargs: Any) -> Any:
            self._logits = execute(*args, **kwargs)
            return self._logits

        return run

    def _choose_first(self, batch: Any, keys: Tensor, drafted: Any) -> None:
        """Choose the first draft of each request for the next round. SGLang passes the draft's q on as `topk_p`.

        Reads `_logits`, so no other pass of the drafter may come between the pass that gave them and this call.

        keys     [B] or longer: the position of each request's newest token, at which the target samples the next one
        drafted  SGLang's `EagleDraftInput`, whose drafts are replaced
        """
        logits = self._logits.next_token_logits
        rows = _Rows.from_info(batch.sampling_info)
        drafts, logq = self._choose(logits, keys[: len(logits)], rows)
        drafted.topk_index = drafts.to(drafted.topk_index.dtype)
        if not decisions.decider.why_even:
            drafted.topk_p = logq.exp()[:, None].to(drafted.topk_p.dtype)

    def _fill_and_draft(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Wrap SGLang's `draft`, the loop or its graph; then choose which drafts a ragged round verifies."""
        rows = _Rows.from_info(batch.sampling_info)
        buffers = self._buffers_for(len(rows.seeds), rows)
        for name in BUFFERED:
            values = getattr(rows, name)
            getattr(buffers, name)[: len(values)].copy_(values)
        # q [B, 1] of the first drafts, which `_choose_first` stored; only read in ragged rounds
        first = batch.spec_info.topk_p
        drafted = self._draft(batch, *args, **kwargs)
        if ragged.present.drafts is not None:
            further = self._logq[: len(first), : self.drafter.speculative_num_steps - 1]
            ragged.present.choose(torch.cat([first.log(), further], 1))
        return drafted

    def _further_drafts(self, forward_batch: Any) -> Any:
        """Wrap SGLang's loop over further drafts. Graphs are captured from this method, too."""
        rows = forward_batch.batch_size
        buffers = self._buffers_for(rows, _Rows.from_info(forward_batch.sampling_info))
        # While a graph is captured, nothing may branch on `info` (`_Rows`).
        in_graph = forward_batch.positions.is_cuda and torch.cuda.is_current_stream_capturing()
        info = None if in_graph else forward_batch.sampling_info
        self._loop = buffers.leading(rows, info)
        self._step = 0
        try:
            return self._further(forward_batch)
        finally:
            self._loop = None

    def _buffers_for(self, rows: int, like: _Rows) -> _Rows:
        """Return the buffers. Only the first call makes them, because graphs keep the addresses.

        rows  number of rows of the first batch; the buffers have `max_running_requests` rows, or `rows` if that is more
        like  any rows, for device and types
        """
        if self._buffers is None:
            rows = max(rows, self.drafter.draft_runner.max_running_requests)
            self._logq = like.temperatures.new_zeros(rows, MOST_DRAFTS - 1)
            self._buffers = _Rows(
                like.temperatures.new_zeros(rows, dtype=torch.int64),
                like.temperatures.new_ones(rows, 1),
                like.top_ks.new_ones(rows),
                like.temperatures.new_ones(rows, 1),
            )
        return self._buffers

    def _choose(self, logits: Tensor, keys: Tensor, rows: _Rows) -> tuple[Tensor, Tensor]:
        """Return the drafts [B, 1] int64, as columns of `logits [B, S]`, and their log q [B].

        S is the number of tokens from which the drafter drafts. Log q is that at the request's temperature, before
        sharpness and limits.

        keys  [B] int64: the positions at which the target samples the same tokens, which key the noise
        """
        # [S] token ids of the columns; None: column i is token i
        token_ids = self.drafter.hot_token_id
        filtering = rows.info is not None and limited(rows.info)
        kernel = None if filtering else chosen.sampling(logits)
        if kernel is not None:
            greedy = rows.top_ks[:, None] == 1
            sharpness = rows.sharpness.masked_fill(greedy, GREEDY)
            sampled, logprobs = kernel.sample(
                logits, rows.seeds, keys, rows.temperatures, sharpness, token_ids
            )
            return sampled[:, None], logprobs
        unlimited_logq = logq = torch.log_softmax(logits.float() / rows.temperatures, -1)
        if filtering:
            info = rows.info
            min_ps = info.min_ps if info.need_min_p_sampling else None
            logq = filtered(logq.exp(), info.top_ks, info.top_ps, min_ps).log()
        logq = logq * rows.sharpness
        drafts = draw(logq, rows.seeds, keys, token_ids)[:, None]
        drafts = torch.where(rows.top_ks[:, None] == 1, logits.argmax(-1, keepdim=True), drafts)
        return drafts, unlimited_logq.gather(1, drafts)[:, 0]
