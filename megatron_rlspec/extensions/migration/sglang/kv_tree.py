"""What migration needs of SGLang's prefix tree and requests beyond `scheduler/versions.py`."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import cache
from typing import Any

from megatron_rlspec.compat import contracts
from megatron_rlspec.rollout.sglang.scheduler.names import contract

# What migration hooks, calls or reads of SGLang 0.5.23, as in `scheduler/names.py`.
CONTRACT = contract("""
managers.schedule_batch
    Req.to_finish
    Req.update_finish_state
    ReqKvInfo(req_pool_idx, kv_committed_len)
    ScheduleBatch.check_decode_mem(selected_indices)
managers.scheduler
    Scheduler.chunked_req
    Scheduler.collect_inflight_reqs
    Scheduler.forward_stream
managers.scheduler_components.batch_result_processor
    SchedulerBatchResultProcessor._prepare_kv_cache_release(req)
managers.scheduler_components.pool_stats_observer
    SchedulerPoolStatsObserver.session_held_tokens
mem_cache.memory_pool
    MHATokenToKVPool(head_num, head_dim, layer_num, v_head_dim)
mem_cache.unified_radix_cache
    UnifiedRadixCache.lock(node_id)
    UnifiedRadixCache.path_device_indices(node)
    UnifiedRadixCache.tree_core
    UnifiedRadixCache.unlock(lock)
""")


@cache
def lacking() -> str:
    """Return why running samples cannot migrate with the installed SGLang, in one line; "" if they can."""
    missing = contracts.broken(CONTRACT)
    return f"samples move with their KV cache from SGLang 0.5.23 on; {missing}" if missing else ""


def abortion() -> Any:
    """Return the reason with which a request ends that is aborted."""
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    return FINISH_ABORT()


def asked_for(reason: Any) -> bool:
    """Return whether a request ends because a client or a move aborted it, and not for an error."""
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    return isinstance(reason, FINISH_ABORT) and reason.status_code is None


def cached(tree: Any, tokens: Sequence[int]) -> tuple[Any, Any]:
    """Return the slots of the longest prefix of these tokens in the prefix tree, and its last node."""
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams

    match = tree.match_prefix(MatchPrefixParams(key=_key(tree, tokens)))
    return tree.path_device_indices(match.last_device_node)[: match.device_prefix_len], match.last_device_node


def insert(tree: Any, tokens: Sequence[int], slots: Any, present: int) -> Any:
    """Put the slots of these tokens into the prefix tree, which has the first `present`. Returns the last node."""
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams

    return tree.insert(InsertParams(key=_key(tree, tokens), value=slots, prev_prefix_len=present)).last_device_node


def evict(tree: Any, slots: int) -> None:
    """Free at least so many slots of the prefix tree, if they are evictable."""
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    tree.evict(EvictParams(num_tokens=slots))


def _key(tree: Any, tokens: Sequence[int]) -> Any:
    from sglang.srt.mem_cache.radix_cache import RadixKey

    key = RadixKey(array("q", tokens), None, is_bigram=tree.tree_core.is_eagle)
    return key.page_aligned(tree.page_size)
