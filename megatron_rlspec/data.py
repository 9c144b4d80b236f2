"""Prompts and demonstrations from JSONL and Parquet, in slime's format, and the order in which they are drawn.

A row is an object with a prompt (text, or chat messages), a label and optional metadata; a demonstration has a response
instead of a label. Whatever is wrong with a row is told with its file and line, and nothing is skipped in silence.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from megatron_rlspec.config import Config, DataConfig
from megatron_rlspec.types import Prompt, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Row = TypeVar("Row")
TOKENIZER_BATCH = 1024  # rows given to the tokenizer at once


class DataError(ValueError):
    """A row, file or tokenizer that cannot be used, told in one line: where, what is wrong, what was expected."""


@dataclass
class Order:
    """The order in which `size` rows are drawn: epoch after epoch, each shuffled from (seed, epoch) if `shuffle`.

    `state()` and `restore()` continue exactly where another `Order` stopped, in the middle of an epoch too.
    """

    size: int
    seed: int
    shuffle: bool = True
    epoch: int = 0
    position: int = 0

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"an order of {self.size} rows never gives one")

    def take(self, count: int) -> list[int]:
        """The next `count` indices; an epoch's end is crossed, so a row may come twice if `count` exceeds the rest."""
        taken: list[int] = []
        while len(taken) < count:
            chosen = self._permutation()[self.position : self.position + count - len(taken)]
            taken += chosen.tolist()
            self.position += len(chosen)
            if self.position == self.size:
                self.epoch, self.position = self.epoch + 1, 0
        return taken

    def state(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self.position, "seed": self.seed, "size": self.size}

    def restore(self, state: Mapping[str, int]) -> None:
        """Raises DataError if the state belongs to other data or another seed: the order would not continue."""
        for name in ("size", "seed"):
            if state[name] != getattr(self, name):
                raise DataError(
                    f"cannot resume the data order: {name} was {state[name]}, but is {getattr(self, name)} now"
                )
        self.epoch, self.position = state["epoch"], state["position"]

    def _permutation(self) -> np.ndarray:
        if not self.shuffle:
            return np.arange(self.size)
        return np.random.default_rng((self.seed, self.epoch)).permutation(self.size)


class Source(Generic[Row]):
    """Rows in memory, drawn in an `Order`. `dropped` rows were too long."""

    def __init__(self, rows: list[Row], dropped: int, seed: int, shuffle: bool) -> None:
        self.rows, self.dropped = rows, dropped
        self.order = Order(len(rows), seed, shuffle)

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, count: int) -> list[Row]:
        """The next `count` rows; see `Order.take`."""
        return [self.rows[i] for i in self.order.take(count)]


class Prompts(Source[Prompt]):
    """Prompts that leave room for `rollout.max_new_tokens` within `model.max_length`. Raises DataError."""

    def __init__(self, path: str | Path, tokenizer: PreTrainedTokenizerBase, config: Config) -> None:
        room = config.model.max_length - config.rollout.max_new_tokens
        rows, dropped = read_prompts(path, config.data, tokenizer, room)
        super().__init__(rows, dropped, config.train.seed, config.data.shuffle)


class Demonstrations(Source[Sample]):
    """Written answers within `model.max_length`. Raises DataError."""

    def __init__(self, path: str | Path, tokenizer: PreTrainedTokenizerBase, config: Config) -> None:
        longest = config.model.max_length
        rows, dropped = read_demonstrations(path, config.data, tokenizer, longest, config.sft.response_key)
        super().__init__(rows, dropped, config.train.seed, config.data.shuffle)


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a local checkpoint directory. Raises DataError."""
    from transformers import AutoTokenizer  # seconds, which whoever only reads rows should not pay

    if not Path(path).is_dir():
        raise DataError(f"{path}: no such directory; expected a Hugging Face checkpoint with a tokenizer")
    try:
        return AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{path}: no tokenizer that Transformers can load ({_first_line(error)})") from None


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
    """Raise DataError if the tokenizer can write ids that the model's embedding has no row for."""
    if len(tokenizer) > vocab_size:
        raise DataError(
            f"{tokenizer.name_or_path}: the tokenizer has {len(tokenizer)} tokens, but config.json says "
            f"vocab_size={vocab_size}; expected the tokenizer of this model"
        )


