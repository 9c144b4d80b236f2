"""The policy: Megatron's `GPTModel`, built from a Hugging Face config, which returns hidden states instead of logits.

The output head and the losses run outside of it, in chunks over the trained positions (`losses/logprobs.py`,
`losses/drafter.py`), so the logits of a whole batch are never in memory. The drafter reads the same hidden states,
detached. There is no MTP inside the model. `step.py` builds the policy; `cotrainer/drafter.py` uses `Taps`,
`head_weight` and `embedding_for_drafter` with the model of another trainer.

Shapes: t tokens of this rank under sequence parallelism, T tokens of this context-parallel rank, H hidden size, V
vocabulary. Megatron's tensors have a batch dimension of 1 in the middle: `[T, 1, H]`.
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
    """Megatron's configuration, and two settings of rotary embeddings that attention layers read from it.

    rotary_percent              the share of a head's channels that is rotated. Megatron passes it to its model classes;
                                our core attention finds it here (`at_positions`)
    yarn_rotary_scaling_factor  read by Megatron's attention, which derives YaRN's factor on cosine and sine; 1: none
    """

    rotary_percent: float = 1.0
    yarn_rotary_scaling_factor: float = 1.0


def transformer_config(
    hf_config: Mapping[str, Any],
    model: ModelConfig,
    parallel: ParallelConfig,
) -> DecoderConfig | MLATransformerConfig:
    """Return Megatron's configuration of the model that a config.json describes. Call after `init_distributed`.

    Raises ConfigError for a setting that is not implemented, such as a sliding window, and for a size that the
    parallel layout does not divide.
    """
    check_model(hf_config, model, parallel)
    dtype = getattr(torch, model.dtype)
    family = record_of(hf_config)
    heads = hf_config["num_attention_heads"]
    rope = Rope.of(hf_config)
    devices = runtime.device_options()
    # Transformer Engine's fused kernel of the rotary embedding cannot multiply cosine and sine by a factor.
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
        qk_layernorm=family.has_qk_norm(hf_config),
        add_bias_linear=False,
        add_qkv_bias=family.has_qkv_bias(hf_config),
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
        # Packed micro-batches differ in length, so pipeline stages exchange their lengths. Megatron refuses that with
        # its default dispatcher, "allgather", even where there is no expert to dispatch to.
        variable_seq_lengths=parallel.pipeline > 1,
        moe_token_dispatcher_type="alltoall",
        # Losses are divided by the step's global count already, so neither DDP nor the schedule may scale them.
        calculate_per_token_loss=True,
        **recompute,
        **experts.options(hf_config, parallel.expert, model.dtype),
        **devices,
    )
    if "kv_lora_rank" in hf_config:
        # The options of `latent` replace some of `fields`.
        return MLATransformerConfig(**fields | latent.options(hf_config))
    yarn = rope.factor if rope.kind == "yarn" else 1.0
    return DecoderConfig(
        **fields, rotary_percent=rotary_percent(hf_config), yarn_rotary_scaling_factor=yarn
    )


def check_model(hf_config: Mapping[str, Any], model: ModelConfig, parallel: ParallelConfig) -> None:
    """Raise ConfigError, naming the key, if this model cannot be trained here in this layout.

    It needs no process group: `run/loading.py` calls it before any model is built. Only the first problem is raised.
    """
    if (
        model.dtype == "float64"
        and runtime.device().type == "cuda"
        and runtime.has_transformer_engine()
    ):
        raise ConfigError("model.dtype=float64: Transformer Engine has no float64; use bfloat16")
    where = model.path or "the model"
    typed = check_config(hf_config, where)
    # Checked before Megatron builds anything, so that the message can name the key of config.json.
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
    # The share stands at the top of config.json, or among the settings of the rotary embedding (Transformers 5).
    stated = hf_config.get("partial_rotary_factor") or settings(hf_config).get(
        "partial_rotary_factor"
    )
    return float(stated or record_of(hf_config).rotary_share)


class Taps:
    """Capture the inputs of some layers of a model, detached, for an EAGLE-3 drafter. Call it after a forward pass.

    layers  counted from 0, over all pipeline stages; the result has their inputs in ascending order

    With several stages the inputs travel to the last one beside the hidden states, without a gradient: what a stage
    passes on is wider than `[t, 1, H]`. Megatron's schedule receives by the sender's shape (`variable_seq_lengths`), so
    a wider tensor arrives whole. A later forward pass overwrites the captured inputs: read them before it.

    Construction changes the model for good, so construct one per model: it adds hooks, and replaces `_postprocess` of
    stages before the last, and `set_input_tensor` of stages after the first.
    """

    def __init__(self, model: GPTModel, layers: Sequence[int]) -> None:
        self._gathers = model.config.sequence_parallel
        self._width = model.config.hidden_size
        self._inputs: dict[int, Tensor] = {}  # of this stage's layers, `[t, 1, H]` each
        # Inputs of all earlier stages' layers, side by side in one tensor `[t, 1, n · H]`; [] if there are none
        self._earlier: list[Tensor] = []
        first = get_transformer_layer_offset(model.config)
        for index in layers:
            if first <= index < first + len(model.decoder.layers):
                model.decoder.layers[index - first].register_forward_pre_hook(
                    partial(self._capture, index), with_kwargs=True
                )
        if layers and not model.post_process:
            model._postprocess = partial(self._send, model._postprocess)
        if layers and not model.pre_process:
            model.set_input_tensor = partial(self._receive, model.set_input_tensor)

    def _capture(
        self, index: int, layer: Any, args: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        # megatron-core 0.16 passes the layer's input by name; a caller may also pass it by position.
        hidden = args[0] if args else options["hidden_states"]
        self._inputs[index] = hidden.detach()

    @torch.no_grad()
    def __call__(self) -> Tensor:
        """Return the captured inputs of n layers side by side, `[T, n · H]`, on every tensor-parallel rank.

        Call it on the last pipeline stage only, with at least one layer, and after a forward pass. Collective over
        tensor-parallel ranks under sequence parallelism.
        """
        inputs = torch.cat(self._captured(), -1)[:, 0]
        if self._gathers:  # sequence parallelism splits the tokens
            return gather_from_sequence_parallel_region(inputs)
        return inputs

    def _send(self, original: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Replace `GPTModel._postprocess` of a stage before the last one."""
        hidden = original(hidden_states, *args, **kwargs)
        return torch.cat([hidden, *self._captured()], -1)

    def _receive(self, original: Any, input_tensor: list[Tensor | None]) -> None:
        """Replace `GPTModel.set_input_tensor` of a stage after the first one."""
        (received,) = input_tensor
        if received is not None:
            # The layout of `_send`: hidden states first. Autograd gives the other columns a gradient of 0.
            self._earlier = [received[..., self._width :].detach()]
            received = received[..., : self._width].contiguous()
        original(received)

    def _captured(self) -> list[Tensor]:
        """Return the captured inputs in the order of the layers; those of earlier stages come first."""
        return [*self._earlier, *(self._inputs[index] for index in sorted(self._inputs))]


