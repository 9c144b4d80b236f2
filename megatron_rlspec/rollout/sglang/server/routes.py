"""Our routes on SGLang's HTTP server, all below /rlspec. Weights travel as safetensors: nothing sent here is unpickled.

`POST /rlspec/control/{command}`  JSON in and out, executed by the scheduler (`control.py`)
`POST /rlspec/generate`           a batch of requests; one JSON line per sample, as soon as it is finished
`POST /rlspec/abort`              {"ids": [...]} or {} for all
`POST /rlspec/pause`, `/rlspec/resume`, `/rlspec/weights/begin`, `/rlspec/weights/end`; between the last two a bucket as
`/rlspec/weights/bucket` (in the body), `/file` (by path) or `/receive` (through the group that `/join` made)
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import torch
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from sglang.srt.entrypoints import http_server
from sglang.srt.managers.io_struct import (
    ContinueGenerationReqInput,
    DumperControlReqInput,
    GenerateReqInput,
    InitWeightsUpdateGroupReqInput,
    PauseGenerationReqInput,
)
from sglang.srt.utils import MultiprocessingSerializer
from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorMetadata

from megatron_rlspec.rollout.sglang.server import versions
from megatron_rlspec.rollout.sglang.server.control import DRAFTED, METHOD

_sglang = versions.installed()
_SELECTOR = {"all": "all", "target": "target", "drafter": "draft"}
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_shared = torch.empty(0, dtype=torch.uint8)


def _manager() -> Any:
    return http_server._global_state.tokenizer_manager


def _answer(success: bool, message: str) -> JSONResponse:
    return JSONResponse({} if success else {"error": message}, status_code=200 if success else 400)


async def control(command: str, request: Request) -> JSONResponse:
    body = await request.body()
    message = DumperControlReqInput(method=METHOD, body={**json.loads(body or b"{}"), "command": command})
    results = await _manager().dumper_control(message)
    errors = [r.error for r in results if not r.success]
    if errors:
        return _answer(False, errors[0])
    return JSONResponse(results[0].response[0])


async def generate(request: Request) -> StreamingResponse:
    """{"requests": [{"id", "input_ids", "sampling"}]} -> lines {"id", "output_ids", "logprobs", "finish", ...}."""
    requests = json.loads(await request.body())["requests"]
    return StreamingResponse(_lines(requests), media_type="application/x-ndjson")


async def _lines(requests: list[dict[str, Any]]) -> AsyncIterator[bytes]:
    tasks = [asyncio.create_task(_one(r)) for r in requests]
    try:
        for task in asyncio.as_completed(tasks):
            yield json.dumps(await task).encode() + b"\n"
    finally:
        # Reached early when the client is gone: nobody waits for the rest.
        for task, r in zip(tasks, requests, strict=True):
            if not task.done():
                _manager().abort_request(rid=r["id"])


async def _one(r: dict[str, Any]) -> dict[str, Any]:
    message = GenerateReqInput(
        rid=r["id"], input_ids=r["input_ids"], sampling_params=r["sampling"], return_logprob=True, logprob_start_len=-1
    )
    began = _manager().server_args.weight_version
    try:
        # Not streaming: the one answer comes when the sample is finished.
        answer = await anext(_manager().generate_request(message, None))
    except ValueError as error:
        return {"id": r["id"], "error": str(error)}
    meta = answer["meta_info"]
    return {
        "id": r["id"],
        "output_ids": answer["output_ids"],
        "logprobs": [entry[0] for entry in meta["output_token_logprobs"]],
        "finish": meta["finish_reason"],
        # Without spans a sample that lived through a push counts as drawn by the older weights.
        "weight_versions": meta["weight_versions"]
        if _sglang.spans
        else [{"version": began, "start": 0, "end": len(answer["output_ids"])}],
        "accepted": meta.get("spec_correct_drafts_histogram", []),
        "drafted": meta.get(DRAFTED, []),
    }


async def abort(request: Request) -> JSONResponse:
    ids = json.loads(await request.body() or b"{}").get("ids")
    manager = _manager()
    if ids is None:
        manager.abort_request(abort_all=True)
    else:
        for rid in ids:
            manager.abort_request(rid=rid)
    return _answer(True, "")


async def pause() -> JSONResponse:
    """Take running requests off the batch and keep them; their cache is recomputed, hence may be flushed."""
    await _manager().pause_generation(PauseGenerationReqInput(mode="retract"))
    return _answer(True, "")


async def resume() -> JSONResponse:
    await _manager().continue_generation(ContinueGenerationReqInput())
    return _answer(True, "")


async def begin(scope: str) -> JSONResponse:
    return _answer(*await _sglang.begin_push(_manager(), _SELECTOR[scope]))


async def bucket(request: Request, scope: str, version: str = "") -> JSONResponse:
    """The body is a safetensors file of full tensors. The last bucket bears `version`, and flushes the cache."""
    size = int(request.headers["content-length"])
    landed, at = _landing(size), 0
    view = memoryview(landed.numpy())
    async for chunk in request.stream():
        view[at : at + len(chunk)] = chunk
        at += len(chunk)
    return await _load(landed, scope, version)


async def file(scope: str, path: str, version: str = "") -> JSONResponse:
    """As `bucket`, from a file that this machine sees."""
    try:
        with open(path, "rb") as opened:
            landed = _landing(os.fstat(opened.fileno()).st_size)
            opened.readinto(memoryview(landed.numpy()))
    except OSError as error:
        return _answer(False, f"{path}: {error.strerror}")
    return await _load(landed, scope, version)


def _landing(size: int) -> torch.Tensor:
    """`size` bytes of memory that SGLang's scheduler processes can map; the same for every bucket of a push.

    Fresh pages cost more than the copy into them.
    """
    global _shared
    if _shared.numel() < size:
        _shared = torch.empty(size, dtype=torch.uint8).share_memory_()
    return _shared[:size]


async def join(request: Request) -> JSONResponse:
    """{"address", "port", "size", "group", "backend"}: meet the trainer, rank 0, in a process group."""
    r = json.loads(await request.body())
    message = InitWeightsUpdateGroupReqInput(
        master_address=r["address"],
        master_port=r["port"],
        rank_offset=1,
        world_size=r["size"],
        group_name=r["group"],
        backend=r["backend"],
    )
    return _answer(*await _manager().init_weights_update_group(message, None))


async def receive(request: Request, scope: str, version: str = "") -> JSONResponse:
    """{"group", "names", "dtypes", "shapes"}: as `bucket`, broadcast by the trainer one by one."""
    r = json.loads(await request.body())
    message = _sglang.broadcast(_SELECTOR[scope], version, r["group"], r["names"], r["dtypes"], r["shapes"])
    return _answer(*await _manager().update_weights_from_distributed(message, None))


async def _load(landed: torch.Tensor, scope: str, version: str) -> JSONResponse:
    try:
        metadata = _metadata(landed.numpy())
    except (ValueError, KeyError, TypeError) as error:
        return _answer(False, f"bucket of {len(landed)} bytes: not a safetensors file: {error}")
    # Pickled for SGLang's own scheduler processes only, with the tensor in shared memory. Each gets a pickle of its
    # own: what hands the memory over can be taken once.
    parts = {"flattened_tensor": landed, "metadata": metadata}
    payloads = [MultiprocessingSerializer.serialize(parts) for _ in range(_manager().server_args.tp_size)]
    message = _sglang.tensors(_SELECTOR[scope], version, payloads)
    return _answer(*await _manager().update_weights_from_tensor(message, None))


def _metadata(data: np.ndarray) -> list[FlattenedTensorMetadata]:
    """Where each tensor lies in the bytes of a safetensors file: 8 bytes of length, a JSON header, the data."""
    begin = 8 + int.from_bytes(data[:8].tobytes(), "little")
    header = json.loads(data[8:begin].tobytes())
    found = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        dtype, shape = _DTYPES[entry["dtype"]], torch.Size(entry["shape"])
        first, end = (begin + offset for offset in entry["data_offsets"])
        if end > len(data) or end - first != shape.numel() * dtype.itemsize:
            raise ValueError(f"{name} does not fill bytes {first} to {end}")
        found.append(FlattenedTensorMetadata(name, shape, dtype, first, end, end - first))
    return found


async def end() -> JSONResponse:
    global _shared
    _shared = torch.empty(0, dtype=torch.uint8)
    return _answer(*await _sglang.end_push(_manager()))


def add_routes(app: FastAPI) -> None:
    for path, function in (
        ("control/{command}", control),
        ("generate", generate),
        ("abort", abort),
        ("pause", pause),
        ("resume", resume),
        ("weights/begin", begin),
        ("weights/bucket", bucket),
        ("weights/file", file),
        ("weights/join", join),
        ("weights/receive", receive),
        ("weights/end", end),
    ):
        app.add_api_route(f"/rlspec/{path}", function, methods=["POST"], response_model=None)
