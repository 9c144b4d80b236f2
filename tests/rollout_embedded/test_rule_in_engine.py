"""The rule in the embedded engine: drafts that do not pay are off after a few rounds."""

import time
from types import SimpleNamespace

import embedded_oracle as oracle
import pytest
import torch
from certain_costs import certain

from megatron_rlspec.rollout.embedded import engine as embedded_engine
from megatron_rlspec.rollout.embedded.engine import EmbeddedEngine
from megatron_rlspec.speculation.roofline import Roofline
from megatron_rlspec.types import OFF, Sampling, SpecConfig

COST = Roofline.of_layers(12, ridge_tokens=1024)


def shares(engine, data, sampling):
    """Return the share of rounds without drafts, by the rule of this data."""
    engine.set_spec_rule(data)
    engine.generate(oracle.requests([[1, 2, 3]], group=64), sampling)
    ran = engine.spec_rule_report()["rounds"]
    return ran.get("off", 0) / sum(ran.values())


def test_refused_drafts_are_off_after_a_few_rounds():
    config, tensors = oracle.tiny(vocab=64)
    candidates = [OFF, SpecConfig(1), SpecConfig(3)]
    options = {"dtype": torch.float32, "candidates": candidates, "drafts": "argmax"}
    engine = EmbeddedEngine(config, tensors.items(), **options)
    hot = Sampling(temperature=50.0, max_new_tokens=60, ignore_eos=True)  # no draft of 64 words is likely
    off = shares(engine, certain(COST, candidates), hot)
    assert off > 0.7


@pytest.mark.parametrize("dear", [2.4, 1.2])
def test_drafts_that_cost_more_than_they_save_are_noticed_by_their_durations(monkeypatch, dear):
    """All drafts are accepted (greedy, all logits 0), but a round with one draft can take 2.4 times as long for twice
    the text. Counting layers alone promises a gain."""
    config, tensors = oracle.tiny(vocab=64)
    tensors = {name: torch.zeros_like(x) for name, x in tensors.items()}
    engine = EmbeddedEngine(config, tensors.items(), dtype=torch.float32, candidates=[OFF, SpecConfig(1)])
    seconds = 0.0
    run = engine.rounds.round

    def timed(rows, spec, ahead):
        nonlocal seconds
        seconds += 1e-4 + 1e-5 * len(rows) * (1 if spec.off else dear)
        return run(rows, spec, ahead)

    monkeypatch.setattr(engine.rounds, "round", timed)
    monkeypatch.setattr(embedded_engine, "time", SimpleNamespace(perf_counter=lambda: seconds, sleep=time.sleep))
    greedy = Sampling(temperature=0, max_new_tokens=80, ignore_eos=True)
    off = shares(engine, {"roofline": COST.to_json()}, greedy)
    assert off > 0.6 if dear > 2 else off < 0.2, off
