"""The health contract around slime's own weight updates, on its train ranks.

`wrap()` wraps `update_weights` of slime's updaters (CUDA IPC, NCCL, disk deltas). Tensors are fingerprinted where the
updater has them under the checkpoint's names. Afterwards rank 0 asks every engine what it holds. A second push is
collective, like the first: rank 0 decides, and the others follow its orders. The full disk update ends in slime's
driver, after these ranks have finished: its fingerprints are written beside its files, for `metrics.py`.
"""

from __future__ import annotations

import functools
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager
from typing import Any

import ray
import torch
import torch.distributed as dist
from slime.backends.megatron_utils.update_weight import update_weight_from_disk as from_disk
from slime.backends.megatron_utils.update_weight.hf_weight_iterator_direct import (
    HfWeightIteratorDirect,
)
from slime.backends.megatron_utils.update_weight.update_weight_from_distributed import (
    UpdateWeightFromDistributed,
)
from slime.backends.megatron_utils.update_weight.update_weight_from_tensor import (
    UpdateWeightFromTensor,
)
from slime.utils.distributed_utils import get_gloo_group

from megatron_rlspec.integrations.slime import state as slime_state
from megatron_rlspec.integrations.slime.engines import after_push, drafter_names
from megatron_rlspec.push.contract import HealthError
from megatron_rlspec.push.fingerprint import fingerprints

Tensors = Callable[[], Iterable[tuple[str, torch.Tensor]]]
_marks: dict[str, int] | None = None  # of the push that runs now


def wrap(args: Namespace, beside: Tensors | None = None) -> None:
    """Replace `update_weights` of the updater that `args` select, and fingerprint tensors where it has them.

    `beside`: further full tensors that every push sends after slime's, on every rank; collective.
    """
    if beside is not None:
        HfWeightIteratorDirect.get_hf_weight_chunks = _with_chunk(
            HfWeightIteratorDirect.get_hf_weight_chunks, beside
        )
        UpdateWeightFromDistributed._iter_non_expert_chunks = _with_chunk_of_first_rank(
            UpdateWeightFromDistributed._iter_non_expert_chunks, beside
        )
    if args.update_weight_mode == "delta":
        from slime.backends.megatron_utils.update_weight.update_weight_from_disk_delta import (
            UpdateWeightFromDiskDelta,
        )

        UpdateWeightFromDiskDelta._iter_hf_tensors = _noting_chunks(
            UpdateWeightFromDiskDelta._iter_hf_tensors, single=True
        )
        UpdateWeightFromDiskDelta.update_weights = checked(
            UpdateWeightFromDiskDelta.update_weights, repeatable=False
        )
    elif args.update_weight_transport == "disk":
        HfWeightIteratorDirect.get_hf_weight_chunks = _noting_chunks(
            HfWeightIteratorDirect.get_hf_weight_chunks
        )
        from_disk.UpdateWeightFromDisk.update_weights = _noting_for_driver(
            from_disk.UpdateWeightFromDisk.update_weights
        )
    elif args.colocate:
        UpdateWeightFromTensor._send_hf_params = _noting(
            UpdateWeightFromTensor._send_hf_params, own
        )
        UpdateWeightFromTensor.update_weights = checked(UpdateWeightFromTensor.update_weights)
    else:
        UpdateWeightFromDistributed._on_chunk = _noting(UpdateWeightFromDistributed._on_chunk)
        UpdateWeightFromDistributed.update_weights = checked(
            UpdateWeightFromDistributed.update_weights
        )


def checked(update_weights: Callable, repeatable: bool = True) -> Callable:
    """Return slime's `update_weights`, followed by the contract. It raises HealthError on every rank or on none.

    `repeatable`: a second call sends the same tensors again. A stream of deltas does not.
    """

    @functools.wraps(update_weights)
    def wrapped(updater: Any) -> None:
        before = updater.weight_version
        sent = _push(update_weights, updater)
        # the first call of a delta update takes a snapshot and sends nothing
        if updater.weight_version == before:
            return
        if dist.get_rank():
            while (order := _order(None))["push"]:
                updater.weight_version -= 1
                _push(update_weights, updater)
        else:
            together = True  # whether the other ranks wait for an order; False during a push

            def push_again() -> dict[str, int]:
                nonlocal together
                _order({"push": True})
                together = False
                updater.weight_version -= 1  # the same weights, hence the same version
                again = _push(update_weights, updater)
                together = True
                return again

            order = {
                "push": False,
                "metrics": {},
                "error": "rank 0 failed while it checked the engines",
            }
            try:
                health = after_push(
                    _urls(updater),
                    sent,
                    updater.weight_version,
                    drafter_names(
                        updater.args.hf_checkpoint, getattr(updater.args, "rlspec_path", "")
                    ),
                    push_again if repeatable else None,
                    getattr(updater.args, "sglang_api_key", None) or "",
                    quantised=bool(updater.quantization_config),
                )
                order.update(metrics=health.metrics(), error="")
            except HealthError as error:
                order["error"] = str(error)
            finally:
                if together:
                    _order(order)
        updater.update_weight_metrics.update(order["metrics"])
        if order["error"]:
            raise HealthError(order["error"])

    return wrapped


