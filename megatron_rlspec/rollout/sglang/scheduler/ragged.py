"""Rounds that verify of each request the drafts worth it (`speculation/ragged.py`), for chains of EAGLE and EAGLE-3.

SGLang verifies all drafts: B requests of k drafts are B * (k + 1) nodes in *even* rows. A ragged round runs the target
on some of these nodes only, packed without gaps. SGLang's attention takes such a `RaggedVerifyLayout` for DSpark. The
sampled tokens, their log-probs and the hidden states go back into even rows. Nothing behind the verification changes.

    draft ─► coupled.py: log q ─► choose: the likeliest drafts ─► prepare: packed nodes ─► target
                                                                                            │
    draft extend ◄─ SGLang: even rows ◄─ verifier.py: sampled tokens, hidden states ◄───────┘

The host says how many drafts of the batch are verified, by the rounds before. The device chooses which ones. So the
host waits for nothing. Tensor-parallel ranks choose by the log q of the first one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megatron_rlspec.rollout.sglang.scheduler import versions
from megatron_rlspec.rollout.sglang.settings import Settings
from megatron_rlspec.speculation.ragged import EXPLORE, Selection

PREPARE = "sglang.srt.speculative.eagle_utils.eagle_prepare_for_verify"
EXTEND = "sglang.srt.layers.attention.intel_amx_backend.IntelAMXAttnBackend._build_extend_metadata"


def hooks(settings: Settings) -> Iterator[tuple[str, Callable, str]]:
    if settings.ragged:
        yield PREPARE, present.prepare, "AROUND"
        yield EXTEND, extend_lengths, "AROUND"


def unsupported(runner: Any) -> str:
    """Return why the target's `ModelRunner` cannot run ragged rounds, once it has its attention; "" if it can."""
    from sglang.srt.layers.sampler import SGLANG_RETURN_ORIGINAL_LOGPROB

    attention = type(runner.attn_backend).__name__
    if attention != "IntelAMXAttnBackend":
        return f"{attention} was never run with ragged rounds"
    if SGLANG_RETURN_ORIGINAL_LOGPROB:
        return "SGLang computes original log-probs of even rows only"
    return ""


def asks_no_more(batch: Any) -> bool:
    """Return whether the sampling of a batch needs no even rows: SGLang adds penalties and biases to these."""
    info = batch.sampling_info
    even = (info.acc_additive_penalties, info.acc_scaling_penalties, info.logit_bias)
    return all(values is None for values in even) and not info.has_watermark_candidates


