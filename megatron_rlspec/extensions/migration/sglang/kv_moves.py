"""Commands by which a running sample leaves an engine, and arrives in another one, with its KV cache.

A sample travels through SGLang's prefix tree, whose slots hold keys and values of target and drafter. A request that
arrives finds its tokens there. Under speculation the tree's keys are pairs of tokens, so that slot p belongs to
(x_p, x_p+1), and the drafter's entry there was computed from (h_p, x_p+1). The next round's drafts and the last hidden
state do not travel: SGLang computes them anew from the last two columns.

    offer     the target reserves slots, and keeps what it has of the prompt from eviction
    export    the source writes the columns that are final, between two rounds, and goes on
    detach    the source ends the sample after the next round, and writes the columns since `export` in the same step
    accept    the target writes the columns into slots, and puts them into its tree, protected until the sample arrives
    withdraw  the target gives up what it keeps for a sample; without ids an engine also removes files that it wrote

All ranks execute each command. What they decide depends on nothing but the state that they share; only the reading of
files may differ, so `accept` agrees on that before it changes anything. The two engines may have different numbers of
ranks (`kv_file`).
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rlspec.extensions.migration.sglang import kv_file, kv_tree, limits
from megatron_rlspec.extensions.migration.sglang.folder import Folder, own_name, shared_memory
from megatron_rlspec.rollout.sglang import ids as names
from megatron_rlspec.rollout.sglang.scheduler import aborts, versions
from megatron_rlspec.rollout.sglang.settings import Settings

Answer = dict[str, Any]
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Departure:
    """A sample that leaves after the next round; the columns from `first` go into the file `name`, if it has one."""

    scheduler: Any
    first: int
    name: str


_leaving: dict[str, _Departure] = {}
_reserved: dict[str, Tensor] = {}  # slots that belong neither to a request nor to the tree
_protected: dict[str, Any] = {}  # locks in the tree


def hooks() -> Iterator[versions.Hook]:
    """Yield the hooks that migration needs, where `kv_tree.lacking` is empty."""
    managers = "sglang.srt.managers"
    components = f"{managers}.scheduler_components"
    processor = f"{components}.batch_result_processor.SchedulerBatchResultProcessor"
    yield f"{processor}._prepare_kv_cache_release", _leave, "BEFORE"
    yield f"{processor}.process_batch_result_prefill", _arrive, "BEFORE"
    yield f"{managers}.scheduler.Scheduler.flush_cache", _forget, "AFTER"
    yield f"{managers}.schedule_batch.ScheduleBatch.check_decode_mem", _make_room, "AROUND"
    observer = f"{components}.pool_stats_observer.SchedulerPoolStatsObserver"
    yield f"{observer}.session_held_tokens", _held_tokens, "AFTER"


def progress(settings: Settings, scheduler: Any) -> Answer:
    """Return what the engine decodes, what waits, and its free room."""
    running = []
    for request in sorted(_decoding(scheduler), key=lambda request: names.outer(request.rid)):
        rounds = max(1, request.spec_verify_ct)
        accept = 1 + request.spec_num_correct_drafts / rounds
        context = len(request.origin_input_ids) + len(request.output_ids)
        running.append([names.outer(request.rid), len(request.origin_input_ids), context, accept])
    tree = scheduler.tree_cache
    return {
        "running": running,
        "waiting": len(scheduler.waiting_queue) + (scheduler.chunked_req is not None),
        "free_tokens": scheduler.token_to_kv_pool_allocator.available_size()
        + tree.evictable_size(),
        "version": versions.installed().weight_version(),
        "tp": versions.installed().tensor_group().world_size,
    }


def describe(settings: Settings, scheduler: Any) -> Answer:
    """Return the engine's folder of KV caches, and a name of the /dev/shm that its ranks share."""
    return {
        "columns": own_name(),
        "shared_memory": "" if scheduler.rlspec_apart else shared_memory(),
    }


def offer(settings: Settings, scheduler: Any, version: str, notes: Sequence[Answer]) -> Answer:
    """Reserve room for the columns below `upto` of each sample. `first` in an answer: columns below it are here.

    notes  {"id", "tokens", "upto"}; `tokens` are those known of the sample, at least its prompt
    """
    _layout(scheduler)
    here = versions.installed().weight_version()
    if version != here:
        raise ValueError(
            f"the sample has weights of version {version}, this engine of version {here}"
        )
    return {"answers": [_each(_reserve, scheduler, **note) for note in notes]}


def export(settings: Settings, scheduler: Any, notes: Sequence[Answer]) -> Answer:
    """Write the final columns of running samples from `first` on. notes: {"id", "first", "name"}."""
    answers = [_each(_export, scheduler, **note) for note in notes]
    _wait_for_all_ranks()
    return {"answers": answers}


