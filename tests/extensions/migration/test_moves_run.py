"""`rlspec train` with two SGLang engines between which running samples move."""

from pathlib import Path

import pytest
from short_run import costs_of_tokens, run
from test_lost_engines import drawn

from megatron_rlspec.commands import report
from megatron_rlspec.records.recorder import read_records
from megatron_rlspec.speculation.cost_table import CostTable, PrefillCost, Provenance, RoundCost
from megatron_rlspec.types import OFF, SpecConfig


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_whose_samples_move_draws_the_same(start, tmp_path):
    """A step has one prompt, whose samples begin on one engine. In the cost model every sample costs its share."""
    options = {"rollout__engines": 2, "rollout__prompts_per_step": 1, "rollout__samples_per_prompt": 16}
    options |= {"rollout__max_new_tokens": 160, "train__steps": 3, "train__save_every": 0}
    options["spec__cost_table"] = costs_of_tokens(tmp_path / "costs.json")
    run(start, tmp_path / "still", **options)
    run(start, tmp_path / "moved", tail__rebalance="auto", tail__every=4, **options)
    assert drawn(tmp_path / "moved") == drawn(tmp_path / "still")
    assert not (tmp_path / "still/moves.jsonl").exists()
    rows = read_records(tmp_path / "moved/moves.jsonl")
    moved = [move for row in rows for move in row["moves"] if move["ids"]]
    assert moved and all(move["why"] and move["ms"] > 0 and move["rounds"] > 0 for move in moved)
    print([(m["how"], len(m["ids"]), m["kept"], m["bytes"], round(m["ms"]), round(m["rounds"], 1)) for m in moved])
    assert report.main([str(tmp_path / "moved")]) == 0


def table_of_sizes(path: Path) -> Path:
    """Write costs by which an engine of two ranks is faster below about 24 samples, and slower above."""
    here = Provenance(model="m", hardware="h", dtype="float32", engine="e", engine_version="", date="2026-01-01")
    rounds = [
        RoundCost(tp, batch, batch * length, config, (20 / tp + batch * tp / 6) * (1 + config.num_steps / 10))
        for tp in (1, 2)
        for batch in (1, 4, 16, 64)
        for length in (16, 256)
        for config in (OFF, SpecConfig(1), SpecConfig(3))
    ]
    prefill = [PrefillCost(tp, 1, tokens, tokens / 10) for tp in (1, 2) for tokens in (16, 4096)]
    CostTable(here, rounds, prefill).save(path)
    return path


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_stragglers_of_a_run_end_on_the_fast_lane(start, tmp_path):
    """One engine of one rank draws everything; the last samples go on on an engine of two ranks, with their caches."""
    options = {"rollout__prompts_per_step": 2, "rollout__samples_per_prompt": 8, "rollout__max_new_tokens": 160}
    options |= {"train__steps": 2, "train__save_every": 0, "train__eval_prompts": 1}
    run(start, tmp_path / "still", **options)
    lane = {"tail__lane": 2, "tail__every": 4, "tail__cost_table": table_of_sizes(tmp_path / "table.json")}
    run(start, tmp_path / "moved", tail__rebalance="kv", **lane, **options)
    assert drawn(tmp_path / "moved") == drawn(tmp_path / "still")
    rows = read_records(tmp_path / "moved/moves.jsonl")
    moved = [move for row in rows for move in row["moves"] if move["ids"]]
    assert any(move["target"] == "lane" and move["tp"] == [1, 2] and move["kept"] for move in moved)
    assert all("tensor-parallel size" in move["why"] for move in moved)
    first = {id: move["source"] for move in reversed(moved) for id in move["ids"]}
    assert set(first.values()) == {"engine-0"}, "the lane was given a prompt"
    print([(move["tp"], len(move["ids"]), move["kept"], round(move["ms"]), round(move["rounds"], 1)) for move in moved])
    assert report.main([str(tmp_path / "moved")]) == 0
