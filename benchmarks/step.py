"""Measure the overhead of a step: time outside generate, train and push; memory; time until the first rollout.

    python benchmarks/step.py [--quick] [--json FILE] [--steps 8] [--staleness 0]

It starts `rlspec train` with the quickstart's configuration, on a random model of the quickstart's shape, with two
ranks and one SGLang engine, on a machine without a GPU. A random model gives long responses and little reward. With
`--quick` the engine is the embedded one, on one rank, and samples are few and short.

The time to the first rollout ends when engines are asked for training samples. A step lasts from one record to the
next. "Outside" is the time of a step that belongs to no part. Figures are medians without the first step.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import torch
from rich.console import Console
from rich.table import Table

from megatron_rlspec.records.recorder import read_records

EXAMPLE = Path(__file__).parent.parent / "examples/quickstart"
PARTS = ("seconds_generate", "seconds_train", "seconds_push")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the embedded engine, one rank, few short samples")
    parser.add_argument("--steps", type=int, default=8, help="steps of the run; the first is not counted")
    parser.add_argument("--staleness", type=int, default=0, help="1: generation runs one step ahead of training")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), args.quick, args.steps, args.staleness)
    show(found)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


def measure(folder: Path, quick: bool, steps: int, staleness: int) -> dict[str, float | str]:
    """Run `rlspec train` in `folder`, and compute the figures from its records and processes."""
    for script, *given in (
        ("make_task.py", "--task", "slips", "--out", folder / "task"),
        ("make_model.py", "--task", folder / "task", "--out", folder / "model"),
    ):
        subprocess.run([sys.executable, EXAMPLE / script, *map(str, given)], check=True, stdout=subprocess.DEVNULL)
    options = {"model.path": folder / "model", "data.path": folder / "task/rl.jsonl", "train.run_dir": folder / "run"}
    options |= {"train.steps": steps, "rollout.staleness": staleness}
    if quick:
        options |= {"rollout.engine": "embedded", "rollout.max_new_tokens": 64, "rollout.prompts_per_step": 4}
    ranks = 1 if quick else 2
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["-m", "megatron_rlspec.cli", "train", "--config", str(EXAMPLE / "quickstart.toml")]
    command += [text for name, value in options.items() for text in (f"--{name}", str(value))]
    began = time.time()
    log = folder / "log"
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env={"OMP_NUM_THREADS": "1"} | os.environ)
        peaks: dict[str, int] = {}
        watcher = threading.Thread(target=watch, args=(process.pid, peaks), daemon=True)
        watcher.start()
        if process.wait() != 0:
            sys.exit(log.read_text()[-3000:])
    records = read_records(folder / "run/metrics.jsonl")
    rows = list(zip(records, records[1:], strict=False))
    wall = [after["time"] - before["time"] for before, after in rows]
    parts = {part: [after[part] for _, after in rows] for part in PARTS}
    outside = [w - sum(values) for w, *values in zip(wall, *parts.values(), strict=True)]
    first = records[0]
    found: dict[str, float | str] = {
        "hardware": f"{platform.processor() or platform.machine()}, {len(os.sched_getaffinity(0))} cores usable",
        "torch": torch.__version__,
        "engine": "embedded" if quick else "sglang",
        "ranks": ranks,
        "steps": len(rows),
        "staleness": staleness,
        "seconds_step": statistics.median(wall),
        **{part: statistics.median(values) for part, values in parts.items()},
        "share_outside": statistics.median(o / w for o, w in zip(outside, wall, strict=True)),
        "share_outside_most": max(o / w for o, w in zip(outside, wall, strict=True)),
        "seconds_to_first_rollout": first["time"] - began - sum(first[part] for part in PARTS),
        **{f"peak_gib_{name}": peak / 2**30 for name, peak in sorted(peaks.items())},
    }
    return found


def watch(pid: int, peaks: dict[str, int]) -> None:
    """Sample the largest resident memory, in bytes, of trainer ranks and of engines, each summed over its processes."""
    while True:
        now: dict[str, int] = {}
        try:
            processes = psutil.Process(pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return
        for process in processes:
            try:
                line = " ".join(process.cmdline())
                memory = process.memory_info()
                name = "other"
                if "megatron_rlspec.cli" in line and " serve " not in line:
                    name = "trainer"
                elif "sglang" in line or " serve " in line:
                    name = "engine"
                now[name] = now.get(name, 0) + memory.rss
            except psutil.Error:
                continue  # the process has ended
        for name, bytes_ in now.items():
            peaks[name] = max(peaks.get(name, 0), bytes_)
        time.sleep(0.25)


def show(found: dict[str, float | str]) -> None:
    table = Table("what", "value")
    for name, value in found.items():
        text = str(value)
        if isinstance(value, float | int):
            text = f"{value:.1%}" if name.startswith("share") else f"{value:.4g}"
        table.add_row(name, text)
    Console().print(table)


if __name__ == "__main__":
    main()
