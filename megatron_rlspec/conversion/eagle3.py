"""Check the directory of an EAGLE-3 drafter against its target. This module does not import torch.

A drafter is a Hugging Face directory of its own, as SpecForge writes and SGLang reads it: `LlamaForCausalLMEagle3`,
with `fc.weight`, `midlayer.*`, `norm.weight`, `lm_head.weight` over the S tokens of its draft vocabulary, and the maps
`d2t`, `t2d` (`models.config.MAPS`). It may have further layers, `layers.N.*`, and norms before `fc`:
`input_norm.weight` and `fc_norm.N.weight`. The embedding is the target's: SGLang replaces the drafter's own, if there
is one.

`words` below are the token ids of the draft vocabulary; `taps` are the layers of the target whose inputs the drafter
reads. `drafter_files.py` reads and writes these directories; `eagle3` in `models/families.py` names the same tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from megatron_rlspec.models.config import MAPS, CheckpointError, check_config
from megatron_rlspec.models.drafter_config import Eagle3, check_drafter_config, layer_of_drafter
from megatron_rlspec.models.headers import DTYPES, Header, read_headers, read_object

# Transformers' default of max_position_embeddings for Llama, which a drafter is
LLAMAS_CONTEXT = 2048
# Prefixes of published drafters that SGLang reads, too -> the ones that this package uses.
_OTHER_NAMES = {
    "layers.0.": "midlayer.",
    "aux_norm_low.": "fc_norm.0.",
    "aux_norm_mid.": "fc_norm.1.",
    "aux_norm_high.": "fc_norm.2.",
}


def check_drafter(
    path: str | Path, target: Mapping[str, Any], target_path: str, *, weights: bool = True
) -> Eagle3:
    """Return the drafter's config.json, typed. Raises CheckpointError if it does not fit the target.

    path         directory of the drafter
    target       config.json of the target
    target_path  for messages
    weights      also compare the names, shapes and types of its tensors, and the draft vocabulary

    The layers that the drafter reads are checked, too: SGLang reads them in ascending order, whatever their order in
    config.json, and leaves out those that the target lacks.
    """
    directory = Path(path)
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: no such directory; expected an EAGLE-3 drafter")
    typed = check_drafter_config(read_object(directory / "config.json"), str(directory))
    policy = check_config(target, target_path)
    for key, stated, expected in (
        ("hidden_size", typed.hidden_size, policy.hidden_size),
        ("vocab_size", typed.vocab_size, policy.vocab_size),
        ("target_hidden_size", typed.target_hidden_size or policy.hidden_size, policy.hidden_size),
    ):
        if stated != expected:
            raise CheckpointError(
                f"config.json of {directory}: {key}={stated}, but {target_path} has {expected}"
            )
    try:
        taps = typed.taps(policy.num_hidden_layers)
    except ValueError as error:
        raise CheckpointError(f"config.json of {directory}: {error}") from None
    if weights:
        headers = {own_name(name): header for name, header in read_headers(directory).items()}
        _check_tensors(directory, headers, shapes(typed, len(taps)), typed.num_hidden_layers)
        _check_words(directory, headers, typed)
    return typed


def environment_of(drafter: Eagle3, target: Mapping[str, Any]) -> dict[str, str]:
    """Return the environment variables that SGLang needs for this drafter, by name; {} if it needs none.

    target  config.json of the target

    Drafters are published with the context length that they were trained on. Beside a target with a longer context
    SGLang refuses to start without this variable; with it, positions go on beyond the drafter's context.
    """
    context = drafter.max_position_embeddings or LLAMAS_CONTEXT
    if context >= (target.get("max_position_embeddings") or 0):
        return {}
    return {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}


def own_name(name: str) -> str:
    """Return the name that this package has for a tensor in a drafter's file; see `_OTHER_NAMES`."""
    for other, own in _OTHER_NAMES.items():
        if name.startswith(other):
            return own + name.removeprefix(other)
    return name


