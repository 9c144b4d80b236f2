"""The drafter, outside the policy's parameter tree: one of Megatron's MTP layers, or an EAGLE-3 drafter.

Its inputs are the policy's detached hidden states and detached views of the policy's embedding, so no gradient and no
buffer connects the two. Parameters have their names in a Megatron checkpoint: `mtp.layers.N.*`, or `eagle_module.*` as
in ModelOpt. `models/names.py` maps both to Hugging Face names, so modules must keep their attributes' names.
`step.py` builds a drafter; `DrafterStep` (`drafter_step.py`) computes its loss from what `Drafter.forward` returns.

**Chain-exact unrolling** (EAGLE-3's training-time test, arXiv 2503.01840). To draft
from position t, an engine runs depth 1 on (h_t, x_{t+1}) at rotary position t over the cached keys of every
(h_s, x_{s+1}), s <= t; then depth d on (its own output of depth d - 1, x_{t+d}) at rotary position t + d - 1 over the
same cache plus its own chain's keys of depths 2..d. Here all t run at once, and x_{t+d} is the token of the text. That
is enough: an engine can accept the draft of depth d only after x_{t+d} was accepted and so belongs to the text.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlock
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron_rlspec.config import ConfigError
from megatron_rlspec.models.config import DRAFTER
from megatron_rlspec.models.drafter_config import check_drafter_config
from megatron_rlspec.models.families import record_of
from megatron_rlspec.models.rope import Rope
from megatron_rlspec.train import layer_specs, runtime
from megatron_rlspec.train.attention import Chain, PackedSequences
from megatron_rlspec.train.layers import RMSNorm
from megatron_rlspec.train.model import at_positions, taps_of


class Drafter(MegatronModule):
    """Run D drafter steps from every position at once, all with the same layers. Subclasses build these layers.

    A subclass implements `run`, and `enter` and `leave` if its layers need them. `forward` calls `enter` once, then
    `run` and `leave` at each depth.

    config                the drafter's configuration, with which its layers are built
    zero_first_embedding  the family's rule for position 0 (MiMo: the embedding there is 0)
    recompute             compute the layers again in the backward pass, as the policy's are
    num_layers            layers that `run` calls at each depth; each has a chain of keys of its own

    `AdoptedMTP` in `integrations/slime/drafter.py` does not call `__init__`, and sets what `forward` reads by itself:
    set a new attribute there, too.
    """

    num_layers = 1
    zero_first_embedding = False

    def __init__(
        self, policy_config: TransformerConfig, drafter_config: TransformerConfig, rope: Rope
    ) -> None:
        super().__init__(config=drafter_config)
        self.rope = rope
        self.recompute = policy_config.recompute_granularity == "full"

    def forward(
        self,
        hidden: Tensor,
        tokens: Sequence[Tensor],
        embedding: Tensor,
        position_ids: Tensor,
        packed: PackedSequences,
    ) -> list[Tensor]:
        """Return the input of the output layer at depths 1..D, `[T, H]` each, after the drafter's final norm.

        hidden        `[T, H]`, the policy's after its final norm; for EAGLE-3 `[T, n · H]`, `Policy.taps`. Detached by
                      the caller
        tokens        of depths 1..D, `[T]` each: x_{t+d} at t
        embedding     `[V / tensor, H]`, this rank's rows, without gradient
        position_ids  `[T]` int64, the position of each token in its sequence
        packed        the sequences, planned for the heads of `config` (`model.describe`); each depth gets a copy with
                      rotary angles of its own

        Collective over tensor- and context-parallel ranks. All ranks must have the same number of depths.
        """
        state = self._scatter(self.enter(hidden)[:, None])
        chains = [Chain() for _ in range(self.num_layers)]
        out = []
        for step, depth_tokens in enumerate(tokens):
            positions = position_ids + step  # as in the engine: depth d at t runs at t + d - 1
            embedded = embed(depth_tokens, embedding)
            if self.zero_first_embedding:
                embedded = embedded.masked_fill((positions == 0)[:, None], 0)
            at_depth = at_positions(packed, positions, self.config, self.rope)
            state = self._run_depth(state, self._scatter(embedded[:, None]), at_depth, chains)
            # The layers have stored their keys in the chains, as a side effect of `_run_depth`.
            chains = [chain.next() for chain in chains]
            out.append(self._gather(self.leave(state))[:, 0])
        return out

    def enter(self, hidden: Tensor) -> Tensor:
        """Return the first layer's hidden state `[T, H]` from `forward`'s `hidden`."""
        return hidden

    def run(
        self, state: Tensor, embedded: Tensor, packed: PackedSequences, chains: Sequence[Chain]
    ) -> Tensor:
        """Run the layers at one depth, each with its chain, in which it stores its keys and values.

        state     `[T, 1, H]`, what the depth before returned, or `enter`; under sequence parallelism this rank's rows
        embedded  as `state`, the embeddings of this depth's tokens

        Returns what the next depth reads, shaped as `state`.
        """
        raise NotImplementedError

    def leave(self, state: Tensor) -> Tensor:
        """Return the input of the output layer from what `run` returned, in the same shape."""
        return state

    def _run_depth(
        self, state: Tensor, embedded: Tensor, packed: PackedSequences, chains: Sequence[Chain]
    ) -> Tensor:
        """Call `run`. Its activations are stored, or with `recompute` computed again in the backward pass."""
        inputs = (state, embedded, packed, chains)
        if self.recompute and torch.is_grad_enabled():
            # Without dropout nothing inside is random, so no generator is restored. A layer stores its chain's keys as
            # a side effect. Recomputation in the backward pass overwrites them with the same values.
            return checkpoint(self.run, *inputs, use_reentrant=False, preserve_rng_state=False)
        return self.run(*inputs)

    def _scatter(self, x: Tensor) -> Tensor:
        """Return this rank's rows of `x [T, 1, H]` under sequence parallelism."""
        if not self.config.sequence_parallel:
            return x
        return scatter_to_sequence_parallel_region(x)

    def _gather(self, x: Tensor) -> Tensor:
        """Return the rows of all tensor-parallel ranks, `[T, 1, H]`."""
        # `losses/drafter.py` already sums the gradient over tensor-parallel ranks, so the backward only splits it.
        if not self.config.sequence_parallel:
            return x
        return gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=False)


