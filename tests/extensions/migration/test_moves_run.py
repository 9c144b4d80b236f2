"""`rlspec train` with two SGLang engines between which running samples move."""

import pytest
from short_run import run
from test_lost_engines import drawn

from megatron_rlspec.commands import report
from megatron_rlspec.records.recorder import read_records


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
