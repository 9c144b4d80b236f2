"""A fresh drafter learns from the newest rollouts, within its seconds and for so many steps and tokens."""

from types import SimpleNamespace

import numpy as np

from megatron_rlspec.config import load
from megatron_rlspec.extensions.drafter_schedules import fresh
from megatron_rlspec.extensions.drafter_schedules.fresh import FreshLearner
from megatron_rlspec.extensions.drafter_schedules.online import OnlineLearner
from megatron_rlspec.types import Group, Prompt, Sample


def groups_of(count, length, first=0):
    tokens = np.zeros(length, np.int64)
    mask = np.ones(length, np.float32)
    groups = []
    for i in range(first, first + count):
        prompt = Prompt(i, tokens[:1])
        groups.append(Group(prompt, [Sample(f"{i}", prompt, tokens, mask, -mask)]))
    return groups


class Updates:
    """In place of a trainer: count the samples of every update."""

    def __init__(self, deterministic):
        self.config = load(None, {"train.deterministic": deterministic})
        self.prediction = None
        self.taken = []

    def train_step(self, batches, **_):
        self.taken.append(len(batches))


def taught(monkeypatch, deterministic, seconds):
    """Return the samples of each update after three steps of 16 samples."""
    monkeypatch.setattr(fresh.ranks, "job", lambda: SimpleNamespace(tell=lambda value: value))
    trainer = Updates(deterministic)
    monkeypatch.setattr(fresh, "micro_batches", lambda _, samples: samples)
    schedule = FreshLearner(trainer, None, {}, [])
    steps = []
    for step in range(3):
        trainer.taken = []
        schedule.observe(groups_of(16, 1000, 16 * step))
        metrics = schedule.teach(step, seconds)
        assert metrics["drafter/seconds_fresh"] > 0
        steps.append(trainer.taken)
    return steps


def test_a_fresh_drafter_learns_from_the_newest_tokens_within_its_seconds(monkeypatch):
    # 32,768 tokens are 32 samples, two a step's eighth
    assert taught(monkeypatch, "true", 0.0) == [[2] * 8, [2] * 16, [2] * 16]
    assert taught(monkeypatch, "false", 1e9) == [[2] * 8, [2] * 16, [2] * 16]
    assert taught(monkeypatch, "false", 1e-9) == [[2]] * 3  # one update, whatever it takes


def test_small_steps_teach_a_fresh_drafter_for_longer(monkeypatch):
    """Ten steps at least, and until it has learnt from 262,144 tokens; a resumed run counts on."""
    monkeypatch.setattr(fresh.ranks, "job", lambda: SimpleNamespace(tell=lambda value: value))
    monkeypatch.setattr(fresh, "micro_batches", lambda _, samples: samples)
    last = {}
    for length in (500, 10_000):
        trainer = Updates("true")
        schedule = FreshLearner(trainer, None, {}, [])
        for step in range(40):
            trainer.taken = []
            schedule.observe(groups_of(8, length, 8 * step))
            schedule.train_step(step, lambda learns: {}, 1.0)
            if trainer.taken:
                last[length] = step
            schedule = FreshLearner(trainer, None, *schedule.state())
    assert last[10_000] == 9
    # 4,000 tokens of the first step, 4,000 more in each of the next until 32,768 fill the window
    assert last[500] == 11


def test_a_run_resumed_with_another_schedule_begins_that_one_anew():
    """Options may change when a run is resumed; the checkpoint has what the schedule of before left."""
    fresh_state, rollouts = FreshLearner(Updates("true"), None, {"learnt": 9}, groups_of(2, 20)).state()
    online = OnlineLearner(Updates("true"), None, fresh_state, rollouts)
    assert online.last_update == -1 and online.every_steps.due and len(online.buffer) == 2
    again = FreshLearner(Updates("true"), None, *online.state())
    assert again.state()[0] == {"learnt": 0} and len(again.state()[1]) == 2
