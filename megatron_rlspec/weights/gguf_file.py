"""Read a GGUF file (llama.cpp's format) as a Hugging Face checkpoint: tensors, config.json, tokenizer, chat template.

The package `gguf` reads and dequantises the tensors and knows llama.cpp's names of them; Transformers translates the
metadata and the tokenizer. llama.cpp stores the channels of Llama's queries and keys in another order, because its
rotary embedding pairs neighbours; here they get their order back (`LlamaModel.permute` in llama.cpp's
convert_hf_to_gguf.py is the inverse).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_rlspec.weights.checkpoint import write_json
from megatron_rlspec.weights.model_config import check_config
from megatron_rlspec.weights.model_directory import expected_shape
from megatron_rlspec.weights.names import NameTable
from megatron_rlspec.weights.tensor_file import CheckpointError

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Tensors that hold no weights of the model: llama.cpp writes the factors of scaled rotary embeddings as a tensor.
_SCALED_ROTARY = "rope_freqs.weight"


def is_gguf(path: Path) -> bool:
    """Return whether a path is meant as a GGUF file."""
    return path.is_file() and path.suffix.lower() == ".gguf"


def read(path: Path) -> Any:
    """Open a GGUF file with the package's `GGUFReader`. Raises CheckpointError."""
    from gguf import GGUFReader

    try:
        return GGUFReader(path)
    except OSError:
        raise
    except Exception as error:  # the package raises whatever the damaged bytes lead to
        raise CheckpointError(f"{path}: truncated or not GGUF ({_first_line(error)})") from None


def write_small_files(path: Path, reader: Any, directory: Path, dtype: str) -> None:
    """Write config.json and the tokenizer of a GGUF file into `directory`. Raises CheckpointError."""
    if any(tensor.name == _SCALED_ROTARY for tensor in reader.tensors):
        raise CheckpointError(f"{path}: {_SCALED_ROTARY}: scaled rotary embeddings are not read from GGUF")
    kind = str(_value(reader, "general.architecture") or "nothing")
    if kind not in ARCHITECTURES:
        raise CheckpointError(f"{path}: general.architecture is {kind}; expected {', '.join(ARCHITECTURES)}")
    scaling = _value(reader, f"{kind}.rope.scaling.type")
    if scaling not in (None, "none"):
        raise CheckpointError(f"{path}: {kind}.rope.scaling.type is {scaling}; only unscaled ones are read from GGUF")
    if _value(reader, "tokenizer.ggml.tokens") is None:
        raise CheckpointError(f"{path}: no tokenizer.ggml.tokens; expected a file with its tokenizer")
    from transformers import AutoConfig, AutoTokenizer

    try:
        config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True).to_diff_dict()
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
        tokenizer.save_pretrained(directory)
    except Exception as error:  # a file with other metadata than expected raises errors of any kind there
        raise CheckpointError(f"{path}: Transformers cannot read its metadata ({_first_line(error)})") from None
    if config["model_type"] != kind:
        raise CheckpointError(f"{path}: Transformers reads it as {config['model_type']}, which is not converted")
    stated = {key: value for key, value in config.items() if not key.startswith("_") and value is not None}
    if width := _value(reader, f"{kind}.attention.key_length"):
        stated["head_dim"] = int(width)  # Transformers reads it for some architectures only
    write_json(directory / "config.json", {**stated, "architectures": [ARCHITECTURES[kind]], "dtype": dtype})


class GgufTensors(Mapping[str, Tensor]):
    """Maps Hugging Face names to tensors of a GGUF file, dequantised on access. Raises CheckpointError.

    Every tensor of the file must have a name in `family`, and every name of the target a tensor in the file, of the
    shape that `config` gives it.
    """

    def __init__(self, path: Path, reader: Any, family: NameTable, config: Mapping[str, Any], dtype: str) -> None:
        from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

        typed = check_config(config, str(path), trained=False)
        self.path = path
        self.geometry = family.geometry
        self.dtype = DTYPES[dtype]
        held = {tensor.name: tensor for tensor in reader.tensors}
        kind = next(kind for kind, architecture in ARCHITECTURES.items() if architecture == family.name)
        self.permuted = kind == "llama"
        model = next(key for key, name in MODEL_ARCH_NAMES.items() if name == kind)
        names = get_tensor_name_map(model, family.geometry.layers)
        self._held: dict[str, Any] = {}
        for name in family.target_names:
            stem, _, leaf = name.rpartition(".")
            theirs = f"{names.get_name(stem)}.{leaf}"
            if theirs not in held:
                raise CheckpointError(f"{path}: lacks {theirs}, which {family.name} needs")
            self._held[name] = held.pop(theirs)
        if held:
            raise CheckpointError(f"{path}: {min(held)} has no place in {family.name}; expected no such tensor")
        for name, tensor in self._held.items():
            wanted = expected_shape(name, typed) or {}
            shape = [int(size) for size in reversed(tensor.shape)]
            if shape != list(wanted.values()):
                raise CheckpointError(
                    f"{path}: {tensor.name} has shape {shape}, expected {' x '.join(wanted)} = {list(wanted.values())}"
                )

    def __getitem__(self, name: str) -> Tensor:
        from gguf import dequantize

        found = self._held[name]
        try:
            array = dequantize(found.data, found.tensor_type)
        except NotImplementedError:
            raise CheckpointError(
                f"{self.path}: {found.name} is {found.tensor_type.name}, which the package gguf does not dequantise"
            ) from None
        tensor = torch.from_numpy(array.copy())
        if self.permuted and ".q_proj." in name:
            tensor = _unpermuted(tensor, self.geometry.heads)
        elif self.permuted and ".k_proj." in name:
            tensor = _unpermuted(tensor, self.geometry.groups)
        return tensor.to(self.dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)


def _unpermuted(tensor: Tensor, heads: int) -> Tensor:
    """Undo the order of a head's channels (0, D/2, 1, D/2 + 1, ...) in rows `[heads * D, ...]`."""
    return tensor.view(heads, -1, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def _value(reader: Any, key: str) -> Any:
    field = reader.get_field(key)
    return None if field is None else field.contents()


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:200]
