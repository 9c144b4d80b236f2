"""Change the tensor-parallel size between two rounds: weights and KV caches change hands, nothing is loaded anew.

Source: PAT, section 4.3. Weights and caches move layer by layer, so that peak memory grows by 1.5 layers at most. PAT
gathers every tensor on every rank and slices it; here each rank receives exactly the heads and columns of its new
shard (`exchange`). Both keep PAT's canonical map: at size t, rank r holds
shard r mod t, in the order of heads.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_rlspec.extensions.migration.embedded.groups import Groups, trade
from megatron_rlspec.rollout.embedded.cache import Cache
from megatron_rlspec.rollout.embedded.model import Decoder, Parameter
from megatron_rlspec.rollout.embedded.parallel import Solo, TensorParallel


class Switch:
    """A change of the tensor-parallel size from `old` to `new`, seen from one rank.

    `wide` is the group of the larger size: all that moves, moves inside it. Ranks are counted in it. It holds
    `wide.size / old` groups before the change and `wide.size / new` after it. A *unit* is 1 / `wide.size` of a split
    dimension, so each shard is a whole number of units.

    One of the sizes divides the other, and both divide the job.
    """

    def __init__(self, groups: Groups, old: int, new: int) -> None:
        self.old = old
        self.new = new
        self.before = groups.of(old)
        self.after = groups.of(new)
        self.wide: Solo | TensorParallel = groups.of(max(old, new))

    @property
    def ranks(self) -> range:
        return range(self.wide.size)

    @property
    def old_group(self) -> int:
        """Return this rank's group before the change, counted within the wide group."""
        return self.wide.rank // self.old

    @property
    def new_group(self) -> int:
        """Return this rank's group after the change."""
        return self.wide.rank // self.new

    def units(self, source: int, target: int) -> tuple[int, int, int]:
        """Return the units that the old shard of `source` and the new shard of `target` share.

        Returns their count, and the first of them within the old and within the new shard; zeros if they share none.
        """
        old_units = self.wide.size // self.old
        new_units = self.wide.size // self.new
        old_first = source % self.old * old_units
        new_first = target % self.new * new_units
        first = max(old_first, new_first)
        count = min(old_first + old_units, new_first + new_units) - first
        return (count, first - old_first, first - new_first) if count > 0 else (0, 0, 0)


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
    """Give every rank its part of the weights at the new size, as many parameters at a time as a layer has at most.

    Every reference to a parameter stays valid. The largest parameters go while the model is small: first if it grows on
    a rank, last if it shrinks. Raises ValueError for a size that does not divide the model; nothing has changed then.
    """
    comm = switch.after
    model.arch.check_size(comm.size)
    split = [index for index, old in enumerate(model.parameters) if old.split is not None]
    grows = comm.size < model.comm.size
    split.sort(key=lambda index: model.parameters[index].fused.numel(), reverse=grows)
    layer = model.layers[0]
    most = sum(x.numel() for x in (layer.qkv, layer.out, layer.gate_up, layer.down))
    while split:
        sizes = itertools.accumulate(model.parameters[index].fused.numel() for index in split)
        count = max(1, sum(size <= most for size in sizes))
        _replace(model, split[:count], switch)
        split = split[count:]
    model.comm = comm
    model.heads = model.arch.heads // comm.size
    model.kv_heads = model.arch.kv_heads // comm.size
    if model.arch.tied:
        model.packed.forget(model.head)
        model.head = model.embedding.chunk(comm.size)[comm.rank]
    if model.draft_ids is not None and not model.arch.eagle3:
        model.set_draft_vocabulary(model.draft_ids[model.draft_ids >= 0])


@torch.no_grad()
def _replace(model: Decoder, indices: Sequence[int], switch: Switch) -> None:
    """Exchange some parameters for those of the new size."""
    changes = []
    for index in indices:
        old = model.parameters[index]
        changes.append((old, resized(old, switch.old, switch.new)))
    exchange(switch, changes)
    for index, (old, new) in zip(indices, changes, strict=True):
        model.packed.forget(old.fused)
        old.fused.data = new.fused
        model.parameters[index] = new._replace(fused=old.fused)
        model.name_blocks(model.parameters[index])


