"""benchmarks/gpu_session.py: what it decides, and its parts on a CPU."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
BENCHMARKS = ROOT / "benchmarks"
SCRIPT = BENCHMARKS / "gpu_session.py"
# Lines as SGLang 0.5.23 logs them (speculative/eagle_worker_v2.py, model_runner_components/cuda_graph_setup.py).
LOG = """\
[2026-01-01 00:00:00] Capture target verify CUDA graph begin. backend=full, num_tokens_per_req=4, avail mem=40.00 GB
[2026-01-01 00:00:09] Capture target verify CUDA graph end. bs=[1, 2, 4], elapsed=9.50 s, mem usage=0.75 GB.
[2026-01-01 00:00:09] Capture draft decode CUDA graph begin. backend=full, num_tokens_per_req=1, bs=[1, 2]
[2026-01-01 00:00:12] Capture draft decode CUDA graph end. elapsed=2.25 s, mem usage=0.25 GB, avail mem=38.75 GB.
[2026-01-01 00:00:13] Capture target prefill CUDA graph begin. backend=full, num_tokens=[64, 128], avail mem=38.75 GB
[2026-01-01 00:00:13] Capture target prefill CUDA graph end. elapsed=1.00 s, mem usage=0.00 GB, avail mem=38.75 GB.
"""
CPU = ["--cpu", "--minutes", "1000"]


@pytest.fixture(scope="module")
def gpu() -> Iterator[SimpleNamespace]:
    """The modules that decide."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        names = {"session": "gpu_session", "plan": "gpu.plan", "estimates": "gpu.estimates", "serving": "gpu.serving"}
        yield SimpleNamespace(**{short: importlib.import_module(name) for short, name in names.items()})


def figure(**changes: Any) -> dict[str, Any]:
    what = {"kind": "figure", "part": "attention", "what": "forward, one sequence of 9,216: peak"}
    return {**what, "state": "measured", "value": 0.2, "unit": "GiB", "note": "", "estimate": [], **changes}


def test_every_part_has_a_file_and_there_is_no_other(gpu):
    written = {path.stem for path in (BENCHMARKS / "gpu").glob("*.py") if "\ndef run(plan: Plan," in path.read_text()}
    assert written - {"dry_run"} == gpu.plan.PARTS.keys()
    assert all(0 < part.seconds <= part.limit <= 600 for part in gpu.plan.PARTS.values())
    assert sum(part.seconds for part in gpu.plan.PARTS.values()) < 28 * 60


def test_the_engine_whose_memory_is_measured_is_placed_as_in_a_run(gpu, tmp_path):
    """On an H100 and on an H200 it leaves SGLang what it reserves itself, 10 GiB; the weights have no bytes on disk."""
    fit = importlib.import_module("gpu.fit")
    plan = gpu.plan.planned()
    config, parameters = fit.without_data(plan, tmp_path / "whole")
    weights = tmp_path / "whole/model.safetensors"
    assert weights.stat().st_size > 2 * parameters > 15e9 and weights.stat().st_blocks * 512 < 1 << 20
    settings = fit.settings_of(plan, tmp_path / "whole")
    for gib in (79, 139):
        layout = fit.layout_of(settings, config, parameters, gib << 30)
        assert 0.5 < layout.mem_fraction < 1 - 10 / gib
        arguments = fit.engine_arguments(settings, layout)
        assert arguments[arguments.index("--mem-fraction-static") + 1] == str(layout.mem_fraction)


def test_the_log_of_captures_is_read(gpu):
    assert gpu.serving.captures(LOG) == (5, 12.75, 1.0)
    assert gpu.serving.captures("no graphs on a CPU") == (0, 0, 0)


@pytest.mark.parametrize(
    ("end", "state", "why"),
    [
        ("", "done", ""),
        ("raise ValueError('a reason')", "failed", "ValueError: a reason (exit code 1)"),
        ("import os; os.kill(os.getpid(), 9)", "failed", "exit code -9"),
        ("import time; time.sleep(600)", "out of time", "took longer than 1 s"),
    ],
)
def test_a_part_that_does_not_end_well_says_why(gpu, tmp_path, end, state, why):
    limit = 1 if "sleep" in end else 100
    ended = gpu.session.run_part([sys.executable, "-c", end], tmp_path / "part.log", limit)
    assert (ended["state"], ended["why"]) == (state, why)


@pytest.fixture
def ran(gpu, tmp_path, monkeypatch):
    """A session whose parts end as `ends` says, after `seconds` of a clock that only they move."""
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now, sleep=lambda s: None)
    ran = SimpleNamespace(ends={}, seconds={}, limits={}, said=[], path=tmp_path / "session.jsonl", folder=tmp_path)

    def run_part(command, log, limit):
        name = command[2]
        ran.limits[name] = limit
        took = min(ran.seconds.get(name, 1), limit)
        clock.now += took
        with ran.path.open("a") as out:
            out.write(json.dumps(figure(part=name, what="a figure")) + "\n")
        return {"state": ran.ends.get(name, "done"), "seconds": took, "why": ""}

    def session(parts, seconds=10_000.0, plan=None):
        ran.limits.clear()
        record = gpu.session.Record.read(ran.path)
        gpu.session.run(plan or gpu.plan.planned(), record, parts, tmp_path, seconds, ran.said.append)
        return gpu.session.Record.read(ran.path)

    monkeypatch.setattr(gpu.session, "time", clock)
    monkeypatch.setattr(gpu.session, "run_part", run_part)
    ran.session = session
    return ran


