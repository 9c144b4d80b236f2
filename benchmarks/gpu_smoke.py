"""Measure on one GPU what cannot be shown without one, in about ten minutes, beside what was estimated before.

    python benchmarks/gpu_smoke.py --json gpu_smoke.json

makes a random model of MiMo-7B's shape (no network) and runs each part in a process of its own:

    model      writes the model that `decode` and `push` serve
    decode     tokens/s of a launched SGLang engine: plain, off, fixed steps, adaptive, interleaved; CUDA graphs
    push       GB/s of every transport that works with one card
    train      three steps of policy and drafter on one rank, and three of the policy alone
    attention  the drafter's attention at 9,216 and 32,768 tokens, forward and backward
    verify     position-keyed sampling of a batch's tokens, as after every round

A part that fails, or takes longer than its limit, is one line of the result; the others go on. What it had measured
stays. `--json` keeps everything with its conditions: please send that file back (docs/gpu.md). `--cpu` runs the same
code on a tiny model, to test it; its figures mean nothing.

This file decides and compares; `gpu_parts.py` runs.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

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
Row = dict[str, Any]


# ---- what to run --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """A model: MiMo-7B's, unless it says otherwise. `layers`: of the target; there is one drafter layer."""

    layers: int = 36
    hidden: int = 4096
    ffn: int = 11008
    heads: int = 32
    groups: int = 8
    vocab: int = 151680


@dataclass(frozen=True)
class Plan:
    """What the parts run. Lengths are in tokens.

    batches       requests that decode at the same time, one measurement each; every request draws `tokens` tokens
    repetitions   counted ones of each contestant, after one that is not
    steps         the engine's candidates; the largest is also a contestant by itself
    attention     (query heads, key/value heads, tokens of one sequence)
    verify        (requests, nodes of each); `filter_tokens`: also with top-p
    train_layers  layers of the trained policy: all 36 with optimizer need 137 GB
    push_rounds   pushes of each transport, the first one included
    engine        further options of SGLang, for all engines
    """

    device: str = "cuda"
    dtype: str = "bfloat16"
    shape: Shape = Shape()
    batches: tuple[int, ...] = (1, 64, 256)
    tokens: int = 256
    repetitions: int = 2
    steps: tuple[int, ...] = (0, 1, 2, 3, 5)
    fixed: tuple[int, ...] = (1, 2, 3)
    pool_tokens: int = 98304
    profile_seconds: int = 60
    push_rounds: int = 2
    train_layers: int = 8
    train_depth: int = 3
    train_sequences: int = 9
    train_length: int = 1024
    attention: tuple[tuple[int, int, int], ...] = ((16, 4, 9216), (16, 4, 32768))
    head_dim: int = 128
    verify: tuple[int, int] = (256, 4)
    repeats: int = 5
    engine: tuple[str, ...] = ()


LIMITS = {"model": 180, "decode": 600, "push": 300, "train": 240, "attention": 90, "verify": 120}  # seconds
NEEDS = {"decode": "model", "push": "model"}


def planned(*, cpu: bool = False, quick: bool = False, layers: int = 0, engine: Sequence[str] = ()) -> Plan:
    """Return what to run. `layers`: of the served model, and at most that many of the trained one.

    `engine`: further options of SGLang.
    """
    plan = Plan()
    if quick:
        plan = replace(plan, shape=Shape(layers=8), batches=(64,), repetitions=1, profile_seconds=20, train_layers=4)
    if cpu:
        plan = Plan(
            device="cpu",
            dtype="float32",
            shape=Shape(layers=2, hidden=32, ffn=96, heads=4, groups=2, vocab=512),
            batches=(4,),
            tokens=16,
            repetitions=1,
            steps=(0, 1, 3),
            fixed=(1, 3),
            pool_tokens=4096,
            profile_seconds=5,
            train_layers=2,
            train_sequences=2,
            train_length=32,
            attention=((4, 2, 96), (4, 2, 160)),
            head_dim=8,
            verify=(4, 4),
            repeats=2,
        )
    if layers:
        shape = replace(plan.shape, layers=layers)
        plan = replace(plan, shape=shape, train_layers=min(plan.train_layers, layers))
    return replace(plan, engine=tuple(engine))


def from_json(found: Mapping[str, Any]) -> Plan:
    """Return the plan that `asdict` and JSON have made a dictionary of lists of."""
    flat = {name: _tuples(value) for name, value in found.items() if name != "shape"}
    return Plan(**flat, shape=Shape(**found["shape"]))


def _tuples(value: Any) -> Any:
    return tuple(_tuples(one) for one in value) if isinstance(value, list) else value


# ---- what was estimated -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Estimate:
    """What was expected of a figure before anything had run on a GPU, and what it was derived from."""

    low: float
    high: float
    because: str

    def __str__(self) -> str:
        return f"{self.low:g}" if self.low == self.high else f"{self.low:g} to {self.high:g}"


