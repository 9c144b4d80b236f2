"""Give a plain model a fresh drafter for a run (`drafter.fresh`), beside the policy's own files.

A family for which SGLang has an MTP class gets one MTP layer, as by `rlspec convert --add-mtp`: a directory with links
to the model's weights, and one file of new tensors. Another one gets an EAGLE-3 drafter, by
`drafter_files.make_drafter`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from megatron_rlspec.conversion.convert import plan
from megatron_rlspec.models import tensor_file
from megatron_rlspec.models.hf_files import LazyTensors, building, complete, publish, read_hf
from megatron_rlspec.models.names import NameTable


def add_mtp(source: str | Path, target: Path) -> None:
    """Write the model in `source` with a fresh MTP layer to the directory `target`, with links to the old weights.

    Raises CheckpointError, FileError or ValueError for a source that does not serve, and OSError.
    """
    work = plan(source, target, to="hf", add_mtp=True)
    old = read_hf(source)[1]
    with building(target) as partial:
        new = dict(_new_tensors(work.family, work.tensors, old))
        # A tensor that the file calls otherwise is written once more, under its name.
        renamed = [name for name, header in old.headers.items() if header.name != name]
        new |= {name: old[name].clone() for name in renamed}
        paths = sorted({header.path for header in old.headers.values()})
        shards = {path: f"shard-{i:05d}.safetensors" for i, path in enumerate(paths)}
        for path, shard in shards.items():
            os.symlink(path.resolve(), partial / shard)
        own = f"shard-{len(shards):05d}.safetensors"
        tensor_file.save(new, partial / own)
        file_of = {name: shards[header.path] for name, header in old.headers.items()}
        file_of |= dict.fromkeys(new, own)
        complete(partial, work.config, file_of, work.small_files)
        publish(partial, target)


def _new_tensors(
    family: NameTable, tensors: Mapping[str, Tensor], old: LazyTensors
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that `old` lacks, by Hugging Face names, each with storage of its own."""
    for name, row in family.rows.items():
        if all(hf in old for hf in row.hf):
            continue
        for hf, tensor in family.to_hf(name, tensors[name]):
            if hf not in old:
                yield hf, tensor.clone(memory_format=torch.contiguous_format)
                for copy in row.copies:
                    yield copy, tensor.clone(memory_format=torch.contiguous_format)