def detach(settings: Settings, scheduler: Any, notes: Sequence[Answer]) -> Answer:
    """End running samples after their next round, and write their columns from `first` on; without `name`, none.

    A sample whose round reaches its end is not moved: it ends as ever.
    """
    return {"answers": [_each(_detach, scheduler, **note) for note in notes]}


def accept(settings: Settings, scheduler: Any, notes: Sequence[Answer]) -> Answer:
    """Put columns into the tree, all of a file or none, and protect them.

    notes  {"id", "name", "folder"}; without a folder the file is in that of this engine
    """
    layout = _layout(scheduler)
    found = _agree([_each(_read, scheduler, layout=layout, **note) for note in notes])
    if versions.installed().tensor_group().rank_in_group == 0:
        for note in notes:  # every rank has read what it needs of them
            with suppress(OSError), _folder(note.get("folder", "")) as folder:
                folder.remove(f"{note['name']}.")
    return {
        "answers": [
            answer if "refused" in answer else _each(_insert, scheduler, **answer)
            for answer in found
        ]
    }


def withdraw(settings: Settings, scheduler: Any, ids: Sequence[str] | None = None) -> Answer:
    """Give up what is kept for these samples. Without ids give up all, and remove what this rank wrote."""
    if ids is None:
        with suppress(OSError), Folder.own() as folder:
            folder.remove(ends=_own(""))
    for rid in list(_reserved.keys() | _protected.keys()) if ids is None else ids:
        _release(scheduler.tree_cache, rid)
    return {}


def audit(settings: Settings, scheduler: Any) -> Answer:
    """Count the slots of the KV cache: free + evictable + protected + reserved + of requests = total."""
    tree = scheduler.tree_cache
    return {
        "free": scheduler.token_to_kv_pool_allocator.available_size(),
        "evictable": tree.evictable_size(),
        "protected": tree.protected_size(),
        "reserved": sum(map(len, _reserved.values())),
        "total": scheduler.max_total_num_tokens,
        "requests": len(scheduler.collect_inflight_reqs()) + len(scheduler.waiting_queue),
    }


def before_round(requests: Sequence[Any]) -> list[int]:
    """Return the indices of the requests that leave after this round, and have them end there."""
    found = [i for i, request in enumerate(requests) if request.rid in _leaving] if _leaving else []
    for i in found:
        _end(requests[i])
    return found


COMMANDS: dict[str, Callable[..., Answer]] = {
    "progress": progress,
    "kv_describe": describe,
    "kv_offer": offer,
    "kv_export": export,
    "kv_detach": detach,
    "kv_accept": accept,
    "kv_withdraw": withdraw,
    "kv_audit": audit,
}


def _each(act: Callable[..., Answer], scheduler: Any, id: str, **note: Any) -> Answer:
    try:
        return {"id": id, **act(scheduler, id, **note)}
    except (ValueError, OSError) as error:
        return {"id": id, "refused": str(error)}


def _decoding(scheduler: Any) -> list[Any]:
    return [
        request
        for request in scheduler.collect_inflight_reqs()
        if request.output_ids
        and request.kv.holds_kv
        and not (request.finished() or request.is_retracted)
    ]


def _running(scheduler: Any, rid: str) -> Any:
    found = [r for r in _decoding(scheduler) if names.outer(r.rid) == rid and r.to_finish is None]
    if len(found) > 1:
        raise ValueError(f"{rid} is the id of {len(found)} samples here")
    if not found:
        raise ValueError(f"{rid} does not decode here")
    return found[0]


def _pools(scheduler: Any) -> list[Any]:
    pools = [scheduler.token_to_kv_pool_allocator.get_kvcache()]
    if scheduler.draft_worker is not None:
        pools.append(scheduler.draft_worker.draft_worker.draft_runner.token_to_kv_pool)
    return pools


def _heads(scheduler: Any) -> list[int]:
    """Return the numbers of key and value heads of target and drafter, over all ranks."""
    runners = [scheduler.tp_worker.model_runner]
    if scheduler.draft_worker is not None:
        runners.append(scheduler.draft_worker.draft_worker.draft_runner)
    return [runner.model_config.get_total_num_kv_heads() for runner in runners]


def _layout(scheduler: Any) -> kv_file.KVLayout:
    """Raises ValueError where the KV cache of a sample cannot move."""
    installed = versions.installed()
    if problem := kv_tree.lacking():
        raise ValueError(problem)
    if scheduler.server_args.disable_radix_cache or scheduler.server_args.dp_size > 1:
        raise ValueError(
            "without a prefix cache, and under data parallelism, the KV cache of a sample cannot move"
        )
    group = installed.tensor_group()
    pairs = scheduler.tree_cache.tree_core.is_eagle
    return kv_file.layout_of(
        _pools(scheduler), _heads(scheduler), group.rank_in_group, group.world_size, pairs
    )


