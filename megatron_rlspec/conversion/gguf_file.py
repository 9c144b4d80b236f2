"""Read a GGUF file (llama.cpp's format) as a Hugging Face checkpoint: tensors, config.json, tokenizer, chat template.

Transformers reads it (`load_gguf_checkpoint`). It ignores every key of the metadata and every tensor that it does not
know. So this module refuses a file by which llama.cpp computes something else than the config.json says.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_rlspec.models.config import check_config
from megatron_rlspec.models.hf_files import write_json
from megatron_rlspec.models.tensor_file import CheckpointError
from megatron_rlspec.texts import first_line, one_line, printable

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# llama.cpp writes the factors of scaled rotary embeddings as a tensor.
SCALED_ROTARY = "rope_freqs.weight"
# Values at which a key that Transformers does not read leaves llama.cpp's function as it is. 0 stands for "not set".
NEUTRAL = (0, 1, "none")
# The same of keys of which 0 and 1 are not both neutral. A truth value equals 0 or 1.
NEUTRAL_OF = {"attention.causal": 1, "attention.scale": 0, "use_parallel_residual": 0}


def is_gguf(path: Path) -> bool:
    """Return whether a path is meant as a GGUF file."""
    return path.is_file() and path.suffix.lower() == ".gguf"


class Gguf(NamedTuple):
    """What the header of a GGUF file holds: its metadata by key, and the names of its tensors."""

    metadata: Mapping[str, Any]
    names: frozenset[str]


def read_header(path: Path) -> Gguf:
    """Read the header of a GGUF file. Raises CheckpointError, and OSError for a file that cannot be read."""
    from gguf import GGUFReader

    try:
        reader = GGUFReader(path)
        metadata = {printable(key): field.contents() for key, field in reader.fields.items()}
    except OSError:
        raise
    except Exception as error:  # a damaged file makes the package raise almost anything
        raise CheckpointError(f"{path}: truncated or not GGUF ({one_line(error)})") from None
    return Gguf(metadata, frozenset(tensor.name for tensor in reader.tensors))


def write_small_files(path: Path, header: Gguf, directory: Path, dtype: str) -> dict[str, Any]:
    """Write config.json and the tokenizer of a GGUF file into `directory`; return the first. Raises CheckpointError."""
    _refuse_other_functions(path, header)
    config = config_of(path, header) | {"dtype": dtype}
    check_config(config, str(path))
    write_json(directory / "config.json", config)
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            path.parent, gguf_file=path.name, local_files_only=True
        )
        tokenizer.save_pretrained(directory)
    except Exception as error:  # metadata of another form makes Transformers raise almost anything
        raise CheckpointError(
            f"{path}: Transformers cannot read its tokenizer ({first_line(error)})"
        ) from None
    return config


def config_of(path: Path, header: Gguf) -> dict[str, Any]:
    """Return config.json of a file that `_refuse_other_functions` accepts. Raises CheckpointError."""
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    try:
        config = load_gguf_checkpoint(path)["config"]
    except Exception as error:
        raise CheckpointError(
            f"{path}: Transformers cannot read its metadata ({first_line(error)})"
        ) from None
    kind = header.metadata["general.architecture"]
    config["architectures"] = [ARCHITECTURES[kind]]
    config["hidden_act"] = "silu"
    config["head_dim"] = _head_dim(header.metadata)
    config.setdefault("rope_theta", 10_000.0)  # llama.cpp's default
    config.pop("_model_name_or_path", None)
    if kind != "qwen2":
        config["attention_bias"] = False
    return config


def _head_dim(metadata: Mapping[str, Any]) -> int:
    """Return the channels of a head. Transformers does not read this key for every architecture."""
    kind = metadata["general.architecture"]
    usual = metadata[f"{kind}.embedding_length"] // metadata[f"{kind}.attention.head_count"]
    return metadata.get(f"{kind}.attention.key_length", usual)


def _refuse_other_functions(path: Path, header: Gguf) -> None:
    """Raise CheckpointError for metadata by which llama.cpp computes something else than config.json can say."""
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

    metadata = header.metadata
    if SCALED_ROTARY in header.names:
        raise CheckpointError(
            f"{path}: {SCALED_ROTARY}: scaled rotary embeddings are not read from GGUF"
        )
    kind = str(metadata.get("general.architecture", "nothing"))
    if kind not in ARCHITECTURES:
        raise CheckpointError(
            f"{path}: general.architecture is {kind[:60]}; expected {', '.join(ARCHITECTURES)}"
        )
    read = {f"{kind}.{key}" for key, name in GGUF_CONFIG_MAPPING[kind].items() if name}
    read.add(f"{kind}.attention.key_length")
    context = metadata.get(f"{kind}.context_length")
    neutral = (*NEUTRAL, _head_dim(metadata), context)
    for key, value in metadata.items():
        if not key.startswith(f"{kind}.") or key in read:
            continue
        name = key.removeprefix(f"{kind}.")
        expected = (NEUTRAL_OF[name],) if name in NEUTRAL_OF else neutral
        if value not in expected:
            raise CheckpointError(
                f"{path}: {key[:80]} is {str(value)[:60]}; this key is not read from GGUF"
            )


def read_tensors(
    path: Path, header: Gguf, config: Mapping[str, Any], dtype: str
) -> dict[str, Tensor]:
    """Return all tensors by their Hugging Face names, dequantised to `dtype`. Raises CheckpointError.

    Every tensor of the file must have a place in the model, and every tensor of the model one in the file.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers import modeling_gguf_pytorch_utils as gguf_reader

    fields = {key: value for key, value in config.items() if key != "architectures"}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields))
    names = gguf_reader.get_gguf_hf_weights_map(model, gguf_reader.TensorProcessor())
    if config["tie_word_embeddings"]:
        names.pop("output.weight", None)
    architecture = config["architectures"][0]
    if missing := names.keys() - header.names:
        raise CheckpointError(f"{path}: lacks {min(missing)}, which {architecture} needs")
    if unknown := header.names - names.keys():
        raise CheckpointError(
            f"{path}: {printable(min(unknown))} has no place in {architecture}; expected no such tensor"
        )
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # a progress bar
            loaded = gguf_reader.load_gguf_checkpoint(
                path, return_tensors=True, model_to_load=model, torch_dtype=DTYPES[dtype]
            )["tensors"]
    except NotImplementedError as error:
        raise CheckpointError(
            f"{path}: the package gguf does not dequantise it ({first_line(error)})"
        ) from None
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    for name, tensor in loaded.items():
        if tensor.shape != shapes[name]:
            raise CheckpointError(
                f"{path}: {name} has shape {list(tensor.shape)}, expected {list(shapes[name])}"
            )
        if not torch.isfinite(tensor).all():
            raise CheckpointError(f"{path}: {name} holds NaN or infinite values")
    return loaded
