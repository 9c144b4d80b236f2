"""What a report reads of a run directory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rlspec import files
from megatron_rlspec.config import Config
from megatron_rlspec.records.recorder import read_records

Record = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """The records of a run; docs/runs.md lists the fields.

    name      the last two parts of the run directory's path
    steps     metrics.jsonl
    events    events.jsonl
    samples   samples.jsonl
    starts    lines of process.jsonl, which say how the run was started
    config    config.json; {} without the file
    """

    name: str
    steps: list[Record]
    events: list[Record]
    samples: list[Record]
    starts: list[Record]
    config: Record

    def changed_options(self) -> list[tuple[str, str, str]]:
        """Return (option, value, default) of every option that is not at its default."""
        defaults = options_of(Config().model_dump(mode="json"))
        changed = []
        for name, value in options_of(self.config).items():
            default = defaults.get(name, "")
            if value != default:
                changed.append((name, value, default))
        return changed


def options_of(config: Mapping[str, Any]) -> dict[str, str]:
    """Return `section.key` -> value as text, of nested tables. Lists are written with ", " between their parts."""
    options: dict[str, str] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            for inner, text in options_of(value).items():
                options[f"{key}.{inner}"] = text
        elif isinstance(value, list):
            options[key] = ", ".join(map(str, value))
        else:
            options[key] = str(value)
    return options


def read_run(directory: Path) -> Run:
    """Read a run directory. Raises FileError for files that cannot be read."""
    config = directory / "config.json"
    processes = read_records(directory / "process.jsonl")
    return Run(
        name="/".join(directory.resolve().parts[-2:]),
        steps=read_records(directory / "metrics.jsonl"),
        events=read_records(directory / "events.jsonl"),
        samples=read_records(directory / "samples.jsonl"),
        # earlier versions also wrote how a process ended
        starts=[process for process in processes if "command" in process],
        config=files.read_json(config) if config.exists() else {},
    )
