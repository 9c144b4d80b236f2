"""Which steps train the drafter, and the weights of its rows by reward."""

import pytest

from megatron_rlspec.train.drafter_updates import EverySteps, reward_weights


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([1, 3], [0.5, 1.5]),
        ([0, 0, 3], [0.25, 0.25, 3]),  # 0 clipped to 1/4
        ([-1, 1], [0.25, 2]),  # 0 and 2 above the least, over their mean
        ([0, 0, 0, 0, 9], [0.25, 0.25, 0.25, 0.25, 4]),
        ([], []),
    ],
)
def test_weights_of_rewards(rewards, expected):
    assert reward_weights(rewards).tolist() == pytest.approx(expected)


def test_a_failed_reward_weighs_one_and_enters_no_mean():
    weights = reward_weights([1, 99, 3], known=[True, False, True])
    first, last = reward_weights([1, 3])
    assert weights.tolist() == [first, 1, last]


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
