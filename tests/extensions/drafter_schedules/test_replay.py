"""The buffer of rollouts: its bounds, its draws, and what a checkpoint keeps."""

import numpy as np
import pytest

from megatron_rlspec import wire
from megatron_rlspec.extensions.drafter_schedules.replay import ReplayBuffer
from megatron_rlspec.types import Group, Prompt, Sample


def sample(i, length=20, reward=0.0, **metadata):
    tokens = np.arange(length, dtype=np.int64) + i
    mask = (np.arange(length) >= 5).astype(np.float32)
    return Sample(
        f"s{i}",
        Prompt(i, tokens[:5], text="a question", label="an answer"),
        tokens,
        mask,
        -mask,
        policy_versions=((7, 0, length - 5),),
        reward=reward,
        text="a long text",
        metadata=metadata,
    )


def ids(samples):
    return [int(s.request_id[1:]) for s in samples]


def held(buffer):
    return ids([s for group in buffer.groups() for s in group.samples])


@pytest.mark.parametrize(("tokens", "expected"), [(109, [3, 4, 5, 6, 7]), (10, [7]), (10**9, list(range(8)))])
def test_the_oldest_samples_leave_at_the_bound(tokens, expected):
    buffer = ReplayBuffer(tokens)
    buffer.add([sample(i) for i in range(4)])
    buffer.add([sample(i) for i in range(4, 8)])
    assert held(buffer) == expected and buffer.tokens == 20 * len(expected)
    assert buffer.newest == min(4, len(expected))


def test_a_draw_has_as_many_tokens_as_the_last_rollout():
    buffer = ReplayBuffer(10**6)
    assert buffer.draw("uniform", (0,)) == []
    buffer.add([sample(i) for i in range(4)])
    buffer.add([sample(i) for i in (4, 5)])
    assert ids(buffer.draw("newest", (0,))) == [5, 4]
    assert len(buffer.draw("uniform", (0,))) == 2
    buffer.add([sample(6, 10)])
    assert len(buffer.draw("uniform", (0,))) == 1  # at least one, even if it is longer


@pytest.mark.parametrize("by", ["uniform", "reward"])
def test_draws_follow_their_weights_and_depend_on_the_seed_only(by):
    both = [sample(0, reward=3.0), sample(1, reward=1.0)]
    buffer = ReplayBuffer(10**6)
    for one in both:  # so that a draw has one sample
        buffer.add([one])
    first = [ids(buffer.draw(by, (1, n)))[0] for n in range(2000)]
    expected = {"uniform": 1 / 2, "reward": 3 / 4}[by]
    assert np.mean(np.array(first) == 0) == pytest.approx(expected, abs=0.03)
    assert first[:50] == [ids(buffer.draw(by, (1, n)))[0] for n in range(50)]
    buffer.clear()
    buffer.add(both)
    assert sorted(ids(buffer.draw(by, (1, 0)))) == [0, 1]  # without replacement


def test_a_checkpoint_restores_the_buffer_and_its_draws():
    former, later = ReplayBuffer(200), ReplayBuffer(200)
    former.add([sample(i, reward=float(i)) for i in range(12)])
    former.add([sample(i, 30, reward_error="timeout") for i in (12, 13)])
    later.restore(wire.decode(wire.encode(former.groups()), list[Group]))
    assert wire.encode(later.groups()) == wire.encode(former.groups())
    assert (later.tokens, later.newest) == (former.tokens, former.newest)
    for by in ("newest", "uniform", "reward"):
        assert ids(later.draw(by, (3,))) == ids(former.draw(by, (3,)))
    assert ReplayBuffer(200).groups() == []
    (stored,) = [s for s in later.draw("newest", (0,)) if s.request_id == "s13"]
    given = sample(13, 30)
    assert np.array_equal(stored.tokens, given.tokens) and stored.prompt_len == 5 and stored.text == ""
    assert np.array_equal(stored.loss_mask, given.loss_mask != 0) and stored.policy_versions == ((7, 0, 25),)
    assert np.array_equal(stored.behaviour_logprobs, given.behaviour_logprobs)
