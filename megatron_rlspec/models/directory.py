"""Check a Hugging Face model directory (`check_model`) before weights are loaded or engines start.

The check reads config.json, for training also generation_config.json, and the headers of the safetensors files. It
compares them: of tensors the names, the types and the embedding's shape. Tokenizer files need only be there;
tokenizer_config.json is read if none of `TOKENIZERS` is complete. Weights are read in one case only: if files of a tied
model hold both head and embedding, their bits must be equal (`headers.py`). torch is imported for that and for the
table of names.

Training commands, converter and `rlspec serve` call `check_model`; `rlspec compare`, `rlspec slime` and `CoTrainer` do
not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from megatron_rlspec.models.config import (
    SCHEMAS,
    CheckpointError,
    Shared,
    check_config,
    stated_ends,
)
from megatron_rlspec.models.headers import (
    DTYPES,
    EMBEDDING,
    HEAD,
    SINGLE,
    Header,
    read_headers,
    read_object,
)

GENERATION = "generation_config.json"
ADAPTER = "adapter_config.json"
END_OF_MESSAGE = "<|eom_id|>"  # of Llama 3.1: it ends a turn that calls a tool
# Sets of tokenizer files: a directory must have all files of one set, or code for its tokenizer (`_check_tokenizer`).
TOKENIZERS = (("tokenizer.json",), ("tokenizer.model",), ("vocab.json", "merges.txt"))
# Names in no table of names: buffers, and the copies of embedding and head in the drafters of DeepSeek-V3 and GLM4-MoE
# (`Row.copies`), which SGLang does not read.
_IGNORED = re.compile(
    r"rotary_emb\.inv_freq$|\.layers\.\d+\.(embed_tokens|shared_head\.head)\.weight$"
)

Use = Literal["train", "convert", "serve"]


def check_model(
    path: str | Path,
    use: Use,
    *,
    drafter: bool = True,
    weights: bool = True,
    tokenizer: bool = True,
    trust_remote_code: bool = False,
    longest: int = 0,
    spare: int = 0,
) -> dict[str, Any]:
    """Return config.json as `read_config` does. Raises CheckpointError, one line, for a directory that cannot be used.

    Under "serve", a model whose architecture is not in `SCHEMAS` is not checked further: SGLang knows more.

    use                train, convert: refuse settings that this package does not compute. serve: refuse a directory
                       only if its files contradict one another
    drafter            train: config.json must name a drafter. Every use: with `weights`, the tensors of the drafter
                       that it names must be there
    weights            compare the names of all tensors, and the shape of the embedding, with config.json, and check
                       the number types
    tokenizer          the files of a tokenizer must be there
    trust_remote_code  the tokenizer may be Python code in the directory, if it lacks the files of `TOKENIZERS`
    longest            model.max_length in tokens, which must not exceed max_position_embeddings; 0: not checked
    spare              positions that an engine needs beyond `longest` (`Config.reserved_positions`)
    """
    directory = Path(path)
    if wrong := why_no_checkpoint(directory):
        raise CheckpointError(wrong)
    config = read_config(directory)
    if use == "serve" and _architecture(config) not in SCHEMAS:
        return config
    typed = check_config(config, str(path), trained=use != "serve")
    if drafter and use == "train" and not typed.num_nextn_predict_layers:
        raise CheckpointError(
            f"config.json of {path}: num_nextn_predict_layers={typed.num_nextn_predict_layers or 0}: no drafter; "
            "`rlspec convert --add-mtp` adds one, drafter.train=false goes without"
        )
    context = typed.max_position_embeddings
    if context and longest + spare > context:
        more = f" and {spare} more, which SGLang needs" if spare else ""
        raise CheckpointError(
            f"config.json of {path}: max_position_embeddings={context} is less than model.max_length={longest}{more}; "
            f"expected model.max_length of at most {context - spare}"
        )
    if weights and use == "train":
        _check_stated(config, directory)
    if weights:
        _check_weights(directory, config, typed, use, drafter=drafter)
    if tokenizer:
        _check_tokenizer(directory, trust_remote_code)
    return config


def ends_of_text(path: str | Path, tokenizer: Any = None) -> tuple[int, ...]:
    """Return the token ids that end a text, ascending: of config.json, generation_config.json and the tokenizer.

    () if none of them states one. SGLang ends a text at these, too. Raises CheckpointError if config.json is missing,
    or if one of the two files is damaged; generation_config.json may be missing.

    tokenizer  Transformers' object; None: only the files count
    """
    directory = Path(path)
    config = read_object(directory / "config.json")
    ends = stated_ends(config.get("text_config", config))  # the text part of a multimodal model
    if (directory / GENERATION).exists():
        ends |= stated_ends(read_object(directory / GENERATION))
    if tokenizer is not None:
        further = {tokenizer.eos_token_id, tokenizer.get_added_vocab().get(END_OF_MESSAGE)}
        ends |= further - {None}
    return tuple(sorted(ends))


def why_no_checkpoint(directory: Path) -> str:
    """Return why a path cannot be a Hugging Face checkpoint, with what to do about it; "" if it can be one.

    It must be a directory, not that of a run and not a LoRA adapter. config.json and tensors are not looked for.
    """
    if (directory / "hf/config.json").exists() and not (directory / SINGLE).exists():
        return f"{directory}: a run directory; its model is {directory / 'hf'}"
    if (directory / ADAPTER).exists():
        return (
            f"{directory}: {ADAPTER}: a LoRA adapter is not read; expected it merged into its model"
        )
    if directory.is_dir():
        return ""
    wrong = "not a directory" if directory.exists() else "no such directory"
    return f"{directory}: {wrong}; expected the directory of a Hugging Face checkpoint"


def _check_stated(config: Mapping[str, Any], where: Path) -> None:
    """Refuse a config.json without a key for which trainer and engines would fill in defaults of their own.

    With different values the log-probs of an engine would not be the trainer's.
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    stated = {
        "rope_theta": config.get("rope_theta", rope.get("rope_theta")),
        "rms_norm_eps": config.get("rms_norm_eps"),
        "eos_token_id": ends_of_text(where),
    }
    for key, value in stated.items():
        # Zero and () count as missing: no model has them.
        if not value:
            raise CheckpointError(
                f"config.json of {where}: no {key}; trainer and engines would each take a default of their own"
            )


