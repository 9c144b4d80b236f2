"""The routes of a weight update: one push at a time, every bucket checked whole before a scheduler sees it."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from sglang.srt.managers.io_struct import (
    ContinueGenerationReqInput,
    InitWeightsUpdateGroupReqInput,
    PauseGenerationReqInput,
)
from sglang.srt.utils import MultiprocessingSerializer
from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorMetadata

from megatron_rlspec.rollout.sglang import limits, schemas
from megatron_rlspec.rollout.sglang.bucket_checks import (
    Entry,
    ServedTensors,
    laid_out,
    read_entries,
)
from megatron_rlspec.rollout.sglang.http.bodies import (
    content_length,
    done,
    manager,
    parsed,
    parts,
    read_nothing,
    run_command,
)
from megatron_rlspec.rollout.sglang.http.update import Update, Weights
from megatron_rlspec.rollout.sglang.scheduler import versions
from megatron_rlspec.rollout.sglang.scheduler.bucket_memory import of_handle
from megatron_rlspec.rollout.sglang.schemas import Refusal, parse_query

_sglang = versions.installed()
_SELECTOR = {"all": "all", "target": "target", "drafter": "draft"}
_KEPT = 1 << 30  # bytes of shared memory that stay between pushes
logger = logging.getLogger(__name__)
_LOOKED_AT = 0.2  # seconds between two looks at whether an owner is still connected
_PROBE_SECONDS = 5.0  # for a trainer's store to answer before a scheduler may wait for it


class _Memory:
    """Memory that SGLang's scheduler processes can map. One piece stays between buckets.

    Allocating new pages costs more than the copy into them.
    """

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)

    @contextmanager
    def piece(self, size: int) -> Iterator[torch.Tensor]:
        """Lend `size` bytes."""
        taken, self._free = self._free, torch.empty(0, dtype=torch.uint8)
        if taken.numel() < size:
            taken = torch.empty(size, dtype=torch.uint8).share_memory_()
        try:
            yield taken[:size]
        finally:
            if self._free.numel() < taken.numel():
                self._free = taken

    def trim(self) -> None:
        """Give back what is more than a push's first bucket will need."""
        if self._free.numel() > _KEPT:
            self._free = torch.empty(0, dtype=torch.uint8)


weights = Weights()
_memory = _Memory()
_lock = asyncio.Lock()  # around what schedulers do in an update; no body is read under it
_closed = asyncio.Event()  # while no update is open
_closed.set()
_groups: set[str] = set()
_held: list[ServedTensors] = []  # what the engine holds, once it was asked


async def may_generate() -> None:
    """Wait for the end of an open update. Raises Refusal if it does not come, or if weights are undefined."""
    with suppress(TimeoutError):
        await asyncio.wait_for(_closed.wait(), limits.UPDATE_WAIT)
    weights.check()


@asynccontextmanager
async def between_updates(asleep: bool) -> AsyncIterator[None]:
    """Keep updates away while the engine goes to sleep or wakes up. Raises Refusal unless it is `asleep` or awake."""
    async with _alone():
        weights.check_closed()
        weights.check_asleep(asleep)
        # Only names of tensors that a push can send: tied ones come once, and without known names there are none.
        weights.sleep((await _served()).shapes)
        yield
        weights.asleep = not asleep


async def begin(request: Request) -> Response:
    """Open an update, and return the token that its other requests name. Running samples are taken off the batch."""
    query = _query(request, schemas.BeginQuery)
    await read_nothing(request)
    async with _alone():
        update = weights.begin(query.scope, query.version)
        _closed.clear()
        try:
            await manager().pause_generation(PauseGenerationReqInput(mode="retract"))
            done(*await _sglang.begin_push(manager(), _SELECTOR[query.scope]))
        except BaseException:
            await _close(update, "it could not begin", opened=False)
            raise
        if await request.is_disconnected():
            await _close(update, "its client left before it began")
            raise Refusal(409, "the client closed the connection, so the update was withdrawn")
        _watchers[update.token] = asyncio.create_task(_watch(update))
        if query.hold == "true":
            return StreamingResponse(_hold(request, update), media_type="application/x-ndjson")
        return JSONResponse({"session": update.token})


async def _hold(request: Request, update: Update) -> AsyncIterator[bytes]:
    """Answer with the token, and end the update if its client closes the connection before."""
    try:
        yield json.dumps({"session": update.token}).encode() + b"\n"
        while weights.update is update and not await request.is_disconnected():
            await asyncio.sleep(_LOOKED_AT)
    finally:
        if weights.update is update:  # in a task of its own: this one may be cancelled
            _watchers[f"{update.token}.left"] = asyncio.create_task(_leave(update))


