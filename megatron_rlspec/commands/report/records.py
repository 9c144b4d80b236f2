"""Read a run directory for a report: four JSONL files and config.json, as one `Run`.

`__init__.py` and `figures.py` compute from it what the page shows. `records/recorder.py` writes the JSONL files, and
`run/recording.py` config.json. `moves.jsonl` is not read here. A missing file reads as empty.
"""

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
    """The records of a run; docs/runs.md lists their keys. Lists have the order of the files' lines.

    name      the last two parts of the run directory's path
    steps     metrics.jsonl: one record a step, steps rising from 0; NaN and infinity are None. Keys:
              `records/metric_names.toml`
    events    events.jsonl: each has "kind", "message" and "time"; a resumed run may repeat events
    samples   samples.jsonl; "reward" is None where the reward failed
    starts    lines of process.jsonl, which say how the run was started: one a start, so a resumed run has several
    config    config.json: section -> option -> value; {} without the file
    """

    name: str
    steps: list[Record]
    events: list[Record]
    samples: list[Record]
    starts: list[Record]
    config: Record

    def changed_options(self) -> list[tuple[str, str, str]]:
        """Return (option, value, default), as text, of every option in config.json that is not at its default.

        An option that this version does not know has the default "". Without config.json: [].
        """
        defaults = options_of(Config().model_dump(mode="json"))
        changed = []
        for name, value in options_of(self.config).items():
            default = defaults.get(name, "")
            if value != default:
                changed.append((name, value, default))
        return changed


def options_of(config: Mapping[str, Any]) -> dict[str, str]:
    """Return `section.key` -> value as text, of nested tables. Lists are written with ", " between their parts.

    A table within a section gives `section.key.name` for each of its names; an empty table gives nothing.
    """
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
        # Earlier versions also wrote a line when a process ended: it has no "command", and is no start.
        starts=[process for process in processes if "command" in process],
        config=files.read_json(config) if config.exists() else {},
    )
