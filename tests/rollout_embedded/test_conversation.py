"""Samples of several turns, in the embedded engine: text, masks, log-probs, drafts, and what ends a conversation."""

import threading
from contextlib import suppress
from dataclasses import replace

import embedded_oracle as oracle
import numpy as np
import pytest
import torch

from megatron_rlspec.config import ConfigError
from megatron_rlspec.custom import Unwound
from megatron_rlspec.engine import EngineError
from megatron_rlspec.rollout.conversation import Conversations
from megatron_rlspec.rollout.pool import EnginePool
from megatron_rlspec.types import OFF, Partial, Sampling, SpecConfig

torch.set_num_threads(1)
PROMPTS = [[7, 3, 9, 4, 4, 21], [5], [11, 2], [30, 1, 1, 8, 19, 25, 6, 13, 14, 2, 9]]
LONG = Sampling(temperature=0.7, max_new_tokens=24)
K3 = SpecConfig(3)
TOOL = "HI"  # two tokens


class Letters:
    """A tokenizer whose token i is the letter chr(64 + i)."""

    def decode(self, tokens, skip_special_tokens=False):
        return "".join(chr(64 + token) for token in tokens)

    def __call__(self, texts, add_special_tokens=False):
        return {"input_ids": [[ord(letter) - 64 for letter in text] for text in texts]}


def drawn(model, function, spec=K3, sampling=LONG, group=2):
    engine = oracle.engine_of(*model, spec)
    return Conversations(function, EnginePool({"a": engine}), Letters()).draw(
        oracle.requests(PROMPTS, group=group), sampling
    )


def three_turns(conversation):
    for _ in range(2):
        conversation.reply(max_new_tokens=5)
        conversation.append(TOOL)
    conversation.reply()


def test_turns_without_a_tool_are_one_sample(model):
    """Replies of 5 tokens each are the text, log-probs and versions of one reply of 24."""

    def in_pieces(conversation):
        while conversation.remaining and not conversation.finished:
            conversation.reply(max_new_tokens=5)

    whole = oracle.engine_of(*model, SpecConfig(3)).generate(oracle.requests(PROMPTS, group=2), LONG)
    for one, other in zip(whole, drawn(model, in_pieces), strict=True):
        assert one.tokens.tolist() == other.tokens.tolist() and one.status == other.status
        np.testing.assert_allclose(one.behaviour_logprobs, other.behaviour_logprobs, atol=1e-12)
        assert one.policy_versions == other.policy_versions and (one.loss_mask == other.loss_mask).all()


def test_the_tools_text_is_read_and_not_trained(model):
    """Drafts go on over turns, and change no text."""
    naive = oracle.Oracle(*model)
    samples = drawn(model, three_turns, group=1)
    plain = drawn(model, three_turns, OFF, group=1)
    assert [s.tokens.tolist() for s in plain] == [s.tokens.tolist() for s in samples]
    after = [any(first >= 7 for first, _ in s.accepted_spans) for s in samples]  # turn 1 and its tool take 7 tokens
    assert sum(after) >= len(after) - 1
    for sample in samples:
        response = Letters().decode(sample.response)
        written = np.zeros(len(response), bool)
        for start in [i for i in range(len(response)) if response[i : i + 2] == TOOL][:2]:
            written[start : start + 2] = True
        mask = sample.loss_mask[sample.prompt_len :]
        assert written.sum() == 4 and (mask == ~written).all() and not sample.loss_mask[: sample.prompt_len].any()
        logprobs = torch.log_softmax(naive.logits(sample.tokens.tolist()) / LONG.temperature, -1)
        for i in range(sample.prompt_len, len(sample.tokens)):
            expected = float(logprobs[i - 1, sample.tokens[i]]) if sample.loss_mask[i] else 0.0
            assert abs(sample.behaviour_logprobs[i] - expected) < 1e-6
        spans = sample.policy_versions
        assert [first for _, first, _ in spans] == [0, *(last for *_, last in spans[:-1])]
        assert spans[-1][2] == len(response)
        drafts = sum(accepted * rounds for accepted, rounds in enumerate(sample.accepted))
        spans = sample.accepted_spans
        assert spans and drafts <= sum(last - first for first, last in spans)  # a turn's first round is not counted
        for first, last in sample.accepted_spans:
            assert mask[first:last].all()