def read_rows(path: str | Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where, row) of every row; `where` is "file:line" (JSONL; empty lines count but are no rows) or "file: row n".

    Raises DataError.
    """
    path = Path(path)
    readers = {".jsonl": _jsonl_rows, ".parquet": _parquet_rows}
    if path.suffix not in readers:
        raise DataError(f"{path}: expected a name that ends in {' or '.join(readers)}")
    try:
        yield from readers[path.suffix](path)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or _first_line(error)}") from None


def read_prompts(
    path: str | Path, options: DataConfig, tokenizer: PreTrainedTokenizerBase, max_tokens: int
) -> tuple[list[Prompt], int]:
    """All prompts of at most `max_tokens` tokens, and how many longer ones were left out.

    `Prompt.id` is the row's index in the file, whatever was left out; `Prompt.text` is what was tokenized, without
    special tokens added. Raises DataError, also if no prompt is short enough.
    """
    rows = [
        (
            _render(where, _field(where, row, options.prompt_key), tokenizer, options.apply_chat_template),
            _label(where, row, options.label_key),
            _metadata(where, row, options.metadata_key),
        )
        for where, row in read_rows(path)
    ]
    prompts, dropped = [], 0
    for i, tokens in enumerate(_tokenize(tokenizer, [text for text, *_ in rows])):
        text, label, metadata = rows[i]
        if len(tokens) > max_tokens:
            dropped += 1
        else:
            prompts.append(Prompt(i, tokens, label, text, metadata))
    _require(path, prompts, dropped, f"prompts of at most {max_tokens} tokens")
    return prompts, dropped


def read_demonstrations(
    path: str | Path,
    options: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    max_tokens: int,
    response_key: str = "response",
) -> tuple[list[Sample], int]:
    """All written answers as samples of at most `max_tokens` tokens, and how many longer ones were left out.

    Trained are the response and the end-of-sequence token after it. Prompt and response are tokenized apart, since at
    that border the policy will start to write, too. Raises DataError.
    """
    if tokenizer.eos_token_id is None:
        raise DataError(f"{tokenizer.name_or_path}: the tokenizer has no end-of-sequence token to learn")
    rows = []
    for where, row in read_rows(path):
        prompt = _render(where, _field(where, row, options.prompt_key), tokenizer, options.apply_chat_template)
        response = _field(where, row, response_key)
        if not isinstance(response, str):
            raise DataError(f"{where}: {response_key} is {_kind(response)}, expected text")
        rows.append((prompt, response))
    asked = _tokenize(tokenizer, [prompt for prompt, _ in rows])
    answered = _tokenize(tokenizer, [response for _, response in rows])
    samples, dropped = [], 0
    for i, (prompt, response) in enumerate(zip(asked, answered, strict=True)):
        tokens = np.concatenate([prompt, response, [tokenizer.eos_token_id]])
        if len(tokens) > max_tokens:
            dropped += 1
            continue
        mask = (np.arange(len(tokens)) >= len(prompt)).astype(np.float32)
        nothing = np.zeros(len(tokens), np.float32)
        text, written = rows[i]
        samples.append(Sample(f"row-{i}", Prompt(i, prompt, text=text), tokens, mask, nothing, text=written))
    _require(path, samples, dropped, f"samples of at most {max_tokens} tokens")
    return samples, dropped


def _jsonl_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                row = json.loads(line)
            except ValueError as error:  # not UTF-8, or not JSON
                raise DataError(f"{where}: not valid JSON: {_first_line(error)}") from None
            if not isinstance(row, dict):
                raise DataError(f"{where}: {_kind(row)}, expected an object")
            yield where, row


def _parquet_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}: row {number}", row
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"{path}: truncated or not Parquet ({_first_line(error)})") from None


def _field(where: str, row: Mapping[str, Any], key: str) -> Any:
    if row.get(key) is None:
        raise DataError(f"{where}: no {key}; the row has {', '.join(row) or 'nothing'}")
    return row[key]


def _render(where: str, prompt: Any, tokenizer: PreTrainedTokenizerBase, apply_chat_template: bool) -> str:
    """What the policy is to continue."""
    if isinstance(prompt, str) and not apply_chat_template:
        text = prompt
    elif not apply_chat_template:
        raise DataError(f"{where}: the prompt is {_kind(prompt)}; chat messages need data.apply_chat_template=true")
    else:
        text = _render_chat(
            where, [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt, tokenizer
        )
    if not text:
        raise DataError(f"{where}: the prompt is empty")
    return text


def _render_chat(where: str, prompt: Any, tokenizer: PreTrainedTokenizerBase) -> str:
    from jinja2 import TemplateError

    if tokenizer.chat_template is None:
        raise DataError(f"{tokenizer.name_or_path}: data.apply_chat_template=true, but the tokenizer has no template")
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if not isinstance(messages, list) or not messages:
        raise DataError(f"{where}: the prompt is {_kind(messages)}, expected text or a list of messages")
    for message in messages:
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise DataError(f"{where}: a message is {_kind(message)}, expected an object with role and content")
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except TemplateError as error:
        raise DataError(f"{where}: the chat template refuses the messages: {_first_line(error)}") from None


def _label(where: str, row: Mapping[str, Any], key: str) -> str:
    """Text, or a number as JSON writes it; an empty key: rows have no label."""
    if not key:
        return ""
    label = _field(where, row, key)
    if isinstance(label, bool) or not isinstance(label, (str, int, float)):
        raise DataError(f"{where}: {key} is {_kind(label)}, expected text or a number")
    return str(label)


def _metadata(where: str, row: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    metadata = row.get(key)
    if metadata is None:
        return {}
    if not isinstance(metadata, dict):
        raise DataError(f"{where}: {key} is {_kind(metadata)}, expected an object")
    return metadata


def _tokenize(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[np.ndarray]:
    """`[P] int64` per text. Special tokens are the chat template's business."""
    tokens: list[np.ndarray] = []
    for start in range(0, len(texts), TOKENIZER_BATCH):
        batch = tokenizer(list(texts[start : start + TOKENIZER_BATCH]), add_special_tokens=False)
        tokens += [np.asarray(ids, np.int64) for ids in batch["input_ids"]]
    return tokens


def _require(path: str | Path, kept: Sequence[Any], dropped: int, what: str) -> None:
    if not kept:
        reason = f"all {dropped} rows are longer" if dropped else "the file has no rows"
        raise DataError(f"{path}: no {what}; {reason}")


def _kind(value: Any) -> str:
    """What JSON calls it."""
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number" if isinstance(value, (int, float)) else type(value).__name__)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