class MTPDrafter(Drafter):
    """One of Megatron's MTP layers, run at every depth.

    config  the policy's, of which the drafter keeps a changed copy
    seed    of a random stream for the initial weights, so that the policy's random numbers stay as they are
    """

    def __init__(self, config: TransformerConfig, hf_config: Mapping[str, Any], seed: int) -> None:
        drafter_config = replace(
            config,
            mtp_num_layers=1,
            recompute_granularity=None,  # `Drafter` recomputes by itself, so Megatron must not
            recompute_method=None,
        )
        super().__init__(config, drafter_config, Rope.of(hf_config))
        self.zero_first_embedding = record_of(hf_config).zero_first_embedding
        with runtime.own_random_stream(seed):
            # Without `pg_collection` megatron-core 0.19 gives the layer two groups only, and its experts need all.
            groups = ProcessGroupCollection.use_mpu_process_groups()
            self.mtp = MultiTokenPredictionBlock(
                drafter_config, layer_specs.drafter_spec(drafter_config), pg_collection=groups
            )

    def run(
        self, state: Tensor, embedded: Tensor, packed: PackedSequences, chains: Sequence[Chain]
    ) -> Tensor:
        # The block's own forward is of no use: it shifts the tokens and looks up embeddings by itself, and takes
        # another layer for each depth. The method called here is private to Megatron; `integrations/slime/drafter.py`
        # calls it, too.
        layer = self.mtp.layers[0]
        return layer._proj_and_transformer_layer(
            state, embedded, packed_seq_params=_chained(packed, chains[0])
        )


