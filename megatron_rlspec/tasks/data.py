"""Read prompts and demonstrations with a tokenizer, and draw them in a reproducible order.

A row is an object with a prompt (text, or chat messages), a label and optional metadata. A demonstration has a response
instead of a label. Rows that `rlspec answer` has written hold the token ids of prompt and response, which are used as
they are. Rows that are too long are dropped and counted; no other row is dropped. Errors name file and row.

`run/inputs.py` checks the files before a run, `run/loading.py` reads them. File formats are in `rows.py`, the checks of
a row's values in `columns.py`, the order of drawing in `order.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import numpy as np

from megatron_rlspec.config import DataConfig, SftConfig
from megatron_rlspec.tasks import columns
from megatron_rlspec.tasks.order import DataError, Order
from megatron_rlspec.tasks.rows import read_rows
from megatron_rlspec.texts import first_line, tokenize_continuations
from megatron_rlspec.types import Prompt, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Row = TypeVar("Row")
TOKENIZER_BATCH = 1024  # rows given to the tokenizer at once
# The most rows of a file that are checked before a run loads its model; the others are checked when they are read.
CHECKED_ROWS = 20_000


class Reading(NamedTuple):
    """How a run reads its rows. Callers unpack it, so the order of the fields counts.

    options    names of columns, chat template, and whether rows are shuffled
    longest    most tokens of a row that is kept: of its prompt for `Prompts`, of prompt and response for
               `Demonstrations`
    seed       of the order of rows, and of the choice of `sft.held_out` prompts
    """

    options: DataConfig
    tokenizer: PreTrainedTokenizerBase
    longest: int
    seed: int


class Source(Generic[Row]):
    """Rows in memory, drawn in an `Order`, whose state is a part of checkpoints.

    rows     in the order of the file, without those that are too long; at least one
    summary  a line for the user: how many rows there are, are left out as too long, and are equal to another
    order    over the indices of `rows`; `run/` saves and restores its state
    """

    def __init__(self, rows: list[Row], summary: str, reading: Reading) -> None:
        self.rows = rows
        self.summary = summary
        self.order = Order(len(rows), reading.seed, reading.options.shuffle)

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, count: int) -> list[Row]:
        """Return the next `count` rows. A row comes twice in them only if there are fewer rows than `count`."""
        return [self.rows[i] for i in self.order.take(count)]


class Prompts(Source[Prompt]):
    """The prompts of a file. Raises DataError. `taken`: number of prompts of a step, only for a hint in `summary`."""

    def __init__(self, path: str | Path, reading: Reading, taken: int = 0) -> None:
        options, tokenizer, longest, _ = reading
        rows, dropped = read_prompts(path, options, tokenizer, longest)
        summary = _summary(path, "prompts", rows, dropped, longest)
        if len(rows) < taken:
            summary += f"; a step takes {taken}, so prompts come more than once in it"
        super().__init__(rows, summary, reading)

    def take(self, count: int, beside: Iterable[Prompt] = ()) -> list[Prompt]:
        """Return the next `count` prompts of a step that has the prompts `beside` already.

        `beside` must be prompts of this source.
        """
        # A prompt's id is the row's index in the file. The order's indices count only the rows that are short enough.
        places = {prompt.id: place for place, prompt in enumerate(self.rows)}
        in_step = [places[prompt.id] for prompt in beside]
        return [self.rows[i] for i in self.order.take(count, in_step)]


class Demonstrations(Source[Sample]):
    """The demonstrations of a file. Raises DataError.

    held_out  the demonstrations of `sft.held_out` prompts, which are not in `rows`, so they are not drawn: they measure
              a warm start
    """

    def __init__(self, path: str | Path, reading: Reading, sft: SftConfig) -> None:
        options, tokenizer, longest, seed = reading
        rows, dropped = read_demonstrations(path, options, tokenizer, longest, sft.response_key)
        summary = _summary(path, "samples", rows, dropped, longest)
        self.held_out: list[Sample] = []
        if sft.held_out:
            rows, self.held_out = without_prompts(rows, sft.held_out, seed, path)
        super().__init__(rows, summary, reading)


def check_ids(rows: Iterable[Prompt | Sample], vocab_size: int) -> None:
    """Raise DataError for the first row with a token that the model does not have.

    It looks at rows and not at the tokenizer, which may have further tokens that no text contains, such as padding.
    """
    for row in rows:
        largest = row.tokens.max()
        if largest >= vocab_size:
            name = row.request_id if isinstance(row, Sample) else f"prompt {row.id}"
            raise DataError(
                f"{name}: token {largest}, but config.json says vocab_size={vocab_size}; expected the tokenizer of "
                "this model"
            )


def load_tokenizer(path: str | Path, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a local model directory. Raises DataError.

    trust_remote_code  run the directory's own Python files, if its tokenizer needs them
    """
    # Imported here: it takes seconds, and checks without a tokenizer do not need it.
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if not Path(path).is_dir():
        raise DataError(
            f"{path}: no such directory; expected a Hugging Face checkpoint with a tokenizer"
        )
    # Transformers 5 chooses a class by the names in config.json and tokenizer_config.json. Some published ones name a
    # class that splits texts otherwise than their tokenizer.json.
    has_file = (Path(path) / "tokenizer.json").exists()
    kind: Any = PreTrainedTokenizerFast if has_file else AutoTokenizer
    try:
        tokenizer: PreTrainedTokenizerBase = kind.from_pretrained(
            str(path), local_files_only=True, trust_remote_code=trust_remote_code
        )
    except Exception as error:  # the tokenizers library raises plain Exception for a bad file
        raise DataError(
            f"{path}: no tokenizer that Transformers can load ({first_line(error)})"
        ) from None
    # Without its vocabulary files, a tokenizer can load and then tokenize nothing.
    if not tokenizer("1 + 1 =", add_special_tokens=False)["input_ids"]:
        raise DataError(
            f"{path}: the tokenizer returns no tokens for '1 + 1 ='; expected all files of the tokenizer"
        )
    return tokenizer


