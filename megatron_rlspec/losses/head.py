"""The vocabulary-parallel output layer: scores of a chunk of rows, and reductions over the vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rlspec.host import memory
from megatron_rlspec.noise import draw_each, noisy
from megatron_rlspec.packing.transfer import to_device

LOGITS_ON_CPU = memory.LARGEST // 4 - 1024  # of one chunk, in float32
BYTES_ON_GPU = 5 * 2**28  # of one chunk's logits where kernels write the gradient in their place


@dataclass(frozen=True)
class VocabParallelHead:
    """This rank's rows of the output layer.

    weight       `[width, H]`, detached
    temperature  divides all logits
    start        the token id of the first row
    total        token ids of all ranks together
    group        tensor-parallel ranks; None if one rank holds the whole vocabulary
    kernel       `kernels.head` where it computes the losses, None for plain torch

    Methods take one chunk of C rows. Results are the same on every rank of `group`, unless a docstring says otherwise.
    """

    weight: Tensor
    temperature: float
    start: int
    total: int
    group: dist.ProcessGroup | None
    kernel: ModuleType | None = None

    @classmethod
    def of(
        cls,
        weight: Tensor,
        temperature: float,
        group: dist.ProcessGroup | None,
    ) -> VocabParallelHead:
        """Make a head from this rank's `weight [V/tp, H]`; `temperature` is above 0."""
        rank = 0 if group is None else group.rank()
        size = 1 if group is None else group.size()
        rows = weight.shape[0]
        return cls(
            weight=weight.detach(),
            temperature=temperature,
            start=rank * rows,
            total=size * rows,
            group=group if size > 1 else None,
        )

    @property
    def width(self) -> int:
        return self.weight.shape[0]

    @property
    def chunk(self) -> int:
        """Return how many rows to compute logits of at once: on a CPU so few that `memory.keep_freed` works on them.

        With kernels there are only the logits themselves, so there are more: the sums of gradients of the output layer
        are read and written once a chunk.
        """
        if self.kernel is not None:
            rows = BYTES_ON_GPU // (self.width * self.weight.element_size())
            return min(max(rows // 256 * 256, 1024), 8192)
        if self.weight.is_cuda:
            return 1024
        return min(max(LOGITS_ON_CPU // self.width, 32), 1024)

    def rows_of(self, mask: Tensor, labels: Tensor) -> Tensor:
        """Return the indices of rows with a non-zero `mask [N]`. Raises ValueError if a label of one is no token id.

        It reads both, so on a GPU it waits; training passes tensors of the CPU.
        """
        rows = mask.nonzero().squeeze(1)
        used = labels.index_select(0, rows)
        outside = (used < 0) | (used >= self.total)
        if bool(outside.any()):
            first = int(used.min())
            last = int(used.max())
            raise ValueError(
                f"labels lie outside the vocabulary of {self.total}: {first} to {last}"
            )
        return rows

    def scores(self, hidden: Tensor) -> Tensor:
        """Return logits / temperature minus the row's largest over all ranks, `[C, width]`, in float32 or float64.

        The largest score is then 0, so differences of log-probabilities are exact for logits of any size. A logit of
        minus infinity becomes a very low finite one with probability 0.
        """
        scores = self._logits(hidden)
        scores.clamp_(min=lowest(scores.dtype))
        largest = self.max(scores.amax(-1))
        return scores.sub_(largest[:, None])

    def _logits(self, hidden: Tensor) -> Tensor:
        logits = self.logits(hidden).to(accumulate_in(hidden))
        return logits.div_(self.temperature)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits `[C, width]` as the product gives them, in the type of `hidden`."""
        return hidden @ self.weight.t()

    def normalised(self, logits: Tensor, lse: Tensor) -> Tensor:
        """Return log-probabilities `[C, width]` from `logits` and `lse [C]`, log Σ exp(logits / temperature)."""
        exact = accumulate_in(logits)
        scaled = logits.to(exact).div_(self.temperature)
        scaled.clamp_(min=lowest(exact))
        return scaled.sub_(lse[:, None])

    def back(self, grad: Tensor) -> Tensor:
        """Return the hidden states' gradient `[C, H]` from the scores' `[C, width]`; the caller sums it over ranks."""
        return grad.to(self.weight.dtype) @ self.weight

    def sum(self, x: Tensor) -> Tensor:
        """Sum over the ranks, in place."""
        if self.group is not None:
            dist.all_reduce(x, group=self.group)
        return x

    def max(self, x: Tensor) -> Tensor:
        """Return the largest over the ranks."""
        if self.group is not None:
            x = x.clone()
            dist.all_reduce(x, dist.ReduceOp.MAX, group=self.group)
        return x

    def log_sum_exp(self, scores: Tensor) -> Tensor:
        """Return log Σ exp over the whole vocabulary, `[C]`."""
        lse = scores.logsumexp(-1)
        if self.group is None:
            return lse
        top = self.max(lse)
        relative = (lse - top).exp_()
        return top + self.sum(relative).log_()

    def ids_of(self, columns: Tensor) -> Tensor:
        """Return the token ids of this rank's columns."""
        return columns + self.start

    def argmax(self, scores: Tensor) -> Tensor:
        """Return the ids `[C]` of the largest scores; of equal scores the lowest id over all ranks."""
        value, column = scores.max(-1)
        return self.best(value, self.ids_of(column))

    def sample(
        self,
        logprobs: Tensor,
        seeds: Tensor,
        keys: Tensor,
        factors: Sequence[float],
    ) -> Tensor:
        """Return the ids `[C, F]` of the largest factor · log-probability + noise, for each of F factors (`noise.py`).

        seeds, keys  `[C]` int64
        """
        all_columns = torch.arange(self.width, device=logprobs.device)
        ids = self.ids_of(all_columns)
        columns = draw_each(logprobs, seeds, keys, factors, ids)
        best = ids[columns]
        if self.group is None:
            return best
        scaled = logprobs.gather(1, columns) * logprobs.new_tensor(factors)
        value = noisy(scaled, seeds, keys, best)
        return self.best(value, best)

    def best(self, value: Tensor, best: Tensor) -> Tensor:
        """Return the ids of the largest values over all ranks, elementwise; of equal values the lowest id."""
        if self.group is not None:
            best = best.masked_fill(value < self.max(value), self.total)
            dist.all_reduce(best, dist.ReduceOp.MIN, group=self.group)
        return best

    def pick(self, x: Tensor, ids: Tensor) -> Tensor:
        """Return `x [C, width]` at `ids [C]`, and 0 where another rank holds the id. Apply `sum` to it."""
        local, mine = self._local(ids)
        values = x.gather(1, local[:, None])[:, 0]
        return values.masked_fill_(~mine, 0)

    def places(self, ids: Tensor) -> Tensor:
        """Return the columns of `ids [C]`, -1 where another rank holds the id."""
        local, mine = self._local(ids)
        return local.masked_fill_(~mine, -1)

    def add_at(self, x: Tensor, ids: Tensor, values: Tensor) -> Tensor:
        """Add `values [C]` to `x [C, width]`, in place, at the `ids [C]` that this rank holds."""
        local, mine = self._local(ids)
        here = values.masked_fill(~mine, 0)
        return x.scatter_add_(1, local[:, None], here[:, None])

    def whole(self, x: Tensor) -> Tensor:
        """Gather the columns of `x [C, width]` of all ranks: `[C, V]`."""
        if self.group is None:
            return x
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.group.size())]
        dist.all_gather(parts, x, group=self.group)
        return torch.cat(parts, 1)

    def share(self, x: Tensor) -> Tensor:
        """Return this rank's columns of `x [C, V]`."""
        return x[:, self.start : self.start + self.width]

    def _local(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the columns of `ids [C]`, and whether this rank holds the id; elsewhere the column is any."""
        local = ids - self.start
        mine = (local >= 0) & (local < self.width)
        return local.masked_fill_(~mine, 0), mine


@dataclass(frozen=True, kw_only=True)
class DraftHead(VocabParallelHead):
    """The rows of the output layer of the words that drafts are chosen from (FR-Spec, arXiv 2502.14856, section 3).

    ids      `[width]` this rank's words, ascending; [-1] on a rank that holds none of them
    columns  `[width]` their columns in the head over all words
    some     whether this rank holds any of the words
    own      a head of the drafter's own: the rows of it that this rank computes; else the rows are the policy's

    Methods take and return ids of the full vocabulary. A word outside counts as one that another rank holds.
    """

    ids: Tensor
    columns: Tensor
    some: bool
    own: slice | None = None

    @classmethod
    def of_words(
        cls,
        full: VocabParallelHead,
        words: Tensor,
        own: Tensor | None = None,
    ) -> DraftHead:
        """Make the head over `words [S]`, different ids. Raises ValueError for ids outside the vocabulary.

        own  `[S, H]`, whole on every rank: the drafter's own rows, for ascending words (EAGLE-3)

        With `words` on the CPU, nothing is read from the device.
        """
        words = words.cpu().sort().values
        first_word = int(words[0]) if len(words) else -1
        if first_word < 0 or int(words[-1]) >= full.total:
            raise ValueError(
                f"draft vocabulary: expected ids from 0 to {full.total - 1}, at least one"
            )
        here = (words >= full.start) & (words < full.start + full.width)
        ids = words[here]
        some = bool(len(ids))
        first = 0
        if some:
            first = int(torch.searchsorted(words, full.start))
            columns = ids - full.start
        else:  # a head needs a row; its logits are replaced
            ids = words.new_full((1,), -1)
            columns = words.new_zeros(1)
        rows = slice(first, first + len(columns))
        columns = to_device(columns, full.weight.device)
        if own is None:
            weight = full.weight.index_select(0, columns)
        else:
            weight = own.detach()[rows]
        return cls(
            weight=weight,
            temperature=full.temperature,
            start=full.start,
            total=full.total,
            group=full.group,
            kernel=full.kernel,
            own=None if own is None else rows,
            ids=to_device(ids, full.weight.device),
            columns=columns,
            some=some,
        )

    def holds(self, labels: Tensor) -> Tensor:
        """Return for `labels [C]` 1.0 where a label is one of the words of any rank, else 0.0."""
        _, mine = self._local(labels)
        held = mine.to(accumulate_in(self.weight))
        return self.sum(held)

    def ids_of(self, columns: Tensor) -> Tensor:
        return self.ids[columns]

    def of_full(self, x: Tensor) -> Tensor:
        """Return the columns of the words of log-probabilities `x [C, V/tp]`."""
        logprobs = x.index_select(1, self.columns)
        if not self.some:
            logprobs.fill_(lowest(logprobs.dtype))
        return logprobs

    def _logits(self, hidden: Tensor) -> Tensor:
        logits = super()._logits(hidden)
        if not self.some:
            logits.fill_(lowest(logits.dtype))
        return logits

    def _local(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        local = torch.searchsorted(self.ids, ids)
        local.clamp_(max=self.width - 1)
        return local, self.ids[local] == ids


def accumulate_in(x: Tensor) -> torch.dtype:
    """Return the type for arithmetic on the logits of `x`: float64 for float64, else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def lowest(dtype: torch.dtype) -> float:
    """Return a replacement for minus infinity in logits: its exponential is 0, and sums of it do not overflow."""
    return torch.finfo(dtype).min / 4
