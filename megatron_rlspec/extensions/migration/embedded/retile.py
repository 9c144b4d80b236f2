"""Change the tensor-parallel size of embedded engines between two rounds: weights and KV caches move between ranks.

Source: PAT, section 4.3. No file is read. Weights are gathered one parameter after the other, and caches layer by
layer, on the ranks that need them; each rank keeps its part. The shards lie as in PAT: at size t, rank r holds shard
r mod t, in the order of heads.

`regroup.py` calls `retile` on all ranks. Every rank makes the same collective calls in the same order, also for rows
that it does not hold: all ranks of a wide group must be given equal `rows`. `rollout/embedded/cache.py` defines the
cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rlspec.extensions.migration.embedded.groups import Groups
from megatron_rlspec.rollout.embedded.cache import Cache
from megatron_rlspec.rollout.embedded.model import Decoder, Parameter
from megatron_rlspec.rollout.embedded.parallel import TensorParallel

# rows of the arrays of `_moving`
COLUMN, DRAFTED_END, OLD_SLOT, NEW_SLOT = range(4)


class Switch:
    """A change of the tensor-parallel size from `old` to `new`, seen from one rank.

    before  this rank's group of `old` ranks
    after   its group of `new` ranks
    wide    its group of the larger size. Nothing moves between wide groups. A wide group holds `wide.size / old`
            groups before the change and `wide.size / new` after it

    One of the sizes divides the other, and both divide the job.
    """

    def __init__(self, groups: Groups, old: int, new: int) -> None:
        assert max(old, new) % min(old, new) == 0, f"{old} and {new}: neither divides the other"
        self.old = old
        self.new = new
        self.before = groups.of(old)
        self.after = groups.of(new)
        self.wide = groups.of(max(old, new))

    @property
    def old_group(self) -> int:
        """Return the index within the wide group of this rank's group before the change."""
        return self.wide.rank // self.old

    @property
    def new_group(self) -> int:
        """Return the index within the wide group of this rank's group after the change."""
        return self.wide.rank // self.new


def retile(
    model: Decoder,
    cache: Cache,
    rows: Sequence[CacheRow],
    rows_here: Mapping[str, int],
    switch: Switch,
) -> dict[str, int]:
    """Change weights and cache to the new size. Collective. Arguments and result are those of `retile_cache`.

    At a larger size a rank has less of the weights, but more hidden states: it has more slots, and hidden states are
    not split. To keep the peak of memory low, what shrinks is changed first.

    The rows of before are gone afterwards: the caller must give the engine its new requests (`replace_requests`) before
    the next round.
    """
    if switch.new > switch.old:
        retile_weights(model, switch)
        return retile_cache(cache, rows, rows_here, switch)
    new_rows = retile_cache(cache, rows, rows_here, switch)
    retile_weights(model, switch)
    return new_rows


def retile_weights(model: Decoder, switch: Switch) -> None:
    """Give every rank its part of the weights at the new size, one parameter after the other. Collective.

    All ranks gather in the order of `model.parameters`, which is the same on all of them.
    """
    comm = switch.after
    for index, parameter in enumerate(model.parameters):
        if parameter.split is None:  # every rank has the whole of it
            continue
        part = _part_of(parameter, switch)
        # torch does not count a change through `.data`, so the packed copy must be dropped by hand.
        model.packed.forget(parameter.fused)
        # In place: the layers of the model refer to this tensor.
        parameter.fused.data = part.fused
        model.parameters[index] = part._replace(fused=parameter.fused)
        # `model.tensors` still has views of the old memory, and pushes write to those.
        model.name_blocks(model.parameters[index])
    model.comm = comm
    model.heads = model.arch.heads // comm.size
    model.kv_heads = model.arch.kv_heads // comm.size
    if model.arch.tied:
        # The head is a view of the embedding, which every rank has whole, and no parameter of its own.
        model.packed.forget(model.head)
        model.head = model.embedding.chunk(comm.size)[comm.rank]
    if model.draft_ids is not None and not model.arch.eagle3:
        # The draft head has rows of the new head now. Ids of -1 are padding.
        model.set_draft_vocabulary(model.draft_ids[model.draft_ids >= 0])


