"""Policy and drafter equal Transformers' classes, and an engine that is simulated one token at a time."""

import pytest
import torch
import torch.nn.functional as F
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


class Engine:
    """MiMo's drafter as an engine runs it: one token per call, keys and values cached, Hugging Face weights.

    Written from the architecture alone (SGLang's models/mimo_mtp.py and speculative/eagle_worker_v2.py).
    """

    def __init__(self, weights: dict, hf: dict) -> None:
        self.w = {k.removeprefix("model.mtp_layers.0."): v for k, v in weights.items() if "mtp_layers.0." in k}
        self.embedding = weights["model.embed_tokens.weight"]
        self.head = self.embedding if hf["tie_word_embeddings"] else weights["lm_head.weight"]
        self.heads = hf["num_attention_heads"]
        self.groups = hf["num_key_value_heads"]
        self.d = hf["head_dim"]
        self.theta = hf["rope_theta"]
        self.eps = hf["rms_norm_eps"]
        self.keys = []
        self.values = []

    def norm(self, x, name):
        return F.rms_norm(x, x.shape, self.w[name + ".weight"], self.eps)

    def rotate(self, x, position):
        frequency = 1.0 / self.theta ** (torch.arange(0, self.d, 2, dtype=torch.float32) / self.d)
        angle = (position * frequency).repeat(2)
        turned = torch.cat([-x[:, self.d // 2 :], x[:, : self.d // 2]], -1)
        return x * angle.cos().to(x) + turned * angle.sin().to(x)

    def step(self, hidden, token, position):
        """Append one position to the cache; return the drafter's output hidden state and logits."""
        embedded = torch.zeros_like(hidden) if position == 0 else self.embedding[token]
        both = torch.cat([self.norm(hidden, "hidden_layernorm"), self.norm(embedded, "token_layernorm")])
        x = self.w["input_proj.weight"] @ both
        y = self.norm(x, "input_layernorm")
        q, k, v = (
            (self.w[f"self_attn.{n}_proj.weight"] @ y + self.w[f"self_attn.{n}_proj.bias"]).view(-1, self.d)
            for n in "qkv"
        )
        self.keys.append(self.rotate(k, position))
        self.values.append(v)
        q, repeat = self.rotate(q, position), self.heads // self.groups
        keys, values = (torch.stack(c).repeat_interleave(repeat, 1) for c in (self.keys, self.values))
        weight = (torch.einsum("nd,snd->ns", q, keys) / self.d**0.5).softmax(-1)
        x = x + self.w["self_attn.o_proj.weight"] @ torch.einsum("ns,snd->nd", weight, values).flatten()
        y = self.norm(x, "post_attention_layernorm")
        gate, up = (self.w[f"mlp.{n}_proj.weight"] @ y for n in ("gate", "up"))
        x = self.norm(x + self.w["mlp.down_proj.weight"] @ (F.silu(gate) * up), "final_layernorm")
        return x, self.head @ x

    def draft(self, hidden, token, position, following):
        """Return the logits of a whole draft from `position`; remove the chain's entries from the cache afterwards."""
        state, logits = self.step(hidden, token, position)
        out = [logits]
        kept = len(self.keys)
        for offset, token in enumerate(following, 1):
            state, logits = self.step(state, token, position + offset)
            out.append(logits)
        del self.keys[kept:], self.values[kept:]
        return out


def drafter_logits(trainer, batch):
    """Return the policy's hidden states `[T, H]`, and the drafter's logits per depth, `[T, V]` or over its words."""

    def look(batch, packed, hidden):
        head = getattr(trainer.drafter, "head", trainer.policy.head_weight())
        return hidden[:, 0], [x @ head.T for x in trainer._draft(batch, packed, hidden[:, 0])]

    (seen,) = trainer.read([batch], look)
    return seen


def against_engine(tied):
    """Return our largest difference from the engine per depth, over all positions that have a draft of that depth."""
    hf = HF_CONFIG | {"num_hidden_layers": 1, "tie_word_embeddings": tied}
    trainer, data = trained("float64", hf)
    trainer.drafter.recompute = tied
    worst = [0.0] * 3
    for batch in data:
        hidden, logits = drafter_logits(trainer, batch)
        weights = dict(trainer.export())
        for first, last in zip(
            batch.cu_seqlens_padded[:-1].tolist(), batch.cu_seqlens_padded[1:].tolist(), strict=True
        ):
            engine = Engine(weights, hf)
            tokens = batch.tokens[first:last].tolist()
            for t in range(len(tokens) - 1):
                drafts = engine.draft(hidden[first + t], tokens[t + 1], t, tokens[t + 2 : t + 4])
                for depth, theirs in enumerate(drafts):
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
