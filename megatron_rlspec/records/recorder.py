"""Write a run's records, events and sample texts to JSONL files, and read them.

A record is what a step writes to `metrics.jsonl`: one JSON object with the step's metrics.

`run/recording.py` makes the only `Recorder` of a run, on rank 0; any process may call `read_records`. Users and
`commands/report/` read these files. `docs/runs.md` lists the files, and `metric_names.toml` the keys of records.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import math
import os
import platform
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_rlspec import __version__, files, texts
from megatron_rlspec.types import Sample

if TYPE_CHECKING:
    from megatron_rlspec.records.sinks import Sink

Decode = Callable[[Sequence[int] | np.ndarray], str]  # token ids -> text
LARGEST_FILE = 1 << 31  # bytes; `read_records` refuses a larger file
# Packages whose versions can change a run's results; `versions` lists the installed ones.
VERSIONS = ("torch", "megatron-core", "transformer-engine", "sglang", "transformers")


class Recorder:
    """Writes the JSONL files of `run_dir`.

    If a run resumes at step n, pass it as `first_step`: the lines of step n and later are first dropped from records,
    samples and moves, so that no step is recorded twice. With 0, a new run, all their lines are dropped. Events stay.
    Steps count from 0.
    """

    def __init__(
        self,
        run_dir: str | Path,
        first_step: int = 0,
        open_sinks: Callable[[], Sequence[Sink]] = tuple,
    ) -> None:
        """Clean the files of `run_dir`, which is made if it does not exist. Raises FileError for a damaged file.

        `open_sinks` is called once the files hold nothing of `first_step` and later.
        """
        self.run_dir = Path(run_dir)
        self.run_dir.mkdir(parents=True, exist_ok=True)
        # A process that was killed during a `files.write` has left such files.
        for partial in self.run_dir.glob(".*.partial"):
            # A directory is an unfinished model, which `models/hf_files.py` replaces at the next export.
            if not partial.is_dir():
                partial.unlink()
        for name in ("metrics", "samples", "moves"):
            _keep_before(self.run_dir / f"{name}.jsonl", first_step)
        # All complete lines of these files stay. An unfinished last line is dropped: the next line would be appended to
        # it.
        for name in ("events", "process"):
            _keep_before(self.run_dir / f"{name}.jsonl", math.inf)
        self._sinks = open_sinks()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add the record of a step to `metrics.jsonl`, with null for NaN and infinity, and send it to the sinks.

        Values that are no numbers go to the file only. "step" and "time" are added, so `values` must not have these
        keys. Call it once for each step, with rising steps: readers take the last line for the newest step, and Weights
        & Biases ignores a step below the last one.
        """
        self._append("metrics", [{"step": step, "time": time.time(), **values}])
        numbers = {}
        for name, value in values.items():
            if isinstance(value, int | float):
                numbers[name] = value
        self.to_sinks(step, numbers)

    def to_sinks(self, step: int, values: Mapping[str, float]) -> None:
        """Send numbers of a step to the sinks of the section [log] only."""
        for sink in self._sinks:
            sink.write(step, values)

    def event(self, kind: str, message: str, **fields: Any) -> None:
        """Print one line on stderr, and add the event to `events.jsonl`. Control characters are escaped.

        kind    what the event is about, in one word: "resume", "reward", "engine", ...
        fields  further values for the file, of JSON types; not printed
        """
        message = texts.printable(message)
        files.tell(f"[{kind}] {message}", sys.stderr)
        self._append("events", [{"time": time.time(), "kind": kind, "message": message, **fields}])

    def samples(self, step: int, samples: Sequence[Sample], decode: Decode) -> None:
        """Add samples, whose `text` must be set, to `samples.jsonl`, and send them to the sinks.

        `decode` is called on beginnings of each response (`pieces`). A row's `pieces` are the response's text in parts
        [text, whether its tokens are accepted drafts]. The keys "prompt", "response", "label", "reward" and "status"
        are also columns in `sinks.py`.
        """
        rows = []
        for sample in samples:
            row: dict[str, Any] = {
                "step": step,
                "prompt": sample.prompt.text,
                "response": sample.text,
                "label": sample.prompt.label,
                "reward": sample.reward,
                "status": sample.status,
                "accepted": list(sample.accepted),
                "tokens": len(sample.response),
                "pieces": pieces(sample, decode),
            }
            if "reward_parts" in sample.metadata:
                row["reward_parts"] = sample.metadata["reward_parts"]
            # Set by `tasks/rewards.py` if the reward failed. The sample then has the reward 0, which would look like a
            # true reward.
            error = sample.metadata.get("reward_error")
            if error is not None:
                row |= {"reward": None, "reward_error": error}
            rows.append(row)
        self._append("samples", rows)
        for sink in self._sinks:
            sink.samples(step, rows)

    def started(self, step: int) -> None:
        """Add to `process.jsonl` how the run was started: command line, ranks, versions, and its first step."""
        row = {
            "time": time.time(),
            "step": step,
            "command": shlex.join(["rlspec", *sys.argv[1:]]),
            "ranks": int(os.environ.get("WORLD_SIZE", "1")),
            "versions": versions(),
        }
        self._append("process", [row])

    def moves(self, step: int, record: Mapping[str, Any]) -> None:
        """Add the moves of one rollout to `moves.jsonl`: see `extensions/migration/plans/record.py`."""
        self._append("moves", [{"step": step, **record}])

    def _append(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add all rows as lines to the file NAME.jsonl, or none if a write fails, as on a full disk. Raises OSError.

        There is no lock. If a write fails, lines that another thread adds to this file meanwhile may be cut off, too.
        """
        path = self.run_dir / f"{name}.jsonl"
        lines = [json.dumps(_finite(row), allow_nan=False) + "\n" for row in rows]
        content = "".join(lines).encode()
        # Unbuffered, so that a failing write raises here. One call of `write` may write a part of the content only.
        with path.open("ab", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            try:
                while content:
                    content = content[file.write(content) :]
            except OSError as error:
                os.truncate(path, size)
                raise OSError(error.errno, error.strerror, str(path)) from None

    def close(self) -> None:
        """Close the sinks. The files are open only while lines are added."""
        for sink in self._sinks:
            sink.close()


def versions() -> dict[str, str]:
    """Return the versions of this package, of Python and of the installed packages of `VERSIONS`."""
    installed = {"rlspec": __version__, "python": platform.python_version()}
    for name in VERSIONS:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return installed


def _finite(value: Any) -> Any:
    """Return a copy of a value for JSON, with None for NaN and infinities: JSON has no such numbers.

    Numpy's float32 and integers stay as they are, and json.dumps refuses them: callers pass plain numbers.
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return value


def pieces(sample: Sample, decode: Decode) -> list[tuple[str, bool]]:
    """Split the response's text where accepted drafts begin and end; return [(text, whether it was drafted)].

    All texts together are the decoded response. A character with bytes on both sides of a split is in the later text.
    No text is empty. `decode` is called for every split, on the response from its start.
    """
    tokens = sample.response
    # Pieces alternate: not drafted, drafted, not drafted, ... Some are empty, and are left out.
    cuts = [0, *itertools.chain(*sample.accepted_spans), len(tokens)]
    texts_and_kinds = []
    so_far = ""
    for i, (first, last) in enumerate(itertools.pairwise(cuts)):
        # from the start: a token's text can depend on the tokens before it
        text = decode(tokens[:last])
        if last < len(tokens):
            # A replacement character at the end stands for a part of a character. The other bytes follow, so the next
            # piece gets the character.
            text = text.rstrip("\N{REPLACEMENT CHARACTER}")
        if last > first and len(text) > len(so_far):
            is_drafted = i % 2 == 1
            texts_and_kinds.append((text[len(so_far) :], is_drafted))
            so_far = text
    return texts_and_kinds


def _keep_before(path: Path, step: float) -> None:
    """Drop the lines of `step` and later, and an unfinished last line that a killed run left. Raises FileError.

    Lines without a step count as step 0. The file is replaced as a whole, so a crash leaves the old or the new file. If
    there is no file, nothing happens.
    """
    if not path.exists():
        return
    lines = []
    for record in read_records(path):
        if record.get("step", 0) < step:
            lines.append(json.dumps(record) + "\n")
    files.write(path, "".join(lines))


def read_records(path: str | Path) -> list[dict[str, Any]]:
    """Return the objects of a JSONL file, one for each line; [] if there is no file.

    An unfinished last line, which a killed run can leave, is left out. Numbers that were NaN or infinite are None.
    Raises FileError for a file that is too large, and for any other line that is no JSON object.
    """
    path = Path(path)
    if not path.exists():
        return []
    lines = files.read_text(path, LARGEST_FILE).split("\n")
    records: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        try:
            record = files.parse_json(line, f"{path}:{number}")
        except files.FileError:
            if number == len(lines):
                break  # what follows the last newline: nothing, or an unfinished line
            raise
        if not isinstance(record, dict):
            raise files.FileError(f"{path}:{number}: not a JSON object")
        records.append(record)
    return records