class Eagle3Drafter(Drafter):
    """An EAGLE-3 drafter (Li et al. 2025, arXiv 2503.01840) as SGLang's `models/llama_eagle3.py` computes it.

    Most of these drafters have one layer. The residual stream begins with `fc` of the hidden states of n layers of the
    policy, which may be normed, each or all together. The attention of the first layer reads the norms of embedding and
    hidden state side by side. The next depth reads the output of the last layer before the final norm; with
    `norm_output` (of the drafter's config.json) it reads the output after that norm. The output layer is the drafter's
    own, over the draft vocabulary, and whole on every tensor-parallel rank.

    config     the policy's
    hf_config  of the policy, with the drafter's config.json under `DRAFTER`
    seed       of a random stream for the initial weights, so that the policy's random numbers stay as they are
    """

    def __init__(self, config: TransformerConfig, hf_config: Mapping[str, Any], seed: int) -> None:
        drafter = hf_config[DRAFTER]
        taps = len(taps_of(hf_config))  # n
        drafter_config = _eagle3_config(config, drafter)
        super().__init__(config, drafter_config, Rope.of(drafter))
        width = drafter_config.hidden_size
        std = drafter.get("initializer_range", 0.02)
        plain: dict[str, Any] = {"bias": False, "dtype": drafter_config.params_dtype}
        checked_config = check_drafter_config(drafter, "the drafter")
        self.num_layers = drafter_config.num_layers
        self.norm_output = bool(checked_config.norm_output)
        block: Any = nn.Module()
        with runtime.own_random_stream(seed):
            # Do not reorder: the modules draw random numbers in this order, so another one gives other initial weights.
            block.fc = nn.Linear(taps * width, width, **plain)
            block.enorm = RMSNorm(drafter_config, width, drafter_config.layernorm_epsilon)
            block.decoder = nn.Module()
            block.decoder.layers = nn.ModuleList()
            for number in range(1, drafter_config.num_layers + 1):
                spec = layer_specs.eagle3_spec(first=number == 1)
                layer = build_module(spec, config=drafter_config, layer_number=number)
                block.decoder.layers.append(layer)
            block.decoder.final_layernorm = RMSNorm(
                drafter_config, width, drafter_config.layernorm_epsilon
            )
            block.input_norm = (
                _norm_before_fc(drafter_config, taps * width)
                if checked_config.norms_joined
                else None
            )
            block.fc_norm = None
            if checked_config.norms_each:
                block.fc_norm = nn.ModuleList(
                    [_norm_before_fc(drafter_config, width) for _ in range(taps)]
                )
            block.eagle_output_layer = nn.Linear(width, drafter["draft_vocab_size"], **plain)
            for linear in (block.fc, block.eagle_output_layer):
                nn.init.normal_(linear.weight, std=std)
        self.eagle_module = block

    @property
    def head(self) -> Tensor:
        """Return the output layer `[S, H]`, a row for each id of the draft vocabulary, in ascending order of the ids.

        `DrafterStep` finds it by this name.
        """
        return self.eagle_module.eagle_output_layer.weight

    def enter(self, hidden: Tensor) -> Tensor:
        block = self.eagle_module
        if block.input_norm is not None:
            hidden = block.input_norm(hidden)
        if block.fc_norm is not None:
            parts = hidden.chunk(len(block.fc_norm), -1)
            normed = [norm(part) for norm, part in zip(block.fc_norm, parts, strict=True)]
            hidden = torch.cat(normed, -1)
        return block.fc(hidden)

    def run(
        self, state: Tensor, embedded: Tensor, packed: PackedSequences, chains: Sequence[Chain]
    ) -> Tensor:
        decoder = self.eagle_module.decoder
        # The first layer's norm (`layers.NormBesideEmbedding`) reads this attribute in the loop below. Set it in `run`
        # only: recomputation calls `run` again, after later depths have overwritten the attribute.
        decoder.layers[0].input_layernorm.embedded = self.eagle_module.enorm(embedded)
        for layer, chain in zip(decoder.layers, chains, strict=True):
            state, _ = layer(
                hidden_states=state, attention_mask=None, packed_seq_params=_chained(packed, chain)
            )
        if self.norm_output:
            return decoder.final_layernorm(state)
        return state

    def leave(self, state: Tensor) -> Tensor:
        if self.norm_output:  # `run` has normed it
            return state
        return self.eagle_module.decoder.final_layernorm(state)


