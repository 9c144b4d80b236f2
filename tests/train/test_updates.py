"""Several optimizer steps on one rollout, beside a drafter; which steps train it, and the weights of its rows."""

import math

import numpy as np
import pytest
import torch
from test_parallel_equality import PLAIN, build, own_batches, state
from train_ranks import HF_CONFIG, config, digest, on_ranks, samples

from megatron_rlspec.models.hf_files import write_hf
from megatron_rlspec.packing.pack import pack
from megatron_rlspec.train.drafter_updates import EverySteps, reward_weights
from megatron_rlspec.train.step import Trainer
from megatron_rlspec.train.updates import train_rollout

HF = HF_CONFIG | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": False}
HF |= {"num_hidden_layers": 2, "num_nextn_predict_layers": 0}
LR = 3e-3
CLIP = {"clip_low": 0.02, "clip_high": 0.03}
PARTS = ((0, 1, 2, 3), (4, 5, 6), (7, 8, 9, 10))  # samples of each update


def rollout():
    chosen = samples(11, seed=4, shortest=12)
    return chosen, np.random.default_rng(5).normal(size=len(chosen)).astype(np.float32)


def ours(folder, aggregation, old_logprobs):
    """Train on the rollout. Returns the policy's tensors before and after, and the metrics."""
    algorithm = CLIP | {"tis_clip": 0.0, "aggregation": aggregation, "old_logprobs": old_logprobs}
    options = config(drafter={"train": False}, algorithm=algorithm, optimizer={"lr": LR, "clip_grad": 0.0})
    trainer = Trainer(options, HF)
    before = {name: tensor.clone() for name, tensor in trainer.export("target")}
    write_hf(folder, HF, before)
    chosen, advantage = rollout()
    mini_batches = []
    for part in PARTS:
        packed = pack(
            [chosen[i] for i in part],
            advantages=[float(advantage[i]) for i in part],
            depth=1,
            tokens_per_micro_batch=40,
            aggregation=aggregation,
        )
        assert len(packed) > 1
        mini_batches.append(packed)
    metrics = train_rollout(trainer, mini_batches, objective="grpo")
    return before, {name: tensor.clone() for name, tensor in trainer.export("target")}, metrics


