"""The engines of several ranks as one, alone and in `rlspec train`: texts, moves, pushes, and bytes after a resume."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace

import fleet_rank
import psutil
import pytest
import torch
from safetensors.torch import load_file
from short_run import run, train
from test_interrupted import told
from test_lost_engines import drawn
from train_ranks import on_ranks

from megatron_rlspec.commands import report
from megatron_rlspec.config import ConfigError, load
from megatron_rlspec.extensions.migration.embedded.fleet import Fleet
from megatron_rlspec.push.fingerprint import compare
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


@pytest.fixture(scope="module")
def alone(start, tmp_path_factory):
    """The first step's metrics of a run on one rank."""
    folder = tmp_path_factory.mktemp("alone")
    run(start, folder, **STILL, train__steps=1)
    return first_step(folder)


def first_step(folder):
    record = read_records(folder / "metrics.jsonl")[0]
    return [record[name] for name in FIRST]


@pytest.mark.slow
def test_ranks_train_while_they_draw(start, alone, tmp_path, monkeypatch):
    """Main threads train while the threads of the fleet draw; texts are those of one rank."""
    monkeypatch.setenv("RIDGE", "1")
    run(start, tmp_path, ranks=2, module="given_costs", **OPTIONS, rollout__staleness=1, train__steps=2)
    assert first_step(tmp_path) == alone


def sizes_table(path):
    """Durations in which two ranks together are four times as fast as one, whatever the batch."""
    rounds = [
        [tp, batch, batch * length, drafts, 8.0 / tp**2 * (1 + 0.1 * drafts)]
        for tp in (1, 2) for batch in (1, 4, 16) for length in (16, 256) for drafts in (0, 3)
    ]  # fmt: skip
    path.write_text(json.dumps({"rounds": rounds}))
    return str(path)


@pytest.mark.slow
def test_a_rank_killed_in_a_change_of_the_size_ends_the_run_which_resumes(start, alone, tmp_path, monkeypatch):
    """Two ranks that join draw what one draws. Finished steps are kept; the step in progress is drawn anew."""
    options = STILL | {"tail__tp": "1,2", "tail__every": 4}
    options |= {"train__record_gib": 1, "train__steps": 4}
    options["tail__cost_table"] = sizes_table(tmp_path / "sizes.json")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run(start, whole, ranks=2, **options)
    assert first_step(whole) == alone
    changes = [(size["from"], size["to"]) for row in read_records(whole / "moves.jsonl") for size in row["sizes"]]
    assert (1, 2) in changes and (2, 1) in changes
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


def test_a_fleet_generates_what_one_engine_generates(tmp_path):
    found, *others = on_ranks(3, fleet_rank.scenario, str(tmp_path / "meeting"))
    wanted = [s.tokens.tolist() for s in fleet_rank.engine().generate(fleet_rank.requests(), fleet_rank.LONG)]
    assert found["texts"] == wanted and found["seen"] and found["again"] == [wanted, wanted]
    assert all(versions == ((1, 0, 60),) for versions in found["versions"])
    assert "rank 0" in found["refused"] and "shape" in found["refused"]
    assert "did not finish" in found["broken"]
    assert found["waited"] == [4], "no tick runs during an update"
    assert found["same"] and found["left"] and "already in use" in found["twice"]
    assert found["aborted"] == ["aborted"]
    assert found["early"] == [("aborted", 0)] * len(wanted), "aborted before any rank had it"
    assert all(plans == found["plans"] for plans in others), "all ranks made the same plans"
    records = found["moved"]["moves"]
    assert found["plans"] and records
    for record in records:
        assert record["source"] != record["target"] and record["how"] == "kv"
        assert record["bytes"] > 0 and record["tokens"] > 0
    assert {id for record in records for id in record["ids"]} <= {request.id for request in fleet_rank.requests()}


@pytest.mark.parametrize("rank", [0, 2])
def test_a_tensor_that_one_rank_alone_holds_otherwise_is_found(rank):
    held = [{"good": 7, "changed": 8, "lost": 9} for _ in range(3)]
    held[rank] = {"good": 7, "changed": 5, "more": 6}
    told = SimpleNamespace(tell=lambda order: None)
    fleet = Fleet(SimpleNamespace(ranks=told, call=lambda *order: held), 8)
    found = compare({"good": 7, "changed": 8, "lost": 9}, fleet.fingerprints())
    assert found.differing == ("changed", "lost") and found.extra == ("more",)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_whose_samples_move_draws_the_same(start, tmp_path, monkeypatch):
    """A step has one prompt, whose samples begin on one engine. In the cost model every sample costs its share."""
    options = {"rollout__engines": 2, "rollout__prompts_per_step": 1, "rollout__samples_per_prompt": 16}
    options |= {"rollout__max_new_tokens": 160, "train__steps": 3, "train__save_every": 0}
    run(start, tmp_path / "still", **options)
    monkeypatch.setenv("RIDGE", "1")
    run(start, tmp_path / "moved", tail__rebalance="true", module="given_costs", **options)
    assert drawn(tmp_path / "moved") == drawn(tmp_path / "still")
    assert not (tmp_path / "still/moves.jsonl").exists()
    rows = read_records(tmp_path / "moved/moves.jsonl")
    moved = [move for row in rows for move in row["moves"] if move["ids"]]
    assert moved and all(move["ms"] > 0 and move["tokens"] > 0 for move in moved)
    assert {move["how"] for move in moved} == {"recompute"}
    assert report.main([str(tmp_path / "moved")]) == 0
