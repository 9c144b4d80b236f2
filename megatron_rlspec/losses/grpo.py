"""GRPO and its variants: advantages from the rewards of a group, and the policy's loss from log-probabilities.

`run/batches.py` computes advantages on the host, from rewards to which it has added `overlong_penalty`.
`run/generation.py` asks `has_signal` which groups it keeps.

`policy_loss` works on predicting positions (see `PackedBatch`) and returns a sum. `train/objectives.py` divides the sum
by `batch.counts["policy"]`, which is of the whole step and known before its first backward. Packing and parallelism
therefore change rounding only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from megatron_rlspec.config import AlgorithmConfig
from megatron_rlspec.custom import (
    Advantage,
    PolicyLoss,
    PolicyTokens,
    RewardedGroup,
    checked,
    named,
    numbers,
)
from megatron_rlspec.packing.transfer import to_device
from megatron_rlspec.types import PackedBatch, Sample

# slime's value. `advantages` adds it to a group's standard deviation; `has_signal` takes a deviation that is not above
# it for 0.
STD_FLOOR = 1e-6


def advantages(
    rewards: Sequence[float],
    *,
    known: Sequence[bool],
    normalise_std: bool = True,
) -> np.ndarray:
    """Return one advantage per sample of a group, `[n]` float64: (reward - mean) / (standard deviation + STD_FLOOR).

    rewards        `[n]`; not read where `known` is False
    known          `[n]`: False for a sample whose reward failed. It gets 0 and does not enter mean and deviation
    normalise_std  False: nothing is divided (Dr. GRPO, arXiv 2503.20783)

    The standard deviation is the unbiased one, as in slime. If all known rewards are equal, or there are fewer than
    two, all advantages are exactly 0. GRPO: arXiv 2402.03300, eq. 4.
    """
    rated = np.asarray(known, bool)
    result = np.zeros(len(rewards))
    known_rewards = np.asarray(rewards, np.float64)[rated]
    # Compared exactly: the mean of equal floats can differ from them by rounding, which the division would blow up.
    if len(known_rewards) < 2 or known_rewards.min() == known_rewards.max():
        return result
    centred = known_rewards - known_rewards.mean()
    if normalise_std:
        centred = centred / (known_rewards.std(ddof=1) + STD_FLOOR)
    result[rated] = centred
    return result


def has_signal(rewards: Sequence[float], *, known: Sequence[bool]) -> bool:
    """Return whether dynamic sampling keeps this group: its known rewards differ (DAPO, arXiv 2503.14476, §3.2).

    Stricter than `advantages`, which gives 0 only if rewards are exactly equal: rewards that differ by rounding are no
    signal.

    rewards, known  as for `advantages`; a group with fewer than two known rewards is not kept
    """
    known_rewards = np.asarray(rewards, np.float64)[np.asarray(known, bool)]
    if len(known_rewards) < 2:
        return False
    return float(known_rewards.std(ddof=1)) > STD_FLOOR


def overlong_penalty(length: int, *, max_length: int, zone: int) -> float:
    """Return the addition to the reward of a response of `length` tokens: 0, falling to -1 over the last `zone` tokens.

    From `max_length` on it is -1; with `zone` = 0 it is always 0. All arguments are in tokens. DAPO calls it soft
    overlong punishment (arXiv 2503.14476, eq. 13).
    """
    if zone == 0:
        return 0.0
    zone_begins = max_length - zone
    into_zone = (length - zone_begins) / zone
    return -min(1.0, max(0.0, into_zone))


def ppo_loss(
    log_ratio: Tensor,
    advantage: Tensor,
    clip_low: float,
    clip_high: float,
) -> tuple[Tensor, Tensor]:
    """Return PPO's loss of each token, `[T]`, and whether the clip range changes it, bool `[T]`.

    The loss is max(-r A, -clip(r, 1 - clip_low, 1 + clip_high) A), with r = exp(log_ratio).

    log_ratio, advantage  `[T]`; the loss is differentiable in log_ratio
    """
    ratio = log_ratio.exp()
    clipped_ratio = ratio.clamp(1 - clip_low, 1 + clip_high)
    unclipped_loss = -ratio * advantage
    clipped_loss = -clipped_ratio * advantage
    loss = torch.maximum(unclipped_loss, clipped_loss)
    return loss, clipped_loss > unclipped_loss


def policy_loss(
    logprobs: Tensor,
    entropy: Tensor,
    batch: PackedBatch,
    algorithm: AlgorithmConfig,
    *,
    sequence_sum: Callable[[Tensor], Tensor] | None = None,
    own: PolicyLoss | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return Σ policy_weight · loss over this micro-batch's trained tokens, and detached sums for the records.

    logprobs [T]   of the labels, under the policy being trained, on its device; positions without training may hold any
                   value
    entropy [T]    of the policy at each position
    sequence_sum   for ratio="sequence" under context parallelism: returns the sum of a tensor over the ranks that share
                   sequences, without gradient. All these ranks must then call this function for the same micro-batch,
                   because the sum is collective. None: this rank has whole sequences
    own            the user's loss of a token (`algorithm.loss`); it replaces w · pg below

    The loss of a token is

        w · pg + kl_coef · KL(policy, reference) - entropy_coef · entropy

    pg is `ppo_loss` of the ratio of each token, or with ratio="sequence" of its sequence (GSPO). w is
    min(exp(old - behaviour), tis_clip), and 1 if `tis_clip` is 0.

    behaviour  the token's log-probability under the policy that sampled it, as the engine computed it
    old        its log-probability under the policy with which PPO's ratio compares; the code below chooses it

    If an older policy sampled the token, and `old` is of the step's start, this is AReaL's decoupled objective (arXiv
    2505.24298, §5.2), truncated.

    The sums run over trained tokens and can be added over micro-batches and ranks; divided by `tokens` they are means
    (`train/objectives.py`). Most names are slime's. They appear as `policy/...` in `records/metric_names.toml`. With
    `kl_coef` the batch must have `reference_logprobs`.
    """
    mask = to_device(batch.loss_mask != 0, logprobs.device)

    def zero_untrained(values: Tensor) -> Tensor:
        """Move to the device of `logprobs`, with 0 where nothing is trained: 0 · infinity would be NaN."""
        values = to_device(values, logprobs.device).to(logprobs.dtype)
        return values.masked_fill(~mask, 0)

    logprobs = zero_untrained(logprobs)
    behaviour = zero_untrained(batch.behaviour_logprobs)
    # Three cases: the engine's log-probabilities; those before the step's first update; or, in the first update, those
    # of this forward. In the last case the ratio is 1 and only its gradient counts.
    if algorithm.old_logprobs == "engine":
        old = behaviour
    elif batch.old_logprobs is not None:
        old = zero_untrained(batch.old_logprobs)
    else:
        old = logprobs.detach()
    advantage = zero_untrained(batch.advantages)
    log_ratio = logprobs - old
    if algorithm.ratio == "sequence":
        log_ratio = _sequence_log_ratio(log_ratio, mask, batch, sequence_sum)
    pg_loss, clipped = ppo_loss(log_ratio, advantage, algorithm.clip_low, algorithm.clip_high)
    # [T] of each record; summed over trained tokens at the end
    per_token = {
        "pg_clipfrac": clipped,
        "ppo_kl": -log_ratio,
        "ratio": log_ratio.exp(),
    }

    if algorithm.tis_clip:
        weight = (old - behaviour).exp()  # without gradient: `old` and `behaviour` have none
        pg_loss = pg_loss * weight.clamp(max=algorithm.tis_clip)
        per_token["tis"] = weight
        per_token["tis_clipfrac"] = weight > algorithm.tis_clip
    if batch.staleness is not None:
        per_token["staleness"] = zero_untrained(batch.staleness)
    # The gap between trainer and engine. With old_logprobs=engine `old` is the engine's: compare the current policy.
    trainer_logprobs = logprobs if algorithm.old_logprobs == "engine" else old
    per_token["train_rollout_logprob_abs_diff"] = (trainer_logprobs - behaviour).abs()
    per_token["train_rollout_kl"] = kl_estimate(behaviour, trainer_logprobs)
    if own is not None:
        tokens = PolicyTokens(
            logprobs=logprobs.clone(),  # copies: the function may change its arguments in place
            old_logprobs=old.clone(),
            behaviour_logprobs=behaviour.clone(),
            advantages=advantage.clone(),
            entropy=zero_untrained(entropy),
            mask=mask.to(logprobs),
            sequence_ids=to_device(batch.sequence_ids, logprobs.device).clone(),
            staleness=None if batch.staleness is None else zero_untrained(batch.staleness),
            options=algorithm,
        )
        option = named("algorithm.loss", own)
        pg_loss = checked(option, own(tokens), logprobs, mask).to(logprobs)
    per_token["pg_loss"] = pg_loss

    loss = pg_loss
    if algorithm.kl_coef:
        assert batch.reference_logprobs is not None
        reference = zero_untrained(batch.reference_logprobs)
        per_token["kl_loss"] = kl_estimate(logprobs, reference)
        loss = loss + algorithm.kl_coef * per_token["kl_loss"]
    per_token["entropy"] = zero_untrained(entropy)
    if algorithm.entropy_coef:
        loss = loss - algorithm.entropy_coef * per_token["entropy"]

    metrics = {}
    for name, values in per_token.items():
        counted = values.detach().to(logprobs) * mask
        metrics[name] = counted.sum()
    metrics["tokens"] = mask.sum().to(logprobs)
    return (loss * zero_untrained(batch.policy_weight)).sum(), metrics


