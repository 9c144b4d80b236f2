"""The embedded engine with an EAGLE-3 drafter: the text of plain decoding, and the trainer's logits."""

import dataclasses
import itertools
import time

import numpy as np
import pytest
import torch
from train_ranks import HF_CONFIG, config, on_ranks

from megatron_rlspec.engine import EngineError
from megatron_rlspec.packing.pack import pack
from megatron_rlspec.packing.shift import shift_packed
from megatron_rlspec.rollout.embedded.engine import EmbeddedEngine
from megatron_rlspec.rollout.embedded.model import Architecture, Decoder
from megatron_rlspec.rollout.embedded.parallel import Solo
from megatron_rlspec.train.step import Trainer
from megatron_rlspec.types import OFF, Prompt, Request, Sampling, SpecConfig

WORDS = torch.tensor([0, 3, 4, 5, 9, 17, 18, 20, 31, 33, 34, 40, 47, 52, 53, 63])
SAME = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta")
DRAFTER = {name: HF_CONFIG[name] for name in (*SAME, "vocab_size")} | {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "intermediate_size": 40,
    "num_hidden_layers": 1,
    "draft_vocab_size": len(WORDS),
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [-1, 1, 2]},
}
HF = {**HF_CONFIG, "num_nextn_predict_layers": 0, "eagle3": DRAFTER}
MORE = {"num_hidden_layers": 3, "fc_norm": True, "norm_before_fc": True, "norm_output": True}
DEEP = HF | {"eagle3": DRAFTER | MORE}


def weights(hf=HF):
    """Return random weights of target and drafter."""
    generator = torch.Generator().manual_seed(5)

    def normal(shape):
        x = torch.randn(shape, generator=generator, dtype=torch.float64) * 0.3
        return x + 1 if len(shape) == 1 else x

    model = Decoder(Architecture.from_hf(hf), torch.float64, "cpu", Solo(), 8)
    return {name: normal(view.shape) for name, (view, _) in model.tensors.items()}


def engine(tensors, hf=HF, **options):
    return EmbeddedEngine(
        hf, tensors.items(), dtype=torch.float64, draft_words=WORDS, max_length=64, max_total_tokens=2048, **options
    )


def drawn(running, config, count=6, **sampling):
    """Draw samples of two prompts under a configuration."""
    running.set_config(config)
    prompts = [Prompt(0, np.arange(5, 6)), Prompt(1, np.arange(7, 19))]
    requests = [Request(f"{time.monotonic_ns()}-{i:02d}", prompts[i % 2], seed=i) for i in range(count)]
    return running.generate(requests, Sampling(max_new_tokens=20, **sampling))


@pytest.fixture(scope="module")
def tensors():
    return weights()


@pytest.mark.parametrize(("drafts", "hf"), [(1, HF), (3, HF), (2, DEEP)], ids=["k1", "k3", "layers and norms"])
def test_the_text_is_that_of_plain_decoding(drafts, hf):
    running = engine(weights(hf), hf)
    plain = drawn(running, OFF, temperature=1.0)
    drafting = drawn(running, SpecConfig(drafts), temperature=1.0)
    assert [s.tokens.tolist() for s in plain] == [s.tokens.tolist() for s in drafting]
    assert sum(sum(s.accepted[1:]) for s in drafting) > 0, "no draft was accepted, so nothing was tested"


def test_catching_up_after_rounds_without_drafts(tensors, monkeypatch):
    running = engine(tensors, prefill_chunk=4)
    plain = drawn(running, OFF, 16, temperature=1.0)
    rounds = itertools.count()
    monkeypatch.setattr(running.choice, "choose", lambda *_: OFF if next(rounds) % 3 else SpecConfig(3))
    drafting = drawn(running, SpecConfig(3), 16, temperature=1.0)
    assert [s.tokens.tolist() for s in plain] == [s.tokens.tolist() for s in drafting]
    assert sum(sum(s.accepted[1:]) for s in drafting) > 0


def recorded(hf):
    """Draw greedily, and compare every chain of drafts with the trainer's logits at its position. Returns the gap."""
    found = []
    tensors = weights(hf)
    running = engine(tensors, hf)
    drafting = running.rounds._chain

    def recording(*args):
        chains, logq = drafting(*args)
        found.append((running.cache.length.copy(), chains.clone(), logq.clone()))
        return chains, logq

    running.rounds._chain = recording
    options = config(drafter={"kind": "eagle3", "path": "d", "depth": 3})
    trainer = Trainer(options, hf)
    trainer.load_hf(tensors)
    worst = 0.0
    for prompt in (Prompt(0, np.arange(5, 6)), Prompt(1, np.arange(7, 19))):
        found.clear()
        running.set_config(SpecConfig(3))
        (sample,) = running.generate(
            [Request(f"r{prompt.id}", prompt, 3)], Sampling(max_new_tokens=20, temperature=0.0)
        )
        (batch,) = pack([sample], depth=3, tokens_per_micro_batch=1024)
        tokens = [shift_packed(batch.tokens, batch.cu_seqlens, d) for d in (1, 2, 3)]
        chains = [(int(length.max()) - 2, chain[0], logq[0]) for length, chain, logq in found]
        for t, chain, _ in chains:
            for depth in (2, 3):
                tokens[depth - 1][t] = chain[depth - 2]
        batch = dataclasses.replace(batch, drafter_tokens=tokens)
        seen = []

        def look(batch, packed, hidden, seen=seen):
            outputs = trainer._draft(batch, packed, hidden[:, 0])
            seen.extend((x @ trainer.drafter.head.T).log_softmax(-1) for x in outputs)
            return hidden.new_zeros(()), torch.zeros((), dtype=torch.int), {}

        trainer.run_schedule([batch], look, forward_only=True)
        assert len(chains) > 5
        for t, chain, logq in chains:
            if t < 0:
                continue
            logp = torch.stack([seen[depth][t] for depth in range(3)])
            best = logp.max(-1)
            assert WORDS[best.indices].tolist() == chain.tolist()
            worst = max(worst, float((best.values - logq).abs().max()))
    return worst


@pytest.mark.parametrize("hf", [HF, DEEP], ids=["one layer", "layers and norms"])
def test_the_drafts_are_the_trainers(hf):
    (worst,) = on_ranks(1, recorded, hf)
    assert worst < 1e-9


def test_pushes_reach_the_drafter_and_what_does_not_fit_is_refused(tensors):
    running = engine(tensors)
    own = {name: x for name, x in tensors.items() if name.startswith("eagle3.")}
    running.update_weights(2, ((name, x + 1) for name, x in own.items()), "drafter")
    assert torch.equal(running.model.tensors["eagle3.fc.weight"].view, own["eagle3.fc.weight"] + 1)
    assert running.describe()["speculative"] and running.describe()["draft_vocabulary"] == len(WORDS)
    with pytest.raises(EngineError, match="part of its checkpoint"):
        running.set_draft_vocabulary(np.arange(8))
    with pytest.raises(ValueError, match="num_attention_heads=8, but the target has 4"):
        Architecture.from_hf(HF | {"eagle3": DRAFTER | {"num_attention_heads": 8, "head_dim": 8}})