def test_a_turn_does_not_repeat_the_noise_of_an_earlier_one(model):
    """Where the noise is not keyed by the position. At this temperature a token is the one with the largest noise."""

    def two_turns(conversation):
        conversation.reply(max_new_tokens=8)
        conversation.reply(max_new_tokens=8)

    engine = oracle.engine_of(*model, OFF, verifier="target_only")
    conversations = Conversations(two_turns, EnginePool({"a": engine}), Letters(), keyed=False)
    for sample in conversations.draw(oracle.requests(PROMPTS), Sampling(1e6, max_new_tokens=16, ignore_eos=True)):
        first, second = sample.response.reshape(2, 8).tolist()
        assert first != second


def test_a_token_that_stops_a_reply(model):
    def until_letter(conversation):
        conversation.append("AB")
        said = conversation.reply(stop_token_ids=[9, 4])
        conversation.append("C")
        return float(said[-1] in "ID" and conversation.finished)

    samples = drawn(model, until_letter)
    assert {s.reward for s in samples} == {0.0, 1.0} or all(s.reward == 1.0 for s in samples)
    for sample in samples:
        assert sample.metadata["own_reward"] is True
        assert sample.loss_mask[sample.prompt_len :][:2].tolist() == [0, 0]
        assert sample.policy_versions == ((0, 0, len(sample.response)),)


def test_no_token_past_the_limit(model):
    def greedy(conversation):
        assert conversation.reply(max_new_tokens=3) and conversation.remaining == 5 - 3
        conversation.append("ABCDEFG")
        assert conversation.remaining == 0 and conversation.reply() == ""

    samples = drawn(model, greedy, sampling=Sampling(max_new_tokens=5, ignore_eos=True))
    assert {len(s.response) for s in samples} == {5} and {s.status for s in samples} == {"truncated"}


def test_a_failure_where_a_sample_is_taken_ends_the_rollout(model):
    """It must not leave a thread dead and the rollout waiting."""

    def taken(sample):
        raise EngineError("full disk")

    engine = oracle.engine_of(*model, K3)
    with pytest.raises(EngineError, match="full disk"):
        Conversations(three_turns, EnginePool({"a": engine}), Letters()).draw(oracle.requests(PROMPTS), LONG, taken)


@pytest.mark.parametrize("patient", [True, False], ids=["waits", "asks for replies for ever"])
def test_a_function_that_does_not_go_on_ends_the_rollout(model, patient):
    release = threading.Event()

    def stuck(conversation):
        if conversation.prompt.id != 1:
            conversation.reply()
        elif patient:
            release.wait()
        while not release.is_set() and conversation.prompt.id == 1:
            conversation.reply(max_new_tokens=24)

    engine = oracle.engine_of(*model, K3)
    conversations = Conversations(stuck, EnginePool({"a": engine}), Letters(), seconds=0.2)
    try:
        with pytest.raises(ConfigError, match=r"did not go on for 0.2 s \(rollout.timeout_seconds\)"):
            conversations.draw(oracle.requests(PROMPTS), LONG)
    finally:
        release.set()


