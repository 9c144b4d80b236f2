"""Policy and drafter equal Transformers' classes, and the drafter a naive one without a cache."""

import pytest
import torch
from embedded_oracle import Oracle
from train_ranks import HF_CONFIG, batches, config, on_ranks, samples

from megatron_rlspec.models.hf_files import write_hf
from megatron_rlspec.train.attention import Chain
from megatron_rlspec.train.step import Trainer


def trained(dtype: str, hf: dict) -> tuple[Trainer, list]:
    """Return a trainer after two steps, so that no parameter has its initial value, and its batches."""
    options = config(model={"dtype": dtype}, drafter={"depth": 3})
    trainer = Trainer(options, hf)
    data = batches(samples(9), options)
    for _ in range(2):
        trainer.train_step(data, objective="sft")
    return trainer, data


# Waves of the angles are 6, 63, 628 and 6,283 tokens long: one is interpolated, and three are longer than 16.
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
# Of the four frequencies two stay, and the others are divided in part and wholly; the magnitude is 1.14.
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 8, "beta_slow": 1}
QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "attention_bias": False,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
}
CASES = {
    "MiMoForCausalLM": {},
    "LlamaForCausalLM": {"model_type": "llama", "attention_bias": False},
    "LlamaForCausalLM 3.1": {"model_type": "llama", "attention_bias": False, "rope_scaling": LLAMA3},
    "Qwen3ForCausalLM": {"model_type": "qwen3", "attention_bias": False, "head_dim": 16},
    "MiMoForCausalLM YaRN": {"rope_scaling": YARN},
    "Qwen3MoeForCausalLM": QWEN3_MOE,
    "Qwen3MoeForCausalLM whose weights do not add up to 1": QWEN3_MOE | {"norm_topk_prob": False},
}


def policy_against_transformers(architecture, folder):
    """Return the largest difference of a label's log-probability."""
    from transformers import AutoConfig, AutoModelForCausalLM

    hf = HF_CONFIG | {"num_hidden_layers": 2, "architectures": [architecture.partition(" ")[0]]} | CASES[architecture]
    trainer, data = trained("float32", hf)
    fields = {k: v for k, v in hf.items() if k not in ("architectures", "model_type", "num_nextn_predict_layers")}
    write_hf(folder / "model", hf, {name: tensor.clone() for name, tensor in trainer.export("target")})
    known = AutoConfig.for_model(hf["model_type"], **fields)
    options = {"config": known, "dtype": torch.float32, "output_loading_info": True}
    reference, loaded = AutoModelForCausalLM.from_pretrained(folder / "model", **options)
    reference.eval()
    assert not loaded["unexpected_keys"] and not loaded["missing_keys"]
    worst = 0.0
    for batch, ours in zip(data, trainer.logprobs(data), strict=True):
        for start, end in zip(batch.cu_seqlens_padded[:-1], batch.cu_seqlens_padded[1:], strict=True):
            logits = reference(batch.tokens[None, start:end]).logits[0]
            theirs = logits.log_softmax(-1).gather(-1, batch.labels[start:end, None])[:, 0]
            difference = (theirs * (batch.loss_mask[start:end] != 0) - ours[start:end]).abs().max()
            worst = max(worst, float(difference))
    return worst


def policies_against_transformers(architectures, folder):
    return {name: policy_against_transformers(name, folder / str(i)) for i, name in enumerate(architectures)}


@pytest.fixture(scope="module")
def differences(request, tmp_path_factory):
    """Measure all selected cases on one rank, because its start takes longer than a case."""
    cases = [item for item in request.session.items if item.originalname == "test_policy_equals_transformers"]
    architectures = [item.callspec.params["architecture"] for item in cases]
    (found,) = on_ranks(1, policies_against_transformers, architectures, tmp_path_factory.mktemp("policies"))
    return found


@pytest.mark.parametrize("architecture", CASES)
def test_policy_equals_transformers(architecture, differences):
    assert differences[architecture] == pytest.approx(0, abs=2e-5)


