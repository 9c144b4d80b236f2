"""benchmarks/gpu_session.py: what it decides, its parts on a CPU, and the models that it widens."""

from __future__ import annotations

import dataclasses
import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gpu.widen import Shape, main, widened_shape
from transformers import AutoModelForCausalLM

from megatron_rlspec.extensions.migration.plans import round_costs
from megatron_rlspec.models.hf_files import read_hf
from megatron_rlspec.records.recorder import read_records

ROOT = Path(__file__).parent.parent
BENCHMARKS = ROOT / "benchmarks"
SCRIPT = BENCHMARKS / "gpu_session.py"


LOG = """\
[2026-01-01 00:00:00] Capture target verify CUDA graph begin. backend=full, num_tokens_per_req=4, avail mem=40.00 GB
[2026-01-01 00:00:09] Capture target verify CUDA graph end. bs=[1, 2, 4], elapsed=9.50 s, mem usage=0.75 GB.
[2026-01-01 00:00:09] Capture draft decode CUDA graph begin. backend=full, num_tokens_per_req=1, bs=[1, 2]
[2026-01-01 00:00:12] Capture draft decode CUDA graph end. elapsed=2.25 s, mem usage=0.25 GB, avail mem=38.75 GB.
[2026-01-01 00:00:13] Capture target prefill CUDA graph begin. backend=full, num_tokens=[64, 128], avail mem=38.75 GB
[2026-01-01 00:00:13] Capture target prefill CUDA graph end. elapsed=1.00 s, mem usage=0.00 GB, avail mem=38.75 GB.
"""

CPU = ["--cpu", "--minutes", "1000"]
KINDS = ("plain", "frozen", "co-trained")


