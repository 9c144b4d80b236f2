"""Several optimizer steps on one rollout: one on each of its mini-batches (`train.updates_per_rollout`).

`run/session.py` calls `train_rollout` once a step; `step.py` has the single update. How a rollout is split into
mini-batches is decided in `run/batches.py`.
"""

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

    mini_batches  at least one, and as many on all ranks; not changed
    logprob_gap   as in `Trainer.train_step`
    options       the other arguments of `Trainer.train_step`

    The old log-probs of all mini-batches are those of the policy before the first update. With
    algorithm.old_logprobs="engine" they are those of the engines.

    Returns the metrics of `train_step`, or {} if the options train nothing:
    - learning rates, norms, losses and shares of skipped updates are means over the updates
    - the metrics of GAPS are the first update's with algorithm.old_logprobs="engine"
    - numbers of tokens are sums
    - all others are means over the tokens of all mini-batches

    Afterwards `trainer.prediction` is of all mini-batches, and `trainer.totals` of the last one.
    """
    from_engines = trainer.config.algorithm.old_logprobs == "engine"
    # Only GRPO reads old log-probs. The default of `train_policy` here must be that of `train_step`.
    trains_by_grpo = options.get("objective") == "grpo" and options.get("train_policy", True)
    later = list(mini_batches[1:])
    if trains_by_grpo and not from_engines:
        # Computed before the first update changes the policy. The first mini-batch needs no old log-probs: the forward
        # pass of its update is already that of the old policy.
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
            # With algorithm.old_logprobs="engine" the gap compares the engines' log-probs with the present policy's.
            # After one update the two differ rightly, so the gap of later updates is no error.
            logprob_gap = math.inf
    trainer.learn_prediction(prediction)
    if not updates[0]:  # nothing is trained, and `trainer.totals` are of an earlier call
        return {}
    metrics = means(total_of(totals))
    if from_engines:  # only in the first update the policy is the one that the engines sampled from
        metrics |= {name: updates[0][name] for name in GAPS if name in updates[0]}
    # Names that are not in `totals` are what `train_step` adds to them: rates, norms, skipped updates.
    for name in updates[0]:
        if name not in metrics:
            metrics[name] = fmean(update[name] for update in updates)
    return metrics
