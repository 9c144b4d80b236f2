"""The routes of a weight update: one push at a time, every bucket checked whole before a scheduler sees it."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from fastapi import Request
from fastapi.responses import JSONResponse
from sglang.srt.managers.io_struct import InitWeightsUpdateGroupReqInput
from sglang.srt.utils import MultiprocessingSerializer
from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorMetadata

from megatron_rlspec.rollout.sglang.server import schemas, versions
from megatron_rlspec.rollout.sglang.server.bodies import (
    content_length,
    done,
    manager,
    read_body,
    read_nothing,
    run_command,
)
from megatron_rlspec.rollout.sglang.server.bucket import ServedTensors, header_length, read_entries
from megatron_rlspec.rollout.sglang.server.bucket_file import NotRegularError, bytes_of, of_file, open_regular
from megatron_rlspec.rollout.sglang.server.schemas import Refusal, parse, parse_query
from megatron_rlspec.types import Scope

_sglang = versions.installed()
_SELECTOR = {"all": "all", "target": "target", "drafter": "draft"}
_KEPT = 1 << 30  # bytes of shared memory that stay between pushes
_PROBE_SECONDS = 5.0  # for a trainer's store to answer before a scheduler may wait for it


class _Push:
    """The open weight update, if there is one, and the memory that holds its buckets."""

    def __init__(self) -> None:
        self.scope: Scope | None = None
        self.asleep = False
        self.undefined = False  # after a sleep, until an update of all tensors
        self.whole = False  # whether the open update is of all tensors and its last bucket came
        self.lock = asyncio.Lock()  # one request of a push at a time: all buckets use the same memory
        self.groups: set[str] = set()
        self.served: ServedTensors | None = None
        self._shared = torch.empty(0, dtype=torch.uint8)

    def memory(self, size: int) -> torch.Tensor:
        """Return `size` bytes that SGLang's scheduler processes can map; the same memory serves every bucket.

        Allocating new pages costs more than the copy into them.
        """
        if self._shared.numel() < size:
            self._shared = torch.empty(size, dtype=torch.uint8).share_memory_()
        return self._shared[:size]

    def check(self, scope: Scope) -> None:
        if self.scope is None:
            raise Refusal(409, "no weight update is open; call weights/begin first")
        if scope != self.scope:
            raise Refusal(409, f"scope is {scope}, but the open weight update began with scope={self.scope}")

    def close(self) -> None:
        self.scope = None
        self.whole = False
        if self._shared.numel() > _KEPT:
            self._shared = torch.empty(0, dtype=torch.uint8)


_push = _Push()


def check_awake() -> None:
    if _push.asleep:
        raise Refusal(409, "the engine sleeps: its memory is released; call wake first")


def check_defined() -> None:
    """Raise Refusal while the engine sleeps, and after that until all weights are pushed."""
    check_awake()
    if _push.undefined:
        raise Refusal(409, "the engine slept, so its weights are undefined; push all of them first, with scope=all")


@asynccontextmanager
async def between_updates(asleep: bool) -> AsyncIterator[None]:
    """Keep updates away while the engine goes to sleep or wakes up. Raises Refusal unless it is `asleep` or awake."""
    async with _alone():
        if _push.scope is not None:
            raise Refusal(409, "a weight update is open; call weights/end first")
        if _push.asleep != asleep:
            raise Refusal(409, f"the engine is {'asleep already' if _push.asleep else 'awake'}")
        _push.undefined = True
        yield
        _push.asleep = not asleep


async def begin(request: Request) -> JSONResponse:
    scope = _query(request, schemas.ScopeQuery).scope
    await read_nothing(request)
    async with _alone():
        if scope == "all":
            check_awake()
        else:
            check_defined()
        if _push.scope is not None:
            raise Refusal(409, "a weight update is already open; call weights/end first")
        answer = done(*await _sglang.begin_push(manager(), _SELECTOR[scope]))
        _push.scope = scope
        return answer


async def end(request: Request) -> JSONResponse:
    parse_query(schemas.Nothing, request.query_params.multi_items())
    await read_nothing(request)
    async with _alone():
        if _push.scope is None:
            raise Refusal(409, "no weight update is open; call weights/begin first")
        whole = _push.whole
        _push.close()
        answer = done(*await _sglang.end_push(manager()))
        _push.undefined &= not whole
        return answer


async def bucket(request: Request) -> JSONResponse:
    """Load a safetensors file of full tensors from the body. The last bucket names `version` and flushes the cache."""
    query = _query(request, schemas.BucketQuery)
    async with _alone():
        _push.check(query.scope)
        limit = (await _one_machine()).largest_bucket
        size = content_length(request, limit)
        if size is None:
            body = await read_body(request, limit)
            landed = _push.memory(len(body))
            landed.numpy()[:] = memoryview(body)
            return await _load(landed, query)
        landed = _push.memory(size)
        at = 0
        view = landed.numpy().data
        async for part in request.stream():
            if at + len(part) > size:
                raise Refusal(400, f"the body is longer than its Content-Length of {size}")
            view[at : at + len(part)] = part
            at += len(part)
        if at != size:
            raise Refusal(400, f"the body ended after {at} of {size} bytes")
        return await _load(landed, query)


async def file(request: Request) -> JSONResponse:
    """Load a bucket from a file. This process checks its header; the schedulers read it."""
    query = _query(request, schemas.FileQuery)
    await read_nothing(request)
    async with _alone():
        _push.check(query.scope)
        served = await _one_machine()
        head, size = await asyncio.to_thread(_read_header, query.path, served.largest_bucket)
        entries = read_entries(memoryview(head), served, query.scope, size)
        if not _sglang.reads_files:
            landed = _push.memory(size)
            landed.copy_(await asyncio.to_thread(bytes_of, query.path, size))
            return await _load(landed, query)
        ranks = manager().server_args.tp_size
        message = _sglang.tensors(_SELECTOR[query.scope], query.version, [of_file(query.path, size, entries)] * ranks)
        return _loaded(await manager().update_weights_from_tensor(message, None), query)


def _read_header(path: str, limit: int) -> tuple[bytes, int]:
    """Return the begin of a regular file up to its header's end, and its size."""
    try:
        with open_regular(path) as opened:
            size = os.fstat(opened.fileno()).st_size
            if size > limit:
                raise Refusal(413, f"{schemas.plain(path)} has {size} bytes; expected at most {limit}")
            length = opened.read(8)
            return length + opened.read(header_length(length, size)), size
    except NotRegularError:
        raise Refusal(400, f"{schemas.plain(path)} is not a regular file") from None
    except OSError as error:
        raise Refusal(400, f"{schemas.plain(path)}: {error.strerror}") from None


