"""Two tensor-parallel ranks on gloo against one."""

from __future__ import annotations

import embedded_oracle as oracle
import embedded_tp_rank
import numpy as np
import pytest
from test_lossless_equality import plain, wanted
from train_ranks import on_ranks

from megatron_rlspec.push.fingerprint import fingerprint
from megatron_rlspec.types import Sampling, SpecConfig

pytestmark = pytest.mark.slow
SIZE = 2


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    return on_ranks(SIZE, embedded_tp_rank.answers, str(tmp_path_factory.mktemp("tp") / "meeting"))


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
    assert [answer["fingerprints"] for answer in answers] == [expected] * SIZE