def own_advantages(
    own: Advantage,
    samples: Sequence[Sample],
    rewards: Sequence[float],
    known: Sequence[bool],
    options: AlgorithmConfig,
) -> np.ndarray:
    """Compute the user's advantage of each sample of a group, `[n]` float64 (`algorithm.advantage`).

    rewards, known  `[n]`, as for `advantages`

    Raises FunctionError if the function does not return n finite numbers.
    """
    group = RewardedGroup(
        samples=samples,
        rewards=np.array(rewards, np.float64),
        known=np.array(known, bool),
        options=options,
    )
    option = named(f"algorithm.advantage={options.advantage}", own)
    return numbers(option, own(group), len(samples))


def kl_estimate(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Estimate KL(policy ‖ reference) per token on the policy's samples, by exp(-r) - 1 + r, which is never negative.

    That is slime's k3, with r = log p - log p_ref. Source: joschu.net/blog/kl-approx.html. Both arguments are
    log-probabilities of the sampled tokens; `logprobs` are those of the policy that the samples count as drawn from.
    """
    log_ratio = logprobs - reference
    return torch.expm1(-log_ratio) + log_ratio


def _sequence_log_ratio(
    log_ratio: Tensor,
    mask: Tensor,
    batch: PackedBatch,
    sequence_sum: Callable[[Tensor], Tensor] | None,
) -> Tensor:
    """Return per token `[T]` the mean log-ratio of its sequence, with the gradient of the token's own log-probability.

    log_ratio  `[T]`, differentiable; 0 where `mask` is false
    mask       `[T]` bool, the trained tokens

    The mean is the logarithm of GSPO's ratio (arXiv 2507.18071), in the form of GSPO-token (§4.3). With one
    advantage per sequence its gradient equals GSPO's: in GSPO each of the n tokens' losses gives 1/n of its gradient to
    every token, and the n shares add up to one whole gradient per token. This form needs no gradient from other ranks.
    """
    # Padding has -1: it goes to sample 0, with a log-ratio and a count of 0.
    sequence = to_device(batch.sequence_ids, log_ratio.device).clamp(min=0)
    summands = torch.stack([log_ratio.detach(), mask.to(log_ratio)])
    summands = summands.masked_fill(~mask, 0)
    # [log-ratios, tokens] of every sample of the step, since `sequence_ids` count those of other micro-batches, too.
    sums = summands.new_zeros(2, batch.counts["samples"])
    sums = sums.index_add(1, sequence, summands)
    if sequence_sum is not None:
        sums = sequence_sum(sums)
    log_ratios, tokens = sums
    means = log_ratios / tokens.clamp(min=1)  # a sample without trained tokens gets 0
    mean = means[sequence]
    # The value is `mean`; the gradient is that of `log_ratio`.
    return (mean + log_ratio - log_ratio.detach()).masked_fill(~mask, 0)
