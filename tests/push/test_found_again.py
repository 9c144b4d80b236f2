"""In a run with the embedded engine: rollouts after a push each, shorter than the wait for a probe."""

import numpy as np
import pytest
from test_health_in_a_run import Run

from megatron_rlspec.run import engines
from megatron_rlspec.speculation.acceptance import Prediction
from megatron_rlspec.speculation.roofline import Roofline
from megatron_rlspec.speculation.rule import SpecRule
from megatron_rlspec.types import RoundStats, SpecConfig

ROUNDS = 20


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setattr(engines, "CANARY_PROMPTS", 0)
    options = {"spec__mode": "adaptive", "spec__candidate_steps": "0,1,3"}
    monkeypatch.setattr(SpecRule, "timed", lambda *_, **__: None)  # costs are those below
    made = Run(tmp_path, rollout__max_new_tokens=str(ROUNDS), **options)
    learning = made.rollouts.speculation.learning
    learning.cost = Roofline.of_layers(8)  # with the model's one layer, drafting would never be faster
    learning.observe([RoundStats(SpecConfig(1), 32, 3200, 40, 40.0, (1249, 31))], [])  # the drafter was bad before
    made.engine.set_spec_rule(learning.rule())
    yield made
    made.rollouts.close()


@pytest.mark.slow
def test_an_improved_drafter_is_found_in_rollouts_of_20_rounds(run):
    """Earlier, each push restarted the wait for a probe. So no probe ever ran."""
    share_off = []
    for version in range(1, 17):
        run.push(version)
        run.draw(f"v{version:02d}")
        found = run.rollouts.adapt(Prediction.of_sums((1, 3), np.full((2, 3), 500.0), np.full((2, 3), 150.0)))
        share_off.append(found.get("spec/share_off", 0.0))
    # A push makes trials come earlier. If they began anew with it, 16 of 19 rounds of this rollout had no drafts.
    assert 0 < share_off[0] < 0.7, share_off
    assert max(share_off[4:]) < 0.2, share_off
    assert run.rollouts.speculation.learning.acceptance.rates[0] > 0.5
