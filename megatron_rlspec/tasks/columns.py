"""Read and check the values of one row: prompt, label, metadata, response. `data.py` calls these functions.

Rows of slime, verl and TRL are read as they are: `OTHER_NAMES` says which columns stand in for a missing one.

In all functions `where` is the row's place, such as "file:line" (from `rows.read_rows`). Messages about a row begin
with it, and those about a value name the column. No function changes the row.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    Json,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from megatron_rlspec import files
from megatron_rlspec.config import DataConfig
from megatron_rlspec.config.base import first_mistake, shown
from megatron_rlspec.tasks.order import DataError
from megatron_rlspec.texts import first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# By the default name of a column: the names that other projects have for it, in the order in which they are tried. A
# name with points is a path into nested objects. If an option gives a column another name, only that name is tried.
OTHER_NAMES = {
    "prompt": ("messages", "question", "problem"),
    "label": ("reward_model.ground_truth", "ground_truth", "answer", "solution"),
    "metadata": ("extra_info",),
    "response": ("completion", "messages"),
}
Messages = list[dict[str, Any]]

# A text that UTF-8 can encode. Half a surrogate pair cannot be encoded, and pydantic refuses it only if the length has
# a bound; so the bound is there, but large.
Utf8 = Annotated[str, Field(strict=True, max_length=1 << 30)]


class Message(BaseModel):
    """A chat message as chat templates of text models read it. Other keys are passed on to the template."""

    model_config = ConfigDict(strict=True, extra="allow")
    role: Utf8
    content: Utf8

    @model_validator(mode="before")
    @classmethod
    def _without_empty_keys(cls, given: Any) -> Any:
        """Leave out keys whose value is null or an empty list, and join the parts of a text.

        Parquet gives every message the keys of all messages, and templates ask whether a key is there. A message with
        "tool_calls" may have no content.
        """
        if not isinstance(given, dict):
            return given  # pydantic then says what was expected
        message = {key: value for key, value in given.items() if value not in (None, [])}
        if "tool_calls" in message:
            message.setdefault("content", "")
        content = message.get("content")
        if isinstance(content, list) and all(map(_is_text, content)):
            message["content"] = "".join(part["text"] for part in content)
        return without_nulls(message)


_TEXT = TypeAdapter(Utf8)
_FILLED = TypeAdapter(Annotated[Utf8, Field(min_length=1)])
_MESSAGES = TypeAdapter(Annotated[list[Message], Field(min_length=1)])
_TOOLS = TypeAdapter(list[dict[str, Any]] | Json[list[dict[str, Any]]])
_IDS = TypeAdapter(
    Annotated[list[Annotated[int, Field(ge=0, lt=2**31, strict=True)]], Field(min_length=1)]
)
_SEED = TypeAdapter(Annotated[int, Field(ge=0, lt=2**63, strict=True)] | None)
_OBJECT = TypeAdapter(dict[str, Any] | None)


def _is_text(part: Any) -> bool:
    """Return whether a part of a message's content is a text, and no image or sound."""
    return isinstance(part, dict) and isinstance(part.get("text"), str)


def without_nulls(value: Any) -> Any:
    """Return a value of JSON without the keys that are null, at any depth."""
    if isinstance(value, dict):
        return {key: without_nulls(part) for key, part in value.items() if part is not None}
    if isinstance(value, list):
        return [without_nulls(part) for part in value]
    return value


def checked(where: str, name: str, value: Any, kind: TypeAdapter[Any]) -> Any:
    """Return the value as pydantic makes it for `kind`. Raises DataError with `where`, `name` and the first mistake."""
    try:
        return kind.validate_python(value)
    except ValidationError as error:
        raise DataError(f"{where}: {name}{first_mistake(error)}") from None


def value_of(row: Mapping[str, Any], key: str) -> Any:
    """Return the value of a column, or of the first of its `OTHER_NAMES` that has one; None if none has.

    A column that is null has no value.
    """
    for name in (key, *OTHER_NAMES.get(key, ())):
        value: Any = row
        # A column can have points in its own name, so the whole name is looked up first.
        for part in [name] if name in row else name.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if value is not None:
            return value
    return None


def _needed(where: str, row: Mapping[str, Any], key: str, option: str) -> Any:
    """Return a value that every row must have, or None for a column that is null: the caller's check refuses it.

    option  the option by which a user names the column, for the message

    Raises DataError if the row has neither the column nor a value under one of its `OTHER_NAMES`.
    """
    value = value_of(row, key)
    if value is None and key not in row:
        columns = ", ".join(map(str, row)) or "nothing"
        raise DataError(
            f"{where}: no {key}; the row has {files.shown(columns)}; {option} names the column"
        )
    return value


def prompt(where: str, row: Mapping[str, Any], options: DataConfig) -> str | Messages:
    """Return the prompt, not empty: a text, or chat messages if data.apply_chat_template=true. Raises DataError."""
    key = options.prompt_key
    value = _needed(where, row, key, "data.prompt_key")
    if not isinstance(value, list):
        text: str = checked(where, key, value, _FILLED)
        # Some files have messages as a string of JSON. Without this check that string would become the user's text.
        if options.apply_chat_template and text.startswith("[{"):
            raise DataError(f"{where}: {key}: expected a list of messages, not its text")
        return text
    if not options.apply_chat_template:
        raise DataError(
            f"{where}: {key} is a list; chat messages need data.apply_chat_template=true"
        )
    return [message.model_dump() for message in checked(where, key, value, _MESSAGES)]


