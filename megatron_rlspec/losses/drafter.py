"""The drafter's losses and their gradients, as sums over rows: in chunks, with a vocabulary split over ranks.

Shapes: N rows, M rows of the teacher, H hidden size, V vocabulary, V/tp this tensor-parallel rank's share, C rows of
one chunk. A row is one predicting position at one depth. Hidden states and results are the same on all ranks of
`tp_group`. This module sums the gradients of hidden states over that group, so the gather under sequence parallelism
needs no sum in its backward.

Logits are computed only for rows of non-zero weight, C at a time, so memory for logits does not grow with N. Arithmetic
on logits is float32 (float64 for float64 inputs). All distributions are softmax(logits / temperature), as in an engine.

`Student` is the entry. `train/drafter_step.py` makes its rows and calls it; `train/objectives.py` divides its sums.
Whether kernels or plain torch compute a chunk is decided in `losses/choice.py`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_rlspec.custom import DrafterLoss
from megatron_rlspec.losses.choice import Teacher, head_of, read, teacher_of
from megatron_rlspec.losses.head import DraftHead, accumulate_in
from megatron_rlspec.losses.plain import PlainRows
from megatron_rlspec.packing.transfer import to_device
from megatron_rlspec.types import SHARPNESS

Kind = Literal["ce", "forward_kl"]
Metrics = dict[str, Tensor]


class Student:
    """The loss of the drafter (the student) over N rows, Σ token_weight · loss, with its gradient and metrics.

    The rows are learnt in chunks, as the teacher's logits come. Create one, then call

    1. `learn_labels` for kind "ce". For other kinds `learn_from`, or let `policy_logprobs` call `observe` for each
       chunk that it computes: the policy's loss and the teacher then share one pass over the output layer.
    2. `finish`, which returns the sum. It is differentiable in `hidden [N, H]` and in `own`. The output layer's
       `weight [V/tp, H]` and the teacher get no gradient.

    Every call is collective over `tp_group`: its ranks must make the same calls with the same rows.

    With student q and teacher p, `kind` selects the loss of a row:

    ce          -log q(label), without a teacher
    forward_kl  KL(p ‖ q)
    a function  the user's (`custom.DrafterLoss`), without `words`; `groups` must then be depth - 1

    labels [N]         token ids, int64, on the device of `token_weight`, `teacher_index` and `groups`
    token_weight [N]   factor of a row's loss; rows of weight 0 are not computed
    teacher_index [N]  the teacher's row of each row, row i if omitted. Rows of several depths share a teacher's chunk
    groups [N] int64   the entry of the metrics that a row adds to, below `num_groups`; for example depth - 1
    chunk              C, the most rows whose logits exist at once; None: `VocabParallelHead.chunk`
    words [S]          the ids that drafts are chosen from; the student's softmax is over them only. Rows whose label is
                       another id add 0 under ce; `docs/design.md`, Draft vocabulary
    own [S, H]         an output layer of the student's own, whole on every rank of `tp_group`; only with `words`. Row i
                       is of the i-th smallest id of `words`, in whatever order these are. It gets a gradient, but none
                       if `hidden` requires none (`finish`)
    keep_rows          whether the attribute `rows` gets the results of single rows
    noise              (seeds [N], keys [N]) int64 of the noise that the labels were sampled with, on the labels'
                       device, for `keep_rows`: "coupled" [N, F] then says whether a coupled draft is the label, for
                       each of the F factors of `types.SHARPNESS`, in rows whose seed is not negative

    Metrics are unweighted sums over rows of non-zero weight, `[num_groups]`: `tokens`, `loss`, `ce` and `match` (the
    label is argmax q; of equal logits the lower id). With a teacher also `overlap` (Σ min(p, q), which the acceptance
    of coupled drafts of sharpness 1 does not exceed) and `argmax_prob` (p(argmax q), the acceptance of argmax drafts).
    With `words` also `covered` (labels among them); `ce` then sums over these rows only. `train/objectives.py` divides
    the sums and lists their names, too (`PER_DEPTH`).

    Labels, weights, teacher_index and groups are best on the CPU, so that choosing and sorting the rows does not wait
    for a GPU.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        token_weight: Tensor,
        kind: Kind | DrafterLoss = "ce",
        *,
        teacher_index: Tensor | None = None,
        groups: Tensor | None = None,
        num_groups: int = 1,
        temperature: float = 1.0,
        chunk: int | None = None,
        tp_group: dist.ProcessGroup | None = None,
        keep_rows: bool = False,
        words: Tensor | None = None,
        own: Tensor | None = None,
        noise: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        self._kind = kind
        self._head = head_of(weight, temperature, tp_group)
        # `_head` reads the teacher. `_full` is the student's head over the whole vocabulary. They differ for a function
        # of the user's: it sees whole distributions, which only plain torch gives.
        self._full = replace(self._head, kernel=None) if callable(kind) else self._head
        self._chunk = chunk or self._full.chunk
        # the output layer of the draft vocabulary; None: that of the whole vocabulary
        self._draft_head: DraftHead | None = None
        if words is not None:
            self._draft_head = DraftHead.of_words(self._head, words, own)
        rows = self._head.rows_of(token_weight, labels)
        # Sorting by teacher row makes the students of consecutive teacher rows one slice, which `observe` relies on.
        # From here on `_hidden`, `_labels` and the others are in this order; `_rows` says which of the N each one is.
        teacher = rows if teacher_index is None else teacher_index.index_select(0, rows)
        self._teacher, order = teacher.sort(stable=True)
        rows = rows.index_select(0, order)
        device = hidden.device
        self._rows = to_device(rows, device)
        self._source = hidden
        # detached: gradients are computed while learning, and `_Precomputed` gives them to autograd
        self._hidden = hidden.detach().index_select(0, self._rows)
        exact = accumulate_in(hidden)
        self._labels = to_device(labels.index_select(0, rows), device)
        weight_of_row = token_weight.detach().index_select(0, rows)
        self._weight = to_device(weight_of_row.to(exact), device)
        group_of_row = torch.zeros_like(rows)
        if groups is not None:
            group_of_row = groups.index_select(0, rows)
        self._groups = to_device(group_of_row, device)
        self._noise: tuple[Tensor, Tensor] | None = None
        if noise is not None:
            seeds, keys = noise
            seeds = seeds.index_select(0, rows)
            keys = keys.index_select(0, rows)
            self._noise = seeds, keys
        learns = torch.is_grad_enabled()
        self._grad: Tensor | None = None
        if hidden.requires_grad and learns:
            self._grad = torch.zeros_like(self._hidden)
        self._own = own
        # Summed over chunks in float32 or float64: bfloat16 would lose small contributions.
        self._own_grad: Tensor | None = None
        if own is not None and learns:
            self._own_grad = torch.zeros_like(own, dtype=exact)
        self._total = self._weight.new_zeros(())
        # All ranks need all names, also a rank without rows, because metrics are summed over ranks.
        names = ["tokens", "loss", "ce", "match"]
        if kind != "ce":
            names += ["overlap", "argmax_prob"]
        if words is not None:
            names.append("covered")
        self._metrics = {name: self._weight.new_zeros(num_groups) for name in names}
        self._learned = 0  # rows so far; `finish` compares it with the number of rows
        # Results of single rows for `losses/predict.py`, `[N]` or `[N, F]`; rows without a weight stay 0.
        self.rows: Metrics = {}
        if keep_rows:
            names = ["match", "label_logq", "best_logq"]
            if kind != "ce":
                names.append("argmax_prob")
            self.rows = {name: self._weight.new_zeros(len(hidden)) for name in names}
            if noise is not None:
                self.rows["coupled"] = self._weight.new_zeros(len(hidden), len(SHARPNESS))

    def learn_labels(self) -> None:
        """Learn all rows by cross-entropy, without a teacher. Call it once, and only for kind "ce"."""
        for first in range(0, len(self._rows), self._chunk):
            self._learn(slice(first, first + self._chunk))

    @torch.no_grad()
    def learn_from(self, teacher_hidden: Tensor) -> None:
        """Learn all rows from the policy's hidden states `teacher_hidden [M, H]`, after its final norm.

        Call it once, and not if `observe` is called.
        """
        for rows in self._teacher.unique().split(self._chunk):
            if not len(rows):
                continue
            index = to_device(rows, self._rows.device)
            hidden = teacher_hidden.index_select(0, index)
            # `read` needs labels; their log-probabilities are not used
            no_labels = torch.zeros_like(index)
            teacher = read(self._head, hidden, no_labels)
            self.observe(rows, teacher.scores, teacher.lse)

    @torch.no_grad()
    def observe(self, rows: Tensor, scores: Tensor, lse: Tensor) -> None:
        """Learn the students of one chunk of teacher rows, as `policy_logprobs` gives it (`losses/logprobs.py`).

        Give each teacher row in one chunk only, or its students are learnt twice; `finish` then raises.

        rows    `[C]`, ascending, at least one, of the M rows of the teacher
        scores  `[C, V/tp]`: raw logits where kernels compute the losses, else `VocabParallelHead.scores`, which this
                method overwrites
        lse     `[C]`: log Σ exp(logits / temperature), or that of the scores

        Raises ValueError if a student between the first and the last row has a teacher that is not among `rows`.
        """
        # `teacher_of` takes raw logits for kernels, and log-probabilities for plain torch.
        if self._head.kernel is None:
            scores.sub_(lse[:, None])
        elif self._full.kernel is None:
            scores = self._head.normalised(scores, lse)
        # The students of these rows: `_teacher` is ascending. They can be more than a chunk, for several depths.
        rows = rows.to(self._teacher.device)
        begin = torch.searchsorted(self._teacher, rows[0])
        end = torch.searchsorted(self._teacher, rows[-1] + 1)
        # One `tolist` for both: if the tensors are on a GPU, the host waits once and not twice.
        first, last = torch.stack([begin, end]).tolist()
        for start in range(first, last, self._chunk):
            part = slice(start, min(start + self._chunk, last))
            # The place of each student's teacher among `rows`, if it is there. No place is past the end, because these
            # teachers are at most rows[-1].
            index = torch.searchsorted(rows, self._teacher[part])
            nearest = rows[index]
            if not torch.equal(nearest, self._teacher[part]):
                raise ValueError(
                    "the teacher of a drafter row is not among the rows with computed logits"
                )
            index = to_device(index, scores.device)
            self._learn(part, teacher_of(self._full, scores, lse, index))

    def finish(self) -> tuple[Tensor, Metrics]:
        """Return (Σ token_weight · loss, metrics). Raises ValueError if some row had no teacher.

        Call it once: it sums the gradients over ranks in place, so a second call would sum the sums. The sum of
        losses is a scalar. It is the same on all ranks of `tp_group`, and so are its gradients.
        """
        rows = len(self._rows)
        if self._learned != rows:
            raise ValueError(f"{rows - self._learned} of {rows} drafter rows had no teacher")
        total = self._total
        if self._grad is not None:
            # Each rank has the part of its columns: one sum here, not one for each chunk.
            self._head.sum(self._grad)
            if self._own_grad is not None:
                self._head.sum(self._own_grad)
            total = _Precomputed.apply(
                self._source,
                total,
                self._rows,
                self._grad,
                self._own,
                self._own_grad,
            )
        return total, self._metrics

    @torch.no_grad()
    def _learn(self, part: slice, teacher: Teacher | None = None) -> None:
        """Add loss, gradient and metrics of one slice of the sorted students; the teacher has one row for each."""
        head = self._draft_head or self._full
        kind = self._kind
        labels = self._labels[part]
        weight = self._weight[part]
        scales = weight / head.temperature  # the gradients of `rows` are in logits / temperature
        noise = None
        if self._noise is not None:
            seeds, keys = self._noise
            noise = seeds[part], keys[part]
        rows = read(head, self._hidden[part], labels, teacher=teacher, noise=noise)
        best, best_logprob = rows.best()  # first: what follows overwrites the scores
        covered = torch.ones_like(weight)  # [C]: 1 where the student can draft the label, else 0
        for_metrics = {
            "tokens": torch.ones_like(weight),
            "match": (best == labels).to(weight.dtype),
        }
        if self._draft_head is not None:
            covered = self._draft_head.holds(labels)
            for_metrics["covered"] = covered
        ce = -rows.logprob * covered  # no cross-entropy for a label that the student cannot draft
        for_metrics["ce"] = ce
        for_rows = {"match": for_metrics["match"], "label_logq": -ce, "best_logq": best_logprob}
        if self._noise is not None:
            for_rows["coupled"] = rows.coupled() * covered[:, None]
        learns = self._grad is not None or self._own_grad is not None
        if teacher is None:
            loss = ce
            if learns:
                rows.write_label(-scales * covered)
        else:
            if callable(kind):
                # `_groups` is depth - 1 for a function of the user's (see the class).
                assert isinstance(rows, PlainRows)
                overlap, loss = rows.write_own_loss(kind, self._groups[part] + 1, scales)
            else:
                overlap, loss = rows.write_forward_kl(scales)
            by_teacher = {"overlap": overlap, "argmax_prob": teacher.logprob(best).exp()}
            for_metrics |= by_teacher
            for_rows |= by_teacher
        self._total += (weight * loss).sum()
        if self._grad is not None:
            # Every student is in one slice only, so its gradient is set and not added.
            self._grad[part] = rows.back()
        if self._own_grad is not None and self._draft_head is not None:
            self._own_grad[self._draft_head.own] += rows.of_weight(self._hidden[part])
        for_metrics["loss"] = loss
        for name, x in for_metrics.items():
            self._metrics[name].index_add_(0, self._groups[part], x)
        for name, of_all_rows in self.rows.items():
            of_all_rows.index_copy_(0, self._rows[part], for_rows[name])
        self._learned += len(weight)


class _Precomputed(torch.autograd.Function):
    """A scalar with gradients that were computed before: of the rows `rows` of `source`, and of `own`, if it is given.

    total     scalar, the value
    rows      `[R]`, different rows of `source [N, H]`; the gradient of the other rows is 0
    grad      `[R, H]`, d total / d source[rows]
    own_grad  like `own`, d total / d own, in float32 or float64
    """

    @staticmethod
    def forward(ctx, source, total, rows, grad, own, own_grad):
        ctx.save_for_backward(rows, grad, own_grad)
        ctx.rows = len(source)
        ctx.own_type = None if own is None else own.dtype
        return total.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream):
        rows, grad, own_grad = ctx.saved_tensors
        grad_source = grad.new_zeros(ctx.rows, grad.shape[1])
        grad_of_rows = grad * upstream
        grad_source.index_copy_(0, rows, grad_of_rows.to(grad.dtype))
        grad_own = None
        if own_grad is not None:
            grad_own = own_grad * upstream
            grad_own = grad_own.to(ctx.own_type)
        return grad_source, None, None, None, grad_own, None
