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


@pytest.mark.parametrize(("most", "staleness"), [pytest.param(1, 0, marks=pytest.mark.slow), (2, 1)])
def test_steps_of_failures_alone_stop_the_run_and_can_be_drawn_again(start, tmp_path, most, staleness):
    whole = tmp_path / "whole"
    failed = tmp_path / "failed"
    options = OPTIONS | {"rollout__staleness": staleness}
    output = run(start, failed, code=1, reward__kind="run_reward:fails_later", train__max_bad_steps=most, **options)
    assert "Traceback" not in output, output[-3000:]
    (line,) = [line for line in output.splitlines() if line.startswith("rlspec:")]
    told = f"all 16 rewards failed, for {most} steps in a row (train.max_bad_steps={most}); the first: "
    assert f"{told}t00000{most - 1}-p0000000" in line
    assert "RuntimeError: broken" in line
    assert len([m for m in events(failed) if m.startswith("step ")]) == most - 1
    if most == 1:  # nothing was trained: the resumed run draws the same prompts
        run(start, whole, **options)
        run(start, failed, train__resume="true", **options)
        rewards = [[r["rollout/reward"] for r in read_records(d / "metrics.jsonl")] for d in (whole, failed)]
        assert rewards[0] == rewards[1] and len(rewards[0]) == 3


def test_a_reward_that_never_succeeds_stops_the_run_at_once(start, tmp_path):
    output = run(start, tmp_path, code=1, reward__kind="run_reward:fails", **OPTIONS)
    assert "evaluation first: all 2 rewards failed, and none succeeded" in output
    assert not read_records(tmp_path / "metrics.jsonl")


@pytest.mark.slow
def test_dynamic_sampling_does_not_refill_for_ever(start, tmp_path):
    kind = {"reward__kind": "run_reward:fails_later", "algorithm__dynamic_sampling": "true"}
    output = run(start, tmp_path, code=1, **kind, **OPTIONS)
    assert "all 16 rewards failed" in output
