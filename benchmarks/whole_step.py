"""Compare a whole RL step with a co-trained drafter, with a frozen one, and without any speculation.

    bash examples/quickstart.sh && python benchmarks/whole_step.py [--run runs/quickstart] [--steps 20] [--repeats 3]
        [--ranks 2] [--json FILE] [--plot FILE]
    python benchmarks/whole_step.py --read FILE --plot FILE       # draw what --json wrote
    python benchmarks/whole_step.py --kinds "argmax drafts,co-trained" --engine embedded --ranks 1 --drafts 3
    python benchmarks/whole_step.py --run runs/smollm2 --config examples/smollm2/smollm2.toml --engine embedded

Every kind is an `rlspec train` from the warm start in RUN/warm/hf on the task in RUN/task, with the configuration of
--config (default: the quickstart's). Kinds run in turn, --repeats times. The policy learns the same in all: neither its
updates nor its texts depend on drafts. `plain` is the same model without its drafter; `argmax drafts` is `co-trained`
whose drafts are the likeliest tokens. Ratios are to the first kind.

Seconds are means over the steps after the first two, and a row has their medians over turns. A ratio is one of means
in the same turn, with its range over turns. CPU seconds are those of all processes of a run in these steps.

With --plot every kind with drafts also runs once with THREE drafts in every round. Only then is the accept length of
one step comparable with that of another, because the rule changes the number of drafts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

import psutil
import torch

from megatron_rlspec.models.hf_files import read_hf, write_hf
from megatron_rlspec.records.recorder import read_records

ROOT = Path(__file__).parent.parent
KINDS = {
    "plain": {"spec.mode": "off", "drafter.train": "false"},
    "frozen": {"drafter.train": "false"},
    "co-trained": {},
    "argmax drafts": {"spec.drafts": "argmax"},
}
PARTS = ("generate", "train", "push")
THREE = 3
COLOURS = {"plain": "#8b949e", "frozen": "#d9822b", "co-trained": "#2f81f7"}  # seen on a light and a dark page
INK = "#8b949e"
Turns = dict[str, list[dict[str, list[float]]]]  # kind -> its turns -> what was measured -> by step
WINDOW = 5  # steps over which a curve is a mean
LEFT_OUT = 2  # steps at the start, in which engines and allocators warm up


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, default=ROOT / "runs/quickstart", help="of examples/quickstart.sh")
    parser.add_argument("--config", type=Path, default=ROOT / "examples/quickstart/quickstart.toml")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--kinds", default="plain,frozen,co-trained", help="default: plain,frozen,co-trained")
    parser.add_argument("--engine", choices=("sglang", "embedded"), default="sglang", help="default: sglang")
    parser.add_argument(
        "--drafts", type=int, default=0, help="drafts of every round; 0: as the rule chooses; default: 0"
    )
    parser.add_argument("--json", type=Path, help="write what every step took to this file")
    parser.add_argument("--plot", type=Path, help="draw accept length over RL steps, and the seconds of a step by part")
    parser.add_argument("--read", type=Path, help="measure nothing: take a file of --json")
    options = parser.parse_args()
    found, fixed = json.loads(options.read.read_text()) if options.read else measure(parser, options)
    table(found)
    if options.json:
        options.json.write_text(json.dumps([found, fixed]) + "\n")
    if options.plot:
        plot(found, fixed, options.plot)


def measure(parser: argparse.ArgumentParser, options: argparse.Namespace) -> tuple[Turns, Turns]:
    """Run all kinds in turn. Returns what was measured, and for --plot the same with THREE drafts in every round."""
    if options.steps <= LEFT_OUT:
        parser.error(f"--steps {options.steps}: expected more than the {LEFT_OUT} that are left out")
    warm = options.run / "warm/hf"
    if not warm.exists():
        parser.error(f"{warm}: no such directory; run examples/quickstart.sh first")
    if unknown := set(options.kinds.split(",")) - set(KINDS):
        parser.error(f"--kinds {options.kinds}: expected names of {', '.join(KINDS)}, got {unknown.pop()}")
    found: Turns = {kind: [] for kind in options.kinds.split(",")}
    fixed: Turns = {kind: [] for kind in found if kind != "plain" and options.plot}
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder, "plain")
        config, tensors = read_hf(warm)
        target = ((name, tensors[name]) for name in tensors if ".mtp_layers." not in name)
        write_hf(plain, config | {"num_nextn_predict_layers": 0}, target, tokenizer_from=warm)
        for turn in range(options.repeats):
            for kind in found:
                model = plain if kind == "plain" else warm
                found[kind].append(seconds(kind, model, options, options.drafts, Path(folder, f"{kind}-{turn}")))
                now, cpu = (statistics.fmean(found[kind][-1][name]) for name in ("step", "cpu"))
                told = f"{now:.2f} s a step, {cpu:.2f} s of CPU"
                print(f"turn {turn + 1} of {options.repeats}, {kind}: {told}", flush=True)
        for kind in fixed:
            fixed[kind].append(seconds(kind, warm, options, THREE, Path(folder, f"{kind}-three")))
    print(f"\nconditions: {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, torch {torch.__version__},", end=" ")
    print(f"{options.ranks} ranks, {options.engine}, {options.steps} steps, {options.repeats} turns, {warm}")
    return found, fixed


def rlspec(*words: object, output: IO[str]) -> subprocess.Popen:
    """Start a command. Its output goes to a file."""
    command = [sys.executable, "-m", "megatron_rlspec.cli", *map(str, words)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, cwd=ROOT, env=environment, text=True, stdout=output, stderr=output)


def ended(process: subprocess.Popen, output: IO[str]) -> None:
    """Wait for the end of a command. Raises CalledProcessError, after its output was shown."""
    if process.wait():
        output.seek(0)
        print(output.read()[-8000:], file=sys.stderr)
        raise subprocess.CalledProcessError(process.returncode, process.args)


def seconds(kind: str, model: Path, options: argparse.Namespace, drafts: int, run_dir: Path) -> dict[str, list[float]]:
    """Run one kind, with so many drafts in every round; 0: as the rule chooses.

    Returns, by step, seconds of parts and of the whole, accept lengths, tokens a second and a response, CPU seconds.
    """
    settings = KINDS[kind] | {
        "model.path": model,
        "data.path": options.run / "task/rl.jsonl",
        "train.run_dir": run_dir,
        "train.steps": options.steps,
        "train.eval_every": 0,
        "train.save_every": 0,
        "rollout.engine": options.engine,
    }
    if drafts and kind != "plain":
        settings |= {"spec.mode": "fixed", "spec.num_steps": drafts}
    words = [word for name, value in settings.items() for word in (f"--{name}", value)]
    with tempfile.TemporaryFile("w+") as output:
        process = rlspec("train", "--ranks", options.ranks, "--config", options.config.resolve(), *words, output=output)
        cpu = cpu_seconds(process, run_dir / "metrics.jsonl", range(LEFT_OUT, options.steps + 1))
        ended(process, output)
    records = read_records(run_dir / "metrics.jsonl")
    steps: dict[str, list[float]] = {part: [r[f"seconds_{part}"] for r in records[LEFT_OUT:]] for part in PARTS}
    steps["accept length"] = [1.0 if kind == "plain" else r["rollout/accept_length"] for r in records[LEFT_OUT:]]
    steps["tokens/s"] = [r["rollout/tokens_per_second"] for r in records[LEFT_OUT:]]
    steps["tokens a response"] = [r["rollout/response_length"] for r in records[LEFT_OUT:]]
    times = [record["time"] for record in records]
    steps["step"] = [after - before for before, after in pairwise(times[LEFT_OUT - 1 :])]
    steps["cpu"] = [after - before for before, after in pairwise(cpu)]
    return steps


def cpu_seconds(process: subprocess.Popen, records: Path, steps: Sequence[int]) -> list[float]:
    """Wait for the end of a run. Returns the CPU seconds of all its processes when so many steps were recorded."""
    found: list[float] = []
    while process.poll() is None:
        done = records.read_text().count("\n") if records.exists() else 0
        if len(found) < len(steps) and done >= steps[len(found)]:
            found.append(sum(map(cpu_of, of_run(process.pid))))
        time.sleep(0.02)
    return found


def of_run(pid: int) -> list[psutil.Process]:
    run = psutil.Process(pid)
    return [run, *run.children(recursive=True)]


def cpu_of(process: psutil.Process) -> float:
    """Return the seconds that a process has used, with those of its children that have ended."""
    with suppress(psutil.Error):
        used = process.cpu_times()
        return used.user + used.system + used.children_user + used.children_system
    return 0.0


def table(found: Turns) -> None:
    """Print medians of each kind, and how many times as fast as the first kind it is."""
    columns = (*PARTS, "step", "cpu", "accept length", "tokens/s", "tokens a response")
    first = next(iter(found))
    head = " ".join(f"{name:>{max(9, len(name))}}" for name in columns)
    print(f"{'':>13} {head}   {first} / this: a step, CPU, generating a token")
    for kind, turns in found.items():
        medians = [statistics.median(statistics.fmean(turn[name]) for turn in turns) for name in columns]
        row = " ".join(f"{value:{max(9, len(name))}.2f}" for name, value in zip(columns, medians, strict=True))
        print(f"{kind:>13} {row}   {ratios(found[first], turns)}")


def ratios(first: list[dict[str, list[float]]], turns: list[dict[str, list[float]]]) -> str:
    shown = []
    for name in ("step", "cpu", "tokens/s"):
        each = [
            statistics.fmean(one[name]) / statistics.fmean(other[name]) for one, other in zip(first, turns, strict=True)
        ]
        each = [1 / ratio for ratio in each] if name == "tokens/s" else each
        shown.append(f"{statistics.median(each):.2f} [{min(each):.2f}, {max(each):.2f}]")
    return ", ".join(shown)


def plot(found: Turns, fixed: Turns, path: Path) -> None:
    """Draw accept length with THREE drafts a round against RL steps, and seconds of a step: for any background."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams |= {"font.size": 12, "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": INK}
    plt.rcParams |= {"xtick.color": INK, "ytick.color": INK, "axes.spines.top": False, "axes.spines.right": False}
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.4), layout="constrained")
    steps = max(len(turn["step"]) for turns in found.values() for turn in turns)
    lengths = {"plain": [{"accept length": [1.0] * steps}]} | fixed
    curves(axes[0], lengths)
    bars(axes[1], found)
    figure.savefig(path, dpi=120, transparent=True)


