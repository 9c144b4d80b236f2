"""The first loss of a fresh drafter on a trained model is below that of a uniform guess."""

import math

import numpy as np
import pytest
import torch
from train_ranks import batches, config, on_ranks
from weight_oracles import MIMO, qwen2_model

from megatron_rlspec.conversion.convert import convert, plan
from megatron_rlspec.models.hf_files import read_hf, write_hf
from megatron_rlspec.types import Prompt, Sample

RMS = 0.13
VOCABULARY = 128
LENGTH = 32
HF = MIMO | {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 32,
    "vocab_size": VOCABULARY,
    "tie_word_embeddings": True,
    "num_nextn_predict_layers": 0,
}


def texts(seed, count):
    """Draw `[count, LENGTH]` tokens of a Markov chain in which one of two tokens follows each token."""
    draw = np.random.default_rng(seed)
    rows = [draw.integers(VOCABULARY, size=count)]
    for _ in range(LENGTH - 1):
        rows.append((5 * rows[-1] + np.where(draw.random(count) < 0.8, 1, 17)) % VOCABULARY)
    return np.stack(rows, 1)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Train a tied model with small embeddings and a large final norm, as small public models have them."""
    torch.manual_seed(0)
    model = qwen2_model(HF).train()
    with torch.no_grad():
        model.model.embed_tokens.weight.normal_(std=RMS)
        model.model.norm.weight.fill_(1.8)
    adam = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    for step in range(100):
        tokens = torch.from_numpy(texts(step, 16))
        loss = model(tokens, labels=tokens).loss
        adam.zero_grad()
        loss.backward()
        adam.step()
    assert float(loss) < 2.0, "the model has not learnt its task"
    rms = float(model.model.embed_tokens.weight.detach().square().mean().sqrt())
    assert rms == pytest.approx(RMS, rel=0.25)
    folder = tmp_path_factory.mktemp("trained")
    tensors = {n: t.detach().clone() for n, t in model.state_dict().items() if n != "lm_head.weight"}
    write_hf(folder / "plain", HF, tensors)
    convert(plan(folder / "plain", folder / "with-drafter", add_mtp=True, to="hf"))
    return folder / "with-drafter"


def losses(folder, steps):
    """Return the cross-entropy of depth 1 before each of `steps` updates of the drafter."""
    from megatron_rlspec.train.step import Trainer

    hf_config, tensors = read_hf(folder)
    trainer = Trainer(config(model={"dtype": "float32"}, drafter={"lr": 1e-3, "warmup_steps": 0}), hf_config)
    trainer.load_hf(tensors)
    mask = (np.arange(LENGTH) >= 2).astype(np.float32)
    found = []
    for step in range(steps):
        rows = [Sample(f"s{i}", Prompt(i, row[:2]), row, mask, -mask) for i, row in enumerate(texts(500 + step, 16))]
        share = batches(rows, trainer.config, budget=600)
        found.append(trainer.train_step(share, objective="sft", train_policy=False)["drafter/ce_1"])
    return found


@pytest.mark.slow
def test_a_fresh_drafter_starts_below_a_uniform_guess_and_learns(trained):
    (found,) = on_ranks(1, losses, str(trained), 20)
    print(
        f"  uniform {math.log(VOCABULARY):.2f}; fresh {found[0]:.2f}, after 5 steps {found[5]:.2f}, 19 {found[-1]:.2f}"
    )
    assert found[0] < math.log(VOCABULARY)
    assert found[-1] < 0.8 * found[0]
