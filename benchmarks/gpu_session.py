"""Measure on one GPU what cannot be shown without one, the most useful first, beside what was estimated before.

    python benchmarks/gpu_session.py --minutes 28 --out results

Each part runs in a process of its own. Its figures are lines of results/session.jsonl as soon as they are measured, so
a machine that goes away leaves what it had measured by then. The same command with the same --out goes on with the
parts that are missing. results/logs has the output of parts and engines, results/table.txt the table. A part that
fails, or takes longer than its limit, is one line of the result; the others go on. Please send the folder back
(docs/gpu.md). It needs no network. --cpu runs the same code on a tiny model, to test it; its figures mean nothing.

--list shows the parts. This file decides; `gpu/` has the parts, their sizes and the estimates.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu.estimates import Row, beside, shown
from gpu.plan import PARTS, SERVING, Plan, planned, to_json
from rich.console import Console
from rich.table import Table

from megatron_rlspec import files

HERE = Path(__file__).parent
PACKAGES = (
    "torch",
    "sglang",
    "sglang-kernel",
    "flashinfer-python",
    "megatron-core",
    "transformer-engine",
    "transformers",
)
SETTLE = 5.0  # seconds in which the engines of a part that was killed end, and its memory is free again


@dataclass
class Record:
    """A session's file: its plan, and by part the figures and how it ended. Of equal figures the last one counts."""

    path: Path
    plan: dict[str, Any] = field(default_factory=dict)
    ends: dict[str, Row] = field(default_factory=dict)
    figures: dict[tuple[str, str], Row] = field(default_factory=dict)
    conditions: list[Row] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> Record:
        """Read a file that may end in the middle of a line, or not exist."""
        record = cls(path)
        text = path.read_text() if path.exists() else ""
        if text and not text.endswith("\n"):
            with path.open("a") as file:
                file.write("\n")  # the next line begins as one
        for line in text.splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                continue  # the last line of a machine that went away
            if row["kind"] == "begin":
                record.plan = row["plan"]
                record.conditions.append(row["conditions"])
            elif row["kind"] == "figure":
                record.figures[row["part"], row["what"]] = row
            else:
                record.ends[row["part"]] = row
        return record

    def add(self, row: Row) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def missing(self, parts: Sequence[str]) -> list[str]:
        """Return which of the parts have not ended well, in order; with them the model, if one of them serves it."""
        left = [part for part in parts if self.ends.get(part, {}).get("state") != "done"]
        return ["model", *(part for part in left if part != "model")] if {*SERVING} & {*left} else left


def run_part(command: Sequence[str], log: Path, limit: float) -> Row:
    """Run one part in a process of its own, and kill it at its limit of `limit` seconds. Returns how it ended."""
    began = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
        try:
            code: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
    ended: Row = {"state": "done", "seconds": round(time.monotonic() - began, 1), "why": ""}
    if code is None:
        return ended | {"state": "out of time", "why": f"took longer than {limit:.0f} s"}
    return ended | {"state": "failed", "why": _last_line(log, f"exit code {code}")} if code else ended


def _end(process: subprocess.Popen) -> None:
    """End what the part started. Engines notice by themselves that their launcher is gone (`--stop-with-parent`)."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def _last_line(log: Path, otherwise: str) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    told = [line for line in lines if "rror:" in line or "rror(" in line]
    return f"{(told or lines)[-1][:400]} ({otherwise})" if lines else otherwise


def run(
    plan: Plan, record: Record, parts: Sequence[str], folder: Path, seconds: float, say: Callable[[str], None]
) -> None:
    """Run the parts that are missing, in order, for at most `seconds`.

    A part whose time is not left does not begin; a later one that takes less does.
    """
    deadline = time.monotonic() + seconds
    (folder / "plan.json").write_text(json.dumps(to_json(plan)))
    broken = False
    for name in record.missing(parts):
        part = PARTS[name]
        left = deadline - time.monotonic()
        if left < (part.seconds if plan.on_gpu else 0):
            say(f"{name}: not begun; it takes about {part.seconds} s, and {max(left, 0):.0f} s are left")
            broken = broken or name == "model"
            continue
        if name in SERVING and broken:
            ended = {"state": "failed", "seconds": 0.0, "why": "needs the part model"}
        else:
            limit = min(part.limit, left) if plan.on_gpu else left
            command = [sys.executable, str(HERE / "gpu_part.py"), name, str(folder), str(record.path)]
            ended = run_part(command, record.path.parent / "logs" / f"{name}.log", limit)
            broken = broken or (name == "model" and ended["state"] != "done")
            if ended["state"] == "out of time" and plan.on_gpu:
                time.sleep(SETTLE)
        record.add({"kind": "end", "part": name, **ended})
        say(f"{name}: {ended['state']} in {ended['seconds']:.0f} s. {ended['why']}")


def conditions(plan: Plan, arguments: Sequence[str]) -> Row:
    """Describe the machine and the versions, without a CUDA context in this process."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "missing"
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "gpus": gpus() if plan.on_gpu else [],
        "cpu": f"{platform.processor() or platform.machine()}, {len(os.sched_getaffinity(0))} cores usable",
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "versions": versions,
        "revision": _output("git", "-C", str(HERE), "describe", "--always", "--dirty", "--abbrev=12") or "unknown",
        "arguments": list(arguments),
    }


