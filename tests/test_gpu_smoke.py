"""benchmarks/gpu_smoke.py: what it decides, and its parts on a CPU."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "benchmarks/gpu_smoke.py"
# Lines as SGLang 0.5.23 logs them (speculative/eagle_worker_v2.py, model_runner_components/cuda_graph_setup.py).
LOG = """\
[2026-01-01 00:00:00] Capture target verify CUDA graph begin. backend=full, num_tokens_per_req=4, avail mem=40.00 GB
[2026-01-01 00:00:09] Capture target verify CUDA graph end. bs=[1, 2, 4], elapsed=9.50 s, mem usage=0.75 GB.
[2026-01-01 00:00:09] Capture draft decode CUDA graph begin. backend=full, num_tokens_per_req=1, bs=[1, 2]
[2026-01-01 00:00:12] Capture draft decode CUDA graph end. elapsed=2.25 s, mem usage=0.25 GB, avail mem=38.75 GB.
[2026-01-01 00:00:13] Capture target prefill CUDA graph begin. backend=full, num_tokens=[64, 128], avail mem=38.75 GB
[2026-01-01 00:00:13] Capture target prefill CUDA graph end. elapsed=1.00 s, mem usage=0.00 GB, avail mem=38.75 GB.
"""


@pytest.fixture(scope="module")
def smoke() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPT.parent))
        return importlib.import_module("gpu_smoke")


def row(**changes: Any) -> dict[str, Any]:
    what = {"part": "attention", "what": "forward, one sequence of 9,216: peak", "state": "measured"}
    return {**what, "value": 0.2, "unit": "GiB", "note": "", "estimate": [], **changes}


def test_by_default_the_model_is_mimo_7b(smoke):
    plan = smoke.planned()
    assert asdict(plan.shape) == asdict(smoke.Shape()) and plan.shape.layers == 36
    assert [tokens for _, _, tokens in plan.attention] == [9216, 32768]
    assert smoke.planned(layers=4).shape.layers == smoke.planned(layers=4).train_layers == 4
    assert smoke.planned(quick=True).batches == (64,)
    for one in (plan, smoke.planned(cpu=True), smoke.planned(quick=True, layers=3)):
        assert smoke.from_json(json.loads(json.dumps(asdict(one)))) == one


def test_estimates_stand_beside_the_figures_of_the_default_plan_only(smoke):
    found = smoke.beside(row(), estimated=True)
    assert found["estimate"] == [0.12, 0.25] and found["verdict"] == "as estimated"
    assert smoke.beside(row(value=0.5), estimated=True)["verdict"] == "2 x the estimate"
    assert smoke.beside(row(value=0.012), estimated=True)["verdict"] == "0.1 x the estimate"
    assert smoke.beside(row(), estimated=False)["verdict"] == ""
    own = smoke.beside(row(what="policy alone: peak", value=15.0, estimate=[10, 20, "static"]), estimated=False)
    assert own["estimate"] == [10, 20] and own["verdict"] == "as estimated"


def test_too_little_memory_is_a_figure_and_not_a_failure(smoke):
    long = row(what="forward, one sequence of 32,768: peak", state="out of memory", value=None)
    found = smoke.beside(long, estimated=True)
    assert found["estimate"] == [0.4, 0.9] and found["verdict"] == "did not fit"
    assert smoke.shown(found) == "out of memory"
    assert smoke.beside(row(state="failed", value=None), estimated=True)["verdict"] == ""


def test_estimates_name_figures_that_parts_write(smoke):
    """The words of an estimate are those of a part's source, but for the numbers that a plan puts in."""
    source = (SCRIPT.parent / "gpu_parts.py").read_text()
    for part, what in smoke.ESTIMATES:
        assert part in smoke.LIMITS
        for word in re.findall(r"[a-z-]{4,}", what):
            assert word in source, what


def test_the_log_of_captures_is_read(smoke):
    assert smoke.captures(LOG) == (5, 12.75, 1.0)
    assert smoke.captures("no graphs on a CPU") == (0, 0, 0)


PROGRAM = """
import json, sys, time
for value in (1.0, 2.0):
    with open(sys.argv[1], "a") as out:
        out.write(json.dumps({"what": "a", "state": "measured", "value": value, "unit": "", "note": ""}) + "\\n")
open(sys.argv[1], "a").write('{"what": "cut o')
"""