def test_the_others_go_on_after_a_part_that_failed(gpu, ran):
    ran.ends = {"model": "failed", "draws": "out of time"}
    record = ran.session(list(gpu.plan.PARTS))
    expected = dict.fromkeys(gpu.plan.PARTS, "done") | ran.ends | dict.fromkeys(gpu.plan.SERVING, "failed")
    assert {name: end["state"] for name, end in record.ends.items()} == expected
    assert record.ends["push"]["why"] == "needs the part model" and "push" not in ran.limits


def test_a_second_call_goes_on_with_what_is_missing(gpu, ran):
    ran.ends = {"decode": "failed"}
    parts = ["model", "decode", "draws", "head"]
    assert set(ran.session(parts).ends) == set(parts)
    ran.ends = {}
    with ran.path.open("a") as out:
        out.write('{"kind": "figure", "part": "decode", "wh')  # the machine went away
    record = ran.session([*parts, "train"])
    assert list(ran.limits) == ["model", "decode", "train"], "the served model is made again"
    assert not record.missing(["decode", "train"]) and len(record.figures) == len(parts) + 1
    ran.session(parts)
    assert not ran.limits


def test_parts_begin_while_their_time_is_left(gpu, ran):
    """A part that does not fit leaves its time to a shorter one; the last one has no more than what is left."""
    seconds = gpu.plan.PARTS["decode"].seconds + gpu.plan.PARTS["model"].seconds + 50
    ran.seconds = {"decode": gpu.plan.PARTS["decode"].seconds, "model": gpu.plan.PARTS["model"].seconds}
    record = ran.session(["model", "decode", "fit", "draws"], seconds)
    assert list(ran.limits) == ["model", "decode", "draws"] and ran.limits["draws"] == 50
    assert record.missing(["fit", "draws"]) == ["fit"]
    assert ran.said[2] == "fit: not begun; it takes about 100 s, and 50 s are left"


def test_the_page_names_its_parts(gpu):
    page = (ROOT / "docs/gpu.md").read_text()
    for found in re.findall(r"--parts ([\w,]+)", page):
        assert set(found.split(",")) <= gpu.plan.PARTS.keys()
    assert set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == gpu.plan.PARTS.keys() - {"model"}


def session(folder: Path, *options: str) -> dict[str, dict[str, Any]]:
    """Run the script on a CPU: its figures by name."""
    command = [sys.executable, str(SCRIPT), *CPU, "--out", str(folder), *options]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-3000:]
    rows = [json.loads(line) for line in (folder / "session.jsonl").read_text().splitlines()]
    assert {row["state"] for row in rows if row["kind"] == "end"} == {"done"}
    assert rows[0]["conditions"]["versions"]["torch"] and rows[0]["conditions"]["gpus"] == []
    return {f"{row['part']}: {row['what']}": row for row in rows if row["kind"] == "figure"}


@pytest.mark.slow
def test_one_part_on_a_cpu(tmp_path):
    found = session(tmp_path, "--parts", "head")
    measured = {name: row["value"] for name, row in found.items() if row["state"] == "measured"}
    chunks = {f"head: {name}, chunks of {n}" for name in ("drafter, ce", "policy with entropy") for n in (16, 64)}
    assert chunks < measured.keys() and all(measured[name] > 0 for name in chunks)
    assert "policy with entropy, chunks of 64" in (tmp_path / "table.txt").read_text()


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_all_parts_on_a_cpu(gpu, tmp_path):
    found = session(tmp_path)
    assert {name.partition(":")[0] for name in found} == gpu.plan.PARTS.keys()
    assert not [row for row in found.values() if row["state"] in ("failed", "out of memory")]
    values = {name: row["value"] for name, row in found.items() if row["state"] == "measured"}
    contestants = ("plain", "off", "k1", "k3", "likeliest tokens as drafts", "adaptive")
    assert all(values[f"decode: {name}, batch 4"] > 0 for name in contestants)
    assert all(values[f"decode: {name} / plain, batch 4"] > 0 for name in contestants[1:])
    assert values["decode: texts equal to plain's, batch 4"] == 1
    assert all(values[f"push: {way}"] > 0 for way in ("http", "group over gloo"))
    modes = ("", ", train.deterministic")
    pairs = ("twice without a drafter", "with and without")
    assert all(values[f"identity: {pair}: tensors that differ{mode}"] == 0 for pair in pairs for mode in modes)
    assert values["catchup: a round with drafts"] > 0 and "catchup: catching up" in values
    assert values["shared: beside a process that spins / alone"] > 0
    assert values["sleep: accept length after / before"] > 0.5
    assert all(values[f"draws: {kind}, ours with top-p: a round"] > 0 for kind in ("peaked", "flat"))
    assert values["train: policy and drafter: a step"] > 0 and values["train: policy alone: a step"] > 0
