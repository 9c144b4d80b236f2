"""Check the directory of an EAGLE-3 drafter against its target. This module does not import torch.

A drafter is a Hugging Face directory of its own, as SGLang and SpecForge read and write it: `LlamaForCausalLMEagle3`,
with `fc.weight`, `midlayer.*`, `norm.weight`, `lm_head.weight` over the words of drafts, and the map `d2t`, `t2d`.
It may have further layers, `layers.N.*`, and norms before `fc`: `input_norm.weight` and `fc_norm.N.weight`. The
embedding is the target's: SGLang replaces the drafter's own, if there is one.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from megatron_rlspec.models.config import MAPS, ModelConfigError, check_config
from megatron_rlspec.models.directory import FLOATS, Header, read_headers, read_object
from megatron_rlspec.models.drafter_config import Eagle3, check_drafter_config, layer_of_drafter

_OTHER_NAMES = {  # which SGLang reads, too
    "layers.0.": "midlayer.",
    "aux_norm_low.": "fc_norm.0.",
    "aux_norm_mid.": "fc_norm.1.",
    "aux_norm_high.": "fc_norm.2.",
}


def check_drafter(
    path: str | Path, target: Mapping[str, Any], target_path: str, *, weights: bool = True
) -> Eagle3:
    """Return the drafter's config.json, typed. Raises ModelConfigError for one that the target cannot be drafted with.

    A drafter that reads the wrong layers of its target runs, and no draft is accepted. So its layers are compared here.
    """
    directory = Path(path)
    if not directory.is_dir():
        what = "not a directory" if directory.exists() else "no such directory"
        raise ModelConfigError(f"{directory}: {what}; expected an EAGLE-3 drafter")
    typed = check_drafter_config(read_object(directory / "config.json"), str(directory))
    policy = check_config(target, target_path)
    width = {"hidden_size": policy.hidden_size, "vocab_size": policy.vocab_size}
    for key, size in width.items():
        if getattr(typed, key) != size:
            raise ModelConfigError(
                f"config.json of {directory}: {key}={getattr(typed, key)}, but {target_path} has {size}"
            )
    if typed.target_hidden_size not in (None, policy.hidden_size):
        raise ModelConfigError(
            f"config.json of {directory}: target_hidden_size={typed.target_hidden_size}, but {target_path} has "
            f"hidden_size={policy.hidden_size}"
        )
    try:
        taps = typed.taps(policy.num_hidden_layers)
    except ValueError as error:
        raise ModelConfigError(f"config.json of {directory}: {error}") from None
    if weights:
        headers = {own_name(name): header for name, header in read_headers(directory).items()}
        _check_tensors(directory, headers, shapes(typed, len(taps)), typed.num_hidden_layers)
        _check_words(directory, headers, typed)
    return typed


def own_name(name: str) -> str:
    """Return the name that this package has for a drafter's tensor: that of SGLang and SpecForge."""
    for other, own in _OTHER_NAMES.items():
        if name.startswith(other):
            return own + name.removeprefix(other)
    return name


def shapes(config: Eagle3, taps: int) -> dict[str, tuple[int, ...]]:
    """Return the shape of every float tensor of a drafter that reads `taps` layers of its target."""
    hidden = config.hidden_size
    queries = config.num_attention_heads * config.head_size
    keys = config.groups * config.head_size
    found: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, taps * hidden)}
    if config.norms_joined:
        found["input_norm.weight"] = (taps * hidden,)
    if config.norms_each:
        found |= {f"fc_norm.{tap}.weight": (hidden,) for tap in range(taps)}
    for index in range(config.num_hidden_layers):
        # the first layer's attention reads embedding and hidden state
        read = hidden if index else 2 * hidden
        layer = {
            "hidden_norm": (hidden,),
            "post_attention_layernorm": (hidden,),
            "self_attn.q_proj": (queries, read),
            "self_attn.k_proj": (keys, read),
            "self_attn.v_proj": (keys, read),
            "self_attn.o_proj": (hidden, queries),
            "mlp.gate_proj": (config.intermediate_size, hidden),
            "mlp.up_proj": (config.intermediate_size, hidden),
            "mlp.down_proj": (hidden, config.intermediate_size),
        }
        if not index:
            layer["input_layernorm"] = (hidden,)
        found |= {f"{layer_of_drafter(index)}{name}.weight": shape for name, shape in layer.items()}
    return found | {"norm.weight": (hidden,), "lm_head.weight": (config.draft_vocab_size, hidden)}


