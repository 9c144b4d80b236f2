"""`rlspec train` on two ranks with an embedded engine each: texts, moves, and bytes after a resume."""

from __future__ import annotations

import json
import shutil

import pytest
from short_run import run

from megatron_rlspec.config import ConfigError, load
from megatron_rlspec.metrics import read_records
from megatron_rlspec.weights.checkpoint import read_hf

OPTIONS = {
    "rollout__engine": "embedded",
    "spec__mode": "fixed",
    "spec__ridge_tokens": 1,  # on a CPU every token of a round costs
    "tail__rebalance": "kv",
    "tail__every": 4,
    "tail__gain": 0.0,
    "train__eval_prompts": 1,
    "train__tokens_per_micro_batch": 256,
}
FIRST = ("rollout/samples", "rollout/reward", "rollout/response_tokens", "rollout/longest_response")


@pytest.mark.slow
def test_two_ranks_draw_together_and_resume_with_the_same_bytes(start, tmp_path):
    whole, parted, alone = (tmp_path / name for name in ("whole", "parted", "alone"))
    run(start, alone, **OPTIONS | {"tail__rebalance": "off", "train__steps": 1})
    run(start, whole, ranks=2, **OPTIONS, train__steps=2)
    run(start, parted, ranks=2, **OPTIONS, train__steps=1)
    shutil.rmtree(parted / "hf")
    run(start, parted, ranks=2, **OPTIONS, train__steps=2, train__resume="true")
    ours, theirs = (read_records(folder / "metrics.jsonl") for folder in (whole, alone))
    assert [ours[0][name] for name in FIRST] == [theirs[0][name] for name in FIRST]
    moves = [json.loads(line) for line in (whole / "moves.jsonl").read_text().splitlines()]
    assert any(move["ids"] for row in moves for move in row["moves"])
    again, once = (read_hf(folder / "hf")[1] for folder in (parted, whole))
    assert all((again[name] == once[name]).all() for name in once)


@pytest.mark.slow
@pytest.mark.parametrize(
    "option", [{"rollout__staleness": 1}, {"drafter__overlap": "true", "drafter__replay": "newest"}]
)
def test_ranks_train_while_they_draw(start, tmp_path, option):
    """Main threads train while the threads of the fleet draw; texts are those of one rank."""
    options = OPTIONS | option | {"train__steps": 2}
    run(start, tmp_path / "alone", **options | {"tail__rebalance": "off"})
    run(start, tmp_path / "two", ranks=2, **options)
    ours, theirs = (read_records(tmp_path / name / "metrics.jsonl") for name in ("two", "alone"))
    assert [ours[0][name] for name in FIRST] == [theirs[0][name] for name in FIRST]


def test_one_rank_has_no_other_engine_to_move_samples_to(tmp_path):
    given = {"rollout.engine": "embedded", "tail.rebalance": "kv", "model.path": "m", "data.path": "d"}
    config = load(None, given | {"train.run_dir": str(tmp_path)})
    with pytest.raises(ConfigError, match="tail.rebalance=kv moves samples between engines.*expected several ranks"):
        config.check_run("train", 1)