def demonstration(
    where: str, row: Mapping[str, Any], options: DataConfig, response_key: str
) -> tuple[str | Messages, str]:
    """Return prompt and response. The response can be empty.

    If one column has the whole conversation, its last message is the response. Raises DataError.
    """
    prompt_value = prompt(where, row, options)
    value = _needed(where, row, response_key, "sft.response_key")
    if isinstance(value, list):
        messages = checked(where, response_key, value, _MESSAGES)
        # If it is the same list object, prompt and response are read from one column: the prompt is all but the last
        # message. An equal list in another column does not count.
        if value is value_of(row, options.prompt_key):
            prompt_value = prompt_value[:-1]
        if not prompt_value or messages[-1].role != "assistant":
            raise DataError(
                f"{where}: {response_key}: expected messages that end with one of the assistant"
            )
        value = messages[-1].content
    return prompt_value, checked(where, response_key, value, _TEXT)


def text(
    where: str,
    row: Mapping[str, Any],
    prompt_value: str | Messages,
    options: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
) -> str:
    """Return the text that the policy continues, by the tokenizer's chat template if data.apply_chat_template=true.

    prompt_value  what `prompt` returned

    Raises DataError.
    """
    if not options.apply_chat_template:
        return str(prompt_value)
    if tokenizer.chat_template is None:
        raise DataError(
            f"{tokenizer.name_or_path}: data.apply_chat_template=true, but the tokenizer has no template; expected one "
            f"in {tokenizer.name_or_path}/chat_template.jinja"
        )
    messages = (
        [{"role": "user", "content": prompt_value}]
        if isinstance(prompt_value, str)
        else prompt_value
    )
    if options.system_prompt and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": options.system_prompt}, *messages]
    tools = value_of(row, options.tools_key) or []
    tools = without_nulls(checked(where, options.tools_key, tools, _TOOLS))
    # The policy continues a last message of the assistant; otherwise it begins a new one.
    continues = messages[-1]["role"] == "assistant"
    try:
        rendered = tokenizer.apply_chat_template(
            messages,
            tools=tools or None,
            tokenize=False,
            add_generation_prompt=not continues,
            continue_final_message=continues,
            **options.chat_template_kwargs,
        )
    except Exception as error:  # a template is a program, and can raise any error
        raise DataError(
            f"{where}: the chat template refuses the messages: {first_line(error)}"
        ) from None
    if not rendered:
        raise DataError(f"{where}: the prompt is empty")
    return str(rendered)


def ids(where: str, row: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the token ids `[n]` int64 of prompt and response of a row of `rlspec answer`; None for another row.

    `commands/journal.py` writes such rows, with the keys "prompt_tokens" and "response_tokens". Each has at least one
    id. Raises DataError.
    """
    if "response_tokens" not in row:
        return None
    prompt_ids, response_ids = (
        checked(where, key, row.get(key), _IDS) for key in ("prompt_tokens", "response_tokens")
    )
    return np.asarray(prompt_ids, np.int64), np.asarray(response_ids, np.int64)


def seed(where: str, row: Mapping[str, Any]) -> int | None:
    """Return the seed of the noise that a row of `rlspec answer` was drawn with; None without one. Raises DataError."""
    value: int | None = checked(where, "seed", row.get("seed"), _SEED)
    return value


def label(where: str, row: Mapping[str, Any], key: str) -> str:
    """Return the label as text, other values than text as JSON; "" if `key` is empty. Raises DataError.

    A whole number is written without a point (Parquet may hold 72 as 72.0). A list of one value is that value. A list
    of several texts becomes JSON, which `reward_worker.accepted` recognises because it begins with `["`.
    """
    if not key:
        return ""
    value = _plain(_needed(where, row, key, "data.label_key"))
    if value is None or isinstance(value, str):
        return str(checked(where, key, value, _TEXT))
    try:
        written = json.dumps(value, default=str, allow_nan=False, ensure_ascii=False)
        written.encode()  # fails for half a surrogate pair
    except ValueError:
        raise DataError(
            f"{where}: {key}: expected finite numbers and UTF-8 (got {shown(value)})"
        ) from None
    return written


def _plain(value: Any) -> Any:
    """Return a label with whole numbers as int, and with each list of one value replaced by the value."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        values = [_plain(part) for part in value]
        return values[0] if len(values) == 1 else values
    return value


def metadata(where: str, row: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return the metadata, {} without any. Raises DataError for texts and numbers that JSON in UTF-8 cannot hold.

    Reward workers get the metadata as JSON. For that `rewards.py` turns values that JSON has not, such as dates, into
    texts.
    """
    values: dict[str, Any] = checked(where, key, value_of(row, key), _OBJECT) or {}
    try:
        json.dumps(values, default=str, allow_nan=False, ensure_ascii=False).encode()
    except ValueError:  # also of half a surrogate pair, which UTF-8 cannot encode
        raise DataError(
            f"{where}: {key} holds NaN, infinity or half a surrogate pair; expected other values"
        ) from None
    return values