def test_a_conversation_takes_one_turn_at_a_time():
    """A reply beside another one would be of a text that its sample does not have."""
    refused, begun, end = [], threading.Event(), threading.Event()

    class Waiting:
        def generate(self, requests, sampling):
            begun.set()
            end.wait()
            return [request.aborted() for request in requests]

        def abort(self, request_ids):
            pass

    def beside(conversation):
        with suppress(Unwound):
            conversation.reply()

    def two_threads(conversation):
        threading.Thread(target=beside, args=(conversation,), daemon=True).start()
        begun.wait()
        for turn in (conversation.reply, lambda: conversation.append("AB")):
            with pytest.raises(RuntimeError, match="goes on in another thread"):
                turn()
            refused.append(turn)

    try:
        with pytest.raises(ConfigError, match="returned while a thread of it waits for a reply"):
            Conversations(two_threads, EnginePool({"a": Waiting()}), Letters()).draw(oracle.requests(PROMPTS[:1]), LONG)
    finally:
        end.set()
    assert len(refused) == 2


class Lost:
    """An engine that fails after its first answer. Two tokens of the second one are known."""

    def __init__(self, engine):
        self.engine = engine
        self.answers = 0

    def generate(self, requests, sampling):
        self.answers += 1
        if self.answers == 1:
            return self.engine.generate(requests, sampling)
        error = EngineError("lost")
        if self.answers == 2:
            [begun] = self.engine.generate(requests, replace(sampling, max_new_tokens=2))
            error.begun = {begun.request_id: Partial.of(begun)}
        raise error

    def abort(self, request_ids):
        raise EngineError("lost")

    def close(self):
        pass


def test_another_engine_goes_on_where_one_is_lost(model):
    expected = [s.tokens.tolist() for s in drawn(model, three_turns)]
    pool = EnginePool(
        {"a": Lost(oracle.engine_of(*model, SpecConfig(3))), "b": oracle.engine_of(*model, SpecConfig(2))}
    )
    samples = Conversations(three_turns, pool, Letters()).draw(oracle.requests(PROMPTS, group=2), LONG)
    assert [s.tokens.tolist() for s in samples] == expected
    assert len(pool.engines) == 1 and pool.continued_tokens == 2


def test_an_abort_reaches_a_turn_that_is_on_its_way(model):
    """Its engine has it after the failure of another conversation has aborted all."""
    asked, aborted, has_it, again = (threading.Event() for _ in range(4))
    told = []

    class Late:
        def generate(self, requests, sampling):
            asked.set()
            assert aborted.wait(60)
            has_it.set()
            told.append(again.wait(60))
            return [request.aborted() for request in requests]

        def abort(self, ids):
            (again if has_it.is_set() else aborted).set()

    def fails(conversation):
        if conversation.prompt.id == 0:
            asked.wait()
            raise ValueError("the first failure")
        conversation.reply()

    with pytest.raises(ValueError, match="the first failure"):
        Conversations(fails, EnginePool({"a": Late()}), Letters()).draw(oracle.requests(PROMPTS[:2]), LONG)
    assert told == [True]


def test_no_engine_is_left(model):
    """The function's own `except Exception` must not hide it."""

    def hides(conversation):
        for _ in range(3):
            try:
                conversation.reply(max_new_tokens=2)
            except Exception:
                return 0.0

    pool = EnginePool({"a": Lost(oracle.engine_of(*model, SpecConfig(3)))})
    with pytest.raises(EngineError, match="no engine is left"):
        Conversations(hides, pool, Letters()).draw(oracle.requests(PROMPTS, group=2), LONG)


def test_aborted_conversations_keep_what_they_have(model):
    engine = oracle.engine_of(*model, SpecConfig(3))

    def aborts(conversation):
        conversation.reply(max_new_tokens=2)
        if conversation.prompt.id == 3:
            engine.abort()
        conversation.reply()

    conversations = Conversations(aborts, EnginePool({"a": engine}), Letters())
    samples = conversations.draw(oracle.requests(PROMPTS), Sampling(max_new_tokens=200, ignore_eos=True))
    assert not conversations.running
    assert all(s.status in ("aborted", "truncated") for s in samples)
    assert all(len(s.response) >= 2 for s in samples if s.prompt.id == 3)
