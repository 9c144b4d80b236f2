"""One record a step, to JSONL and TensorBoard; loud events; wall-clock shares. Written by rank 0 only."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_rlspec.types import Sample


class RecordError(ValueError):
    """A run's records that cannot be read, told in one line with file and line number."""


def write_atomically(path: str | Path, content: str | bytes) -> None:
    """All of the file or nothing of it: a reader never sees half."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(content.encode() if isinstance(content, str) else content)
    os.replace(temporary, path)


class Clock:
    """Seconds per named part since the last `drain`. Parts do not nest."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[part] = self._seconds.get(part, 0.0) + time.perf_counter() - start

    def drain(self) -> dict[str, float]:
        seconds, self._seconds = self._seconds, {}
        return {f"seconds_{part}": value for part, value in seconds.items()}


class Recorder:
    """`metrics.jsonl` (one object a step), `events.jsonl` (what a person must see) and TensorBoard under `run_dir`.

    On resume at step n, records of step n and later are dropped first, so that a step is never recorded twice.
    """

    def __init__(self, run_dir: str | Path, first_step: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.run_dir = Path(run_dir)
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self._metrics = self.run_dir / "metrics.jsonl"
        kept = [line for line in read_records(self._metrics) if line["step"] < first_step]
        write_atomically(self._metrics, "".join(json.dumps(line) + "\n" for line in kept))
        self.latest: deque[str] = deque(maxlen=4)  # events, for whoever shows them
        self._board = SummaryWriter(str(self.run_dir / "tensorboard"), purge_step=first_step or None)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        record = {"step": step, "time": time.time(), **values}
        with self._metrics.open("a") as file:
            file.write(json.dumps(record) + "\n")
        for name, value in values.items():
            if isinstance(value, int | float):
                self._board.add_scalar(name, value, step)

    def event(self, kind: str, message: str, **fields: Any) -> None:
        """Say it on the terminal and keep it: these lines are what the report lists as events."""
        print(f"[{kind}] {message}", file=sys.stderr, flush=True)
        self.latest.append(f"[{kind}] {message}")
        with (self.run_dir / "events.jsonl").open("a") as file:
            file.write(json.dumps({"time": time.time(), "kind": kind, "message": message, **fields}) + "\n")

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Texts to read, with what the drafter got right, to `samples.jsonl`."""
        with (self.run_dir / "samples.jsonl").open("a") as file:
            for s in samples:
                row = {"step": step, "prompt": s.prompt.text, "response": s.text, "label": s.prompt.label}
                row |= {"reward": s.reward, "status": s.status, "accepted": list(s.accepted)}
                file.write(json.dumps(row) + "\n")

    def close(self) -> None:
        self._board.close()


def read_records(path: str | Path) -> list[dict[str, Any]]:
    """The records of a JSONL file; a torn last line, as a killed run leaves it, is dropped."""
    path = Path(path)
    if not path.exists():
        return []
    lines = path.read_text().splitlines()
    records = []
    for number, line in enumerate(lines, 1):
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            if number < len(lines):
                raise RecordError(f"{path}:{number}: not a JSON object") from None
    return records
