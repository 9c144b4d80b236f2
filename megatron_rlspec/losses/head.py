"""The vocabulary-parallel output layer: scores of a chunk of rows, and reductions over the vocabulary.

`VocabParallelHead` is the layer over the whole vocabulary; `losses/choice.py` and `train/reference.py` make it.
`DraftHead` is the layer over the draft vocabulary; `losses/drafter.py` makes it. The losses themselves are in
`losses/plain.py` and `losses/fused.py`.

Shapes as in `losses/drafter.py`: C rows of one chunk, H hidden size, V/tp this rank's share of the vocabulary. `width`
is the number of this rank's columns, V/tp or fewer (`DraftHead`). Ids are token ids of the whole vocabulary; columns
are places in this rank's logits, but `DraftHead.columns` are places in those of the head over the whole vocabulary.

These are collective, all ranks of `group` must call them in the same order: `sum`, `max`, `best`, `whole`, and by them
`scores`, `log_sum_exp`, `argmax`, `sample` and `holds`.
"""

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

# Logits of one chunk on a CPU. At 4 bytes each they take 4 KiB less than `memory.LARGEST`, so their memory is reused
# and not mapped anew (`memory.keep_freed`). `chunk` then bounds the rows to 32 to 1,024, whatever their bytes.
LOGITS_ON_CPU = memory.LARGEST // 4 - 1024
# Bytes that one chunk's logits should take on a GPU with kernels, 1.25 GiB. `chunk` then bounds the rows to 1,024 to
# 8,192, whatever their bytes.
BYTES_ON_GPU = 5 * 2**28


