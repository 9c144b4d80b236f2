"""The engines of several ranks as one: texts, moves, pushes, pauses, aborts and errors."""

from __future__ import annotations

import fleet_rank
import pytest
from train_ranks import on_ranks


@pytest.mark.parametrize("modes", [(), ("kv",), ("recompute",)], ids=["off", "kv", "recompute"])
def test_a_fleet_draws_what_one_engine_draws(tmp_path, modes):
    found, *others = on_ranks(3, fleet_rank.scenario, str(tmp_path / "meeting"), modes)
    wanted = [s.tokens.tolist() for s in fleet_rank.engine().generate(fleet_rank.requests(), fleet_rank.LONG)]
    assert found["texts"] == wanted and found["seen"] and found["again"] == [wanted, wanted]
    assert all(versions == ((1, 0, 60),) for versions in found["versions"])
    assert "rank 0" in found["refused"] and "shape" in found["refused"]
    assert "did not finish" in found["broken"]
    assert found["same"] and found["left"] and "already in use" in found["twice"]
    assert set(found["aborted"]) <= {"aborted", "truncated"} and "aborted" in found["aborted"]
    assert found["early"] == [("aborted", 0)] * len(wanted), "aborted before any rank had it"
    assert all(plans == found["plans"] for plans in others), "all ranks made the same plans"
    moves = found["moved"]["moves"]
    if not modes:
        assert not moves and not found["plans"]
        return
    assert found["plans"] and sum(len(move["ids"]) for move in moves) >= 4
    for move in moves:
        assert (
            move["source"] != move["target"] and move["how"] == modes[0] and move["bytes"] > 0 and not move["refused"]
        )
        # A sample runs on its source in one round, and on its target in the next.
        assert move["rounds"] <= (1 if modes == ("recompute",) else 0)
    stays = found["moved"]["stays"]
    assert len(stays) == len(wanted) + sum(len(move["ids"]) for move in moves)
    assert {id for id, *_ in stays} == {request.id for request in fleet_rank.requests()}
