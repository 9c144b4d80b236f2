"""Show the progress of a run that goes on elsewhere: in another terminal, or on a host that shares its directory."""

from __future__ import annotations

import json
import math
import os
import stat
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from megatron_rlspec import arguments, files
from megatron_rlspec.records.live import View
from megatron_rlspec.records.metrics import RecordError

READ_MOST = 1 << 26  # bytes of one look at a file
KEPT = 64  # bytes before the place that was read last, by which a file is known to be the same
QUIET = 60.0  # seconds without a record after which the panel says so
EVENTS = 4
MOST_STEPS = 1 << 40
MOST_SECONDS = 1e11  # of a time in a record, 3,000 years


class Lines:
    """The records that a JSONL file gains. A file that was cut, replaced or rotated is read from its begin again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.anew = False  # whether the newest look began anew
        self._place = 0
        self._before = b""

    def read(self) -> list[dict[str, Any]]:
        """Return the records since the last look; none without a file. Raises RecordError.

        A last line without an end is left for a later look.
        """
        self.anew = False
        try:
            handle = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe without a writer must not block
            with open(handle, "rb") as file:
                if not stat.S_ISREG(mode := os.fstat(handle).st_mode):
                    raise RecordError(f"{self.path}: expected a regular file, found a {files.kind(mode)}")
                file.seek(self._place - len(self._before))
                self.anew = file.read(len(self._before)) != self._before
                if self.anew:
                    self._place = file.seek(0)
                content = file.read(READ_MOST)
        except FileNotFoundError:
            return []
        content = content[: content.rfind(b"\n") + 1]
        self._place += len(content)
        self._before = content[-KEPT:] if content or self.anew else self._before
        return [self._record(line) for line in content.splitlines()]

    def _record(self, line: bytes) -> dict[str, Any]:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if not isinstance(record, dict):
            raise RecordError(f"{self.path}: expected a JSON object in each line, got {line[:60]!r}")
        return record


class Watch:
    """One run directory, and what of it was shown."""

    def __init__(self, run_dir: Path, console: Console) -> None:
        self.run_dir = run_dir
        self.steps = Lines(run_dir / "metrics.jsonl")
        self.events = Lines(run_dir / "events.jsonl")
        self.process = Lines(run_dir / "process.jsonl")
        self.ended = False
        self.latest: deque[str] = deque(maxlen=EVENTS)
        self.view = View(0, 0, self.latest, console)
        self.known: set[tuple[int, float]] = set()  # (step, time) of records that were shown
        self.newest: dict[str, Any] = {}

    def look(self) -> bool:
        """Show what is new. Returns whether the run has ended. Raises RecordError and FileError."""
        for row in self.process.read():  # before the steps: after an end no step follows
            self.ended = row.get("kind") == "end"
        for event in self.events.read():
            self.latest.append(f"[{event.get('kind')}] {event.get('message')}")
        records = [self._checked(record) for record in self.steps.read()]
        if self.steps.anew:
            self.view.history.clear()
        if records:
            self._show(records)
        elif self.newest:
            self._say_quiet()
        return self.ended or (not self.process.path.exists() and self._total() == self.newest.get("step", -2) + 1)

    def _show(self, records: list[dict[str, Any]]) -> None:
        """Draw the panel once; or print a line for each record that was not printed before a resume rewrote it."""
        self.newest = records[-1]
        self.view.total = self._total()
        if self.view.live is not None:
            self.view.history.extend(records)
            self.view.show(self.newest["step"], self._left())
            return
        for record in records:
            identity = record["step"], record.get("time", 0.0)
            if identity not in self.known:
                self.known.add(identity)
                self.view.update(record["step"], record)

    def _checked(self, record: dict[str, Any]) -> dict[str, Any]:
        step = record.get("step")
        if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < MOST_STEPS:
            raise RecordError(f"{self.steps.path}: expected an object with a number `step` in each line")
        numbers = {key: _float(value) for key, value in record.items() if isinstance(value, int | float)}
        times = {key for key, value in numbers.items() if _is_time(key) and not 0 <= value < MOST_SECONDS}
        return {**{key: value for key, value in numbers.items() if key not in times}, "step": step}

    def _total(self) -> int:
        """Return the steps of the whole run; those so far if config.json does not say."""
        path = self.run_dir / "config.json"
        config = files.read_json(path) if path.exists() else {}
        name = "train" if any(key.startswith("rollout/") for key in self.newest) else "sft"
        section = config.get(name) if isinstance(config, dict) else None
        steps = section.get("steps") if isinstance(section, dict) else None
        known = steps if isinstance(steps, int) and steps < MOST_STEPS else 0
        return max(known, self.newest.get("step", -1) + 1)

    def _left(self) -> float:
        """Return the seconds that are left at the pace of the steps shown."""
        past = [record for record in self.view.history if record.get("time")]
        first = past[0] if past else self.newest
        steps = self.newest["step"] - first["step"]
        pace = (self.newest.get("time", 0.0) - first.get("time", 0.0)) / steps if steps > 0 else 0.0
        return max(pace, 0.0) * (self.view.total - self.newest["step"] - 1)

    def _say_quiet(self) -> None:
        age = time.time() - self.newest.get("time", time.time())
        if self.view.live is not None and age > QUIET:
            self.view.show(self.newest["step"], self._left(), f"last record {round(age / 60)} min ago")


def _float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # an integer that is no float
        return math.inf


def _is_time(key: str) -> bool:
    return key == "time" or key.startswith("seconds_")


def parser() -> arguments.Parser:
    p = arguments.Parser(prog="rlspec watch", description=__doc__, example="rlspec watch runs/mine")
    p.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    p.add_argument(
        "--every", type=arguments.number(0.05, 3600), default=2.0, metavar="SECONDS", help="between two looks (2)"
    )
    return p


def main(argv: list[str] | None = None, sleep: Callable[[float], object] = time.sleep) -> int:
    """Show the run until it ends, or until Ctrl-C. Raises RecordError and FileError."""
    own = parser()
    options = own.parse_args(argv)
    run_dir = options.run_dir
    if run_dir.exists() and not run_dir.is_dir():
        own.error(f"{run_dir}: it is a file; expected a run directory")
    if not (run_dir / "metrics.jsonl").exists():
        what = "no record of a step" if run_dir.exists() else "no such directory"
        print(f"rlspec watch: {run_dir}: {what} yet; waiting (Ctrl-C ends this)", file=sys.stderr, flush=True)
    watch = Watch(run_dir, Console())
    with watch.view:
        while not watch.look():
            sleep(options.every)
    print(f"{run_dir}: the run has ended after {watch.newest.get('step', -1) + 1} steps")
    return 0