def check_prompts(path: str | Path, options: DataConfig) -> None:
    """Check the first `CHECKED_ROWS` rows of a file of prompts, without a tokenizer. Raises DataError."""
    rows = 0
    for where, row in islice(read_rows(path), CHECKED_ROWS):
        columns.prompt(where, row, options)
        columns.label(where, row, options.label_key)
        columns.metadata(where, row, options.metadata_key)
        rows += 1
    _require(path, range(rows), 0, "prompts")  # the range stands for the rows, which are not kept


def check_demonstrations(path: str | Path, options: DataConfig, response_key: str) -> None:
    """Check the first `CHECKED_ROWS` rows of a file of demonstrations, without a tokenizer. Raises DataError."""
    rows = 0
    for where, row in islice(read_rows(path), CHECKED_ROWS):
        if columns.ids(where, row) is None:  # a row that holds ids is checked by this call itself
            columns.demonstration(where, row, options, response_key)
        rows += 1
    _require(path, range(rows), 0, "samples")


def read_prompts(
    path: str | Path,
    options: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    max_tokens: int,
) -> tuple[list[Prompt], int]:
    """Return all prompts of at most `max_tokens` tokens, and the number of longer ones.

    `Prompt.id` is the row's index in the file, with the longer rows counted. `Prompt.text` is what `Prompt.tokens` are
    made of, without the token that `_prompt_tokens` may add at the beginning. Raises DataError, also if no prompt is
    short enough.
    """
    texts = []
    labels = []
    metadata = []
    for where, row in read_rows(path):
        prompt = columns.prompt(where, row, options)
        texts.append(columns.text(where, row, prompt, options, tokenizer))
        labels.append(columns.label(where, row, options.label_key))
        metadata.append(columns.metadata(where, row, options.metadata_key))
    prompts = []
    for i, tokens in enumerate(_prompt_tokens(tokenizer, texts)):
        if len(tokens) <= max_tokens:
            prompts.append(Prompt(i, tokens, labels[i], texts[i], metadata[i]))
    dropped = len(texts) - len(prompts)
    _require(path, prompts, dropped, f"prompts of at most {max_tokens} tokens")
    return prompts, dropped


