"""SGLang's token map (FR-Spec): the token ids from which drafts are chosen, renewed while the engine runs.

These ids are SGLang's `hot_token_id`, [S] int64, and `words` in our route `control/set_draft_vocabulary`.

When SGLang starts, it copies rows of the target's output layer (the head) into the drafter's head, by the file of
`--speculative-token-map`. SGLang leaves three gaps, which this file closes:

- A weight update does not renew the copy: `_after_update` copies the rows again.
- Where embedding and head are not tied, the drafter's loader fails on the head of an update, because the copy is no
  parameter: `_after_start` hides the head from that loader.
- The map cannot change: `renew` writes a new map of the same size into the same memory, where captured CUDA graphs read
  it.

A tensor-parallel rank holds the target's rows of its own part of the vocabulary only. SGLang concatenates the drafter's
logits of the ranks, in the order of ranks. So rank r drafts from the r-th of equal parts of the token ids, and the
ranks exchange the rows for it. S is a multiple of the number of ranks (`http/serve.py` checks it).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from megatron_rlspec.rollout.sglang.scheduler.parallel import parallel
from megatron_rlspec.rollout.sglang.scheduler.push_session import MANAGER
from megatron_rlspec.rollout.sglang.scheduler.served_weights import load_through

HEAD = "lm_head.weight"  # the output layer's name in checkpoints
WORKER = "sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker"


def hooks() -> Iterator[tuple[str, Callable, str]]:
    """Yield the hooks for versions of SGLang whose weight updates are sessions (`versions.py`)."""
    for update in ("end_weight_update", "update_weights_from_disk", "update_weights_from_ipc"):
        yield f"{MANAGER}.{update}", _after_update, "AFTER"
    yield "sglang.srt.managers.scheduler.Scheduler.__init__", _after_start, "AFTER"
    yield f"{WORKER}.init_lm_head", _init_head, "AROUND"


def size(worker: Any) -> int:
    """Return how many tokens the map has; 0: there is none, or only the fixed one of an EAGLE-3 drafter.

    worker  the scheduler's `draft_worker`, which may be None
    """
    drafter = _drafter(worker)
    return 0 if drafter is None else len(drafter.hot_token_id)


def renew(worker: Any, words: list[int]) -> None:
    """Choose drafts from the token ids `words` from the next round on.

    Collective over the tensor-parallel ranks, which all get the same ids. Raises ValueError, on every rank, before
    anything has changed. `SetDraftVocabulary` in `schemas.py` refuses ids below 0.
    """
    drafter = _drafter(worker)
    if drafter is None:
        raise ValueError(
            "the engine was started without a draft vocabulary; start it with --draft-vocabulary"
        )
    expected = len(drafter.hot_token_id)
    if len(words) != expected:
        raise ValueError(
            f"{len(words)} words, expected {expected}: the size is fixed when the engine starts"
        )
    total = drafter.target_worker.model_config.vocab_size
    if len(set(words)) != expected or max(words) >= total:
        raise ValueError(f"words: expected different ids from 0 to {total - 1}")
    # In place: captured graphs read this memory.
    drafter.hot_token_id.copy_(torch.tensor(sorted(words)))
    _copy_head_rows(drafter)


def _drafter(worker: Any) -> Any:
    """Return SGLang's `EagleDraftWorker` if it has a token map that can change, else None.

    The map of an EAGLE-3 drafter cannot: it belongs to the drafter's checkpoint, as does that drafter's own head.
    """
    drafter: Any = getattr(worker, "draft_worker", None)
    if getattr(drafter, "hot_token_id", None) is None:
        return None
    return None if drafter.speculative_algorithm.is_eagle3() else drafter


def _copy_head_rows(drafter: Any) -> None:
    """Copy the target's rows of the tokens into the drafter's head, in place: captured graphs read it. Collective."""
    _, head = drafter._resolve_shared_embed_and_head()
    # Not through `.data`, which would not raise the tensor's version. `rollout/embedded/packed.py`, which engines on a
    # CPU use, keeps packed copies of weights, and packs a weight again only when its version has changed.
    with torch.no_grad():
        drafter.draft_runner.model.lm_head.weight.copy_(_head_rows(head, drafter.hot_token_id))


def _head_rows(head: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return the output layer's rows `[S / tp, H]` of the tokens that this rank drafts from. Collective.

    head    `[V / tp, H]`, this rank's part
    tokens  `[S]` ids
    """
    group = parallel().tp_group
    if group.world_size == 1:
        return head[tokens]
    local = tokens - group.rank_in_group * len(head)
    on_this_rank = (local >= 0) & (local < len(head))
    rows = head.new_zeros(len(tokens), head.shape[1])
    rows[on_this_rank] = head[local[on_this_rank]]
    rows = group.all_reduce(rows)  # every row is on one rank, and 0 on the others
    # a copy, so that the other ranks' rows leave memory
    return rows.chunk(group.world_size)[group.rank_in_group].clone()


def _init_head(original: Callable, drafter: Any) -> None:
    """Wrap SGLang's `init_lm_head`, which indexes the target's rows as if this rank had all of them.

    Collective with several ranks and a token map.
    """
    tokens = drafter.hot_token_id
    if tokens is None or parallel().tp_group.world_size == 1:
        return original(drafter)
    embedding, head = drafter._resolve_shared_embed_and_head()
    drafter.hot_token_id = tokens.to(head.device)
    rows = _head_rows(head, drafter.hot_token_id)
    drafter.draft_runner.model.set_embed_and_head(embedding, rows)


def _after_update(returned: Any, manager: Any, *args: Any, **kwargs: Any) -> None:
    """Copy the rows again after an update, which may have changed the target's head. Collective.

    No rank waits in vain, because all ranks get the same updates.
    """
    drafter = _drafter(manager.draft_worker)
    if drafter is not None:
        _copy_head_rows(drafter)


def _after_start(returned: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """Hide the output layer of weight updates from the drafter's loader, which would fail on it."""
    drafter = _drafter(scheduler.draft_worker)
    if drafter is not None:
        load_through(
            drafter.draft_runner.model,
            lambda tensors: ((n, tensor) for n, tensor in tensors if n != HEAD),
        )
