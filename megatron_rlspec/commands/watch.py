"""Show the progress of a run that goes on elsewhere: in another terminal, or on a host that shares its directory."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megatron_rlspec import arguments, files
from megatron_rlspec.records.live import line
from megatron_rlspec.records.metrics import RecordError, read_records
from megatron_rlspec.texts import printable


class Watch:
    """One run directory, and what of it was shown."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.steps = -1  # of the whole run, 0 if config.json does not say; -1: there is no record yet
        self.newest = -1
        self._sizes: dict[str, tuple[int, float]] = {}  # file -> its bytes and the time of its change, at the last look
        self._shown: set[tuple[int, float]] = set()  # (step, time): a resumed run writes its records anew
        self._events = 0

    def look(self) -> Iterator[str]:
        """Yield a line for each event and each step that is new. Raises RecordError and FileError."""
        events = self._read("events.jsonl")
        for event in events[self._events :]:
            yield printable(f"[{event.get('kind')}] {event.get('message')}")
        self._events = max(self._events, len(events))
        for record in self._read("metrics.jsonl"):
            step, values = self._checked(record)
            if self.steps < 0:
                self.steps = self._total(values)
            if (step, values.get("time", 0.0)) not in self._shown:
                self._shown.add((step, values.get("time", 0.0)))
                self.newest = step
                yield line(step, max(self.steps, step + 1), values)

    def ended(self) -> bool:
        """Return whether the run has ended in an orderly way."""
        process = read_records(self.run_dir / "process.jsonl")
        return bool(process) and process[-1].get("kind") == "end"

    def _read(self, name: str) -> list[dict[str, Any]]:
        """Return the records of a file that has changed since the last look; none of another one."""
        path = self.run_dir / name
        try:
            about = path.stat()
        except FileNotFoundError:
            return []
        if self._sizes.get(name) == (about.st_size, about.st_mtime):
            return []
        self._sizes[name] = about.st_size, about.st_mtime
        return read_records(path)

    def _checked(self, record: dict[str, Any]) -> tuple[int, dict[str, float]]:
        step = record.get("step")
        if not isinstance(step, int) or isinstance(step, bool) or step < 0:
            raise RecordError(f"{self.run_dir}/metrics.jsonl: expected an object with a number `step` in each line")
        numbers = {}
        for key, value in record.items():
            if isinstance(value, int | float):
                numbers[key] = float(value) if abs(value) < 1e300 else math.inf
        return step, numbers

    def _total(self, values: dict[str, float]) -> int:
        path = self.run_dir / "config.json"
        config = files.read_json(path) if path.exists() else {}
        name = "train" if any(key.startswith("rollout/") for key in values) else "sft"
        section = config.get(name) if isinstance(config, dict) else None
        steps = section.get("steps") if isinstance(section, dict) else None
        return steps if isinstance(steps, int) else 0


def parser() -> arguments.Parser:
    p = arguments.Parser(prog="rlspec watch", description=__doc__, example="rlspec watch runs/mine")
    p.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    p.add_argument(
        "--every", type=arguments.number(0.05, 3600), default=2.0, metavar="SECONDS", help="between two looks (2)"
    )
    return p


def main(argv: list[str] | None = None, sleep: Callable[[float], object] = time.sleep) -> int:
    """Print a line for each step until the run ends, or until Ctrl-C. Raises RecordError and FileError."""
    own = parser()
    options = own.parse_args(argv)
    run_dir = options.run_dir
    if run_dir.exists() and not run_dir.is_dir():
        own.error(f"{run_dir}: it is a file; expected a run directory")
    if not (run_dir / "metrics.jsonl").exists():
        what = "no record of a step" if run_dir.exists() else "no such directory"
        print(f"rlspec watch: {run_dir}: {what} yet; waiting (Ctrl-C ends this)", file=sys.stderr, flush=True)
    watch = Watch(run_dir)
    while True:
        ended = watch.ended()  # before the steps: after an end no step follows
        for shown in watch.look():
            print(shown, flush=True)
        if ended:
            print(f"{run_dir}: the run has ended after {watch.newest + 1} steps")
            return 0
        sleep(options.every)
