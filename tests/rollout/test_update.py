"""An update of weights as a state: its owner, and what an unfinished one leaves."""

import pytest

from megatron_rlspec.rollout.sglang.http.update import Weights
from megatron_rlspec.rollout.sglang.schemas import Refusal


@pytest.fixture
def weights():
    return Weights()


def finished(weights, names, version="7", scope="all"):
    update = weights.begin(scope, version)
    weights.mark_sent(update, names)
    weights.end(update)


def test_an_update_belongs_to_the_client_that_began_last(weights):
    first = weights.begin("all", "3")
    assert weights.update_of(first.token) is first
    second = weights.begin("all", "4")
    with pytest.raises(Refusal, match="to version 4, which belongs to another client"):
        weights.update_of(first.token)
    weights.mark_sent(second, ["a"])
    weights.end(second)
    with pytest.raises(Refusal, match="no weight update is open"):
        weights.update_of(second.token)


def test_after_a_mixture_nothing_is_generated_until_its_tensors_came_again(weights):
    update = weights.begin("all", "3")
    weights.mark_sent(update, ["a", "b"])
    weights.abandon(update, "its client gave it up")
    mixed = r"the update to version 3 ended unfinished \(its client gave it up\), so the weights are mixed"
    with pytest.raises(Refusal, match=mixed):
        weights.check_defined()
    with pytest.raises(Refusal, match=mixed):
        weights.begin("drafter", "4")
    with pytest.raises(Refusal, match="1 tensors of unfinished updates were not sent, such as b"):
        finished(weights, ["a", "c"])
    with pytest.raises(Refusal, match="such as c"):
        finished(weights, ["a", "b"], "8")
    finished(weights, ["a", "b", "c"], "9")
    weights.check_defined()
    finished(weights, ["a"], "10", "drafter")
    weights.check_defined()


def test_an_update_that_sent_nothing_leaves_nothing(weights):
    weights.abandon(weights.begin("all", "3"), "its client gave it up")
    weights.check_defined()
    assert weights.update is None


def test_a_bucket_that_was_not_loaded_ends_the_update_unfinished(weights):
    update = weights.begin("all", "3")
    weights.mark_sent(update, ["a"])
    update.failed = "out of memory"
    with pytest.raises(Refusal, match="out of memory"):
        weights.end(update)
    with pytest.raises(Refusal, match=r"unfinished \(out of memory\)"):
        weights.check_defined()
