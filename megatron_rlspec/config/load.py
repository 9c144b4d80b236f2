"""Defaults, a TOML file over them, and command-line options over both."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megatron_rlspec.config.base import ConfigError
from megatron_rlspec.config.run import Config


def load(path: str | Path | None = None, overrides: Mapping[str, str] | None = None) -> Config:
    """Defaults, then the TOML file, then overrides like `{"optimizer.lr": "1e-5"}`."""
    tree: dict[str, Any] = {}
    if path is not None:
        try:
            tree = tomllib.loads(Path(path).read_text())
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from None
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{path}: not valid TOML: {error}") from None
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path}: not valid TOML: not UTF-8 at byte {error.start}") from None
    for dotted, value in (overrides or {}).items():
        section, _, key = dotted.partition(".")
        table = tree.setdefault(section, {})
        if not isinstance(table, dict):
            raise ConfigError(f"{path}: {section} is {table!r}, expected a table [{section}]")
        table[key] = _list_or_scalar(value, section, key)
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(_one_line(error, path)) from None


def options() -> Iterator[tuple[str, Any, Any, str]]:
    """(dotted name, annotation, default, help) of every option, in order: what `--help` shows."""
    for section, outer in Config.model_fields.items():
        for key, inner in type(outer.default).model_fields.items():
            yield f"{section}.{key}", inner.annotation, inner.default, inner.description or ""


def _list_or_scalar(value: str, section: str, key: str) -> Any:
    default = getattr(getattr(Config(), section, None), key, None)
    if isinstance(default, tuple):
        return [part for part in value.split(",") if part]
    return value


def _one_line(error: ValidationError, path: str | Path | None) -> str:
    first = error.errors(include_url=False)[0]
    dotted = ".".join(str(part) for part in first["loc"] if not isinstance(part, int))
    where = f"{path}: " if path else ""
    if first["type"] == "extra_forbidden":
        known = [name for name, *_ in options()] + list(Config.model_fields)
        near = difflib.get_close_matches(dotted, known, n=1, cutoff=0.5)
        return f"{where}unknown option {dotted}" + (f"; did you mean {near[0]}?" if near else "")
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "model_type":
        message = f"expected a table [{dotted}]"
    got = "" if first["type"] == "value_error" else f" (got {first['input']!r})"
    return f"{where}{dotted}: {message}{got}" if dotted else f"{where}{message}"
