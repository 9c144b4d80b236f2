import math

from megatron_rlspec.records.live import choice_line, line

RECORD = {
    "rollout/reward": 0.5,
    "rollout/failed_rewards": 0.0,
    "rollout/accept_length": 2.25,
    "rollout/groups_without_advantage": 0.25,
    "rollout/truncated": 0.0,
    "policy/loss": 0.0,
    "spec/share_k3": 0.75,
    "spec/share_off": 0.25,
    "spec/share_k5": 0.0,
    "seconds_generate": 3.0,
    "seconds_train": 1.0,
}


def test_a_step_is_one_line_of_what_changes():
    shown = "reward 0.500  no advantage 25%  accept length 2.25  generate 3.0 s  train 1.0 s  k3 75%, off 25%"
    assert line(4, 30, RECORD, 125.0) == f"step 5/30  {shown}  2 min left"
    record = {"rollout/accept_length": math.nan, "policy/loss": 1.5, "seconds_train": 0.5}
    assert line(2, 9, record) == "step 3/9  loss 1.500  train 0.5 s"


def test_what_the_choice_of_drafts_saved_is_one_line():
    chose = {"spec/ragged_saved_seconds": 1.5, "spec/verified_drafts": 2.0, "spec/accepted_drafts": 1.9}
    other = {"spec/ragged_saved_seconds": -0.5, "spec/verified_drafts": 3.0, "spec/accepted_drafts": 2.1}
    assert choice_line([{"spec/rounds": 3.0}]) == ""
    assert "saved about 1.0 s" in choice_line([{}, chose, other])
    assert "2.00 of 2.50 verified drafts" in choice_line([{}, chose, other])
    assert "cost about 0.5 s" in choice_line([other])
