"""The rows that families share: the tensors of a layer's parts, by Megatron's names and Hugging Face's.

`families.py` calls `outer` once a model, and the other functions once a layer. The arguments `megatron` and `hf` of
these are the prefixes of the names in that layer or part, each with a dot at its end. A row's Megatron name must be
that of Megatron's local layer specs: `names.py` turns all other names into it, and finds rows by it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_rlspec.models.layouts import (
    COLUMN,
    COLUMN_GATE_UP,
    COPY,
    GATE_UP,
    REPLICATED,
    ROW,
    Cut,
    Layout,
    grouped_qkv,
    zero_biased_qkv,
)


@dataclass(frozen=True)
class Row:
    """One Megatron tensor and its Hugging Face tensors.

    Every Megatron name and every name in `hf` must be in one row of a model only: `NameTable` keeps the last row,
    without an error.

    megatron    the canonical name of the Megatron tensor (local layer specs)
    hf          the Hugging Face names of its parts, in the order that `layout` expects
    layout      how the parts form the full Megatron tensor
    cut         how tensor-parallel ranks cut the full tensor
    vocabulary  the tensor has a row for each token. Megatron may pad these, and `NameTable.to_hf` removes the padding
    te_cut      how Transformer Engine's layers cut the full tensor; None: by `cut`, too
    copies      further Hugging Face names under which checkpoints repeat hf[0]. Conversions write them, pushes and
                readers do not use them
    """

    megatron: str
    hf: tuple[str, ...]
    layout: Layout = COPY
    cut: Cut = REPLICATED
    vocabulary: bool = False
    te_cut: Cut | None = None
    copies: tuple[str, ...] = ()


@dataclass(frozen=True)
class Geometry:
    """Sizes in a config.json that all families have. They are not checked (`models/config.py` does).

    layers      of the target, without MTP layers
    mtp_layers  of the drafter; 0: no drafter, or an EAGLE-3 drafter
    heads       query heads
    groups      key/value heads
    head_dim    channels of a head
    hidden      H
    vocab       tokens, without Megatron's padding
    tied        the output head is the embedding
    """

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
        """Read the sizes. Raises ValueError for a missing one."""
        heads = need(config, "num_attention_heads")
        hidden = need(config, "hidden_size")
        return cls(
            layers=need(config, "num_hidden_layers"),
            mtp_layers=config.get("num_nextn_predict_layers") or 0,
            heads=heads,
            groups=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or hidden // heads,
            hidden=hidden,
            vocab=need(config, "vocab_size"),
            tied=bool(config.get("tie_word_embeddings", False)),
        )


def need(config: Mapping[str, Any], key: str) -> Any:
    """Return the value of a key that config.json must have. Raises ValueError if it is missing."""
    if key not in config:
        raise ValueError(f"config.json has no {key!r}")
    return config[key]


def outer(g: Geometry, mtp_copies: bool = False) -> Iterator[Row]:
    """Yield the rows outside of all layers: embedding, final norm and, unless it is tied, head.

    mtp_copies  the checkpoint repeats embedding and head in each of the drafter's layers, which it numbers behind the
                target's (`Row.copies`)
    """
    prefixes = [f"model.layers.{g.layers + n}." for n in range(g.mtp_layers)] if mtp_copies else []
    yield Row(
        "embedding.word_embeddings.weight",
        ("model.embed_tokens.weight",),
        COPY,
        COLUMN,
        vocabulary=True,
        copies=tuple(f"{prefix}embed_tokens.weight" for prefix in prefixes),
    )
    yield Row("decoder.final_layernorm.weight", ("model.norm.weight",))
    if not g.tied:
        copies = tuple(f"{prefix}shared_head.head.weight" for prefix in prefixes)
        yield Row(
            "output_layer.weight", ("lm_head.weight",), COPY, COLUMN, vocabulary=True, copies=copies
        )


def norms(megatron: str, hf: str) -> Iterator[Row]:
    """Yield the two norms of a decoder layer."""
    yield Row(f"{megatron}input_layernorm.weight", (f"{hf}input_layernorm.weight",))
    yield Row(f"{megatron}pre_mlp_layernorm.weight", (f"{hf}post_attention_layernorm.weight",))


def attention(
    megatron: str,
    hf: str,
    g: Geometry,
    *,
    bias: bool,
    qk_norm: bool,
    zero_bias: bool = False,
) -> Iterator[Row]:
    """Yield grouped-query attention.

    bias       q, k and v have biases in the checkpoint and in Megatron
    qk_norm    queries and keys have a norm
    zero_bias  the checkpoint holds biases of q, k and v that are 0, and Megatron has none; `bias` is then False
    """
    sizes = (g.groups, g.heads // g.groups, g.head_dim)
    layout = grouped_qkv(*sizes)
    names = {
        part: tuple(f"{hf}self_attn.{x}_proj.{part}" for x in "qkv") for part in ("weight", "bias")
    }
    qkv = f"{megatron}self_attention.linear_qkv."
    if zero_bias:
        # one row of six Hugging Face tensors: the layout refuses biases that are not 0
        yield Row(f"{qkv}weight", names["weight"] + names["bias"], zero_biased_qkv(*sizes), COLUMN)
    else:
        for part in ("weight", "bias") if bias else ("weight",):
            yield Row(f"{qkv}{part}", names[part], layout, COLUMN)
    if qk_norm:
        for x in "qk":
            yield Row(
                f"{megatron}self_attention.{x}_layernorm.weight",
                (f"{hf}self_attn.{x}_norm.weight",),
            )
    yield Row(
        f"{megatron}self_attention.linear_proj.weight", (f"{hf}self_attn.o_proj.weight",), cut=ROW
    )


def latent_attention(megatron: str, hf: str, q_lora_rank: int | None) -> Iterator[Row]:
    """Yield multi-head latent attention, as in DeepSeek-V3.

    q_lora_rank  size of the compressed queries; None: queries are not compressed

    Local specs cut the down projections by rows. Transformer Engine's layers hold them whole on every rank.
    """
    to = f"{megatron}self_attention."
    frm = f"{hf}self_attn."
    if q_lora_rank is None:
        yield Row(f"{to}linear_q_proj.weight", (f"{frm}q_proj.weight",), cut=COLUMN)
    else:
        yield Row(
            f"{to}linear_q_down_proj.weight",
            (f"{frm}q_a_proj.weight",),
            cut=COLUMN,
            te_cut=REPLICATED,
        )
        yield Row(f"{to}q_layernorm.weight", (f"{frm}q_a_layernorm.weight",))
        yield Row(f"{to}linear_q_up_proj.weight", (f"{frm}q_b_proj.weight",), cut=COLUMN)
    yield Row(
        f"{to}linear_kv_down_proj.weight",
        (f"{frm}kv_a_proj_with_mqa.weight",),
        cut=COLUMN,
        te_cut=REPLICATED,
    )
    yield Row(f"{to}kv_layernorm.weight", (f"{frm}kv_a_layernorm.weight",))
    yield Row(f"{to}linear_kv_up_proj.weight", (f"{frm}kv_b_proj.weight",), cut=COLUMN)
    yield Row(f"{to}linear_proj.weight", (f"{frm}o_proj.weight",), cut=ROW)


def mlp(megatron: str, hf: str) -> Iterator[Row]:
    """Yield a gated MLP: of a layer, of one expert, or of the shared experts."""
    yield Row(
        f"{megatron}linear_fc1.weight",
        (f"{hf}gate_proj.weight", f"{hf}up_proj.weight"),
        GATE_UP,
        COLUMN_GATE_UP,
    )
    yield Row(f"{megatron}linear_fc2.weight", (f"{hf}down_proj.weight",), cut=ROW)


def experts(
    megatron: str, hf: str, count: int, *, router_bias: bool, shared: bool
) -> Iterator[Row]:
    """Yield the router and all `count` routed experts of a layer, and with `shared` its shared experts.

    Experts are numbered over all expert-parallel ranks; the modules of one rank count from 0 (`names.later`).
    """
    yield Row(f"{megatron}router.weight", (f"{hf}gate.weight",))
    if router_bias:
        yield Row(f"{megatron}router.expert_bias", (f"{hf}gate.e_score_correction_bias",))
    for e in range(count):
        yield from mlp(f"{megatron}experts.local_experts.{e}.", f"{hf}experts.{e}.")
    if shared:
        yield from mlp(f"{megatron}shared_experts.", f"{hf}shared_experts.")


def mtp_layer(
    n: int, names: Sequence[str], block: Iterator[Row], layout: Layout = COPY
) -> Iterator[Row]:
    """Yield MTP layer n.

    names   the checkpoint's names, without `.weight`, in this order: norm of the embedding, norm of the hidden state,
            input projection, final norm
    block   the rows of its decoder layer, with their names complete
    layout  of the input projection [H, 2H]: `SWAP_HALVES` if the checkpoint's order is hidden state, embedding.
            Megatron's is embedding, hidden state
    """
    embedding, hidden, projection, final = (f"{name}.weight" for name in names)
    to = f"mtp.layers.{n}."
    yield Row(f"{to}enorm.weight", (embedding,))
    yield Row(f"{to}hnorm.weight", (hidden,))
    yield Row(f"{to}eh_proj.weight", (projection,), layout, COLUMN)
    yield from block
    yield Row(f"{to}final_layernorm.weight", (final,))
