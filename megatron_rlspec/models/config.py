"""Check a config.json, per model family: types, bounds, and the settings that are supported.

`check_config` is the entry; `SCHEMAS` lists the families. Each class below has the keys of a family as fields, under
their names in config.json.

In a model that this package computes (`Trained`), a key without a field must be empty (null, false, 0, "", [], {}),
because it could change what the model computes; keys in `HARMLESS` and those that begin with `_` may hold anything
(`refuse_unknown_keys`). So a setting whose only implemented value is an empty one has no field here. A new field says:
this package implements the setting.

The config.json of an EAGLE-3 drafter is checked in `drafter_config.py`.

This module does not import torch, which takes seconds: a user's mistake is reported at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from megatron_rlspec.config.base import ConfigError, expectation, shown
from megatron_rlspec.texts import printable
from megatron_rlspec.types import SHARPNESS, checked_sharpness

# The bounds refuse damaged files early. They are far above any real model.
Size = Annotated[int, Field(gt=0, le=2**24)]
Layers = Annotated[int, Field(gt=0, le=10_000)]
Number = Annotated[float, Field(gt=0, le=1e12)]
TokenId = Annotated[int, Field(ge=0, le=2**24)]
Dtype = Literal["float32", "float16", "bfloat16", "float64"]

# Metadata, training and generation settings: keys that do not change what a forward pass computes. `sliding_window` and
# `max_window_layers` are here, because they count only with `use_sliding_window`, which has no field and must be empty.
HARMLESS = frozenset(
    "architectures model_type transformers_version auto_map use_cache torchscript model_name name_or_path license "
    "library_name max_window_layers sliding_window output_attentions output_hidden_states return_dict use_return_dict "
    "id2label label2id num_labels problem_type finetuning_task task_specific_params tokenizer_class prefix "
    "unsloth_version unsloth_fixed transformers.js_config keys_to_ignore_at_inference router_aux_loss_coef "
    "output_router_logits aux_loss_alpha seq_aux ep_size attn_implementation use_bfloat16 tf_legacy_loss pruned_heads "
    "unk_token_id sep_token_id decoder_start_token_id gradient_checkpointing do_sample temperature top_p top_k "
    "typical_p repetition_penalty length_penalty diversity_penalty max_length max_new_tokens min_length "
    "min_new_tokens num_beams num_beam_groups num_return_sequences early_stopping no_repeat_ngram_size "
    "encoder_no_repeat_ngram_size chunk_size_feed_forward suppress_tokens begin_suppress_tokens forced_bos_token_id "
    "forced_eos_token_id bad_words_ids output_scores return_dict_in_generate remove_invalid_values "
    "exponential_decay_length_penalty is_decoder tie_encoder_decoder is_llama_config pretraining_tp "
    "max_sequence_length model_max_length is_causal".split()
)


# A key of our own in the config.json of a model or drafter: the sharpness of coupled drafts that training chose for it.
# `run/result.py` and `conversion/run_checkpoint.py` write it, and `sharpness_of` reads it. `Shared` has a field of this
# name: without the field `check_config` would refuse the key.
SHARPNESS_KEY = "rlspec_sharpness"


class CheckpointError(ConfigError):
    """A model, or one of its files, that cannot be used. One line: where, what is wrong, what was expected."""


class Shared(BaseModel):
    """The keys of every family.

    This class itself checks a model that is served and not trained: further keys may hold anything. They are kept in
    `model_extra`, in which `refuse_unknown_keys` finds unknown keys of the subclasses.
    """

    model_config = ConfigDict(
        strict=True, extra="allow", allow_inf_nan=False, frozen=True, protected_namespaces=()
    )

    architectures: list[str] = Field(
        min_length=1, max_length=1, description="one architecture is loaded"
    )
    model_type: str | None = None
    hidden_size: Size
    num_hidden_layers: Layers
    num_attention_heads: Size
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    vocab_size: Size
    max_position_embeddings: Annotated[int, Field(gt=0, le=2**31 - 1)] | None = None
    rms_norm_eps: Annotated[float, Field(gt=0, le=0.1)] = 1e-6
    initializer_range: Annotated[float, Field(ge=0, le=10)] = 0.02
    tie_word_embeddings: bool = False
    eos_token_id: TokenId | Annotated[list[TokenId], Field(min_length=1)] | None = None
    bos_token_id: TokenId | list[TokenId] | None = None
    pad_token_id: Annotated[int, Field(ge=-1, le=2**24)] | None = None
    torch_dtype: Dtype | None = None
    dtype: Dtype | None = None
    num_nextn_predict_layers: Annotated[int, Field(ge=0, le=64)] | None = None
    rope_theta: Number | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    intermediate_size: Size | None = None
    rlspec_sharpness: Annotated[float, Field(gt=0, le=100)] | None = None

    @property
    def groups(self) -> int:
        """Return the number of key/value heads; without the key, as many as query heads."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_size(self) -> int:
        """Return the number of channels of one head. It is not that of latent attention, which has keys of its own."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @model_validator(mode="after")
    def _sizes_fit(self) -> Shared:
        heads = self.num_attention_heads
        if heads % self.groups:
            raise ValueError(
                f"num_key_value_heads={self.groups}: expected a divisor of num_attention_heads={heads}"
            )
        return self


class Rotary(BaseModel):
    """What `rope_scaling` and `rope_parameters` may hold for every type of rotary embedding, beside the type.

    `Trained._check_rope` refuses other keys that are not empty. `models/rope.py` computes the frequencies.
    """

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, frozen=True)
    rope_theta: Number | None = None
    partial_rotary_factor: Annotated[float, Field(gt=0, le=1)] | None = None


class Llama3Scaling(Rotary):
    """`rope_scaling` of Llama 3.1 and later."""

    factor: Annotated[float, Field(ge=1, le=1e6)]
    low_freq_factor: Annotated[float, Field(gt=0, le=1e6)]
    high_freq_factor: Annotated[float, Field(gt=0, le=1e6)]
    original_max_position_embeddings: Annotated[int, Field(gt=0, le=2**31 - 1)]


class YarnScaling(Rotary):
    """`rope_scaling` of type yarn, as Qwen2.5 and Qwen3 state it for long contexts."""

    factor: Annotated[float, Field(ge=1, le=1e6)]
    original_max_position_embeddings: Annotated[int, Field(gt=0, le=2**31 - 1)]
    beta_slow: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    beta_fast: Annotated[float, Field(gt=0, le=1e6)] = 32.0
    truncate: Literal[True] = True


# the types of scaled rotary embeddings, by the value of `rope_type` (`type` in older files)
SCALINGS: dict[str, type[Rotary]] = {"llama3": Llama3Scaling, "yarn": YarnScaling}


class Trained(Shared):
    """A model that this package itself computes: every setting is either implemented, or refused.

    model_types  allowed values of `model_type`; the key may also be absent
    scalings     allowed types of scaled rotary embeddings, beside the plain one ("default")
    """

    model_types: ClassVar[tuple[str, ...]] = ()
    scalings: ClassVar[dict[str, type[Rotary]]] = SCALINGS

    intermediate_size: Size  # type: ignore[assignment]  # required in these families
    hidden_act: Literal["silu"] = Field("silu", description="other activations are not implemented")
    layer_types: list[str] | None = None
    partial_rotary_factor: Annotated[float, Field(gt=0, le=1)] | None = None

    @property
    def rope(self) -> dict[str, Any]:
        """Return `rope_scaling` (Transformers 4) joined with `rope_parameters` (since 5), whose values win."""
        return {**(self.rope_scaling or {}), **(self.rope_parameters or {})}

    @model_validator(mode="after")
    def _only_what_is_implemented(self) -> Trained:
        if self.model_type is not None and self.model_type not in self.model_types:
            raise ValueError(
                f"model_type={self.model_type}: expected {' or '.join(self.model_types)}"
            )
        self._check_rope("rope_scaling", self.rope_scaling or {})
        self._check_rope("rope_parameters", self.rope_parameters or {})
        unsupported = [kind for kind in self.layer_types or () if kind != "full_attention"]
        if unsupported:
            raise ValueError(
                f"layer_types holds {unsupported[0]}: only full_attention is implemented"
            )
        return self

    def _check_rope(self, key: str, rope: Mapping[str, Any]) -> None:
        """Check the settings `rope` that stand under `key`. Raises ValueError, which pydantic collects.

        {} passes, as the plain type: either key may be absent.
        """
        schemas: dict[str, type[Rotary]] = {"default": Rotary, **self.scalings}
        kind = rope.get("rope_type", rope.get("type", "default"))
        schema = schemas.get(str(kind))
        if schema is None:
            expected = " or ".join(schemas)
            raise ValueError(f"{key}: rotary embedding of type {shown(kind)}; expected {expected}")
        try:
            scaling = schema.model_validate(dict(rope))
        except ValidationError as error:
            raise ValueError(_one_line(error, schema, rope, f"{key}.")) from None
        for name, value in (scaling.model_extra or {}).items():
            if value and name not in ("rope_type", "type"):
                raise ValueError(
                    f"{key}.{name}={shown(value)}: not implemented; expected no such key"
                )


class WhollyRotated(Trained):
    """Families that rotate all channels of a head."""

    @model_validator(mode="after")
    def _wholly_rotated(self) -> WhollyRotated:
        share = self.partial_rotary_factor or self.rope.get("partial_rotary_factor", 1)
        if share != 1:
            raise ValueError(f"partial_rotary_factor={share}: expected 1")
        return self


class Llama(WhollyRotated):
    model_types: ClassVar[tuple[str, ...]] = ("llama",)


class Qwen2(WhollyRotated):
    model_types: ClassVar[tuple[str, ...]] = ("qwen2",)

    qkv_bias: Literal[True] | None = None
    attention_bias: Literal[True] | None = Field(
        None, description="this architecture always has q, k and v biases"
    )


class MiMo(WhollyRotated):
    # also "qwen2" and "llama": `conversion.convert.config_with_drafter` makes a MiMo of these and keeps `model_type`
    model_types: ClassVar[tuple[str, ...]] = ("mimo", "qwen2", "llama")

    attention_bias: bool | None = Field(
        None, description="false: the q, k and v biases in the checkpoint are all 0"
    )


class Qwen3(WhollyRotated):
    model_types: ClassVar[tuple[str, ...]] = ("qwen3",)

    attention_bias: bool | None = None
    use_qk_norm: Literal[True] | None = None


class Qwen3Moe(WhollyRotated):
    """Experts in every layer, chosen by softmax, without shared ones."""

    model_types: ClassVar[tuple[str, ...]] = ("qwen3_moe",)

    use_qk_norm: Literal[True] | None = None
    num_experts: Size
    num_experts_per_tok: Size
    moe_intermediate_size: Size
    norm_topk_prob: bool = False
    decoder_sparse_step: Literal[1] = Field(
        1, description="only experts in every layer are implemented"
    )


class SigmoidExperts(Trained):
    """GLM4-MoE and DeepSeek-V3: experts that a sigmoid and a bias choose."""

    n_routed_experts: Size
    n_shared_experts: Annotated[int, Field(ge=0, le=1024)] | None = None
    num_experts_per_tok: Size
    moe_intermediate_size: Size
    first_k_dense_replace: Annotated[int, Field(ge=0, le=10_000)] = 0
    n_group: Size = 1
    topk_group: Size = 1
    routed_scaling_factor: Number = 1.0
    norm_topk_prob: bool = True
    scoring_func: Literal["sigmoid"] = "sigmoid"
    topk_method: Literal["noaux_tc"] = "noaux_tc"
    moe_layer_freq: Literal[1] = 1


class Glm4Moe(SigmoidExperts):
    model_types: ClassVar[tuple[str, ...]] = ("glm4_moe",)

    attention_bias: bool | None = None
    use_qk_norm: bool = False


class LatentYarnScaling(YarnScaling):
    """`rope_scaling` of DeepSeek-V3."""

    mscale: Annotated[float, Field(gt=0, le=100)]
    mscale_all_dim: Annotated[float, Field(gt=0, le=100)]

    @model_validator(mode="after")
    def _no_magnitude(self) -> LatentYarnScaling:
        # Only equal values leave cosine and sine unscaled, and `models.rope.Rope.mscale` assumes that.
        if self.mscale != self.mscale_all_dim:
            raise ValueError(
                f"rope_scaling.mscale={self.mscale:g}: expected the same as mscale_all_dim={self.mscale_all_dim:g}"
            )
        return self


class DeepseekV3(SigmoidExperts):
    """Latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) and experts."""

    model_types: ClassVar[tuple[str, ...]] = ("deepseek_v3",)
    scalings: ClassVar[dict[str, type[Rotary]]] = {"yarn": LatentYarnScaling}

    q_lora_rank: Size | None = None
    kv_lora_rank: Size
    qk_nope_head_dim: Size
    qk_rope_head_dim: Size
    v_head_dim: Size
    qk_head_dim: Size | None = None
    rope_interleave: Literal[True] = True

    @model_validator(mode="after")
    def _values_fit_into_heads(self) -> DeepseekV3:
        # the channels of a query or key
        whole = self.qk_nope_head_dim + self.qk_rope_head_dim
        if self.v_head_dim > whole:
            raise ValueError(
                f"v_head_dim={self.v_head_dim}: expected at most qk_nope_head_dim + qk_rope_head_dim={whole}"
            )
        return self


SCHEMAS: dict[str, type[Shared]] = {
    "LlamaForCausalLM": Llama,
    "MiMoForCausalLM": MiMo,
    "Qwen2ForCausalLM": Qwen2,
    "Qwen3ForCausalLM": Qwen3,
    "Qwen3MoeForCausalLM": Qwen3Moe,
    "Glm4MoeForCausalLM": Glm4Moe,
    "DeepseekV3ForCausalLM": DeepseekV3,
}
EAGLE3 = "LlamaForCausalLMEagle3"  # the architecture of an EAGLE-3 drafter
# A target and its EAGLE-3 drafter are two directories on disk, but one model in memory and in pushes. In memory the
# target's config.json holds the drafter's config.json under the key DRAFTER. The names of the drafter's tensors begin
# with PREFIX in memory and in pushes; `rollout/sglang/scheduler/eagle3.py` takes it off again in the engine.
DRAFTER = "eagle3"
PREFIX = "eagle3."
# Two tensors of an EAGLE-3 drafter are not trained, and no push sends them: the maps of its draft vocabulary.
# d2t [S]: token id minus index, for each of its S tokens. t2d [vocab_size]: whether a token is one of them.
MAPS = ("d2t", "t2d")


def sharpness_of(config: Mapping[str, Any]) -> float:
    """Return the sharpness of coupled drafts that a config.json states; without one, the default `SHARPNESS[0]`.

    config  of a model, alone or with an EAGLE-3 drafter's under `DRAFTER`, or of a drafter. With `DRAFTER`, the
            drafter's value counts

    Raises CheckpointError for a value that is no sharpness.
    """
    stated = config.get(DRAFTER, config).get(SHARPNESS_KEY)
    if stated is None:
        return SHARPNESS[0]
    try:
        return checked_sharpness(stated)
    except ValueError as error:
        raise CheckpointError(f"config.json: {SHARPNESS_KEY}={error}") from None


def stated_ends(config: Mapping[str, Any]) -> set[int]:
    """Return the token ids that end a text by `eos_token_id` of a config.json or a generation_config.json.

    An empty set without the key. The config need not be checked; `directory.ends_of_text` joins what several files say.
    """
    ends = config.get("eos_token_id")
    if ends is None:
        return set()
    return set(ends) if isinstance(ends, list | tuple) else {ends}


def refusal(architecture: str, column: str, known: Iterable[str]) -> str:
    """Return the line that refuses an architecture, for the caller's error.

    column  what is not possible with it, as docs/families.md names it: "trained or converted", for example
    known   the architectures with which it is possible
    """
    return (
        f"architecture {printable(architecture)[:80]} is not {column}; those are {', '.join(known)} "
        "(docs/families.md)"
    )


def check_config(config: Mapping[str, Any], where: str, *, trained: bool = True) -> Shared:
    """Check a config.json and return it typed. Raises CheckpointError: one line with `where`, key, value, expectation.

    where    the directory or file, for messages
    trained  also refuse what this package does not compute. False: SGLang alone runs the model, and only the keys of
             `Shared` are checked. An architecture that is not in `SCHEMAS` is refused in both cases

    The part under `DRAFTER`, which only a config.json in memory has, is not checked here.
    """
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""
    schema = SCHEMAS.get(name)
    if name and schema is None:
        raise CheckpointError(
            f"config.json of {where}: {refusal(name, 'trained or converted', SCHEMAS)}"
        )
    if schema is None or not trained:
        schema = Shared
    config = {key: value for key, value in config.items() if key != DRAFTER}
    typed = validated(schema, config, where)
    return refuse_unknown_keys(typed, name, where) if trained else typed


_Schema = TypeVar("_Schema", bound=Shared)


def validated(schema: type[_Schema], config: Mapping[str, Any], where: str) -> _Schema:
    """Return a config.json as an object of `schema`. Raises CheckpointError for the first mistake.

    Keys without a field are accepted; `refuse_unknown_keys` refuses them.
    """
    try:
        return schema.model_validate(dict(config))
    except ValidationError as error:
        raise CheckpointError(
            f"config.json of {where}: {_one_line(error, schema, config)}"
        ) from None


def refuse_unknown_keys(typed: Shared, name: str, where: str) -> Shared:
    """Return `typed`, of the architecture `name`. Raises CheckpointError for a key that could change the model.

    Keys that begin with `_` are Transformers' own notes, such as `_name_or_path`.
    """
    for key, value in (typed.model_extra or {}).items():
        if value and key not in HARMLESS and not key.startswith("_"):
            raise CheckpointError(
                f"config.json of {where}: {key}={shown(value)}: not implemented for {name}, and might change what "
                "the model computes; expected null, or no such key"
            )
    return typed


def _one_line(
    error: ValidationError, schema: type[BaseModel], config: Mapping[str, Any], prefix: str = ""
) -> str:
    """Format the first mistake that pydantic found in `config`. `prefix`: "rope_scaling.", before a key inside it."""
    first = error.errors(include_url=False)[0]
    # An error of one of our validators: its message names key and value. Its `loc` can be empty, so this case comes
    # before `loc[0]` is read.
    if first["type"] == "value_error":
        return str(first["msg"]).removeprefix("Value error, ")
    key = str(first["loc"][0])
    if first["type"] == "missing":
        return f"no {prefix}{key}"
    field = schema.model_fields[key]
    reason = f"; {field.description}" if field.description else ""
    return f"{prefix}{key}={shown(config[key])}: {expectation(first)}{reason}"
