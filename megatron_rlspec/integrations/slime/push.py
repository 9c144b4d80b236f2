"""The health contract around slime's own weight updates, on its train ranks.

`wrap()` puts `update_weights` of slime's updaters (CUDA IPC, NCCL, disk deltas) between two looks: what is sent is
fingerprinted where the updater has it in the checkpoint's names, and afterwards rank 0 asks every engine what it holds.
A second push is collective, like the first; so rank 0 decides, and the others follow its orders. The full disk update
ends in slime's driver, after these ranks: its fingerprints are left beside its files, for `metrics.py`.
"""

from __future__ import annotations

import functools
from argparse import Namespace
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from typing import Any

import ray
import torch.distributed as dist
from slime.backends.megatron_utils.update_weight import update_weight_from_disk as from_disk
from slime.backends.megatron_utils.update_weight.hf_weight_iterator_direct import HfWeightIteratorDirect
from slime.backends.megatron_utils.update_weight.update_weight_from_distributed import UpdateWeightFromDistributed
from slime.backends.megatron_utils.update_weight.update_weight_from_tensor import UpdateWeightFromTensor
from slime.utils.distributed_utils import get_gloo_group

from megatron_rlspec.integrations.slime import state as slime_state
from megatron_rlspec.integrations.slime.engines import after_push, drafter_names
from megatron_rlspec.weights.contract import HealthError
from megatron_rlspec.weights.fingerprint import fingerprint

_marks: dict[str, int] | None = None  # of the push that runs


def wrap(args: Namespace) -> None:
    """Replace `update_weights` of the updater that `args` will choose, and listen where it has tensors."""
    if args.update_weight_mode == "delta":
        from slime.backends.megatron_utils.update_weight.update_weight_from_disk_delta import UpdateWeightFromDiskDelta

        UpdateWeightFromDiskDelta._iter_hf_tensors = _heard_singly(UpdateWeightFromDiskDelta._iter_hf_tensors)
        UpdateWeightFromDiskDelta.update_weights = checked(UpdateWeightFromDiskDelta.update_weights, repeatable=False)
    elif args.update_weight_transport == "disk":
        HfWeightIteratorDirect.get_hf_weight_chunks = _heard_in_chunks(HfWeightIteratorDirect.get_hf_weight_chunks)
        from_disk.UpdateWeightFromDisk.update_weights = _announced(from_disk.UpdateWeightFromDisk.update_weights)
    elif args.colocate:
        UpdateWeightFromTensor._send_hf_params = _heard(UpdateWeightFromTensor._send_hf_params)
        UpdateWeightFromTensor.update_weights = checked(UpdateWeightFromTensor.update_weights)
    else:
        UpdateWeightFromDistributed._on_chunk = _heard(UpdateWeightFromDistributed._on_chunk)
        UpdateWeightFromDistributed.update_weights = checked(UpdateWeightFromDistributed.update_weights)


def checked(update_weights: Callable, repeatable: bool = True) -> Callable:
    """slime's `update_weights`, followed by the contract; raises HealthError on every rank or on none.

    `repeatable`: a second call sends the same again, which a stream of deltas does not.
    """

    @functools.wraps(update_weights)
    def wrapped(updater: Any) -> None:
        before = updater.weight_version
        sent = _push(update_weights, updater)
        if updater.weight_version == before:  # a delta stream's first call takes a snapshot and sends nothing
            return
        if dist.get_rank():
            while (order := _order(None))["push"]:
                updater.weight_version -= 1
                _push(update_weights, updater)
        else:
            together = True  # whether the others wait for an order, and not in a push that failed here

            def push_again() -> dict[str, int]:
                nonlocal together
                _order({"push": True})
                together = False
                updater.weight_version -= 1  # the same weights, hence the same version
                again = _push(update_weights, updater)
                together = True
                return again

            order = {"push": False, "metrics": {}, "error": "rank 0 failed while it checked the engines"}
            try:
                health = after_push(
                    _urls(updater),
                    sent,
                    updater.weight_version,
                    drafter_names(updater.args.hf_checkpoint),
                    push_again if repeatable else None,
                    _key(updater),
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


def _announced(update_weights: Callable) -> Callable:
    @functools.wraps(update_weights)
    def wrapped(updater: Any) -> None:
        sent = _push(update_weights, updater)
        if dist.get_rank() == 0:
            slime_state.write_sent(updater.args, updater.weight_version, sent)

    return wrapped


def _push(update_weights: Callable, updater: Any) -> dict[str, int]:
    """One push, collective; on rank 0 the fingerprints of what all ranks sent together, on others nothing."""
    with _listening() as marks:
        update_weights(updater)
    everyone: list[Any] | None = None if dist.get_rank() else [None] * dist.get_world_size()
    dist.gather_object(marks, everyone, dst=0, group=get_gloo_group())
    return {name: mark for rank in everyone or () for name, mark in rank.items()}


@contextmanager
def _listening() -> Any:
    global _marks
    _marks = {}
    try:
        yield _marks
    finally:
        _marks = None


def _note(tensors: Iterable[tuple[str, Any]]) -> None:
    if _marks is not None:
        _marks.update((name, fingerprint(tensor)) for name, tensor in tensors)


def _heard(send: Callable) -> Callable:
    @functools.wraps(send)
    def wrapped(updater: Any, tensors: Any) -> Any:
        _note(tensors)
        return send(updater, tensors)

    return wrapped


def _heard_in_chunks(chunks: Callable) -> Callable:
    @functools.wraps(chunks)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        for tensors in chunks(*args, **kwargs):
            _note(tensors)
            yield tensors

    return wrapped


def _heard_singly(tensors: Callable) -> Callable:
    @functools.wraps(tensors)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        for name, tensor in tensors(*args, **kwargs):
            _note([(name, tensor)])
            yield name, tensor

    return wrapped


def _order(order: dict[str, Any] | None) -> dict[str, Any]:
    """Rank 0's, on every rank."""
    box: list[Any] = [order]
    dist.broadcast_object_list(box, src=0, group=get_gloo_group())
    return box[0]


def _key(updater: Any) -> str:
    return getattr(updater.args, "sglang_api_key", None) or ""


def _urls(updater: Any) -> list[str]:
    return ray.get([engine.get_url.remote() for engine in _engines(updater)])


def _engines(updater: Any) -> list[Any]:
    return [*updater.rollout_engines, *getattr(updater, "distributed_rollout_engines", ())]
