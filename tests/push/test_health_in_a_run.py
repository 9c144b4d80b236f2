"""The health contract in a run: rank 0's side with the embedded engine and the default canary."""

import json
import math
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from test_faults import MTP, swap
from weight_oracles import echo_checkpoint

from megatron_rlspec.config import load
from megatron_rlspec.engine import EngineError
from megatron_rlspec.models.hf_files import write_hf
from megatron_rlspec.push.detectors import HealthSettings
from megatron_rlspec.records.recorder import Recorder, read_records
from megatron_rlspec.rollout.placement import GpuLayout
from megatron_rlspec.rollout.start import embedded
from megatron_rlspec.run.checkpoints import Drawn
from megatron_rlspec.run.extension import Extensions
from megatron_rlspec.run.loading import build_rollouts, start_rollouts
from megatron_rlspec.speculation.acceptance import Prediction
from megatron_rlspec.speculation.rule import SpecRule
from megatron_rlspec.types import OFF, Prompt, Request, SpecConfig

PROMPTS = [Prompt(i, np.random.default_rng(i).integers(0, 128, 6)) for i in range(32)]
CHAIN = SpecConfig(3)


def start(config, hf_config, run_dir, resumed=None):
    config = config.model_copy(update={"train": config.train.model_copy(update={"run_dir": str(run_dir)})})
    loaded = SimpleNamespace(hf_config=hf_config, tokenizer=None, layout=GpuLayout(), held_out={})
    loaded.prompts = SimpleNamespace(rows=PROMPTS)
    starting = start_rollouts(config, loaded, Extensions())
    rollouts = build_rollouts(config, loaded, starting, starting.engines.wait(), Recorder(run_dir))
    rollouts.start(resumed or {}, Drawn())
    return rollouts


class Run:
    def __init__(self, tmp_path, **options):
        self.hf_config, tensors = echo_checkpoint(0)
        write_hf(tmp_path / "model", self.hf_config, tensors)
        overrides = {
            "model.path": str(tmp_path / "model"),
            "model.dtype": "float32",
            "model.max_length": "64",
            "rollout.engine": "embedded",
            "rollout.max_new_tokens": "32",
            "rollout.max_running_requests": "32",
            "rollout.max_total_tokens": "4096",
            "spec.mode": "fixed",
        }
        config = load(overrides=overrides | {name.replace("__", "."): value for name, value in options.items()})
        self.run_dir = tmp_path / "run"
        self.config = config
        self.rollouts = start(config, self.hf_config, self.run_dir)
        (self.engine,) = self.rollouts.engines.pool.engines.values()

    def push(self, version, damage=lambda name, tensor: tensor):
        tensors = echo_checkpoint(version)[1]
        damaged = [(name, damage(name, tensor)) for name, tensor in tensors.items()]
        return self.rollouts.engines.push(version, lambda scope: iter(damaged), None, "all")

    def draw(self, name):
        requests = [Request(f"{name}-{i:03d}", prompt, seed=i) for i, prompt in enumerate(PROMPTS)]
        self.rollouts.engines.pool.generate(requests, self.rollouts.generation.sampling)

    def events(self):
        return [event for event in read_records(self.run_dir / "events.jsonl") if event["kind"] == "health"]


@pytest.fixture
def run(tmp_path, request, monkeypatch):
    # So that every push of these short runs is followed by a canary.
    monkeypatch.setattr("megatron_rlspec.run.engines.HealthSettings", partial(HealthSettings, canary_share=1.0))
    made = Run(tmp_path, **getattr(request, "param", {}))
    yield made
    made.rollouts.close()


def half_swap(name, tensor):
    return swap(tensor, 1) if name == MTP + "input_proj.weight" else tensor


@pytest.mark.parametrize("run", [{}, {"spec__mode": "adaptive"}], ids=["fixed", "adaptive"], indirect=True)
def test_a_healthy_run_is_not_disturbed(run):
    for version in range(1, 4):
        metrics = run.push(version)
        assert metrics["health/canary_accept_length"] > 1.6 and metrics["health/canary_seconds"] > 0
        if run.config.spec.mode == "fixed":
            assert run.engine.choice.present == CHAIN
        else:
            assert isinstance(run.engine.choice.present, SpecRule)
        assert run.engine.stats() == [], "the canary's rounds must not count as the rollouts'"
        run.draw(f"v{version}")
        assert run.rollouts.adapt(None)["spec/rounds"] > 0
    assert run.events() == []


def test_an_exporters_bug_turns_speculation_off_with_a_record(run):
    run.push(1)
    metrics = run.push(2, half_swap)
    assert metrics["health/plain_engines"] == 1 and run.engine.choice.present == OFF
    (event,) = run.events()
    assert event["action"] == "plain" and "canary: accept length 1." in event["after_second_push"][0]
    assert "no speculation until a later push: canary: accept length 1." in event["message"]
    assert run.push(3)["health/plain_engines"] == 0 and run.engine.choice.present == CHAIN
    assert len(run.events()) == 1


def gone(*_):
    raise EngineError("gone")


@pytest.mark.parametrize("run", [{"spec__mode": "adaptive"}], indirect=True)
@pytest.mark.parametrize("when", ["after its canary", "told what to start from"])
def test_an_engine_that_ends_while_its_rule_is_set_is_left_out(run, when):
    rollouts = run.rollouts
    other = embedded(run.config)
    rollouts.engines.pool.add("other", other)
    rollouts.engines.health.join("other")
    if when == "told what to start from":
        run.push(1)
        rollouts.engines.health._canary.seconds = math.inf  # no canary is due
        rollouts.speculation.learning.expect(Prediction.of_sums((5,), np.ones((1, 5)), np.full((1, 5), 0.5)))
    other.set_spec_rule = gone
    assert run.push(2)["health/serving_engines"] == 2  # as far as its weights go
    assert list(rollouts.engines.pool.engines.values()) == [run.engine]
    events = [event["message"] for event in read_records(run.run_dir / "events.jsonl") if event["kind"] == "engine"]
    assert events == ["other: left out, 1 remain: gone"]


@pytest.mark.parametrize("run", [{"spec__mode": "adaptive"}], indirect=True)
def test_a_resumed_run_starts_with_the_state_of_the_stopped_one(run, tmp_path):
    rollouts = run.rollouts
    run.push(1)
    for reached in (100.0, 300.0):  # the first forecast is scored by the second rollout
        run.draw(f"r{reached:.0f}")
        rollouts.adapt(Prediction.of_sums((1,), np.array([[reached]]), np.array([[reached / 4]])))
    learning = rollouts.speculation.learning
    before = learning.rule()
    assert before["forecast"]
    state = json.loads(json.dumps(rollouts.state(()).values))
    after = start(run.config, run.hf_config, tmp_path / "again", state)
    again = after.speculation.learning
    assert again.rule() == before and again.state() == learning.state()
    after.close()


@pytest.mark.parametrize(
    "run", [{"spec__num_steps": "0"}, {"spec__mode": "off"}], ids=["no drafts", "off"], indirect=True
)
def test_a_run_without_drafts_asks_no_canary_to_draft(run):
    metrics = run.push(1)
    assert metrics["health/serving_engines"] == 1 and "health/canary_accept_length" not in metrics
    assert run.engine.choice.present == OFF and run.events() == []