def _folder(name: str) -> Folder:
    """Open an engine's folder of columns, this one's by default. Raises OSError."""
    return Folder(name) if name else Folder.own()


def _own(name: str) -> str:
    return f"{name}.{versions.installed().tensor_group().rank_in_group}"


def _after_passes(scheduler: Any) -> None:
    """Order what follows behind the passes that were launched: the overlap scheduler runs them in another stream."""
    if scheduler.forward_stream is not None and torch.cuda.is_available():
        torch.cuda.current_stream().wait_stream(scheduler.forward_stream)


def _final(scheduler: Any, request: Any) -> int:
    """Return how many columns target and drafter have both computed for good, in whole pages."""
    # The last column's pair has no token yet under the overlap scheduler, and the tree leaves it out as well.
    final = max(0, request.kv.kv_committed_len - max(1, _missed(scheduler, request)))
    return final - final % scheduler.tree_cache.page_size


def _missed(scheduler: Any, request: Any) -> int:
    """Return how many tokens the drafter has not read."""
    gap = getattr(getattr(scheduler.draft_worker, "adaptive_controller", None), "gap", None)
    return gap.missed([request], 1) if gap is not None and gap.open else 0


def _write(scheduler: Any, request: Any, first: int, name: str) -> Answer:
    layout = _layout(scheduler)
    last = _final(scheduler, request)
    if last < first:
        raise ValueError(
            f"{request.rid}: columns from {first} on are asked for, and those from {last} on are not final"
        )
    tokens = [*request.origin_input_ids, *request.output_ids][: last + layout.pairs]
    slots = scheduler.req_to_token_pool.req_to_token[request.kv.req_pool_idx, first:last].to(
        torch.int64
    )
    _after_passes(scheduler)
    version = versions.installed().weight_version()
    header = kv_file.Header(names.outer(request.rid), tokens, first, last, version, layout)
    with Folder.own() as folder:
        size = kv_file.write(folder, _own(name), header, _pools(scheduler), slots)
    return {"last": last, "bytes": size * versions.installed().tensor_group().world_size}


def _wait_for_all_ranks() -> None:
    """Wait until every tensor-parallel rank has written: the answer of one of them sends the target to all files."""
    group = versions.installed().tensor_group()
    if group.world_size > 1:
        dist.barrier(group=group.cpu_group)


def _export(scheduler: Any, rid: str, first: int, name: str) -> Answer:
    return _write(scheduler, _running(scheduler, rid), first, name)


def _detach(scheduler: Any, rid: str, first: int = 0, name: str = "") -> Answer:
    request = _running(scheduler, rid)
    _leaving[request.rid] = _Departure(scheduler, first, name)
    # otherwise the drafter catches up first, when the next round is launched
    if not _missed(scheduler, request):
        _end(request)
    return {}


def _end(request: Any) -> None:
    if request.to_finish is None:
        request.to_finish = aborts.abortion()


def _leave(processor: Any, request: Any) -> None:
    """Write the last columns of a sample that leaves. Its slots are still its own, and its tokens complete."""
    departure = _leaving.pop(request.rid, None)
    if departure is None or not departure.name or not aborts.asked_for(request.finished_reason):
        return
    try:
        _write(departure.scheduler, request, departure.first, departure.name)
    except (
        ValueError,
        OSError,
    ) as error:  # the target misses the file, and computes the columns itself
        logger.warning("rlspec: %s leaves without its KV cache: %s", request.rid, error)
    _wait_for_all_ranks()