def curves(axis: Any, turns: Turns) -> None:
    """Draw the accept length of each kind: medians over its turns, then means over WINDOW steps."""
    ends = []
    last = 0
    for kind, measured in turns.items():
        middle = [
            statistics.median(values) for values in zip(*(turn["accept length"] for turn in measured), strict=False)
        ]
        smooth = [statistics.mean(middle[max(0, i - WINDOW + 1) : i + 1]) for i in range(len(middle))]
        last = max(last, LEFT_OUT + len(smooth))
        axis.plot(
            range(LEFT_OUT + 1, LEFT_OUT + 1 + len(smooth)), smooth, color=COLOURS.get(kind), lw=2.2, clip_on=False
        )
        ends.append((smooth[-1], kind))
    axis.set_ylim(bottom=1.0)
    axis.set_xlim(0, last)
    label(axis, last, ends)
    axis.set_title(f"accept length: tokens a round, with {THREE} drafts", fontsize=12)
    axis.set_xlabel("RL step")
    axis.grid(alpha=0.25)


def bars(axis: Any, found: Turns) -> None:
    """Draw a bar of each kind: medians over turns of the seconds of a step's parts, and of the rest."""
    for row, (kind, turns) in enumerate(found.items()):
        middle = {n: statistics.median(statistics.fmean(turn[n]) for turn in turns) for n in ("step", *PARTS)}
        widths = [middle[part] for part in PARTS]
        widths.append(middle["step"] - sum(widths))
        left = 0.0
        for width, name, shade in zip(widths, (*PARTS, ""), (1.0, 0.65, 0.4, 0.2), strict=True):
            axis.barh(row, width, left=left, color=COLOURS.get(kind), alpha=shade, height=0.6)
            if row == 0 and name:
                axis.annotate(name, (left + width / 2, -0.45), ha="center", fontsize=10, annotation_clip=False)
            left += width
        axis.annotate(f" {middle['step']:.2f}", (left, row), va="center", annotation_clip=False)
    axis.set_yticks(range(len(found)), list(found))
    axis.set_ylim(len(found) - 0.5, -0.7)
    axis.set_title("seconds of an RL step; the rule chooses the drafts", fontsize=12)
    axis.set_xlabel("seconds")
    axis.grid(alpha=0.25, axis="x")


def label(axis: Any, last: int, ends: list[tuple[float, str]]) -> None:
    """Write each line's name behind its end, one above the other where lines are close."""
    low, high = axis.get_ylim()
    least = 0.07 * (high - low)
    at = low - least
    for value, kind in sorted(ends):
        at = max(value, at + least)
        axis.annotate(f" {kind}", (last, at), color=COLOURS.get(kind), va="center", annotation_clip=False)


if __name__ == "__main__":
    main()