@dataclass(frozen=True)
class Chosen:
    """The drafts that a round verifies, of B requests with k drafts each, and the N = B + `drafts` nodes of these.

    logq      [B, k] of the drafts
    lengths   [B] verified drafts
    requests  [N] of the nodes
    nodes     [N] indices of the nodes in even rows
    """

    logq: torch.Tensor
    lengths: torch.Tensor
    requests: torch.Tensor
    nodes: torch.Tensor

    def even(self, packed: torch.Tensor) -> torch.Tensor:
        """Return values `[N, ...]` of the nodes in even rows, `[B * (k + 1), ...]`; 0 of other nodes."""
        batch, steps = self.logq.shape
        rows = packed.new_zeros((batch * (steps + 1), *packed.shape[1:]))
        rows[self.nodes] = packed
        return rows

    def without_others(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return tokens [B, k + 1] of the nodes, with -1 for those that are not verified."""
        depth = torch.arange(tokens.shape[1], device=tokens.device)
        return tokens.masked_fill(depth > self.lengths[:, None], -1)


class RaggedRound:
    """The round that is being launched.

    drafts  of all requests that it verifies; None: it is even
    """

    def __init__(self) -> None:
        self.drafts: int | None = None
        self.chosen: Chosen | None = None
        self._exploring = 0
        self._log_q: torch.Tensor = torch.empty(0)  # [BINS], of the table
        self._chances: torch.Tensor = torch.empty(0)
        self._rates: np.ndarray | None = None  # that `_chances` were made of

    def even(self) -> None:
        """Begin a round that verifies all drafts."""
        self.drafts = None
        self.chosen = None

    def begin(self, drafts: int, selection: Selection, device: torch.device) -> None:
        """Begin a round that verifies so many drafts of the batch."""
        self.drafts = drafts
        self.chosen = None
        self._exploring = selection.exploring()
        centres, rates = selection.table
        if rates is not self._rates:
            self._rates = rates
            table = torch.tensor(np.stack([centres, rates]), dtype=torch.float32)
            self._log_q, self._chances = table.to(device, non_blocking=True)

    def choose(self, logq: torch.Tensor) -> None:
        """Choose the likeliest drafts, by log q [B, k]."""
        assert self.drafts is not None
        group = versions.installed().tensor_group()
        if group.world_size > 1:
            group.broadcast(logq, src=0)
        batch, steps = logq.shape
        products = self._chance_of(logq).cumprod(1)
        products[self._exploring :: EXPLORE] += 1
        owners = products.flatten().topk(self.drafts).indices // steps
        lengths = torch.zeros(batch, dtype=torch.int64, device=logq.device)
        lengths.scatter_add_(0, owners, torch.ones_like(owners))
        requests = torch.arange(batch, device=logq.device)
        requests = requests.repeat_interleave(lengths + 1, output_size=batch + self.drafts)
        ends = (lengths + 1).cumsum(0)
        starts = ends - lengths - 1
        depth = torch.arange(len(requests), device=logq.device) - starts[requests]
        self.chosen = Chosen(logq, lengths, requests, requests * (steps + 1) + depth)

    def _chance_of(self, logq: torch.Tensor) -> torch.Tensor:
        """Return what `Selection.chances` returns."""
        above = torch.bucketize(logq, self._log_q).clamp(1, len(self._log_q) - 1)
        low, high = self._log_q[above - 1], self._log_q[above]
        share = ((logq - low) / (high - low)).clamp(0, 1)
        return torch.lerp(self._chances[above - 1], self._chances[above], share)

    def prepare(self, original: Callable, round_: Any, pool: Any, batch: Any, worker: Any) -> Any:
        """Wrap SGLang's preparation of the target's pass, which then runs on the chosen nodes.

        round_  SGLang's `EagleVerifyInput`. Its positions stay those of the nodes, the rest becomes even again
        """
        chosen = self.chosen
        if chosen is None:
            return original(round_, pool, batch, worker)
        nodes = chosen.nodes
        even = round_.draft_token, round_.prepared_out_cache_loc, round_.kv_loc_plan
        slots = round_.prepared_out_cache_loc
        if slots is None:
            places = batch.seq_lens[:, None] + torch.arange(
                round_.draft_token_num, device=batch.seq_lens.device
            )
            slots = pool.req_to_token[batch.req_pool_indices[:, None], places].flatten().long()
        round_.draft_token = round_.draft_token[nodes]
        round_.positions = round_.positions[nodes]
        round_.prepared_out_cache_loc = slots[nodes]
        round_.kv_loc_plan = None  # SGLang makes one for these slots
        lengths = chosen.lengths + 1
        round_.ragged_verify_layout = versions.installed().ragged_layout(lengths, len(nodes))
        try:
            return original(round_, pool, batch, worker)
        finally:
            round_.draft_token, round_.prepared_out_cache_loc, round_.kv_loc_plan = even
            batch.out_cache_loc = slots  # of the drafter's pass


present = RaggedRound()


def extend_lengths(original: Callable, backend: Any, forward_batch: Any) -> Any:
    """Wrap the lengths that CPU attention takes: (all tokens, new tokens, starts of the new ones, tree mask)."""
    layout = getattr(forward_batch.spec_info, "ragged_verify_layout", None)
    if layout is None:
        return original(backend, forward_batch)
    lengths = forward_batch.seq_lens + layout.verify_lens
    return lengths, layout.verify_lens, layout.extend_start_loc, None
