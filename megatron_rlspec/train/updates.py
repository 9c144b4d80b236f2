"""Several optimizer steps on one rollout: one on each of its mini-batches (`train.updates_per_rollout`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from megatron_rlspec.speculation.acceptance import Prediction, sum_of_predictions
from megatron_rlspec.train.objectives import means, total_of, with_logprobs
from megatron_rlspec.train.step import Trainer
from megatron_rlspec.types import PackedBatch

# Metrics of how far apart the engines' log-probs and the policy's are
GAPS = ("policy/train_rollout_logprob_abs_diff", "policy/train_rollout_kl")


def train_rollout(
    trainer: Trainer,
    mini_batches: Sequence[Sequence[PackedBatch]],
    *,
    logprob_gap: float = math.inf,
    **options: Any,
) -> dict[str, float]:
    """Take an optimizer step over each mini-batch, which holds this rank's micro-batches. Collective.

    Arguments and metrics are those of `Trainer.train_step`; {} if it trains nothing. There is at least one mini-batch,
    and all ranks have as many. The old log-probs of all mini-batches are of the policy before the first update, unless
    algorithm.old_logprobs="engine" takes those of the engines.

    Learning rates, norms, losses and shares of skipped updates are means over the updates. The metrics of GAPS are the
    first update's with old_logprobs="engine". Other metrics are means over the tokens of all mini-batches; numbers of
    tokens are sums. Afterwards `trainer.prediction` is of all mini-batches, and `trainer.totals` of the last one.
    """
    from_engines = trainer.config.algorithm.old_logprobs == "engine"
    # Only GRPO reads old log-probs. The defaults are those of `train_step`.
    trains_by_grpo = options.get("objective") == "grpo" and options.get("train_policy", True)
    later = list(mini_batches[1:])
    if trains_by_grpo and not from_engines:
        # Before the first update, for all later ones. The first mini-batch needs none: its own forward pass is that of
        # the same policy.
        later = [
            with_logprobs(batches, "old_logprobs", trainer.logprobs(batches)) for batches in later
        ]
    totals: list[dict[str, list[float]]] = []
    updates: list[dict[str, float]] = []
    prediction: Prediction | None = None
    for batches in [mini_batches[0], *later]:
        updates.append(trainer.train_step(batches, logprob_gap=logprob_gap, **options))
        totals.append(trainer.totals)
        prediction = sum_of_predictions(prediction, trainer.prediction)
        if from_engines and updates[-1].get("policy/skipped") == 0:
            # With algorithm.old_logprobs="engine" the gap compares the engines with the present policy. After an
            # update these differ rightly, so only the updates up to it can be checked.
            logprob_gap = math.inf
    trainer.learn_prediction(prediction)
    if not updates[0]:  # nothing is trained, and `trainer.totals` are of an earlier call
        return {}
    metrics = means(total_of(totals))
    if from_engines:  # only the first update compares the policy that the engines have
        metrics |= {name: updates[0][name] for name in GAPS if name in updates[0]}
    for name in updates[0]:  # what `train_step` adds to the sums: rates, norms, skipped updates
        if name not in metrics:
            metrics[name] = fmean(update[name] for update in updates)
    return metrics
