"""Translate Hugging Face names to Megatron names and back, both by the family's rows (`families.py`).

All tensors here are full: gathered over tensor, pipeline and expert parallel ranks. Layers and experts are numbered
over the whole model, not over a rank's share. Megatron has several names for one tensor, and all of them are accepted;
the rows use the canonical one:

    local specs (canonical)                             Transformer Engine specs
    decoder.layers.N.input_layernorm.weight             decoder.layers.N.self_attention.linear_qkv.layer_norm_weight
    decoder.layers.N.pre_mlp_layernorm.weight           decoder.layers.N.mlp.linear_fc1.layer_norm_weight   (if dense)
    ....self_attention.q_layernorm.weight (latent)      ....self_attention.linear_q_up_proj.layer_norm_weight
    ....mlp.experts.local_experts.E.linear_fc1.weight   ....mlp.experts.linear_fc1.weightE
    mtp.layers.N.transformer_layer.* (0.16)             mtp.layers.N.mtp_model_layer.* (main, either specs)
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal

from torch import Tensor

from megatron_rlspec.models.config import DRAFTER
from megatron_rlspec.models.families import beside_target, record_of
from megatron_rlspec.models.layouts import Cut
from megatron_rlspec.models.rows import Geometry, Row

# (a norm's canonical name, the linear layer that holds it under Transformer Engine if the block has that layer).
# `conversion/torch_dist.py` uses the first two alone: keep the order.
FUSED = (
    ("input_layernorm.", "self_attention.linear_qkv."),
    ("pre_mlp_layernorm.", "mlp.linear_fc1."),
    ("self_attention.q_layernorm.", "self_attention.linear_q_up_proj."),
    ("self_attention.kv_layernorm.", "self_attention.linear_kv_up_proj."),
)
# Group 1 is the number of a decoder layer of the policy, and of an expert, in a canonical name. A rank's own modules
# count from 0; `later` adds those of the ranks before (`train/shards.py`, `conversion/run_checkpoint.py`).
LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
EXPERT = re.compile(r"\.mlp\.experts\.local_experts\.(\d+)\.")
# names that `canonical` replaces: experts of Transformer Engine, and the decoder layer of an MTP layer
_EXPERT_TE = re.compile(r"\.mlp\.experts\.(linear_fc[12])\.weight(\d+)$")
_MTP_BLOCK = re.compile(r"^(mtp\.layers\.\d+)\.(?:transformer_layer|mtp_model_layer)\.")
_CANONICAL_BLOCK = r"\1.transformer_layer."


def canonical(name: str) -> str:
    """Return any Megatron name as megatron-core 0.16's local specs have it, without the `module.` of wrappers.

    An unknown name is returned as it is. `NameTable.te_name` is the inverse for norms.
    """
    while name.startswith("module."):
        name = name.removeprefix("module.")
    name = _MTP_BLOCK.sub(_CANONICAL_BLOCK, name)
    for norm, layer in FUSED:
        block, found, leaf = name.partition(f"{layer}layer_norm_")
        if found:
            return f"{block}{norm}{leaf}"
    return _EXPERT_TE.sub(r".mlp.experts.local_experts.\2.\1.weight", name)


def later(pattern: re.Pattern[str], name: str, by: int) -> str:
    """Add `by` to the number that `pattern` finds in a canonical name; return a name without one unchanged.

    pattern  `LAYER` or `EXPERT`
    """
    # `replace` hits the number only, because the rest of what either pattern matches has no digits.
    return pattern.sub(lambda match: match[0].replace(match[1], str(int(match[1]) + by)), name)


def name_table(hf_config: Mapping[str, Any], spec: Literal["local", "te"] = "local") -> NameTable:
    """Return the names of the model that a config.json describes.

    spec  Megatron's layer specs. They change how tensor-parallel ranks cut some tensors (`Row.te_cut`), but no name

    hf_config  of the model; it may hold an EAGLE-3 drafter's config.json under `DRAFTER`

    Raises ValueError for an unknown architecture and for missing sizes, CheckpointError for an EAGLE-3 drafter's
    config.json that cannot be used.
    """
    return NameTable(hf_config, spec)


def drafter_names(hf_config: Mapping[str, Any]) -> frozenset[str]:
    """Return the Hugging Face names of the tensors of a model's drafter: an EAGLE-3 drafter, or one MTP layer.

    One MTP layer, even if config.json states none or several: training uses the first one only (`train/shards.py`).
    `NameTable.drafter_names` has the names of all MTP layers that config.json states.
    """
    layers = 0 if DRAFTER in hf_config else 1
    return frozenset(name_table({**hf_config, "num_nextn_predict_layers": layers}).drafter_names)


class NameTable:
    """The names of one model: its family's rows for its sizes.

    name      the architecture
    spec      "local" or "te", as for `name_table`
    geometry  sizes of the model
    rows      by canonical Megatron name, in the order of the family's function; do not change it
    by_hf     the same rows by each of their Hugging Face names; `Row.copies` are not among them

    If config.json has an EAGLE-3 drafter's under `DRAFTER`, the drafter's rows are here, too, behind `PREFIX`. A model
    with `geometry.tied` has no `lm_head.weight`. Megatron's last pipeline stage then has a copy of the embedding,
    `output_layer.weight`: `row` returns the embedding's row for it, and `to_hf` yields nothing.
    """

    def __init__(self, hf_config: Mapping[str, Any], spec: str) -> None:
        record = record_of(hf_config)
        self.name: str = hf_config["architectures"][0]
        self.spec = spec
        self.geometry = Geometry.of(hf_config)
        self.rows: dict[str, Row] = {row.megatron: row for row in record.rows(hf_config)}
        if DRAFTER in hf_config:
            self.rows |= {row.megatron: row for row in beside_target(hf_config[DRAFTER])}
        self.by_hf: dict[str, Row] = {hf: row for row in self.rows.values() for hf in row.hf}

    def row(self, megatron_name: str) -> Row:
        """Return the row of any Megatron name. Raises ValueError for one that the model does not have."""
        name = canonical(megatron_name)
        # the copy of a tied embedding on the last pipeline stage
        if name == "output_layer.weight" and self.geometry.tied:
            name = "embedding.word_embeddings.weight"
        if name not in self.rows:
            raise ValueError(f"{self.name} has no Megatron tensor {megatron_name}")
        return self.rows[name]

    def to_hf(self, megatron_name: str, full: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the Hugging Face names and tensors of one full Megatron tensor, without padding of the vocabulary.

        The tensors may be views of `full`. Yields nothing for Transformer Engine's `_extra_state` and for a tied head.
        `Row.copies` are not yielded: SGLang does not read them.
        """
        if megatron_name.endswith("_extra_state"):
            return
        row = self.row(megatron_name)
        if self.geometry.tied and canonical(megatron_name) == "output_layer.weight":
            return
        if row.vocabulary:
            full = full[: self.geometry.vocab]
        yield from zip(row.hf, row.layout.split(full), strict=True)

    def shard(self, megatron_name: str, full: Tensor, rank: int, size: int) -> Tensor:
        """Cut the part of `rank` of `size` tensor-parallel ranks out of a full Megatron tensor. It may be a view.

        Raises ValueError if `size` does not fit, or the model has no such tensor.
        """
        try:
            return self._cut(megatron_name).shard(full, rank, size)
        except ValueError as error:
            raise ValueError(f"{megatron_name}, tensor parallel size {size}: {error}") from None

    def unshard(self, megatron_name: str, shards: Sequence[Tensor]) -> Tensor:
        """Join all tensor-parallel ranks' parts, given in rank order, to the full Megatron tensor.

        The result may be the first part itself, not a copy. Padding of the vocabulary stays (`to_hf` removes it).
        """
        return self._cut(megatron_name).unshard(shards)

    def te_name(self, name: str) -> str:
        """Return Transformer Engine's name of a norm by its canonical one: there the next linear layer holds the norm.

        Norms of blocks without that linear layer are returned unchanged, and all other names, those of experts too.
        """
        for norm, layer in FUSED:
            block, found, leaf = name.partition(norm)
            # `rows` has canonical names, but `name` may have the newer name of an MTP layer's block.
            if found and f"{_MTP_BLOCK.sub(_CANONICAL_BLOCK, block)}{layer}weight" in self.rows:
                return f"{block}{layer}layer_norm_{leaf}"
        return name

    @staticmethod
    def is_drafter(name: str) -> bool:
        """Return whether a Megatron name belongs to the drafter. For Hugging Face names use `drafter_names`.

        The embedding, and the head with which an MTP drafter drafts, are the target's.
        """
        return canonical(name).startswith(("mtp.", "eagle_module."))

    @cached_property
    def drafter_names(self) -> tuple[str, ...]:
        """Hugging Face names of the drafter's own tensors, ordered as `rows`; () if config.json names no drafter."""
        return tuple(
            hf for row in self.rows.values() if self.is_drafter(row.megatron) for hf in row.hf
        )

    @cached_property
    def experts(self) -> int:
        """Number of routed experts of a layer that has some; 0 in a dense model."""
        numbers = [int(found[1]) for name in self.rows if (found := EXPERT.search(name))]
        return max(numbers, default=-1) + 1

    @cached_property
    def target_names(self) -> tuple[str, ...]:
        """Hugging Face names of the target's tensors."""
        return tuple(
            hf for row in self.rows.values() if not self.is_drafter(row.megatron) for hf in row.hf
        )

    def _cut(self, megatron_name: str) -> Cut:
        """Return how tensor-parallel ranks cut a tensor under this table's layer specs."""
        row = self.row(megatron_name)
        return row.te_cut if self.spec == "te" and row.te_cut else row.cut
