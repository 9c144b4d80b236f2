"""Two tensor-parallel ranks on gloo against one."""

from __future__ import annotations

import embedded_oracle as oracle
import numpy as np
import pytest
import torch.distributed as dist
from test_lossless_equality import SWITCHING, plain, wanted
from train_ranks import on_two

from megatron_rlspec.push.fingerprint import fingerprint
from megatron_rlspec.types import Sampling, SpecConfig

pytestmark = pytest.mark.slow


def answer_of(rank):
    """Texts, fingerprints and shard sizes of an engine over both ranks."""
    config, tensors = oracle.tiny(vocab=48, drafter="close", sharpness=2.0, seed=9)
    _, other = oracle.tiny(vocab=48, drafter="close", sharpness=2.0, seed=10)
    engine = oracle.engine_of(config, tensors, SpecConfig(3), group=dist.group.WORLD)
    answer = {"shards": [list(engine.model.tensors[n].view.shape) for n in ("lm_head.weight", "model.norm.weight")]}
    sampling = Sampling(max_new_tokens=24, ignore_eos=True)
    requests = wanted(24)
    for name, spec in (("chain", SpecConfig(3)), ("switching", SWITCHING)):
        oracle.decide(engine, spec)
        answer[name] = {s.request_id: s.response.tolist() for s in engine.generate(requests, sampling)}
    engine.set_config(SpecConfig(3))
    for name, words in (("few words", [1, 2, 3, 5, 8, 13, 47]), ("words of one rank", [1, 2, 3, 4])):
        engine.set_draft_vocabulary(np.array(words))
        engine.stats()
        answer[name] = {s.request_id: s.response.tolist() for s in engine.generate(requests, sampling)}
        answer[f"accepted, {name}"] = [list(stat.accepted) for stat in engine.stats()]
    engine.update_weights(1, other.items())
    answer["fingerprints"] = {name: str(value) for name, value in engine.fingerprints().items()}
    answer["updated"] = {s.request_id: s.response.tolist() for s in engine.generate(requests, sampling)}
    return answer


@pytest.fixture(scope="module")
def answers():
    return on_two(answer_of)


@pytest.mark.lossless
def test_texts_are_those_of_one_rank(answers):
    model = oracle.tiny(vocab=48, drafter="close", sharpness=2.0, seed=9)
    other = oracle.tiny(vocab=48, drafter="close", sharpness=2.0, seed=10)
    sampling = Sampling(max_new_tokens=24, ignore_eos=True)
    expected = plain(model, wanted(24), sampling)
    updated = plain(other, wanted(24), sampling)
    for answer in answers:
        assert answer["shards"] == [[24, 16], [16]]
        assert answer["chain"] == expected
        assert answer["switching"] == expected
        assert answer["updated"] == updated != expected
        engine = oracle.engine_of(*model, SpecConfig(3))
        for name, words in (("few words", [1, 2, 3, 5, 8, 13, 47]), ("words of one rank", [1, 2, 3, 4])):
            engine.set_draft_vocabulary(np.array(words))
            engine.stats()
            assert {s.request_id: s.response.tolist() for s in engine.generate(wanted(24), sampling)} == expected
            assert answer[name] == expected
            assert answer[f"accepted, {name}"] == [list(stat.accepted) for stat in engine.stats()]


def test_fingerprints_are_of_the_full_tensors(answers):
    _, other = oracle.tiny(vocab=48, drafter="close", sharpness=2.0, seed=10)
    expected = {name: str(fingerprint(tensor)) for name, tensor in other.items()}
    assert [answer["fingerprints"] for answer in answers] == [expected] * 2
