"""The policy: Megatron's `GPTModel`, built from a Hugging Face config, which returns hidden states instead of logits.

The output head and the loss run outside of it, in chunks over the trained positions (`losses/drafter.py`), so the
logits of a whole batch are never in memory. The drafter reads the same hidden states, detached. There is no MTP inside
the model.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state as ps
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from megatron_rlspec.config import ConfigError, ModelConfig, ParallelConfig
from megatron_rlspec.models.config import DRAFTER, check_config
from megatron_rlspec.models.drafter_config import check_drafter_config
from megatron_rlspec.models.families import record_of
from megatron_rlspec.models.rope import Rope, settings
from megatron_rlspec.packing.transfer import to_device
from megatron_rlspec.train import experts, latent, layer_specs, runtime
from megatron_rlspec.train.attention import PackedSequences, packed_sequences, rotary_factors
from megatron_rlspec.types import PackedBatch


@dataclass
class DecoderConfig(TransformerConfig):
    """Megatron's configuration, and the share of a head's channels that is rotated.

    Megatron passes that share to its model classes; our core attention needs it in the configuration.

    yarn_rotary_scaling_factor  Megatron's attention multiplies cosine and sine by what YaRN makes of it; 1: nothing
    """

    rotary_percent: float = 1.0
    yarn_rotary_scaling_factor: float = 1.0


def transformer_config(
    hf_config: Mapping[str, Any],
    model: ModelConfig,
    parallel: ParallelConfig,
) -> DecoderConfig | MLATransformerConfig:
    """Describe the decoder of a family that is trained to Megatron. Call after `init_distributed`.

    Raises ConfigError for a setting that is not implemented, such as a sliding window, and for a size that the
    parallel layout does not divide.
    """
    check(hf_config, model, parallel)
    dtype = getattr(torch, model.dtype)
    facts = record_of(hf_config)
    heads = hf_config["num_attention_heads"]
    rope = Rope.of(hf_config)
    # Transformer Engine's kernel of the rotary embedding knows no factor on cosine and sine.
    devices = runtime.device_options()
    if rope.magnitude != 1:
        devices["apply_rope_fusion"] = False
    recompute: dict[str, Any] = {}
    if parallel.recompute:
        recompute = {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    fields: dict[str, Any] = dict(
        num_layers=hf_config["num_hidden_layers"],
        hidden_size=hf_config["hidden_size"],
        ffn_hidden_size=hf_config["intermediate_size"],
        num_attention_heads=heads,
        num_query_groups=hf_config.get("num_key_value_heads") or heads,
        kv_channels=hf_config.get("head_dim") or hf_config["hidden_size"] // heads,
        layernorm_epsilon=hf_config.get("rms_norm_eps", 1e-6),
        normalization="RMSNorm",
        qk_layernorm=facts.has_qk_norm(hf_config),
        add_bias_linear=False,
        add_qkv_bias=facts.has_qkv_bias(hf_config),
        gated_linear_unit=True,
        activation_func=F.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_method_std=hf_config.get("initializer_range", 0.02),
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        context_parallel_size=parallel.context,
        sequence_parallel=parallel.sequence,
        # Micro-batches are packed, so pipeline stages exchange their lengths. Megatron allows that only with this
        # dispatcher, even where there is no expert to dispatch to.
        variable_seq_lengths=parallel.pipeline > 1,
        moe_token_dispatcher_type="alltoall",
        # Losses are divided by the step's global count already, so neither DDP nor the schedule may scale them.
        calculate_per_token_loss=True,
        **recompute,
        **experts.options(hf_config, parallel.expert, model.dtype),
        **devices,
    )
    if "kv_lora_rank" in hf_config:
        return MLATransformerConfig(**fields | latent.options(hf_config))
    yarn = rope.factor if rope.kind == "yarn" else 1.0
    return DecoderConfig(
        **fields, rotary_percent=rotary_percent(hf_config), yarn_rotary_scaling_factor=yarn
    )


def check(hf_config: Mapping[str, Any], model: ModelConfig, parallel: ParallelConfig) -> None:
    """Raise ConfigError, naming the key, if this model cannot be trained here in this layout."""
    if (
        model.dtype == "float64"
        and runtime.device().type == "cuda"
        and runtime.has_transformer_engine()
    ):
        raise ConfigError("model.dtype=float64: Transformer Engine has no float64; use bfloat16")
    where = model.path or "the model"
    typed = check_config(hf_config, where)
    problems = list(experts.problems(hf_config, parallel))
    for key, size, axis in (
        ("vocab_size", typed.vocab_size, "tensor"),
        ("num_key_value_heads", typed.groups, "tensor"),
        ("num_hidden_layers", typed.num_hidden_layers, "pipeline"),
    ):
        ranks = getattr(parallel, axis)
        if size % ranks:
            problems.append(f"{key}={size} is no multiple of parallel.{axis}={ranks}")
    if problems:
        raise ConfigError(f"config.json of {where}: {problems[0]}")


def rotary_percent(hf_config: Mapping[str, Any]) -> float:
    """Return the share of a head's channels that is rotated, from 0 to 1; by default the family's."""
    stated = hf_config.get("partial_rotary_factor") or settings(hf_config).get(
        "partial_rotary_factor"
    )
    return float(stated or record_of(hf_config).rotary_share)


class Taps:
    """Keep the inputs of some layers of a model, detached, for an EAGLE-3 drafter: `taps()` after the forward pass.

    layers  counted from 0, over all pipeline stages

    With several stages the inputs travel to the last one beside the hidden states, without a gradient: what a stage
    passes on is wider than `[t, 1, H]`.
    """

    def __init__(self, model: GPTModel, layers: Sequence[int]) -> None:
        self._gathers = model.config.sequence_parallel
        self._width = model.config.hidden_size
        self._inputs: dict[int, Tensor] = {}  # of this stage's layers
        self._earlier: list[
            Tensor
        ] = []  # of all earlier stages', `[t, 1, n · H]`; at most one tensor
        first = get_transformer_layer_offset(model.config)
        for index in layers:
            if first <= index < first + len(model.decoder.layers):
                model.decoder.layers[index - first].register_forward_pre_hook(
                    partial(self._keep, index), with_kwargs=True
                )
        if layers and not model.post_process:
            model._postprocess = partial(self._send, model._postprocess)
        if layers and not model.pre_process:
            model.set_input_tensor = partial(self._receive, model.set_input_tensor)

    def _keep(self, index: int, layer: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        hidden = args[0] if args else options["hidden_states"]
        self._inputs[index] = hidden.detach()

    @torch.no_grad()
    def __call__(self) -> Tensor:
        """Return the kept inputs of n layers side by side, `[T, n · H]`, on every tensor-parallel rank."""
        inputs = torch.cat(self._kept(), -1)[:, 0]
        if self._gathers:
            return gather_from_sequence_parallel_region(inputs)
        return inputs

    def _send(self, original: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Replace `GPTModel._postprocess` of a stage before the last one."""
        hidden = original(hidden_states, *args, **kwargs)
        return torch.cat([hidden, *self._kept()], -1)

    def _receive(self, original: Any, input_tensor: list[Tensor | None]) -> None:
        """Replace `GPTModel.set_input_tensor` of a stage after the first one."""
        (given,) = input_tensor
        if given is not None:
            self._earlier = [given[..., self._width :].detach()]
            given = given[..., : self._width].contiguous()
        original(given)

    def _kept(self) -> list[Tensor]:
        return [*self._earlier, *(self._inputs[index] for index in sorted(self._inputs))]


