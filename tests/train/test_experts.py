"""GLM4-MoE in the trainer: it equals Transformers, and its drafter does not change the policy."""

from dataclasses import replace

import pytest
import torch
from moe_oracles import GLM4_MOE, checkpoint, logits
from test_model_parity import drafter_logits
from train_ranks import batches, config, digest, moments, on_ranks, samples, use_layout

from megatron_rlspec.train import experts
from megatron_rlspec.train.step import Trainer

SMALL = GLM4_MOE | {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "head_dim": 8}
GROUPED = GLM4_MOE | {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4}


def build(hf=SMALL, *, model=None, drafter=True, **sections):
    model = {"dtype": "float32"} | (model or {})
    options = config(model=model, drafter={"train": drafter} if isinstance(drafter, bool) else drafter, **sections)
    use_layout(options.parallel)
    return Trainer(options, hf)


def data_of(trainer, seed=0, budget=400):
    return batches(unpadded(samples(9, seed)), trainer.config, budget=budget)


def unpadded(chosen):
    """Cut samples to lengths that no layout pads."""
    ends = [len(sample.tokens) // 4 * 4 for sample in chosen]
    fields = ("tokens", "loss_mask", "behaviour_logprobs")
    return [
        replace(sample, **{name: getattr(sample, name)[:end] for name in fields})
        for sample, end in zip(chosen, ends, strict=True)
        if end > len(sample.prompt.tokens)
    ]


# ---- against Transformers -------------------------------------------------------------------------------------------


def against_transformers(hf, folder):
    """Return the largest difference of policy and drafter logits (depth 1), and whether export returns all tensors."""
    tensors = checkpoint(hf, folder)
    trainer = build(hf, model={})
    trainer.load_hf(tensors)
    worst = [0.0, 0.0]
    count = 0
    for batch in data_of(trainer):
        hidden, drafted = drafter_logits(trainer, batch)
        ours = hidden @ trainer.policy.head_weight().T
        ends = batch.cu_seqlens_padded[:4].tolist()
        for start, end in zip(ends[:-1], ends[1:], strict=True):
            ids = batch.tokens[None, start:end]
            target, draft = logits(hf, tensors, ids, folder / str(count))
            count += 1
            worst[0] = max(worst[0], float((ours[start:end] - target[0]).abs().max()))
            worst[1] = max(worst[1], float((drafted[0][start : end - 1] - draft[0]).abs().max()))
    same = {name: torch.equal(tensor, tensors[name]) for name, tensor in trainer.export()}
    copies = {name for name in tensors if name.endswith(("embed_tokens.weight", "shared_head.head.weight"))}
    return worst, all(same.values()) and set(tensors) - set(same) <= copies


@pytest.mark.parametrize("hf", [GLM4_MOE, GROUPED], ids=["Glm4MoeForCausalLM", "groups"])
def test_policy_and_drafter_equal_transformers(hf, tmp_path):
    ((worst, same),) = on_ranks(1, against_transformers, hf, tmp_path)
    assert max(worst) < 2e-5
    assert same


# ---- isolation ------------------------------------------------------------------------------------------------------


def state(trainer):
    """Return all that a policy's next step depends on."""
    inner = [moment for part in trainer.learner.parts for moment in moments(part.optimizer.optimizer)]
    return digest([*trainer.policy.parameters(), *experts.biases(trainer.policy).values(), *inner])


def five_steps(trainer):
    for seed in range(5):
        metrics = trainer.train_step(data_of(trainer, seed), objective="grpo")
    return metrics


def isolation(hf=SMALL, **sections):
    out = {}
    for distributed in (False, True):
        for drafter in (True, False):
            optimizer = {"distributed": distributed, "clip_grad": 0.05}
            trainer = build(hf, drafter=drafter, optimizer=optimizer, **sections)
            before = {name: b.clone() for name, b in experts.biases(trainer.policy).items()}
            metrics = five_steps(trainer)
            out[distributed, drafter] = state(trainer)
            out["moved"] = [not torch.equal(b, before[n]) for n, b in experts.biases(trainer.policy).items()]
            if drafter:
                out["norms"] = metrics["policy/grad_norm"], metrics["drafter/grad_norm"]
    return out


def check_isolation(ranks):
    for rank in ranks:
        assert rank[False, True] == rank[False, False]
        assert rank[True, True] == rank[True, False]
        assert rank["moved"] == [False]
        assert rank["norms"][0] > 0.05 and rank["norms"][1] > 0


def test_policy_is_the_same_with_and_without_drafter():
    check_isolation(on_ranks(3, isolation))


def made():
    trainer = build()
    generator = torch.Generator().manual_seed(3)
    return {k: v + 0.1 * torch.randn(v.shape, generator=generator) for k, v in trainer.export()}


# ---- the rest of a run ----------------------------------------------------------------------------------------------


def run():
    trainer = build()
    data = data_of(trainer)
    out = {}
    data[0].advantages.fill_(float("inf"))
    before = digest(experts.biases(trainer.policy).values())
    out["skipped"] = trainer.train_step(data, objective="grpo")["policy/skipped"]
    out["kept"] = before == digest(experts.biases(trainer.policy).values())
    trainer.logprobs(data)
    trainer.train_step(data_of(trainer, 1), objective="sft", train_policy=False)
    out["still kept"] = before == digest(experts.biases(trainer.policy).values())
    trainer.keep_reference()
    logprobs, chosen = trainer.logprobs(data), digest(experts.biases(trainer.policy).values())
    for bias in experts.biases(trainer.policy).values():
        bias[0] += 10  # as by many updates: every token takes the first expert
    out["moved"] = any(not torch.equal(a, b) for a, b in zip(logprobs, trainer.logprobs(data), strict=True))
    known = trainer.reference.logprobs(data)
    out["reference"] = all(torch.equal(a, b) for a, b in zip(logprobs, known, strict=True))
    out["restored"] = chosen != digest(experts.biases(trainer.policy).values())
    return out


def test_biases_are_referred_to_and_unchanged_without_an_update():
    (out,) = on_ranks(1, run)
    assert out.pop("skipped") == 1.0 and all(out.values()), out
