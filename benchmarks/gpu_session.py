"""Measure on one GPU what cannot be shown without one, the most useful first, beside what was expected before.

    python benchmarks/gpu_session.py --session a --out results
    python benchmarks/gpu_session.py --session b --policy DIR --out results-b

Session a: costs of rounds and of training steps, at the shape of MiMo-7B. Session b: whole RL steps of a small model
that is widened without changing what it computes (gpu/widen.py). Each takes about 10 minutes. DIR holds the policy with
its drafter: a Hugging Face directory, or what tools/smollm2_drafter.py made. Without --policy it is the quickstart's
random model.

Each part runs in a process of its own. Its figures are lines of results/session.jsonl as soon as they are measured, so
a machine that goes away leaves what it had measured by then. The same command with the same --out goes on with the
parts that are missing. results/logs has the output of parts and engines, results/table.txt the table, and
results/round_costs.json the costs of rounds. A part that fails, or takes longer than its limit, is one line of the
result; the others go on. Please send the folder back (docs/gpu.md). It needs no network. --cpu runs the same code on
tiny models, to test it; its figures mean nothing.

--list shows the parts. This file decides; `gpu/` has the parts, their sizes and the estimates.
"""

from __future__ import annotations

import argparse
import contextlib
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

from gpu import serving
from gpu.estimates import Row, beside, shown
from gpu.plan import PARTS, START, Plan, planned, to_json
from rich.console import Console
from rich.table import Table

from megatron_rlspec import files
from megatron_rlspec.engine import EngineError

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
        """Return which of the parts have not ended well, in order, and the parts that write what they need."""
        left = {part for part in parts if self.ends.get(part, {}).get("state") != "done"}
        needed = {PARTS[part].needs for part in left}
        return [part for part in PARTS if part in left | needed]


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
    """End what the part started."""
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
    broken = set()  # parts that have not written what others need
    engines = serving.Serving(plan, folder, record.path)
    with contextlib.closing(engines):
        for name in record.missing(parts):
            left = deadline - time.monotonic()
            needed = time_of(name, engines.name) if plan.on_gpu else 0
            if left < needed:
                say(f"{name}: not begun; it takes about {needed} s, and {max(left, 0):.0f} s are left")
                broken.add(name)
                continue
            if PARTS[name].needs in broken:
                ended = failed(f"needs the part {PARTS[name].needs}")
            else:
                ended = _run(plan, record, engines, name, folder, deadline)
            if ended["state"] != "done":
                broken.add(name)
            record.add({"kind": "end", "part": name, **ended})
            say(f"{name}: {ended['state']} in {ended['seconds']:.0f} s. {ended['why']}")
            for row in figures_of(Record.read(record.path), plan, name):
                expected = row["estimate"] and f" (expected {row['estimate']}: {row['verdict']})"
                say(f"    {row['what']}: {shown(row)}{expected}")


def time_of(name: str, running: str) -> int:
    """Return about how many seconds a part takes on a GPU while these engines run."""
    part = PARTS[name]
    starts = part.engines and part.engines != running
    return part.seconds + (START if starts else 0)


def failed(why: str) -> Row:
    return {"state": "failed", "seconds": 0.0, "why": why}


def _run(plan: Plan, record: Record, engines: serving.Serving, name: str, folder: Path, deadline: float) -> Row:
    """Run one part, with its engines. Returns how it ended."""
    part = PARTS[name]
    try:
        engines.need(part.engines)
    except EngineError as error:
        return failed(str(error))
    left = deadline - time.monotonic()
    limit = min(part.limit, left) if plan.on_gpu else left
    command = [sys.executable, str(HERE / "gpu_part.py"), name, str(folder), str(record.path)]
    ended = run_part(command, record.path.parent / "logs" / f"{name}.log", limit)
    if ended["state"] != "done":
        engines.close()  # they may still generate for it
    return ended


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


def is_estimated(plan: Plan) -> bool:
    """Return whether the table of estimates is about this plan."""
    return to_json(plan) | {"engine": [], "policy": ""} == to_json(Plan())


def figures_of(record: Record, plan: Plan, part: str) -> list[Row]:
    """Return the figures of a part, each beside its estimate."""
    estimated = is_estimated(plan)
    return [beside(row, estimated=estimated) for row in record.figures.values() if row["part"] == part]


def table_of(record: Record, plan: Plan) -> Table:
    """Make the table: a row for each figure, and one for each part that did not end well."""
    table = Table("part", "what", "measured", "estimate", "compared", "note")
    parts = [part for part, _ in record.figures]
    for part in dict.fromkeys([*parts, *record.ends]):
        for row in figures_of(record, plan, part):
            note = "; ".join(filter(None, (row["note"], row["origin"] and f"estimate: {row['origin']}")))
            table.add_row(part, row["what"], shown(row), row["estimate"], row["verdict"], note)
        ended: Mapping[str, Any] = record.ends.get(part, {"state": "done"})
        if ended["state"] != "done":
            table.add_row(part, "", ended["state"], "", "", ended["why"])
    return table


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line. Ends with exit status 2 and one line for a mistake."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--session", choices=("a", "b"), default="a", help="(default: a)")
    p.add_argument("--minutes", type=float, default=10, help="time for all parts (default: 10)")
    p.add_argument("--out", type=Path, metavar="DIR", help="where the results are written, or completed")
    p.add_argument("--parts", default="", help="some parts of the session, with commas; their order is fixed")
    p.add_argument("--list", action="store_true", help="show the parts and end")
    p.add_argument("--policy", type=Path, metavar="DIR", help="the policy of session b, with its drafter")
    p.add_argument("--layers", type=int, default=0, help="layers of the model of session a (default: 36)")
    p.add_argument("--engine", default="", metavar="OPTIONS", help="SGLang's own, as '--attention-backend triton'")
    p.add_argument("--folder", type=Path, help="where models (up to 19 GB) are written for the run; default: TMPDIR")
    p.add_argument("--cpu", action="store_true", help="the same code on a CPU with a tiny model")
    args = p.parse_args(argv)
    known = [name for name, part in PARTS.items() if part.session == args.session]
    asked = [part for part in args.parts.split(",") if part] or known
    if args.list:
        return args
    if not args.out:
        p.error("--out DIR is needed: figures are written there as they come")
    if set(asked) - set(known):
        p.error(f"--parts {args.parts}: expected some of {','.join(known)}")
    if args.minutes <= 0:
        p.error(f"--minutes {args.minutes:g}: expected a positive number")
    if args.layers < 0:
        p.error(f"--layers {args.layers}: expected a positive number")
    if args.policy and not args.policy.is_dir():
        p.error(f"--policy {args.policy}: no such directory")
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
            print(f"{part.session} {name:10} about {part.seconds:3} s  {part.answers}")
        return 0
    policy = str(args.policy.resolve()) if args.policy else ""
    plan = planned(cpu=args.cpu, layers=args.layers, policy=policy, engine=shlex.split(args.engine))
    os.environ |= serving.key()
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
    left = [part for part in record.missing(args.parts) if part in args.parts]
    if interrupted or left:
        print(f"gpu_session: not done: {', '.join(left)}; the same command goes on with them", file=sys.stderr)
    return 130 if interrupted else int(bool(left) or any(row["state"] == "failed" for row in record.figures.values()))


if __name__ == "__main__":
    sys.exit(main())
