"""`rlspec train` with two fleets of SGLang engines on the same devices: the second one takes over in the tail."""

import tempfile
import threading
from pathlib import Path

import psutil
import pytest
from short_run import finish, run, train
from test_lost_engines import drawn

from megatron_rlspec.commands import report
from megatron_rlspec.records.recorder import read_records
from megatron_rlspec.speculation.cost_table import CostTable, PrefillCost, Provenance, RoundCost
from megatron_rlspec.types import OFF, SpecConfig

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
RUN = Path(__file__).parent / "two_fleets_run.py"
STEPS = 6
OPTIONS = {"rollout__engines": 2, "rollout__prompts_per_step": 2, "rollout__samples_per_prompt": 6}
# Long answers and several steps, so that some samples still go on when the second fleet is awake.
OPTIONS |= {"rollout__max_new_tokens": 480, "model__max_length": 512, "train__steps": STEPS}
OPTIONS |= {"train__save_every": 0, "train__eval_prompts": 1}
OPTIONS |= {"spec__mode": "fixed", "spec__num_steps": 1}


def two_fleets(folder: Path, pays: bool) -> dict[str, object]:
    """Return options of a second fleet of one engine. An engine of two ranks takes half, or twice, as long a round."""
    folder.mkdir(exist_ok=True)
    here = Provenance(model="m", hardware="h", dtype="float32", engine="e", engine_version="", date="2026-01-01")
    rounds = [
        RoundCost(tp, batch, batch * length, config, 100 * (0.5 if pays else 2.0) ** (tp - 1) + batch)
        for tp in (1, 2)
        for batch in (1, 4, 16, 64)
        for length in (16, 256)
        for config in (OFF, SpecConfig(1), SpecConfig(3))
    ]
    prefill = [PrefillCost(tp, 1, tokens, tokens / 10) for tp in (1, 2) for tokens in (16, 4096)]
    CostTable(here, rounds, prefill).save(folder / "table.json")
    options = {"tail__rebalance": "true", "tail__every": 4, "tail__tp": "1,2"}
    return options | {"tail__cost_table": folder / "table.json"}


@pytest.fixture
def tidy(start, monkeypatch):
    """Check that the engines of a test leave no process, no directory and no file of a cache."""
    folder = Path(tempfile.mkdtemp(prefix="two-"))
    monkeypatch.setenv("TMPDIR", str(folder))
    names: set[str] = set()
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.02):
            names.update(path.name for path in folder.glob("rlspec-*"))

    watching = threading.Thread(target=watch)
    watching.start()
    yield
    ended.set()
    watching.join()
    assert len(names) >= 3 and not list(folder.iterdir())
    folder.rmdir()
    assert not [path for path in Path("/dev/shm").iterdir() if any(name in path.name for name in names)]
    commands = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    assert not [command for command in commands if str(start / "model") in command]


def rows_of(run_dir: Path) -> list[dict]:
    return read_records(run_dir / "moves.jsonl") if (run_dir / "moves.jsonl").exists() else []


@pytest.fixture(scope="module")
def still(start, tmp_path_factory):
    """Draw with one fleet."""
    folder = tmp_path_factory.mktemp("still") / "run"
    run(start, folder, **OPTIONS)
    return folder


def test_a_second_fleet_ends_rollouts_with_the_same_texts(start, still, tidy, tmp_path):
    output = finish(train(start, tmp_path / "two", **OPTIONS, **two_fleets(tmp_path / "pays", pays=True)))
    assert drawn(tmp_path / "two") == drawn(still)
    rows = rows_of(tmp_path / "two")
    changes = [change for row in rows for change in row["sizes"]]
    print(changes)
    assert changes and all((change["from"], change["to"]) == (1, 2) and change["ms"] > 0 for change in changes)
    moves = [move for row in rows for move in row["moves"] if move["target"] == "second-0"]
    assert moves and all(move["began"] >= 0 and move["ms"] > 0 for move in moves)
    ours, theirs = (read_records(folder / "metrics.jsonl") for folder in (tmp_path / "two", still))
    of_steps = [sum(len(row["sizes"]) for row in rows if row["step"] == step) for step in range(STEPS)]
    evaluated = [row for row in rows if all(id.startswith("e-") for move in row["moves"] for id in move["ids"])]
    in_steps = sum(of_steps) - sum(len(row["sizes"]) for row in evaluated)
    assert sum(record["rollout/size_changes"] for record in ours) == in_steps > 0
    assert "size changes" in output
    for name in ("rollout/accept_length", "policy/entropy", "drafter/loss_1"):
        expected = [record[name] for record in theirs]
        assert [record[name] for record in ours] == pytest.approx(expected, rel=0.02), name
    assert min(record["rollout/accept_length"] for record in ours) > 1  # the pushed drafters draft
    # A round yields at most 2 tokens of a sample, so the longest sample's rounds on both fleets are counted.
    assert all(record["spec/rounds"] > 0.4 * record["rollout/longest_response"] for record in ours)
    assert report.main([str(tmp_path / "two")]) == 0


def test_a_second_fleet_that_does_not_pay_sleeps_on(start, still, tmp_path):
    run(start, tmp_path / "run", **OPTIONS, **two_fleets(tmp_path / "costs", pays=False))
    assert drawn(tmp_path / "run") == drawn(still)
    assert not [change for row in rows_of(tmp_path / "run") for change in row["sizes"]]
    assert all(record["rollout/size_changes"] == 0 for record in read_records(tmp_path / "run/metrics.jsonl"))


REASONS = {
    "asleep": "it ended while it slept",
    "leaving": "wake failed: the engine ended",
    "awake": "generate broke off: the engine ended with code -9",
}


@pytest.mark.parametrize("moment", REASONS)
def test_a_killed_second_fleet_costs_no_sample(start, still, tidy, tmp_path, monkeypatch, moment):
    monkeypatch.setenv("KILLED", moment)
    run_dir = tmp_path / "run"
    options = OPTIONS | {"data__eval_path": ""}  # the one sample of an evaluation can end before the kill
    finish(train(start, run_dir, program=RUN, **options, **two_fleets(tmp_path / "pays", pays=True)))
    assert drawn(run_dir) == drawn(still)
    told = [event["message"] for event in read_records(run_dir / "events.jsonl") if event["kind"] == "engine"]
    assert len(told) == 1 and told[0].startswith("second-0: left out, 2 remain:"), told
    assert REASONS[moment] in told[0], told
    changes = [change for row in rows_of(run_dir) for change in row["sizes"]]
    assert len(changes) == (moment == "awake")