async def _leave(update: Update) -> None:
    async with _lock:
        if weights.update is update:
            await _close(update, "its client closed the connection")
    _watchers.pop(f"{update.token}.left", None)


_watchers: dict[str, asyncio.Task[None]] = {}


async def _watch(update: Update) -> None:
    """End an update whose owner falls silent."""
    try:
        while weights.update is update:
            if (left := weights.silence(update)) > 0:
                await asyncio.sleep(left)
                continue
            async with _lock:
                if weights.update is update and weights.silence(update) <= 0:
                    await _close(update, f"its client was silent for {limits.UPDATE_SILENT:.0f} s")
    finally:
        _watchers.pop(update.token, None)


async def _close(update: Update, why: str, opened: bool = True) -> None:
    """End an update unfinished. If it has changed nothing, samples go on, unless a client asked for a pause."""
    weights.abandon(update, why)
    logger.warning("rlspec: the update to version %s ended unfinished: %s", update.version, why)
    if opened:
        await _sglang.end_push(manager())
    if not (weights.undefined or weights.paused):
        await manager().continue_generation(ContinueGenerationReqInput())
    _closed.set()
    _memory.trim()


async def abandon(request: Request) -> JSONResponse:
    """End an update unfinished, at its owner's wish."""
    query = _query(request, schemas.SessionQuery)
    await read_nothing(request)
    async with _alone():
        await _close(weights.of(query.session), "its client gave it up")
        return JSONResponse({})


async def end(request: Request) -> JSONResponse:
    """End an update that is complete: drop what older weights computed, and stamp its version."""
    query = _query(request, schemas.SessionQuery)
    await read_nothing(request)
    async with _alone():
        update = weights.of(query.session)
        if not update.sent:
            await _close(update, "no bucket came")
            raise Refusal(
                409, "no bucket came, so neither the weights nor their version have changed"
            )
        try:
            done(*await _sglang.end_push(manager()))
            if not update.failed:
                await run_command("stamp", {"version": update.version})
                manager()._update_weight_version_if_provided(update.version)
        except Refusal as refusal:
            update.failed = update.failed or str(refusal)
        _closed.set()
        _memory.trim()
        weights.end(update)
        return JSONResponse({})


async def bucket(request: Request) -> JSONResponse:
    """Load a safetensors file of full tensors from the body."""
    query = _query(request, schemas.SessionQuery)
    update = weights.of(query.session)
    limit = (await _one_machine()).largest_bucket
    size = content_length(request, limit)
    with weights.receiving(update):
        chunks = parts(request, limit, limits.BUCKET_SECONDS, lambda: weights.heard(update))
        if size is None:  # a chunked body
            whole = b"".join([part async for part in chunks])
            size, chunks = len(whole), _one(whole)
        with _memory.piece(size) as landed:
            view = landed.numpy().data
            at = 0
            async for part in chunks:
                if at + len(part) > size:
                    raise Refusal(400, f"the body is longer than its Content-Length of {size}")
                view[at : at + len(part)] = part
                at += len(part)
            if at != size:
                raise Refusal(400, f"the body ended after {at} of {size} bytes")
            async with _alone():
                update = weights.of(query.session)
                entries = read_entries(landed.numpy().data, await _served(), update.scope)
                return await _load(landed, entries, update)


async def _one(part: bytes) -> AsyncIterator[bytes]:
    yield part


async def handle(request: Request) -> JSONResponse:
    """Load a bucket from the trainer's memory on a GPU, which the schedulers open."""
    query = _query(request, schemas.SessionQuery)
    asked = await parsed(request, schemas.HandleBody)
    async with _alone():
        update = weights.of(query.session)
        laid_out(asked, await _one_machine(), update.scope)
        device = manager().server_args.device
        if device != "cuda" or not _sglang.opens_handles:
            raise Refusal(
                400,
                f"this engine, on {device}, opens no memory of a GPU; push with push.transport=http",
            )
        payloads = [of_handle(asked)] * manager().server_args.tp_size
        message = _sglang.tensors(_SELECTOR[update.scope], payloads, load_format=None)
        loading = manager().update_weights_from_tensor(message, None)
        return await _given(update, asked.names, loading)


