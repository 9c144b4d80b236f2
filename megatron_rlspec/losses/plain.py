"""Losses of a chunk of rows in plain torch, vocabulary-parallel: where no kernel has them, as for the user's functions.

Shapes as in `losses/drafter.py`. Results are float32 or float64, and the same on every rank.
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
    """The policy's log-probabilities `[C, V/tp]`, a row for each student."""

    head: VocabParallelHead
    logprobs: Tensor

    def logprob(self, ids: Tensor) -> Tensor:
        """Return log p `[C]` of `ids [C]`."""
        return self.head.sum(self.head.pick(self.logprobs, ids))


class PlainRows:
    """The same as `FusedRows`. Call `best` first: the other methods write over `scores`.

    scores `[C, width]` of `head.scores`, lse `[C]` of them
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
        score = self._head.pick(self.scores, best)
        return best, self._head.sum(score) - self.lse

    @cached_property
    def _logq(self) -> Tensor:
        return self.scores.sub_(self.lse[:, None])

    def coupled(self) -> Tensor:
        assert self._noise is not None
        seeds, keys = self._noise
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
        self._scales = -on_logprob
        minus_one = torch.full_like(self.lse, -1)
        self._grad = self._head.add_at(self._logq.exp_(), self._labels, minus_one)

    def against(self, scales: Tensor) -> tuple[Tensor, Tensor]:
        assert self._teacher is not None
        head = self._head
        logq = self._logq
        logp = self._teacher.logprobs
        if isinstance(head, DraftHead):
            logp = head.of_full(logp)
        p = logp.exp()
        q = logq.exp()
        least = torch.minimum(p, q).sum(-1)
        mean = (logp - logq).mul_(p).sum(-1)
        overlap, loss = head.sum(torch.stack([least, mean]))
        if isinstance(head, DraftHead):
            # Forward KL over a part S of the vocabulary would be infinite: p(S) · KL(p / p(S) ‖ q).
            mass = head.sum(p.sum(-1))
            loss = loss - torch.xlogy(mass, mass)
            q.mul_(mass[:, None])
        self._scales = scales
        self._grad = q.sub_(p)
        return overlap, loss

    def against_own(
        self, own: DrafterLoss, depths: Tensor, scales: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the same as `against`, for the user's loss; `depths [C]`, from 1."""
        assert self._teacher is not None
        option = named("drafter.loss", own)
        head = self._head
        logp = self._teacher.logprobs
        least = torch.minimum(logp.exp(), self._logq.exp())
        overlap = head.sum(least.sum(-1))
        with torch.enable_grad():
            draft = head.whole(self._logq).detach().clone()
            draft.requires_grad_()
            # The function may change its arguments in place.
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
        # from the gradient with respect to log-probabilities to that with respect to logits
        grad = grad - draft.detach().exp() * grad.sum(-1, keepdim=True)
        self._grad = head.share(grad)
        return overlap, loss.detach()

    def back(self) -> Tensor:
        return self._head.back(self._grad) * self._scales[:, None]

    def of_weight(self, hidden: Tensor) -> Tensor:
        grad = self._grad * self._scales[:, None]
        return grad.t() @ hidden.to(grad.dtype)
