"""Losses of a chunk of rows in plain torch: without kernels, for the user's functions, and to check the kernels.

`PlainRows` has the interface of `FusedRows`; `losses/choice.py` calls one or the other. Shapes as in
`losses/drafter.py`. Losses are float32 or float64, and the same on every tensor-parallel rank.

These are collective, all ranks of the head's group must call them in the same order: `PlainTeacher.logprob`, and of
`PlainRows` the constructor, `best`, `coupled`, `write_forward_kl` and `write_own_loss`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from megatron_rlspec.custom import DrafterLoss, DrafterRows, FunctionError, checked, named
from megatron_rlspec.losses.head import DraftHead, VocabParallelHead
from megatron_rlspec.packing.transfer import to_device
from megatron_rlspec.types import SHARPNESS


@dataclass(frozen=True)
class PlainTeacher:
    """The teacher of C students.

    head      of the policy, over the whole vocabulary
    logprobs  `[C, V/tp]`: the policy's log-probabilities, row i for student i
    """

    head: VocabParallelHead
    logprobs: Tensor

    def logprob(self, ids: Tensor) -> Tensor:
        """Return log p `[C]` of the token ids `ids [C]`. Collective."""
        return self.head.sum(self.head.pick(self.logprobs, ids))


class PlainRows:
    """A chunk of rows of the policy, or of students.

    It has the methods and attributes of `FusedRows`, whose docstrings explain them. Only these differ:

    scores           `[C, width]` of `head.scores`: logits / temperature minus the row's largest, not raw logits
    lse              `[C]`, log Σ exp of these scores
    value            `[C]`: the entropy if `with_entropy`, else 0. Forward KL is a result of `write_forward_kl` only
    write_own_loss   for the user's functions; `FusedRows` has no such method

    Call `best` first: the other methods turn `scores` into log-probabilities in place, since a copy takes much memory.
    Then call `coupled`. Then call one method that writes, and once: it stores the gradient for `back` and `of_weight`.
    """

    def __init__(
        self,
        head: VocabParallelHead,
        hidden: Tensor,
        labels: Tensor,
        with_entropy: bool = False,
        teacher: PlainTeacher | None = None,
        noise: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        self._head = head
        self._labels = labels
        self._teacher = teacher
        self._noise = noise
        self.scores = head.scores(hidden)
        self.lse = head.log_sum_exp(self.scores)
        self.logprob = head.sum(head.pick(self.scores, labels)) - self.lse
        self.value = torch.zeros_like(self.logprob)
        if with_entropy:
            logp = self.scores - self.lse[:, None]
            self.value = -head.sum((logp.exp() * logp).sum(-1))

    def best(self) -> tuple[Tensor, Tensor]:
        best = self._head.argmax(self.scores)
        # 0 on ranks without the id, so a sum gives it to all
        score = self._head.pick(self.scores, best)
        return best, self._head.sum(score) - self.lse

    @cached_property
    def _logq(self) -> Tensor:
        """log q `[C, width]`, in the memory of `scores`. Cached, because a second subtraction would be wrong."""
        return self.scores.sub_(self.lse[:, None])

    def coupled(self) -> Tensor:
        assert self._noise is not None
        seeds, keys = self._noise
        # Seeds are on the CPU in training, so choosing the rows does not wait for a GPU. They are equal on all ranks of
        # the group, so the early return below is taken on all of them or on none.
        with_seed = (seeds >= 0).nonzero()[:, 0]
        coupled = self._logq.new_zeros(len(self._logq), len(SHARPNESS))
        if not len(with_seed):
            return coupled
        device = self._logq.device
        rows = to_device(with_seed, device)
        row_seeds = to_device(seeds[with_seed], device)
        row_keys = to_device(keys[with_seed], device)
        row_logq = self._logq.index_select(0, rows)
        drafts = self._head.sample(row_logq, row_seeds, row_keys, SHARPNESS)
        are_labels = drafts == self._labels[rows, None]
        coupled[rows] = are_labels.to(coupled.dtype)
        return coupled

    def write_label(self, on_logprob: Tensor) -> None:
        # `_grad` is q - onehot, the gradient of -log q(label). `back` multiplies it by `_scales`: hence their minus.
        self._scales = -on_logprob
        minus_one = torch.full_like(self.lse, -1)
        self._grad = self._head.add_at(self._logq.exp_(), self._labels, minus_one)

    def write_forward_kl(self, scales: Tensor) -> tuple[Tensor, Tensor]:
        assert self._teacher is not None
        head = self._head
        logq = self._logq
        logp = self._teacher.logprobs
        if isinstance(head, DraftHead):
            logp = head.of_full(logp)
        p = logp.exp()
        q = logq.exp()
        overlap_of_rank = torch.minimum(p, q).sum(-1)
        loss_of_rank = (logp - logq).mul_(p).sum(-1)
        overlap, loss = head.sum(torch.stack([overlap_of_rank, loss_of_rank]))
        if isinstance(head, DraftHead):
            # Over a part S of the vocabulary KL(p ‖ q) is infinite. The loss is p(S) · KL(p / p(S) ‖ q), which is
            # Σ over S of p · (log p - log q), minus p(S) · log p(S) (docs/design.md, Draft vocabulary).
            mass = head.sum(p.sum(-1))
            loss = loss - torch.xlogy(mass, mass)
            q.mul_(mass[:, None])
        self._scales = scales
        self._grad = q.sub_(p)
        return overlap, loss

    def write_own_loss(
        self, own: DrafterLoss, depths: Tensor, scales: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return (Σ min(p, q), the user's loss), `[C]` each, and store the gradient of Σ scales · loss.

        Not for a `DraftHead`, whose distribution cannot be gathered (`VocabParallelHead.whole`).

        own     the function of the option `drafter.loss`; it sees whole distributions, gathered from all ranks
        depths  `[C]` int64, from 1

        Raises FunctionError if the loss does not depend on the drafter's log-probabilities.
        """
        assert self._teacher is not None
        option = named("drafter.loss", own)
        head = self._head
        logp = self._teacher.logprobs
        smaller = torch.minimum(logp.exp(), self._logq.exp())
        overlap = head.sum(smaller.sum(-1))
        with torch.enable_grad():  # the caller runs under `no_grad`
            draft = head.whole(self._logq).detach().clone()
            draft.requires_grad_()
            # Copies: the function may change its arguments in place.
            rows = DrafterRows(
                draft_logprobs=draft,
                policy_logprobs=head.whole(logp).detach().clone(),
                tokens=self._labels.clone(),
                depths=depths,
            )
            loss = checked(option, own(rows), draft[:, 0])
            loss = loss.to(draft.dtype)
            (grad,) = torch.autograd.grad(loss.sum(), draft, allow_unused=True)
        if grad is None:
            raise FunctionError(
                f"{option}: the result does not depend on draft_logprobs; expected one that does"
            )
        self._scales = scales
        # The function's gradient is in log q. Through log q = z - log Σ exp(z) it becomes that in the scores z.
        grad = grad - draft.detach().exp() * grad.sum(-1, keepdim=True)
        self._grad = head.share(grad)
        return overlap, loss.detach()

    def back(self) -> Tensor:
        return self._head.back(self._grad) * self._scales[:, None]

    def of_weight(self, hidden: Tensor) -> Tensor:
        grad = self._grad * self._scales[:, None]
        return grad.t() @ hidden.to(grad.dtype)