async def join(request: Request) -> JSONResponse:
    """Join the trainer, rank 0, in a process group: {"address", "port", "size", "first", "group", "backend"}."""
    query = _query(request, schemas.SessionQuery)
    asked = await parsed(request, schemas.JoinBody)
    arguments = manager().server_args
    if asked.first + arguments.tp_size > asked.size:
        raise Refusal(
            400,
            f"size is {asked.size}; expected at least {asked.first + arguments.tp_size}: "
            f"this engine has ranks {asked.first} to {asked.first + arguments.tp_size - 1}",
        )
    if asked.backend == "nccl" and arguments.device != "cuda":
        raise Refusal(
            400, f"backend is nccl, but this engine runs on {arguments.device}; expected gloo"
        )
    async with _alone():
        weights.of(query.session)
        if asked.group in _groups:
            raise Refusal(409, f"group {asked.group} was joined already; expected a new name")
        await asyncio.to_thread(_find_store, asked.address, asked.port)
        message = InitWeightsUpdateGroupReqInput(
            master_address=asked.address,
            master_port=asked.port,
            rank_offset=asked.first,
            world_size=asked.size,
            group_name=asked.group,
            backend=asked.backend,
        )
        answer = done(*await manager().init_weights_update_group(message, None))
        _groups.add(asked.group)
        return answer


def _find_store(address: str, port: int) -> None:
    """Raise Refusal unless torch's TCPStore answers there; a scheduler that connects to anything else never returns."""
    try:
        socket.create_connection((address, port), _PROBE_SECONDS).close()
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error) or "no answer"
        raise Refusal(400, f"cannot connect to the trainer at {address}:{port}: {reason}") from None
    answered: list[bool] = []

    def ask() -> None:
        try:
            dist.TCPStore(
                address,
                port,
                timeout=timedelta(seconds=_PROBE_SECONDS),
                is_master=False,
                wait_for_workers=False,
            )
        except (RuntimeError, ValueError):
            answered.append(False)
        else:
            answered.append(True)

    # torch has no time limit for a peer that never answers
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_PROBE_SECONDS)
    if answered != [True]:
        raise Refusal(400, f"{address}:{port} does not answer as the trainer's store")


async def receive(request: Request) -> JSONResponse:
    """Load a bucket that the trainer broadcasts in one piece: {"group", "names", "dtypes", "shapes"}."""
    query = _query(request, schemas.SessionQuery)
    asked = await parsed(request, schemas.ReceiveBody)
    async with _alone():
        update = weights.of(query.session)
        laid_out(asked, await _served(), update.scope)
        if asked.group not in _groups:
            raise Refusal(
                409, f"group {schemas.shown(asked.group)} was not joined; call weights/join first"
            )
        message = _sglang.broadcast(
            _SELECTOR[update.scope], asked.group, asked.names, asked.dtypes, asked.shapes
        )
        return await _given(
            update, asked.names, manager().update_weights_from_distributed(message, None)
        )


async def _load(landed: torch.Tensor, entries: Sequence[Entry], update: Update) -> JSONResponse:
    metadata = [
        FlattenedTensorMetadata(
            entry.name,
            torch.Size(entry.shape),
            entry.dtype,
            entry.first,
            entry.end,
            entry.end - entry.first,
        )
        for entry in entries
    ]
    # Pickled for SGLang's own scheduler processes only, with the tensor in shared memory. Each process gets its own
    # pickle, because a handle of shared memory can be opened only once.
    pieces = {"flattened_tensor": landed, "metadata": metadata}
    payloads = [
        MultiprocessingSerializer.serialize(pieces) for _ in range(manager().server_args.tp_size)
    ]
    message = _sglang.tensors(_SELECTOR[update.scope], payloads)
    return await _given(
        update,
        [entry.name for entry in entries],
        manager().update_weights_from_tensor(message, None),
    )


async def _given(
    update: Update, names: Sequence[str], loading: Awaitable[tuple[bool, str]]
) -> JSONResponse:
    """Wait until the schedulers have loaded these tensors. Raises Refusal if not; then the update stays unfinished."""
    weights.sending(update, names)
    try:
        answer = done(*await loading)
    except Refusal as refusal:
        update.failed = str(refusal)
        raise
    weights.heard(update)
    return answer


async def _served() -> ServedTensors:
    """Return what the engine holds. The scheduler is asked once, since names and shapes never change."""
    if not _held:
        found = await run_command("shapes", {})
        drafter = frozenset(found["drafter"])
        _held.append(
            ServedTensors(
                found["shapes"], drafter, found["elements"], found["unnamed"], found["apart"]
            )
        )
    return _held[0]


async def _one_machine() -> ServedTensors:
    """Return what the engine holds. Raises Refusal if shared memory does not reach every rank."""
    served = await _served()
    if served.apart:
        raise Refusal(400, served.apart)
    return served


@asynccontextmanager
async def _alone() -> AsyncIterator[None]:
    """Refuse a request of an update while another one is being carried out."""
    if _lock.locked():
        raise Refusal(
            409, "another request of a weight update is being carried out; wait for its answer"
        )
    async with _lock:
        yield


def _query(request: Request, schema: type[schemas.Body]) -> schemas.Body:
    return parse_query(schema, request.query_params.multi_items())
