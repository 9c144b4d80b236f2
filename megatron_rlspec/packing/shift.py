"""Left shifts over packed sequences; inputs, labels and masks of each drafter depth.

At position t, depth d of the drafter (1, 2, ...) reads token t + d and predicts token t + 1 + d. With a token-aligned
loss mask m, depth d is trained at t only if m is 1 on all of t + 1, ..., t + 1 + d and these tokens are in one
sequence: an engine would generate all of them within one draft. m at t itself does not matter.

A whole batch is shifted before it is split for context parallelism. For a batch that is already split, and for hidden
states, `RollPlan` fetches the tokens beyond the edges of this rank's chunks in one exchange.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from megatron_rlspec.packing.context_parallel import Layout, cp_index


def shift_packed(x: torch.Tensor, cu_seqlens: torch.Tensor, steps: int = 1, fill: float = 0) -> torch.Tensor:
    """Return `out[..., t] = x[..., t + steps]` where t + steps is in t's sequence, else `fill`; x `[..., T]`.

    `cu_seqlens [n + 1]` holds the boundaries, with padding if sequences are padded. Positions past its last entry
    belong to no sequence. Differentiable in `x`. Does not synchronise with the device. Raises ValueError for negative
    `steps`.
    """
    if steps < 0:
        raise ValueError(f"steps={steps}, but the shift is to the left: steps >= 0")
    t = torch.arange(x.shape[-1], device=cu_seqlens.device)
    return x.roll(-steps, -1).masked_fill(t + steps >= _ends(cu_seqlens, x.shape[-1]), fill)


def drafter_targets(
    tokens: torch.Tensor, mask: torch.Tensor, cu_seqlens: torch.Tensor | RollPlan, depth: int
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """Return inputs, labels and loss masks of depths 1..depth, from token-aligned `tokens [T]` and `mask [T]`.

    Entry d - 1 of the three lists, all `[T]`: token t + d (the input), token t + 1 + d (the label), and 1 in the mask's
    type where that label is trained. Beyond a sequence's end all three are 0. For a batch that is already split, give
    its `RollPlan` with `steps > depth` instead of the boundaries.
    """
    if isinstance(cu_seqlens, RollPlan):
        shifted = cu_seqlens.roll_each([tokens, mask], depth + 1)
    else:
        shifted = [[shift_packed(x, cu_seqlens, steps) for x in (tokens, mask)] for steps in range(1, depth + 2)]
    trained = shifted[0][1] != 0
    masks = []
    for _, ahead in shifted[1:]:
        trained = trained & (ahead != 0)
        masks.append(trained.to(mask.dtype))
    inputs = [shifted_tokens for shifted_tokens, _ in shifted[:-1]]
    labels = [shifted_tokens for shifted_tokens, _ in shifted[1:]]
    return inputs, labels, masks


class RollPlan:
    """Left shifts of a batch that is split over context-parallel ranks.

    The constructor makes index tables; each use is one exchange. A use sends at most one message to each rank and
    receives at most one from it, for any number of sequences and tensors and any `steps`. If chunks have at least
    `steps` tokens, a rank exchanges with its neighbours only. The constructor reads `cu_seqlens_padded [n + 1]` on the
    host; a use does not synchronise with the device. Every rank of `group` must make the same uses in the same order,
    and must run the backward of those that are differentiated.

    steps   the largest shift
    device  of the tensors to shift; the boundaries' device if omitted

    Raises ValueError for `steps` below 1.
    """

    def __init__(
        self,
        cu_seqlens_padded: torch.Tensor,
        rank: int = 0,
        size: int = 1,
        layout: Layout = "zigzag",
        *,
        steps: int = 1,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        if steps < 1:
            raise ValueError(f"steps={steps}, but a plan shifts by at least 1")
        device = cu_seqlens_padded.device if device is None else device
        cu = cu_seqlens_padded.cpu()
        held = [cp_index(cu, peer, size, layout) for peer in range(size)]
        self.length = len(held[rank])
        self.steps = steps
        self._group = group
        total = size * self.length
        ends = _ends(cu, total)
        owner = torch.empty(total, dtype=torch.int64)
        local = torch.empty(total, dtype=torch.int64)
        for peer, index in enumerate(held):
            owner[index] = peer
            local[index] = torch.arange(self.length)

        wanted = [_beyond_edges(index, local, ends, owner, peer, steps) for peer, index in enumerate(held)]
        sends = [positions[owner[positions] == rank] for positions in wanted]
        mine = wanted[rank][owner[wanted[rank]].argsort(stable=True)]
        self._send_counts = [len(positions) for positions in sends]
        self._receive_counts = owner[mine].bincount(minlength=size).tolist()
        self._ranks = [peer if group is None else dist.get_global_rank(group, peer) for peer in range(size)]
        self._rank = rank
        self._send = local[torch.cat(sends)].to(device)

        # Index of each shift's source in [local tokens | halo], or -1 beyond the end of the sequence.
        slot = torch.where(owner == rank, local, -1)
        slot[mine] = self.length + torch.arange(len(mine))
        self._edge = []
        self._edge_source = []
        self._end = []
        self._index = []
        t = torch.arange(self.length)
        for step in range(1, steps + 1):
            source = held[rank] + step
            inside = source < ends[held[rank]]
            source = torch.where(inside, slot[source.clamp(max=total - 1)], t)
            edge = (inside & (source >= self.length)).nonzero().squeeze(1)
            self._edge.append(edge.to(device))
            self._edge_source.append((source[edge] - self.length).to(device))
            self._end.append((~inside).nonzero().squeeze(1).to(device))
            self._index.append(source.to(device))

    def index(self, steps: int) -> torch.Tensor:
        """Return `[T / size]`, the index of t + steps in [local tokens | halo]; t beyond the sequence's end."""
        return self._index[self._checked(steps) - 1]

    def halo(self, tensors: Sequence[torch.Tensor], dim: int | Sequence[int] = -1) -> list[torch.Tensor]:
        """Fetch from other ranks the entries of each tensor that shifts up to `steps` need.

        `dim` is the dimension of the tokens, one for all tensors or one each. Its size must be T / size, or ValueError
        is raised. Any dtype. Differentiable for floating point: gradients go back to the ranks of the entries.
        """
        dims = [dim] * len(tensors) if isinstance(dim, int) else list(dim)
        for x, d in zip(tensors, dims, strict=True):
            if x.shape[d] != self.length:
                raise ValueError(f"dimension {d} of {list(x.shape)} should be {self.length}, this rank's packed tokens")
        rows = [x.index_select(d, self._send).movedim(d, 0) for x, d in zip(tensors, dims, strict=True)]
        return [x.movedim(0, d) for x, d in zip(_Exchange.apply(self, *rows), dims, strict=True)]

    def roll(
        self, tensors: Sequence[torch.Tensor], steps: int = 1, dim: int | Sequence[int] = -1
    ) -> list[torch.Tensor]:
        """Shift each tensor left by `steps` within its sequences, with 0 beyond their ends."""
        dims = [dim] * len(tensors) if isinstance(dim, int) else list(dim)
        halos = self.halo(tensors, dims)
        return [self._shift(x, halo, self._checked(steps), d) for x, halo, d in zip(tensors, halos, dims, strict=True)]

    def roll_each(
        self, tensors: Sequence[torch.Tensor], steps: int, dim: int | Sequence[int] = -1
    ) -> list[list[torch.Tensor]]:
        """Shift by 1, 2, ..., steps with one exchange: entry s - 1 holds all tensors shifted by s."""
        dims = [dim] * len(tensors) if isinstance(dim, int) else list(dim)
        halos = self.halo(tensors, dims)
        shifted = []
        for step in range(1, self._checked(steps) + 1):
            shifted.append([self._shift(x, halo, step, d) for x, halo, d in zip(tensors, halos, dims, strict=True)])
        return shifted

    def _shift(self, x: torch.Tensor, halo: torch.Tensor, steps: int, dim: int) -> torch.Tensor:
        """Roll, then correct the positions at chunk edges and sequence ends."""
        out = x.roll(-steps, dim).index_fill_(dim, self._end[steps - 1], 0)
        return out.index_copy_(dim, self._edge[steps - 1], halo.index_select(dim, self._edge_source[steps - 1]))

    def _checked(self, steps: int) -> int:
        if not 1 <= steps <= self.steps:
            raise ValueError(f"a shift by {steps}, but this plan shifts by 1 to {self.steps}")
        return steps

    def _transfer(self, tensors: list[torch.Tensor], back: bool) -> list[torch.Tensor]:
        """Send rows `[sent, ...]`, grouped by receiver; return rows `[received, ...]`, grouped by sender.

        `back` exchanges the roles of senders and receivers. All tensors go as bytes in one message per peer:
        `[rows, bytes of one row of every tensor]`.
        """
        send_counts = self._receive_counts if back else self._send_counts
        receive_counts = self._send_counts if back else self._receive_counts
        widths = [math.prod(x.shape[1:]) * x.element_size() for x in tensors]
        sent = torch.empty(sum(send_counts), sum(widths), dtype=torch.uint8, device=tensors[0].device)
        received = torch.empty(sum(receive_counts), sum(widths), dtype=torch.uint8, device=tensors[0].device)
        for part, x in zip(sent.split(widths, 1), tensors, strict=True):
            part.copy_(_bytes(x.clone(memory_format=torch.contiguous_format)))
        operations = []
        messages = zip(sent.split(send_counts), received.split(receive_counts), strict=True)
        for peer, (message, answer) in enumerate(messages):
            if peer == self._rank:
                answer.copy_(message)
                continue
            if len(message):
                operations.append(dist.P2POp(dist.isend, message, self._ranks[peer], self._group))
            if len(answer):
                operations.append(dist.P2POp(dist.irecv, answer, self._ranks[peer], self._group))
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
        rows = [x.new_empty(len(received), *x.shape[1:]) for x in tensors]
        for part, x in zip(received.split(widths, 1), rows, strict=True):
            _bytes(x).copy_(part)
        return rows


