"""A checkpoint's tensors as one rank without a split holds them: what the readers and writers are compared with."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from megatron_rlspec.models.names import NameTable


def to_megatron(table: NameTable, tensors: Mapping[str, Tensor], padded_vocab: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Yield every Megatron tensor of the model in table order; embedding and head have `padded_vocab` rows or more."""
    rows = {table.spell(name): row for name, row in table.rows.items()}
    if table.geometry.tied:
        rows["output_layer.weight"] = table.row("output_layer.weight")
    for name, row in rows.items():
        full = row.layout.fuse([tensors[hf] for hf in row.hf])
        missing = max(padded_vocab - len(full), 0) if row.vocabulary else 0
        yield name, torch.cat((full, full.new_zeros(missing, *full.shape[1:])))
