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
