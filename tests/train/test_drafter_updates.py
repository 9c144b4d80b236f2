"""Which steps train the drafter."""

import json

import pytest

from megatron_rlspec.train.drafter_updates import EverySteps


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


def test_a_step_that_could_not_update_leaves_the_next_one_due():
    rule = EverySteps(3)
    rule.observe(False)  # nothing was stored yet
    assert played(rule, 4) == "u--u"


def test_a_checkpoint_restores_the_count():
    former, later = EverySteps(3), EverySteps(3)
    played(former, 2)
    later.restore(json.loads(json.dumps(former.state())))
    assert played(later, 4) == played(former, 4) == "-u--"
