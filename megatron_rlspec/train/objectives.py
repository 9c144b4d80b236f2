"""The policy's objectives, and the metrics of a step: sums over micro-batches and ranks, then means.

An objective turns the hidden states of one micro-batch into a loss, on the last pipeline stage. It returns the loss,
already divided by the step's global count, and sums for the records. `reduce_sums` adds these sums, with those of the
drafter (`drafter_step.py`), and `means` turns them into metrics of the same names, which `records/metric_names.toml`
lists. `Trainer.train_step` (`step.py`) calls these functions in this order. The formula of GRPO's loss is in
`losses/grpo.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from torch import Tensor

from megatron_rlspec import custom
from megatron_rlspec.config import AlgorithmConfig
from megatron_rlspec.losses.grpo import policy_loss
from megatron_rlspec.losses.logprobs import Observer, policy_logprobs
from megatron_rlspec.packing.transfer import to_device
from megatron_rlspec.types import PackedBatch

# The sums of one micro-batch on one rank, detached, by the names of the metrics. All ranks and micro-batches must have
# the same names in the same order, because `sum_over_replicas` adds values by their place, not by name.
Sums = dict[str, Tensor]


@dataclass(frozen=True)
class OutputLayer:
    """The policy's output layer, `weight [V / tensor, H]`, and the temperature, above 0, that divides its logits."""

    weight: Tensor
    temperature: float

    def logprobs(
        self,
        batch: PackedBatch,
        hidden: Tensor,
        *,
        with_entropy: bool = False,
        observe: Observer | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the log-probability of every trained label and the entropy, `[T]`; 0 where nothing is trained.

        Collective over tensor-parallel ranks.

        hidden        `[T, H]`, after the policy's final norm
        with_entropy  False: the entropy is 0, which saves time
        observe       is called with each chunk of logits, as `Student.observe` takes it (`losses/drafter.py`)
        """
        return policy_logprobs(
            hidden,
            self.weight,
            batch.labels,
            self.temperature,
            ps.get_tensor_model_parallel_group(),
            with_entropy,
            mask=batch.loss_mask,
            observe=observe,
        )


def sft(
    layer: OutputLayer,
    batch: PackedBatch,
    hidden: Tensor,
    algorithm: AlgorithmConfig,
    observe: Observer | None,
) -> tuple[Tensor, Sums]:
    """Return the cross-entropy of the trained tokens, and its sums. `algorithm` is not read; `grpo` needs it."""
    logprobs, _ = layer.logprobs(batch, hidden, observe=observe)
    weight = to_device(batch.loss_mask * batch.policy_weight, hidden.device)
    loss = -(logprobs * weight).sum() / batch.counts["policy"]
    return loss, {"policy/loss": loss.detach(), "policy/tokens": (weight != 0).sum()}


def grpo(
    layer: OutputLayer,
    batch: PackedBatch,
    hidden: Tensor,
    algorithm: AlgorithmConfig,
    observe: Observer | None,
) -> tuple[Tensor, Sums]:
    """Return the loss of `losses/grpo.py`, and its sums. `layer` has the rollouts' temperature, 1 if they are greedy.

    Collective over context-parallel ranks with algorithm.ratio="sequence".
    """
    logprobs, entropy = layer.logprobs(batch, hidden, with_entropy=True, observe=observe)
    group = ps.get_context_parallel_group()

    def over_context(x: Tensor) -> Tensor:
        x = x.clone()  # all_reduce writes in place
        dist.all_reduce(x, group=group)
        return x

    user_loss = None
    if custom.is_function(algorithm.loss):
        user_loss = custom.load("algorithm.loss", algorithm.loss)
    total, sums = policy_loss(
        logprobs,
        entropy,
        batch,
        algorithm,
        sequence_sum=over_context if group.size() > 1 else None,
        own=user_loss,
    )
    loss = total / batch.counts["policy"]
    records = {"policy/loss": loss.detach()}
    records |= {f"policy/{name}": value for name, value in sums.items()}
    return loss, records


OBJECTIVES = {"sft": sft, "grpo": grpo}  # by the argument `objective` of `Trainer.train_step`
# Sums of the drafter that have one entry per depth: the metrics of `losses/drafter.Student`. `means` divides them by
# the drafter's tokens, and all other sums by the policy's.
PER_DEPTH = {
    f"drafter/{name}"
    for name in ("tokens", "loss", "ce", "match", "overlap", "argmax_prob", "covered")
}
# Sums that are already divided by the count of their update, so `means` does not divide them.
LOSSES = {"policy/loss", "drafter/objective"}


def means(totals: dict[str, list[float]]) -> dict[str, float]:
    """Turn sums into means over trained tokens, the drafter's per depth (`drafter/match_1`, ...).

    totals  by `reduce_sums`, without those of a prediction (`drafter_step.pop_prediction`). Not divided: losses and
            numbers of tokens. A new sum of the drafter belongs in `PER_DEPTH`: every other sum is divided by
            "policy/tokens", which is missing where only the drafter is trained
    """
    metrics: dict[str, float] = {}
    for name, values in totals.items():
        if name in LOSSES or name == "policy/tokens":
            counts = [1.0]
        elif name == "drafter/ce" and "drafter/covered" in totals:
            # Only labels in the draft vocabulary have a cross-entropy; "covered" is their number.
            counts = totals["drafter/covered"]
        elif name in PER_DEPTH:
            counts = totals["drafter/tokens"]
        else:
            counts = totals["policy/tokens"]
        for depth, (value, count) in enumerate(zip(values, counts, strict=True), 1):
            key = f"{name}_{depth}" if name in PER_DEPTH else name
            # max: without a trained token, sum and count are 0, and so is the mean
            metrics[key] = value if name == "drafter/tokens" else value / max(count, 1.0)
    return metrics


def with_logprobs(
    batches: Sequence[PackedBatch], field: str, logprobs: Sequence[Tensor]
) -> list[PackedBatch]:
    """Return copies of the batches with these log-probs, `[T]` for each, in a field of `PackedBatch`.

    field  "old_logprobs" or "reference_logprobs"
    """
    complete = []
    for batch, values in zip(batches, logprobs, strict=True):
        change: dict[str, Any] = {field: values}
        complete.append(replace(batch, **change))
    return complete


def total_of(updates: Sequence[dict[str, list[float]]]) -> dict[str, list[float]]:
    """Add the sums of several updates, at least one, entry by entry. All updates must have the same names.

    LOSSES are averaged instead: each is a quotient already, by its own update's count.
    """
    totals: dict[str, list[float]] = {}
    for name in updates[0]:
        parts = zip(*(update[name] for update in updates), strict=True)
        divisor = len(updates) if name in LOSSES else 1
        totals[name] = [sum(values) / divisor for values in parts]
    return totals


def sum_over_replicas(sums: list[Sums]) -> dict[str, list[float]]:
    """Sum over micro-batches, then over data- and context-parallel ranks; each of these ranks must call it.

    sums  of at least one micro-batch. All of them, on all ranks, must have the same names in the same order and the
          same shapes: the values travel in one array, without names

    Returns each value flattened. Tensor-parallel ranks have equal sums and are not added.
    """
    shapes = {name: value.shape for name, value in sums[0].items()}
    rows = []
    for micro_batch in sums:
        # float64, in which counts of tokens stay exact
        rows.append(torch.cat([value.double().flatten() for value in micro_batch.values()]))
    flat = torch.stack(rows).sum(0)
    dist.all_reduce(flat, group=ps.get_data_parallel_group(with_context_parallel=True))
    parts = flat.cpu().split([shape.numel() for shape in shapes.values()])
    return {name: part.tolist() for name, part in zip(shapes, parts, strict=True)}


def reduce_sums(sums: list[Sums]) -> dict[str, list[float]]:
    """Return the last pipeline stage's `sum_over_replicas` on all ranks. Collective; `sums` is [] on other stages."""
    # A list of one object, because `broadcast_object_list` overwrites the elements of a list.
    box = [sum_over_replicas(sums) if ps.is_pipeline_last_stage() else {}]
    if ps.get_pipeline_model_parallel_world_size() > 1:
        group = ps.get_pipeline_model_parallel_group()
        dist.broadcast_object_list(box, src=ps.get_pipeline_model_parallel_last_rank(), group=group)
    return box[0]