def read_demonstrations(
    path: str | Path,
    options: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    max_tokens: int,
    response_key: str = "response",
) -> tuple[list[Sample], int]:
    """Return all demonstrations as samples of at most `max_tokens` tokens, and the number of longer ones.

    The response is trained (loss mask 1). A response that is a text gets an end-of-sequence token, which is trained,
    too. Prompt and response are tokenized apart, as in a rollout, where the policy generates from the prompt's last
    token on. A row of `rlspec answer` is not tokenized and gets no end-of-sequence token: its ids are those that a
    model drew, with the noise of its seed. Raises DataError, also if no sample is short enough, and if the tokenizer
    has no end-of-sequence token.
    """
    if tokenizer.eos_token_id is None:
        raise DataError(
            f"{tokenizer.name_or_path}: the tokenizer has no end-of-sequence token to learn"
        )
    texts: list[tuple[str, str]] = []  # (prompt, response) of every row
    # For rows of `rlspec answer`, by the row's index: ids of prompt and response, and the seed
    with_ids: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    seeds: dict[int, int | None] = {}
    for i, (where, row) in enumerate(read_rows(path)):
        if ids := columns.ids(where, row):
            with_ids[i] = ids
            seeds[i] = columns.seed(where, row)
            texts.append(("", ""))  # a placeholder, so that indices of `texts` are those of rows
        else:
            prompt_value, response = columns.demonstration(where, row, options, response_key)
            texts.append((columns.text(where, row, prompt_value, options, tokenizer), response))
    prompts = _prompt_tokens(tokenizer, [prompt for prompt, _ in texts])
    responses: list[list[int]] = []
    for start in range(0, len(texts), TOKENIZER_BATCH):
        batch = [response for _, response in texts[start : start + TOKENIZER_BATCH]]
        responses += tokenize_continuations(tokenizer, batch)
    samples = []
    for i, (text, answer) in enumerate(texts):
        if i in with_ids:
            prompt, response_ids = with_ids[i]
        else:
            prompt = prompts[i]
            response_ids = np.append(responses[i], tokenizer.eos_token_id)
        tokens = np.concatenate([prompt, response_ids])
        if len(tokens) > max_tokens:
            continue
        mask = (np.arange(len(tokens)) >= len(prompt)).astype(np.float32)  # 1 on the response
        no_logprobs = np.zeros(len(tokens), np.float32)  # no engine has sampled these tokens
        of_row = Prompt(i, prompt, text=text)
        samples.append(
            Sample(f"row-{i}", of_row, tokens, mask, no_logprobs, text=answer, seed=seeds.get(i))
        )
    dropped = len(texts) - len(samples)
    _require(path, samples, dropped, f"samples of at most {max_tokens} tokens")
    return samples, dropped


def without_prompts(
    rows: Sequence[Sample], held_out: int, seed: int, path: str | Path
) -> tuple[list[Sample], list[Sample]]:
    """Split off all rows of `held_out` prompts, which `seed` chooses: (rows to train on, rows to evaluate on).

    A resumed run chooses the same prompts only if seed, rows and their order are the same. `path` is for messages.

    Two rows have the same prompt if its tokens are equal. Raises DataError if no prompt is left to train on.
    """
    prompts = list(dict.fromkeys(row.prompt.tokens.tobytes() for row in rows))
    if held_out >= len(prompts):
        raise DataError(
            f"{path}: {len(prompts)} different prompts; sft.held_out={held_out} leaves none to train on; expected less"
        )
    chosen = {prompts[i] for i in np.random.default_rng(seed).permutation(len(prompts))[:held_out]}
    parts: tuple[list[Sample], list[Sample]] = ([], [])
    for row in rows:
        parts[row.prompt.tokens.tobytes() in chosen].append(row)  # False is 0, True is 1
    return parts


def _prompt_tokens(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[np.ndarray]:
    """Return `[P] int64` per text. Special tokens are not added: a chat template has written them into the text.

    The exception is the tokenizer's token for the beginning of a text: it is added where the text does not have it.
    """
    first = _beginning(tokenizer)
    tokens: list[np.ndarray] = []
    for start in range(0, len(texts), TOKENIZER_BATCH):
        batch = tokenizer(list(texts[start : start + TOKENIZER_BATCH]), add_special_tokens=False)
        for ids in batch["input_ids"]:
            tokens.append(np.asarray(ids if ids[:1] == first else first + ids, np.int64))
    return tokens


def _beginning(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return [id] of the token that the tokenizer puts before a text; [] if it puts none there.

    It is found by tokenizing a text, because a tokenizer can have such a token (`bos_token_id`) and not use it.
    """
    first: list[int] = tokenizer("1")["input_ids"][:1]
    return first if first == [tokenizer.bos_token_id] else []


def _summary(path: str | Path, what: str, rows: Sequence[Any], dropped: int, longest: int) -> str:
    """Return a line about the rows of a file that were kept; `dropped` further ones have more than `longest` tokens."""
    line = f"{path}: {len(rows)} {what}"
    different = len({row.tokens.tobytes() for row in rows})
    if dropped:
        line += f"; {dropped} others are left out, of more than {longest} tokens"
    if different < len(rows):
        line += f"; {len(rows) - different} are equal to another"
    return line


def _require(path: str | Path, kept: Sequence[Any], dropped: int, what: str) -> None:
    """Raise DataError if no row is left.

    kept     the rows that are left, of which only the number counts
    dropped  number of rows that were too long
    what     the rows in the message, such as "prompts of at most 100 tokens"
    """
    if not kept:
        reason = f"all {dropped} rows are longer" if dropped else "the file has no rows"
        raise DataError(f"{path}: no {what}; {reason}")
