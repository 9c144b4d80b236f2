"""Give a plain model a fresh drafter for a run (`drafter.fresh`), beside the policy's own files.

A family for which SGLang has an MTP class gets one MTP layer, as by `rlspec convert --add-mtp`: a directory with links
to the model's weights, and one file of new tensors. Another one gets an EAGLE-3 drafter, as by `--add-eagle3`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_rlspec.conversion.convert import config_with_drafter, plan
from megatron_rlspec.conversion.drafter_files import make_drafter
from megatron_rlspec.models import tensor_file
from megatron_rlspec.models.hf_files import INDEX, LazyTensors, copy_companions, publish, read_hf, write_json
from megatron_rlspec.models.names import NameTable


def gets_mtp(config: Mapping[str, Any]) -> bool:
    """Return whether a model of this config.json gets an MTP layer; if not, an EAGLE-3 drafter."""
    try:
        config_with_drafter(config)
    except ValueError:
        return False
    return True


def add_mtp(source: str | Path, target: Path) -> None:
    """Write the model in `source` with a fresh MTP layer to the directory `target`, with links to the old weights.

    Raises CheckpointError, FileError or ValueError for a source that does not serve, and OSError.
    """
    work = plan(source, target, to="hf", add_mtp=True)
    old = read_hf(source)[1]
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        new = dict(_new_tensors(work.family, work.tensors, old))
        count = len(old.files()) + 1
        names = {file: f"model-{i:05d}-of-{count:05d}.safetensors" for i, file in enumerate(old.files(), 1)}
        for file, name in names.items():
            os.symlink((old.directory / file).resolve(), partial / name)
        own = f"model-{count:05d}-of-{count:05d}.safetensors"
        tensor_file.save(new, partial / own)
        weight_map = {tensor: names[file] for tensor, file in old.file_of.items()} | dict.fromkeys(new, own)
        total = sum((partial / name).stat().st_size for name in (*names.values(), own))
        write_json(partial / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
        write_json(partial / "config.json", work.config)
        copy_companions(work.small_files, partial)
        publish(partial, target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def add_eagle3(source: str | Path, target: Path) -> None:
    """Write a fresh EAGLE-3 drafter of the model in `source` to the directory `target`. Errors as of `add_mtp`."""
    make_drafter(source, target)


def _new_tensors(family: NameTable, tensors: Mapping[str, Tensor], old: LazyTensors) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that `old` lacks, by Hugging Face names, each with storage of its own."""
    for name, row in family.rows.items():
        if all(hf in old for hf in row.hf):
            continue
        for hf, tensor in family.to_hf(name, tensors[name]):
            if hf not in old:
                yield hf, tensor.clone(memory_format=torch.contiguous_format)
                for copy in row.copies:
                    yield copy, tensor.clone(memory_format=torch.contiguous_format)
