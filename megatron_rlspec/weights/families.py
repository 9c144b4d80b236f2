"""The tables: for every tensor of a model its Megatron name, its Hugging Face names, and the layout between them.

A row holds for both directions, so the two cannot disagree; that both are *right* is shown by comparing logits with
Transformers' and SGLang's own classes. Rows use the names of Megatron's local layer specs; `names.py` respells them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_rlspec.weights.layouts import (
    COLUMN,
    COLUMN_GATE_UP,
    COPY,
    GATE_UP,
    REPLICATED,
    ROW,
    SWAP_HALVES,
    Cut,
    Layout,
    grouped_qkv,
)


@dataclass(frozen=True)
class Row:
    """One Megatron tensor. `vocabulary`: its rows are tokens, and Megatron may pad them."""

    megatron: str
    hf: tuple[str, ...]
    layout: Layout = COPY
    cut: Cut = REPLICATED
    vocabulary: bool = False


@dataclass(frozen=True)
class Geometry:
    """What the tables need of a config.json."""

    layers: int
    mtp_layers: int
    heads: int
    groups: int
    head_dim: int
    hidden: int
    vocab: int
    tied: bool

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Geometry:
        try:
            heads, hidden = config["num_attention_heads"], config["hidden_size"]
            geometry = cls(
                layers=config["num_hidden_layers"],
                mtp_layers=config.get("num_nextn_predict_layers") or 0,
                heads=heads,
                groups=config.get("num_key_value_heads") or heads,
                head_dim=config.get("head_dim") or hidden // heads,
                hidden=hidden,
                vocab=config["vocab_size"],
                tied=bool(config.get("tie_word_embeddings", False)),
            )
        except KeyError as missing:
            raise ValueError(f"config.json has no {missing}") from None
        if geometry.heads % geometry.groups:
            raise ValueError(f"num_attention_heads={heads} is not a multiple of num_key_value_heads={geometry.groups}")
        return geometry


def outer_rows(g: Geometry) -> Iterator[Row]:
    yield Row("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), cut=COLUMN, vocabulary=True)
    yield Row("decoder.final_layernorm.weight", ("model.norm.weight",))
    if not g.tied:
        yield Row("output_layer.weight", ("lm_head.weight",), cut=COLUMN, vocabulary=True)


def attention_rows(megatron: str, hf: str, g: Geometry, *, qkv_bias: bool, qk_norm: bool) -> Iterator[Row]:
    """Grouped-query attention without output bias."""
    qkv = grouped_qkv(g.groups, g.heads // g.groups, g.head_dim)
    for part in ("weight", "bias") if qkv_bias else ("weight",):
        sources = tuple(f"{hf}self_attn.{x}_proj.{part}" for x in "qkv")
        yield Row(f"{megatron}self_attention.linear_qkv.{part}", sources, qkv, COLUMN)
    if qk_norm:
        for x in "qk":
            yield Row(f"{megatron}self_attention.{x}_layernorm.weight", (f"{hf}self_attn.{x}_norm.weight",))
    yield Row(f"{megatron}self_attention.linear_proj.weight", (f"{hf}self_attn.o_proj.weight",), cut=ROW)


def mlp_rows(megatron: str, hf: str) -> Iterator[Row]:
    yield Row(f"{megatron}linear_fc1.weight", (f"{hf}gate_proj.weight", f"{hf}up_proj.weight"), GATE_UP, COLUMN_GATE_UP)
    yield Row(f"{megatron}linear_fc2.weight", (f"{hf}down_proj.weight",), cut=ROW)


def norm_rows(megatron: str, hf: str) -> Iterator[Row]:
    yield Row(f"{megatron}input_layernorm.weight", (f"{hf}input_layernorm.weight",))
    yield Row(f"{megatron}pre_mlp_layernorm.weight", (f"{hf}post_attention_layernorm.weight",))


def qwen2(config: Mapping[str, Any]) -> Iterator[Row]:
    """Qwen2 and Qwen3 (dense), and MiMo-7B, which is Qwen2 with `model.mtp_layers`.

    A drafter added to a Qwen2 model takes MiMo's names and order, so that SGLang runs it as MiMo.
    """
    g = Geometry.of(config)
    qwen3 = config.get("model_type") == "qwen3"
    attention = {"qkv_bias": bool(config.get("attention_bias", not qwen3)), "qk_norm": qwen3}

    def block(megatron: str, hf: str) -> Iterator[Row]:
        yield from norm_rows(megatron, hf)
        yield from attention_rows(megatron, hf, g, **attention)
        yield from mlp_rows(f"{megatron}mlp.", f"{hf}mlp.")

    yield from outer_rows(g)
    for n in range(g.layers):
        yield from block(f"decoder.layers.{n}.", f"model.layers.{n}.")
    for n in range(g.mtp_layers):
        megatron, hf = f"mtp.layers.{n}.", f"model.mtp_layers.{n}."
        yield Row(f"{megatron}enorm.weight", (f"{hf}token_layernorm.weight",))
        yield Row(f"{megatron}hnorm.weight", (f"{hf}hidden_layernorm.weight",))
        yield Row(f"{megatron}eh_proj.weight", (f"{hf}input_proj.weight",), SWAP_HALVES, COLUMN)
        yield from block(f"{megatron}transformer_layer.", hf)
        yield Row(f"{megatron}final_layernorm.weight", (f"{hf}final_layernorm.weight",))


TABLES = {
    "MiMoForCausalLM": qwen2,
    "Qwen2ForCausalLM": qwen2,
    "Qwen3ForCausalLM": qwen2,
}
