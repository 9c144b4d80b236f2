"""Find options that a user gave and that have no effect, because another option switches their part off.

A field states by `Needs` (`base.py`) what its option needs. `load.py` refuses options without effect.
`run/inputs.py` reads single options by `option`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic.fields import FieldInfo

from megatron_rlspec.config.base import Needs, Section


def without_effect(config: Section, given: Mapping[str, int]) -> Iterator[str]:
    """Yield a line for every option that the other options leave without effect. An option at its default has no line.

    given  options that a user gave -> rank of their source: 1 a file, 2 the command line (`load.py`). A name that is no
           option is skipped. An option in a file may lose its effect by the command line: that is no mistake, because
           the command line changes what a file says
    """
    for name, rank in given.items():
        value, field = option(config, name)
        if field is None or value == field.default:
            continue
        for needs in unmet(config, field):
            # names of the options that it needs, each once and in order
            others = list(dict.fromkeys(_name(setting) for setting in needs.settings))
            if not any(given.get(other, 0) > rank for other in others):
                now = " and ".join(f"{other}={_text(option(config, other)[0])}" for other in others)
                yield f"{name}={_text(value)} has no effect while {now}"


def unmet(config: Section, field: FieldInfo) -> Iterator[Needs]:
    """Yield each `Needs` of a field that the configuration does not satisfy; nothing if the option has an effect."""
    for needs in field.metadata:
        if isinstance(needs, Needs) and not any(
            _holds(config, setting) for setting in needs.settings
        ):
            yield needs


def option(config: Section, name: str) -> tuple[Any, FieldInfo | None]:
    """Return the value and the field of `section.key`; (None, None) for a name that is no option."""
    section, _, key = name.partition(".")
    table = getattr(config, section, None)
    if not isinstance(table, Section) or key not in type(table).model_fields:
        return None, None
    return getattr(table, key), type(table).model_fields[key]


def _text(value: Any) -> str:
    """Return a value as a command line states it."""
    text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return (text.lower() if isinstance(value, bool) else text)[:100]


def _name(setting: str) -> str:
    """Return the option's name in a setting of `Needs`."""
    return setting.partition("=")[0].removesuffix("!")


def _holds(config: Section, setting: str) -> bool:
    """Return whether a setting of `Needs` holds. Raises ValueError for a name that is no option: a bug."""
    name, equals, wanted = setting.partition("=")
    value, field = option(config, name.removesuffix("!"))
    if field is None:
        raise ValueError(f"Needs({setting!r}): no such option")
    if not equals:
        return value if isinstance(value, bool) else bool(value != field.default)
    # an empty tuple compares as "", so that "rollout.urls=" holds without addresses
    texts = [str(part) for part in value] or [""] if isinstance(value, tuple) else [str(value)]
    return (wanted in texts) != name.endswith("!")
