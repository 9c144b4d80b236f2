"""What an extension adds to an engine: routes, scheduler commands, hooks, and a look at each decode round.

`rlspec serve --extensions NAME` names extensions. SGLang spawns its processes, so the names travel in `Settings`, and
each process imports `megatron_rlspec.extensions.NAME.sglang.serving`. Without the option no process imports any.
"""

from __future__ import annotations

import importlib
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

from megatron_rlspec.rollout.sglang.schemas import Strict

Route = tuple[Callable[[Any], Awaitable[Any]], type[Strict]]
Command = Callable[..., dict[str, Any]]
Hook = tuple[str, Callable, str]
_FOLDER = Path(__file__).parents[2] / "extensions"
_MODULE = "sglang.serving"  # within an extension


class Extension(Protocol):
    """A module with these functions. `routes` runs in the HTTP process, the others in every scheduler process."""

    def routes(self) -> Mapping[str, Route]:
        """Return handlers by their path below /rlspec, each with the schema of its body or query."""

    def commands(self) -> Mapping[str, Command]:
        """Return scheduler commands, called as `command(settings, scheduler, **body)`, by name."""

    def hooks(self) -> Iterator[Hook]:
        """Yield functions of SGLang that the extension wraps: (dotted name, hook, "BEFORE", "AFTER" or "AROUND")."""

    def before_round(self, requests: Sequence[Any]) -> list[int]:
        """Return the indices of those requests of a decode round whose drafter must have read all their tokens."""


def known() -> list[str]:
    """Return the names of the extensions that engines can load."""
    return sorted(
        path.parents[1].name for path in _FOLDER.glob(f"*/{_MODULE.replace('.', '/')}.py")
    )


def loaded(names: Sequence[str]) -> list[Extension]:
    """Import extensions. Raises ImportError."""
    return [
        cast(Extension, importlib.import_module(f"megatron_rlspec.extensions.{name}.{_MODULE}"))
        for name in names
    ]


def commands(names: Sequence[str]) -> dict[str, Command]:
    """Return the scheduler commands of extensions."""
    return {
        name: command
        for extension in loaded(names)
        for name, command in extension.commands().items()
    }