class _Exchange(torch.autograd.Function):
    """`RollPlan._transfer`; the backward sends gradients the other way."""

    @staticmethod
    def forward(ctx, plan, *rows):
        ctx.plan = plan
        received = plan._transfer(list(rows), back=False)
        ctx.mark_non_differentiable(*[x for x in received if not x.is_floating_point()])
        return tuple(received)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        wanted = [i for i, needed in enumerate(ctx.needs_input_grad[1:]) if needed]
        out: list[torch.Tensor | None] = [None] * len(grads)
        for i, grad in zip(wanted, ctx.plan._transfer([grads[i] for i in wanted], back=True), strict=True):
            out[i] = grad
        return None, *out


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """View contiguous `[rows, ...]` as `[rows, bytes of a row]`."""
    return x.view(len(x), math.prod(x.shape[1:])).view(torch.uint8)


def _ends(cu_seqlens: torch.Tensor, total: int) -> torch.Tensor:
    """Return `[total]`, the end of each position's sequence; 0 for positions in no sequence."""
    ends = cu_seqlens[1:].long()
    sequence = torch.searchsorted(ends, torch.arange(total, device=ends.device), right=True)  # skips empty sequences
    return torch.cat([ends, ends.new_zeros(1)])[sequence]


def _beyond_edges(
    held: torch.Tensor, local: torch.Tensor, ends: torch.Tensor, owner: torch.Tensor, rank: int, steps: int
) -> torch.Tensor:
    """Return the ascending global positions that shifts by 1..steps read beyond the edges of the rank's chunks."""
    found = []
    t = torch.arange(len(held))
    for step in range(1, steps + 1):
        source = held + step
        inside = source < ends[held]
        safe = source.clamp(max=len(owner) - 1)
        found.append(source[inside & ((owner[safe] != rank) | (local[safe] != t + step))])
    return torch.cat(found).unique()
