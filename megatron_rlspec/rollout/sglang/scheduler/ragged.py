"""Rounds that verify, of each request, only the drafts that are worth it; why: see `speculation/ragged.py`.

SGLang verifies all drafts. B requests with k drafts each are B * (k + 1) nodes: each request has a row of k + 1 of
them. Such rows are called *even*. A ragged round runs the target on some of the nodes only, packed without gaps, by the
`RaggedVerifyLayout` that SGLang's attention has for DSpark. Then the sampled tokens, their log-probs and the hidden
states are put back into even rows, so what follows the verification is SGLang's and unchanged.

    draft ─► coupled.py: log q ─► choose: the likeliest drafts ─► prepare: packed nodes ─► target
                                                                                            │
    draft extend ◄─ SGLang: even rows ◄─ verifier.py: sampled tokens, hidden states ◄───────┘

The host says how many drafts of the batch are verified, from what it learnt in earlier rounds. The device chooses which
drafts, so the host does not wait for the device. All tensor-parallel ranks choose by the first rank's log q. Drafts
must be coupled (`coupled.py`): `http/plugin.py` refuses ragged rounds without coupled drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad

from megatron_rlspec.rollout.sglang.scheduler.parallel import parallel
from megatron_rlspec.rollout.sglang.settings import Settings
from megatron_rlspec.speculation.ragged import CELLS, EXPLORE, LOWEST, Selection

# The functions of SGLang that the hooks wrap.
PREPARE = "sglang.srt.speculative.eagle_utils.eagle_prepare_for_verify"
GRAPHS = "sglang.srt.model_executor.runner.decode_cuda_graph_runner"
EXTEND = "sglang.srt.layers.attention.intel_amx_backend.IntelAMXAttnBackend._build_extend_metadata"


def hooks(settings: Settings) -> Iterator[tuple[str, Callable, str]]:
    """Yield the hooks if rounds may be ragged, for `http/plugin.py`."""
    if settings.ragged:
        yield PREPARE, present.prepare, "AROUND"
        yield EXTEND, extend_lengths, "AROUND"
        yield f"{GRAPHS}.ragged_verify_compact_graphs_enabled", present.captures, "AROUND"
        yield f"{GRAPHS}.DecodeCudaGraphRunner.get_spec_info", with_layout, "AFTER"


def why_unsupported(runner: Any) -> str:
    """Return why the target's `ModelRunner` cannot run ragged rounds; "" if it can.

    Call it once the runner has its attention (`attn_backend`).
    """
    from sglang.srt.layers.sampler import SGLANG_RETURN_ORIGINAL_LOGPROB

    backend = runner.attn_backend
    attention = type(backend).__name__
    if attention == "FlashAttentionBackend":
        if backend.fa_impl_ver != 3 or backend.use_mla or backend.has_swa:
            return "of FlashAttention, only version 3 with one KV cache of whole contexts was tried"
    elif attention != "IntelAMXAttnBackend":
        return f"{attention} takes even rounds only"
    options = runner.server_args
    if options.enable_two_batch_overlap or options.disable_cuda_graph_padding:
        return "SGLang's graphs of ragged rounds need padding, and no two-batch overlap"
    if runner.lora_manager is not None:
        return "SGLang's graphs of ragged rounds do not support LoRA"
    if SGLANG_RETURN_ORIGINAL_LOGPROB:
        return "SGLang computes original log-probs of even rows only"
    return ""


def can_sample_packed(batch: Any) -> bool:
    """Return whether a batch can be sampled from packed nodes.

    SGLang adds penalties, biases and watermarks to even rows only.
    """
    info = batch.sampling_info
    even = (info.acc_additive_penalties, info.acc_scaling_penalties, info.logit_bias)
    return all(values is None for values in even) and not info.has_watermark_candidates


@dataclass(frozen=True)
class Chosen:
    """The drafts that a round verifies, of B requests with k drafts each.

    The N = B + (drafts verified) nodes are packed by request, each request's first node before its drafts.

    logq      [B, k] float32: the drafter's log-probability of each draft
    lengths   [B] int64, 0 to k: number of verified drafts of each request, which are the first ones of its chain
    requests  [N] int64: the request of each node, by its index in the batch
    nodes     [N] int64: the index of each node in even rows, from 0 to B * (k + 1) - 1
    """

    logq: torch.Tensor
    lengths: torch.Tensor
    requests: torch.Tensor
    nodes: torch.Tensor

    def to_even_rows(self, packed: torch.Tensor) -> torch.Tensor:
        """Return values `[N, ...]` of the verified nodes in even rows, `[B * (k + 1), ...]`, with 0 for other nodes."""
        batch, steps = self.logq.shape
        rows = packed.new_zeros((batch * (steps + 1), *packed.shape[1:]))
        rows[self.nodes] = packed
        return rows

    def without_others(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return tokens [B, k + 1] of all nodes, with -1 for the drafts that are not verified.

        No target token is -1, so SGLang's walk refuses these drafts.
        """
        depth = torch.arange(tokens.shape[1], device=tokens.device)
        return tokens.masked_fill(depth > self.lengths[:, None], -1)


