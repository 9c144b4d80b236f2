"""Read a GGUF file (llama.cpp's format) as a Hugging Face checkpoint: tensors, config.json, tokenizer, chat template.

The package `gguf` reads the file, dequantises the tensors and knows llama.cpp's names of them; Transformers translates
the tokenizer. llama.cpp stores the channels of Llama's queries and keys in another order, because its rotary embedding
pairs neighbours; here they get their order back (`LlamaModel.permute` in llama.cpp's convert_hf_to_gguf.py is the
inverse).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from megatron_rlspec.models.config import check_config
from megatron_rlspec.models.directory import expected_shape
from megatron_rlspec.models.hf_files import write_json
from megatron_rlspec.models.names import NameTable
from megatron_rlspec.models.tensor_file import CheckpointError
from megatron_rlspec.texts import first_line, one_line, printable

if TYPE_CHECKING:
    from gguf import ReaderTensor

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Tensors that hold no weights of the model: llama.cpp writes the factors of scaled rotary embeddings as a tensor.
_SCALED_ROTARY = "rope_freqs.weight"
# Keys of an architecture that config.json states: theirs -> ours.
_STATED = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
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
_WHOLE = {"split.count": (0, 1), "general.type": ("model",)}  # the same, of every architecture
_NEEDED = [
    key
    for key in _STATED
    if key not in ("attention.head_count_kv", "attention.key_length", "rope.freq_base")
]
_TOKEN_IDS = ("bos", "eos", "padding")


def is_gguf(path: Path) -> bool:
    """Return whether a path is meant as a GGUF file."""
    return path.is_file() and path.suffix.lower() == ".gguf"


class Gguf(NamedTuple):
    """What a GGUF file holds: its metadata by key, and its tensors by name, mapped."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, ReaderTensor]


def opened(path: Path) -> Gguf:
    """Open a GGUF file. Raises CheckpointError, and OSError for a file that cannot be read."""
    from gguf import GGUFReader

    try:
        reader = GGUFReader(path)
        metadata = {printable(key): field.contents() for key, field in reader.fields.items()}
        return Gguf(metadata, {printable(tensor.name): tensor for tensor in reader.tensors})
    except OSError:
        raise
    except Exception as error:  # a damaged file makes the package raise almost anything
        raise CheckpointError(f"{path}: truncated or not GGUF ({one_line(error)})") from None


def write_small_files(path: Path, held: Gguf, directory: Path, dtype: str) -> None:
    """Write config.json and the tokenizer of a GGUF file into `directory`. Raises CheckpointError."""
    config = config_of(path, held) | {"dtype": dtype}
    check_config(config, str(path))
    write_json(directory / "config.json", config)
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            path.parent, gguf_file=path.name, local_files_only=True
        )
        tokenizer.save_pretrained(directory)
    except (
        Exception
    ) as error:  # a file with other metadata than expected raises errors of any kind there
        raise CheckpointError(
            f"{path}: Transformers cannot read its tokenizer ({first_line(error)})"
        ) from None


