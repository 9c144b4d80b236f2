"""The routes of a weight update: one push at a time, every bucket checked whole before a scheduler sees it.

They stand beside SGLang's own routes, and keep three promises that those do not: nothing from the network is unpickled,
a wrong name or shape is refused before a tensor is written, and no mixture of two versions generates (`update.py`).

The order of requests is begin, then buckets (`bucket`, `handle`, or `join` and `receive`), then `end` or `abandon`. The
other side is `client/engine.py` and `client/transport.py`; docs/http-api.md describes the bodies. All functions here
run in the event loop of SGLang's HTTP process, but `_check_reachable`, which blocks and so runs in a thread.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress

import torch
from fastapi import Request
from fastapi.responses import JSONResponse
from sglang.srt.managers.io_struct import (
    ContinueGenerationReqInput,
    InitWeightsUpdateGroupReqInput,
    PauseGenerationReqInput,
)
from sglang.srt.utils import MultiprocessingSerializer
from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorMetadata

from megatron_rlspec.rollout.sglang import schemas
from megatron_rlspec.rollout.sglang.bucket_checks import (
    Entry,
    ServedTensors,
    check_described,
    read_entries,
)
from megatron_rlspec.rollout.sglang.http.bodies import (
    check_success,
    manager,
    parsed,
    run_command,
)
from megatron_rlspec.rollout.sglang.http.update import Update, WeightsState
from megatron_rlspec.rollout.sglang.scheduler import versions
from megatron_rlspec.rollout.sglang.scheduler.bucket_memory import of_handle
from megatron_rlspec.rollout.sglang.schemas import Refusal, parse_query

_sglang = versions.installed()
# Our scope of an update -> SGLang's name for it.
_SELECTOR = {"all": "all", "target": "target", "drafter": "draft"}
_CONNECT_SECONDS = 5.0  # to reach the trainer's store, before a scheduler waits for it
_UPDATE_SECONDS = 60.0  # how long `generate` waits for the end of an update
_MAX_KEPT_BYTES = 1 << 30  # of shared memory, between buckets
logger = logging.getLogger(__name__)


class _Memory:
    """Shared memory, uint8, that SGLang's scheduler processes can map.

    One piece of at most `_MAX_KEPT_BYTES` is kept for the next bucket: allocating new pages costs more than the copy
    into them.
    """

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)

    @contextmanager
    def piece(self, size: int) -> Iterator[torch.Tensor]:
        """Lend `size` bytes. Their content is arbitrary.

        The schedulers must have read them when the `with` block ends: the next bucket overwrites them.
        """
        # No other request may get this piece meanwhile: bodies of two clients can arrive at the same time.
        piece = self._free
        self._free = torch.empty(0, dtype=torch.uint8)
        if piece.numel() < size:
            piece = torch.empty(size, dtype=torch.uint8).share_memory_()
        try:
            yield piece[:size]
        finally:
            # Another body may have given a piece back meanwhile: the larger one is kept.
            if self._free.numel() < piece.numel() <= _MAX_KEPT_BYTES:
                self._free = piece


weights = WeightsState()
_memory = _Memory()
# Held while schedulers work on an update, so that requests of two clients never mix. No body is read under it: a slow
# client would keep others from beginning an update.
_lock = asyncio.Lock()
# Set also after an update that left a mixture: `generate` then refuses at once.
_no_update_open = asyncio.Event()
_no_update_open.set()
# The answer of `_served_tensors`; [] until it was asked. Two equal ones if two first buckets came at once.
_served: list[ServedTensors] = []


async def wait_until_may_generate() -> None:
    """Wait for the end of an open update. Raises Refusal after `_UPDATE_SECONDS`, or if the weights are a mixture."""
    with suppress(TimeoutError):
        await asyncio.wait_for(_no_update_open.wait(), _UPDATE_SECONDS)
    if weights.update is not None:
        raise Refusal(
            409,
            f"a weight update is open, to version {weights.update.version}; it ends with weights/end, "
            "or when another client begins one",
        )
    weights.check_not_mixed()


@asynccontextmanager
async def _open_update(request: Request) -> AsyncIterator[Update]:
    """Hold the lock, and yield the open update that the query's `session` names. Raises Refusal if there is none.

    Read the request's body before: no body may be read under the lock.
    """
    query = parse_query(schemas.SessionQuery, request.query_params)
    async with _lock:
        yield weights.update_of(query.session)


async def begin(request: Request) -> JSONResponse:
    """Open an update, and return the token that its other requests name.

    Running samples lose their cache and wait; they are recomputed after the update. An update that is open ends
    unfinished, because its client may be dead.
    """
    query = parse_query(schemas.BeginQuery, request.query_params)
    async with _lock:
        if weights.update is not None:
            await _give_up(weights.update, f"another one began, to version {query.version}")
        # Before the engine is paused: from here on `wait_until_may_generate` lets no new request in.
        update = weights.begin(query.scope, query.version)
        _no_update_open.clear()
        try:
            await manager().pause_generation(PauseGenerationReqInput(mode="retract"))
            check_success(*await _sglang.begin_push(manager(), _SELECTOR[query.scope]))
        except BaseException:  # also CancelledError: the engine must not stay paused
            await _give_up(update, "it could not begin")
            raise
    return JSONResponse({"session": update.token})


async def bucket(request: Request) -> JSONResponse:
    """Load a safetensors file of full tensors (`push.bucket.Bucket.file`) from the body."""
    # Checked before memory is taken, and again under the lock: another client may begin an update meanwhile.
    weights.update_of(parse_query(schemas.SessionQuery, request.query_params).session)
    served = await _served_tensors()
    size = request.headers.get("content-length", "")
    if not size.isdigit():
        raise Refusal(411, "expected a Content-Length")
    with _memory.piece(int(size)) as piece:
        view = piece.numpy().data
        received = 0
        # The HTTP server delivers exactly Content-Length bytes; ClientDisconnect ends a body that is cut off.
        async for part in request.stream():
            view[received : received + len(part)] = part
            received += len(part)
        async with _open_update(request) as update:
            entries = read_entries(view, served, update.scope)
            return await _load(piece, entries, update)


async def handle(request: Request) -> JSONResponse:
    """Load a bucket from the trainer's GPU memory, which each scheduler opens (`scheduler/bucket_memory.py`)."""
    body = await parsed(request, schemas.HandleBody)
    async with _open_update(request) as update:
        check_described(body, await _served_tensors(), update.scope)
        arguments = manager().server_args
        if arguments.device != "cuda" or not _sglang.opens_handles:
            raise Refusal(
                400,
                f"this engine, on {arguments.device}, opens no memory of a GPU; push with push.transport=http",
            )
        payloads = [of_handle(body)] * arguments.tp_size  # a handle can be opened by every rank
        message = _sglang.tensors(_SELECTOR[update.scope], payloads, load_format=None)
        loading = manager().update_weights_from_tensor(message, None)
        return await _loaded(update, body.names, loading)