def resized(parameter: Parameter, old: int, new: int) -> Parameter:
    """Return an empty parameter for a rank of `new` instead of `old` tensor-parallel ranks."""
    shape = list(parameter.fused.shape)
    rows = dict(parameter.rows)
    if parameter.split is not None:
        shape[parameter.split] = shape[parameter.split] * old // new
    if parameter.split == 0:
        rows = {name: count * old // new for name, count in rows.items()}
    return Parameter(parameter.fused.new_empty(shape), rows, parameter.split)


def exchange(switch: Switch, changes: Sequence[tuple[Parameter, Parameter]]) -> None:
    """Fill this rank's part of new parameters from the ranks of its old group that hold pieces of it.

    All messages are under way at once, and what this rank has itself is copied meanwhile. Rows travel from parameter to
    parameter; of columns, one of both sides makes a contiguous copy.
    """
    leaving = []
    landing = []
    copies = []  # (where a message lands, what it is copied to)
    for old, new in changes:
        for rank, going, coming in _pieces(switch, old, new):
            if rank == switch.wide.rank:
                copies.append((going, coming))
                continue
            if going.numel():
                leaving.append((rank, going.contiguous()))
            if coming.numel():
                landed = coming if coming.is_contiguous() else coming.new_empty(coming.shape)
                landing.append((rank, landed, coming))
    works = trade(switch.wide, leaving, [(rank, landed) for rank, landed, _ in landing])
    for going, coming in copies:
        coming.copy_(going)
    for work in works:
        work.wait()
    for _, landed, coming in landing:
        coming.copy_(landed)


def _pieces(switch: Switch, old: Parameter, new: Parameter) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield each rank of the old group, which holds the whole, with the views that it gets from here and sends here."""
    me = switch.wide.rank
    old_units = switch.wide.size // switch.old
    new_units = switch.wide.size // switch.new
    first = switch.old_group * switch.old
    for source, target in zip(old.blocks().values(), new.blocks().values(), strict=True):
        for rank in range(first, first + switch.old):
            count, begin, _ = switch.units(me, rank)
            going = _units(source, old.split, count, begin, old_units)
            count, _, begin = switch.units(rank, me)
            coming = _units(target, old.split, count, begin, new_units)
            yield rank, going, coming


def _units(
    shard: Tensor,
    split: int | None,
    count: int,
    first: int,
    units: int,
) -> Tensor:
    """Return `count` of the `units` units of a shard, from the unit `first` on."""
    assert split is not None
    unit = shard.shape[split] // units
    return shard.narrow(split, first * unit, count * unit)


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


class Stretch(NamedTuple):
    """Columns [first, last) of a row or a prefix, with their slots where this rank has them."""

    source: int
    target: int
    first: int
    last: int
    drafted: int  # columns before it hold the drafter's keys
    # slots of column `first` and those after it, if this rank's old group is the source
    old: np.ndarray | None
    new: np.ndarray | None  # if its new group is the target and has room

    def cut(self, first: int, last: int) -> Stretch:
        """Return the part of this stretch in columns [first, last)."""
        first = min(max(first, self.first), self.last)
        last = min(max(last, first), self.last)
        part = slice(first - self.first, last - self.first)
        old, new = _part(self.old, part), _part(self.new, part)
        return self._replace(first=first, last=last, old=old, new=new)


def _part(slots: np.ndarray | None, part: slice) -> np.ndarray | None:
    return None if slots is None else slots[part]


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
    stretches = list(_stretches(cache, rows, old_slots, seated, switch))
    drafted = [stretch.cut(0, stretch.drafted) for stretch in stretches]
    undrafted = [stretch.cut(stretch.drafted - 1, stretch.last) for stretch in stretches]
    width = cache.model.arch.head_dim
    for layer in range(len(cache.kv)):
        # keys and values apart
        pool = cache.kv[layer]
        cache.kv[layer] = pool.view(len(pool), 2, -1, width)
        del pool  # `_move` releases it
        moving = drafted if layer >= cache.model.arch.layers else stretches
        _move(cache.kv, layer, cache.total, moving, switch, split=True)
        cache.kv[layer] = cache.kv[layer].flatten(1, 2)
    hidden = [cache.hidden[:, None, None]]
    cache.hidden = cache.hidden.new_empty(0)
    _move(hidden, 0, cache.total, undrafted, switch, split=False)
    cache.hidden = hidden[0][:, 0, 0]
    return seated


def _seat(cache: Cache, row: CacheRow) -> int | None:
    """Take a row, and slots for all its tokens; None without room."""
    new = cache.open(row.tokens, row.prompt_len, len(row.tokens))
    if new is not None:
        cache.computed[new] = row.computed
        cache.drafted[new] = max(row.drafted, 1)
    return new


def _stretches(
    cache: Cache,
    rows: Sequence[CacheRow],
    old_slots: Mapping[str, np.ndarray],
    seated: Mapping[str, int],
    switch: Switch,
) -> Iterator[Stretch]:
    """Yield what moves: every row's own columns, and each prefix once a target, from the first row that has it."""
    carried = set()
    for row in rows:
        old = old_slots.get(row.id)
        new = seated.get(row.id)
        groups = row.source, row.target
        prompt = row.prompt_len - 1
        own = slice(prompt, row.computed)
        slots = None if new is None else cache.slots[new]
        yield Stretch(
            *groups, prompt, row.computed, row.drafted, _part(old, own), _part(slots, own)
        )
        shared = row.tokens[:prompt].tobytes()
        key = (row.target, shared if cache.share_prefix else row.id)
        if key in carried:
            continue
        carried.add(key)
        prefix = None if new is None else cache.prefix[new]
        if prefix is None and row.target == switch.new_group:
            prefix = cache.prefixes.get(shared)  # of a later row, if this one has no room
        last = row.prefix_computed
        if prefix is not None:
            prefix.computed = last
            prefix.drafted = row.prefix_drafted
        slots = None if prefix is None else prefix.slots
        whole = slice(last)
        yield Stretch(*groups, 0, last, row.prefix_drafted, _part(old, whole), _part(slots, whole))


def _move(
    pools: list[Tensor],
    index: int,
    slots: int,
    stretches: Sequence[Stretch],
    switch: Switch,
    split: bool,
) -> None:
    """Replace pool `index`, [old slots, parts, old heads, width], by one of `slots` slots that holds what moved here.

    split  whether ranks hold different heads; otherwise all ranks of a group hold all
    """
    me = switch.wide.rank
    pool = pools[index]
    _, parts, old_heads, width = pool.shape
    heads = old_heads
    unit = old_heads
    if split:
        heads = old_heads * switch.old // switch.new
        unit = old_heads * switch.old // switch.wide.size

    def shared(source: int, target: int) -> tuple[int, int, int]:
        """Return the heads that two ranks share: their count, and the first one in the old and in the new shard."""
        if split:
            count, first, new_first = switch.units(source, target)
            return count * unit, first * unit, new_first * unit
        # one rank of the source sends
        return unit * (source % switch.old == target % switch.old), 0, 0

    def between(source: int, target: int) -> list[Stretch]:
        """Return the stretches that move between the groups of two ranks."""
        groups = (source // switch.old, target // switch.new)
        moving = [s for s in stretches if (s.source, s.target) == groups]
        return [s for s in moving if s.last > s.first]

    buffers: dict[tuple[int, int, int], Tensor] = {}  # several ranks may get the same
    send = []
    coming: list[list[Stretch]] = []
    sizes = []
    for rank in switch.ranks:
        count, first, _ = shared(me, rank)
        key = (rank // switch.new, first, count)
        if key not in buffers:
            going = between(me, rank) if count else []
            columns = [pool[s.old, :, first : first + count].reshape(-1) for s in going]
            # of the pool's type and device also if nothing goes
            buffers[key] = torch.cat([pool.new_empty(0), *columns])
        send.append(buffers[key])
        count, _, _ = shared(rank, me)
        coming.append(between(rank, me) if count else [])
        slots_coming = sum(s.last - s.first for s in coming[-1])
        sizes.append(slots_coming * parts * count * width)
    pools[index] = pool = pool.new_empty(0)  # release the old pool before the new one is made
    received = []
    leaving = []
    arriving = []
    for rank, size in enumerate(sizes):
        if rank == me:
            received.append(send[me])
            continue
        received.append(pool.new_empty(size))
        if len(send[rank]):
            leaving.append((rank, send[rank]))
        if size:
            arriving.append((rank, received[rank]))
    for work in trade(switch.wide, leaving, arriving):
        work.wait()
    del buffers, send, leaving, arriving
    pools[index] = pool.new_zeros(slots, parts, heads, width)
    for rank, flat, stretches_here in zip(switch.ranks, received, coming, strict=True):
        if not stretches_here:
            continue
        count, _, first = shared(rank, me)
        lengths = [s.last - s.first for s in stretches_here]
        rows = flat.view(sum(lengths), parts, count, width).split(lengths)
        for s, columns in zip(stretches_here, rows, strict=True):
            if s.new is not None:
                pools[index][s.new, :, first : first + count] = columns