class RaggedRound:
    """Which drafts the round that is being launched verifies. One object serves all rounds of a scheduler.

    In each round these run in this order, in the scheduler's thread: `begin` or `begin_even` (called by
    `controller.py`), `choose` (by `coupled.py`, after drafting; not in an even round), `prepare` (by SGLang; not in a
    round of `plain_round.py`). Then `verifier.py` and `controller.py` read `chosen`.

    drafts  how many drafts the round verifies, of all requests together; None: all of them, in even rows
    chosen  the drafts that it verifies, once `choose` was called; None before, and in a round that verifies all drafts
    """

    def __init__(self) -> None:
        # The target's `ModelRunner`, which `DraftController` sets; None in an engine without adaptive speculation.
        self.runner: Any = None
        self.drafts: int | None = None
        self.chosen: Chosen | None = None
        # the first request that verifies all its drafts (`Selection.exploring`)
        self._exploring = 0
        # the `Selection.table` from which `_chances` was copied
        self._table: np.ndarray | None = None
        self._chances: torch.Tensor = torch.empty(0)  # that table on the device: [CELLS] float32

    def begin_even(self) -> None:
        """Begin a round that verifies all drafts."""
        self.drafts = None
        self.chosen = None

    def begin(self, drafts: int, most: int, selection: Selection, batch: Any) -> None:
        """Begin a round that verifies `drafts` of the batch's `most` drafts, or more if the graph has room for them.

        selection  of the rule, from whose table each draft gets its chance
        batch      SGLang's `ScheduleBatch`; `choose` must get log q of the same requests
        """
        requests = len(batch.reqs)
        self.drafts = min(self._tokens(requests + drafts) - requests, most)
        self.chosen = None
        self._exploring = selection.exploring()
        # `Selection` makes a new table when it learns, and never writes into one.
        if selection.table is not self._table:
            self._table = selection.table
            chances = torch.tensor(selection.table, dtype=torch.float32)
            self._chances = chances.to(batch.seq_lens.device, non_blocking=True)

    @property
    def _graphs(self) -> Any:
        """Return the target's graph runner if it has captured graphs by numbers of tokens (`captures`), else None."""
        graphs = getattr(self.runner, "decode_cuda_graph_runner", None)
        return graphs if getattr(graphs, "ragged_verify_mode", False) else None

    def _tokens(self, nodes: int) -> int:
        """Return how many tokens a pass over `nodes` nodes has: those of the smallest graph that holds them.

        Without graphs, or if no graph is large enough, there is no padding.
        """
        if self._graphs is not None:
            for tokens in self._graphs.capture_num_tokens:  # ascending
                if tokens >= nodes:
                    return tokens
        return nodes

    def choose(self, logq: torch.Tensor) -> None:
        """Choose the drafts whose chains are likeliest to be accepted, by log q [B, k]. Sets `chosen`.

        Call it after `begin`. With several ranks the first rank's values are written into `logq`. Collective over the
        tensor-parallel ranks. The host does not wait for the device.
        """
        assert self.drafts is not None
        group = parallel().tp_group
        # Rounding can differ between ranks. Ranks that chose different nodes would run passes that do not match.
        if group.world_size > 1:
            group.broadcast(logq, src=0)
        batch, steps = logq.shape
        # The cell of each draft, as `cells_of` in `speculation/ragged.py` computes it on the host: change both.
        share = (logq.abs() / -LOWEST).nan_to_num(1.0).clamp(max=1).sqrt().sqrt()
        products = self._chances[((1 - share) * (CELLS - 0.5)).long()].cumprod(1)
        # Products are at most 1, so all drafts of exploring requests now come first.
        products[self._exploring :: EXPLORE] += 1
        # A request's products never rise along its chain, so its chosen drafts are its first ones: count them.
        owners = products.flatten().topk(self.drafts).indices // steps
        lengths = torch.zeros(batch, dtype=torch.int64, device=logq.device)
        lengths.scatter_add_(0, owners, torch.ones_like(owners))
        widths = lengths + 1
        width = steps + 1
        # [B]: index of a request's first node in even rows, minus its index among the packed nodes
        ahead = (
            torch.arange(0, batch * width, width, device=logq.device) - widths.cumsum(0) + widths
        )
        # The host knows this number, so `repeat_interleave` need not wait for the device to add up the widths.
        node_count = batch + self.drafts
        nodes = ahead.repeat_interleave(widths, output_size=node_count)
        nodes = nodes + torch.arange(node_count, device=logq.device)
        self.chosen = Chosen(logq, lengths, nodes // width, nodes)

    def captures(self, original: Callable, algorithm: Any) -> bool:
        """Wrap SGLang's check whether the target's graphs are captured by numbers of tokens instead of requests.

        Packed nodes need graphs by tokens: the same number of requests can have any number of nodes.
        """
        ragged = self.runner is not None and not why_unsupported(self.runner)
        return ragged or original(algorithm)

    def prepare(
        self, original: Callable, verify_input: Any, pool: Any, batch: Any, worker: Any
    ) -> Any:
        """Wrap SGLang's preparation of the target's pass, so that it runs on the chosen nodes.

        In an even round on graphs by numbers of tokens the pass runs on all nodes, padded. In an even round without
        such graphs nothing changes.

        verify_input  SGLang's `EagleVerifyInput`; it has its even rows again when this returns
        """
        from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout

        nodes: Any = slice(None)
        if self.chosen is not None:
            nodes = self.chosen.nodes
            widths = self.chosen.lengths + 1  # nodes of each request, the first one included
        elif self._graphs is not None:
            # Graphs by tokens read a layout, so an even round must have one, too.
            widths = torch.full_like(batch.seq_lens, verify_input.draft_token_num)
        else:
            return original(verify_input, pool, batch, worker)
        packed = verify_input.draft_token[nodes]
        tokens = self._tokens(len(packed))
        padding = (0, tokens - len(packed))
        even_fields = {name: getattr(verify_input, name) for name in _PACKED}
        slots = verify_input.prepared_out_cache_loc
        if slots is None:
            # the KV cache slots [B * (k + 1)] of all nodes, as SGLang would assign them
            places = batch.seq_lens[:, None] + torch.arange(
                verify_input.draft_token_num, device=batch.seq_lens.device
            )
            slots = pool.req_to_token[batch.req_pool_indices[:, None], places].flatten().long()
        # Padding has slot 0. SGLang writes there, too, and never reads it.
        verify_input.draft_token = pad(packed, padding)
        verify_input.positions = pad(verify_input.positions[nodes], padding)
        verify_input.prepared_out_cache_loc = pad(slots[nodes], padding)
        verify_input.kv_loc_plan = None  # SGLang makes one for these slots
        verify_input.ragged_verify_layout = RaggedVerifyLayout.from_verify_lens_device(
            verify_lens=widths, graph_num_tokens=tokens
        )
        try:
            return original(verify_input, pool, batch, worker)
        finally:
            # What follows the target's pass, the drafter's pass included, reads all nodes in even rows.
            vars(verify_input).update(even_fields)
            batch.out_cache_loc = slots


# The fields of an `EagleVerifyInput` that `prepare` replaces for the target's pass.
_PACKED = ("draft_token", "positions", "prepared_out_cache_loc", "kv_loc_plan")
present = RaggedRound()  # the round of this scheduler process


def with_layout(verify_input: Any, graphs: Any, num_tokens: int) -> Any:
    """Give a graph of the target a layout when the graph is captured; a hook behind SGLang's `get_spec_info`.

    Each replay writes the round's layout into the same memory.
    """
    if graphs.ragged_verify_mode:
        verify_input.ragged_verify_layout = graphs._capture_ragged_verify_layout(num_tokens)
    return verify_input


def extend_lengths(original: Callable, backend: Any, forward_batch: Any) -> Any:
    """Wrap SGLang's computation of the lengths that its CPU attention takes. Without a layout, SGLang's stay.

    Returns (tokens with the cached ones [B], new tokens [B], index of each request's first new token, tree mask). The
    mask is None, because the drafts of a request are a chain.
    """
    layout = getattr(forward_batch.spec_info, "ragged_verify_layout", None)
    if layout is None:
        return original(backend, forward_batch)
    lengths = forward_batch.seq_lens + layout.verify_lens
    return lengths, layout.verify_lens, layout.extend_start_loc, None
