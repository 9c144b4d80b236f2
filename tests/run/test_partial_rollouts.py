"""Rank 0's rollouts that end with their batch, on the embedded engine; the weights stay, only their version changes."""

from types import SimpleNamespace

import numpy as np
import pytest

from megatron_rlspec.config import Config
from megatron_rlspec.models.hf_files import read_hf
from megatron_rlspec.noise import seed_of as seed
from megatron_rlspec.rollout.placement import GpuLayout
from megatron_rlspec.run import state_file
from megatron_rlspec.run.extension import Extensions
from megatron_rlspec.run.loading import build_rollouts, start_rollouts
from megatron_rlspec.run.state_file import Drawn
from megatron_rlspec.speculation.acceptance import accept_length, pooled
from megatron_rlspec.tasks import data
from megatron_rlspec.types import Request

STEPS = 4
WANTED = 3
SAMPLES = 4


def config_of(start, run_dir, **changed):
    rollout = {"engine": "embedded", "partial": 1, "prompts_per_step": WANTED}
    rollout |= {"samples_per_prompt": SAMPLES, "max_new_tokens": 48, "max_total_tokens": 8192}
    return Config.model_validate(
        {
            "model": {"path": str(start / "model"), "dtype": "float32", "max_length": 256},
            "data": {"path": str(start / "task/rl.jsonl")},
            "train": {"run_dir": str(run_dir), "steps": STEPS},
            "spec": {"mode": "fixed"},
            "reward": {"kind": "exact"},
            "rollout": rollout | changed,
        }
    )


class Run:
    """The rollouts of a run, with the engine that they use."""

    def __init__(self, config, run_dir, state=None, drawn=None, order=None):
        hf_config, _ = read_hf(config.model.path)
        tokenizer = data.load_tokenizer(config.model.path)
        reading = data.Reading(config.data, tokenizer, config.longest_prompt, config.train.seed)
        self.prompts = data.Prompts(config.data.path, reading)
        if order is not None:
            self.prompts.order.restore(order)
        loaded = SimpleNamespace(hf_config=hf_config, tokenizer=tokenizer, layout=GpuLayout(), prompts=self.prompts)
        loaded.held_out = {}
        starting = start_rollouts(config, loaded, Extensions())
        starting.scorer._judge = lambda sample: {"reward": len(sample.response) % 3 / 2}
        engines = starting.engines.wait()
        recorder = SimpleNamespace(event=lambda *_, **__: None)
        self.rollouts = build_rollouts(config, loaded, starting, engines, recorder)
        self.rollouts.start(state or {}, drawn or Drawn())
        self.engine = engines["embedded"]

    def step(self, step):
        self.engine.version = step + 1
        return self.rollouts.collect(step)


@pytest.mark.parametrize("most", [16, 9])
def test_texts_are_those_of_undisturbed_samples_and_a_resumed_run_draws_the_same(start, tmp_path, most):
    config = config_of(start, tmp_path, max_running_requests=most)
    run = Run(config, tmp_path)
    steps = []
    for step in range(STEPS):
        if step == 2:
            order = run.prompts.order.state()
            state_file.write(tmp_path / "2.state", *run.rollouts.state(()))
        steps.append(run.step(step))
        assert [len(group.samples) for group in steps[-1]] == [SAMPLES] * WANTED
    begun = run.rollouts.generation.begun
    assert begun and all(group.oldest >= STEPS for group in begun)
    trained = [sample for groups in steps for group in groups for sample in group.samples]
    assert len({s.request_id for s in trained}) == len(trained)
    continued = [s for s in trained if len(s.policy_versions) > 1]
    assert continued and any(len(s.policy_versions) == 1 for s in trained)
    for number, groups in enumerate(steps):
        oldest = min(s.policy_versions[0][0] for g in groups for s in g.samples)
        assert number <= oldest <= number + 1
    # Plain decoding draws the same texts at once.
    again = [Request(s.request_id, s.prompt, seed_of(config, s)) for s in trained]
    run.engine.hold("the texts without drafts")
    alone = run.engine.generate(again, run.rollouts.generation.sampling)
    assert [s.tokens.tolist() for s in trained] == [s.tokens.tolist() for s in alone]
    run.rollouts.close()
    state, drawn = state_file.read(tmp_path / "2.state")
    resumed = Run(config, tmp_path, state, drawn, order)
    for step in range(2, STEPS):
        for group, before in zip(resumed.step(step), steps[step], strict=True):
            assert [s.request_id for s in group.samples] == [s.request_id for s in before.samples]
            for sample, other in zip(group.samples, before.samples, strict=True):
                np.testing.assert_array_equal(sample.behaviour_logprobs, other.behaviour_logprobs)
                assert (sample.policy_versions, sample.accepted) == (other.policy_versions, other.accepted)
    left, expected = unfinished(resumed.rollouts.generation.begun), unfinished(begun)
    assert left == expected and any(tokens for group in left for _, tokens in group)
    assert resumed.rollouts.newest.figures["over_drawn"] > 0
    resumed.rollouts.close()


def unfinished(groups) -> list[list[tuple[str, int]]]:
    """Return the ids of requests, and how many tokens each has."""
    return [[(r.id, len(r.partial.response) if r.partial else 0) for r in group.requests] for group in groups]


def seed_of(config, sample):
    step, place, index = (int(part[1:]) for part in sample.request_id.split("-"))
    return seed(config.train.seed, step, place, index)


def test_a_row_that_comes_twice_in_a_step_gets_other_samples(start, tmp_path):
    rows = (start / "task/rl.jsonl").read_text().splitlines(keepends=True)[:2]
    (tmp_path / "two.jsonl").write_text("".join(rows))
    config = config_of(start, tmp_path, partial=0, prompts_per_step=6, max_new_tokens=16)
    config = config.model_copy(update={"data": config.data.model_copy(update={"path": f"{tmp_path}/two.jsonl"})})
    run = Run(config, tmp_path)
    samples = [sample for group in run.step(0) for sample in group.samples]
    later = [sample for group in run.step(1) for sample in group.samples]
    run.rollouts.close()
    assert len({s.prompt.id for s in samples}) == 2 and len(samples) == 6 * SAMPLES
    assert len({s.seed for s in samples + later}) == 12 * SAMPLES, "no old answer has the seed of a new one"
    texts = {(s.prompt.id, s.tokens.tobytes()) for s in samples}
    assert len(texts) > 2 * SAMPLES  # copies would leave at most SAMPLES texts of each row


def counted(rounds) -> int:
    """Return how many statistics there are, of `[(engine, statistics), ...]`."""
    return sum(len(of_engine) for _, of_engine in rounds)


def test_what_is_learnt_is_of_the_rollout_whose_rounds_it_is(start, tmp_path):
    """Not of the one before it, which the step trains on under staleness, and not of evaluations."""
    config = config_of(start, tmp_path, partial=0, staleness=1)
    held_out = config.data.model_copy(update={"eval_path": str(start / "task/eval.jsonl")})
    run = Run(config.model_copy(update={"data": held_out}), tmp_path)
    told = []
    run.rollouts.speculation.learn = lambda *given: told.append((counted(given[0]), given[3])) or {}
    lengths = []
    for step in range(2):
        groups = run.step(step)
        lengths.append(accept_length(pooled(sample.accepted for group in groups for sample in group.samples)))
        run.rollouts.settle()
        run.rollouts.adapt(None)
    assert lengths[0] != lengths[1] == told[0][1]
    run.rollouts.generation.evaluate("step-000002", 2)
    run.rollouts.adapt(None)
    assert told[1][0] and not told[2][0]
    run.rollouts.close()