async def join(request: Request) -> JSONResponse:
    """Join a process group whose rank 0 is the trainer (`client.transport.GroupBroadcast`). Returns after all joined.

    This engine's tensor-parallel ranks are `first`, `first` + 1, ... of the group.
    """
    body = await parsed(request, schemas.JoinBody)
    async with _open_update(request):
        # A scheduler would wait for minutes for a trainer that is not there.
        await asyncio.to_thread(_check_reachable, body.address, body.port)
        message = InitWeightsUpdateGroupReqInput(
            master_address=body.address,
            master_port=body.port,
            rank_offset=body.first,
            world_size=body.size,
            group_name=body.group,
            backend=body.backend,
        )
        check_success(*await manager().init_weights_update_group(message, None))
    return JSONResponse({})


def _check_reachable(address: str, port: int) -> None:
    """Connect to the trainer's store and close the connection. Raises Refusal. Blocks: call it in a thread."""
    try:
        socket.create_connection((address, port), _CONNECT_SECONDS).close()
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error) or "no answer"
        raise Refusal(400, f"cannot connect to the trainer at {address}:{port}: {reason}") from None


async def receive(request: Request) -> JSONResponse:
    """Load a bucket that the trainer broadcasts in one piece, to the group of `join`."""
    body = await parsed(request, schemas.ReceiveBody)
    async with _open_update(request) as update:
        check_described(body, await _served_tensors(), update.scope)
        message = _sglang.broadcast(
            _SELECTOR[update.scope], body.group, body.names, body.dtypes, body.shapes
        )
        loading = manager().update_weights_from_distributed(message, None)
        return await _loaded(update, body.names, loading)


