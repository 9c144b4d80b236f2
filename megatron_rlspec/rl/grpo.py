"""GRPO and its relatives: rewards of a group to advantages, log-probabilities to a loss. Torch only.

`policy_loss` speaks of predicting positions (`PackedBatch`) and returns a sum; the step divides it by
`batch.counts["policy"]`, known before the first backward, so that packing and parallelism change nothing but rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from megatron_rlspec.config import AlgorithmConfig, ConfigError
from megatron_rlspec.custom import Advantage, PolicyLoss, PolicyTokens, RewardedGroup, checked
from megatron_rlspec.types import PackedBatch, Sample

STD_FLOOR = 1e-6  # slime's: added to a group's deviation, and the least deviation that counts as a signal


def advantages(
    rewards: Sequence[float], *, normalise_std: bool = True, known: Sequence[bool] | None = None
) -> np.ndarray:
    """One advantage per sample of a group, `[n]` float64: reward minus the group's mean, over its deviation.

    The deviation is the unbiased one, plus 1e-6, as in slime. A group whose rewards are all equal, or that has only one
    sample, teaches nothing: exactly 0. Samples that are not `known` (their reward failed) get 0 and enter no mean.
    GRPO: arXiv 2402.03300, eq. 4; without the deviation (Dr. GRPO): arXiv 2503.20783.
    """
    rewards = np.asarray(rewards, np.float64)
    known = np.ones(len(rewards), bool) if known is None else np.asarray(known, bool)
    result = np.zeros(len(rewards))
    judged = rewards[known]
    if len(judged) < 2 or judged.min() == judged.max():
        return result
    centred = judged - judged.mean()
    result[known] = centred / (judged.std(ddof=1) + STD_FLOOR) if normalise_std else centred
    return result


def has_signal(rewards: Sequence[float], *, known: Sequence[bool] | None = None) -> bool:
    """Whether dynamic sampling keeps this group: its known rewards differ (DAPO, arXiv 2503.14476, §3.2)."""
    judged = np.asarray(rewards, np.float64)
    if known is not None:
        judged = judged[np.asarray(known, bool)]
    return len(judged) > 1 and float(judged.std(ddof=1)) > STD_FLOOR


def overlong_penalty(length: int, *, max_length: int, zone: int) -> float:
    """What is added to the reward of a response of `length` tokens: 0, falling to -1 over the last `zone` tokens.

    DAPO's soft overlong punishment, arXiv 2503.14476, eq. 13. `zone` = 0 punishes nothing.
    """
    if not 0 <= zone <= max_length:
        raise ValueError(f"overlong zone of {zone} tokens does not fit into responses of at most {max_length}")
    if zone == 0:
        return 0.0
    return -min(1.0, max(0.0, (length - (max_length - zone)) / zone))


def policy_loss(
    logprobs: Tensor,
    entropy: Tensor | None,
    batch: PackedBatch,
    algorithm: AlgorithmConfig,
    *,
    sequence_sum: Callable[[Tensor], Tensor] | None = None,
    own: PolicyLoss | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Σ policy_weight · loss over this micro-batch's trained tokens, and detached sums for the records.

    logprobs [T]   of the labels under the policy being trained; anything where nothing is trained
    entropy [T]    of the policy at each position; may be None unless `entropy_coef` is set
    sequence_sum   for ratio="sequence" under context parallelism: sums `[samples]` over the ranks that share sequences
                   (no gradient passes through it)
    own            the user's loss of a token (`algorithm.loss`), in place of the one below without KL and entropy

    The loss of a token with ratio r = exp(logprob - old) and advantage A, times the truncated importance weight
    min(exp(old - behaviour), tis_clip), plus kl_coef · KL to the reference, minus entropy_coef · entropy. For a token
    that an older policy drew (`batch.staleness`), the cap is `stale_clip`: with `old` the policy at the start of the
    step this is the decoupled objective of AReaL (arXiv 2505.24298, §5.2), truncated.

    token     max(-rA, -clip(r)A), bounded by -dual_clip · A where A < 0       (PPO; dual clip: arXiv 1912.09729)
    sequence  the same with r = exp(mean over the sequence's trained tokens)   (GSPO: arXiv 2507.18071, eq. 13)
    cispo     -sg(clip(r)) · A · logprob                                       (MiniMax-M1: arXiv 2506.13585, eq. 4)

    All sums are over trained tokens, each counted once, and may be added over micro-batches and ranks; divide them by
    `tokens`. Names are slime's where slime has the quantity.
    """
    mask = (batch.loss_mask != 0).to(logprobs.device)

    def trained(values: Tensor) -> Tensor:
        """On the right device, and 0 where nothing is trained: an infinity there must reach no product."""
        return values.to(logprobs).masked_fill(~mask, 0)

    logprobs = trained(logprobs)
    old, advantage = trained(batch.old_logprobs), trained(batch.advantages)
    log_ratio = logprobs - old
    if algorithm.ratio == "sequence":
        log_ratio = _sequence_log_ratio(log_ratio, mask, batch, sequence_sum)
    ratio = log_ratio.exp()
    clipped_ratio = ratio.clamp(1 - algorithm.clip_low, 1 + algorithm.clip_high)
    if algorithm.ratio == "cispo":
        pg_loss = -clipped_ratio.detach() * advantage * logprobs
        clipped = clipped_ratio != ratio
    else:
        plain, bounded = -ratio * advantage, -clipped_ratio * advantage
        pg_loss = torch.maximum(plain, bounded)
        clipped = bounded > plain
        if algorithm.dual_clip:
            lowest = torch.minimum(pg_loss, -algorithm.dual_clip * advantage)
            pg_loss = torch.where(advantage < 0, lowest, pg_loss)
    sums = {"pg_clipfrac": clipped, "ppo_kl": -log_ratio, "ratio": ratio}

    if batch.behaviour_logprobs is not None:
        behaviour = trained(batch.behaviour_logprobs)
        weight = (old - behaviour).exp()
        if batch.staleness is not None:
            stale = trained(batch.staleness)
            fresh_weight = weight.clamp(max=algorithm.tis_clip) if algorithm.tis_clip else torch.ones_like(weight)
            pg_loss = pg_loss * torch.where(stale > 0, weight.clamp(max=algorithm.stale_clip), fresh_weight)
            clipped = torch.where(stale > 0, weight > algorithm.stale_clip, weight > (algorithm.tis_clip or torch.inf))
            sums |= {"tis": weight, "tis_clipfrac": clipped, "staleness": stale}
        elif algorithm.tis_clip:
            pg_loss = pg_loss * weight.clamp(max=algorithm.tis_clip)
            sums |= {"tis": weight, "tis_clipfrac": weight > algorithm.tis_clip}
        # With the engine's own log-probs as denominator, old shows no gap: the present policy's do.
        train = logprobs if algorithm.old_logprobs == "engine" else old
        sums["train_rollout_logprob_abs_diff"] = (train - behaviour).abs()
        sums["train_rollout_kl"] = kl_estimate(behaviour, train, "k3")
    if own is not None:
        pg_loss = _own_loss(own, logprobs, entropy, mask, batch, algorithm)
    sums["pg_loss"] = pg_loss

    loss = pg_loss
    if algorithm.kl_coef:
        if batch.reference_logprobs is None:
            raise ValueError(f"kl_coef={algorithm.kl_coef} needs reference_logprobs, but the batch has none")
        sums["kl_loss"] = kl_estimate(logprobs, trained(batch.reference_logprobs), algorithm.kl_kind)
        loss = loss + algorithm.kl_coef * sums["kl_loss"]
    if entropy is not None:
        sums["entropy"] = trained(entropy)
        if algorithm.entropy_coef:
            loss = loss - algorithm.entropy_coef * sums["entropy"]
    elif algorithm.entropy_coef:
        raise ValueError(f"entropy_coef={algorithm.entropy_coef} needs the entropy of every position, but it is None")

    metrics = {name: (values.detach().to(logprobs) * mask).sum() for name, values in sums.items()}
    metrics["tokens"] = mask.sum().to(logprobs)
    return (loss * trained(batch.policy_weight)).sum(), metrics