def gpus() -> list[str]:
    """Return name, memory and driver of each GPU, as nvidia-smi says; [] without one."""
    return _output("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader").splitlines()


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def table_of(record: Record, plan: Plan) -> Table:
    """Make the table: a row for each figure, and one for each part that did not end well."""
    table = Table("part", "what", "measured", "estimate", "compared", "note")
    estimated = to_json(plan) | {"engine": []} == to_json(Plan())
    for name in PARTS:
        for row in record.figures.values():
            if row["part"] == name:
                full = beside(row, estimated=estimated)
                note = "; ".join(filter(None, (full["note"], full["origin"] and f"estimate: {full['origin']}")))
                table.add_row(name, row["what"], shown(row), full["estimate"], full["verdict"], note)
        ended: Mapping[str, Any] = record.ends.get(name, {"state": "done"})
        if ended["state"] != "done":
            table.add_row(name, "", ended["state"], "", "", ended["why"])
    return table


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line. Ends with exit status 2 and one line for a mistake."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--minutes", type=float, default=28, help="time for all parts (default: 28)")
    p.add_argument("--out", type=Path, metavar="DIR", help="where the results are written, or completed")
    p.add_argument("--parts", default=",".join(PARTS), help="some parts, with commas; their order is fixed")
    p.add_argument("--list", action="store_true", help="show the parts and end")
    p.add_argument("--model", default="", metavar="DIR", help="a checkpoint with an MTP layer, in place of a made one")
    p.add_argument("--layers", type=int, default=0, help="layers of the made model (default: 18)")
    p.add_argument("--engine", default="", metavar="OPTIONS", help="SGLang's own, as '--attention-backend triton'")
    p.add_argument("--folder", type=Path, help="where the made model (9 GB) is written for the run; default: TMPDIR")
    p.add_argument("--cpu", action="store_true", help="the same code on a CPU with a tiny model")
    args = p.parse_args(argv)
    asked = [part for part in args.parts.split(",") if part]
    if args.list:
        return args
    if not args.out:
        p.error("--out DIR is needed: figures are written there as they come")
    if not asked or set(asked) - set(PARTS):
        p.error(f"--parts {args.parts}: expected some of {','.join(PARTS)}")
    if args.minutes <= 0:
        p.error(f"--minutes {args.minutes:g}: expected a positive number")
    if args.layers < 0 or (args.layers and args.model):
        p.error(f"--layers {args.layers}: expected a positive number, and no --model")
    if args.model and not (Path(args.model) / "config.json").is_file():
        p.error(f"--model {args.model}: no config.json there")
    if args.folder and not args.folder.is_dir():
        p.error(f"--folder {args.folder}: no such directory")
    if not args.cpu and not gpus():
        p.error("nvidia-smi finds no GPU here; --cpu runs the same code on a tiny model")
    try:
        (args.out / "logs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        p.error(f"--out {args.out}: {files.reason(error)}")
    args.parts = [part for part in PARTS if part in asked]
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts. Exit status: 0 if all of them are done, 1 if one is not, 2 for a mistake, 130 for Ctrl-C."""
    args = parsed(argv)
    if args.list:
        for name, part in PARTS.items():
            print(f"{name:10} about {part.seconds:3} s  {part.answers}")
        return 0
    model = str(Path(args.model).resolve()) if args.model else ""
    plan = planned(cpu=args.cpu, layers=args.layers, model=model, engine=shlex.split(args.engine))
    record = Record.read(args.out / "session.jsonl")
    if record.plan and record.plan != to_json(plan):
        others = ", ".join(name for name, value in to_json(plan).items() if record.plan.get(name) != value)
        print(
            f"gpu_session: --out {args.out} has results of other options ({others}); expected another", file=sys.stderr
        )
        return 2
    console = Console(width=None if sys.stdout.isatty() else 180, markup=False, highlight=False)
    told = conditions(plan, sys.argv[1:] if argv is None else argv)
    record.add({"kind": "begin", "plan": to_json(plan), "conditions": told})
    interrupted = False
    with tempfile.TemporaryDirectory(prefix="gpu-session-", dir=args.folder) as folder:
        try:
            run(plan, record, args.parts, Path(folder), 60 * args.minutes, console.print)
        except KeyboardInterrupt:
            interrupted = True
    record = Record.read(record.path)
    with (args.out / "table.txt").open("w") as file:
        for output in (console, Console(file=file, width=220, markup=False, highlight=False)):
            output.print(table_of(record, plan))
            for name, value in told.items():
                output.print(f"{name}: {value}")
    left = [part for part in record.missing(args.parts) if part != "model" or part in args.parts]
    if interrupted or left:
        print(f"gpu_session: not done: {', '.join(left)}; the same command goes on with them", file=sys.stderr)
    return 130 if interrupted else int(bool(left) or any(row["state"] == "failed" for row in record.figures.values()))


if __name__ == "__main__":
    sys.exit(main())
