"""What migration needs of SGLang's prefix tree and requests beyond `scheduler/versions.py`."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from megatron_rlspec.rollout.sglang.scheduler import versions


def lacking() -> str:
    """Return why running samples cannot migrate with the installed SGLang, in one line; "" if they can."""
    return (
        ""
        if versions.installed().migrates
        else "samples move with their KV cache from SGLang 0.5.23 on"
    )


def cached(tree: Any, tokens: Sequence[int]) -> tuple[Any, Any]:
    """Return the slots of the longest prefix of these tokens in the prefix tree, and its last node."""
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams

    match = tree.match_prefix(MatchPrefixParams(key=_key(tree, tokens)))
    return tree.path_device_indices(match.last_device_node)[
        : match.device_prefix_len
    ], match.last_device_node


def insert(tree: Any, tokens: Sequence[int], slots: Any, present: int) -> Any:
    """Put the slots of these tokens into the prefix tree, which has the first `present`. Returns the last node."""
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams

    return tree.insert(
        InsertParams(key=_key(tree, tokens), value=slots, prev_prefix_len=present)
    ).last_device_node


def evict(tree: Any, slots: int) -> None:
    """Free at least so many slots of the prefix tree, if they are evictable."""
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    tree.evict(EvictParams(num_tokens=slots))


def _key(tree: Any, tokens: Sequence[int]) -> Any:
    from sglang.srt.mem_cache.radix_cache import RadixKey

    key = RadixKey(array("q", tokens), None, is_bigram=tree.tree_core.is_eagle)
    return key.page_aligned(tree.page_size)
