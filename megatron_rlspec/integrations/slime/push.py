"""The health contract around slime's own weight updates, on its train ranks.

`hooks.init` calls `wrap`, which wraps `update_weights` of the updater that slime uses (CUDA IPC, NCCL or disk). Tensors
are fingerprinted where the updater has them under the checkpoint's names. After an update by CUDA IPC or NCCL, rank 0
asks every engine what it holds. A second push is collective, like the first: rank 0 decides, and the others follow. An
update through the disk ends in slime's driver, after these ranks have finished: its fingerprints are written beside its
files, and `rollout.py` asks the engines.

Every function that wraps a method of slime runs on all train ranks in the same order. Collectives here use slime's gloo
group: slime destroys its NCCL groups when it gives its GPUs away.
"""

from __future__ import annotations

import functools
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
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
from megatron_rlspec.integrations.slime.engines import after_push, drafter_test
from megatron_rlspec.integrations.slime.options import Options
from megatron_rlspec.push.fingerprint import fingerprints
from megatron_rlspec.push.push import exporting
from megatron_rlspec.types import Scope

Tensors = Callable[[], Iterable[tuple[str, torch.Tensor]]]
# Fingerprints of this rank in the push that runs now; None: no push runs.
_sent: dict[str, int] | None = None


def wrap(args: Namespace, eagle3: Tensors | None = None) -> None:
    """Replace `update_weights` of the updater that `args` select, and fingerprint tensors where it has them.

    Call it once in a process: it changes slime's classes, and a second call would wrap the wrappers.

    `eagle3`: further full tensors that every push also sends, on every rank; collective.
    """
    iterator = HfWeightIteratorDirect
    distributed = UpdateWeightFromDistributed
    # First the chunk, then the fingerprints around it: the EAGLE-3 drafter's tensors must be fingerprinted, too.
    if eagle3 is not None:
        iterator.get_hf_weight_chunks = _with_chunk(iterator.get_hf_weight_chunks, eagle3)
        distributed._iter_non_expert_chunks = _with_chunk(
            distributed._iter_non_expert_chunks, eagle3, only_first=True
        )
    if args.update_weight_transport == "disk":
        iterator.get_hf_weight_chunks = _noting_chunks(iterator.get_hf_weight_chunks)
        updater = from_disk.UpdateWeightFromDisk
        updater.update_weights = _noting_for_driver(updater.update_weights)
    elif args.colocate:
        colocated = UpdateWeightFromTensor
        colocated._send_hf_params = _noting(colocated._send_hf_params, only_sent_here)
        colocated.update_weights = checked(colocated.update_weights)
    else:
        distributed._on_chunk = _noting(distributed._on_chunk)
        distributed.update_weights = checked(distributed.update_weights)


def checked(update_weights: Callable) -> Callable:
    """Return slime's `update_weights`, followed by the contract (`engines.after_push`); collective.

    If an engine may hold a wrong target, rank 0 raises HealthError and the others PushError.
    """

    @functools.wraps(update_weights)
    def wrapped(updater: Any) -> None:
        version_before = updater.weight_version
        sent = _push(update_weights, updater)

        def export_again(scope: Scope) -> Any:
            # `update_weights` adds 1. The same weights must get the same version.
            updater.weight_version = version_before
            return _push(update_weights, updater).items()

        metrics: list[Any] = [None]
        # Rank 0 checks, and may push again by `source`. The other ranks stay in `exporting` and take part in its pushes
        # until rank 0 is done. If rank 0 raises, all raise, so no rank waits in the broadcast below.
        with exporting(export_again, _broadcast_number) as source:
            if source is not None:
                metrics[0] = _check(updater, sent, lambda: dict(source("all")))
        dist.broadcast_object_list(metrics, src=0, group=get_gloo_group())
        updater.update_weight_metrics.update(metrics[0])

    return wrapped


def _check(updater: Any, sent: dict[str, int], push_again: Any) -> dict[str, float]:
    """Check every engine, on rank 0. Returns metrics `health/*`. Raises HealthError.

    sent        fingerprints of all ranks, by name
    push_again  pushes once more and returns what it sent
    """
    args = updater.args
    is_drafter = drafter_test(args.hf_checkpoint, Options.from_args(args).drafter.path)
    return after_push(_urls(updater), sent, updater.weight_version, is_drafter, push_again)


