"""The drafter's losses, as sums: in chunks of rows, vocabulary-parallel.

Shapes: N rows, H hidden size, V vocabulary, V/tp this tensor-parallel rank's share, C rows of one chunk. A row is one
predicting position. Hidden states and results are replicated over `tp_group`. This module sums the gradients of hidden
states over that group, so the gather under sequence parallelism needs no sum in its backward.

Logits are computed only for rows with a weight, C at a time, so memory for logits does not grow with N. Arithmetic on
logits is float32 (float64 for float64 inputs). All distributions are softmax(logits / temperature), as in an engine.
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
    """Σ token_weight · loss over rows, and metrics, learnt in parts. It is differentiable in `hidden [N, H]` only.

    With student q and teacher p, `kind` selects the loss of a row:

    ce          -log q(label), without a teacher
    forward_kl  KL(p ‖ q)
    a function  the user's (`custom.DrafterLoss`), without `words`

    Call `learn_labels` for ce, else `learn_from`, then `finish`. In place of `learn_from`, `policy_logprobs` can call
    `observe` for each chunk that it computes: policy's loss and teacher then share one pass over the output layer.
    Gradients are computed while learning, chunk by chunk. The output layer's `weight [V/tp, H]` and the teacher get
    none.

    teacher_index [N]  the teacher's row of each row, row i if omitted. Rows of several depths share a teacher's chunk
    groups [N] int64   the entry of the metrics that a row adds to, below `num_groups`; for example depth - 1
    words [S]          the ids that drafts are chosen from; the student's softmax is over them only. Rows whose label is
                       another word add 0 under ce; `docs/design.md`, Draft vocabulary
    own [S, H]         an output layer of the student's own over `words`, whole on every rank of `tp_group`; it gets a
                       gradient
    keep_rows          keeps results of single rows in `rows`
    noise              (seeds [N], keys [N]) int64 of the noise that the labels were sampled with, on the labels'
                       device, for `keep_rows`: "coupled" [N, F] then says whether a coupled draft is the label, for
                       each of the F factors of `types.SHARPNESS`, in rows whose seed is not negative

    Metrics are unweighted sums over rows of non-zero weight, `[num_groups]`: `tokens`, `loss`, `ce` and `match` (the
    label is argmax q; of equal logits the lower id). With a teacher also `overlap` (Σ min(p, q), which the acceptance
    of coupled drafts of sharpness 1 does not exceed) and `argmax_prob` (p(argmax q), the acceptance of argmax drafts).
    With `words` also `covered` (labels among them); `ce` then sums over these rows only.
    Labels, weights, teacher_index and groups are best on the CPU: the rows are then sorted without waiting for a GPU.
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
        # of the student over the whole vocabulary; a function sees whole distributions, which no kernel has
        self._full = replace(self._head, kernel=None) if callable(kind) else self._head
        self._chunk = chunk or self._full.chunk
        # the output layer of the draft vocabulary; None: that of the whole vocabulary
        self._draft_head: DraftHead | None = None
        if words is not None:
            self._draft_head = DraftHead.of_words(self._head, words, own)
        rows = self._head.rows_of(token_weight, labels)
        # Sorting by teacher row makes the students of consecutive teacher rows one slice.
        teacher = rows if teacher_index is None else teacher_index.index_select(0, rows)
        self._teacher, order = teacher.sort(stable=True)
        rows = rows.index_select(0, order)
        device = hidden.device
        self._rows = to_device(rows, device)
        self._source = hidden
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
        self._learned = 0
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
        """Learn all rows by cross-entropy, without a teacher."""
        for first in range(0, len(self._rows), self._chunk):
            self._learn(slice(first, first + self._chunk))

    @torch.no_grad()
    def learn_from(self, teacher_hidden: Tensor) -> None:
        """Learn all rows from the teacher's rows `teacher_hidden [M, H]`."""
        for rows in self._teacher.unique().split(self._chunk):
            if not len(rows):
                continue
            index = to_device(rows, self._rows.device)
            hidden = teacher_hidden.index_select(0, index)
            no_labels = torch.zeros_like(index)
            given = read(self._head, hidden, no_labels)
            self.observe(rows, given.scores, given.lse)

    @torch.no_grad()
    def observe(self, rows: Tensor, scores: Tensor, lse: Tensor) -> None:
        """Learn from the teacher's ascending `rows [C]`, their scores `[C, V/tp]`, which are overwritten, and `lse
        [C]`, as `policy_logprobs` gives them.

        Raises ValueError if a student between the first and the last row has a teacher that is not among `rows`.
        """
        if self._head.kernel is None:
            scores.sub_(lse[:, None])
        elif self._full.kernel is None:
            scores = self._head.normalised(scores, lse)
        rows = rows.to(self._teacher.device)
        begin = torch.searchsorted(self._teacher, rows[0])
        end = torch.searchsorted(self._teacher, rows[-1] + 1)
        first, last = torch.stack([begin, end]).tolist()
        for start in range(first, last, self._chunk):
            part = slice(start, min(start + self._chunk, last))
            index = torch.searchsorted(rows, self._teacher[part])
            of_chunk = rows[index]
            if not torch.equal(of_chunk, self._teacher[part]):
                raise ValueError(
                    "the teacher of a drafter row is not among the rows with computed logits"
                )
            index = to_device(index, scores.device)
            self._learn(part, teacher_of(self._full, scores, lse, index))

    def finish(self) -> tuple[Tensor, Metrics]:
        """Return (Σ token_weight · loss, metrics). Raises ValueError if some row had no teacher."""
        rows = len(self._rows)
        if self._learned != rows:
            raise ValueError(f"{rows - self._learned} of {rows} drafter rows had no teacher")
        total = self._total
        if self._grad is not None:
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
        """Add loss, gradient and metrics of one slice of students; the teacher is aligned with the slice."""
        head = self._draft_head or self._full
        kind = self._kind
        labels = self._labels[part]
        weight = self._weight[part]
        scales = weight / head.temperature
        noise = None
        if self._noise is not None:
            seeds, keys = self._noise
            noise = seeds[part], keys[part]
        rows = read(head, self._hidden[part], labels, teacher=teacher, noise=noise)
        best, best_logprob = rows.best()
        covered = torch.ones_like(weight)
        sums = {
            "tokens": torch.ones_like(weight),
            "match": (best == labels).to(weight.dtype),
        }
        if self._draft_head is not None:
            covered = self._draft_head.holds(labels)
            sums["covered"] = covered
        ce = -rows.logprob * covered
        sums["ce"] = ce
        kept = {"match": sums["match"], "label_logq": -ce, "best_logq": best_logprob}
        if self._noise is not None:
            kept["coupled"] = rows.coupled() * covered[:, None]
        learns = self._grad is not None or self._own_grad is not None
        if teacher is None:
            loss = ce
            if learns:
                rows.write_label(-scales * covered)
        else:
            if callable(kind):
                assert isinstance(rows, PlainRows)
                overlap, loss = rows.write_own_loss(kind, self._groups[part] + 1, scales)
            else:
                overlap, loss = rows.write_forward_kl(scales)
            of_teacher = {"overlap": overlap, "argmax_prob": teacher.logprob(best).exp()}
            sums |= of_teacher
            kept |= of_teacher
        self._total += (weight * loss).sum()
        if self._grad is not None:
            self._grad[part] = rows.back()
        if self._own_grad is not None and self._draft_head is not None:
            self._own_grad[self._draft_head.own] += rows.of_weight(self._hidden[part])
        sums["loss"] = loss
        for name, x in sums.items():
            self._metrics[name].index_add_(0, self._groups[part], x)
        for name, whole in self.rows.items():
            whole.index_copy_(0, self._rows[part], kept[name])
        self._learned += len(weight)


class _Precomputed(torch.autograd.Function):
    """A scalar with gradients that the forward has computed: in some rows of `source`, and in `own`, if it is given."""

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
