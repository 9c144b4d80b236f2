"""KV slots, one per token: which row or prefix holds which, and their tensors.

A slot holds, for one token at position p, the target's keys and values of that token, the target's hidden state h_p,
and the drafter's keys and values of the pair (h_{p-1}, x_p), which stands at rotary position p - 1. So everything
about the prompt but its last token is common to a GRPO group and is held once. The last committed token of a sample
is always *pending*: drawn, but not yet through the target; every round verifies it together with the drafts.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from megatron_rlspec.engine import EngineError
from megatron_rlspec.rollout.embedded.model import Decoder, Placement


class TreeColumns(NamedTuple):
    """Columns of a draft tree: B samples, T queries each, E columns in flight."""

    start: torch.Tensor  # [B] the first column in flight
    ancestors: torch.Tensor  # [B, T, E] bool: what each query sees of those
    depth: torch.Tensor  # [B, T] position of each query, counted from `start`


class Prefix:
    """A prompt without its last token, shared by all running samples that start with it."""

    def __init__(self, key: bytes, tokens: np.ndarray, slots: np.ndarray) -> None:
        self.key, self.tokens, self.slots = key, tokens, slots
        self.users = 0
        self.computed = 0  # columns [0, computed) hold the target's keys
        self.drafted = 1  # columns [1, drafted) hold the drafter's; column 0 has no pair


class Cache:
    """Rows of running samples (token ids and slots by column) over one pool of slots.

    Column c of a row is position c of the sample; columns from the sample's length on are scratch for drafts.
    """

    def __init__(self, model: Decoder, rows: int, columns: int, slots: int, share_prefix: bool) -> None:
        self.model, self.total, self.columns, self.share_prefix = model, slots, columns, share_prefix
        self.free = np.arange(slots)[::-1].copy()  # a stack: free[:left] are free
        self.left = slots
        self.free_rows = list(range(rows))[::-1]
        self.prefixes: dict[bytes, Prefix] = {}
        self.prefix: dict[int, Prefix] = {}  # of the rows that are taken
        self.tokens = np.zeros((rows, columns), np.int64)
        self.slots = np.zeros((rows, columns), np.int64)
        self.length = np.zeros(rows, np.int64)  # committed tokens, the pending one included
        self.computed = np.zeros(rows, np.int64)
        self.drafted = np.zeros(rows, np.int64)
        self.held = np.zeros(rows, np.int64)  # columns backed by a slot
        arch, device = model.arch, model.device
        shape = (slots, 2 * model.kv_heads, arch.head_dim)  # keys, then values; the drafter's layer comes last
        self.kv = [torch.zeros(shape, dtype=model.dtype, device=device) for _ in range(arch.layers + arch.mtp)]
        self.hidden = torch.zeros((slots, arch.hidden), dtype=model.dtype, device=device)

    def take(self, count: int) -> np.ndarray | None:
        """`count` slots, or None when fewer are free."""
        if count > self.left:
            return None
        self.left -= count
        return self.free[self.left : self.left + count].copy()

    def give(self, slots: np.ndarray) -> None:
        self.free[self.left : self.left + len(slots)] = slots
        self.left += len(slots)

    def open(self, tokens: np.ndarray, prompt_len: int) -> int | None:
        """A row for a sample of these tokens, with slots for its prefix; None when rows or slots are lacking."""
        if not self.free_rows:
            return None
        shared = np.asarray(tokens[: prompt_len - 1], np.int64)
        row = self.free_rows[-1]
        key = shared.tobytes() if self.share_prefix else row.to_bytes(8)
        prefix = self.prefixes.get(key)
        if prefix is None:
            slots = self.take(len(shared))
            if slots is None:
                return None
            prefix = self.prefixes[key] = Prefix(key, shared, slots)
        prefix.users += 1
        self.free_rows.pop()
        self.prefix[row] = prefix
        self.tokens[row, : len(tokens)] = tokens
        self.slots[row, : len(shared)] = prefix.slots
        self.length[row] = len(tokens)
        self.held[row] = self.computed[row] = len(shared)
        self.drafted[row] = max(len(shared), 1)
        return row

    def back(self, row: int, columns: int, spare: int = 16) -> bool:
        """Give columns [0, columns) of a row slots, and `spare` more if there are enough. Returns whether it could."""
        lack = columns - int(self.held[row])
        if lack <= 0:
            return True
        spare = min(spare, self.columns - columns)
        slots = self.take(lack + spare)
        if slots is None:
            slots = self.take(lack)
        if slots is None:
            return False
        held = int(self.held[row])
        self.slots[row, held : held + len(slots)] = slots
        self.held[row] += len(slots)
        return True

    def commit(self, row: int, tokens: np.ndarray, path: np.ndarray, nodes: int) -> None:
        """Append tokens [a + 1] that followed the nodes `path [a + 1]` of the `nodes` verified; node 0 was pending.

        Nothing is copied: the slots of the accepted nodes are renumbered, the others' become scratch again.
        """
        length, count = int(self.length[row]), len(path)
        if path[-1] != count - 1:
            slots = self.slots[row, length - 1 : length - 1 + nodes]
            slots[:] = np.concatenate([slots[path], np.delete(slots, path)])
        self.tokens[row, length : length + count] = tokens
        self.computed[row] = length + count - 1
        self.length[row] = length + count

    def close(self, row: int) -> None:
        """Give back a row and the slots that only it holds."""
        prefix = self.prefix.pop(row)
        first = len(prefix.tokens)
        self.give(self.slots[row, first : self.held[row]])
        prefix.users -= 1
        if not prefix.users:
            self.give(prefix.slots)
            del self.prefixes[prefix.key]
        self.held[row] = self.length[row] = 0
        self.free_rows.append(row)

    def audit(self) -> None:
        """Check that every slot is free or held by exactly one row or prefix. Raises EngineError."""
        held = [p.slots for p in self.prefixes.values()]
        for row, prefix in self.prefix.items():
            held.append(self.slots[row, len(prefix.tokens) : self.held[row]])
        owned = np.concatenate([self.free[: self.left], *held])
        if len(owned) != self.total or len(np.unique(owned)) != self.total:
            raise EngineError(
                f"KV accounting: {self.left} free + {len(owned) - self.left} used slots, "
                f"{len(np.unique(owned))} distinct, expected {self.total}"
            )

    def clear(self) -> None:
        """Zero the contents: NaN that broken weights left behind would pass through a masked key as NaN × 0."""
        for tensor in (self.hidden, *self.kv):
            tensor.zero_()

    def plan(
        self,
        read: torch.Tensor,
        columns: torch.Tensor,
        *,
        drafter: bool = False,
        valid: np.ndarray | None = None,
        tree: TreeColumns | None = None,
    ) -> Placement:
        """Plan a forward over columns [B, T] of B samples whose columns [0, L) lie in the slots `read [B, L]`.

        Without a `tree` attention is causal over columns. With it, queries see columns below `tree.start` and those of
        the E in-flight columns from there on that their row of `tree.ancestors` marks; `tree.depth` counts positions
        from `tree.start`. The drafter's pairs stand one position earlier, from column 1.
        """
        length = read.shape[1]
        keys = torch.arange(length, device=read.device)
        if tree is None:
            seen, positions = keys <= columns[:, :, None], columns
        else:
            start = tree.start[:, None]
            seen = (keys < start[:, None]).expand(-1, columns.shape[1], -1)
            inflight = start + torch.arange(tree.ancestors.shape[2], device=read.device)
            seen = seen.scatter(2, inflight[:, None].expand_as(tree.ancestors), tree.ancestors)
            positions = start + tree.depth
        if drafter:
            seen, positions = seen & (keys > 0), positions - 1
        group = self.model.heads // self.model.kv_heads
        mask = torch.zeros(seen.shape, dtype=self.model.dtype, device=read.device).masked_fill_(~seen, float("-inf"))
        mask = mask.repeat_interleave(group, 1)[:, None] if group > 1 else mask[:, None]
        write, place = read.gather(1, columns).view(-1), None
        positions = positions.reshape(-1)
        if valid is not None and not valid.all():
            place = torch.from_numpy(np.flatnonzero(valid)).to(read.device)
            write, positions = write[place], positions[place]
        positions = positions.clamp_(min=0)
        return Placement(
            self.model.cos[positions], self.model.sin[positions], write, read.reshape(-1), mask, place, positions == 0
        )
