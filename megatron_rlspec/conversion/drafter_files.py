"""Read a model with its EAGLE-3 drafter, make a fresh drafter, and write one.

In memory the two are one model. `hf_config[DRAFTER]` is the drafter's config.json, and the drafter's tensors have their
names in its own directory behind `PREFIX`. On disk they are two directories.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_rlspec import files
from megatron_rlspec.conversion.eagle3 import check_drafter, own_name, shapes
from megatron_rlspec.models.config import DRAFTER, EAGLE3, MAPS, PREFIX
from megatron_rlspec.models.directory import check_model, ends_of_text
from megatron_rlspec.models.drafter_config import check_drafter_config
from megatron_rlspec.models.hf_files import CheckpointError, LazyTensors, build_hf, publish, read_hf
from megatron_rlspec.models.names import name_table
from megatron_rlspec.speculation.vocabulary import DraftVocabulary

# of a fresh drafter, unless asked for more; the size that published drafters have
MOST_WORDS = 32_000
_SAME = (
    "hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim vocab_size rms_norm_eps rope_theta "
    "rope_scaling rope_parameters max_position_embeddings initializer_range hidden_act torch_dtype dtype eos_token_id "
    "bos_token_id"
)


def read_model(path: str | Path, drafter: str | Path = "") -> tuple[dict[str, Any], LazyTensors]:
    """Read config.json and open the tensors, joined with those of the EAGLE-3 drafter in the directory `drafter`.

    The target then counts as a model without MTP layers. Raises CheckpointError.
    """
    config, tensors = read_hf(path)
    if not drafter:
        return config, tensors
    own_config, own = read_hf(drafter)
    headers = dict(tensors.headers)
    for unused in name_table(config).drafter_names:
        headers.pop(unused, None)
    headers |= {PREFIX + own_name(name): header for name, header in own.headers.items()}
    return {**config, "num_nextn_predict_layers": 0, DRAFTER: own_config}, LazyTensors(headers)


def read_drafter(path: str | Path) -> dict[str, Tensor]:
    """Read the tensors of an EAGLE-3 drafter alone, named as in `read_model`. Raises CheckpointError."""
    _, own = read_hf(path)
    return {PREFIX + own_name(name): own[name] for name in own}


def weights_of(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that a push holds: all but the maps of an EAGLE-3 drafter's words."""
    return ((name, tensors[name]) for name in tensors if name.removeprefix(PREFIX) not in MAPS)


def read_with_drafter(policy: str | Path, place: str | Path) -> tuple[dict[str, Any], LazyTensors]:
    """Read a policy with the drafter of the directory `place`: its MTP layers, or an EAGLE-3 drafter.

    Raises CheckpointError.
    """
    config, tensors = read_hf(policy)
    own_config, own = read_hf(place)
    if own_config.get("architectures") == [EAGLE3]:
        check_drafter(place, config, str(policy))
        return read_model(policy, place)
    names = name_table(config).drafter_names
    if not names:
        raise CheckpointError(
            f"config.json of {policy}: no MTP layer in place of which {place} could stand; expected a policy with one, "
            "or EAGLE-3 drafters"
        )
    lost = [name for name in names if name not in own]
    if lost:
        raise CheckpointError(f"{place}: lacks {lost[0]} of {policy}; expected a drafter")
    return config, LazyTensors({**tensors.headers, **{name: own.headers[name] for name in names}})