@torch.no_grad()
def _part_of(parameter: Parameter, switch: Switch) -> Parameter:
    """Return this rank's part of a split parameter at the new size. Collective in `switch.before`."""
    assert parameter.split is not None
    # Block by block: a fused parameter has a shard of each of its blocks, such as q, k and v.
    blocks = {}
    for name, shard in parameter.blocks().items():
        whole = switch.before.concat(shard, parameter.split)
        blocks[name] = whole.chunk(switch.new, parameter.split)[switch.after.rank]
    rows = {name: len(block) for name, block in blocks.items()}
    return Parameter(torch.cat(list(blocks.values())), rows, parameter.split)


class CacheRow(NamedTuple):
    """A row of a cache before a change of the size. Every rank of the wide group has this description.

    source, target   index within the wide group of its group of ranks before and after the change
    computed         columns [0, computed) hold the keys of the target model
    drafted          columns [1, drafted) hold the keys of the drafter
    prefix_computed, prefix_drafted   the same for the prompt's columns, which other rows may share
    """

    id: str
    tokens: np.ndarray  # [length]
    prompt_len: int
    computed: int
    drafted: int
    prefix_computed: int
    prefix_drafted: int
    source: int
    target: int

    @classmethod
    def of(cls, cache: Cache, row: int, id: str, source: int) -> CacheRow:
        """Describe a row of this rank's cache. `source`: this rank's old group. `regroup.py` sets the target later."""
        prefix = cache.prefix[row]
        computed = int(cache.computed[row])
        return cls(
            id,
            tokens=cache.tokens[row, : cache.length[row]].copy(),
            prompt_len=len(prefix.tokens) + 1,  # the prefix is the prompt without its last token
            computed=computed,
            # `drafted` is 1 in a new row; without a computed column there is nothing to send.
            drafted=min(int(cache.drafted[row]), computed),
            prefix_computed=prefix.computed,
            prefix_drafted=prefix.drafted,
            source=source,
            target=-1,
        )


