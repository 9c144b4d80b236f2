"""An update of weights as a state: its owner, its end by silence, and what an unfinished one leaves."""

import pytest

from megatron_rlspec.rollout.sglang import limits
from megatron_rlspec.rollout.sglang.http.update import Weights
from megatron_rlspec.rollout.sglang.schemas import Refusal


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def weights(clock):
    return Weights(clock)


def finished(weights, names, version="7", scope="all"):
    update = weights.begin(scope, version)
    weights.sending(update, names)
    weights.end(update)


def test_an_update_belongs_to_the_client_that_began_it(weights):
    update = weights.begin("all", "3")
    assert weights.of(update.token) is update
    with pytest.raises(Refusal, match="belongs to another client"):
        weights.of("0" * 32)
    with pytest.raises(Refusal, match="a weight update is open, to version 3, silent for 0 s"):
        weights.begin("all", "4")
    weights.end(update)
    with pytest.raises(Refusal, match="no weight update is open"):
        weights.of(update.token)
    assert weights.begin("all", "4").token != update.token


def test_bytes_of_the_owner_put_the_end_off_and_those_of_others_do_not(weights, clock):
    update = weights.begin("all", "3")
    clock.now = 100.0
    assert weights.silence(update) == limits.UPDATE_SILENT - 100
    with pytest.raises(Refusal):
        weights.of("0" * 32)
    assert weights.silence(update) == limits.UPDATE_SILENT - 100
    weights.of(update.token)
    assert weights.silence(update) == limits.UPDATE_SILENT


def test_after_a_mixture_nothing_is_generated_until_its_tensors_came_again(weights):
    update = weights.begin("all", "3")
    weights.sending(update, ["a", "b"])
    weights.abandon(update, "its client was silent for 120 s")
    mixed = r"the update to version 3 ended unfinished \(its client was silent for 120 s\), so the weights are mixed"
    with pytest.raises(Refusal, match=mixed):
        weights.check_defined()
    with pytest.raises(Refusal, match=mixed):
        weights.begin("drafter", "4")
    with pytest.raises(Refusal, match="1 tensors that are undefined were not sent, such as b"):
        finished(weights, ["a", "c"])
    with pytest.raises(Refusal, match="to version 7 ended unfinished"):
        weights.check_defined()
    with pytest.raises(Refusal, match="such as c"):
        finished(weights, ["a", "b"], "8")
    finished(weights, ["a", "b", "c"], "9")
    weights.check_defined()
    finished(weights, ["a"], "10", "drafter")
    weights.check_defined()


def test_an_update_that_sent_nothing_leaves_nothing(weights):
    weights.abandon(weights.begin("all", "3"), "its client gave it up")
    weights.check_defined()
    weights.check_closed()


def test_a_bucket_that_was_not_loaded_ends_the_update_unfinished(weights):
    update = weights.begin("all", "3")
    weights.sending(update, ["a"])
    update.failed = "out of memory"
    with pytest.raises(Refusal, match="out of memory"):
        weights.end(update)
    with pytest.raises(Refusal, match=r"unfinished \(out of memory\)"):
        weights.check_defined()


def test_buckets_at_once_are_few(weights):
    update = weights.begin("all", "3")
    with weights.receiving(update), weights.receiving(update):
        with pytest.raises(Refusal, match="2 buckets already"), weights.receiving(update):
            pass
    with weights.receiving(update):
        pass


def test_after_a_sleep_all_weights_are_pushed(weights):
    weights.sleep(["a", "b"])
    weights.asleep = True
    with pytest.raises(Refusal, match="call wake first"):
        weights.begin("all", "3")
    weights.asleep = False
    with pytest.raises(Refusal, match="the engine slept"):
        weights.begin("target", "3")
    with pytest.raises(Refusal, match="1 tensors that are undefined were not sent, such as b"):
        finished(weights, ["a"])
    with pytest.raises(Refusal, match=r"ended unfinished \(1 tensors that are undefined were not sent, such as b\)"):
        weights.check_defined()
    finished(weights, ["a", "b"])
    weights.check_defined()


def test_an_engine_whose_tensors_have_no_known_names_takes_any_push_after_a_sleep(weights):
    weights.sleep([])
    finished(weights, ["a"])
    weights.check_defined()