@dataclass(frozen=True)
class VocabParallelHead:
    """This rank's rows of the output layer.

    weight       `[width, H]`, detached: gradients are computed by hand (`back`), not by autograd
    temperature  divides all logits, above 0
    start        the token id of this rank's first row of the whole output layer, of which every rank has V/tp rows
    total        number of token ids of all ranks together, V
    group        tensor-parallel ranks; None if one rank holds the whole vocabulary
    kernel       `kernels.losses` where it computes the losses, None for plain torch

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
        """Make a head from this rank's `weight [V/tp, H]`; `temperature` is above 0.

        All ranks must have equally many rows, rank 0 those of the lowest ids. This is not checked, and `start` and
        `total` are computed from it.
        """
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
        """Return the number of rows of which logits are computed at once.

        All ranks of `group` must use one number, because each chunk makes collective calls. So take it from a head over
        the whole vocabulary: the width of a `DraftHead` differs between ranks.

        On a CPU it is so small that freed logits are reused (`LOGITS_ON_CPU`). With kernels it is larger, because a
        chunk takes no memory but its logits. Large chunks are faster: each one reads and writes the whole sum of the
        output layer's gradient. On a GPU without kernels it is 1,024.
        """
        if self.kernel is not None:
            rows = BYTES_ON_GPU // (self.width * self.weight.element_size())
            return min(max(rows // 256 * 256, 1024), 8192)
        if self.weight.is_cuda:
            return 1024
        return min(max(LOGITS_ON_CPU // self.width, 32), 1024)

    def rows_of(self, mask: Tensor, labels: Tensor) -> Tensor:
        """Return the indices of rows with a non-zero `mask [N]`. Raises ValueError if a label of one is no token id.

        It reads both on the host, so with tensors on a GPU it waits for the GPU. Training passes tensors on the CPU.
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

        The largest score is then 0: large logits would lose digits of their small differences. A logit of minus
        infinity becomes a very low finite one with probability 0: a difference of infinities is NaN. Collective.
        """
        scores = self._scaled_logits(hidden)
        scores.clamp_(min=lowest(scores.dtype))
        largest = self.max(scores.amax(-1))
        return scores.sub_(largest[:, None])

    def _scaled_logits(self, hidden: Tensor) -> Tensor:
        """Return logits / temperature `[C, width]`, in float32 or float64; `DraftHead` overrides it."""
        logits = self.logits(hidden).to(accumulate_in(hidden))
        return logits.div_(self.temperature)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the raw logits `[C, width]`, in the type of `hidden`: what the kernels read."""
        return hidden @ self.weight.t()

    def normalised(self, logits: Tensor, lse: Tensor) -> Tensor:
        """Return log-probabilities `[C, width]` from raw `logits` and `lse [C]`, log Σ exp(logits / temperature).

        `Student.observe` needs it where kernels computed the teacher and plain torch computes the student's loss.
        """
        exact = accumulate_in(logits)
        scaled = logits.to(exact).div_(self.temperature)
        scaled.clamp_(min=lowest(exact))
        return scaled.sub_(lse[:, None])

    def back(self, grad: Tensor) -> Tensor:
        """Return the hidden states' gradient `[C, H]` from the logits' `[C, width]`, of this rank's columns only.

        The caller sums it over ranks, once for all chunks.
        """
        return grad.to(self.weight.dtype) @ self.weight

    def sum(self, x: Tensor) -> Tensor:
        """Sum `x` over the ranks, in place, and return it. Collective."""
        if self.group is not None:
            dist.all_reduce(x, group=self.group)
        return x

    def max(self, x: Tensor) -> Tensor:
        """Return the largest of `x` over the ranks, elementwise; `x` stays as it is. Collective.

        Without a group the result is `x` itself, not a copy.
        """
        if self.group is not None:
            x = x.clone()
            dist.all_reduce(x, dist.ReduceOp.MAX, group=self.group)
        return x

    def log_sum_exp(self, scores: Tensor) -> Tensor:
        """Return log Σ exp of `scores [C, width]` over the whole vocabulary, `[C]`. Collective."""
        lse = scores.logsumexp(-1)
        if self.group is None:
            return lse
        top = self.max(lse)
        relative = (lse - top).exp_()  # at most 1, so no sum overflows
        return top + self.sum(relative).log_()

    def ids_of(self, columns: Tensor) -> Tensor:
        """Return the token ids of this rank's `columns`, of any shape."""
        return columns + self.start

    def argmax(self, scores: Tensor) -> Tensor:
        """Return the ids `[C]` of the largest `scores [C, width]`; of equal scores the lowest id. Collective."""
        value, column = scores.max(-1)
        return self.best(value, self.ids_of(column))

    def sample(
        self,
        logprobs: Tensor,
        seeds: Tensor,
        keys: Tensor,
        factors: Sequence[float],
    ) -> Tensor:
        """Return the ids `[C, F]` of the largest factor · log-probability + noise, for each of F factors. Collective.

        logprobs     `[C, width]`
        seeds, keys  `[C]` int64, as for `noise.draw`: the noise depends on the token id, not on the rank that has it
        """
        all_columns = torch.arange(self.width, device=logprobs.device)
        ids = self.ids_of(all_columns)
        columns = draw_each(logprobs, seeds, keys, factors, ids)
        best = ids[columns]
        if self.group is None:
            return best
        # `draw_each` returns no scores: compute those of each rank's best again, to compare them.
        scaled = logprobs.gather(1, columns) * logprobs.new_tensor(factors)
        value = noisy(scaled, seeds, keys, best)
        return self.best(value, best)

    def best(self, value: Tensor, ids: Tensor) -> Tensor:
        """Return the ids of the largest values over all ranks, elementwise; of equal values the lowest id. Collective.

        value, ids  of one shape: this rank's largest value, and its id
        """
        if self.group is not None:
            # `total` is above every id, so the minimum takes the ids of ranks that have the largest value.
            ids = ids.masked_fill(value < self.max(value), self.total)
            dist.all_reduce(ids, dist.ReduceOp.MIN, group=self.group)
        return ids

    def pick(self, x: Tensor, ids: Tensor) -> Tensor:
        """Return `x [C, width]` at `ids [C]`, `[C]`; 0 where another rank holds the id.

        So `sum` of the result is the value on every rank.
        """
        local, mine = self._local(ids)
        values = x.gather(1, local[:, None])[:, 0]
        return values.masked_fill_(~mine, 0)

    def places(self, ids: Tensor) -> Tensor:
        """Return this rank's columns of `ids [C]`; -1 where another rank holds the id."""
        local, mine = self._local(ids)
        return local.masked_fill_(~mine, -1)

    def add_at(self, x: Tensor, ids: Tensor, values: Tensor) -> Tensor:
        """Add `values [C]` to `x [C, width]`, in place, at the `ids [C]` that this rank holds. Returns `x`."""
        local, mine = self._local(ids)
        own_values = values.masked_fill(~mine, 0)
        return x.scatter_add_(1, local[:, None], own_values[:, None])

    def whole(self, x: Tensor) -> Tensor:
        """Gather the columns of `x [C, width]` of all ranks: `[C, V]`. Collective.

        Without a group the result is `x` itself, not a copy. Not for a `DraftHead`: its `width` differs
        between ranks, and `all_gather` needs equal shapes.
        """
        if self.group is None:
            return x
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.group.size())]
        dist.all_gather(parts, x, group=self.group)
        return torch.cat(parts, 1)

    def share(self, x: Tensor) -> Tensor:
        """Return this rank's columns `[C, width]` of `x [C, V]`; the inverse of `whole`.

        Not for a `DraftHead` either: its words are not consecutive, so this slice would be of other words, without an
        error.
        """
        return x[:, self.start : self.start + self.width]

    def _local(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the columns of `ids [C]`, and whether this rank holds the id; if not, the column is any valid one."""
        local = ids - self.start
        mine = (local >= 0) & (local < self.width)
        return local.masked_fill_(~mine, 0), mine


@dataclass(frozen=True, kw_only=True)
class DraftHead(VocabParallelHead):
    """The output layer over the draft vocabulary: the words S that drafts are chosen from (FR-Spec, arXiv 2502.14856).

    A rank computes the words that lie in its share of the policy's vocabulary, so `width` differs between ranks.

    ids      `[width]` int64: the token ids of this rank's words, ascending; [-1] on a rank that holds none of them
    columns  `[width]` int64: the column of each of `ids` in the logits of this rank's head over the whole vocabulary;
             [0] on a rank that holds none of the words
    some     bool: this rank holds at least one word. If False, `width` is 1: the one row of `weight` is a stand-in,
             whose probability must be 0 and whose gradient must stay 0
    own      if the drafter has an output layer of its own (EAGLE-3): the slice of its rows that this rank computes.
             `Student` adds their gradient there. None: the rows are the policy's

    Methods take and return ids of the whole vocabulary. A label outside S counts as one that another rank holds. So
    `pick` is 0 for it on all ranks.
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
        """Make the head over `words [S]`, different ids in any order, the same on all ranks.

        Raises ValueError for ids outside the vocabulary, and for no words.

        full  the head over the whole vocabulary, of the policy
        own   `[S, H]`, whole on every rank: the drafter's own rows, in the order of ascending words (EAGLE-3)

        With `words` on the CPU, the host does not wait for a GPU.
        """
        words = words.cpu().sort().values  # ascending, because `_local` searches in them
        first_word = int(words[0]) if len(words) else -1
        if first_word < 0 or int(words[-1]) >= full.total:
            raise ValueError(
                f"draft vocabulary: expected ids from 0 to {full.total - 1}, at least one"
            )
        mine = (words >= full.start) & (words < full.start + full.width)
        ids = words[mine]
        some = bool(len(ids))
        first = 0
        if some:
            first = int(torch.searchsorted(words, full.start))  # lower ranks hold the words before
            columns = ids - full.start
        else:
            # A head needs a row: this one is the policy's row of column 0, or row 0 of `own`. `_scaled_logits` and
            # `of_full` replace its values by very low ones; `FusedRows` skips it.
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
        """Return `[C]`: 1.0 where a label is one of the words of any rank, else 0.0. Collective.

        Each word is on one rank only, so the sum over ranks is at most 1.
        """
        _, mine = self._local(labels)
        in_words = mine.to(accumulate_in(self.weight))
        return self.sum(in_words)

    def ids_of(self, columns: Tensor) -> Tensor:
        return self.ids[columns]

    def of_full(self, x: Tensor) -> Tensor:
        """Return the columns `[C, width]` of this rank's words, of the full head's log-probabilities `x [C, V/tp]`."""
        logprobs = x.index_select(1, self.columns)
        if not self.some:
            logprobs.fill_(lowest(logprobs.dtype))
        return logprobs

    def _scaled_logits(self, hidden: Tensor) -> Tensor:
        logits = super()._scaled_logits(hidden)
        if not self.some:
            logits.fill_(lowest(logits.dtype))
        return logits

    def _local(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        local = torch.searchsorted(self.ids, ids)
        local.clamp_(max=self.width - 1)  # `searchsorted` returns `width` for ids above all words
        return local, self.ids[local] == ids  # the id -1 of a stand-in equals no token id


def accumulate_in(x: Tensor) -> torch.dtype:
    """Return the type for arithmetic on the logits of `x`: float64 for float64, else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def lowest(dtype: torch.dtype) -> float:
    """Return a replacement for minus infinity in logits: its exponential is 0.

    It is a quarter of the lowest number, so that sums and differences of two of them do not overflow. `LOWEST` in
    `kernels/loss_passes.py` is nearly the same number.
    """
    return torch.finfo(dtype).min / 4
