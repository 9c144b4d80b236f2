"""What drafts saved, by rounds whose plain durations are known."""

import math
from pathlib import Path

import pytest

from megatron_rlspec.config import SpecSection
from megatron_rlspec.records.live import saved_line
from megatron_rlspec.run.speculating import Speculation
from megatron_rlspec.speculation.learning import Learning
from megatron_rlspec.speculation.roofline import Roofline
from megatron_rlspec.speculation.saved import kept_share, saved
from megatron_rlspec.types import OFF, RoundStats, SpecConfig

DRAFTS = SpecConfig(2)


class Known:
    """A drafting round costs three units a request of the batch, a plain round two."""

    def grid(self, configs, batch, context_tokens):
        return [batch * (3.0 if config.num_steps else 2.0) for config in configs]


def test_rounds_are_compared_with_the_plain_rounds_of_their_tokens():
    # Five rounds of 4 requests deliver 2.5 tokens each: 12.5 plain rounds at 2/3 of the cost.
    drafting = RoundStats(DRAFTS, 4, 100, 5, 60.0, (4, 2, 14))
    found = saved([drafting], Known())
    assert found.ms == 60.0 and found.plain_ms == pytest.approx(60.0 * 2.5 * 2 / 3)
    assert found.gain == pytest.approx(5 / 3)
    refused = RoundStats(DRAFTS, 4, 100, 5, 60.0, (20, 0, 0))
    assert saved([refused], Known()).gain == pytest.approx(2 / 3)  # drafts that are never right cost time


def test_plain_rounds_and_unknown_acceptance_save_nothing():
    plain = RoundStats(OFF, 4, 100, 5, 40.0)
    unknown = RoundStats(DRAFTS, 4, 100, 5, 60.0)
    assert saved([plain, unknown], Known()) == (100.0, 100.0, 60.0)
    assert saved([], Known()).gain == 1.0


def test_drafts_past_the_end_of_samples_are_left_out():
    """Ten samples of 9 tokens: the prompt's pass brings one, and each of three rounds four, so four are late."""
    drafting = RoundStats(DRAFTS, 10, 100, 3, 60.0, (0, 0, 0, 30))
    assert kept_share([drafting], 8 / 3) == pytest.approx(80 / 120)
    assert saved([drafting], Known(), 8 / 3).plain_ms == pytest.approx(60.0 * 8 / 3 * 2 / 3)
    plain = RoundStats(OFF, 10, 100, 3, 40.0, (30,))
    assert kept_share([drafting, plain], (80 + 30) / 60) == pytest.approx(80 / 120)
    assert saved([drafting, plain], Known(), (80 + 30) / 60).gain == pytest.approx(8 / 3 * 2 / 3)
    assert kept_share([drafting], 5.0) == kept_share([drafting], math.nan) == kept_share([plain], 1.0) == 1.0


def test_without_timed_plain_rounds_nothing_is_said():
    """Fixed drafts never run a plain round, and costs by the model's sizes are no measurement."""
    drafting = RoundStats(DRAFTS, 16, 1000, 5, 60.0, (40, 20, 20))
    near, far = (RoundStats(OFF, batch, 1000, 5, 40.0, (5 * batch,)) for batch in (8, 128))
    for rounds, learn, known in (
        ([drafting], True, False),
        ([drafting, far], True, False),
        ([drafting, near], True, True),
        ([drafting, near], False, False),
        ([near], True, False),
    ):
        made = Learning((0, 2), "", Roofline.of_layers(12), learn=learn)
        assert ("spec/saved_seconds" in made.observe(rounds, [])) == known == (made.saved(rounds) is not None)


def test_the_first_drafts_are_told_with_their_gain_where_it_is_known():
    drafting, plain = RoundStats(DRAFTS, 16, 1000, 5, 60.0, (0, 0, 80)), RoundStats(OFF, 16, 1000, 3, 36.0, (48,))
    for rounds, known in (([drafting, plain], True), ([drafting], False)):
        made = Speculation(SpecSection(), Learning((0, 2), "", Roofline.of_layers(12)), Path("unused"))
        made.learning.observe(rounds, [])
        told = made.began(rounds, math.nan)
        assert "accept length 3.00" in told and ("times as fast as without drafts" in told) == known


def step(**values):
    return {"spec/verified_tokens": 2.0, "spec/rounds": 10.0, "spec/ms_per_round": 100.0} | {
        f"spec/{name}": value for name, value in values.items()
    }


def test_a_run_says_what_it_saved():
    line = saved_line([step(saved_seconds=2.0)] * 3 + [{"step": 3.0}])
    assert line.startswith("speculation saved about 6.0 s") and "3.0 s with drafts, about 9.0 s without." in line
    assert "estimate" in line and "not counted" in line
    assert "cost about 0.5 s" in saved_line([step(saved_seconds=-0.5)])
    assert "neither saved nor cost" in saved_line([step(saved_seconds=0.04)])
    assert saved_line([step(saved_seconds=2.0), step()]).startswith(
        "in 1 of the 2 steps with drafts, speculation saved"
    )
    assert saved_line([{"step": 0.0}]) == saved_line([step()]) == ""
