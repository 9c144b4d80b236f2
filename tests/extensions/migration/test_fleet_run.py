"""`rlspec train` on two ranks with an embedded engine each: texts, and bytes after a resume."""

from __future__ import annotations

import json
import time
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file
from short_run import run, train
from test_interrupted import told

from megatron_rlspec.config import ConfigError, load
from megatron_rlspec.records.recorder import read_records
from megatron_rlspec.run.trajectory import FOLDER

OPTIONS = {
    "rollout__engine": "embedded",
    "spec__mode": "fixed",
    "tail__rebalance": "true",
    "tail__every": 4,
    "train__eval_prompts": 1,
    "train__tokens_per_micro_batch": 256,
}
STILL = {name: value for name, value in OPTIONS.items() if name.startswith(("rollout", "spec__mode", "train"))}
FIRST = ("rollout/samples", "rollout/reward", "rollout/response_tokens", "rollout/longest_response")


@pytest.mark.slow
def test_ranks_train_while_they_draw(start, tmp_path, monkeypatch):
    """Main threads train while the threads of the fleet draw; texts are those of one rank."""
    option = {"rollout__staleness": 1, "train__steps": 2}
    run(start, tmp_path / "alone", **STILL, **option)
    monkeypatch.setenv("RIDGE", "1")
    run(start, tmp_path / "two", ranks=2, module="given_costs", **OPTIONS, **option)
    ours, theirs = (read_records(tmp_path / name / "metrics.jsonl") for name in ("two", "alone"))
    assert [ours[0][name] for name in FIRST] == [theirs[0][name] for name in FIRST]


def sizes_table(path):
    """Durations in which two ranks together are four times as fast as one, whatever the batch."""
    rounds = [
        [tp, batch, batch * length, drafts, 8.0 / tp**2 * (1 + 0.1 * drafts)]
        for tp in (1, 2) for batch in (1, 4, 16) for length in (16, 256) for drafts in (0, 3)
    ]  # fmt: skip
    path.write_text(json.dumps({"rounds": rounds}))
    return str(path)


@pytest.mark.slow
def test_two_ranks_join_into_one_engine_and_draw_the_same(start, tmp_path):
    options = STILL | {"train__steps": 2}
    run(start, tmp_path / "alone", **options)
    options |= {"tail__every": 4}
    table = sizes_table(tmp_path / "sizes.json")
    run(start, tmp_path / "two", ranks=2, **options, tail__tp="1,2", tail__cost_table=table)
    ours, theirs = (read_records(tmp_path / name / "metrics.jsonl") for name in ("two", "alone"))
    assert [ours[0][name] for name in FIRST] == [theirs[0][name] for name in FIRST]
    rows = [json.loads(line) for line in (tmp_path / "two" / "moves.jsonl").read_text().splitlines()]
    changes = [(change["from"], change["to"]) for row in rows for change in row["sizes"]]
    assert (1, 2) in changes and (2, 1) in changes


@pytest.mark.slow
def test_a_rank_killed_in_a_change_of_the_size_ends_the_run_which_resumes(start, tmp_path, monkeypatch):
    """Steps that were finished are kept; the step in progress is drawn anew, with the same texts."""
    options = STILL | {"tail__tp": "1,2", "tail__every": 4}
    options |= {"train__record_gib": 1, "train__steps": 4}
    options["tail__cost_table"] = sizes_table(tmp_path / "sizes.json")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run(start, whole, ranks=2, **options)
    monkeypatch.setenv("RUN", str(killed))
    moment = tmp_path / "killed.killed"
    process = train(start, killed, program=Path(__file__).parents[2] / "dying_run.py", ranks=2, **options)
    while not moment.exists():
        assert process.poll() is None, process.communicate()[0][-3000:]
        time.sleep(0.01)
    lines = told(process, 1, psutil.Process(process.pid).children(recursive=True), count=2)
    assert "another rank ended or cannot be reached" in lines and "rank 1 was ended by SIGKILL" in lines
    assert [record["step"] for record in read_records(killed / "metrics.jsonl")] == [0, 1]
    recorded = {path.name: path.read_bytes() for path in (killed / FOLDER).iterdir()}
    assert len(recorded) == 2
    run(start, killed, ranks=2, **options, train__resume="true")
    assert [record["step"] for record in read_records(killed / "metrics.jsonl")] == list(range(4))
    for name, content in recorded.items():
        assert (killed / FOLDER / name).read_bytes() == content, name
    for folder in ("hf", "checkpoints/step-000004"):
        for path in (whole / folder).glob("*.safetensors"):
            assert path.read_bytes() == (killed / folder / path.name).read_bytes(), path
    for path in (whole / FOLDER).iterdir():  # each names its run, too
        expected, found = load_file(path), load_file(killed / FOLDER / path.name)
        assert expected and expected.keys() == found.keys(), path
        assert all(torch.equal(expected[name], found[name]) for name in expected), path


@pytest.mark.parametrize(
    ("given", "ranks", "message"),
    [
        ({"tail.tp": "1,3,4"}, 4, "expected 1 and then multiples of the size before, such as 1,2,4"),
        ({"tail.tp": "1,4", "tail.cost_table": "t"}, 2, "tail.tp=1,4 needs a multiple of 4 ranks, but 2"),
        ({"tail.rebalance": "true"}, 1, "tail.rebalance=true moves samples between engines.*expected several ranks"),
        ({"tail.rebalance": "true", "spec.verifier": "target_only"}, 2, "tail.rebalance=true continues samples"),
    ],
)
def test_options_that_cannot_be_are_refused(given, ranks, message):
    with pytest.raises(ConfigError, match=message):
        load(None, {"rollout.engine": "embedded", "model.path": "m", "data.path": "d"} | given).check_run(
            "train", ranks
        )