@pytest.mark.parametrize(
    ("end", "state", "why"),
    [
        ("", "done", ""),
        ("raise ValueError('a reason')", "failed", "ValueError: a reason (exit code 1)"),
        ("import os; os.kill(os.getpid(), 9)", "failed", "exit code -9"),
        ("time.sleep(60)", "out of time", "took longer than 4 s"),
    ],
)
def test_what_was_measured_stays_however_a_part_ends(smoke, tmp_path, end, state, why):
    rows_file = tmp_path / "part.jsonl"
    ended, rows = smoke.run_part(
        "decode", [sys.executable, "-c", PROGRAM + end, str(rows_file)], rows_file, 4 if "sleep" in end else 60
    )
    assert (ended["state"], ended["why"]) == (state, why)
    assert [(found["part"], found["value"]) for found in rows] == [("decode", 1.0), ("decode", 2.0)]


def test_the_others_go_on_after_a_part_that_failed(smoke, tmp_path, monkeypatch):
    ends = {"model": "failed", "train": "out of time"}

    def run_part(name, command, rows_file, limit, settle=0):
        return {"state": ends.get(name, "done"), "seconds": 1.0, "why": "why"}, [row(part=name)]

    monkeypatch.setattr(smoke, "run_part", run_part)
    found: dict[str, Any] = {"parts": {}, "rows": []}
    list(smoke.run(smoke.planned(cpu=True), list(smoke.LIMITS), tmp_path, found))
    states = {name: ended["state"] for name, ended in found["parts"].items()}
    assert states == dict.fromkeys(smoke.LIMITS, "done") | ends | {"decode": "failed", "push": "failed"}
    assert found["parts"]["push"]["why"] == "needs the part model"
    assert [one["part"] for one in found["rows"]] == ["model", "train", "attention", "verify"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--cpu", "--parts", "decode,speed"], "--parts decode,speed: expected some of model,decode,push"),
        (["--cpu", "--layers", "-1"], "--layers -1: expected a positive number"),
        (["--cpu", "--folder", "no/such"], "--folder no/such: no such directory"),
        ([], "nvidia-smi finds no GPU here; --cpu runs the same code on a tiny model"),
    ],
)
def test_a_mistake_is_one_line(smoke, capsys, monkeypatch, options, message):
    monkeypatch.setattr(smoke, "gpus", list)
    with pytest.raises(SystemExit) as ended:
        smoke.main(options)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_the_page_names_its_parts(smoke):
    page = (ROOT / "docs/gpu.md").read_text()
    assert set(re.findall(r"--parts (\w+)", page)) <= smoke.LIMITS.keys()
    assert set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == smoke.LIMITS.keys() - {"model"}


def smoked(folder: Path, *options: str) -> dict[str, Any]:
    """Run the script on a CPU: what it wrote."""
    command = [sys.executable, str(SCRIPT), "--cpu", "--json", str(folder / "found.json"), *options]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    return json.loads((folder / "found.json").read_text())


def test_one_part_on_a_cpu(tmp_path):
    found = smoked(tmp_path, "--parts", "attention")
    assert found["parts"]["attention"]["state"] == "done"
    measured = {one["what"] for one in found["rows"] if one["state"] == "measured"}
    assert measured == {f"{way}, one sequence of {n}" for way in ("forward", "backward") for n in (96, 160)}
    assert all(one["value"] > 0 for one in found["rows"] if one["state"] == "measured")
    assert found["conditions"]["versions"]["torch"] and found["conditions"]["gpus"] == []


@pytest.mark.slow
def test_all_parts_on_a_cpu(smoke, tmp_path):
    found = smoked(tmp_path)
    assert {name: ended["state"] for name, ended in found["parts"].items()} == dict.fromkeys(smoke.LIMITS, "done")
    values = {one["what"]: one["value"] for one in found["rows"] if one["state"] == "measured"}
    contestants = ("plain", "off", "k1", "k3", "adaptive")
    assert all(values[f"{name}, batch 4"] > 0 for name in contestants)
    assert all(values[f"{name} / plain, batch 4"] > 0 for name in contestants[1:])
    assert values["texts equal to plain's, batch 4"] == 1
    assert all(values[way] > 0 for way in ("http", "files", "group over gloo"))
    assert values["policy and drafter: a step"] > 0 and values["policy alone: a step"] > 0
    assert values["temperature alone: a round"] > 0 and values["top-p: a round"] > 0
    assert "CUDA IPC" in {one["what"] for one in found["rows"] if one["state"] == "inside slime only"}
