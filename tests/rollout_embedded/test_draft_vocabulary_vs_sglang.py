"""SGLang's token map in a real engine on a CPU: renewed by a run, and with every weight update."""

import os
from pathlib import Path

import embedded_oracle as oracle
import numpy as np
import pytest
import tiny_mimo
import torch

from megatron_rlspec.engine import EngineError
from megatron_rlspec.rollout.sglang.client.engine import SGLangEngine
from megatron_rlspec.rollout.sglang.client.launcher import launch
from megatron_rlspec.speculation.roofline import Roofline
from megatron_rlspec.speculation.vocabulary import DraftVocabulary
from megatron_rlspec.types import Prompt, Request, Sampling, SpecConfig

SIZE, VOCABULARY = 60, 160
SERVE = ["--device", "cpu", "--dtype", "float32", "--max-total-tokens", "8192", "--max-running-requests", "16"]
FREE = Sampling(max_new_tokens=24, ignore_eos=True)


def requests(tag: str) -> list[Request]:
    prompts = [Prompt(i, np.random.default_rng(i).integers(3, VOCABULARY, 5 + i)) for i in range(8)]
    return [Request(f"{tag}-{i}.", prompt, seed=i) for i, prompt in enumerate(prompts)]


@pytest.mark.slow
@pytest.mark.parametrize(("tied", "ranks"), [(True, 1), (False, 2)], ids=["tied", "two ranks"])
def test_drafts_are_those_of_the_embedded_engine_before_and_after_pushes(
    tmp_path: Path, tied: bool, ranks: int
) -> None:
    """Two tensor-parallel ranks, of which each drafts from a half of the words, draft as one does."""
    shape = {"vocab": VOCABULARY, "hidden": 64, "drafter": "close", "sharpness": 2.0, "tied": tied}
    config, first = oracle.tiny(**shape)
    _, second = oracle.tiny(**shape, seed=1)
    first, second = ({name: x.float() for name, x in tensors.items()} for tensors in (first, second))
    if tied:  # with embeddings of RMS 1 every token would repeat itself
        for tensors in (first, second):
            tensors["model.embed_tokens.weight"] *= 0.1
    config |= {"attention_bias": True, "eos_token_id": 150, "bos_token_id": 1, "torch_dtype": "float32"}
    model = tiny_mimo.write(tmp_path / "model", config, first)
    cores = "|".join(ranks * [",".join(map(str, sorted(os.sched_getaffinity(0))))])
    process = launch(
        model,
        tmp_path / "engine.log",
        arguments=[
            *(*SERVE, "--candidate-steps", "0,1,3", "--ragged"),
            *("--draft-vocabulary", str(SIZE), "--tp", str(ranks)),
        ],
        environment={"SGLANG_CPU_OMP_THREADS_BIND": cores},
    )
    torch.set_num_threads(1)
    ours = oracle.engine_of(config, first, SpecConfig(3), dtype=torch.float32)
    words = [DraftVocabulary(SIZE, VOCABULARY, (150,)).ids(), np.arange(100, 100 + SIZE), np.arange(5, 5 + SIZE)]
    with process:
        theirs = SGLangEngine.of(process, timeout=120)
        process.wait()
        theirs.set_config(SpecConfig(3))
        assert theirs.describe()["draft_vocabulary"] == SIZE
        found = []

        def compare(name: str) -> None:
            got, expected = theirs.generate(requests(name), FREE), ours.generate(requests(name), FREE)
            assert [s.response.tolist() for s in got] == [s.response.tolist() for s in expected], name
            # The embedded engine's first round drafts, and is not counted; SGLang's prefill does not draft.
            drafts = [sum(i * n for i, n in enumerate(s.accepted)) for s in got]
            same = [
                (a.accepted, b.accepted) for a, b in zip(got, expected, strict=True) if 0 not in dict(b.accepted_spans)
            ]
            assert sum(drafts) > 8 and len(same) > 2 and all(a == b for a, b in same), (name, same)
            found.append(tuple(drafts))

        ours.set_draft_vocabulary(words[0])
        compare("start")
        for engine in (theirs, ours):
            engine.set_draft_vocabulary(words[1])
        compare("renewed")
        for engine in (theirs, ours):
            engine.update_weights(2, second.items())
        compare("pushed")
        for engine in (theirs, ours):
            engine.set_draft_vocabulary(words[2])
            engine.update_weights(3, first.items())
        compare("both")
        assert len(set(found)) == len(found)
        assert theirs.fingerprints() == ours.fingerprints()
        with pytest.raises(EngineError, match="61 words, expected 60: the size is fixed when the engine starts"):
            theirs.set_draft_vocabulary(np.arange(61))
        with pytest.raises(EngineError, match="expected different ids from 0 to 159"):
            theirs.set_draft_vocabulary(np.zeros(60, np.int64))
        compare("refused")
        cost = Roofline(1.0, token_ms=1.0, context_ms=0.0, drafter=0.02)
        rule = {"candidates": [3], "roofline": cost.to_json(), "ragged": True}
        theirs.set_spec_rule(rule)
        for name in ("ragged", "learnt"):  # the ranks choose the same drafts, otherwise their passes would not fit
            theirs.stats()
            got, expected = theirs.generate(requests(name), FREE), ours.generate(requests(name), FREE)
            assert [s.response.tolist() for s in got] == [s.response.tolist() for s in expected], name
        rounds = theirs.stats()
        assert sum(s.verified for s in rounds) < 2.5 * sum(sum(s.accepted) for s in rounds)
