"""A checkpoint's tensors as one rank without a split holds them: what the readers and writers are compared with."""

import re
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from megatron_rlspec.models.names import NameTable

BLOCK = "transformer_layer"  # the name in memory of the layer inside Megatron 0.16's MTP layer


def spell(table: NameTable, name: str, mtp_block: str = BLOCK) -> str:
    """Return a canonical name as the layer specs of `table` have it."""
    name = re.sub(rf"^(mtp\.layers\.\d+)\.{BLOCK}\.", rf"\1.{mtp_block}.", name)
    if table.spec == "local":
        return name
    return re.sub(r"\.local_experts\.(\d+)\.(linear_fc[12])\.weight$", r".\2.weight\1", table.te_name(name))


def to_megatron(
    table: NameTable, tensors: Mapping[str, Tensor], padded_vocab: int = 0, mtp_block: str = BLOCK
) -> Iterator[tuple[str, Tensor]]:
    """Yield every Megatron tensor of the model in table order; embedding and head have `padded_vocab` rows or more."""
    rows = {spell(table, name, mtp_block): row for name, row in table.rows.items()}
    if table.geometry.tied:
        rows["output_layer.weight"] = table.row("output_layer.weight")
    for name, row in rows.items():
        full = row.layout.fuse([tensors[hf] for hf in row.hf])
        missing = max(padded_vocab - len(full), 0) if row.vocabulary else 0
        yield name, torch.cat((full, full.new_zeros(missing, *full.shape[1:])))
