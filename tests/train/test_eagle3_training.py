"""The EAGLE-3 drafter: equal to an oracle that drafts one chain at a time, in every layout, without a trace in the
policy."""

from functools import partial

import numpy as np
import pytest
import torch
from eagle3_oracle import Eagle3Oracle
from megatron.core import parallel_state as ps
from test_model_parity import directional, drafter_logits
from train_ranks import HF_CONFIG, batches, config, digest, moments, on_ranks, samples

from megatron_rlspec.config import ConfigError
from megatron_rlspec.models.tensor_file import CheckpointError
from megatron_rlspec.train.step import Trainer

IDS = "eagle_aux_hidden_state_layer_ids"
TAPS = (0, 1, 3)
WORDS = np.array([0, 3, 4, 5, 9, 17, 18, 20, 31, 33, 34, 40, 47, 52, 53, 63])
DRAFTER = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 12,
    "vocab_size": 64,
    "draft_vocab_size": len(WORDS),
    "rms_norm_eps": 1e-4,
    "rope_theta": 500.0,
    "initializer_range": 0.3,
    "eagle_config": {IDS: [tap - 1 for tap in TAPS]},
}
HF = {**HF_CONFIG, "num_nextn_predict_layers": 0, "eagle3": DRAFTER}
MORE = {"num_hidden_layers": 2, "fc_norm": True, "norm_before_fc": True, "norm_output": True}
DEEP = HF | {"eagle3": DRAFTER | MORE}
PLAIN = {"tensor": 1, "context": 1, "sequence": False, "recompute": False}


def build(drafter=True, weights=None, *, hf=HF, dtype="float64", distributed=False, clip=0.0, **layout):
    """Build a trainer of a layout in the running job."""
    parallel = PLAIN | layout
    if ps.model_parallel_is_initialized():
        ps.destroy_model_parallel()
    options = config(
        model={"dtype": dtype},
        parallel=parallel,
        optimizer={"distributed": distributed, "clip_grad": clip},
        drafter={"train": drafter, "kind": "eagle3", "path": "drafter", "loss": "forward_kl"},
    )
    trainer = Trainer(options, hf)
    trainer.set_draft_vocabulary(WORDS)
    if weights is not None:
        trainer.load_hf(weights)
    return trainer


def own_batches(trainer, seed=0):
    return batches(samples(9, seed), trainer.config)


def hidden_states(weights, tokens):
    """Return the input of every layer `[layers, T, H]`, by Transformers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {k: v for k, v in HF_CONFIG.items() if k not in ("architectures", "model_type")}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen2", **fields)).double().eval()
    model.load_state_dict({name: x for name, x in weights.items() if not name.startswith("eagle3.")})
    with torch.no_grad():
        return torch.stack(model(tokens[None], output_hidden_states=True).hidden_states)[:, 0]


def against_oracle(*several):
    """Return the largest difference per depth from oracles that read the inputs of these layers, for each of them."""
    trainer = build(recompute=True)
    data = own_batches(trainer)
    for _ in range(2):
        trainer.train_step(data, objective="sft")
    weights = dict(trainer.export())
    own = {name.removeprefix("eagle3."): x for name, x in weights.items() if name.startswith("eagle3.")}
    oracle = Eagle3Oracle(DRAFTER, own, weights["model.embed_tokens.weight"])
    worst = [[0.0] * 3 for _ in several]
    for batch in data:
        _, logits = drafter_logits(trainer, batch)
        bounds = batch.cu_seqlens_padded.tolist()
        for first, last in zip(bounds[:-1], bounds[1:], strict=True):
            layers = hidden_states(weights, batch.tokens[first:last])
            tokens = batch.tokens[first:last]
            for taps, found in zip(several, worst, strict=True):
                inputs = torch.cat([layers[tap] for tap in taps], -1)
                for t in range(len(tokens) - 1):
                    for depth, theirs in enumerate(oracle.logits(inputs, tokens, t, tokens[t + 2 : t + 4].tolist())):
                        found[depth] = max(found[depth], float((logits[depth][first + t] - theirs).abs().max()))
    return worst


def test_unrolling_equals_the_oracles_on_the_same_layers_only():
    ((right, wrong),) = on_ranks(1, against_oracle, TAPS, (0, 1, 2))
    assert max(right) < 1e-5  # Transformers computes in other float32 steps
    assert min(wrong) > 1e-2


def slopes(hf):
    trainer = build(hf=hf, recompute=hf is DEEP)
    return directional(trainer, own_batches(trainer))


@pytest.mark.parametrize("hf", [HF, pytest.param(DEEP, marks=pytest.mark.slow)], ids=["one layer", "layers and norms"])
def test_gradient_equals_the_central_difference_of_the_loss(hf):
    ((slope, difference, everywhere),) = on_ranks(1, slopes, hf)
    assert everywhere
    assert slope == pytest.approx(difference, rel=1e-5)


# Of two ranks each.
LAYOUTS = {
    "tensor": {"tensor": 2},
    "sequence": {"tensor": 2, "sequence": True, "recompute": True},
    "context": {"context": 2},
    "data": {},
    "pipeline": {"pipeline": 2},
}


def in_layouts(weights):
    """Return each layout's metrics and drafter, after two steps from the same weights."""
    found = {}
    for name, layout in LAYOUTS.items():
        trainer = build(weights=weights, hf=DEEP, **layout)
        metrics = [trainer.train_step(own_batches(trainer), objective="sft") for _ in range(2)]
        found[name] = metrics, dict(trainer.export("drafter"))
    return found