def _own_loss(
    own: PolicyLoss,
    logprobs: Tensor,
    entropy: Tensor | None,
    mask: Tensor,
    batch: PackedBatch,
    algorithm: AlgorithmConfig,
) -> Tensor:
    """The user's loss of each token, `[T]`; 0 where nothing is trained."""

    def trained(values: Tensor | None) -> Tensor | None:
        return None if values is None else values.to(logprobs).masked_fill(~mask, 0)

    tokens = PolicyTokens(
        logprobs=logprobs,
        old_logprobs=trained(batch.old_logprobs),
        behaviour_logprobs=trained(batch.behaviour_logprobs),
        advantages=trained(batch.advantages),
        entropy=trained(entropy),
        mask=mask.to(logprobs),
        sequence_ids=batch.sequence_ids.to(logprobs.device),
        staleness=trained(batch.staleness),
        options=algorithm,
    )
    return checked("algorithm.loss", own(tokens), len(logprobs)).to(logprobs).masked_fill(~mask, 0)


def own_advantages(
    own: Advantage, samples: Sequence[Sample], rewards: Sequence[float], known: Sequence[bool], options: AlgorithmConfig
) -> np.ndarray:
    """The user's advantage of each sample of a group, `[n]`. Raises ConfigError if they are not n finite numbers."""
    group = RewardedGroup(samples, np.asarray(rewards, np.float64), np.asarray(known, bool), options)
    found = np.asarray(own(group), np.float64)
    if found.shape != (len(samples),) or not np.isfinite(found).all():
        raise ConfigError(
            f"algorithm.advantage={options.advantage}: the function returned {found.tolist()!s:.120}; "
            f"expected {len(samples)} finite numbers"
        )
    return found


def kl_estimate(logprobs: Tensor, reference: Tensor, kind: Literal["k1", "k2", "k3"]) -> Tensor:
    """Per-token estimates of KL(policy ‖ reference) on the policy's samples; k3 is never negative.

    joschu.net/blog/kl-approx.html; the same three as slime's.
    """
    log_ratio = logprobs - reference
    if kind == "k1":
        return log_ratio
    if kind == "k2":
        return log_ratio**2 / 2
    return torch.expm1(-log_ratio) + log_ratio


def _sequence_log_ratio(
    log_ratio: Tensor, mask: Tensor, batch: PackedBatch, sequence_sum: Callable[[Tensor], Tensor] | None
) -> Tensor:
    """Every token's value is its sequence's mean log-ratio; every token's gradient is its own log-probability's.

    That is GSPO-token (arXiv 2507.18071, §4.3). With one advantage per sequence it has GSPO's gradient too, since n
    tokens at full weight give what n tokens with a share of 1/n of each other would; and it needs no gradient from
    other ranks.
    """
    sequence = batch.sequence_ids.to(log_ratio.device).clamp(min=0)
    rows = torch.stack([log_ratio.detach(), mask.to(log_ratio)]).masked_fill(~mask, 0)
    sums = rows.new_zeros(2, batch.counts["samples"]).index_add(1, sequence, rows)
    if sequence_sum is not None:
        sums = sequence_sum(sums)
    mean = (sums[0] / sums[1].clamp(min=1))[sequence]
    return (mean + log_ratio - log_ratio.detach()).masked_fill(~mask, 0)