def config_of(path: Path, held: Gguf) -> dict[str, Any]:
    """Return config.json. Raises CheckpointError for metadata by which llama.cpp computes something else."""
    given = held.metadata
    if _SCALED_ROTARY in held.tensors:
        raise CheckpointError(
            f"{path}: {_SCALED_ROTARY}: scaled rotary embeddings are not read from GGUF"
        )
    kind = str(given.get("general.architecture", "nothing"))
    if kind not in ARCHITECTURES:
        raise CheckpointError(
            f"{path}: general.architecture is {kind[:60]}; expected {', '.join(ARCHITECTURES)}"
        )
    tokens = given.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list):
        raise CheckpointError(
            f"{path}: no tokenizer.ggml.tokens; expected a file with its tokenizer"
        )
    own = {
        key.removeprefix(f"{kind}."): value
        for key, value in given.items()
        if key.startswith(f"{kind}.")
    }
    config = {ours: own.pop(theirs) for theirs, ours in _STATED.items() if theirs in own}
    if lacking := [theirs for theirs in _NEEDED if _STATED[theirs] not in config]:
        raise CheckpointError(f"{path}: no {kind}.{lacking[0]}; expected a whole model")
    for key, value in config.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise CheckpointError(
                f"{path}: {key} is {str(value)[:60]}; expected one number for all layers"
            )
    head_dim = config.setdefault(
        "head_dim", config["hidden_size"] // max(config["num_attention_heads"], 1)
    )
    config.setdefault("rope_theta", 10_000.0)  # llama.cpp's default
    fixed = {
        "vocab_size": (len(tokens),),
        "rope.dimension_count": (head_dim,),
        "attention.value_length": (head_dim,),
    }
    fixed["rope.scaling.original_context_length"] = (config.get("max_position_embeddings"),)
    named = {f"{kind}.{name}": (value, (_NEUTRAL | fixed).get(name)) for name, value in own.items()}
    named |= {name: (given[name], values) for name, values in _WHOLE.items() if name in given}
    for name, (value, neutral) in named.items():
        if neutral is None or value not in neutral:
            wanted = (
                f"expected {' or '.join(map(str, neutral))}"
                if neutral
                else "this key is not read from GGUF"
            )
            raise CheckpointError(f"{path}: {name[:80]} is {str(value)[:60]}; {wanted}")
    embedding = held.tensors.get("token_embd.weight")
    if embedding is not None and embedding.shape[-1] != len(tokens):
        raise CheckpointError(
            f"{path}: {len(tokens)} tokens, but token_embd.weight has {embedding.shape[-1]} rows"
        )
    ids = {
        f"{name.replace('padding', 'pad')}_token_id": f"tokenizer.ggml.{name}_token_id"
        for name in _TOKEN_IDS
    }
    return {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        "hidden_act": "silu",
        "vocab_size": len(tokens),
        "tie_word_embeddings": "output.weight" not in held.tensors,
        **({"attention_bias": False} if kind != "qwen2" else {}),
        **config,
        **{ours: given[theirs] for ours, theirs in ids.items() if theirs in given},
    }


class GgufTensors(Mapping[str, Tensor]):
    """Maps Hugging Face names to tensors of a GGUF file, dequantised on access. Raises CheckpointError.

    Every tensor of the file must have a name in `family`, and every name of the target a tensor in the file, of the
    shape that `config` gives it.
    """

    def __init__(
        self, path: Path, file: Gguf, family: NameTable, config: Mapping[str, Any], dtype: str
    ) -> None:
        from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

        typed = check_config(config, str(path), trained=False)
        self.path = path
        self.geometry = family.geometry
        self.dtype = DTYPES[dtype]
        held = dict(file.tensors)
        kind = next(
            kind for kind, architecture in ARCHITECTURES.items() if architecture == family.name
        )
        self.permuted = kind == "llama"
        model = next(key for key, name in MODEL_ARCH_NAMES.items() if name == kind)
        names = get_tensor_name_map(model, family.geometry.layers)
        self._held: dict[str, ReaderTensor] = {}
        for name in family.target_names:
            stem, _, leaf = name.rpartition(".")
            theirs = f"{names.get_name(stem)}.{leaf}"
            if theirs not in held:
                raise CheckpointError(f"{path}: lacks {theirs}, which {family.name} needs")
            self._held[name] = held.pop(theirs)
        if held:
            raise CheckpointError(
                f"{path}: {min(held)} has no place in {family.name}; expected no such tensor"
            )
        for name, tensor in self._held.items():
            wanted = expected_shape(name, typed) or {}
            shape = tensor.shape[::-1].tolist()
            if shape != list(wanted.values()):
                raise CheckpointError(
                    f"{path}: {tensor.name} has shape {shape}, expected {' x '.join(wanted)} = {list(wanted.values())}"
                )

    def __getitem__(self, name: str) -> Tensor:
        from gguf import dequantize

        stored = self._held[name]
        try:
            array = dequantize(stored.data, stored.tensor_type)
        except NotImplementedError:
            kind = stored.tensor_type.name
            raise CheckpointError(
                f"{self.path}: {stored.name} is {kind}, which the package gguf does not dequantise"
            ) from None
        tensor = torch.from_numpy(array.copy())
        if not torch.isfinite(tensor).all():
            raise CheckpointError(f"{self.path}: {stored.name} holds NaN or infinite values")
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
