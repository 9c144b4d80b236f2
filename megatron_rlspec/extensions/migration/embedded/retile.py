"""Change the tensor-parallel size between two rounds: weights and KV caches change hands, nothing is loaded anew.

Source: PAT, section 4.3. Every tensor is gathered on the ranks that need it, layer by layer, and each rank keeps its
slice. The canonical map is PAT's, too: at size t, rank r holds shard r mod t, in the order of heads.
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


class Switch:
    """A change of the tensor-parallel size from `old` to `new`, seen from one rank.

    `wide` is the group of the larger size: all that moves, moves inside it. Ranks are counted in it. It holds
    `wide.size / old` groups before the change and `wide.size / new` after it.

    One of the sizes divides the other, and both divide the job.
    """

    def __init__(self, groups: Groups, old: int, new: int) -> None:
        self.old = old
        self.new = new
        self.before = groups.of(old)
        self.after = groups.of(new)
        self.wide = groups.of(max(old, new))

    @property
    def old_group(self) -> int:
        """Return this rank's group before the change, counted within the wide group."""
        return self.wide.rank // self.old

    @property
    def new_group(self) -> int:
        """Return this rank's group after the change."""
        return self.wide.rank // self.new


def retile(
    model: Decoder,
    cache: Cache,
    rows: Sequence[CacheRow],
    mine: Mapping[str, int],
    switch: Switch,
) -> dict[str, int]:
    """Change weights and cache to the new size: `retile_weights` and `retile_cache`. Returns what the latter does.

    A larger size needs less memory for weights, and more for hidden states, of which every rank has all. What shrinks
    goes first.
    """
    if switch.new > switch.old:
        retile_weights(model, switch)
        return retile_cache(cache, rows, mine, switch)
    seated = retile_cache(cache, rows, mine, switch)
    retile_weights(model, switch)
    return seated


def retile_weights(model: Decoder, switch: Switch) -> None:
    """Give every rank its part of the weights at the new size, one parameter after the other.

    Every reference to a parameter stays valid.
    """
    comm = switch.after
    for index, parameter in enumerate(model.parameters):
        if parameter.split is None:
            continue
        part = _part_of(parameter, switch)
        model.packed.forget(parameter.fused)
        parameter.fused.data = part.fused
        model.parameters[index] = part._replace(fused=parameter.fused)
        model.name_blocks(model.parameters[index])
    model.comm = comm
    model.heads = model.arch.heads // comm.size
    model.kv_heads = model.arch.kv_heads // comm.size
    if model.arch.tied:
        model.packed.forget(model.head)
        model.head = model.embedding.chunk(comm.size)[comm.rank]
    if model.draft_ids is not None and not model.arch.eagle3:
        model.set_draft_vocabulary(model.draft_ids[model.draft_ids >= 0])


@torch.no_grad()
def _part_of(parameter: Parameter, switch: Switch) -> Parameter:
    """Return this rank's part of a split parameter at the new size."""
    assert parameter.split is not None
    blocks = {}
    for name, shard in parameter.blocks().items():
        whole = switch.before.concat(shard, parameter.split)
        blocks[name] = whole.chunk(switch.new, parameter.split)[switch.after.rank]
    rows = {name: len(block) for name, block in blocks.items()}
    return Parameter(torch.cat(list(blocks.values())), rows, parameter.split)


class CacheRow(NamedTuple):
    """A row of a cache that moves to another group of ranks. Every rank of the wide group knows it.

    source, target   groups before and after the change, counted within the wide group
    computed         columns [0, computed) hold the target's keys
    drafted          columns [1, drafted) hold the drafter's keys
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
        """Describe a row of this rank's cache. Its target is not known yet."""
        prefix = cache.prefix[row]
        computed = int(cache.computed[row])
        return cls(
            id,
            tokens=cache.tokens[row, : cache.length[row]].copy(),
            prompt_len=len(prefix.tokens) + 1,
            computed=computed,
            drafted=min(int(cache.drafted[row]), computed),
            prefix_computed=prefix.computed,
            prefix_drafted=prefix.drafted,
            source=source,
            target=-1,
        )