def _norm_before_fc(config: TransformerConfig, width: int) -> RMSNorm:
    """Build a norm of `width` channels for inputs that `Policy.taps` has gathered."""
    norm = RMSNorm(config, width, config.layernorm_epsilon)
    # Every tensor-parallel rank norms all rows, so each has the whole gradient. With True, Megatron would add up these
    # equal gradients.
    norm.weight.sequence_parallel = False  # type: ignore[attr-defined]
    return norm


def _chained(packed: PackedSequences, chain: Chain) -> PackedSequences:
    """Return a copy of `packed` for the layer whose keys `chain` holds."""
    chained = copy.copy(packed)  # the layers share the caller's `packed`
    chained.chain = chain
    return chained


def _eagle3_config(config: TransformerConfig, drafter: Mapping[str, Any]) -> TransformerConfig:
    """Return the policy's configuration with the drafter's sizes, dense and on one pipeline stage.

    A new field of the policy's configuration is taken over unless it is replaced here. Raises ConfigError if
    parallel.tensor does not divide the key/value heads.
    """
    heads = drafter["num_attention_heads"]
    groups = drafter.get("num_key_value_heads") or heads
    if groups % config.tensor_model_parallel_size:
        raise ConfigError(
            f"the EAGLE-3 drafter has num_key_value_heads={groups}, no multiple of "
            f"parallel.tensor={config.tensor_model_parallel_size}"
        )
    drafter_config = replace(
        config,
        num_layers=drafter.get("num_hidden_layers", 1),
        ffn_hidden_size=drafter["intermediate_size"],
        num_attention_heads=heads,
        num_query_groups=groups,
        kv_channels=drafter.get("head_dim") or config.hidden_size // heads,
        layernorm_epsilon=drafter.get("rms_norm_eps", 1e-6),
        qk_layernorm=False,
        add_qkv_bias=False,
        num_moe_experts=None,
        moe_ffn_hidden_size=None,
        moe_layer_freq=1,
        expert_model_parallel_size=1,
        pipeline_model_parallel_size=1,  # the last stage has the whole drafter
        recompute_granularity=None,
        recompute_method=None,
        # The layers are local ones on every device (`layer_specs.eagle3_spec`): their activation is in the spec.
        use_te_activation_func=True,
        bias_activation_fusion=False,
    )
    # Set here and not above: `DecoderConfig` has this field, but slime's configuration has not.
    drafter_config.rotary_percent = 1.0
    return drafter_config


def build_drafter(
    config: TransformerConfig, hf_config: Mapping[str, Any], seed: int
) -> MTPDrafter | Eagle3Drafter:
    """Build the drafter of the model that `hf_config` describes, with random weights; `config` is the policy's.

    The caller's generators stay as they are.
    """
    if DRAFTER in hf_config:
        return Eagle3Drafter(config, hf_config, seed)
    return MTPDrafter(config, hf_config, seed)


def embed(tokens: Tensor, weight: Tensor) -> Tensor:
    """Look up tokens `[T]` in a vocabulary-parallel embedding, this rank's `weight [V / tensor, H]`; no gradient.

    Returns `[T, H]`, the same on all tensor-parallel ranks. Collective over them: all must have the same tokens.
    """
    size = parallel_state.get_tensor_model_parallel_world_size()
    rank = parallel_state.get_tensor_model_parallel_rank()
    with torch.no_grad():
        if size == 1:
            return F.embedding(tokens, weight)
        # Each token's row is on one rank. The other ranks contribute zeros to the sum.
        local = tokens - rank * weight.shape[0]
        elsewhere = (local < 0) | (local >= weight.shape[0])
        rows = F.embedding(local.masked_fill(elsewhere, 0), weight)
        rows.masked_fill_(elsewhere[:, None], 0)
        dist.all_reduce(rows, group=parallel_state.get_tensor_model_parallel_group())
        return rows
