"""The KV cache of an embedded engine: one slot per token, and the rows and prefixes that hold the slots.

The slot of a token x_p at position p stores

* the target's keys and values of x_p,
* what the drafter reads of the target: its hidden state h_p, or for EAGLE-3 the inputs of n layers,
* the drafter's keys and values of the pair (h_{p-1}, x_p), which has rotary position p - 1.

The last committed token of a sample is *pending*: it is known, but the target has not run on it yet. Every round runs
the target on it, together with the drafts. A GRPO group shares the slots of its prompt, except that of the prompt's
last token: this token is the first pending token of each sample.

`scheduler.py` opens and closes rows, and `rounds.py` reads and advances them. `move.py` and `retile.py` in
`extensions/migration/embedded/` also read and write these fields. Only one thread at a time may use a cache: nothing
here takes a lock.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from megatron_rlspec.rollout.embedded.model import Decoder, ForwardPlan

SPARE = 16  # columns that get slots before they are needed, so that few rounds have to take slots


class Prefix:
    """A prompt without its last token, shared by all rows of that prompt. `Cache` counts these rows in `users`.

    key     the bytes of `tokens`: the prefix's key in `Cache.prefixes`
    tokens  [P - 1] int64, for a prompt of P tokens
    slots   [P - 1] int64, the slot of each token
    """

    def __init__(self, key: bytes, tokens: np.ndarray, slots: np.ndarray) -> None:
        self.key = key
        self.tokens = tokens
        self.slots = slots
        self.users = 0  # rows that share it; at 0 the slots become free
        self.computed = 0  # columns [0, computed) hold the target's keys
        self.drafted = 1  # columns [1, drafted) hold the drafter's keys; column 0 has no pair


class Cache:
    """Rows of running samples, with token ids and slots by column, over one pool of slots.

    Column c of a row is position c of the sample. Columns after the sample's last token are scratch space for drafts:
    their keys may be old, and masks hide them.

    rows     how many samples can have a row at once
    columns  of a row: tokens of the longest sample, and drafts behind them
    kv       one tensor [slots, 2 * K, D] for each layer: keys, then values. The drafter's layers follow the target's
    hidden   [slots, `Architecture.drafter_input_width`], what the drafter reads of the target
    left     number of free slots
    total    number of all slots
    """

    def __init__(self, model: Decoder, rows: int, columns: int, slots: int) -> None:
        self.model = model
        self.rows = rows
        self.columns = columns
        self.reset(slots)
        arch = model.arch
        device = model.device
        shape = (slots, 2 * model.kv_heads, arch.head_dim)
        self.kv = []
        for _ in range(arch.layers + arch.draft_layers):
            self.kv.append(torch.zeros(shape, dtype=model.dtype, device=device))
        self.hidden = torch.zeros(
            (slots, arch.drafter_input_width), dtype=model.dtype, device=device
        )

    def reset(self, slots: int) -> None:
        """Forget all rows. The pool has `slots` slots from now on, all of them free.

        It leaves `kv` and `hidden` as they are. A caller that changes the number of slots replaces them (`retile.py`).
        """
        rows = self.rows
        columns = self.columns
        self.total = slots
        self.free = np.arange(slots)[::-1].copy()  # a stack: free[:left] are the free slots
        self.left = slots
        self.free_rows = list(range(rows))[::-1]
        self.prefixes: dict[bytes, Prefix] = {}
        self.prefix: dict[int, Prefix] = {}  # by row, of the rows in use
        self.tokens = np.zeros((rows, columns), np.int64)
        self.slots = np.zeros((rows, columns), np.int64)
        self.length = np.zeros(rows, np.int64)  # committed tokens, the pending one included
        # Columns with keys, as in `Prefix`. The row's own begin behind its prefix, so both numbers are at least the
        # prefix's length, even while the prefix itself is not computed: ask the `Prefix` for that.
        self.computed = np.zeros(rows, np.int64)
        self.drafted = np.zeros(rows, np.int64)
        self.slotted = np.zeros(rows, np.int64)  # columns [0, slotted) have a slot

    def take(self, count: int) -> np.ndarray:
        """Take `count` free slots, [count] int64. The caller has checked that `left` is not less."""
        self.left -= count
        # a copy, because `give` overwrites this part of the stack
        return self.free[self.left : self.left + count].copy()

    def give(self, slots: np.ndarray) -> None:
        """Make slots free again, each of them taken and given once: a slot given twice would go to two tokens."""
        self.free[self.left : self.left + len(slots)] = slots
        self.left += len(slots)

    def open(self, tokens: np.ndarray, prompt_len: int, columns: int = 0) -> int | None:
        """Take a row for a sample of these tokens [L], of which `prompt_len` are the prompt's. Returns its number.

        The row gets the slots of its prefix, and slots for columns [0, `columns`). Returns None, and takes nothing, if
        a row or slots are lacking. `prompt_len` is at least 1, and the sample fits into the columns of a row:
        `Scheduler.check` and `ActiveRequest.limit` see to that. Before its first round the row needs
        `RoundRunner.seat`.
        """
        if not self.free_rows:
            return None
        shared = np.asarray(tokens[: prompt_len - 1], np.int64)
        row = self.free_rows[-1]
        key = shared.tobytes()
        prefix = self.prefixes.get(key)
        if prefix is None:
            if len(shared) > self.left:
                return None
            prefix = self.prefixes[key] = Prefix(key, shared, self.take(len(shared)))
        prefix.users += 1
        self.free_rows.pop()
        self.prefix[row] = prefix
        self.tokens[row, : len(tokens)] = tokens
        self.slots[row, : len(shared)] = prefix.slots
        self.length[row] = len(tokens)
        self.slotted[row] = self.computed[row] = len(shared)
        self.drafted[row] = max(len(shared), 1)  # column 0 has no pair
        if not self.ensure_slots(row, columns):
            self.close(row)  # undoes all of the above
            return None
        return row

    def ensure_slots(self, row: int, columns: int) -> bool:
        """Give slots to columns [0, columns) of a row, and to up to SPARE more as far as slots are free.

        Columns that have a slot keep it. Returns False if too few slots are free; the row is then unchanged.
        """
        first = int(self.slotted[row])
        missing = columns - first
        if missing <= 0:
            return True
        spare = min(SPARE, self.columns - columns, self.left - missing)
        if spare < 0:  # `left` is less than `missing`: `columns` never exceeds `self.columns`
            return False
        slots = self.take(missing + spare)
        last = first + len(slots)
        self.slots[row, first:last] = slots
        self.slotted[row] = last
        return True

    def commit(self, rows: np.ndarray, tokens: np.ndarray, accepted: np.ndarray) -> None:
        """Append to each row the first `accepted [B]` + 1 of the target's tokens [B, 1 + k]. The last one is pending.

        Accepted drafts equal these tokens, so the verify pass has already written their keys. Keys of refused drafts
        stay in the slots behind; masks hide them until a later pass overwrites them. The rows must be different ones.
        """
        length = self.length[rows]
        index = np.arange(tokens.shape[1])
        committed = index <= accepted[:, None]
        columns = length[:, None] + index
        # row after row, the order of `tokens[committed]`
        row_of_token = np.repeat(rows, accepted + 1)
        self.tokens[row_of_token, columns[committed]] = tokens[committed]
        self.computed[rows] = length + accepted
        self.length[rows] = length + accepted + 1

    def close(self, row: int) -> None:
        """Make a row in use free again, and the slots that no other row shares. Once for each `open`."""
        prefix = self.prefix.pop(row)
        first = len(prefix.tokens)
        self.give(self.slots[row, first : self.slotted[row]])
        prefix.users -= 1
        if not prefix.users:
            self.give(prefix.slots)
            del self.prefixes[prefix.key]
        self.slotted[row] = self.length[row] = 0
        self.free_rows.append(row)

    def clear(self) -> None:
        """Zero keys, values and hidden states. Call it while no row is in use: rows would go on with wrong keys.

        New weights need it: a NaN that bad weights left in a masked value would spread, because NaN × 0 is NaN.
        """
        for tensor in (self.hidden, *self.kv):
            tensor.zero_()

    def plan(
        self,
        read: Tensor,
        columns: Tensor,
        *,
        drafter: bool = False,
        valid: np.ndarray | None = None,
    ) -> ForwardPlan:
        """Plan a forward over columns [B, T] of B samples. Their columns [0, L) are in the slots `read [B, L]`.

        Attention is causal over columns: a token sees the keys of its own column and of those before it.

        columns  int64, each below L; padding repeats any valid column of its row
        drafter  the forward is the drafter's: positions are one less, and column 0 is masked, because it has no pair.
                 All columns are then at least 1
        valid    [B, T], which columns are not padding; None: all. The N tokens of the forward are the valid ones, row
                 after row: the caller selects token ids with the same `valid`
        """
        length = read.shape[1]
        keys = torch.arange(length, device=read.device)
        seen = keys <= columns[:, :, None]
        positions = columns
        if drafter:
            seen = seen & (keys > 0)
            positions = positions - 1
        mask = torch.zeros(seen.shape, dtype=self.model.dtype, device=read.device)
        mask.masked_fill_(~seen, float("-inf"))
        group = self.model.heads // self.model.kv_heads
        # Row t * group + g of the mask is for query head g of token t: the order of queries in `Decoder._attend`.
        if group > 1:
            mask = mask.repeat_interleave(group, 1)
        write = read.gather(1, columns).view(-1)
        padded_index = None
        positions = positions.reshape(-1)
        if valid is not None and not valid.all():
            padded_index = torch.from_numpy(np.flatnonzero(valid)).to(read.device)
            write = write[padded_index]
            positions = positions[padded_index]
        # Column 0 of a drafter would index the last row of `cos`. In place: no column is negative, so none changes.
        positions = positions.clamp_(min=0)
        return ForwardPlan(
            self.model.cos[positions],
            self.model.sin[positions],
            write,
            read.reshape(-1),
            mask[:, None],
            padded_index,
            positions == 0,
        )
