"""Record what differs between model families, and name every tensor of a model for Megatron and for Hugging Face.

A `Family` is the record of one architecture; `FAMILIES` below has them all, and `record_of` finds one. Its rows give
each tensor's Megatron name, its Hugging Face names, and the layout between them (`rows.py`). Both directions of a
conversion read the same row, so a wrong row still round-trips: tests therefore compare logits with Transformers' and
SGLang's own classes. Rows use the names of Megatron's local layer specs; `names.py` knows the other names.

How the drafters differ (SGLang's class in brackets):

    family                        input projection       final norm        embedding at position 0
    MiMo-7B (MiMoMTP)             hidden, embedding      final_layernorm   replaced by 0
    DeepSeek-V3, GLM4-MoE (NextN) embedding, hidden      shared_head.norm  as at other positions
    Qwen3-MoE (MTP)               embedding, hidden      norm              as at other positions
    EAGLE-3                       none; `fc` joins the   norm              as at other positions
                                  hidden states of several layers

mbridge 0.15.1 also translates between Megatron and Hugging Face. It is not used: it needs Megatron's model objects on
all ranks, it knows Transformer Engine's names only, and it does not exchange the halves of MiMo's input projection.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from megatron_rlspec.models.config import MAPS, PREFIX, SCHEMAS, refusal
from megatron_rlspec.models.drafter_config import check_drafter_config, layer_of_drafter
from megatron_rlspec.models.layouts import SWAP_HALVES
from megatron_rlspec.models.rows import (
    Geometry,
    Row,
    attention,
    experts,
    latent_attention,
    mlp,
    mtp_layer,
    need,
    norms,
    outer,
)

# ---- families -------------------------------------------------------------------------------------------------------


def dense(config: Mapping[str, Any]) -> Iterator[Row]:
    """Yield the rows of Llama, Qwen2, Qwen3 (dense) and MiMo-7B, which is a Qwen2 with `model.mtp_layers`.

    A drafter that `--add-mtp` gives a Qwen2 or Llama has MiMo's names and order, so that SGLang runs the model as MiMo.
    SGLang's class of MiMo always has biases of q, k and v, so what was a Llama has biases of 0 in its checkpoint.
    """
    g = Geometry.of(config)
    record = record_of(config)
    bias = record.has_qkv_bias(config)
    qk_norm = record.has_qk_norm(config)
    zero_bias = record.stores_qkv_bias(config) and not bias

    # the rows of a decoder layer of the target or the drafter; `megatron` and `hf` are the prefixes of its names
    def block(megatron: str, hf: str) -> Iterator[Row]:
        yield from norms(megatron, hf)
        yield from attention(megatron, hf, g, bias=bias, qk_norm=qk_norm, zero_bias=zero_bias)
        yield from mlp(f"{megatron}mlp.", f"{hf}mlp.")

    yield from outer(g)
    for n in range(g.layers):
        yield from block(f"decoder.layers.{n}.", f"model.layers.{n}.")
    for n in range(g.mtp_layers):
        hf = f"model.mtp_layers.{n}."
        # in the order of `mtp_layer`: norm of the embedding, norm of the hidden state, input projection, final norm
        names = [
            f"{hf}{x}"
            for x in ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
        ]
        yield from mtp_layer(n, names, block(f"mtp.layers.{n}.transformer_layer.", hf), SWAP_HALVES)


def deepseek_v3(config: Mapping[str, Any]) -> Iterator[Row]:
    """Yield the rows of DeepSeek-V3 (latent attention) and GLM4-MoE (grouped-query attention).

    Both have a sigmoid router with a bias, and NextN drafters.
    """
    g = Geometry.of(config)
    record = record_of(config)
    latent = "kv_lora_rank" in config
    # number of layers at the start that have an MLP in place of experts
    dense_layers = config.get("first_k_dense_replace", 0)
    count = need(config, "n_routed_experts")
    shared = bool(config.get("n_shared_experts"))

    # The rows of a decoder layer, as in `dense`. n: its number in the checkpoint, where MTP layers follow the target's.
    def block(megatron: str, hf: str, n: int) -> Iterator[Row]:
        yield from norms(megatron, hf)
        if latent:
            yield from latent_attention(megatron, hf, config.get("q_lora_rank"))
        else:
            bias = record.has_qkv_bias(config)
            yield from attention(megatron, hf, g, bias=bias, qk_norm=record.has_qk_norm(config))
        if n < dense_layers:
            yield from mlp(f"{megatron}mlp.", f"{hf}mlp.")
        else:
            yield from experts(
                f"{megatron}mlp.", f"{hf}mlp.", count, router_bias=True, shared=shared
            )

    yield from outer(g, mtp_copies=True)
    for n in range(g.layers):
        yield from block(f"decoder.layers.{n}.", f"model.layers.{n}.", n)
    for n in range(g.mtp_layers):  # the checkpoint numbers MTP layers behind the target's layers
        hf = f"model.layers.{g.layers + n}."
        # in the order of `mtp_layer`, as in `dense`
        names = [f"{hf}{x}" for x in ("enorm", "hnorm", "eh_proj", "shared_head.norm")]
        yield from mtp_layer(
            n, names, block(f"mtp.layers.{n}.transformer_layer.", hf, g.layers + n)
        )


def qwen3_moe(config: Mapping[str, Any]) -> Iterator[Row]:
    """Yield the rows of Qwen3-MoE: grouped-query attention with norms of q and k, softmax router, no shared experts.

    The drafter's names are those that SGLang's `qwen3_moe_mtp.py` reads; Transformers has no drafter of this family.
    Raises ValueError for more than one MTP layer.
    """
    g = Geometry.of(config)
    count = need(config, "num_experts")

    def block(megatron: str, hf: str) -> Iterator[Row]:
        yield from norms(megatron, hf)
        yield from attention(megatron, hf, g, bias=False, qk_norm=True)
        yield from experts(f"{megatron}mlp.", f"{hf}mlp.", count, router_bias=False, shared=False)

    yield from outer(g)
    for n in range(g.layers):
        yield from block(f"decoder.layers.{n}.", f"model.layers.{n}.")
    if g.mtp_layers > 1:
        raise ValueError(
            f"{g.mtp_layers} MTP layers, but this family's names (mtp.fc, ...) have room for one"
        )
    if g.mtp_layers:
        # in the order of `mtp_layer`, as in `dense`
        names = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm")
        yield from mtp_layer(0, names, block("mtp.layers.0.transformer_layer.", "mtp.layers.0."))


def eagle3(config: Mapping[str, Any]) -> Iterator[Row]:
    """Yield the rows of an EAGLE-3 drafter, which has a checkpoint of its own. Megatron names are ModelOpt's.

    config  the drafter's own config.json

    The first layer's attention reads embedding and hidden state side by side, so its q, k and v have 2H columns. `d2t`
    and `t2d` map between the drafter's vocabulary and the target's. The embedding is the target's, so it has no row.
    `conversion.eagle3.shapes` lists the same tensors with their shapes.
    """
    g = Geometry.of(config)
    to = "eagle_module."
    typed = check_drafter_config(config, "the drafter")
    if typed.norms_joined:
        yield Row(f"{to}input_norm.weight", ("input_norm.weight",))
    for tap in range(typed.layers_read if typed.norms_each else 0):
        yield Row(f"{to}fc_norm.{tap}.weight", (f"fc_norm.{tap}.weight",))
    yield Row(f"{to}fc.weight", ("fc.weight",))
    yield Row(f"{to}enorm.weight", ("midlayer.input_layernorm.weight",))
    for index in range(typed.num_hidden_layers):
        layer, frm = f"{to}decoder.layers.{index}.", layer_of_drafter(index)
        # `input_layernorm` of the checkpoint is the norm of the embedding (enorm above); `hidden_norm` is what Megatron
        # calls `input_layernorm`.
        yield Row(f"{layer}input_layernorm.weight", (f"{frm}hidden_norm.weight",))
        yield Row(f"{layer}pre_mlp_layernorm.weight", (f"{frm}post_attention_layernorm.weight",))
        yield from attention(layer, frm, g, bias=False, qk_norm=False)
        yield from mlp(f"{layer}mlp.", f"{frm}mlp.")
    yield Row(f"{to}decoder.final_layernorm.weight", ("norm.weight",))
    # Whole on every rank (cut REPLICATED). A rank computes the logits of the draft tokens in its share of the target's
    # vocabulary, and these are not equally many on all ranks.
    yield Row(f"{to}eagle_output_layer.weight", ("lm_head.weight",))
    yield Row(f"{to}d2t", ("d2t",))
    yield Row(f"{to}t2d", ("t2d",))


def beside_target(config: Mapping[str, Any]) -> Iterator[Row]:
    """Yield the rows of an EAGLE-3 drafter with `PREFIX` before their Hugging Face names, without `MAPS`.

    The prefix lets the drafter's tensors stand in one name table with the target's, as in a push. `MAPS` are left out,
    because they are not trained.

    config  the drafter's own config.json
    """
    for row in eagle3(config):
        if row.hf[0] not in MAPS:
            yield replace(row, hf=tuple(PREFIX + name for name in row.hf))


# ---- one record per family --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Family:
    """What is true of every model of one architecture. docs/adding-a-family.md says which code reads each field.

    rows                  config.json -> a row for each tensor
    qkv_bias, qk_norm     whether q, k and v have biases, and q and k a norm; "config": as config.json says; "or_zero":
                          engines and checkpoint have biases, but with attention_bias=false they are 0 there, and
                          Megatron's model has none
    rotary_share          share of a head's channels that is rotated, unless config.json says
    zero_first_embedding  the drafter reads 0 for the embedding at position 0
    embedded              the embedded engine runs the target
    embedded_drafter      the embedded engine runs the drafter
    added_drafter         architecture of the same model with a drafter by `--add-mtp`; "": no engine runs one
    sglang_files          SGLang's files with the classes of target and drafter; (): unknown
    sglang_drafter        SGLang's class of the drafter; "": unknown, or no drafter
    sglang_drafter_names  pairs (prefix of that class's parameters, prefix in the checkpoint). The first pair whose
                          prefix fits counts, so longer prefixes come first. {layers} stands for the number of the
                          target's layers
    pushed                SGLang's classes hold every byte of a push where it belongs, at tensor parallel sizes 1, 2
                          and 4: `tests/rollout/test_pushed_families.py`. Engines of other families are checked by what
                          their loaders were given
    served                an SGLang engine gave the log-probs of Transformers before and after a push
    """

    rows: Callable[[Mapping[str, Any]], Iterator[Row]]
    qkv_bias: Literal["always", "never", "config", "or_zero"] = "config"
    qk_norm: Literal["always", "never", "config"] = "never"
    rotary_share: float = 1.0
    zero_first_embedding: bool = False
    embedded: bool = False
    embedded_drafter: bool = False
    added_drafter: str = ""
    sglang_files: tuple[str, ...] = ()
    sglang_drafter: str = ""
    sglang_drafter_names: tuple[tuple[str, str], ...] = ()
    pushed: bool = False
    served: bool = False

    def has_qkv_bias(self, config: Mapping[str, Any]) -> bool:
        """Return whether q, k and v have biases in Megatron's model. If not, those of a checkpoint must all be 0."""
        stated = config.get("attention_bias")
        answers = {
            "always": True,
            "never": False,
            "config": bool(stated),
            "or_zero": stated is not False,
        }
        return answers[self.qkv_bias]

    def stores_qkv_bias(self, config: Mapping[str, Any]) -> bool:
        """Return whether this model's checkpoint and its engines hold q, k and v biases, even if all are 0."""
        return self.qkv_bias == "or_zero" or self.has_qkv_bias(config)

    def has_qk_norm(self, config: Mapping[str, Any]) -> bool:
        """Return whether this model normalises queries and keys."""
        return (
            bool(config.get("use_qk_norm"))
            if self.qk_norm == "config"
            else self.qk_norm == "always"
        )


# `sglang_drafter_names` of the drafters called NextN: their layer has the number behind the target's last one
_NEXTN = (("model.decoder.", "model.layers.{layers}."), ("model.", "model.layers.{layers}."))

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(
        dense,
        qkv_bias="never",
        embedded=True,
        added_drafter="MiMoForCausalLM",
        sglang_files=("llama",),
        pushed=True,
        served=True,
    ),
    "MiMoForCausalLM": Family(
        dense,
        qkv_bias="or_zero",
        zero_first_embedding=True,
        embedded=True,
        embedded_drafter=True,
        added_drafter="MiMoForCausalLM",
        sglang_files=("mimo", "mimo_mtp"),
        sglang_drafter="MiMoMTP",
        sglang_drafter_names=(
            ("model.mtp_block.", "model.mtp_layers.0."),
            ("model.", "model.mtp_layers.0."),
        ),
        pushed=True,
        served=True,
    ),
    "Qwen2ForCausalLM": Family(
        dense,
        qkv_bias="always",
        zero_first_embedding=True,
        embedded=True,
        added_drafter="MiMoForCausalLM",
        sglang_files=("qwen2",),
        pushed=True,
        served=True,
    ),
    "Qwen3ForCausalLM": Family(
        dense,
        qk_norm="always",
        zero_first_embedding=True,
        embedded=True,
        sglang_files=("qwen3",),
        pushed=True,
        served=True,
    ),
    "Qwen3MoeForCausalLM": Family(
        qwen3_moe,
        qkv_bias="never",
        qk_norm="always",
        added_drafter="Qwen3MoeForCausalLM",
        sglang_files=("qwen3_moe", "qwen3_moe_mtp"),
        sglang_drafter="Qwen3MoeForCausalLMMTP",
        sglang_drafter_names=(("model.", "mtp."), ("", "mtp.")),
        pushed=True,
        served=True,
    ),
    "DeepseekV3ForCausalLM": Family(
        deepseek_v3,
        added_drafter="DeepseekV3ForCausalLM",
        sglang_files=("deepseek_v2", "deepseek_nextn"),
        sglang_drafter="DeepseekV3ForCausalLMNextN",
        sglang_drafter_names=_NEXTN,
        pushed=True,
    ),
    "Glm4MoeForCausalLM": Family(
        deepseek_v3,
        qk_norm="config",
        rotary_share=0.5,
        added_drafter="Glm4MoeForCausalLM",
        sglang_files=("glm4_moe", "glm4_moe_nextn"),
        sglang_drafter="Glm4MoeForCausalLMNextN",
        sglang_drafter_names=_NEXTN,
        pushed=True,
        served=True,
    ),
    "LlamaForCausalLMEagle3": Family(
        eagle3,
        sglang_files=("llama_eagle3",),
        sglang_drafter="LlamaForCausalLMEagle3",
        sglang_drafter_names=(
            ("model.layers.0.", f"{PREFIX}midlayer."),
            ("model.", PREFIX),
            ("", PREFIX),
        ),
    ),
}


def record_of(config: Mapping[str, Any]) -> Family:
    """Return the record of a config.json's family. Raises ValueError for an unknown architecture.

    An EAGLE-3 drafter's config.json has a record, too, though `SCHEMAS` does not list it.
    """
    architecture = (config.get("architectures") or ["missing"])[0]
    if architecture not in FAMILIES:
        raise ValueError(refusal(architecture, "converted", SCHEMAS))
    return FAMILIES[architecture]


def names_where(fact: Callable[[Family], object]) -> tuple[str, ...]:
    """Return the architectures whose record makes `fact` true, in the order of `FAMILIES`."""
    return tuple(name for name, record in FAMILIES.items() if fact(record))
