"""The limit on log-probs that differ between engines and trainer, and acceptance that falls."""

import pytest

from megatron_rlspec.config import load
from megatron_rlspec.run.engines import RunDraftRule
from megatron_rlspec.run.logprob_gap import GAP, LogprobGap
from megatron_rlspec.speculation.learning import Learning
from megatron_rlspec.speculation.roofline import Roofline
from megatron_rlspec.types import RoundStats, SpecConfig


@pytest.mark.parametrize(
    ("options", "seen", "limit"),
    [
        ((None, "float32", False), [], 0.01),  # a wrong matrix moves it by 0.02 to 0.05
        ((None, "float32", False), [1e-7] * 3, 1e-4),
        ((None, "bfloat16", False), [0.001, 0.004, 0.04, 0.008], 0.03),
        ((None, "float32", True), [1e-7] * 3, 0.5),
        ((2.0, "float32", False), [1e-7] * 3, 2.0),
    ],
)
def test_the_limit_follows_the_type_and_what_the_run_has_seen(options, seen, limit):
    gap = LogprobGap(*options)
    for value in seen:
        gap.observe({GAP: value})
    assert gap.limit == pytest.approx(limit)
    resumed = LogprobGap(*options)
    resumed.restore(gap.seen)
    assert resumed.limit == gap.limit and len(gap.seen) <= 20


def test_first_drafts_that_are_accepted_half_as_often_make_a_canary_due(tmp_path):
    learning = Learning([0, 3], Roofline.of_layers(8))
    speculation = RunDraftRule(load(None, {"spec.candidate_steps": "0,3"}).spec, learning, tmp_path / "rule.json")

    def fell(refused, accepted):
        rounds = [RoundStats(SpecConfig(3), 1, 40, 200, 200.0, (refused, accepted, 0, 0))]
        speculation.learn([("a", rounds)], [], None, 1.0)
        return speculation.fell

    assert [fell(80, 120), fell(100, 100), fell(150, 50)] == [False, False, True]
    assert not fell(9, 1), "ten rounds show nothing"
