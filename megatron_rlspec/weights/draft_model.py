"""Check the directory of an EAGLE-3 drafter beside its target. Imports no torch.

The layout is that of SpecForge, and of SGLang's `models/llama_eagle3.py`: architecture LlamaForCausalLMEagle3, `fc`,
`midlayer`, `norm`, and a head over a vocabulary of its own. Row i of the head is word i + d2t[i] of the target. The
embedding is the target's.

SGLang accepts a drafter that reads other layers of the target than it was trained on, or one whose map does not fit:
no draft is then accepted, and there is no error. So everything that two config.json can disagree about is compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field
from safetensors import safe_open

from megatron_rlspec.weights.model_config import ModelConfigError, Size, Trained, check_config
from megatron_rlspec.weights.model_directory import Header, read_headers, read_object

ARCHITECTURE = "LlamaForCausalLMEagle3"
MAP = "d2t"
IDS = "eagle_aux_hidden_state_layer_ids"


class Eagle3Config(Trained):
    """config.json of the drafter."""

    model_types = ("llama",)

    num_hidden_layers: Literal[1] = Field(1, description="one layer is repeated")  # type: ignore[assignment]
    draft_vocab_size: Size
    target_hidden_size: Size | None = None
    eagle_config: dict[str, Any] | None = None


@dataclass(frozen=True)
class DraftModel:
    """What a run needs to know of the drafter's directory.

    config  its config.json
    taps    layers of the target whose inputs the drafter reads, ascending
    words   size of its vocabulary
    ids     [words] the target's token of each row of its head; None: the same tokens
    """

    config: Mapping[str, Any]
    taps: tuple[int, ...]
    words: int
    ids: np.ndarray | None


def read_draft_model(path: str | Path, target: Mapping[str, Any], use: Literal["train", "serve"]) -> DraftModel:
    """Check the directory against the target's config.json. Raises ModelConfigError, one line.

    `use`: "serve" accepts settings that SGLang has and the trainer has not.
    """
    directory = Path(path)
    if not directory.is_dir():
        raise ModelConfigError(f"{directory}: no such directory; expected an EAGLE-3 drafter in Hugging Face's layout")
    config = read_object(directory / "config.json")
    where = f"config.json of {directory}"
    if config.get("architectures") != [ARCHITECTURE]:
        raise ModelConfigError(f"{where}: architectures={config.get('architectures')}: expected [{ARCHITECTURE!r}]")
    typed = check_config(config, str(directory), trained=use == "train", schemas={ARCHITECTURE: Eagle3Config})
    words = config.get("draft_vocab_size")
    if not isinstance(words, int) or not 1 <= words <= typed.vocab_size:
        raise ModelConfigError(f"{where}: draft_vocab_size={words}: expected 1 to vocab_size={typed.vocab_size}")
    if typed.tie_word_embeddings:
        raise ModelConfigError(f"{where}: tie_word_embeddings=true: expected false, the drafter has a head of its own")
    if typed.intermediate_size is None:
        raise ModelConfigError(f"{where}: no intermediate_size; expected the width of the drafter's MLP")
    for key, ours in (("hidden_size", "target_hidden_size"), ("vocab_size", "vocab_size")):
        stated = config.get(ours) or config[key]
        if stated != target.get(key):
            raise ModelConfigError(
                f"{where}: {ours if config.get(ours) else key}={stated}: the target's is {target.get(key)}"
            )
    taps = tap_layers(config, target["num_hidden_layers"], where)
    headers = read_headers(directory)
    _check_tensors(directory, headers, _shapes(config, len(taps), words))
    return DraftModel(config, taps, words, _ids(directory, headers, words, typed.vocab_size))


def tap_layers(config: Mapping[str, Any], layers: int, where: str) -> tuple[int, ...]:
    """Return the layers of a target of `layers` layers whose inputs the drafter reads, as SGLang chooses them.

    Source: `set_eagle3_layers_to_capture` of SGLang's models. The i-th listed id names a layer's output, which is the
    next one's input. They are joined in the order of the layers, whatever the list's order. Raises ModelConfigError.
    """
    listed = (config.get("eagle_config") or {}).get(IDS)
    if listed is None:
        taps = [2, layers // 2, layers - 3]
        given = f"no eagle_config.{IDS}, so SGLang's {taps} for a target of {layers} layers"
    elif isinstance(listed, list) and all(type(layer) is int for layer in listed):
        taps = [layer + 1 for layer in listed]
        given = f"eagle_config.{IDS}={listed}"
    else:
        raise ModelConfigError(f"{where}: eagle_config.{IDS}={listed!r}: expected a list of layers' numbers")
    if (config.get("eagle_config") or {}).get("use_aux_hidden_state", True) is not True:
        raise ModelConfigError(f"{where}: eagle_config.use_aux_hidden_state: expected true, or no such key")
    if len(taps) < 2 or taps != sorted(set(taps)) or not 0 <= taps[0] <= taps[-1] < layers:
        raise ModelConfigError(
            f"{where}: {given}: expected different layers in ascending order, from 0 to {layers - 2} for a target of "
            f"{layers} layers; with others no draft is accepted"
        )
    return tuple(taps)


def _shapes(config: Mapping[str, Any], taps: int, words: int) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor that the directory must have."""
    hidden = config["hidden_size"]
    heads = config["num_attention_heads"]
    size = config.get("head_dim") or hidden // heads
    groups = config.get("num_key_value_heads") or heads
    wide = config["intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, taps * (config.get("target_hidden_size") or hidden)),
        "midlayer.self_attn.q_proj.weight": (heads * size, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": (groups * size, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (groups * size, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, heads * size),
        "midlayer.mlp.gate_proj.weight": (wide, hidden),
        "midlayer.mlp.up_proj.weight": (wide, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, wide),
        "norm.weight": (hidden,),
        "lm_head.weight": (words, hidden),
    }
    for norm in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        shapes[f"midlayer.{norm}.weight"] = (hidden,)
    if words < config["vocab_size"]:
        shapes[MAP] = (words,)
    return shapes


def _check_tensors(directory: Path, headers: Mapping[str, Header], shapes: Mapping[str, tuple[int, ...]]) -> None:
    lost = [name for name in shapes if name not in headers]
    if lost:
        more = f" and {len(lost) - 1} more tensors" if len(lost) > 1 else ""
        raise ModelConfigError(f"{directory}: lacks {lost[0]}{more} of an EAGLE-3 drafter")
    for name, shape in shapes.items():
        found = headers[name]
        if found.shape != shape:
            raise ModelConfigError(
                f"{directory / found.file}: {name} has shape {list(found.shape)}, expected {list(shape)} by config.json"
            )


def _ids(directory: Path, headers: Mapping[str, Header], words: int, vocabulary: int) -> np.ndarray | None:
    """Read the map, and compare it with `t2d` [V], which marks the words of the map, if that is there."""
    if MAP not in headers:
        return None
    file = directory / headers[MAP].file
    offsets = _read(file, MAP)
    if offsets.dtype.kind != "i" or offsets.shape != (words,):
        raise ModelConfigError(f"{file}: {MAP} is {offsets.dtype} {list(offsets.shape)}, expected int64 [{words}]")
    ids = offsets.astype(np.int64) + np.arange(words)
    if ids.min() < 0 or ids.max() >= vocabulary or len(np.unique(ids)) < words:
        raise ModelConfigError(
            f"{file}: {MAP}[i] + i must be {words} different tokens below vocab_size={vocabulary}; they are "
            f"{len(np.unique(ids))} from {ids.min()} to {ids.max()}"
        )
    if "t2d" in headers:
        marked = np.flatnonzero(_read(directory / headers["t2d"].file, "t2d"))
        if not np.array_equal(marked, np.sort(ids)):
            raise ModelConfigError(f"{directory}: t2d marks other tokens than those of {MAP}")
    return ids


def _read(file: Path, name: str) -> np.ndarray:
    with safe_open(file, framework="np") as opened:
        return opened.get_tensor(name)
