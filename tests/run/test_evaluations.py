"""Evaluations: several responses to a prompt, another temperature, and the best of k."""

import itertools
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from short_run import run
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_rlspec.config import ConfigError, load
from megatron_rlspec.records.recorder import read_records
from megatron_rlspec.run.summaries import best_of
from megatron_rlspec.types import Group, Prompt, Sample

OPTIONS = {"rollout__engine": "embedded", "spec__mode": "fixed", "train__steps": 1, "train__eval_samples": 4}


def group(rewards) -> Group:
    prompt = Prompt(0, np.arange(2))
    tokens = np.arange(3)
    samples = [Sample(f"s{i}", prompt, tokens, np.ones(3), np.zeros(3)) for i in range(len(rewards))]
    for sample, reward in zip(samples, rewards, strict=True):
        sample.reward = reward
    return Group(prompt, samples)


def test_the_best_of_k_is_the_mean_over_all_choices():
    draw = np.random.default_rng(0)
    groups = [group(draw.random(6).round(1).tolist()) for _ in range(3)]
    found = best_of(groups)
    assert list(found) == [2, 4, 6]
    for k, value in found.items():
        choices = [
            np.mean([max(s.reward for s in chosen) for chosen in itertools.combinations(g.samples, k)]) for g in groups
        ]
        assert value == pytest.approx(np.mean(choices))
    assert best_of([group([1.0])]) == {} and best_of([group([0.0, 1.0])]) == {2: 1.0}


def evaluations(run_dir: Path) -> list[dict]:
    return [e for e in read_records(run_dir / "events.jsonl") if e["kind"] == "evaluation"]


def test_an_evaluation_draws_several_responses(start, tmp_path):
    kind = {"reward__kind": "run_reward:by_length"}
    run(start, tmp_path / "several", **OPTIONS, **kind, train__eval_prompts=4)
    rows = tmp_path / "rows.jsonl"
    long = {"prompt": "1" * 2000, "label": "1"}
    rows.write_text((start / "task/rl.jsonl").read_text() + json.dumps(long) + "\n")
    sets = {"data__path": rows, "data__eval_sets": f"first-8={rows},own={start / 'task/eval.jsonl'}"}
    sets |= {"train__save_best": "true", "train__eval_every": 1}
    greedy = OPTIONS | {"train__eval_samples": 1, "train__eval_temperature": 0}
    run(start, tmp_path / "greedy", **greedy, **kind, train__eval_prompts=4, **sets)
    several, greedy = (evaluations(tmp_path / name)[0] for name in ("several", "greedy"))
    assert several["samples"] == 16 and several["prompts"] == 4
    assert several["reward"] < several["pass_2"] < several["pass_4"]
    assert f"pass@4 {several['pass_4']:.3f} on 4 held-out prompts" in several["message"]
    assert greedy["samples"] == 4 and "pass_2" not in greedy
    records = [json.loads(line) for line in (tmp_path / "greedy/metrics.jsonl").read_text().splitlines()]
    assert records[0]["rollout/reward_std"] > 0  # rollouts keep their temperature
    of_sets(tmp_path / "greedy", greedy)
    told = [e["message"] for e in read_records(tmp_path / "greedy/events.jsonl") if e["kind"] == "data"]
    left_out = [line for line in told if "left out" in line]
    assert left_out == [f"{rows}: 64 prompts; 1 others are left out, of more than 232 tokens"] * 2
    (tmp_path / "greedy/hf-best/reward.json").write_text('{"reward": 1e9}')  # a resumed run keeps no worse policy
    shutil.rmtree(tmp_path / "greedy/hf")
    options = OPTIONS | sets | {"train__steps": 2, "train__resume": "true"}
    run(start, tmp_path / "greedy", **options, **kind, train__eval_prompts=4)
    assert [e["kind"] for e in read_records(tmp_path / "greedy/events.jsonl")].count("best") == 1


def of_sets(run_dir: Path, held_out: dict) -> None:
    """Every evaluation has an event for each set. The best policy is that of `data.eval_path`."""
    found = evaluations(run_dir)
    assert [e.get("set", "") for e in found] == ["", "first-8", "own"] * 2  # first, last
    own = next(e for e in found if e.get("set") == "own")
    assert own["reward"] == held_out["reward"] and "first, own: reward" in own["message"]  # the same file
    best = [e["message"] for e in read_records(run_dir / "events.jsonl") if e["kind"] == "best"]
    last = next(e for e in found if e["name"] == "last" and "set" not in e)
    assert f"reward {last['reward']:.3f} is the highest" in best[0]
    assert json.loads((run_dir / "hf-best/reward.json").read_text()) == {"reward": last["reward"]}
    board = EventAccumulator(str(run_dir / "tensorboard"))
    board.Reload()
    for which, prefix in (("first-8", "eval/first-8/"), ("", "eval/")):
        expected = [e["reward"] for e in found if e.get("set", "") == which]
        values = {s.step: s.value for s in board.Scalars(f"{prefix}reward")}
        assert values == pytest.approx({0: expected[0], 1: expected[-1]})


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"data.eval_sets": "a"}, "data.eval_sets=a: expected NAME=PATH"),
        ({"data.eval_sets": "a=x,a=y"}, "data.eval_sets=a=x,a=y: one name twice"),
    ],
)
def test_wrong_sets_are_refused(options, line):
    with pytest.raises(ConfigError, match=line):
        given = {"model.path": "m", "data.path": "d.jsonl", "data.eval_path": "held-out.jsonl"}
        load(overrides=given | options).check_run("train", 1)