@pytest.fixture(scope="module")
def gpu() -> Iterator[SimpleNamespace]:
    """The modules that decide."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        names = {"session": "gpu_session", "plan": "gpu.plan", "serving": "gpu.serving", "trace": "gpu.trace"}
        names |= {"lossless": "gpu.lossless", "train": "gpu.train", "widened": "gpu.widened"}
        yield SimpleNamespace(**{short: importlib.import_module(name) for short, name in names.items()})


def parts_of(gpu: SimpleNamespace, session: str) -> list[str]:
    return [name for name, part in gpu.plan.PARTS.items() if part.session == session]


def test_a_trace_is_read_as_work_and_gaps(gpu):
    """Two rounds of 3 ms each: kernels that overlap count once, and a gap has what stands before and behind it."""
    events = []
    for name, start, duration in (("a", 0, 1000), ("b", 500, 1000), ("c", 2000, 1000)):
        for first in (0, 3000):
            events.append({"cat": "kernel", "name": name, "ts": first + start, "dur": duration})
    times = gpu.trace.Times.of(events, "kernel", 2)
    assert times.span == 3 and times.busy == 2.5
    assert times.kernels == {"a": 1, "b": 1, "c": 1} and times.gaps == {"b | c": 0.5}


def test_the_widened_policies_have_heads_that_sglang_takes(gpu):
    """SGLang's MiMo divides the hidden size by the heads. SmolLM2-135M, and the quickstart's model."""
    smollm2 = Shape(hidden=576, heads=9, kv_heads=3, head_size=64, ffn=1536, layers=30)
    quickstart = Shape(hidden=96, heads=4, kv_heads=2, head_size=24, ffn=192, layers=12)
    for narrow, plan in ((smollm2, gpu.plan.planned()), (quickstart, gpu.plan.planned(cpu=True))):
        wide = widened_shape(narrow, **dataclasses.asdict(plan.wide))
        assert wide.heads * wide.head_size == wide.hidden


def test_the_log_of_captures_is_read(gpu):
    assert gpu.serving.captures(LOG) == (5, 12.75, 1.0)
    assert gpu.serving.captures("no graphs on a CPU") == (0, 0, 0)


@pytest.mark.parametrize(
    ("end", "state", "why"),
    [
        ("raise ValueError('a reason')", "failed", "ValueError: a reason (exit code 1)"),
        ("import time; time.sleep(600)", "out of time", "took longer than 1 s"),
    ],
)
def test_a_part_that_does_not_end_well_says_why(gpu, tmp_path, end, state, why):
    limit = 1 if "sleep" in end else 100
    ended = gpu.session.run_part([sys.executable, "-c", end], tmp_path / "part.log", limit)
    assert (ended["state"], ended["why"]) == (state, why)


def session(folder: Path, *options: str) -> dict[str, dict[str, Any]]:
    """Run the script on a CPU: its figures by name."""
    command = [sys.executable, str(SCRIPT), *CPU, "--out", str(folder), *options]
    for _ in range(5):
        ended = subprocess.run(command, capture_output=True, text=True)
        # On a CPU torch's profiler often ends an engine with a segmentation fault. The same command goes on.
        if "not done: trace;" not in ended.stderr:
            break
    assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-3000:]
    rows = [json.loads(line) for line in (folder / "session.jsonl").read_text().splitlines()]
    ends = {row["part"]: row["state"] for row in rows if row["kind"] == "end"}
    assert {*ends.values()} == {"done"}
    assert rows[0]["conditions"]["versions"]["torch"] and rows[0]["conditions"]["gpus"] == []
    figures = {f"{row['part']}: {row['what']}": row for row in rows if row["kind"] == "figure"}
    assert not [row for row in figures.values() if row["state"] in ("failed", "out of memory")]
    return {name: row["value"] for name, row in figures.items() if row["state"] == "measured"}


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_session_a_on_a_cpu(gpu, tmp_path):
    values = session(tmp_path, "--session", "a")
    assert {name.partition(":")[0] for name in values} >= set(parts_of(gpu, "a"))
    costs = round_costs.read(tmp_path / "round_costs.json", [1])[1]
    assert len(costs.configs()) == 3, "how many batch sizes are measured depends on the machine"
    for point in ("4 requests of 64", "1 requests of 128"):
        assert values[f"steady: {point}: adaptive / off"] > 0
        assert values[f"steady: {point}: adaptive / off by measured costs"] > 0
    assert values["trace: k3: the GPU works"] > 0 and "catchup: catching up on a token" in values
    assert values["variants: as served, 4 requests: equal texts"] == 1, "float32"
    assert values["variants: as served, 4 requests: 3 drafts / plain"] > 0
    assert "variants: draft vocabulary, 4 requests: a round is shorter by" in values
    assert values["lossless: drafts: probability of such a difference"] > 1e-4
    assert values["uneven: 4 requests: equal texts"] == 1, "float32"
    for point in ("4 requests of 16", "8 requests of 16"):
        drafts = [values.get(f"uneven: {point}: uneven, {what}", 0) for what in ("accepted", "verified")]
        assert values[f"uneven: {point}: uneven / even"] > 0 and 0 <= drafts[0] <= drafts[1] <= 3


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_session_b_on_a_cpu(gpu, tmp_path):
    values = session(tmp_path, "--session", "b")
    assert {name.partition(":")[0] for name in values} >= set(parts_of(gpu, "b"))
    for kind in KINDS:
        parts = sum(values[f"rl: {kind}: {part}"] for part in ("generate", "train", "push"))
        assert 0 < parts and values[f"rl: {kind}: a step"] > 0
    assert values["rl: plain / co-trained, a step"] > 0 and values["stale: plain / co-trained, a step"] > 0
    assert values["rl: co-trained: accept length"] >= 1
    records = read_records(tmp_path / "rl-run/metrics.jsonl")
    learnt = [record["drafter/updated"] for record in records]
    assert learnt == [1, 0, 0, 1, 0, 1, 0], "co-trained; plain, frozen, co-trained; frozen, co-trained, plain"
    assert all(record["rollout/response_length"] == 24 for record in records)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_drafts_leave_the_distribution_as_it_is_in_bfloat16(tmp_path):
    command = [sys.executable, str(SCRIPT), "--layers", "4", "--parts", "small,lossless", "--out", str(tmp_path)]
    assert subprocess.run(command).returncode == 0
    rows = [json.loads(line) for line in (tmp_path / "session.jsonl").read_text().splitlines()]
    p = {row["what"]: row["value"] for row in rows if row.get("part") == "lossless" and row["kind"] == "figure"}
    assert p["drafts: probability of such a difference"] > 1e-4
    assert p["plain at temperature 0.7: probability of such a difference"] < 1e-6


WIDER = ("--times", "4", "--head-size", "32", "--kv-heads", "4", "--ffn", "160", "--layers", "6")


def widened(start, folder):
    main([str(start / "model"), str(folder / "model"), *WIDER])
    (folder / "task").symlink_to(start / "task")
    return folder


def test_logits_are_the_narrow_models(start, tmp_path):
    wide = widened(start, tmp_path)
    narrow_shape = Shape.of_config(read_hf(start / "model")[0])
    wide_shape = Shape.of_config(read_hf(wide / "model")[0])
    assert wide_shape.hidden == 4 * narrow_shape.hidden and wide_shape.layers == 6

    tokens = torch.randint(0, 60, (2, 24), generator=torch.Generator().manual_seed(0))
    narrow_logits, wide_logits = (
        AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)(tokens).logits.detach()
        for model in (start / "model", wide / "model")
    )
    spread = narrow_logits.std()
    assert (wide_logits - narrow_logits).abs().max() < 1e-6 * spread
