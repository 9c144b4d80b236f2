"""Policy losses against references of a few lines each: one sample at a time, float64, nothing packed or rolled."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_rlspec.config import AlgorithmConfig
from megatron_rlspec.losses.grpo import advantages, has_signal, kl_estimate, overlong_penalty, policy_loss
from megatron_rlspec.packing.pack import pack
from megatron_rlspec.types import Prompt, Sample

PLAIN = {"tis_clip": 0.0}


def unpack(values, batches, lengths):
    """Turn shifted `[T]` values of batches into token-aligned `[L]` per sample; token 0 is never predicted: 0."""
    starts = torch.tensor([0, *lengths]).cumsum(0)
    flat = torch.zeros(int(starts[-1]), dtype=values[0].dtype)
    for value, batch in zip(values, batches, strict=True):
        token = batch.position_ids + 1
        keep = (batch.sequence_ids >= 0) & (token < torch.tensor([*lengths, 0])[batch.sequence_ids])
        flat[starts[batch.sequence_ids[keep]] + token[keep]] = value.detach()[keep]
    return list(flat.split(list(lengths)))


def make_step(seed=0, lengths=((3, 9), (2, 4), (4, 20), (1, 1), (2, 6)), holes=True):
    """Samples with holes in their masks, and token-aligned float32 values as the trainer has them."""
    rng = np.random.default_rng(seed)
    samples, advantage, columns = [], [], {"old": [], "reference": [], "new": [], "entropy": []}
    for i, (prompt, response) in enumerate(lengths):
        n = prompt + response
        mask = np.r_[np.zeros(prompt), np.ones(response)].astype(np.float32)
        if holes and response > 4:
            mask[prompt + 2 : prompt + 4] = 0
        behaviour = -rng.exponential(1.0, n).astype(np.float32)
        tokens = rng.integers(0, 50, n)
        samples.append(Sample(f"r{i}", Prompt(i, tokens[:prompt]), tokens, mask, behaviour))
        advantage.append(float(rng.normal()) * (-1) ** i)
        columns["old"].append((behaviour + rng.normal(0, 0.4, n)).astype(np.float32))
        columns["reference"].append((behaviour + rng.normal(0, 0.4, n)).astype(np.float32))
        columns["new"].append((columns["old"][-1] + rng.normal(0, 0.4, n)).astype(np.float32))
        columns["entropy"].append(rng.exponential(1.0, n).astype(np.float32))
    return samples, advantage, columns


def packed(samples, advantage, columns, **options):
    options = {"depth": 1, "tokens_per_micro_batch": 1000, **options}
    batches = []
    for batch in pack(samples, advantages=advantage, **options):
        old, reference = (label_side(batch, columns[name]).float() for name in ("old", "reference"))
        batches.append(replace(batch, old_logprobs=old, reference_logprobs=reference))
    return batches


def label_side(batch, per_sample):
    """`[T]` float64: at every position the value of the token it predicts; infinite where nothing is trained."""
    out = torch.full((len(batch.tokens),), -torch.inf, dtype=torch.float64)
    for t in torch.nonzero(batch.loss_mask).flatten().tolist():
        out[t] = float(per_sample[batch.sequence_ids[t]][batch.position_ids[t] + 1])
    return out


def total_loss(batches, columns, algorithm, **options):
    """Loss of the step, gradient per sample as `[L]`, and summed metrics."""
    total, grads, metrics = 0.0, [], {}
    for batch in batches:
        new = label_side(batch, columns["new"]).requires_grad_()
        loss, sums = policy_loss(new, label_side(batch, columns["entropy"]), batch, algorithm, **options)
        loss = loss / batch.counts["policy"]
        loss.backward()
        total += loss.item()
        grads.append(new.grad)
        metrics = {name: metrics.get(name, 0.0) + value.item() for name, value in sums.items()}
    return total, unpack(grads, batches, [len(x) for x in columns["new"]]), metrics


def reference_loss(samples, advantage, columns, a, aggregation="token", constant=None):
    """The definitions of the papers, per sample, differentiable; returns the loss and d loss / d new per sample."""
    new = [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in columns["new"]]
    losses = []
    for i, sample in enumerate(samples):
        on = torch.tensor(sample.loss_mask, dtype=torch.bool)
        lp, A = new[i][on], advantage[i]
        old, ref, behaviour, entropy = (
            torch.tensor(x, dtype=torch.float64)[on]
            for x in (columns["old"][i], columns["reference"][i], sample.behaviour_logprobs, columns["entropy"][i])
        )
        A = float(np.float32(A))
        r = torch.exp((lp - old).mean()).expand_as(lp) if a.ratio == "sequence" else torch.exp(lp - old)
        low, high = 1 - a.clip_low, 1 + a.clip_high
        loss = -torch.min(r * A, torch.clip(r, low, high) * A)
        if a.tis_clip:
            loss = loss * torch.clip(torch.exp(old - behaviour), max=a.tis_clip)
        d = lp - ref
        loss = loss + a.kl_coef * (torch.exp(-d) - 1 + d)
        losses.append(loss - a.entropy_coef * entropy)
    if aggregation == "token":
        loss = torch.cat(losses).mean()
    elif aggregation == "sample":
        loss = torch.stack([x.mean() for x in losses]).mean()
    else:
        loss = torch.cat(losses).sum() / (len(losses) * constant)
    loss.backward()
    return loss.item(), [x.grad for x in new]


CASES = [
    *({"ratio": r, **PLAIN} for r in ("token", "sequence")),
    {"ratio": "token", "tis_clip": 1.2},
    {"kl_coef": 0.3, **PLAIN},
    {"entropy_coef": 0.05, **PLAIN},
    {"clip_low": 0.0, "clip_high": 0.0, **PLAIN},
    {"tis_clip": 1.5, "kl_coef": 0.1, "entropy_coef": 0.01},
]


@pytest.mark.parametrize("aggregation", ["token", "sample", "constant"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_loss_and_gradient_equal_the_reference(case, aggregation):
    algorithm = AlgorithmConfig(**case)
    samples, advantage, columns = make_step()
    options = {"aggregation": aggregation, "constant_length": 32}
    loss, grads, _ = total_loss(packed(samples, advantage, columns, **options), columns, algorithm)
    expected, expected_grads = reference_loss(samples, advantage, columns, algorithm, aggregation, 32)
    assert loss == pytest.approx(expected, rel=1e-6, abs=1e-9)
    for grad, wanted in zip(grads, expected_grads, strict=True):
        # policy_weight = 1 / tokens is float32.
        torch.testing.assert_close(grad, wanted, rtol=1e-6, atol=1e-9)


def test_staleness_is_a_metric_that_changes_no_bit():
    samples, advantage, columns = make_step()
    for sample in samples:  # version 6 drew the first three tokens, version 7 the rest
        cut = min(3, len(sample.response))
        spans = ((6, 0, cut), (7, cut, len(sample.response)))
        sample.policy_versions = spans if cut < len(sample.response) else spans[:1]
    drawn_before = sum(float(sample.loss_mask[: sample.prompt_len + 3].sum()) for sample in samples)
    for algorithm in (AlgorithmConfig(), AlgorithmConfig(**PLAIN)):
        asked = total_loss(packed(samples, advantage, columns, version=7), columns, algorithm)
        unasked = total_loss(packed(samples, advantage, columns), columns, algorithm)
        assert asked[0] == unasked[0] and all(map(torch.equal, asked[1], unasked[1]))
        assert asked[2]["staleness"] == drawn_before and 0 < drawn_before < asked[2]["tokens"]


@pytest.mark.parametrize("spans", [(), ((7, 0, 3),), ((8, 0, 9),), ((7, 0, 3), (7, 4, 9))])
def test_a_token_without_a_version_is_refused(spans):
    samples, advantage, columns = make_step(lengths=((3, 9),))
    samples[0].policy_versions = spans
    with pytest.raises(ValueError, match="sample r0: policy_versions=.* of 9 response tokens"):
        packed(samples, advantage, columns, version=7)


def test_the_cases_reach_every_branch():
    """Clips and truncations happen in the data above, on both sides."""
    samples, advantage, columns = make_step()
    ratios = [np.exp(n - o)[s.loss_mask > 0] for n, o, s in zip(columns["new"], columns["old"], samples, strict=True)]
    assert any((r > 1.3).any() for r, a in zip(ratios, advantage, strict=True) if a < 0)
    assert any((r > 1.28).any() for r, a in zip(ratios, advantage, strict=True) if a > 0)
    assert any((r < 0.8).any() for r, a in zip(ratios, advantage, strict=True) if a < 0)
    _, _, metrics = total_loss(packed(samples, advantage, columns), columns, AlgorithmConfig(tis_clip=1.2))
    assert 0 < metrics["tis_clipfrac"] < metrics["tokens"]
    assert 0 < metrics["pg_clipfrac"] < metrics["tokens"]


@pytest.mark.parametrize("ratio", ["token", "sequence"])
def test_micro_batches_change_nothing(ratio):
    algorithm = AlgorithmConfig(ratio=ratio, kl_coef=0.1)
    samples, advantage, columns = make_step()
    whole = packed(samples, advantage, columns)
    split = packed(samples, advantage, columns, tokens_per_micro_batch=24)
    assert len(whole) == 1 and len(split) > 2
    loss, grads, metrics = total_loss(whole, columns, algorithm)
    loss_split, grads_split, metrics_split = total_loss(split, columns, algorithm)
    assert loss_split == pytest.approx(loss, rel=1e-12)
    for a, b in zip(grads, grads_split, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-15)
    assert metrics_split == pytest.approx(metrics, rel=1e-9)


@pytest.mark.parametrize("ratio", ["token", "sequence"])
def test_context_parallel_shares_add_up(ratio):
    """Two ranks that sum over sequences together get the loss and gradient of one."""
    algorithm = AlgorithmConfig(ratio=ratio, **PLAIN)
    samples, advantage, columns = make_step()
    expected, expected_grads, _ = total_loss(packed(samples, advantage, columns), columns, algorithm)
    shares = [packed(samples, advantage, columns, cp_size=2, cp_rank=rank)[0] for rank in range(2)]

    partial = []
    for share in shares:  # what each rank would bring into the all-reduce
        new = label_side(share, columns["new"])
        policy_loss(
            new, torch.zeros_like(new), share, algorithm, sequence_sum=lambda sums: partial.append(sums) or sums
        )
    results = [
        total_loss([share], columns, algorithm, sequence_sum=lambda sums: partial[0] + partial[1]) for share in shares
    ]
    assert len(partial) == (2 if ratio == "sequence" else 0)
    assert sum(loss for loss, _, _ in results) == pytest.approx(expected, rel=1e-12)
    for i, wanted in enumerate(expected_grads):
        torch.testing.assert_close(results[0][1][i] + results[1][1][i], wanted, rtol=1e-12, atol=1e-15)


def test_metrics_are_means_over_trained_tokens():
    samples, advantage, columns = make_step()
    algorithm = AlgorithmConfig(kl_coef=0.1, tis_clip=1.2)
    _, _, sums = total_loss(packed(samples, advantage, columns), columns, algorithm)
    on = np.concatenate([s.loss_mask for s in samples]) > 0
    new, old, ref, entropy = (
        np.concatenate(columns[name]).astype(np.float64)[on] for name in ("new", "old", "reference", "entropy")
    )
    behaviour = np.concatenate([s.behaviour_logprobs for s in samples]).astype(np.float64)[on]
    expected = {
        "tokens": 1.0,
        "ppo_kl": (old - new).mean(),
        "ratio": np.exp(new - old).mean(),
        "entropy": entropy.mean(),
        "tis": np.exp(old - behaviour).mean(),
        "tis_clipfrac": (np.exp(old - behaviour) > 1.2).mean(),
        "train_rollout_logprob_abs_diff": np.abs(old - behaviour).mean(),
        "train_rollout_kl": (np.exp(old - behaviour) - 1 - (old - behaviour)).mean(),
        "kl_loss": (np.exp(ref - new) - 1 - (ref - new)).mean(),
    }
    means = {name: value / sums["tokens"] for name, value in sums.items()}
    assert sums["tokens"] == on.sum()
    assert {name: means[name] for name in expected} == pytest.approx(expected, rel=1e-6)


def test_with_the_engines_denominator_the_gap_is_the_present_policys():
    samples, advantage, columns = make_step()
    columns["old"] = [s.behaviour_logprobs for s in samples]
    _, _, sums = total_loss(packed(samples, advantage, columns), columns, AlgorithmConfig(old_logprobs="engine"))
    gap = sum(
        np.abs(n - s.behaviour_logprobs)[s.loss_mask > 0].sum() for n, s in zip(columns["new"], samples, strict=True)
    )
    assert sums["train_rollout_logprob_abs_diff"] == pytest.approx(gap, rel=1e-6)
    assert sums["tis"] == sums["tokens"]


def test_a_batch_of_padding_gives_zero_and_a_gradient():
    samples, advantage, columns = make_step(lengths=((3, 5),))
    empty = packed(samples, advantage, columns, dp_size=2, dp_rank=1)[0]
    assert not empty.loss_mask.any()
    new = torch.full((len(empty.tokens),), -torch.inf, dtype=torch.float64, requires_grad=True)
    for ratio in ("token", "sequence"):
        loss, sums = policy_loss(new, torch.zeros_like(new), empty, AlgorithmConfig(ratio=ratio))
        loss.backward()
        assert loss.item() == 0 and not new.grad.any()
        assert all(value.item() == 0 for value in sums.values())


@pytest.mark.parametrize("size", [2, 3, 8])
def test_advantages_equal_the_definition(size):
    rewards = np.random.default_rng(size).normal(size=size)
    known = [True] * size
    centred = rewards - rewards.mean()
    deviation = np.sqrt((centred**2).sum() / (size - 1))
    np.testing.assert_allclose(advantages(rewards, known=known), centred / (deviation + 1e-6), rtol=1e-12)
    np.testing.assert_allclose(advantages(rewards, known=known, normalise_std=False), centred, rtol=1e-12)


def test_groups_without_signal_teach_exactly_nothing():
    # The mean of three times 0.1 is not 0.1: without a rule of its own, rounding would be divided by 1e-6.
    for rewards in ([0.1, 0.1, 0.1], [1.0], []):
        known = [True] * len(rewards)
        found = advantages(rewards, known=known)
        assert not found.any() and len(found) == len(rewards)
        assert not has_signal(rewards, known=known)
    both = [True, True]
    assert has_signal([0.0, 1.0], known=both) and not has_signal([1.0, 1.0 + 1e-9], known=both)


def test_failed_rewards_enter_no_mean():
    known = [True, False, True, True]
    result = advantages([1.0, 0.0, 0.0, 0.0], known=known)
    np.testing.assert_array_equal(result[[0, 2, 3]], advantages([1.0, 0.0, 0.0], known=[True] * 3))
    assert result[1] == 0
    assert not has_signal([1.0, 0.0, 1.0, 1.0], known=known)


def test_overlong_penalty_is_a_ramp():
    values = [overlong_penalty(n, max_length=100, zone=20) for n in (1, 80, 85, 90, 100, 130)]
    assert values == pytest.approx([0, 0, -0.25, -0.5, -1, -1])
    assert overlong_penalty(100, max_length=100, zone=0) == 0


def test_the_kl_estimate_agrees_with_the_exact_kl_in_expectation():
    p = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    q = torch.tensor([0.45, 0.35, 0.2], dtype=torch.float64)
    exact = (p * (p / q).log()).sum().item()
    assert (p * kl_estimate(p.log(), q.log())).sum().item() == pytest.approx(exact, rel=1e-12)
