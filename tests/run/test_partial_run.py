"""Partial rollouts: steps end with their batch, groups go on in the next step, and a resumed run is the same run."""

import json
import shutil
from pathlib import Path

import pytest
from short_run import run

from megatron_rlspec import wire
from megatron_rlspec.records.recorder import read_records
from megatron_rlspec.types import OpenGroup

OPTIONS = {
    "rollout__engine": "embedded",
    "rollout__partial": 1,
    "rollout__max_new_tokens": 48,
    "rollout__max_running_requests": 20,
    "spec__mode": "fixed",
    "train__eval_prompts": 1,
}


def files(run_dir: Path, steps: int) -> dict[str, bytes]:
    folder = run_dir / "checkpoints"
    found = [*(folder / f"step-{steps:06d}").glob("*.safetensors"), folder / f"step-{steps:06d}.begun"]
    return {file.name: file.read_bytes() for file in found}


@pytest.mark.slow
def test_a_run_with_partial_rollouts_is_the_same_after_a_resume(start, tmp_path):
    steps = 6
    run(start, tmp_path / "whole", train__steps=steps, **OPTIONS)
    shutil.copytree(tmp_path / "whole", tmp_path / "cut", ignore=shutil.ignore_patterns("hf", f"step-{steps:06d}*"))
    run(start, tmp_path / "cut", train__steps=steps, train__resume="true", **OPTIONS)
    whole, cut = files(tmp_path / "whole", steps), files(tmp_path / "cut", steps)
    assert len(whole) >= 4 and [name for name in whole if cut[name] != whole[name]] == []
    records, again = (read_records(tmp_path / name / "metrics.jsonl") for name in ("whole", "cut"))
    for name in ("rollout/reward", "rollout/over_drawn", "rollout/continued_tokens", "policy/staleness"):
        assert [r[name] for r in again] == [r[name] for r in records]
    assert all(0 < r["rollout/over_drawn"] <= 16 for r in records)
    assert sum(r["rollout/continued_tokens"] for r in records) > 0
    stale = [r["policy/staleness"] for r in records]
    assert stale[0] == 0 and 0 < max(stale) <= 1
    begun = []
    for step in (steps - 1, steps):  # both checkpoints: groups of 4 with tokens of one policy back at most
        left = wire.decode((tmp_path / f"whole/checkpoints/step-{step:06d}.begun").read_bytes(), list[OpenGroup])
        assert len(left) == 4 and all(group.oldest >= step for group in left)
        begun += [len(r.partial.response) for group in left for r in group.requests if r.partial]
    assert begun and all(0 < tokens <= 48 for tokens in begun)
    events = [json.loads(line) for line in (tmp_path / "whole/events.jsonl").read_text().splitlines()]
    assert not [event for event in events if event["kind"] == "health"]
