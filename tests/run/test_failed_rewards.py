"""Rewards that fail in a run: every record counts them, one event a step reports them, a step of nothing else stops."""

from pathlib import Path

import pytest
from short_run import run

from megatron_rlspec.records.recorder import read_records

OPTIONS = {"rollout__engine": "embedded", "spec__mode": "fixed", "train__steps": 3, "train__eval_prompts": 2}


def events(run_dir: Path) -> list[str]:
    return [e["message"] for e in read_records(run_dir / "events.jsonl") if e["kind"] == "reward"]


def test_failed_rewards_are_counted_and_reported_once_per_step(start, tmp_path):
    output = run(start, tmp_path, reward__kind="run_reward:fails_on_some", **OPTIONS)
    records = read_records(tmp_path / "metrics.jsonl")
    counts = [int(record["rollout/failed_rewards"]) for record in records]
    assert all(0 < count < 16 for count in counts)
    steps = [line for line in output.splitlines() if line.startswith("step ")]
    assert [f"failed rewards {count}" in line for line, count in zip(steps, counts, strict=True)] == [True] * 3
    told = [message for message in events(tmp_path) if message.startswith("step ") and "rewards failed" in message]
    assert [m.split(";")[0] for m in told] == [f"step {i}: {n} of 16 rewards failed" for i, n in enumerate(counts, 1)]
    assert all("ValueError: length" in message for message in told)


def test_steps_of_failures_alone_stop_the_run(start, tmp_path):
    options = OPTIONS | {"reward__kind": "run_reward:fails_later", "rollout__staleness": 1}
    output = run(start, tmp_path, code=1, train__max_bad_steps=2, **options)
    assert "Traceback" not in output, output[-3000:]
    (line,) = [line for line in output.splitlines() if line.startswith("rlspec:")]
    told = "all 16 rewards failed, for 2 steps in a row (train.max_bad_steps=2); the first: "
    assert f"{told}t000001-p0000000" in line
    assert "RuntimeError: broken" in line
    assert len([m for m in events(tmp_path) if m.startswith("step ")]) == 1


def test_a_reward_that_never_succeeds_stops_the_run_at_once(start, tmp_path):
    output = run(start, tmp_path, code=1, reward__kind="run_reward:fails", **OPTIONS)
    assert "evaluation first: all 2 rewards failed, and none succeeded" in output
    assert not read_records(tmp_path / "metrics.jsonl")


@pytest.mark.slow
def test_dynamic_sampling_does_not_refill_for_ever(start, tmp_path):
    kind = {"reward__kind": "run_reward:fails_later", "algorithm__dynamic_sampling": "true"}
    output = run(start, tmp_path, code=1, **kind, **OPTIONS)
    assert "all 16 rewards failed" in output
