"""The engines of several ranks as one: texts, moves, pushes, aborts and errors."""

from __future__ import annotations

from types import SimpleNamespace

import fleet_rank
import pytest
from train_ranks import on_ranks

from megatron_rlspec.extensions.migration.embedded.fleet import Fleet
from megatron_rlspec.push.fingerprint import compare


@pytest.mark.parametrize("moves", [pytest.param(False, marks=pytest.mark.slow), True], ids=["queue", "moves"])
def test_a_fleet_generates_what_one_engine_generates(tmp_path, moves):
    found, *others = on_ranks(3, fleet_rank.scenario, str(tmp_path / "meeting"), moves)
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
    assert bool(found["plans"]) == bool(records) == moves
    for record in records:
        assert record["source"] != record["target"] and record["how"] == "kv"
        assert record["bytes"] > 0 and record["tokens"] > 0 and not record["refused"]
    assert {id for record in records for id in record["ids"]} <= {request.id for request in fleet_rank.requests()}


@pytest.mark.parametrize("rank", [0, 2])
def test_a_tensor_that_one_rank_alone_holds_otherwise_is_found(rank):
    held = [{"good": 7, "changed": 8, "lost": 9} for _ in range(3)]
    held[rank] = {"good": 7, "changed": 5, "more": 6}
    told = SimpleNamespace(tell=lambda order: None)
    fleet = Fleet(SimpleNamespace(ranks=told, call=lambda *order: held), 8)
    found = compare({"good": 7, "changed": 8, "lost": 9}, fleet.fingerprints())
    assert found.differing == ("changed", "lost") and found.extra == ("more",)