def _architecture(config: Mapping[str, Any]) -> str:
    """Return `architectures[0]` of a config.json that may be wrong in any way; "" if there is none."""
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else ""


def read_config(directory: Path) -> dict[str, Any]:
    """Read config.json, with keys under their published names. Raises CheckpointError."""
    config = read_object(directory / "config.json")
    if _architecture(config) == "Qwen3MoeForCausalLM" and "num_local_experts" in config:
        # Transformers 5 writes this name. SGLang and this package read the published one.
        config.setdefault("num_experts", config.pop("num_local_experts"))
    return config


def _check_weights(
    directory: Path, config: Mapping[str, Any], typed: Shared, use: Use, *, drafter: bool
) -> None:
    """Compare the tensors in the files with config.json, by their headers. Raises CheckpointError.

    The names are compared before the embedding's shape, because a missing embedding would be a KeyError there.

    drafter  the tensors of the drafter that config.json names must be there
    """
    headers = read_headers(directory, tied=typed.tie_word_embeddings)
    for name, header in headers.items():
        # SGLang reads tensors by their names in the files. It finds neither the experts in one tensor of all experts
        # (`header.part`), nor a tied embedding that is stored under the head's name only.
        if use == "serve" and (header.part or (name, header.name) == (EMBEDDING, HEAD)):
            raise CheckpointError(
                f"{directory}: holds {name} as {header.name}, which SGLang does not read; `rlspec convert` to Megatron "
                "and back writes it by its name"
            )
        # d2t and t2d are the integer maps of an EAGLE-3 drafter (`models.config.MAPS`).
        if header.dtype not in DTYPES and not name.endswith(("d2t", "t2d")):
            raise CheckpointError(
                f"{header.path}: {name} has type {header.dtype}, expected {', '.join(DTYPES)}"
            )
    _check_names(directory, config, headers, drafter=drafter)
    shape = (typed.vocab_size, typed.hidden_size)
    if headers[EMBEDDING].shape != shape:
        raise CheckpointError(
            f"config.json of {directory}: vocab_size={shape[0]} and hidden_size={shape[1]}, but {EMBEDDING} has shape "
            f"{list(headers[EMBEDDING].shape)}"
        )


def _check_names(
    directory: Path,
    config: Mapping[str, Any],
    headers: Mapping[str, Header],
    *,
    drafter: bool,
) -> None:
    """Compare the tensors' names with the family's table. Raises CheckpointError.

    drafter  the names of the drafter's tensors must be there, too
    """
    from megatron_rlspec.models.names import name_table  # imports torch

    try:
        table = name_table(config)
    except ValueError as error:
        raise CheckpointError(f"{directory}: {error}") from None
    missing = [name for name in table.target_names if name not in headers]
    if missing:
        raise CheckpointError(
            f"{directory}: lacks {_first_and_count(missing)}, which {table.name} needs by config.json"
        )
    missing = [name for name in table.drafter_names if name not in headers]
    if drafter and missing:
        raise CheckpointError(
            f"{directory}: lacks {len(missing)} of the drafter's {len(table.drafter_names)} tensors, such as "
            f"{missing[0]}; `rlspec convert --add-mtp` makes a fresh drafter"
        )
    unknown = [name for name in headers if name not in table.by_hf and not _IGNORED.search(name)]
    if unknown:
        raise CheckpointError(
            f"{directory}: {_first_and_count(unknown)}: not part of {table.name} by config.json"
        )


def _check_tokenizer(directory: Path, trusted: bool) -> None:
    """Raise CheckpointError if the directory has no tokenizer. The files' content is not checked.

    trusted  Python code for a tokenizer, which tokenizer_config.json names under `auto_map`, counts as one
    """
    if any(all((directory / name).is_file() for name in names) for names in TOKENIZERS):
        return
    about = directory / "tokenizer_config.json"
    has_code = about.exists() and "AutoTokenizer" in (read_object(about).get("auto_map") or {})
    if has_code and trusted:
        return
    if has_code:
        raise CheckpointError(
            f"{about}: auto_map: the tokenizer is Python code in {directory}; model.trust_remote_code=true runs it"
        )
    known = ", ".join(" with ".join(names) for names in TOKENIZERS)
    raise CheckpointError(f"{directory}: no tokenizer; expected one of {known}")


def _first_and_count(names: list[str]) -> str:
    """Return the first name, and how many more there are."""
    more = f" and {len(names) - 1} more tensors" if len(names) > 1 else ""
    return f"{names[0]}{more}"
