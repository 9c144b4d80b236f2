"""Weights of the drafter's rows: by reward, and where a draft was refused."""

import numpy as np
import pytest

from megatron_rlspec.rl.weights import drafter_weights, refused_positions, reward_weights
from megatron_rlspec.types import Prompt, Sample


def sample(response, spans=(), prompt=4, reward=0.0):
    tokens = np.arange(prompt + response)
    mask = (tokens >= prompt).astype(np.float32)
    return Sample("s", Prompt(0, tokens[:prompt]), tokens, mask, 0 * mask, accepted_spans=tuple(spans), reward=reward)


@pytest.mark.parametrize(
    ("kind", "rewards", "expected"),
    [
        ("none", [0, 1, 5], [1, 1, 1]),
        ("reward", [1, 3], [0.5, 1.5]),
        ("reward", [0, 0, 3], [0.5, 0.5, 2]),  # 0 and 3, clipped to [1/2, 2]
        ("reward", [-1, 1], [0.5, 2]),  # 0 and 2 above the least, over their mean
        ("reward", [-3, -3], [1, 1]),
        ("reward", [0, 0, 0], [1, 1, 1]),
        ("rank", [5, -2, 100], [1, 0.5, 1.5]),
        ("rank", [7, 7, 9, 1], [1, 1, 1.6, 0.5]),
        ("reward", [], []),
        ("rank", [2], [1]),
    ],
)
def test_weights_of_rewards(kind, rewards, expected):
    assert reward_weights(rewards, kind, clip=2).tolist() == pytest.approx(expected)


@pytest.mark.parametrize("kind", ["reward", "rank"])
def test_a_failed_reward_weighs_one_and_enters_no_mean(kind):
    weights = reward_weights([1, 99, 3], kind, known=[True, False, True])
    assert weights.tolist() == [*reward_weights([1, 3], kind)[:1], 1, *reward_weights([1, 3], kind)[1:]]


def test_a_clip_below_one_is_refused():
    with pytest.raises(ValueError, match="clip=0.5"):
        reward_weights([1, 2], "reward", clip=0.5)


@pytest.mark.parametrize(
    ("response", "spans", "deepest", "expected"),
    [
        # Prompt 0..3, response 4... A round that emits tokens from 4 + a on drafted at position 4 + a - 2.
        (4, [], 2, [2, 3, 4, 5]),  # four rounds, each draft refused
        (4, [(1, 3)], 2, [2]),  # token 1 and 2 accepted, token 3 the target's: nothing refused at depth 2
        (4, [(1, 3)], 3, [2, 3]),  # but the third draft was
        (5, [(0, 1), (2, 5)], 3, [2]),  # the last round ended in its drafts
        (4, [(0, 3)], 3, []),
        (4, [], 0, []),  # engines do not draft
        (0, [], 3, []),
    ],
)
def test_positions_of_refused_drafts(response, spans, deepest, expected):
    assert np.flatnonzero(refused_positions(sample(response, spans), deepest)).tolist() == expected


def test_refused_positions_of_rounds_that_are_played():
    """Play rounds with known steps; the positions found are those where the play refused a draft."""
    draw = np.random.default_rng(0)
    for _ in range(50):
        spans, refused, length = [], [], 1  # the prefill samples the first token
        while length < 40:
            accepted = int(draw.integers(0, 4))
            if accepted:
                spans.append((length, length + accepted))
            if accepted < 3:
                refused.append(4 + length - 2)
            length += accepted + 1
        found = np.flatnonzero(refused_positions(sample(length, spans), 3)).tolist()
        assert [position for position in found if position > 2] == refused  # 2 predicts the prefill's token


def test_weights_of_positions_multiply():
    rows = drafter_weights(
        [sample(2, reward=1.0), sample(2, [(0, 1)], reward=3.0)],
        [True, True],
        kind="reward",
        clip=4,
        refused=3,
        deepest=3,
    )
    assert [row.tolist() for row in rows] == [[0.5, 0.5, 1.5, 1.5, 0.5, 0.5], [1.5, 1.5, 4.5, 1.5, 1.5, 1.5]]
    assert rows[0].dtype == np.float32
