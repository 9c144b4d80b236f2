"""Read a model with its EAGLE-3 drafter, make a fresh drafter, and write one.

On disk, target and drafter are two directories. In memory they are one model: `hf_config[DRAFTER]` is the drafter's
config.json, and the names of the drafter's tensors are those in its own directory with `PREFIX` before them.
`read_model` does not compare the two; `check_drafter` in `eagle3.py` does.

The `words` of a drafter are the token ids that it drafts from, its draft vocabulary.
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

# size of the draft vocabulary of a fresh drafter if the user states none; that of published drafters
MOST_WORDS = 32_000
# keys of config.json that a fresh drafter takes over from its target
_FROM_TARGET = (
    "hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim vocab_size rms_norm_eps rope_theta "
    "rope_scaling rope_parameters max_position_embeddings initializer_range hidden_act torch_dtype dtype eos_token_id "
    "bos_token_id"
)


def read_model(path: str | Path, drafter: str | Path = "") -> tuple[dict[str, Any], LazyTensors]:
    """Return config.json and tensors of a model, joined with its EAGLE-3 drafter. Tensors are read on access.

    drafter  directory of the EAGLE-3 drafter; "": the model alone, with its MTP layers if it has some

    With a drafter, the target's own MTP layers are left out, and num_nextn_predict_layers is 0. Drafter and target are
    not compared. Raises CheckpointError.
    """
    config, tensors = read_hf(path)
    if not drafter:
        return config, tensors
    drafter_config, drafter_tensors = read_hf(drafter)
    headers = dict(tensors.headers)
    for mtp_tensor in name_table(config).drafter_names:
        headers.pop(mtp_tensor, None)
    headers |= {PREFIX + own_name(name): header for name, header in drafter_tensors.headers.items()}
    joined = {**config, "num_nextn_predict_layers": 0, DRAFTER: drafter_config}
    return joined, LazyTensors(headers)


def read_drafter(path: str | Path) -> dict[str, Tensor]:
    """Read all tensors of an EAGLE-3 drafter, `MAPS` too, named as in `read_model`. Raises CheckpointError."""
    _, tensors = read_hf(path)
    return {PREFIX + own_name(name): tensors[name] for name in tensors}


def weights_of(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that a push sends: all but `MAPS` of an EAGLE-3 drafter. Each is read when it is yielded."""
    return ((name, tensors[name]) for name in tensors if name.removeprefix(PREFIX) not in MAPS)


def read_with_drafter(policy: str | Path, source: str | Path) -> tuple[dict[str, Any], LazyTensors]:
    """Return a policy with the drafter of another directory, as `read_model` does.

    source  the directory: of an EAGLE-3 drafter, or of a model of the policy's family, whose MTP layers take the place
            of the policy's. The policy's config.json says how many there are; shapes are not compared

    Raises CheckpointError.
    """
    config, tensors = read_hf(policy)
    other_config, other = read_hf(source)
    if other_config.get("architectures") == [EAGLE3]:
        check_drafter(source, config, str(policy))
        return read_model(policy, source)
    names = name_table(config).drafter_names
    if not names:
        raise CheckpointError(
            f"config.json of {policy}: no MTP layer in place of which {source} could stand; expected a policy "
            "with one, or EAGLE-3 drafters"
        )
    missing = [name for name in names if name not in other]
    if missing:
        raise CheckpointError(f"{source}: lacks {missing[0]} of {policy}; expected a drafter")
    return config, LazyTensors({**tensors.headers, **{name: other.headers[name] for name in names}})


def words(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> Tensor:
    """Return the token ids that an EAGLE-3 drafter drafts from, ascending, `[S] int64`.

    tensors, config  of the drafter's own directory, or of `read_model`

    `d2t` holds each token id minus its index. Without `d2t` the drafter drafts from all tokens, and draft_vocab_size is
    vocab_size (`eagle3.check_drafter`).
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
    """Write an EAGLE-3 drafter's directory as `build_hf`, and return it for `publish`.

    config   the drafter's own config.json
    tensors  its trained tensors, named with or without `PREFIX`; read into memory all together
    ids      token ids that it drafts from, ascending, `[S] int64`, of which the maps d2t and t2d are made
    """
    drafted = torch.zeros(config["vocab_size"], dtype=torch.bool)
    drafted[ids] = True
    # in the order of MAPS: d2t, t2d
    maps = dict(zip(MAPS, (ids - torch.arange(len(ids)), drafted), strict=True))
    named = ((name.removeprefix(PREFIX), tensor) for name, tensor in tensors)
    return build_hf(path, config, [*named, *maps.items()], tokenizer_from)


def make_drafter(source: str | Path, target: str | Path, size: int = 0) -> dict[str, Any]:
    """Write a fresh EAGLE-3 drafter for the model in `source` to the directory `target`. Returns its config.json.

    source  the model's directory; its tokenizer's files are copied
    size    of the draft vocabulary; 0: all tokens, but at most `MOST_WORDS`. The vocabulary has the lowest ids, which
            BPE merged first and which are therefore frequent, and the ids that end a text

    The head has the target's rows of these tokens, and the final norm is the target's. All other matrices are random.
    Raises ValueError for a size above the target's, and CheckpointError or FileError for a source or a target that
    cannot be used.
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
    # The rows of the head in the order of `ids`: row i of the drafter's head is of token ids[i].
    made = _fresh(config, len(taps), head.index_select(0, ids), tensors["model.norm.weight"])
    publish(build_drafter(target, config, made, ids, tokenizer_from=source), Path(target))
    check_drafter(target, hf_config, str(source))
    return config


def config_of_drafter(hf_config: Mapping[str, Any], size: int = 0) -> dict[str, Any]:
    """Return the config.json of a fresh EAGLE-3 drafter of one layer.

    hf_config  of the target
    size       of the draft vocabulary; 0: as for `make_drafter`

    `run/fresh.py` calls this for a dry run, without the target's tensors.
    """
    size = size or min(hf_config["vocab_size"], MOST_WORDS)
    layers = hf_config["num_hidden_layers"]
    config = {key: hf_config[key] for key in _FROM_TARGET.split() if hf_config.get(key) is not None}
    config |= {
        "architectures": [EAGLE3],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "draft_vocab_size": size,
        "tie_word_embeddings": False,
    }
    # The layers whose inputs are read, as `Eagle3.taps` returns them. SGLang's default, also there, ascends only from 7
    # layers on; a smaller model gives the inputs of its last three layers, or of all if it has fewer.
    inputs = (
        (2, layers // 2, layers - 3) if layers >= 7 else tuple(range(max(0, layers - 3), layers))
    )
    # config.json names each input by the layer whose output it is: the one before; -1: the embedding
    outputs = [i - 1 for i in inputs]
    config["eagle_config"] = {
        "use_aux_hidden_state": True,
        "eagle_aux_hidden_state_layer_ids": outputs,
    }
    return config


def _fresh(
    config: Mapping[str, Any], taps: int, head: Tensor, norm: Tensor
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a fresh drafter, in the dtype of `head`. `head [S, H]` and `norm [H]` are the target's.

    Random tensors are drawn in the order of `shapes`: another order gives another drafter.
    """
    # A generator of its own: the same command gives the same drafter, and the global random state stays.
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