def retile_cache(
    cache: Cache, rows: Sequence[CacheRow], rows_here: Mapping[str, int], switch: Switch
) -> dict[str, int]:
    """Move the contents of the cache to the groups of the new size. Collective.

    rows       the moving rows of all groups of the wide group, in one order on all its ranks
    rows_here  the row in this rank's cache of each id; it must have every id of `rows` whose source is this rank's old
               group. A row whose id is not in `rows` is dropped

    Returns the row of each id that this rank's group has now. An id that the group has no room for is missing: the
    caller must compute its columns anew. The cache keeps its bytes of keys and values: it has new / old times the
    slots, rounded down.
    """
    # `reset` forgets which slots the rows had. The pools, `cache.kv` and `cache.hidden`, keep their contents.
    old_slots = {}
    for row in rows:
        if row.source == switch.old_group:
            old_slots[row.id] = cache.slots[rows_here[row.id], : row.computed].copy()
    cache.reset(cache.total * switch.new // switch.old)
    # In the order of `rows`: all ranks of a new group must give a sample the same row and slots.
    new_rows = {}
    for row in rows:
        if row.target == switch.new_group:
            new_row = _open_row(cache, row)
            if new_row is not None:
                new_rows[row.id] = new_row
    moving = _moving(cache, rows, old_slots, new_rows, switch)
    drafted = [columns[:, columns[COLUMN] < columns[DRAFTED_END]] for columns in moving]
    # The drafter's pair of column c reads the hidden state of column c - 1. Other hidden states are not read again.
    undrafted = [columns[:, columns[COLUMN] >= columns[DRAFTED_END] - 1] for columns in moving]
    own_group = switch.old_group
    for layer, pool in enumerate(cache.kv):
        # The drafter's layers come last in `cache.kv`.
        columns = drafted if layer >= cache.model.arch.layers else moving
        # [slots, 2 * heads, D] -> [n, 2, heads, D]: keys and values are split by heads, each on its own
        data = pool[columns[own_group][OLD_SLOT]].unflatten(1, (2, -1))
        # Release the old pool before the new one is made; `pool` refers to it, too.
        cache.kv[layer] = pool = data.new_empty(0)
        # All heads. Also if this group sends no columns: the call is collective.
        data = switch.before.concat(data, 2)
        heads_per_rank = data.shape[2] // switch.new
        first = heads_per_rank * switch.after.rank
        heads = slice(first, first + heads_per_rank)
        cache.kv[layer] = _spread(data, heads, cache.total, columns, switch).flatten(1, 2)
    # [n, width] -> [n, 1, 1, width], as `_spread` expects
    data = cache.hidden[undrafted[own_group][OLD_SLOT]][:, None, None]
    cache.hidden = data.new_empty(0)
    all_parts = slice(None)  # hidden states are not split: every rank of a group has all
    cache.hidden = _spread(data, all_parts, cache.total, undrafted, switch)[:, 0, 0]
    return new_rows


def _open_row(cache: Cache, row: CacheRow) -> int | None:
    """Take a row of the new cache, and slots for all its tokens. Returns the row, or None if there is no room."""
    new = cache.open(row.tokens, row.prompt_len, len(row.tokens))
    if new is not None:
        # `Cache.open` has set both as for a row of which only the prefix is computed.
        cache.computed[new] = row.computed
        cache.drafted[new] = max(row.drafted, 1)
    return new


def _moving(
    cache: Cache,
    rows: Sequence[CacheRow],
    old_slots: Mapping[str, np.ndarray],
    new_rows: Mapping[str, int],
    switch: Switch,
) -> list[np.ndarray]:
    """Return the columns that each old group sends, an int64 `[4, n]` for each group of the wide group.

    The four rows: column, end of the drafter's keys in its row or prefix, slot before, slot after. A slot that is not
    in this rank's cache is -1. n and the order are the same on all ranks of the wide group.

    A group sends every row's own columns, and each prefix once for each target group, from the first row that has it.
    Also sets the state of the prefixes that this rank's new group has.
    """
    elsewhere = np.full(cache.columns, -1)
    groups = switch.wide.size // switch.old
    moving = [[np.zeros((4, 0), np.int64)] for _ in range(groups)]
    sent_prefixes = set()
    for row in rows:
        old = old_slots.get(row.id, elsewhere)
        new = new_rows.get(row.id)
        prompt = row.prompt_len - 1
        slots = elsewhere if new is None else cache.slots[new]
        moving[row.source].append(_columns(prompt, row.computed, row.drafted, old, slots))
        shared = row.tokens[:prompt].tobytes()  # int64, as the keys of `Cache.prefixes`
        key = (row.target, shared)
        if key in sent_prefixes:
            continue
        sent_prefixes.add(key)
        prefix = None if new is None else cache.prefix[new]
        if prefix is None and row.target == switch.new_group:
            prefix = cache.prefixes.get(shared)  # of a later row, if this one has no room
        slots = elsewhere
        if prefix is not None:
            prefix.computed = row.prefix_computed
            prefix.drafted = row.prefix_drafted
            slots = prefix.slots
        moving[row.source].append(_columns(0, row.prefix_computed, row.prefix_drafted, old, slots))
    return [np.concatenate(parts, 1) for parts in moving]


def _columns(first: int, last: int, drafted: int, old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Return columns [first, last) in the form of `_moving`, `[4, last - first]`. `old`, `new`: slots by column."""
    columns = np.arange(first, last)
    ends = np.full_like(columns, drafted)
    return np.stack([columns, ends, old[first:last], new[first:last]])


def _spread(
    data: Tensor, heads: slice, slots: int, moving: Sequence[np.ndarray], switch: Switch
) -> Tensor:
    """Return a pool of `slots` slots with what moved to this rank. Collective in the wide group.

    Each old group's columns are broadcast to all ranks of the wide group, one group after another.

    data    the columns of this rank's old group, [columns, parts, all heads, width]
    heads   those that this rank keeps
    moving  as from `_moving`, by old group
    """
    assert isinstance(switch.wide, TensorParallel)
    of_this_rank = data[:, :, heads]
    pool = data.new_zeros(slots, *of_this_rank.shape[1:])
    for source, columns in enumerate(moving):
        new = columns[NEW_SLOT]
        # `n` is equal on all ranks of the wide group, so all skip the broadcast or none does.
        if not len(new):
            continue
        part = data
        if source != switch.old_group:
            part = data.new_empty(len(new), *data.shape[1:])
        # From the old group's first rank: every rank of that group has gathered all heads. `group_src` is a rank within
        # the wide group.
        dist.broadcast(part, group=switch.wide.group, group_src=source * switch.old)
        in_this_cache = new >= 0
        pool[new[in_this_cache]] = part[in_this_cache][:, :, heads]
    return pool