async def join(request: Request) -> JSONResponse:
    """Join the trainer, rank 0, in a process group: {"address", "port", "size", "first", "group", "backend"}."""
    parse_query(schemas.Nothing, request.query_params.multi_items())
    asked = parse(schemas.JoinBody, await read_body(request))
    arguments = manager().server_args
    if asked.first + arguments.tp_size > asked.size:
        raise Refusal(
            400,
            f"size is {asked.size}; expected at least {asked.first + arguments.tp_size}: "
            f"this engine has ranks {asked.first} to {asked.first + arguments.tp_size - 1}",
        )
    if asked.backend == "nccl" and arguments.device != "cuda":
        raise Refusal(400, f"backend is nccl, but this engine runs on {arguments.device}; expected gloo")
    async with _alone():
        if asked.group in _push.groups:
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
        _push.groups.add(asked.group)
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
                address, port, timeout=timedelta(seconds=_PROBE_SECONDS), is_master=False, wait_for_workers=False
            )
        except (RuntimeError, ValueError):
            answered.append(False)
        else:
            answered.append(True)

    thread = threading.Thread(target=ask, daemon=True)  # torch has no time limit for a peer that never answers
    thread.start()
    thread.join(_PROBE_SECONDS)
    if answered != [True]:
        raise Refusal(400, f"{address}:{port} does not answer as the trainer's store")


async def receive(request: Request) -> JSONResponse:
    """Load a bucket that the trainer broadcasts in one piece: {"group", "names", "dtypes", "shapes"}."""
    query = _query(request, schemas.BucketQuery)
    asked = parse(schemas.ReceiveBody, await read_body(request))
    counts = {len(asked.names), len(asked.dtypes), len(asked.shapes)}
    if len(counts) > 1:
        raise Refusal(
            400,
            f"names, dtypes and shapes have {len(asked.names)}, {len(asked.dtypes)} and {len(asked.shapes)} entries; "
            "expected as many of each",
        )
    if len(set(asked.names)) != len(asked.names):
        raise Refusal(400, "names holds a name twice; expected distinct names")
    async with _alone():
        _push.check(query.scope)
        served = await _served()
        for name, shape in zip(asked.names, asked.shapes, strict=True):
            served.check(name, shape, query.scope)
        if asked.group not in _push.groups:
            raise Refusal(409, f"group {schemas.shown(asked.group)} was not joined; call weights/join first")
        message = _sglang.broadcast(
            _SELECTOR[query.scope], query.version, asked.group, asked.names, asked.dtypes, asked.shapes
        )
        return _loaded(await manager().update_weights_from_distributed(message, None), query)


async def _load(landed: torch.Tensor, query: schemas.BucketQuery) -> JSONResponse:
    entries = read_entries(landed.numpy().data, await _served(), query.scope)
    metadata = [
        FlattenedTensorMetadata(
            entry.name, torch.Size(entry.shape), entry.dtype, entry.first, entry.end, entry.end - entry.first
        )
        for entry in entries
    ]
    # Pickled for SGLang's own scheduler processes only, with the tensor in shared memory. Each process gets its own
    # pickle, because a handle of shared memory can be opened only once.
    parts = {"flattened_tensor": landed, "metadata": metadata}
    payloads = [MultiprocessingSerializer.serialize(parts) for _ in range(manager().server_args.tp_size)]
    message = _sglang.tensors(_SELECTOR[query.scope], query.version, payloads)
    return _loaded(await manager().update_weights_from_tensor(message, None), query)


def _loaded(answered: tuple[bool, str], query: schemas.BucketQuery) -> JSONResponse:
    answer = done(*answered)
    _push.whole = query.scope == "all" and bool(query.version)
    return answer


async def _served() -> ServedTensors:
    """Return what the engine holds. The scheduler is asked once, since names and shapes never change."""
    if _push.served is None:
        found = await run_command("shapes", {})
        _push.served = ServedTensors(
            found["shapes"], frozenset(found["drafter"]), found["elements"], found["unnamed"], found["apart"]
        )
    return _push.served


async def _one_machine() -> ServedTensors:
    """Return what the engine holds. Raises Refusal if shared memory and files do not reach every rank."""
    served = await _served()
    if served.apart:
        raise Refusal(400, served.apart)
    return served


class _alone:
    """Refuse a request of a push while another one is being carried out."""

    async def __aenter__(self) -> None:
        if _push.lock.locked():
            raise Refusal(409, "another request of a weight update is being carried out; wait for its answer")
        await _push.lock.acquire()

    async def __aexit__(self, *_: object) -> None:
        _push.lock.release()


def _query(request: Request, schema: type[schemas.Body]) -> schemas.Body:
    return parse_query(schema, request.query_params.multi_items())