_CPU_RATE = Estimate(0.43, 0.76, "rates on one CPU core: rank 0 copies and fingerprints there")
_LINEAR = "queries, keys, output and their gradients; no score matrix, counted on meta tensors"
# Of the default plan on an H100 with 80 GB. (part, what) -> estimate
ESTIMATES: dict[tuple[str, str], Estimate] = {
    ("decode", "graphs captured"): Estimate(663, 663, "13 sets, one for each candidate and pass, of 51 batch sizes"),
    ("decode", "capturing graphs"): Estimate(90, 150, "0.2 s a graph"),
    ("decode", "off / plain, batch 256"): Estimate(0.94, 1.0, "off copies its stash to the host every 64 rounds"),
    ("push", "http"): _CPU_RATE,
    ("push", "files"): _CPU_RATE,
    ("push", "group over gloo"): _CPU_RATE,
    ("attention", "forward, one sequence of 9,216: peak"): Estimate(0.12, 0.25, _LINEAR),
    ("attention", "backward, one sequence of 9,216: peak"): Estimate(0.17, 0.35, _LINEAR),
    ("attention", "forward, one sequence of 32,768: peak"): Estimate(0.4, 0.9, _LINEAR),
    ("attention", "backward, one sequence of 32,768: peak"): Estimate(0.6, 1.3, _LINEAR),
    ("verify", "temperature alone: a round"): Estimate(3, 5, "8 passes over 0.6 GB and two float64 logarithms"),
    ("verify", "temperature alone: peak beyond the logits"): Estimate(4, 5, "float64 noise of [1024, 151680]"),
    ("verify", "top-p: a round"): Estimate(20, 100, "a stable sort of every row"),
    ("verify", "top-p: peak beyond the logits"): Estimate(12, 12, "sorted values, 64-bit indices, cumulated sums"),
}


def verdict(value: float | None, expected: Estimate | None, tolerance: float = 0.1) -> str:
    """Compare a figure with its estimate. None as value: there was not enough memory for it."""
    if expected is None:
        return ""
    if value is None:
        return "did not fit"
    if expected.low * (1 - tolerance) <= value <= expected.high * (1 + tolerance):
        return "as estimated"
    if value > expected.high:
        return f"{value / expected.high:.2g} x the estimate"
    return f"{value / expected.low:.2g} x the estimate"


def beside(row: Row, *, estimated: bool) -> Row:
    """Return the row with its estimate. `estimated`: the plan is the one that the table above is about."""
    own = row.pop("estimate", None)
    expected = Estimate(*own) if own else ESTIMATES.get((row["part"], row["what"])) if estimated else None
    row |= {"estimate": None, "because": "", "verdict": ""}
    if expected is not None and row["state"] != "failed":
        value = row["value"] if row["state"] == "measured" else None
        row |= {"estimate": [expected.low, expected.high], "because": expected.because}
        row["verdict"] = verdict(value, expected)
    return row


_CAPTURED = re.compile(
    r"Capture (?P<name>[\w -]+?) \w+ graph end\..*?elapsed=(?P<s>[\d.]+) s, mem usage=(?P<gb>-?[\d.]+) GB"
)
_CAPTURES = re.compile(r"Capture [\w -]+? \w+ graph (?:begin|end)\..*?bs=\[(?P<sizes>[\d, ]*)\]")


def captures(log: str) -> tuple[int, float, float]:
    """Read in SGLang's log what capturing CUDA graphs took: (graphs of decode rounds, seconds, GB).

    Those of prefill are in the seconds and the memory only.
    """
    graphs = sum(len(found["sizes"].split(",")) for found in _CAPTURES.finditer(log) if found["sizes"])
    ends = list(_CAPTURED.finditer(log))
    return graphs, sum(float(found["s"]) for found in ends), sum(float(found["gb"]) for found in ends)


# ---- running ------------------------------------------------------------------------------------------------------


def run_part(
    name: str, command: Sequence[str], rows_file: Path, limit: float, settle: float = 5.0
) -> tuple[dict[str, Any], list[Row]]:
    """Run one part in a process of its own: how it ended, and the rows that it had written by then.

    At its limit of `limit` seconds the part is killed. Its engines end by themselves within `settle` seconds, and their
    memory is free for the next part.
    """
    began = time.monotonic()
    log = rows_file.with_suffix(".log")
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
    ended: dict[str, Any] = {"state": "done", "seconds": round(time.monotonic() - began, 1), "why": ""}
    if code is None:
        ended |= {"state": "out of time", "why": f"took longer than {limit:.0f} s"}
        time.sleep(settle)
    elif code:
        ended |= {"state": "failed", "why": _last_line(log, f"exit code {code}")}
    lines = rows_file.read_text().splitlines() if rows_file.exists() else []
    return ended, [{"part": name, **json.loads(line)} for line in lines if line.endswith("}")]


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