def words(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> Tensor:
    """Return the token ids that an EAGLE-3 drafter drafts from, ascending, `[S] int64`.

    tensors, config  of the drafter's own directory, or of `read_model`
    """
    ids = torch.arange(config.get(DRAFTER, config)["draft_vocab_size"])
    offsets = tensors.get("d2t", tensors.get(PREFIX + "d2t"))
    return ids if offsets is None else ids + offsets


def build_drafter(
    path: str | Path,
    config: Mapping[str, Any],
    tensors: Iterable[tuple[str, Tensor]],
    ids: Tensor,
    tokenizer_from: str | Path | None = None,
) -> Path:
    """Write a drafter's directory as `build_hf`. `tensors` are its own, named with or without `PREFIX`."""
    drafted = torch.zeros(config["vocab_size"], dtype=torch.bool)
    drafted[ids] = True
    maps = dict(zip(MAPS, (ids - torch.arange(len(ids)), drafted), strict=True))
    named = ((name.removeprefix(PREFIX), tensor) for name, tensor in tensors)
    return build_hf(path, config, [*named, *maps.items()], tokenizer_from)


def make_drafter(source: str | Path, target: str | Path, size: int = 0) -> dict[str, Any]:
    """Write a fresh EAGLE-3 drafter for the model in `source` to the directory `target`. Returns its config.json.

    size  words of drafts; 0: all, but at most `MOST_WORDS`. They are those of the lowest ids, which BPE merged first,
          and the ends of a text

    Its head has the target's rows, and its final norm the target's. The other matrices are random. Raises
    CheckpointError or FileError for a source or target that does not serve.
    """
    files.check_new_directory(Path(target))
    hf_config = check_model(source, "train", drafter=False, tokenizer=False)
    _, tensors = read_hf(source)
    vocab = hf_config["vocab_size"]
    if size > vocab:
        raise ValueError(f"--draft-vocabulary {size}: {source} has vocab_size={vocab}")
    size = size or min(vocab, MOST_WORDS)
    ids = torch.arange(vocab)
    if size < vocab:
        ids = torch.from_numpy(DraftVocabulary(size, vocab, ends_of_text(source)).ids())
    config = config_of_drafter(hf_config, len(ids))
    layers = hf_config["num_hidden_layers"]
    try:
        taps = check_drafter_config(config, str(target)).taps(layers)
    except ValueError as error:
        raise CheckpointError(f"{source}: {error}") from None
    head = tensors[
        "model.embed_tokens.weight" if hf_config.get("tie_word_embeddings") else "lm_head.weight"
    ]
    made = _fresh(config, len(taps), head.index_select(0, ids), tensors["model.norm.weight"])
    publish(build_drafter(target, config, made, ids, tokenizer_from=source), Path(target))
    check_drafter(target, hf_config, str(source))
    return config


def config_of_drafter(hf_config: Mapping[str, Any], size: int = 0) -> dict[str, Any]:
    """Return the config.json of a fresh drafter of `size` words; 0: as many as in `make_drafter`."""
    size = size or min(hf_config["vocab_size"], MOST_WORDS)
    layers = hf_config["num_hidden_layers"]
    config = {key: hf_config[key] for key in _SAME.split() if hf_config.get(key) is not None}
    config |= {
        "architectures": [EAGLE3],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "draft_vocab_size": size,
        "tie_word_embeddings": False,
    }
    # SGLang's default, and for a smaller model the outputs of the last three layers but one, or of as many as it has.
    inputs = (
        (2, layers // 2, layers - 3) if layers >= 7 else tuple(range(max(0, layers - 3), layers))
    )
    outputs = [i - 1 for i in inputs]
    config["eagle_config"] = {
        "use_aux_hidden_state": True,
        "eagle_aux_hidden_state_layer_ids": outputs,
    }
    return config


def _fresh(
    config: Mapping[str, Any], taps: int, head: Tensor, norm: Tensor
) -> Iterator[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    std = config.get("initializer_range", 0.02)
    for name, shape in shapes(check_drafter_config(config, "a fresh drafter"), taps).items():
        if name == "lm_head.weight":
            yield name, head
        elif name == "norm.weight":
            yield name, norm
        elif len(shape) == 1:
            yield name, torch.ones(shape, dtype=head.dtype)
        else:
            yield name, (torch.randn(shape, generator=generator) * std).to(head.dtype)