async def end(request: Request) -> JSONResponse:
    """End an update that is complete: drop what older weights computed, stamp its version, and let samples go on.

    Raises Refusal if a bucket failed or tensors are missing. The engine then stays paused until a later update.
    """
    async with _open_update(request) as update:
        if not update.sent:
            await _give_up(update, "no bucket came")
            raise Refusal(
                409, "no bucket came, so neither the weights nor their version have changed"
            )
        try:
            # SGLang's session closes first. `stamp` (`scheduler/control.py`) then flushes the cached prefixes of the
            # old weights, before anything may generate, and tells the schedulers the version. The last call tells it
            # to this process, which names it in answers.
            check_success(*await _sglang.end_push(manager()))
            if not update.failed:
                await run_command("stamp", {"version": update.version})
                manager()._update_weight_version_if_provided(update.version)
        except Refusal as refusal:
            update.failed = update.failed or str(refusal)  # `weights.end` raises it
        try:
            weights.end(update)
        finally:
            _no_update_open.set()
        # Not reached if `weights.end` raised: then the weights are a mixture, and samples must not go on.
        await manager().continue_generation(ContinueGenerationReqInput())
    return JSONResponse({})


async def abandon(request: Request) -> JSONResponse:
    """End an update unfinished, because its client asks for it."""
    async with _open_update(request) as update:
        await _give_up(update, "its client gave it up")
    return JSONResponse({})


async def _give_up(update: Update, why: str) -> None:
    """End an update unfinished; call it under the lock. Samples go on unless the weights are a mixture."""
    weights.abandon(update, why)
    logger.warning("rlspec: the update to version %s ended unfinished: %s", update.version, why)
    # Its result does not matter: SGLang refuses it where `begin` did not get as far as a session.
    await _sglang.end_push(manager())
    if not weights.why_mixed:
        await manager().continue_generation(ContinueGenerationReqInput())
    _no_update_open.set()


async def _load(piece: torch.Tensor, entries: Sequence[Entry], update: Update) -> JSONResponse:
    """Have the schedulers load the tensors at `entries` of `piece`, a safetensors file in shared memory, uint8."""
    metadata = []
    for entry in entries:
        shape = torch.Size(entry.shape)
        size = entry.end - entry.first
        metadata.append(
            FlattenedTensorMetadata(entry.name, shape, entry.dtype, entry.first, entry.end, size)
        )
    # Pickled for SGLang's own scheduler processes only, with the tensor in shared memory. Each process gets its own
    # pickle, because a handle of shared memory can be opened only once.
    flattened = {"flattened_tensor": piece, "metadata": metadata}
    payloads = []
    for _ in range(manager().server_args.tp_size):
        payloads.append(MultiprocessingSerializer.serialize(flattened))
    message = _sglang.tensors(_SELECTOR[update.scope], payloads)
    names = [entry.name for entry in entries]
    return await _loaded(update, names, manager().update_weights_from_tensor(message, None))


async def _loaded(
    update: Update, names: Sequence[str], loading: Awaitable[tuple[bool, str]]
) -> JSONResponse:
    """Wait until the schedulers have loaded these tensors. Raises Refusal if one fails; `end` then fails, too."""
    # Before the wait: a load that fails or is cancelled may have written some of them.
    weights.mark_sent(update, names)
    try:
        check_success(*await loading)
    except Refusal as refusal:
        update.failed = str(refusal)
        raise
    return JSONResponse({})


async def _served_tensors() -> ServedTensors:
    """Return the tensors that the engine holds. The scheduler is asked once: names and shapes never change."""
    if not _served:
        answer = await run_command("shapes", {})
        drafter = frozenset(answer["drafter"])
        _served.append(ServedTensors(answer["shapes"], drafter, answer["unnamed"]))
    return _served[0]