def shapes(config: Eagle3, taps: int) -> dict[str, tuple[int, ...]]:
    """Return the shape of every float tensor of a drafter that reads `taps` layers of its target, by name.

    The maps of the draft vocabulary, which are integers, are not among them. `eagle3` in `models/families.py` must name
    the same tensors. The order decides which random numbers a fresh drafter gets (`drafter_files.py`).
    """
    hidden = config.hidden_size
    queries = config.num_attention_heads * config.head_size
    keys = config.groups * config.head_size
    tensors: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, taps * hidden)}
    if config.norms_joined:
        tensors["input_norm.weight"] = (taps * hidden,)
    if config.norms_each:
        tensors |= {f"fc_norm.{tap}.weight": (hidden,) for tap in range(taps)}
    for index in range(config.num_hidden_layers):
        # The first layer's attention reads embedding and hidden state side by side.
        width = hidden if index else 2 * hidden
        layer = {
            "hidden_norm": (hidden,),
            "post_attention_layernorm": (hidden,),
            "self_attn.q_proj": (queries, width),
            "self_attn.k_proj": (keys, width),
            "self_attn.v_proj": (keys, width),
            "self_attn.o_proj": (hidden, queries),
            "mlp.gate_proj": (config.intermediate_size, hidden),
            "mlp.up_proj": (config.intermediate_size, hidden),
            "mlp.down_proj": (hidden, config.intermediate_size),
        }
        if not index:
            layer["input_layernorm"] = (hidden,)  # the norm of the embedding
        tensors |= {
            f"{layer_of_drafter(index)}{name}.weight": shape for name, shape in layer.items()
        }
    return tensors | {"norm.weight": (hidden,), "lm_head.weight": (config.draft_vocab_size, hidden)}


def _check_tensors(
    directory: Path,
    headers: Mapping[str, Header],
    expected: Mapping[str, tuple[int, ...]],
    layers: int,
) -> None:
    """Compare the tensors in the files with what must be there. Raises CheckpointError.

    headers   by the names of this package (`own_name`)
    expected  as `shapes` returns it
    layers    number of layers of the drafter
    """
    for name, shape in expected.items():
        if name not in headers:
            raise CheckpointError(f"{directory}: lacks {name}, which an EAGLE-3 drafter needs")
        if headers[name].shape != shape:
            raise CheckpointError(
                f"{headers[name].path}: {name} has shape {list(headers[name].shape)}, expected "
                f"{list(shape)} by config.json and the layers that the drafter reads"
            )
        if headers[name].dtype not in DTYPES:
            raise CheckpointError(
                f"{directory}: {name} has type {headers[name].dtype}, expected {', '.join(DTYPES)}"
            )
    # Files may hold these, and nothing reads them: the embedding is the target's, and only the first layer reads it.
    unused = {"embed_tokens.weight"} | {
        f"layers.{index}.input_layernorm.weight" for index in range(1, layers)
    }
    unknown = sorted(headers.keys() - expected.keys() - unused - set(MAPS))
    if unknown:
        raise CheckpointError(
            f"{directory}: {unknown[0]} is not part of an EAGLE-3 drafter with this config.json "
            f"(num_hidden_layers={layers})"
        )


def _check_words(directory: Path, headers: Mapping[str, Header], config: Eagle3) -> None:
    """Check the map from the draft vocabulary to token ids, `d2t [S]`. Without it the drafter drafts from all tokens.

    `t2d` is not checked: this package reads only d2t (`drafter_files.words`).

    Ids must ascend: then no token is there twice, and the first and the last one show whether all are in range.
    Raises CheckpointError.
    """
    size = config.draft_vocab_size
    header = headers.get("d2t")
    if header is None:
        if size != config.vocab_size:
            raise CheckpointError(
                f"{directory}: lacks d2t, the token ids of the draft_vocab_size={size} words of drafts"
            )
        return
    if header.dtype not in ("I64", "I32") or header.shape != (size,):
        raise CheckpointError(
            f"{directory}: d2t is {header.dtype} {list(header.shape)}, expected I64 or I32, [{size}]"
        )
    with safe_open(header.path, framework="np") as file:
        ids = file.get_tensor("d2t").astype(np.int64) + np.arange(size)
    if ids[0] < 0 or ids[-1] >= config.vocab_size or (np.diff(ids) <= 0).any():
        raise CheckpointError(
            f"{directory}: d2t[i] + i must ascend within 0 to {config.vocab_size - 1}, the token ids of the target"
        )
