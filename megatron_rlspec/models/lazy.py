"""Tensors by name, each of which is read or made when it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor

from megatron_rlspec.models.names import NameTable
from megatron_rlspec.models.tensor_file import ByName

Makers = dict[str, Callable[[], Tensor]]


class Lazy(ByName):
    """Maps names to what their functions return, called anew on every access.

    makers  name -> function. A caller may add entries (`conversion/convert.py` does)
    """

    def __init__(self, makers: Makers) -> None:
        self.makers = self.names = makers

    def __getitem__(self, name: str) -> Tensor:
        return self.makers[name]()


def to_megatron(table: NameTable, tensors: Mapping[str, Tensor]) -> Lazy:
    """Return full tensors by canonical Megatron name: those whose Hugging Face tensors are all in `tensors`."""
    makers: Makers = {}
    for name, row in table.rows.items():
        if all(hf in tensors for hf in row.hf):
            makers[name] = partial(_to_megatron, table, name, tensors)
    return Lazy(makers)


def _to_megatron(table: NameTable, name: str, tensors: Mapping[str, Tensor]) -> Tensor:
    row = table.rows[name]
    return row.layout.fuse([tensors[hf] for hf in row.hf])