def alone():
    trainer = build(hf=DEEP)
    weights = dict(trainer.export())
    metrics = [trainer.train_step(own_batches(trainer), objective="sft") for _ in range(2)]
    return weights, metrics, dict(trainer.export("drafter"))


@pytest.mark.slow
def test_every_layout_trains_the_same_drafter():
    ((weights, expected, drafter),) = on_ranks(1, alone)
    first, _ = on_ranks(2, in_layouts, weights)
    for name, (metrics, trained) in first.items():
        for ours, theirs in zip(metrics, expected, strict=True):
            for key in ("drafter/objective", "drafter/grad_norm", "drafter/overlap_2", "drafter/covered_1"):
                assert ours[key] == pytest.approx(theirs[key], rel=1e-6), (name, key)  # Megatron's norm is float32
        assert trained.keys() == drafter.keys() == {n for n in weights if n.startswith("eagle3.")}
        for key, tensor in drafter.items():
            torch.testing.assert_close(trained[key], tensor, rtol=1e-6, atol=1e-8, msg=f"{name}: {key}")


def isolation(alone, **options):
    """Return digests of the policy and its optimizer after five steps with the drafter, and without it on `alone`."""
    out = []
    for drafter, hf in ((True, HF), (False, alone)):
        trainer = build(drafter, hf=hf, dtype="float32", clip=0.3, **options)
        for seed in range(5):
            metrics = trainer.train_step(own_batches(trainer, seed), objective="sft")
        assert metrics["policy/grad_norm"] > 0.3
        out.append((digest(trainer.policy.parameters()), digest(moments(trainer.learner.parts[0].optimizer.optimizer))))
    return out


def test_the_policy_is_the_same_with_and_without_the_drafter():
    for with_drafter, without in on_ranks(3, partial(isolation, HF, distributed=True)):
        assert with_drafter == without


def test_hidden_states_between_stages_leave_the_policy_as_it_is():
    """Without the drafter, stages send none."""
    plain = {key: value for key, value in HF.items() if key != "eagle3"}
    for with_drafter, without in on_ranks(2, partial(isolation, plain, pipeline=2)):
        assert with_drafter == without


def other_words(folder):
    trainer = build()
    trainer.save(folder)
    trainer.load(folder)
    trainer.set_draft_vocabulary(WORDS - (WORDS == 20))
    with pytest.raises(CheckpointError, match=r"=EAGLE-3 of the layers \[0, 1, 3\] and the words .* but this run has"):
        trainer.load(folder)


def test_a_checkpoint_of_other_words_is_refused(tmp_path):
    on_ranks(1, other_words, tmp_path / "step")


def test_heads_that_do_not_divide_are_refused():
    from megatron_rlspec.train.drafter import _eagle3_config

    class Policy:
        tensor_model_parallel_size = 8

    with pytest.raises(ConfigError, match="num_key_value_heads=4, no multiple of parallel.tensor=8"):
        _eagle3_config(Policy, DRAFTER)