def run(plan: Plan, parts: Sequence[str], folder: Path, found: dict[str, Any]) -> Iterator[tuple[str, list[Row]]]:
    """Run the parts in turn, add what they found to `found`, and yield the rows of each."""
    estimated = plan == Plan(engine=plan.engine)
    (folder / "plan.json").write_text(json.dumps(asdict(plan)))
    for name in parts:
        need = NEEDS.get(name)
        if need and found["parts"][need]["state"] != "done":
            ended, rows = {"state": "failed", "seconds": 0.0, "why": f"needs the part {need}"}, []
        else:
            out = folder / f"{name}.jsonl"
            command = [sys.executable, str(HERE / "gpu_parts.py"), name, str(folder), str(out)]
            ended, rows = run_part(name, command, out, LIMITS[name])
        rows = [beside(row, estimated=estimated) for row in rows]
        found["parts"][name] = ended
        found["rows"] += rows
        yield name, rows


def conditions(plan: Plan, arguments: Sequence[str]) -> dict[str, Any]:
    """Describe the machine and the versions, without a CUDA context in this process."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "missing"
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "gpus": gpus() if plan.device == "cuda" else [],
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


# ---- the command --------------------------------------------------------------------------------------------------


def table_of(found: Mapping[str, Any]) -> Table:
    """Make the table: a row for each figure, and one for each part that did not end well."""
    table = Table("part", "what", "measured", "estimate", "compared", "note")
    for name, ended in found["parts"].items():
        for row in found["rows"]:
            if row["part"] == name:
                estimate = "" if row["estimate"] is None else str(Estimate(*row["estimate"], ""))
                table.add_row(name, row["what"], shown(row), estimate, row["verdict"], row["note"])
        if ended["state"] != "done":
            table.add_row(name, "", ended["state"], "", "", ended["why"])
    return table


def shown(row: Row) -> str:
    """Format what was measured."""
    return f"{row['value']:.4g} {row['unit']}".strip() if row["state"] == "measured" else row["state"]


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line. Ends with exit status 2 and one line for a mistake."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--json", type=Path, metavar="FILE", help="write everything to this file, after every part")
    p.add_argument("--parts", default=",".join(LIMITS), help=f"some of {','.join(LIMITS)}")
    p.add_argument("--layers", type=int, default=0, help="layers of the served model; default: 36")
    p.add_argument("--quick", action="store_true", help="8 layers, one batch size, one repetition: three minutes")
    p.add_argument("--cpu", action="store_true", help="the same code on a CPU with a tiny model")
    p.add_argument("--engine", default="", metavar="OPTIONS", help="SGLang's own, as '--attention-backend triton'")
    p.add_argument("--folder", type=Path, help="where the model (15 GB) is written for the run; default: TMPDIR")
    args = p.parse_args(argv)
    asked = [part for part in args.parts.split(",") if part]
    if not asked or set(asked) - set(LIMITS):
        p.error(f"--parts {args.parts}: expected some of {','.join(LIMITS)}")
    if args.layers < 0:
        p.error(f"--layers {args.layers}: expected a positive number")
    if args.folder and not args.folder.is_dir():
        p.error(f"--folder {args.folder}: no such directory")
    if not args.cpu and not gpus():
        p.error("nvidia-smi finds no GPU here; --cpu runs the same code on a tiny model")
    if args.json:
        try:
            files.check_output(args.json)
        except files.FileError as error:
            p.error(str(error))
    args.parts = [part for part in LIMITS if part in asked or any(NEEDS.get(one) == part for one in asked)]
    return args


@contextmanager
def scratch(parent: Path | None) -> Iterator[Path]:
    """Make the run's directory, and remove it at the end with that of the same name in /dev/shm, which `push` makes."""
    with tempfile.TemporaryDirectory(prefix="gpu-smoke-", dir=parent) as folder:
        try:
            yield Path(folder)
        finally:
            shutil.rmtree(Path("/dev/shm") / Path(folder).name, ignore_errors=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts. Exit status: 0 if all of them ended, 1 if one did not, 2 for a mistake, 130 for Ctrl-C."""
    args = parsed(argv)
    try:
        return measure(args, sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:
        print("gpu_smoke: interrupted", file=sys.stderr)
        return 130


def measure(args: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Run the parts, show and write what they found."""
    plan = planned(cpu=args.cpu, quick=args.quick, layers=args.layers, engine=shlex.split(args.engine))
    console = Console(width=None if sys.stdout.isatty() else 180, markup=False, highlight=False)
    found: dict[str, Any] = {
        "conditions": conditions(plan, arguments),
        "plan": asdict(plan),
        "parts": {},
        "rows": [],
    }
    with scratch(args.folder) as folder:
        for name, rows in run(plan, args.parts, folder, found):
            ended = found["parts"][name]
            line = f"{name}: {ended['state']} in {ended['seconds']:.0f} s, {len(rows)} figures. {ended['why']}"
            console.print(line)
            if args.json:
                files.write(args.json, json.dumps(found, indent=1) + "\n")
    console.print(table_of(found))
    for name, value in found["conditions"].items():
        console.print(f"{name}: {value}")
    ended_well = all(ended["state"] == "done" for ended in found["parts"].values())
    return 0 if ended_well and all(row["state"] != "failed" for row in found["rows"]) else 1


if __name__ == "__main__":
    sys.exit(main())
