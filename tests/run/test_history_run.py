"""Runs with `spec.history` and `rollout.seeds`: the policy is that of a run without old answers, in fewer rounds."""

import pytest
import torch
from short_run import make_start, run

from megatron_rlspec.config import ConfigError, load
from megatron_rlspec.models.hf_files import read_hf
from megatron_rlspec.records.recorder import read_records
from megatron_rlspec.run.trajectory import Trajectory

# Without tis_clip the engine's log-probs, whose rounding follows the batch, do not reach the policy. An epoch: 4 steps.
OPTIONS = {"spec__mode": "fixed", "algorithm__tis_clip": 0, "train__eval_prompts": 1, "train__steps": 9}


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    folder = make_start(tmp_path_factory.mktemp("start"))
    rows = (folder / "task/rl.jsonl").read_text().splitlines()
    (folder / "task/rl.jsonl").write_text("\n".join(rows[:16]) + "\n")
    return folder


def policy(run_dir) -> dict[str, torch.Tensor]:
    return dict(read_hf(run_dir / "hf")[1].items())


def rounds(run_dir, first: int) -> float:
    return sum(record["spec/rounds"] for record in read_records(run_dir / "metrics.jsonl")[first:])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "seeds"), [("embedded", "fresh"), ("embedded", "prompt"), ("sglang", "prompt"), ("sglang", "fresh")]
)
def test_old_answers_save_rounds_and_leave_the_policys_bits(start, tmp_path, engine, seeds):
    options = OPTIONS | {"rollout__engine": engine, "rollout__seeds": seeds}
    run(start, tmp_path / "without", **options)
    run(start, tmp_path / "with", **options, spec__history="true")
    expected = policy(tmp_path / "without")
    assert [name for name, t in policy(tmp_path / "with").items() if not torch.equal(t, expected[name])] == []
    if seeds == "prompt":  # the model's answers are random, so those of other seeds are no drafts
        assert rounds(tmp_path / "with", 4) < rounds(tmp_path / "without", 4)
    for plain, record in zip(*(read_records(tmp_path / n / "metrics.jsonl") for n in ("without", "with")), strict=True):
        assert record["rollout/reward"] == plain["rollout/reward"]
        assert record["rollout/response_tokens"] == plain["rollout/response_tokens"]
        same_seeds = [record.get(f"rollout/{name}_tokens") for name in ("old", "repeated")]
        if seeds == "prompt":
            assert same_seeds == [plain.get(f"rollout/{name}_tokens") for name in ("old", "repeated")]
        assert same_seeds[0] == 0 if record["step"] < 4 else same_seeds[0] > 0 or seeds == "fresh"
        assert same_seeds[1] <= same_seeds[0]
        assert ("predict/error" in record) == (record["step"] > 0 and not same_seeds[0]), record["step"]
        assert ("predict/error" in plain) == (record["step"] > 0)


@pytest.mark.slow
@pytest.mark.parametrize("seeds", ["fresh", "prompt"])
def test_prompts_seeds_repeat_in_every_epoch(start, tmp_path, seeds):
    """The policy does not change, so the same seeds give the same answers."""
    options = {"rollout__engine": "embedded", "spec__mode": "off", "optimizer__lr": 1e-30, "train__steps": 8}
    run(start, tmp_path / "run", **options, rollout__seeds=seeds, train__record_gib=1, drafter__train="false")
    recorded = Trajectory(tmp_path / "run")
    answers: list[dict[int, list]] = [{}, {}]
    for step in range(8):
        for group in recorded.groups(step):
            answers[step // 4][group.prompt.id] = [(s.seed, s.response.tolist()) for s in group.samples]
    assert len(answers[0]) == len(answers[1]) == 16
    assert (answers[0] == answers[1]) == (seeds == "prompt")
    for epoch in answers:
        assert len({seed for group in epoch.values() for seed, _ in group}) == 16 * 4, "no two samples share a seed"


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"spec.verifier": "target_only"}, "spec.history"),
        ({"rollout.function": "tool:use"}, "one reply"),
        ({"spec.mode": "off"}, "spec.history"),
        ({"rollout.seeds": "epoch"}, "'fresh' or 'prompt'"),
    ],
)
def test_what_old_answers_cannot_draft_is_refused_in_one_line(options, line):
    asked = {"spec.history": "true", "rollout.seeds": "prompt"}
    assert load(None, asked).spec.history
    with pytest.raises(ConfigError, match=line):
        load(None, asked | options)
