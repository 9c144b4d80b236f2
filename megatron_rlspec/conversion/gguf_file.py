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
_SCALED_ROTARY = "rope_freqs.weight"
# Keys of an architecture that become a key of config.json, all but two in every whole model.
_STATED = (
    "context_length",
    "block_count",
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
    "attention.layer_norm_rms_epsilon",
    "attention.head_count_kv",
    "attention.key_length",
    "rope.freq_base",
)
_NEEDED = _STATED[:6]
# Other keys of an architecture -> the values at which llama.cpp computes what config.json says. Every further key of it
# is refused. 0 stands for "not set" in llama.cpp.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "rope.scaling.type": ("none",),
    "rope.scaling.factor": (0, 1),
    "rope.scaling.attn_factor": (0, 1),
    "rope.scaling.finetuned": (False,),
    "rope.scale_linear": (0, 1),
    "attention.sliding_window": (0,),
    "attention.causal": (True,),
    "attention.max_alibi_bias": (0,),
    "attention.clamp_kqv": (0,),
    "attention.scale": (0,),
    "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
    "logit_scale": (0, 1),
    "embedding_scale": (0, 1),
    "residual_scale": (0, 1),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "use_parallel_residual": (False,),
    "pooling_type": (0,),
    "nextn_predict_layers": (0,),
}
# The same, of keys without an architecture.
_NEUTRAL_GENERAL = {"split.count": (0, 1), "general.type": ("model",)}


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
    metadata = header.metadata
    if _SCALED_ROTARY in header.names:
        raise CheckpointError(
            f"{path}: {_SCALED_ROTARY}: scaled rotary embeddings are not read from GGUF"
        )
    kind = str(metadata.get("general.architecture", "nothing"))
    if kind not in ARCHITECTURES:
        raise CheckpointError(
            f"{path}: general.architecture is {kind[:60]}; expected {', '.join(ARCHITECTURES)}"
        )
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list):
        raise CheckpointError(
            f"{path}: no tokenizer.ggml.tokens; expected a file with its tokenizer"
        )
    for key in _NEEDED:
        if f"{kind}.{key}" not in metadata:
            raise CheckpointError(f"{path}: no {kind}.{key}; expected a whole model")
    for key in _STATED:
        value = metadata.get(f"{kind}.{key}", 1)
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise CheckpointError(
                f"{path}: {kind}.{key} is {str(value)[:60]}; expected one number above 0 for all layers"
            )
    head_dim = _head_dim(metadata)
    neutral = {f"{kind}.{key}": values for key, values in _NEUTRAL.items()} | _NEUTRAL_GENERAL
    neutral |= {
        f"{kind}.vocab_size": (len(tokens),),
        f"{kind}.rope.dimension_count": (head_dim,),
        f"{kind}.attention.value_length": (head_dim,),
        f"{kind}.rope.scaling.original_context_length": (metadata[f"{kind}.context_length"],),
    }
    stated = {f"{kind}.{key}" for key in _STATED}
    for key, value in metadata.items():
        if key in stated or not (key.startswith(f"{kind}.") or key in neutral):
            continue
        if key not in neutral:
            raise CheckpointError(
                f"{path}: {key[:80]} is {str(value)[:60]}; this key is not read from GGUF"
            )
        if value not in neutral[key]:
            expected = " or ".join(map(str, neutral[key]))
            raise CheckpointError(f"{path}: {key[:80]} is {str(value)[:60]}; expected {expected}")


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