def _broadcast_number(value: int) -> int:
    """Return rank 0's `value` on every rank; collective."""
    number = torch.tensor([value])
    dist.broadcast(number, src=0, group=get_gloo_group())
    return int(number)


def _noting_for_driver(update_weights: Callable) -> Callable:
    """Return `update_weights` of the disk updater, which also writes version and fingerprints for `rollout.py`."""

    @functools.wraps(update_weights)
    def wrapped(updater: Any) -> None:
        sent = _push(update_weights, updater)
        if dist.get_rank() == 0:
            slime_state.write_sent(updater.args, updater.weight_version, sent)

    return wrapped


def _push(update_weights: Callable, updater: Any) -> dict[str, int]:
    """Push once, collectively. Returns the fingerprints of what all ranks sent on rank 0, {} on the others.

    Where two ranks fingerprinted one name, the higher rank's counts.
    """
    global _sent
    local: dict[str, int] = {}
    _sent = local  # `_note` fills it while `update_weights` sends
    try:
        update_weights(updater)
    finally:
        _sent = None
    main = dist.get_rank() == 0
    parts: list[Any] | None = [None] * dist.get_world_size() if main else None
    dist.gather_object(local, parts, dst=0, group=get_gloo_group())
    everyone: dict[str, int] = {}
    for part in parts or ():
        everyone |= part
    return everyone


def _note(tensors: Iterable[tuple[str, Any]]) -> None:
    """Add the fingerprints of a chunk to `_sent`. The host waits for the device once a chunk."""
    if _sent is None:
        return
    names = []
    values = []
    for name, tensor in tensors:
        names.append(name)
        values.append(tensor)
    _sent.update(zip(names, fingerprints(values), strict=True))


def _noting(send: Callable, which: Callable | None = None) -> Callable:
    """Return `send`, a method of an updater, which also fingerprints its tensors.

    which  chooses those to fingerprint: (tensors, rank, slime's plan of experts); None: all
    """

    @functools.wraps(send)
    def wrapped(updater: Any, tensors: Any) -> Any:
        if which is None:
            _note(tensors)
        else:
            _note(which(tensors, dist.get_rank(), updater._expert_transfer_plan))
        return send(updater, tensors)

    return wrapped


def only_sent_here(
    tensors: Iterable[tuple[str, Any]], rank: int, plan: Sequence[Any]
) -> list[tuple[str, Any]]:
    """Return the tensors that this rank fingerprints, so that each is fingerprinted about once in the job.

    By CUDA IPC every rank sends all tensors, to the engine on its GPU. So rank 0 takes all of its own, and the others
    none. Under slime's `plan` of experts, each rank sends only the experts that its engine holds: then every rank takes
    those, too. An empty `plan`: slime has none.
    """
    if rank == 0:
        return list(tensors)
    return [(name, tensor) for name, tensor in tensors if plan and ".experts." in name]


def _noting_chunks(chunks: Callable) -> Callable:
    """Return `chunks`, which also fingerprints the tensors of each chunk."""

    @functools.wraps(chunks)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        for chunk in chunks(*args, **kwargs):
            _note(chunk)
            yield chunk

    return wrapped


def _with_chunk(chunks: Callable, eagle3: Tensors, only_first: bool = False) -> Callable:
    """Return `chunks`, a generator of slime, which yields one more chunk in a push: the EAGLE-3 drafter's tensors.

    Outside a push slime exports its own model only.

    only_first  rank 0 alone yields the chunk. The others still run `eagle3`, which is collective
    """

    @functools.wraps(chunks)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        yield from chunks(*args, **kwargs)
        if _sent is None:
            return
        tensors = list(eagle3())
        if not only_first or dist.get_rank() == 0:
            yield tensors

    return wrapped


def _urls(updater: Any) -> list[str]:
    """Return the URLs of all engines that an updater pushes to."""
    engines = [*updater.rollout_engines, *getattr(updater, "distributed_rollout_engines", ())]
    return ray.get([engine.get_url.remote() for engine in engines])
