"""The routes of a weight update: one push at a time, every bucket checked whole before a scheduler sees it.

They stand beside SGLang's own, which hold three promises less: nothing from the network is unpickled, a wrong name or
shape is refused before a tensor is written, and no mixture of two versions generates (`update.py`).
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
from megatron_rlspec.rollout.sglang.http.update import Update, Weights
from megatron_rlspec.rollout.sglang.scheduler import versions
from megatron_rlspec.rollout.sglang.scheduler.bucket_memory import of_handle
from megatron_rlspec.rollout.sglang.schemas import Refusal, parse_query

_sglang = versions.installed()
_SELECTOR = {"all": "all", "target": "target", "drafter": "draft"}
_CONNECT_SECONDS = 5.0  # to the trainer's store, before a scheduler waits for it
_UPDATE_SECONDS = 60.0  # that `generate` waits for the end of an update
_KEPT = 1 << 30  # bytes of shared memory
logger = logging.getLogger(__name__)


class _Memory:
    """Memory that SGLang's scheduler processes can map. One piece of at most `_KEPT` bytes stays between buckets.

    Allocating new pages costs more than the copy into them.
    """

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)

    @contextmanager
    def piece(self, size: int) -> Iterator[torch.Tensor]:
        """Lend `size` bytes."""
        piece = self._free
        self._free = torch.empty(0, dtype=torch.uint8)
        if piece.numel() < size:
            piece = torch.empty(size, dtype=torch.uint8).share_memory_()
        try:
            yield piece[:size]
        finally:
            if self._free.numel() < piece.numel() <= _KEPT:
                self._free = piece


weights = Weights()
_memory = _Memory()
_lock = asyncio.Lock()  # around what schedulers do in an update; no body is read under it
_closed = asyncio.Event()  # set while no update is open
_closed.set()
_served: list[ServedTensors] = []  # what the engine holds, once it was asked


async def may_generate() -> None:
    """Wait for the end of an open update. Raises Refusal if it does not come, or if weights are a mixture."""
    with suppress(TimeoutError):
        await asyncio.wait_for(_closed.wait(), _UPDATE_SECONDS)
    if weights.update is not None:
        raise Refusal(
            409,
            f"a weight update is open, to version {weights.update.version}; it ends with weights/end, "
            "or when another client begins one",
        )
    weights.check_defined()


@asynccontextmanager
async def _open_update(request: Request) -> AsyncIterator[Update]:
    """Lend the open update that a request names, under the lock. Raises Refusal."""
    query = parse_query(schemas.SessionQuery, request.query_params)
    async with _lock:
        yield weights.update_of(query.session)


async def begin(request: Request) -> JSONResponse:
    """Open an update, and return the token that its other requests name. Running samples are taken off the batch.

    An update that is open ends unfinished: its client may have ended without a word.
    """
    query = parse_query(schemas.BeginQuery, request.query_params)
    async with _lock:
        if weights.update is not None:
            await _give_up(weights.update, f"another one began, to version {query.version}")
        update = weights.begin(query.scope, query.version)
        _closed.clear()
        try:
            await manager().pause_generation(PauseGenerationReqInput(mode="retract"))
            check_success(*await _sglang.begin_push(manager(), _SELECTOR[query.scope]))
        except BaseException:
            await _give_up(update, "it could not begin")
            raise
    return JSONResponse({"session": update.token})


async def bucket(request: Request) -> JSONResponse:
    """Load a safetensors file of full tensors from the body."""
    # Before memory is taken. It is asked again under the lock, since another client may begin an update meanwhile.
    weights.update_of(parse_query(schemas.SessionQuery, request.query_params).session)
    served = await _served_tensors()
    size = request.headers.get("content-length", "")
    if not size.isdigit():
        raise Refusal(411, "expected a Content-Length")
    with _memory.piece(int(size)) as piece:
        view = piece.numpy().data
        received = 0
        async for part in request.stream():
            view[received : received + len(part)] = part
            received += len(part)
        async with _open_update(request) as update:
            entries = read_entries(view, served, update.scope)
            return await _load(piece, entries, update)


async def handle(request: Request) -> JSONResponse:
    """Load a bucket from the trainer's memory on a GPU, which the schedulers open."""
    asked = await parsed(request, schemas.HandleBody)
    async with _open_update(request) as update:
        check_described(asked, await _served_tensors(), update.scope)
        arguments = manager().server_args
        if arguments.device != "cuda" or not _sglang.opens_handles:
            raise Refusal(
                400,
                f"this engine, on {arguments.device}, opens no memory of a GPU; push with push.transport=http",
            )
        payloads = [of_handle(asked)] * arguments.tp_size
        message = _sglang.tensors(_SELECTOR[update.scope], payloads, load_format=None)
        loading = manager().update_weights_from_tensor(message, None)
        return await _loaded(update, asked.names, loading)


