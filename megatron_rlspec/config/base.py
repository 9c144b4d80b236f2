"""What every section of the configuration shares: field types with bounds, and the error that names a wrong option.

Every option that is a number is finite and has both bounds: a value outside of them is mistyped, not meant. A
boolean is not a number, and a quoted number is not one either (on the command line, where everything is text, `load`
converts first). A default is not checked, so it must be within the bounds itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from megatron_rlspec.texts import printable

MOST_STEPS = 1_000_000_000  # the largest `Positive` and `Count`; tokens have a bound of their own
AUTO = "auto"  # how files and command lines name None: the run chooses
MOST_TOKENS = 2**31 - 1  # token counts are kept in 32 bits by the kernels
# module:function or FILE.py:function
FUNCTION = re.compile(r"([^:]+\.py|[A-Za-z_]\w*(\.[A-Za-z_]\w*)*):[A-Za-z_]\w*", re.ASCII)
MONTH = 30 * 24 * 3600.0  # the longest time limit, in seconds


class ConfigError(ValueError):
    """A user's mistake in the configuration. The message is one line."""

    exit_code = 2  # of the process (`cli.exit_code`)


def expectation(error: Mapping[str, Any]) -> str:
    """Return the message of one of pydantic's errors in the form of our own: `expected a valid integer`.

    error  one of `ValidationError.errors()`
    """
    message = str(error["msg"]).removeprefix("Value error, ").replace("Input should be", "expected")
    message = message.replace("a valid boolean", "true or false").replace(
        "True, False", "true, false"
    )
    return message.replace("a valid tuple", "a valid list")


def first_mistake(error: ValidationError) -> str:
    """Format the first mistake that pydantic found: place, what was expected, and the value.

    The place is empty, and the text begins with ": ", if the whole value is wrong: callers put its name before. The
    value is left out of errors of our own checks ("value_error"), whose message has it already.
    """
    first = error.errors(include_url=False)[0]
    place = "".join(
        f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]
    ).removeprefix(".")
    got = "" if first["type"] in ("missing", "value_error") else f" (got {shown(first['input'])})"
    return f"{place}: {expectation(first)}{got}"


def shown(value: Any) -> str:
    """Return a value as JSON in one line of at most 80 characters. For other texts there is `texts.shown`."""
    return printable(json.dumps(value, default=str, ensure_ascii=False))[:80]


def _clean(text: str) -> str:
    """Return the text. Raises ValueError for control characters, and for lone surrogates, which UTF-8 cannot encode."""
    for character in text:
        if character < " " or character == "\x7f":
            raise ValueError(f"expected text without control characters (got {text[:80]!r})")
        if "\ud800" <= character <= "\udfff":
            raise ValueError(f"expected text in UTF-8 (got {text[:80]!r})")
    return text


Text = Annotated[str, Field(max_length=4096), AfterValidator(_clean)]


def _joined(given: Any) -> Any:
    """Return a list of TOML as text with commas between; other values as they are, for pydantic to check."""
    return ",".join(map(str, given)) if isinstance(given, list) else given


# files or patterns of their names, separated by commas; in TOML a list, too
Files = Annotated[Text, BeforeValidator(_joined)]
Name = Annotated[str, Field(min_length=1, max_length=4096), AfterValidator(_clean)]
Positive = Annotated[int, Field(gt=0, le=MOST_STEPS)]
Count = Annotated[int, Field(ge=0, le=MOST_STEPS)]
Tokens = Annotated[int, Field(gt=0, le=MOST_TOKENS)]
Weight = Annotated[float, Field(ge=0, le=1e6)]
LearningRate = Annotated[float, Field(gt=0, le=1)]
Seconds = Annotated[float, Field(gt=0, le=MONTH)]


class Needs:
    """Metadata of a field: the option has an effect only where at least one of `settings` holds.

    Where a field has several `Needs`, each of them must be satisfied. `effects.py` reads them, and `load` refuses an
    option without effect.

    settings  each in one of these forms:
              "section.key"         the option differs from its default; a boolean: it is true
              "section.key=value"   the option has this value, as str() writes it; a list: contains it
              "section.key!=value"  the option has another value
    """

    def __init__(self, *settings: str) -> None:
        self.settings = settings


class Section(BaseModel):
    """A frozen table of options. An unknown name, a wrong type or a value out of bounds raises `ValidationError`."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,  # a number in quotes is no number, and true is none either
        allow_inf_nan=False,
        validate_default=False,
        protected_namespaces=(),
    )

    @model_validator(mode="before")
    @classmethod
    def _as_typed(cls, given: Any) -> Any:
        """Return the values of a file in Python's types: lists become tuples, and "auto" becomes None.

        Only where the option's default is a tuple or None. Strict mode would refuse a list for a tuple.
        """
        if not isinstance(given, dict):
            return given
        values = dict(given)
        for key in values.keys() & cls.model_fields.keys():
            default = cls.model_fields[key].default
            if isinstance(default, tuple) and isinstance(values[key], list):
                values[key] = tuple(values[key])
            if default is None and values[key] == AUTO:
                values[key] = None
        return values
