"""The drafter: Megatron's MTP layers as a module of their own, outside the policy's parameter tree.

Its inputs are the policy's detached hidden states and detached views of the policy's embedding, so no gradient and no
buffer connects the two. Parameters have their names in a Megatron checkpoint, `mtp.layers.N.*`.

**Chain-exact unrolling** (one repeated layer, the default; EAGLE-3's training-time test, arXiv 2503.01840). To draft
from position t, an engine runs depth 1 on (h_t, x_{t+1}) at rotary position t over the cached keys of every
(h_s, x_{s+1}), s <= t; then depth d on (its own output of depth d - 1, x_{t+d}) at rotary position t + d - 1 over the
same cache plus its own chain's keys of depths 2..d. Here all t run at once, and x_{t+d} is the token of the text. That
is enough: an engine can accept the draft of depth d only after x_{t+d} was accepted and so belongs to the text.

**Separate layers** (DeepSeek-V3, arXiv 2412.19437, section 2.2) follow Megatron: layer d attends to its own inputs
of positions s <= t, at unshifted positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region, scatter_to_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlock
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_rlspec.train import runtime
from megatron_rlspec.train.attention import Chain, PackedSequences
from megatron_rlspec.train.model import at_positions


class Drafter(MegatronModule):
    """Run D drafter steps from every position at once.

    config                the policy's; the drafter keeps a copy
    depth                 D
    repeated_layer        one layer for all depths, chain-exact; else D layers
    zero_first_embedding  the family's rule for position 0 (MiMo: the embedding there is 0)
    seed                  of its own initialisation stream
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        depth: int,
        repeated_layer: bool,
        zero_first_embedding: bool,
        rotary_base: float,
        seed: int,
    ) -> None:
        layers = 1 if repeated_layer else depth
        own = replace(
            config,
            mtp_num_layers=layers,
            recompute_granularity=None,
            recompute_method=None,
            moe_router_load_balancing_type="none",
            moe_aux_loss_coeff=0.0,
        )
        super().__init__(config=own)
        self.depth = depth
        self.repeated_layer = repeated_layer
        self.zero_first_embedding = zero_first_embedding
        self.rotary_base = rotary_base
        self.recompute = config.recompute_granularity == "full"
        with runtime.own_random_stream(seed):
            # By default megatron-core 0.19 hands on two groups only, and its experts need all of them.
            groups = ProcessGroupCollection.use_mpu_process_groups()
            self.mtp = MultiTokenPredictionBlock(own, runtime.drafter_spec(own), pg_collection=groups)

    def forward(
        self,
        hidden: Tensor,
        tokens: Sequence[Tensor],
        embedding: Tensor,
        position_ids: Tensor,
        packed: PackedSequences,
    ) -> list[Tensor]:
        """Return the input of the output layer at depths 1..D, `[T, H]` each, after the drafter's final norm.

        hidden        `[T, H]`, the policy's after its final norm; detached by the caller, or not (classic mode)
        tokens        per depth `[T]`: x_{t+d} at t
        embedding     `[V / tensor, H]`, this rank's rows, without gradient
        position_ids  `[T]`, of t
        """
        state = self._scatter(hidden[:, None])
        chain = Chain()
        out = []
        for step in range(self.depth):
            positions = position_ids + step if self.repeated_layer else position_ids
            embedded = embed(tokens[step], embedding)
            if self.zero_first_embedding:
                embedded = embedded.masked_fill((positions == 0)[:, None], 0)
            here = at_positions(packed, positions, self.config, self.rotary_base)
            here.chain = chain
            state = self._layer(0 if self.repeated_layer else step, state, self._scatter(embedded[:, None]), here)
            if self.repeated_layer:
                chain = chain.next()
            else:
                chain = Chain()
            out.append(self._gather(state)[:, 0])
        return out

    def _layer(self, index: int, state: Tensor, embedded: Tensor, packed: PackedSequences) -> Tensor:
        run = self.mtp.layers[index]._proj_and_transformer_layer
        if self.recompute and torch.is_grad_enabled():
            # Nothing inside is random, so no generator is restored. The layer stores the chain's keys as a side effect;
            # recomputation overwrites them with the same values.
            return checkpoint(
                run, state, embedded, packed_seq_params=packed, use_reentrant=False, preserve_rng_state=False
            )
        return run(state, embedded, packed_seq_params=packed)

    def _scatter(self, x: Tensor) -> Tensor:
        return scatter_to_sequence_parallel_region(x) if self.config.sequence_parallel else x

    def _gather(self, x: Tensor) -> Tensor:
        # The loss already sums the head's gradient over tensor-parallel ranks, so the backward only splits it.
        if not self.config.sequence_parallel:
            return x
        return gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=False)


def embed(tokens: Tensor, weight: Tensor) -> Tensor:
    """Look up tokens `[T]` in a vocabulary-parallel embedding, this rank's `weight [V / tensor, H]`; no gradient."""
    size = parallel_state.get_tensor_model_parallel_world_size()
    rank = parallel_state.get_tensor_model_parallel_rank()
    with torch.no_grad():
        if size == 1:
            return F.embedding(tokens, weight)
        local = tokens - rank * weight.shape[0]
        elsewhere = (local < 0) | (local >= weight.shape[0])
        rows = F.embedding(local.masked_fill(elsewhere, 0), weight).masked_fill_(elsewhere[:, None], 0)
        dist.all_reduce(rows, group=parallel_state.get_tensor_model_parallel_group())
        return rows