def _noting_for_driver(update_weights: Callable) -> Callable:
    @functools.wraps(update_weights)
    def wrapped(updater: Any) -> None:
        sent = _push(update_weights, updater)
        if dist.get_rank() == 0:
            slime_state.write_sent(updater.args, updater.weight_version, sent)

    return wrapped


def _push(update_weights: Callable, updater: Any) -> dict[str, int]:
    """Push once, collectively. Returns the fingerprints of what all ranks sent on rank 0, {} on the others."""
    with _noted() as marks:
        update_weights(updater)
    everyone: list[Any] | None = None if dist.get_rank() else [None] * dist.get_world_size()
    dist.gather_object(marks, everyone, dst=0, group=get_gloo_group())
    return {name: mark for rank in everyone or () for name, mark in rank.items()}


@contextmanager
def _noted() -> Any:
    global _marks
    _marks = {}
    try:
        yield _marks
    finally:
        _marks = None


def _note(tensors: Iterable[tuple[str, Any]]) -> None:
    """Note a chunk. The host waits for the device once a chunk."""
    chunk = list(tensors)
    if _marks is not None:
        _marks.update(
            zip(
                (name for name, _ in chunk),
                fingerprints(tensor for _, tensor in chunk),
                strict=True,
            )
        )


def _noting(send: Callable, which: Callable | None = None) -> Callable:
    """Return `send`, which also notes its tensors, or `which` of them."""

    @functools.wraps(send)
    def wrapped(updater: Any, tensors: Any) -> Any:
        _note(which(tensors, dist.get_rank(), updater._expert_transfer_plan) if which else tensors)
        return send(updater, tensors)

    return wrapped


def own(
    tensors: Iterable[tuple[str, Any]], rank: int, plan: Sequence[Any]
) -> list[tuple[str, Any]]:
    """Return those that rank 0 does not send, too, or all on rank 0.

    By CUDA IPC every rank sends all tensors, to the engine on its GPU. Under slime's `plan` of experts, each rank sends
    only the experts that its engine holds.
    """
    if not rank:
        return list(tensors)
    return [(name, tensor) for name, tensor in tensors if plan and ".experts." in name]


def _noting_chunks(chunks: Callable, single: bool = False) -> Callable:
    """Return `chunks`, which also notes the tensors of each chunk, or the `single` one that it yields."""

    @functools.wraps(chunks)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        for found in chunks(*args, **kwargs):
            _note([found] if single else found)
            yield found

    return wrapped


def _with_chunk(chunks: Callable, beside: Tensors) -> Callable:
    """Return `chunks`, with one more in a push; what slime exports otherwise holds its own model only."""

    @functools.wraps(chunks)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        yield from chunks(*args, **kwargs)
        if _marks is not None:
            yield list(beside())

    return wrapped


def _with_chunk_of_first_rank(chunks: Callable, beside: Tensors) -> Callable:
    @functools.wraps(chunks)
    def wrapped(updater: Any) -> Any:
        yield from chunks(updater)
        tensors = list(beside())
        if updater._is_pp_src_rank:
            yield tensors

    return wrapped


def _order(order: dict[str, Any] | None) -> dict[str, Any]:
    """Return rank 0's order on every rank."""
    box: list[Any] = [order]
    dist.broadcast_object_list(box, src=0, group=get_gloo_group())
    return box[0]


def _urls(updater: Any) -> list[str]:
    engines = [*updater.rollout_engines, *getattr(updater, "distributed_rollout_engines", ())]
    return ray.get([engine.get_url.remote() for engine in engines])
