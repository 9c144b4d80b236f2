"""Which steps train the drafter, and the weights of its rows by reward."""

import pytest

from megatron_rlspec.train.drafter_updates import EverySteps, reward_weights


@pytest.mark.parametrize(
    ("kind", "rewards", "expected"),
    [
        ("none", [0, 1, 5], [1, 1, 1]),
        ("reward", [1, 3], [0.5, 1.5]),
        ("reward", [0, 0, 3], [0.25, 0.25, 3]),  # 0 clipped to 1/4
        ("reward", [-1, 1], [0.25, 2]),  # 0 and 2 above the least, over their mean
        ("reward", [0, 0, 0, 0, 9], [0.25, 0.25, 0.25, 0.25, 4]),
        ("rank", [7, 7, 9, 1], [1, 1, 1.6, 0.4]),
        ("reward", [], []),
    ],
)
def test_weights_of_rewards(kind, rewards, expected):
    assert reward_weights(rewards, kind).tolist() == pytest.approx(expected)


@pytest.mark.parametrize("kind", ["reward", "rank"])
def test_a_failed_reward_weighs_one_and_enters_no_mean(kind):
    weights = reward_weights([1, 99, 3], kind, known=[True, False, True])
    assert weights.tolist() == [*reward_weights([1, 3], kind)[:1], 1, *reward_weights([1, 3], kind)[1:]]


def played(rule, steps):
    decisions = []
    for _ in range(steps):
        due = rule.due
        assert rule.due == due
        decisions.append(due)
        rule.observe(due)
    return "".join("u" if due else "-" for due in decisions)


@pytest.mark.parametrize(("every", "expected"), [(1, "uuuuuu"), (2, "u-u-u-"), (5, "u----u")])
def test_every(every, expected):
    assert played(EverySteps(every), 6) == expected
