"""What drafts saved, by rounds whose plain durations are known."""

import pytest

from megatron_rlspec.records.live import saved_line
from megatron_rlspec.speculation.saved import saved
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
    assert saved([plain, unknown], Known()) == (100.0, 100.0)
    assert saved([], Known()).gain == 1.0


def test_a_run_says_what_it_saved():
    rows = [{"spec/saved_seconds": 2.0, "spec/rounds": 10.0, "spec/ms_per_round": 100.0}] * 3 + [{"step": 3.0}]
    line = saved_line(rows)
    assert "saved about 6.0 s" in line and "9.0 s without drafts, 3.0 s with them" in line and "not counted" in line
    rows = [{"spec/saved_seconds": -0.5, "spec/rounds": 10.0, "spec/ms_per_round": 100.0}]
    assert "cost about 0.5 s" in saved_line(rows)
    assert saved_line([{"step": 0.0}]) == ""