def expected(folder, aggregation, old_logprobs, old_of_each_update=False):
    """Do the same one sample at a time in float64, by the definitions. Returns tensors and metrics.

    `old_of_each_update`: a mistake, for a control.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    adam = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0)
    chosen, advantage = rollout()

    def trained_logprobs(sample):
        tokens = torch.as_tensor(sample.tokens)
        logp = model(tokens[None, :-1]).logits[0].log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]
        return logp[torch.as_tensor(sample.loss_mask[1:]) > 0]

    def old(sample):
        if old_logprobs == "engine":
            return torch.as_tensor(sample.behaviour_logprobs[1:][sample.loss_mask[1:] > 0], dtype=torch.float64)
        return trained_logprobs(sample).detach()

    with torch.no_grad():
        before = [old(sample) for sample in chosen]
    ratios, clipped = [], []
    for part in PARTS:
        losses = []
        for i in part:
            logp = trained_logprobs(chosen[i])
            ratio = torch.exp(logp - (logp.detach() if old_of_each_update else before[i]))
            bounded = ratio.clamp(1 - CLIP["clip_low"], 1 + CLIP["clip_high"])
            a = float(advantage[i])
            losses.append(torch.maximum(-ratio * a, -bounded * a))
            ratios.append(ratio.detach())
            clipped.append((-bounded * a > -ratio * a).detach())
        if aggregation == "token":
            loss = torch.cat(losses).mean()
        else:
            loss = torch.stack([x.mean() if len(x) else x.sum() for x in losses]).mean()
        adam.zero_grad()
        loss.backward()
        adam.step()
    metrics = {
        "policy/ratio": float(torch.cat(ratios).mean()),
        "policy/ppo_kl": float(-torch.cat(ratios).log().mean()),
        "policy/pg_clipfrac": float(torch.cat(clipped).double().mean()),
        "policy/tokens": float(len(torch.cat(ratios))),
    }
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}, metrics


def worst(one, other):
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.mark.parametrize(("aggregation", "old"), [("token", "recompute"), ("sample", "recompute"), ("token", "engine")])
def test_three_updates_equal_the_definition(tmp_path, aggregation, old):
    """The ratio is to the policy that generated the rollout, in every update; each loss is a mean of its own."""
    ((before, after, metrics),) = on_ranks(1, ours, tmp_path / "model", aggregation, old)
    tensors, numbers = expected(tmp_path / "model", aggregation, old)
    assert worst(after, before) > LR
    assert worst(after, tensors) < 1e-6
    assert {name: metrics[name] for name in numbers} == pytest.approx(numbers, rel=1e-5)
    assert metrics["policy/skipped"] == 0 and 0.05 < metrics["policy/pg_clipfrac"] < 0.95
    if old == "recompute":
        mistaken, _ = expected(tmp_path / "model", aggregation, old, old_of_each_update=True)
        assert worst(after, mistaken) > 1e-4


def beside_a_drafter(updates=2):
    """Return, with and without a drafter, digests of the policy after three rollouts of so many updates."""
    out = []
    for cell in ({"loss": "ce"}, {"loss": "forward_kl", "distributed": True}):
        for drafter in (True, False):
            trainer = build(PLAIN | {"dtype": "float32"} | cell, drafter=drafter, clip=0.3)
            for rollout in range(3):
                mini_batches = [own_batches(trainer, 10 * rollout + i, some=i % 2 == 1) for i in range(updates)]
                metrics = train_rollout(trainer, mini_batches, objective="grpo")
            assert metrics["policy/grad_norm"] > 0.3 and metrics["policy/ratio"] != 1
            out.append(state(trainer))
            assert not drafter or trainer.drafter_learner.steps == 3 * updates
            assert trainer.learner.steps == 3 * updates
    return out


def test_no_update_of_the_policy_depends_on_the_drafter():
    for one, alone, other, also_alone in on_ranks(3, beside_a_drafter):
        assert one == alone and other == also_alone


def engines_of_the_rollouts_policy():
    """Train with the engines' log-probs as old ones, which equal the policy's own at first. Returns the metrics."""
    algorithm = {"old_logprobs": "engine"}
    options = config(drafter={"train": False}, algorithm=algorithm, optimizer={"lr": 0.05, "clip_grad": 0.0})
    trainer = Trainer(options, HF)
    mini_batches = []
    for seed in range(3):
        batches = own_batches(trainer, seed)
        for batch, logprobs in zip(batches, trainer.logprobs(batches), strict=True):
            batch.behaviour_logprobs = logprobs
        mini_batches.append(batches)
    return train_rollout(trainer, mini_batches, objective="grpo", logprob_gap=1e-6)


def test_what_the_policy_learns_between_updates_is_no_gap_to_the_engines():
    (metrics,) = on_ranks(1, engines_of_the_rollouts_policy)
    assert metrics["policy/skipped"] == 0 and metrics["policy/train_rollout_logprob_abs_diff"] < 1e-6
    assert abs(metrics["policy/ppo_kl"]) > 1e-3


def one_update_of_two_is_broken():
    trainer = build(PLAIN | {"dtype": "float32"})
    mini_batches = [own_batches(trainer, seed) for seed in (0, 1)]
    for batch in mini_batches[1]:
        batch.advantages.fill_(float("inf"))
    return train_rollout(trainer, mini_batches, objective="grpo"), trainer.learner.steps, trainer.prediction


def test_the_share_of_skipped_updates_is_recorded():
    ((metrics, steps, prediction),) = on_ranks(1, one_update_of_two_is_broken)
    assert metrics["policy/skipped"] == 0.5 and steps == 1 and not math.isfinite(metrics["policy/loss"])
    assert metrics["drafter/skipped"] == 0 and math.isfinite(metrics["drafter/objective"]) and prediction is not None


def drifted():
    """Return the drift before and after a step, and the same from all logits."""
    trainer = build(PLAIN | {"dtype": "float64"})
    batches = own_batches(trainer)

    def logp_of_trained(batch, packed, hidden):
        return (hidden[:, 0][batch.loss_mask != 0] @ trainer.policy.head_weight().T).log_softmax(-1)

    trainer.keep_reference()
    start = trainer.reference.drift(batches)
    before = torch.cat(trainer.run_forward(batches, logp_of_trained))
    trainer.train_step(batches, objective="sft")
    now = digest(trainer.policy.parameters())
    found = trainer.reference.drift(batches)
    after = torch.cat(trainer.run_forward(batches, logp_of_trained))
    kl = (after.exp() * (after - before)).sum(-1).mean()
    changed = (after.argmax(-1) != before.argmax(-1)).double().mean()
    same = now == digest(trainer.policy.parameters())
    return start, found, {"drift/kl": float(kl), "drift/changed": float(changed)}, same


def test_drift_is_measured_on_whole_distributions():
    ((start, found, expected, same),) = on_ranks(1, drifted)
    assert start == {"drift/kl": 0, "drift/changed": 0} and same
    assert found == pytest.approx(expected, rel=1e-9) and expected["drift/changed"] > 0


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([1, 3], [0.5, 1.5]),
        ([0, 0, 3], [0.25, 0.25, 3]),  # 0 clipped to 1/4
        ([-1, 1], [0.25, 2]),  # 0 and 2 above the least, over their mean
        ([0, 0, 0, 0, 9], [0.25, 0.25, 0.25, 0.25, 4]),
        ([], []),
    ],
)
def test_weights_of_rewards(rewards, expected):
    assert reward_weights(rewards).tolist() == pytest.approx(expected)


def test_a_failed_reward_weighs_one_and_enters_no_mean():
    weights = reward_weights([1, 99, 3], known=[True, False, True])
    first, last = reward_weights([1, 3])
    assert weights.tolist() == [first, 1, last]


@pytest.mark.parametrize(("every", "expected"), [(1, "uuuuuu"), (2, "u-u-u-"), (5, "u----u")])
def test_every(every, expected):
    rule = EverySteps(every)
    decisions = ""
    for _ in range(6):
        decisions += "u" if rule.due else "-"
        rule.count_step(rule.due)
    assert decisions == expected