class Policy(GPTModel):
    """Return hidden states after the final norm: `forward(input_ids, position_ids, None, packed_seq_params=...)`.

    On the last pipeline stage they are `[T, 1, H]`: all T tokens of this context-parallel rank, the same on each of its
    tensor-parallel ranks. On other stages they are the input of the next stage.

    With an EAGLE-3 drafter in `hf_config`, it also keeps the inputs of the layers that the drafter reads, detached.
    """

    def __init__(
        self, config: TransformerConfig, hf_config: Mapping[str, Any], max_length: int
    ) -> None:
        # Our core attention computes the angles from each token's position; Transformer Engine's takes Megatron's.
        angles = runtime.has_transformer_engine() and not config.multi_latent_attention
        rope = Rope.of(hf_config)
        super().__init__(
            config=config,
            transformer_layer_spec=layer_specs.decoder_spec(config),
            vocab_size=hf_config["vocab_size"],
            max_sequence_length=max_length,
            pre_process=ps.is_pipeline_first_stage(),
            post_process=ps.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=bool(hf_config.get("tie_word_embeddings", False)),
            position_embedding_type="rope" if angles else "none",
            rotary_base=rope.base,
            rotary_percent=rotary_percent(hf_config),
        )
        if angles:  # Megatron's own scaling has Llama 3.1's other settings built in
            frequencies = self.rotary_pos_emb.inv_freq
            ours = rope.frequencies(2 * len(frequencies), frequencies.device)
            self.rotary_pos_emb.inv_freq = ours
        self.taps = Taps(self, taps_of(hf_config))

    def _postprocess(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        if self.post_process and self.config.sequence_parallel:
            # The loss already sums the head's gradient over tensor-parallel ranks, so the backward only splits it.
            return gather_from_sequence_parallel_region(
                hidden_states, tensor_parallel_output_grad=False
            )
        return hidden_states

    def head_weight(self) -> Tensor:
        return head_weight(self)


def head_weight(model: GPTModel) -> Tensor:
    """Return the output head `[V / tensor, H]` on the last stage; the embedding if they are tied."""
    if model.share_embeddings_and_output_weights:
        return model.shared_embedding_or_output_weight()
    return model.output_layer.weight


def embedding_for_drafter(model: GPTModel, copy: Tensor | None) -> Tensor | None:
    """Return the embedding `[V / tensor, H]` that the drafter reads, detached: a view, or a copy on a later stage.

    copy  what this returned before; None at first

    Collective over the first and the last pipeline stage; None on the stages between them.
    """
    if ps.get_pipeline_model_parallel_world_size() == 1:
        return model.embedding.word_embeddings.weight.detach()
    last = ps.is_pipeline_last_stage()
    if model.share_embeddings_and_output_weights:
        return head_weight(model).detach() if last else None
    if not last and not ps.is_pipeline_first_stage():
        return None
    if not last:
        copy = model.embedding.word_embeddings.weight.detach()
    elif copy is None:
        copy = torch.empty_like(head_weight(model)).detach()
    first = ps.get_pipeline_model_parallel_first_rank()
    dist.broadcast(copy, src=first, group=ps.get_embedding_group())
    return copy


def taps_of(hf_config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the layers whose inputs the model's EAGLE-3 drafter reads, from 0; () without such a drafter."""
    if DRAFTER not in hf_config:
        return ()
    drafter = check_drafter_config(hf_config[DRAFTER], "the drafter")
    return drafter.taps(hf_config["num_hidden_layers"])


def eagle3_identity(hf_config: Mapping[str, Any], vocabulary: Tensor) -> str:
    """Return in what a resumed EAGLE-3 drafter must equal the saved one; `vocabulary [S]`: ids that it drafts from."""
    words = zlib.crc32(vocabulary.numpy().tobytes())
    return f"EAGLE-3 of the layers {list(taps_of(hf_config))} and the words {words:08x}"


def describe(
    batch: PackedBatch, config: TransformerConfig, rope: Rope, device: torch.device
) -> PackedSequences:
    """Describe the packed sequences of a micro-batch to attention."""
    cp_size = ps.get_context_parallel_world_size()
    cp_rank = ps.get_context_parallel_rank()
    groups = config.num_query_groups // config.tensor_model_parallel_size
    packed = packed_sequences(batch.cu_seqlens_padded, groups, cp_size, cp_rank, device)
    return at_positions(packed, to_device(batch.position_ids, device), config, rope)


def at_positions(
    packed: PackedSequences, positions: Tensor, config: TransformerConfig, rope: Rope
) -> PackedSequences:
    """Return the same sequences with rotary angles for `positions [T]`."""
    if config.multi_latent_attention:
        dims = config.qk_pos_emb_head_dim
    else:
        dims = int(config.kv_channels * getattr(config, "rotary_percent", 1.0))
    cos, sin = rotary_factors(positions, dims, rope, config.params_dtype)
    return replace(packed, cos=cos, sin=sin)
