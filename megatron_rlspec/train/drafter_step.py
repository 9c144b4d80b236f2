"""The drafter's part of an optimizer step, shared by our own loop (`step.py`) and by `cotrainer/drafter.py`.

The caller runs the drafter's forward pass over a micro-batch (`drafter.py`) and hands over its results: the hidden
states of each depth, which an output layer turns into logits. `DrafterStep` does the rest: loss and gradient
(`losses/drafter.py`), the prediction of what the next rollout will accept, and the optimizer's update after the last
micro-batch. The student is the drafter, the teacher is the policy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from torch import Tensor, nn

from megatron_rlspec.config import DrafterConfig, OptimizerConfig
from megatron_rlspec.custom import DrafterLoss, is_function
from megatron_rlspec.custom import load as load_function
from megatron_rlspec.losses.drafter import Kind, Student
from megatron_rlspec.losses.predict import accept_and_reach, by_logq, deepen, logq_of_rows, walk
from megatron_rlspec.packing.context_parallel import cp_index, join_from_cp
from megatron_rlspec.packing.transfer import to_device
from megatron_rlspec.speculation.acceptance import Prediction
from megatron_rlspec.train.objectives import OutputLayer, Sums
from megatron_rlspec.train.optimizer import Learner
from megatron_rlspec.types import SHARPNESS, Sampling, Verifier


@dataclass(frozen=True)
class DrafterObjective:
    """What the drafter learns: its loss, and which acceptance its training forward predicts. Equal on all ranks.

    depth            D, unrolled drafter steps
    loss             of one row (a position at one depth): one of `losses/drafter.py`, or the user's function
    depth_decay      depth d has weight depth_decay ** (d - 1)
    predicted_steps  step counts of rounds whose acceptance is predicted, ascending; empty: none
    sampled          rollouts draw from the policy's unfiltered softmax: temperature > 0, no top-p, no top-k
    coupled          rollouts draft with the verifier's noise, at the temperature of the loss
    """

    depth: int
    loss: Kind | DrafterLoss
    depth_decay: float
    predicted_steps: tuple[int, ...] = ()
    sampled: bool = True
    coupled: bool = False


@dataclass(frozen=True)
class DrafterTargets:
    """Targets of the drafter in one micro-batch: lists over depths 1..D of `[t]`, of this context-parallel rank.

    Made by `train/step.py` from a `PackedBatch`, and by `cotrainer/fields.py`.

    labels             int64, at position t and depth d the id of token t + 1 + d
    weight             factor of that prediction's loss, not negative; 0 where nothing is trained
    counts             per depth, Σ weight over all micro-batches and ranks of the step; 1 where that is 0
    cu_seqlens_padded  `[n + 1]`, sequence boundaries as laid out before the context-parallel split
    rows               `[t]` int64, the row of each position in the policy's micro-batch; None: the rows are the same
    seeds, positions   `[t]` int64, for coupled drafts: the seed of each position's noise, -1 where no acceptance is
                       predicted, and the position in its sequence; None: not known

    All tensors but `cu_seqlens_padded` are on one device.
    """

    labels: Sequence[Tensor]
    weight: Sequence[Tensor]
    counts: Sequence[float]
    cu_seqlens_padded: Tensor
    _: KW_ONLY
    rows: Tensor | None = None
    seeds: Tensor | None = None
    positions: Tensor | None = None


class DrafterStep:
    """One drafter's steps on this rank: `begin`, then `make_student` and `learn` for each micro-batch, then `update`.

    objective  the loss and the prediction. `Trainer.accept_lengths` sets another one in a copy of this object
    learner    the drafter's gradient buffers and optimizer; None without `options.train`: no `update` is possible then
    draft_ids  the draft vocabulary, `[S]` int64 token ids, on any device; None: all tokens. The caller sets it, to the
               same ids on all ranks, and before the first micro-batch where `head` is not None
    head       the drafter's own output layer `[S, H]`, a row for each of `draft_ids`, in ascending order of the ids;
               None: the policy's
    """

    def __init__(
        self,
        block: nn.Module,
        options: DrafterConfig,
        optimizer: OptimizerConfig,
        objective: DrafterObjective,
        pace: Learner | None = None,
    ) -> None:
        """Train `block` by `options`; `optimizer` has all other settings of AdamW. `pace`: see `Learner`.

        With `options.train` this builds gradient buffers: all ranks that hold the drafter must call it.
        """
        self.objective = objective
        self.draft_ids: Tensor | None = None
        self.head: Tensor | None = getattr(block, "head", None)
        self.learner: Learner | None = None
        if options.train:
            drafter_settings = {
                "lr": options.lr,
                "weight_decay": 0.0,
                "warmup_steps": options.warmup_steps,
            }
            adam = optimizer.model_copy(update=drafter_settings)
            self.learner = Learner(block, adam, pipelined=False, pace=pace)

    @property
    def shares_policy_logits(self) -> bool:
        """Return whether the policy's loss on this rank covers every teacher row, so one logits pass serves both.

        The teacher of depth d at t is the policy at t + d. Where depth d is trained at t, the policy's loss covers
        t + d. Under context parallelism another rank may hold that position. The loss "ce" has no teacher.
        """
        return self.objective.loss != "ce" and ps.get_context_parallel_world_size() == 1

    def begin(self) -> None:
        """Zero the drafter's gradients. Call it once, before the step's first `learn`: later gradients are added."""
        if self.learner is not None:
            self.learner.zero_grad()

    def make_student(
        self,
        outputs: Sequence[Tensor],
        targets: DrafterTargets,
        layer: OutputLayer,
        *,
        predict: bool,
    ) -> Student:
        """Return the `Student` of all depths' rows; `outputs`: `[t, H]` after the drafter's final norm, per depth.

        `predict`: keep what `learn` needs for the prediction of acceptance. It is equal for all micro-batches of a step
        and on all ranks, because their sums must have the same names.
        """
        objective = self.objective
        depths = range(1, objective.depth + 1)
        device = targets.labels[0].device
        t = len(targets.labels[0])  # every depth has as many rows
        # Each depth's weights are divided by the depth's count in the whole step. So the losses of micro-batches and
        # ranks can be added.
        weights = []
        for d in depths:
            scale = objective.depth_decay ** (d - 1) / targets.counts[d - 1]
            weights.append(targets.weight[d - 1] * scale)
        noise = None
        seeds, positions = targets.seeds, targets.positions
        if predict and objective.coupled and seeds is not None and positions is not None:
            # Engines key a token's noise by the position before it (`noise.py`). Depth d at t has the label t + 1 + d.
            keys = torch.cat([positions + d for d in depths])
            noise = seeds.repeat(objective.depth), keys
        return Student(
            torch.cat(list(outputs)),  # depth by depth, as labels, weights, groups and noise
            layer.weight.detach(),  # the drafter must not train the policy's output layer
            torch.cat(list(targets.labels)),
            torch.cat(weights),
            objective.loss,
            teacher_index=self._teacher_index(targets),
            groups=torch.arange(objective.depth, device=device).repeat_interleave(t),
            num_groups=objective.depth,
            temperature=layer.temperature,
            tp_group=ps.get_tensor_model_parallel_group(),
            keep_rows=predict,
            words=self.draft_ids,
            own=self.head,
            noise=noise,
        )

    def _teacher_index(self, targets: DrafterTargets) -> Tensor:
        """Return the teacher's row of each student row, `[depth * t]`: depth d at t learns the distribution at t + d.

        With `shares_policy_logits` the index counts rows of the policy's micro-batch, else rows of the hidden states
        that `learn` gathers from all context-parallel ranks. Student rows of weight 0 may have any index.
        """
        device = targets.labels[0].device
        size = ps.get_context_parallel_world_size()
        rank = ps.get_context_parallel_rank()
        position = cp_index(targets.cu_seqlens_padded, rank, size).to(device)
        last = size * len(targets.labels[0]) - 1  # t + d can be past the end, at rows of weight 0
        depths = range(1, self.objective.depth + 1)
        teacher = torch.cat([(position + d).clamp(max=last) for d in depths])
        if targets.rows is not None and self.shares_policy_logits:
            teacher = targets.rows.to(device)[teacher]
        return teacher

    def learn(self, student: Student, targets: DrafterTargets, hidden: Tensor | None) -> Sums:
        """Compute the gradients of a micro-batch, if they are enabled. Call it once for each student.

        Collective over the context- and tensor-parallel ranks. The gradients are added to those of earlier
        micro-batches. Returns this micro-batch's sums. After the last micro-batch the caller gives the list of all sums
        to `follow_rounds`, and then reduces them by `objectives.py`.

        hidden  the policy's hidden states after its final norm, `[t, H]` of the same positions, from which the
                teacher's logits are computed; None if `student.observe` has received every row, or without a teacher
        """
        if self.objective.loss == "ce":
            student.learn_labels()
        elif hidden is not None:
            student.learn_from(_gather_context_ranks(hidden.detach(), targets))
        loss, metrics = student.finish()
        sums: Sums = {}
        if student.rows:
            sums[_TABLE_KEY] = self._prediction_table(student, targets)
        sums |= {f"drafter/{name}": value for name, value in metrics.items()}
        sums["drafter/objective"] = loss.detach()
        # The loss needs no gradient in `Trainer.accept_lengths`, and for a drafter that is only measured.
        if loss.requires_grad:
            loss.backward()
        return sums

    def update(self) -> tuple[float, bool]:
        """Reduce gradients, clip, update; return (gradient norm before clipping, updated?).

        Call it once, after the step's last `learn`. Collective over the ranks that hold the drafter. No update if the
        norm is not finite.
        """
        assert self.learner is not None, "a drafter that is not trained has no update"
        self.learner.finalize()
        return self.learner.step()

    def _prediction_table(self, student: Student, targets: DrafterTargets) -> Tensor:
        """Return accept, reach, log q and mask of this micro-batch's positions, for `follow_rounds`: `[T, D, 3F + 1]`.

        F is 1, or for coupled drafts the number of sharpnesses. `_sum_rounds` reads the last dimension in this order:
        accept of each sharpness, reach of each, log q of each, mask. Every context-parallel rank gathers the rows of
        all, but only the first one returns them: the later sum over ranks would else count them several times.
        """
        objective = self.objective
        rows = student.rows
        accept, reach = accept_and_reach(rows, objective.depth, sampled=objective.sampled)
        logq = logq_of_rows(rows, objective.depth)
        trained = torch.stack([w != 0 for w in targets.weight], 1)
        if objective.coupled:
            if targets.seeds is not None:  # seed -1: no acceptance is predicted at this position
                trained &= (targets.seeds >= 0)[:, None]
            # Without seeds `accept_and_reach` and `logq_of_rows` return F = 1. All ranks need the same F, because their
            # sums are added: so the one column is repeated.
            accept = accept.expand(-1, -1, len(SHARPNESS))
            reach = reach.expand(-1, -1, len(SHARPNESS))
            logq = logq.expand(-1, -1, len(SHARPNESS))
        mask = to_device(trained, accept.device).to(accept.dtype)
        table = torch.cat([accept, reach, logq, mask[:, :, None]], 2)
        table = _gather_context_ranks(table, targets)
        if ps.get_context_parallel_rank():
            table = table[:0]
        return table


# Keys of a micro-batch's sums. `learn` stores a table under the first. `follow_rounds` replaces it by three sums, which
# `Prediction.of_sums` takes in this order.
_TABLE_KEY = "prediction/table"
_PREDICTED_KEYS = ("prediction/reached", "prediction/accepted", "prediction/by_logq")


def follow_rounds(sums: Sequence[Sums], steps: tuple[int, ...]) -> None:
    """Replace the table that `learn` left in the sums of each micro-batch by sums of predicted acceptance.

    steps  drafts of a round, as `DrafterObjective.predicted_steps`

    Call it once a step, after the last micro-batch: the copy of all tables to the host waits for the device. A second
    call does nothing. It changes `sums` in place.
    """
    # Either every micro-batch has a table, or none has: `predict` is equal for all (`make_student`).
    tables = [micro_batch.pop(_TABLE_KEY) for micro_batch in sums if _TABLE_KEY in micro_batch]
    if not tables:
        return
    on_host = torch.cat(tables).cpu().split([len(table) for table in tables])
    for micro_batch, table in zip(sums, on_host, strict=True):
        for name, x in _sum_rounds(table, steps).items():
            micro_batch[name] = to_device(x, tables[0].device)


def _sum_rounds(table: Tensor, steps: tuple[int, ...]) -> Sums:
    """Sum predicted acceptance over the rows of a micro-batch's table where a round may start.

    table  as `_prediction_table` returns it, on the CPU

    Returns float64 tensors, F sharpnesses in the first dimension: reached and accepted `[F, K, max(steps)]`, by_logq
    `[F, 2, BINS]`.
    """
    # Rounds may draft more tokens than there are trained depths.
    columns = [deepen(column, max(steps)) for column in table.unbind(2)]
    mask = columns.pop()
    factors = len(columns) // 3
    predicted: dict[str, list[Tensor]] = {name: [] for name in _PREDICTED_KEYS}
    for factor in range(factors):
        # The order of `_prediction_table`: `factors` columns of accept, as many of reach, as many of log q.
        accept, reach, logq = columns[factor::factors]
        reached, accepted, starts = walk(accept, reach, mask, steps)
        drafts_by_logq = by_logq(logq, accept, reach, mask, starts)
        for name, value in zip(_PREDICTED_KEYS, (reached, accepted, drafts_by_logq), strict=True):
            predicted[name].append(value)
    return {name: torch.stack(values) for name, values in predicted.items()}


def pop_prediction(totals: dict[str, list[float]], steps: tuple[int, ...]) -> Prediction | None:
    """Remove the prediction for `steps` from the step's reduced sums, in place, and return it.

    steps  those that `follow_rounds` was called with

    Call it once, before `objectives.means`, which cannot average these sums; a second call returns None. None also
    without a prediction, or if the drafter's loss was not finite. It communicates with no other rank.
    """
    arrays = [totals.pop(name, []) for name in _PREDICTED_KEYS]  # flattened by the reduction
    if not arrays[0] or not math.isfinite(totals["drafter/objective"][0]):
        return None
    return Prediction.of_sums(steps, *arrays)


def objective_of(
    drafter: DrafterConfig,
    sampling: Sampling,
    steps: Sequence[int],
    verifier: Verifier,
    coupled: bool = True,
) -> DrafterObjective:
    """Return what a drafter learns and predicts. Raises ConfigError for a loss that cannot be imported.

    sampling  of rollouts
    steps     numbers of drafts of a round that engines may be told, in any order; 0 is left out
    coupled   whether engines with the position-keyed verifier draft with its noise
    """
    # Without top-p, top-k and min-p, rollouts draw from the teacher's own distribution.
    unfiltered = sampling.top_p >= 1 and sampling.top_k < 0 and sampling.min_p == 0
    sampled = sampling.temperature > 0 and unfiltered
    loss: Any = drafter.loss
    if is_function(drafter.loss):
        loss = load_function("drafter.loss", drafter.loss)
    return DrafterObjective(
        depth=drafter.depth,
        loss=loss,
        depth_decay=drafter.depth_decay,
        predicted_steps=tuple(sorted({k for k in steps if k > 0})),
        sampled=sampled,
        # Greedy rollouts have no noise that a draft could share.
        coupled=coupled and verifier == "position_keyed" and sampling.temperature > 0,
    )


def _gather_context_ranks(x: Tensor, targets: DrafterTargets) -> Tensor:
    """Gather `[t, ...]` of all context-parallel ranks, `[T, ...]` in the order of the packed batch. Collective.

    With several ranks the result has no gradient: `all_gather` is not differentiable.
    """
    group = ps.get_context_parallel_group()
    if group.size() == 1:
        return x
    parts = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(parts, x.contiguous(), group=group)
    return join_from_cp(parts, targets.cu_seqlens_padded.cpu())