def _reserve(scheduler: Any, rid: str, tokens: list[int], upto: int) -> Answer:
    tree = scheduler.tree_cache
    _check_tokens(scheduler, tokens)
    _release(tree, rid)
    present, node = kv_tree.cached(tree, tokens)
    need = max(0, -(-(upto - len(present)) // tree.page_size) * tree.page_size)
    _protected[rid] = tree.lock(node)
    slots = _allocated(scheduler, need)
    if slots is None:
        _release(tree, rid)
        raise ValueError(f"no room for {need} tokens")
    _reserved[rid] = slots
    return {"first": len(present)}


def _check_tokens(scheduler: Any, tokens: Sequence[int]) -> None:
    """Raise ValueError for a token that the model has not: it must not enter the prefix tree."""
    words = scheduler.model_config.vocab_size
    if tokens and not (0 <= min(tokens) and max(tokens) < words):
        wrong = next(token for token in tokens if not 0 <= token < words)
        raise ValueError(f"token {wrong}; expected token ids from 0 to {words - 1}")


def _allocated(scheduler: Any, need: int) -> Tensor | None:
    """Return slots, None if there are too few. Running samples keep room to grow."""
    allocator = scheduler.token_to_kv_pool_allocator
    growth = sum(
        min(limits.GROWTH_TOKENS, request.sampling_params.max_new_tokens - len(request.output_ids))
        for request in _decoding(scheduler)
    )
    if need + growth > allocator.available_size() + scheduler.tree_cache.evictable_size():
        return None
    if missing := max(0, need - allocator.available_size()):
        kv_tree.evict(scheduler.tree_cache, missing)
    return allocator.alloc(need)


def _read(
    scheduler: Any, rid: str, name: str, layout: kv_file.KVLayout, folder: str = ""
) -> Answer:
    with _folder(folder) as opened:
        header, columns = kv_file.read(opened, name, layout)
    here = versions.installed().weight_version()
    if header.id != rid:
        raise ValueError(f"{name}: columns of {header.id}, not of {rid}")
    if header.version != here:
        raise ValueError(
            f"{name}: columns of version {header.version}, but this engine has version {here}"
        )
    if (
        header.first % scheduler.tree_cache.page_size
        or header.last % scheduler.tree_cache.page_size
    ):
        raise ValueError(f"{name}: columns {header.first} to {header.last} are no whole pages")
    _check_tokens(scheduler, header.tokens)
    return {"header": header, "columns": columns}


def _agree(found: list[Answer]) -> list[Answer]:
    """Refuse, on every tensor-parallel rank, what one of them has to refuse, or reads otherwise than the others."""
    group = versions.installed().tensor_group()
    if group.world_size == 1:
        return found
    marks = [
        zlib.crc32(repr(answer["header"].place).encode()) if "header" in answer else -1
        for answer in found
    ]
    least = torch.tensor(marks)
    most = least.clone()
    dist.all_reduce(least, dist.ReduceOp.MIN, group=group.cpu_group)
    dist.all_reduce(most, dist.ReduceOp.MAX, group=group.cpu_group)
    different = "the tensor-parallel ranks read different columns"
    return [
        answer if low == high else {"id": answer["id"], "refused": answer.get("refused", different)}
        for answer, low, high in zip(found, least.tolist(), most.tolist(), strict=True)
    ]


def _insert(scheduler: Any, rid: str, header: kv_file.Header, columns: Tensor) -> Answer:
    tree = scheduler.tree_cache
    installed = versions.installed()
    present, node = kv_tree.cached(tree, header.tokens)
    if len(present) < header.first:
        raise ValueError(f"columns below {header.first} are needed, and {len(present)} are here")
    lock = tree.lock(node)
    if len(present) < header.last:
        slots = _take(scheduler, rid, header.last - len(present))
        if slots is None:
            tree.unlock(lock)
            raise ValueError(f"no room for {header.last - len(present)} tokens")
        _after_passes(scheduler)
        kv_file.scatter(columns, _pools(scheduler), slots)
        node = kv_tree.insert(tree, header.tokens, torch.cat([present, slots]), len(present))
        tree.unlock(lock)
        lock = tree.lock(node)
    tree.unlock(_protected.pop(rid, None))
    _protected[rid] = lock
    return {"last": header.last, "bytes": len(columns) * installed.tensor_group().world_size}


def _take(scheduler: Any, rid: str, need: int) -> Tensor | None:
    """Return slots, those reserved for the sample first."""
    kept = _reserved.pop(rid, None)
    if kept is None:
        return _allocated(scheduler, need)
    if len(kept) < need:
        more = _allocated(scheduler, need - len(kept))
        if more is None:
            _reserved[rid] = kept
            return None
        kept = torch.cat([kept, more])
    _reserved[rid] = kept[need:]
    return kept[:need]


def _arrive(processor: Any, batch: Any, result: Any) -> None:
    """Release what is kept for requests that were prefilled: they hold their tokens themselves."""
    for request in batch.reqs:
        # it was retracted meanwhile, and leaves without its KV cache
        if _leaving.pop(request.rid, None) is not None:
            _end(request)
        if (name := names.outer(request.rid)) in _reserved or name in _protected:
            _release(processor.tree_cache, name)


def _release(tree: Any, rid: str) -> None:
    slots = _reserved.pop(rid, None)
    if slots is not None and len(slots):
        tree.token_to_kv_pool_allocator.free(slots)
    tree.unlock(_protected.pop(rid, None))


def _make_room(original: Callable, batch: Any, *args: Any, **kwargs: Any) -> bool:
    """Give up what is kept for samples that may come, the latest first, before running samples lose their slots."""
    while not (fits := original(batch, *args, **kwargs)) and (kept := [*_protected, *_reserved]):
        _release(batch.tree_cache, kept[-1])
    return fits


def _forget(flushed: bool, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """After a flush of the whole cache, every slot is free again."""
    if flushed:
        _reserved.clear()
        _protected.clear()


def _held_tokens(held: int, observer: Any) -> int:
    """Count reserved slots as held, so that SGLang's audit of its slots adds up."""
    return held + sum(map(len, _reserved.values()))