def retile_cache(
    cache: Cache, rows: Sequence[CacheRow], mine: Mapping[str, int], switch: Switch
) -> dict[str, int]:
    """Move the contents of the cache to the groups of the new size. All ranks call it.

    rows   the moving rows of all groups, in one order on all ranks
    mine   this rank's row of each id that its old group holds; its other rows are dropped
    Returns the row of each id that this rank's group holds now. An id that the group has no room for is missing; its
    caller computes it anew. The cache keeps its size in bytes: it has new / old times the slots.
    """
    old_slots = {}
    for row in rows:
        if row.source == switch.old_group:
            old_slots[row.id] = cache.slots[mine[row.id], : row.computed].copy()
    cache.reset(cache.total * switch.new // switch.old)
    seated = {}
    for row in rows:
        if row.target == switch.new_group:
            seat = _seat(cache, row)
            if seat is not None:
                seated[row.id] = seat
    moving = _moving(cache, rows, old_slots, seated, switch)
    drafted = [columns[:, columns[0] < columns[1]] for columns in moving]
    undrafted = [columns[:, columns[0] >= columns[1] - 1] for columns in moving]
    own = switch.old_group
    for layer, pool in enumerate(cache.kv):
        columns = drafted if layer >= cache.model.arch.layers else moving
        held = pool[columns[own][2]].unflatten(1, (2, -1))
        # release the old pool before the new one is made
        cache.kv[layer] = pool = held.new_empty(0)
        held = switch.before.concat(held, 2)  # all heads
        share = held.shape[2] // switch.new
        first = share * switch.after.rank
        heads = slice(first, first + share)
        cache.kv[layer] = _spread(held, heads, cache.total, columns, switch).flatten(1, 2)
    held = cache.hidden[undrafted[own][2]][:, None, None]
    cache.hidden = held.new_empty(0)
    every = slice(None)  # all ranks of a group hold all
    cache.hidden = _spread(held, every, cache.total, undrafted, switch)[:, 0, 0]
    return seated


def _seat(cache: Cache, row: CacheRow) -> int | None:
    """Take a row, and slots for all its tokens; None without room."""
    new = cache.open(row.tokens, row.prompt_len, len(row.tokens))
    if new is not None:
        cache.computed[new] = row.computed
        cache.drafted[new] = max(row.drafted, 1)
    return new


def _moving(
    cache: Cache,
    rows: Sequence[CacheRow],
    old_slots: Mapping[str, np.ndarray],
    seated: Mapping[str, int],
    switch: Switch,
) -> list[np.ndarray]:
    """Return what moves from each old group, `[4, n]`: column, end of the drafter's keys, slot before, slot after.

    That is every row's own columns, and each prefix once a target, from the first row that has it. A slot that this
    rank does not have is -1.
    """
    elsewhere = np.full(cache.columns, -1)
    groups = switch.wide.size // switch.old
    moving = [[np.zeros((4, 0), np.int64)] for _ in range(groups)]
    carried = set()
    for row in rows:
        old = old_slots.get(row.id, elsewhere)
        new = seated.get(row.id)
        prompt = row.prompt_len - 1
        slots = elsewhere if new is None else cache.slots[new]
        moving[row.source].append(_columns(prompt, row.computed, row.drafted, old, slots))
        shared = row.tokens[:prompt].tobytes()
        key = (row.target, shared)
        if key in carried:
            continue
        carried.add(key)
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
    columns = np.arange(first, last)
    ends = np.full_like(columns, drafted)
    return np.stack([columns, ends, old[first:last], new[first:last]])


def _spread(
    held: Tensor, heads: slice, slots: int, moving: Sequence[np.ndarray], switch: Switch
) -> Tensor:
    """Return a pool of `slots` slots with what moved here: each old group's columns go to all ranks, one after another.

    held   the columns of this rank's old group, [columns, parts, all heads, width]
    heads  those that this rank keeps
    """
    assert isinstance(switch.wide, TensorParallel)
    kept = held[:, :, heads]
    pool = held.new_zeros(slots, *kept.shape[1:])
    for source, columns in enumerate(moving):
        new = columns[3]
        if not len(new):
            continue
        part = held
        if source != switch.old_group:
            part = held.new_empty(len(new), *held.shape[1:])
        dist.broadcast(part, group=switch.wide.group, group_src=source * switch.old)
        here = new >= 0
        pool[new[here]] = part[here][:, :, heads]
    return pool