def _check_tensors(
    directory: Path,
    headers: Mapping[str, Header],
    wanted: Mapping[str, tuple[int, ...]],
    layers: int,
) -> None:
    for name, shape in wanted.items():
        if name not in headers:
            raise ModelConfigError(f"{directory}: lacks {name}, which an EAGLE-3 drafter needs")
        if headers[name].shape != shape:
            raise ModelConfigError(
                f"{directory / headers[name].file}: {name} has shape {list(headers[name].shape)}, expected "
                f"{list(shape)} by config.json and the layers that the drafter reads"
            )
        if headers[name].dtype not in FLOATS:
            raise ModelConfigError(
                f"{directory}: {name} has type {headers[name].dtype}, expected {', '.join(FLOATS)}"
            )
    unused = {"embed_tokens.weight"} | {
        f"layers.{index}.input_layernorm.weight" for index in range(1, layers)
    }
    unknown = sorted(headers.keys() - wanted.keys() - unused - set(MAPS))
    if unknown:
        raise ModelConfigError(
            f"{directory}: {unknown[0]} is not part of an EAGLE-3 drafter with this config.json "
            f"(num_hidden_layers={layers})"
        )


def _check_words(directory: Path, headers: Mapping[str, Header], config: Eagle3) -> None:
    """Check both maps between words of drafts and token ids. Without `d2t`, every token is a word."""
    size = config.draft_vocab_size
    words = np.arange(size)
    if "d2t" not in headers:
        if size != config.vocab_size:
            raise ModelConfigError(
                f"{directory}: lacks d2t, the token ids of the draft_vocab_size={size} words of drafts"
            )
    else:
        words = _words(directory, headers["d2t"], config)
    if "t2d" in headers:
        drafted = _map(directory, headers["t2d"], "t2d", ("BOOL",), config.vocab_size)
        expected = np.zeros(config.vocab_size, bool)
        expected[words] = True
        if (wrong := np.flatnonzero(drafted != expected)).size:
            said = "a word of drafts" if drafted[wrong[0]] else "not a word of drafts"
            raise ModelConfigError(
                f"{directory}: t2d says that token {wrong[0]} is {said}, and d2t does not"
            )


def _words(directory: Path, header: Header, config: Eagle3) -> np.ndarray:
    offsets = _map(directory, header, "d2t", ("I64", "I32", "I16", "I8"), config.draft_vocab_size)
    words = offsets.astype(np.int64) + np.arange(len(offsets))
    if (words < 0).any() or (words >= config.vocab_size).any() or (np.diff(words) <= 0).any():
        raise ModelConfigError(
            f"{directory}: d2t[i] + i must ascend within 0 to {config.vocab_size - 1}, the token ids of the target"
        )
    return words


def _map(
    directory: Path, header: Header, name: str, types: tuple[str, ...], size: int
) -> np.ndarray:
    """Return a map. numpy has not every type that a file can have, so the header is looked at first."""
    if header.dtype not in types or header.shape != (size,):
        raise ModelConfigError(
            f"{directory}: {name} is {header.dtype} {list(header.shape)}, expected {' or '.join(types)}, [{size}]"
        )
    with safe_open(directory / header.file, framework="np") as opened:
        found: np.ndarray = opened.get_tensor(name)
    return found
