import math

from megatron_rlspec.records.live import line

RECORD = {
    "rollout/reward": 0.5,
    "rollout/accept_length": 2.25,
    "rollout/tokens_per_second": 1234.4,
    "spec/share_k3": 0.75,
    "spec/share_off": 0.25,
    "spec/share_k5": 0.0,
    "seconds_generate": 3.0,
    "seconds_train": 1.0,
}


def test_a_step_is_one_line():
    shown = "reward 0.500  accept length 2.25  tokens/s 1234  generate 3.00 s  train 1.00 s  k3 75%, off 25%"
    assert line(4, 30, RECORD) == f"step 5/30  {shown}"
    assert line(5, 30, {"rollout/reward": math.nan}) == "step 6/30  reward nan"
    assert line(2, 9, {"policy/loss": 1.5, "seconds_train": 0.5}) == "step 3/9  loss 1.500  train 0.50 s"