async def join(request: Request) -> JSONResponse:
    """Join the trainer, rank 0, in a process group."""
    asked = await parsed(request, schemas.JoinBody)
    async with _open_update(request):
        # A scheduler would wait for minutes for a trainer that is not there.
        await asyncio.to_thread(_check_reachable, asked.address, asked.port)
        message = InitWeightsUpdateGroupReqInput(
            master_address=asked.address,
            master_port=asked.port,
            rank_offset=asked.first,
            world_size=asked.size,
            group_name=asked.group,
            backend=asked.backend,
        )
        check_success(*await manager().init_weights_update_group(message, None))
    return JSONResponse({})


def _check_reachable(address: str, port: int) -> None:
    try:
        socket.create_connection((address, port), _CONNECT_SECONDS).close()
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error) or "no answer"
        raise Refusal(400, f"cannot connect to the trainer at {address}:{port}: {reason}") from None


async def receive(request: Request) -> JSONResponse:
    """Load a bucket that the trainer broadcasts in one piece."""
    asked = await parsed(request, schemas.ReceiveBody)
    async with _open_update(request) as update:
        check_described(asked, await _served_tensors(), update.scope)
        message = _sglang.broadcast(
            _SELECTOR[update.scope], asked.group, asked.names, asked.dtypes, asked.shapes
        )
        loading = manager().update_weights_from_distributed(message, None)
        return await _loaded(update, asked.names, loading)


async def end(request: Request) -> JSONResponse:
    """End an update that is complete: drop what older weights computed, stamp its version, and let samples go on."""
    async with _open_update(request) as update:
        if not update.sent:
            await _give_up(update, "no bucket came")
            raise Refusal(
                409, "no bucket came, so neither the weights nor their version have changed"
            )
        try:
            check_success(*await _sglang.end_push(manager()))
            if not update.failed:
                await run_command("stamp", {"version": update.version})
                manager()._update_weight_version_if_provided(update.version)
        except Refusal as refusal:
            update.failed = update.failed or str(refusal)
        try:
            weights.end(update)
        finally:
            _closed.set()
        await manager().continue_generation(ContinueGenerationReqInput())
    return JSONResponse({})


async def abandon(request: Request) -> JSONResponse:
    """End an update unfinished, at its owner's wish."""
    async with _open_update(request) as update:
        await _give_up(update, "its client gave it up")
    return JSONResponse({})


async def _give_up(update: Update, why: str) -> None:
    """End an update unfinished. If it has changed nothing, samples go on."""
    weights.abandon(update, why)
    logger.warning("rlspec: the update to version %s ended unfinished: %s", update.version, why)
    await _sglang.end_push(manager())
    if not weights.undefined:
        await manager().continue_generation(ContinueGenerationReqInput())
    _closed.set()


async def _load(piece: torch.Tensor, entries: Sequence[Entry], update: Update) -> JSONResponse:
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
    """Wait until the schedulers have loaded these tensors. Raises Refusal if not; then the update stays unfinished."""
    weights.mark_sent(update, names)
    try:
        check_success(*await loading)
    except Refusal as refusal:
        update.failed = str(refusal)
        raise
    return JSONResponse({})


async def _served_tensors() -> ServedTensors:
    """Return what the engine holds. The scheduler is asked once, since names and shapes never change."""
    if not _served:
        answer = await run_command("shapes", {})
        drafter = frozenset(answer["drafter"])
        _served.append(ServedTensors(answer["shapes"], drafter, answer["unnamed"]))
    return _served[0]
