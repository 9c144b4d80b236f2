"""The buffer of rollouts: its bounds, its draws, and what a checkpoint keeps."""

import tracemalloc

import numpy as np
import pytest

from megatron_rlspec import wire
from megatron_rlspec.extensions.drafter_schedules.replay import Replay, size_of
from megatron_rlspec.types import Group, Prompt, Sample


def sample(i, length=20, reward=0.0, spans=(), **metadata):
    tokens = np.arange(length, dtype=np.int64) + i
    mask = (np.arange(length) >= 5).astype(np.float32)
    return Sample(
        f"s{i}",
        Prompt(i, tokens[:5], text="a question", label="an answer"),
        tokens,
        mask,
        -mask,
        policy_versions=((7, 0, length - 5),),
        accepted_spans=tuple(spans),
        reward=reward,
        text="a long text",
        metadata=metadata,
    )


def ids(samples):
    return [int(s.request_id[1:]) for s in samples]


def held(buffer):
    return ids(buffer.draw(10**9, "newest", (0,)))[::-1]


@pytest.mark.parametrize(
    ("tokens", "size", "expected"),
    [(100, 10**9, [3, 4, 5, 6, 7]), (109, 10**9, [3, 4, 5, 6, 7]), (10, 10**9, [7]), (10**9, 7000, [5, 6, 7])],
)
def test_the_oldest_samples_leave_at_either_bound(tokens, size, expected):
    buffer = Replay(tokens, size)
    buffer.add([sample(i) for i in range(4)])
    buffer.add([sample(i) for i in range(4, 8)])
    assert held(buffer) == expected and buffer.tokens == 20 * len(expected)
    assert buffer.bytes == sum(size_of(s) for s in buffer.draw(10**9, "newest", (0,)))
    assert buffer.newest == min(4, len(expected))


def test_the_stated_bytes_are_those_of_memory():
    tracemalloc.start()
    buffer = Replay(10**9, 10**9)
    rollout = [sample(i, 1000, spans=[(k, k + 1) for k in range(0, 990, 3)]) for i in range(50)]
    before = tracemalloc.get_traced_memory()[0]
    buffer.add(rollout)
    taken = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert taken <= buffer.bytes
    plain = Replay(10**9, 10**9)
    plain.add([sample(i, 1000) for i in range(50)])
    assert plain.bytes / plain.tokens < 9 + 2.1


def test_newest_fills_the_budget_from_the_end():
    buffer = Replay(10**6, 10**9)
    buffer.add([sample(i) for i in range(4)])
    buffer.add([sample(i) for i in (4, 5)])
    assert ids(buffer.draw(0, "newest", (0,))) == [5, 4]  # as many as the last rollout has
    assert ids(buffer.draw(60, "newest", (0,))) == [5, 4, 3]
    assert ids(buffer.draw(1, "newest", (0,))) == [5]
    assert Replay(100, 100).draw(50, "uniform", (0,)) == []


@pytest.mark.parametrize("by", ["uniform", "reward", "disagreement"])
def test_draws_follow_their_weights_and_depend_on_the_seed_only(by):
    buffer = Replay(10**6, 10**9)
    # Sample 0 has reward 3 and no accepted draft, sample 1 reward 1 and ten accepted drafts of 15 tokens.
    buffer.add([sample(0, reward=3.0), sample(1, reward=1.0, spans=[(0, 10)])])
    first = [ids(buffer.draw(20, by, (1, n)))[0] for n in range(2000)]
    expected = {"uniform": 1 / 2, "reward": 3 / 4, "disagreement": 15 / 20}[by]
    assert np.mean(np.array(first) == 0) == pytest.approx(expected, abs=0.03)
    assert first[:50] == [ids(buffer.draw(20, by, (1, n)))[0] for n in range(50)]
    assert sorted(ids(buffer.draw(40, by, (1, 0)))) == [0, 1]  # without replacement


def test_equal_rewards_and_failed_rewards_are_drawn():
    buffer = Replay(10**6, 10**9)
    buffer.add([sample(i, reward_error="none") for i in range(3)])
    assert sorted(ids(buffer.draw(60, "reward", (0,)))) == [0, 1, 2]


def test_a_checkpoint_restores_the_buffer_and_its_draws():
    former, later = Replay(200, 10**9), Replay(200, 10**9)
    former.add([sample(i, reward=float(i), spans=[(0, i % 7 + 1)]) for i in range(12)])
    former.add([sample(i, 30, reward_error="timeout") for i in (12, 13)])
    later.restore(wire.decode(wire.encode(former.groups()), list[Group]))
    assert wire.encode(later.groups()) == wire.encode(former.groups())
    assert (later.tokens, later.bytes, later.newest) == (former.tokens, former.bytes, former.newest)
    for by in ("newest", "uniform", "reward", "disagreement"):
        assert ids(later.draw(0, by, (3,))) == ids(former.draw(0, by, (3,)))
    assert Replay(200, 10**9).groups() == []


def test_a_stored_sample_keeps_what_training_reads():
    given = sample(3, reward=2.0, spans=[(1, 2)])
    buffer = Replay(10**6, 10**9)
    buffer.add([given])
    (kept,) = buffer.draw(100, "newest", (0,))
    assert np.array_equal(kept.tokens, given.tokens) and kept.prompt_len == 5 and kept.text == ""
    assert np.array_equal(kept.loss_mask, given.loss_mask != 0)
    assert np.array_equal(kept.behaviour_logprobs, given.behaviour_logprobs)
    assert (kept.reward, kept.policy_versions, kept.accepted_spans) == (2.0, ((7, 0, 15),), ((1, 2),))