def drafter_logits(trainer, batch):
    """Return the policy's hidden states `[T, H]`, and the drafter's logits per depth, `[T, V]` or over its words."""

    def look(batch, packed, hidden):
        head = getattr(trainer.drafter, "head", trainer.policy.head_weight())
        return hidden[:, 0], [x @ head.T for x in trainer._draft(batch, packed, hidden[:, 0])]

    (seen,) = trainer.run_forward([batch], look)
    return seen


def against_engine(tied):
    """Return our largest difference from the oracle per depth, over all positions that have a draft of that depth."""
    hf = HF_CONFIG | {"num_hidden_layers": 1, "tie_word_embeddings": tied}
    trainer, data = trained("float64", hf)
    trainer.drafter.recompute = tied
    worst = [0.0] * 3
    for batch in data:
        hidden, logits = drafter_logits(trainer, batch)
        naive = Oracle(hf, dict(trainer.export()))
        for first, last in zip(
            batch.cu_seqlens_padded[:-1].tolist(), batch.cu_seqlens_padded[1:].tolist(), strict=True
        ):
            tokens = batch.tokens[first:last].tolist()
            naive.hidden = lambda known, states=hidden[first:last]: states[: len(known)]  # the policy's
            for t in range(len(tokens) - 1):
                for depth, theirs in enumerate(naive.draft_logits(tokens[: t + 2], tokens[t + 2 : t + 4])):
                    worst[depth] = max(worst[depth], float((logits[depth][first + t] - theirs).abs().max()))
    return worst


def against_engines():
    return [*against_engine(False), *against_engine(True)]


def test_unrolling_equals_an_engines_drafting():
    (worst,) = on_ranks(1, against_engines)
    assert max(worst) < 1e-11


def other_unrolling(hf):
    """Return how far Megatron's unrolling, without the zero at position 0, is from ours at each depth."""
    trainer, data = trained("float64", hf)
    _, ours = drafter_logits(trainer, data[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Chain, "next", lambda chain: Chain())  # depth d attends to its own inputs, as in Megatron
        _, shifted = drafter_logits(trainer, data[0])
    trainer.drafter.zero_first_embedding = False
    _, first = drafter_logits(trainer, data[0])
    return [[float((a - b).abs().max()) for a, b in zip(ours, other, strict=True)] for other in (shifted, first)]


def test_engine_comparison_can_fail():
    ((megatrons, unzeroed),) = on_ranks(1, other_unrolling, HF_CONFIG | {"num_hidden_layers": 1})
    assert megatrons[0] < 1e-12 and min(megatrons[1:]) > 1e-2
    assert unzeroed[0] > 1e-2


def directional(trainer, data):
    """Return the derivative of the drafter's loss in a random direction: by its gradient, and by central difference."""
    learner = trainer.drafter_learner
    kept = {}
    learner.step = lambda: kept.update({p: p.main_grad.clone() for p in trainer.drafter.parameters()}) or (0.0, True)

    def loss():
        return trainer.train_step(data, objective="sft", train_policy=False)["drafter/objective"]

    loss()
    torch.manual_seed(0)
    direction = {p: torch.randn_like(p) for p in kept}
    slope = sum(float((direction[p] * kept[p]).sum()) for p in list(kept))
    values = []
    step = 1e-6
    for sign in (1, -2):  # forward, then back past the start
        for p, d in direction.items():
            p.data.add_(d, alpha=sign * step)
        values.append(loss())
    return slope, (values[0] - values[1]) / (2 * step), all(bool(g.abs().max() > 0) for g in kept.values())


GRADIENTS = [(3, "ce", False), (2, "forward_kl", True), (3, "forward_kl", True), (4, "ce", False)]


def slopes():
    found = []
    for depth, kind, recompute in GRADIENTS:
        options = config(drafter={"depth": depth, "loss": kind}, parallel={"recompute": recompute})
        data = batches(samples(9), options)
        found.append(directional(Trainer(options, HF_CONFIG), data))
    return found


def test_gradient_equals_the_central_difference_of_the_loss():
    (found,) = on_ranks(1, slopes)
    for case, (slope, difference, everywhere) in zip(GRADIENTS, found, strict=True):
        assert everywhere, case
        assert slope == pytest.approx(difference, rel=1e-6), case