class Policy(GPTModel):
    """Return hidden states after the final norm: `forward(input_ids, position_ids, None, packed_seq_params=...)`.

    On the last pipeline stage they are `[T, 1, H]`: all T tokens of this context-parallel rank, the same on each of its
    tensor-parallel ranks. On other stages they are the input of the next stage.

    With an EAGLE-3 drafter in `hf_config`, `taps` captures the inputs of the layers that the drafter reads, detached.
    """

    def __init__(
        self, config: TransformerConfig, hf_config: Mapping[str, Any], max_length: int
    ) -> None:
        # Whether Megatron's layers rotate queries and keys. With our core attention they must not, because that rotates
        # by itself, by each token's position.
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
        # Our frequencies replace Megatron's, whose scaling has fixed settings: those of Llama 3.1.
        if angles:
            frequencies = self.rotary_pos_emb.inv_freq
            ours = rope.frequencies(2 * len(frequencies), frequencies.device)
            self.rotary_pos_emb.inv_freq = ours
        self.taps = Taps(self, taps_of(hf_config))

    def _postprocess(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        """Replace Megatron's, which computes logits: return the hidden states of all tokens."""
        if self.post_process and self.config.sequence_parallel:
            # `losses/logprobs.py` already sums the gradient over tensor-parallel ranks, so the backward only splits it.
            return gather_from_sequence_parallel_region(
                hidden_states, tensor_parallel_output_grad=False
            )
        return hidden_states

    def head_weight(self) -> Tensor:
        """Return the output head: `head_weight` below, which also takes the models of other trainers."""
        return head_weight(self)


def head_weight(model: GPTModel) -> Tensor:
    """Return the output head `[V / tensor, H]`, the parameter itself; if tied, the embedding's. Last stage only."""
    if model.share_embeddings_and_output_weights:
        return model.shared_embedding_or_output_weight()
    return model.output_layer.weight


def embedding_for_drafter(model: GPTModel, previous: Tensor | None) -> Tensor | None:
    """Return the embedding `[V / tensor, H]` that the drafter reads, detached: a view, or a copy on a later stage.

    previous  what this returned before, which is overwritten where it is a copy; None at first

    Call it after each update of the policy: a copy does not follow the weights. Collective over the first and the last
    pipeline stage. On other stages than the last the result is not for a drafter, and may be None.
    """
    if ps.get_pipeline_model_parallel_world_size() == 1:
        return model.embedding.word_embeddings.weight.detach()
    last = ps.is_pipeline_last_stage()
    if model.share_embeddings_and_output_weights:
        # Megatron keeps a copy of a tied embedding on the last stage, as the output layer.
        return head_weight(model).detach() if last else None
    if not last and not ps.is_pipeline_first_stage():
        return None
    if not last:
        embedding = model.embedding.word_embeddings.weight.detach()
    elif previous is None:
        # Embedding and output head have the same shape.
        embedding = torch.empty_like(head_weight(model)).detach()
    else:
        embedding = previous
    first = ps.get_pipeline_model_parallel_first_rank()
    dist.broadcast(embedding, src=first, group=ps.get_embedding_group())
    return embedding


def taps_of(hf_config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the layers whose inputs the model's EAGLE-3 drafter reads, from 0; () without such a drafter."""
    if DRAFTER not in hf_config:
        return ()
    drafter = check_drafter_config(hf_config[DRAFTER], "the drafter")
    return drafter.taps(hf_config["num_hidden_layers"])


def eagle3_identity(hf_config: Mapping[str, Any], vocabulary: Tensor) -> str:
    """Return a text that names the tapped layers and the draft vocabulary of an EAGLE-3 drafter.

    vocabulary  its draft ids, `[S] int64`, on the CPU; their order counts

    The text is part of `layout.json` in checkpoints, and a run with another text does not resume from them. So a change
    of its format makes older checkpoints unreadable. `conversion/convert.py` looks for the same checksum in it.
    """
    checksum = zlib.crc32(vocabulary.numpy().tobytes())
    return f"EAGLE-3 of the layers {list(taps_of(hf_config))} and the words {checksum:08x}"


def describe(
    batch: PackedBatch, config: TransformerConfig, rope: Rope, device: torch.device
) -> PackedSequences:
    """Describe the packed sequences of a micro-batch to attention, with each token's rotary angles, on `device`.

    config  of the model that attends; policy and drafter may differ in key/value heads and rotated channels
    """
    cp_size = ps.get_context_parallel_world_size()
    cp_rank = ps.get_context_parallel_rank()
    groups = config.num_query_groups // config.tensor_model_parallel_size
    packed = packed_sequences(batch.cu_seqlens_padded, groups, cp_size, cp_rank, device)
    return at_positions(packed, to_device(batch.position_ids, device), config, rope)


def at_positions(
    packed: PackedSequences, positions: Tensor, config: TransformerConfig, rope: Rope
) -> PackedSequences:
    """Return the same sequences with rotary angles for `positions [T]`: the tokens' own, or a drafter depth's."""
    # The number of channels of a head that are rotated. slime's configuration has no `rotary_percent`: there all are.
    if config.multi_latent_attention:
        dims = config.qk_pos_emb_head_dim
    else:
        dims = int(config.kv_channels * getattr(config, "rotary_percent", 1.0))
    cos, sin = rotary_factors(positions, dims, rope, config.params_dtype)
    return replace(packed, cos=cos, sin=sin)
