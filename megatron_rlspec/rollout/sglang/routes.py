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
from collections.abc import AsyncIterator
from typing import Any

import safetensors
import safetensors.torch
import torch
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from sglang.srt.entrypoints import http_server
from sglang.srt.managers.io_struct import (
    BeginWeightUpdateReqInput,
    ContinueGenerationReqInput,
    DumperControlReqInput,
    EndWeightUpdateReqInput,
    GenerateReqInput,
    InitWeightsUpdateGroupReqInput,
    PauseGenerationReqInput,
    UpdateWeightsFromDistributedReqInput,
    UpdateWeightsFromTensorReqInput,
)
from sglang.srt.utils import MultiprocessingSerializer
from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

from megatron_rlspec.rollout.sglang.control import DRAFTED, METHOD

_SELECTOR = {"all": "all", "target": "target", "drafter": "draft"}


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
        "weight_versions": meta["weight_versions"],
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
    return _answer(*await _manager().begin_weight_update(BeginWeightUpdateReqInput(selector=_SELECTOR[scope])))


async def bucket(request: Request, scope: str, version: str = "") -> JSONResponse:
    """The body is a safetensors file of full tensors. The last bucket bears `version`, and flushes the cache."""
    return await _load(safetensors.torch.load(await request.body()), scope, version)


async def file(scope: str, path: str, version: str = "") -> JSONResponse:
    """As `bucket`, from a file that this machine sees."""
    try:
        tensors = safetensors.torch.load_file(path)
    except (OSError, safetensors.SafetensorError) as error:
        return _answer(False, f"{path}: {error}")
    return await _load(tensors, scope, version)


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
    message = UpdateWeightsFromDistributedReqInput(
        names=r["names"],
        dtypes=r["dtypes"],
        shapes=r["shapes"],
        group_name=r["group"],
        flush_cache=bool(version),
        weight_version=version or None,
        selector=_SELECTOR[scope],
    )
    return _answer(*await _manager().update_weights_from_distributed(message, None))


async def _load(tensors: dict[str, torch.Tensor], scope: str, version: str) -> JSONResponse:
    by_dtype: dict[torch.dtype, list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in tensors.items():
        by_dtype.setdefault(tensor.dtype, []).append((name, tensor))
    groups = list(by_dtype.values())
    for i, group in enumerate(groups):
        last = bool(version) and i + 1 == len(groups)
        flat = FlattenedTensorBucket(named_tensors=group)
        # Pickled for SGLang's own scheduler processes only, with the tensor in shared memory. Each gets a pickle of its
        # own: what hands the memory over can be taken once.
        parts = {"flattened_tensor": flat.get_flattened_tensor(), "metadata": flat.get_metadata()}
        payloads = [MultiprocessingSerializer.serialize(parts) for _ in range(_manager().server_args.tp_size)]
        success, message = await _manager().update_weights_from_tensor(
            UpdateWeightsFromTensorReqInput(
                serialized_named_tensors=payloads,
                load_format="flattened_bucket",
                flush_cache=last,
                weight_version=version if last else None,
                selector=_SELECTOR[scope],
            ),
            None,
        )
        if not success:
            return _answer(False, message)
    return _answer(True, "")


async def end() -> JSONResponse:
    return _answer(*await _manager().end_weight_update(EndWeightUpdateReqInput()))


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
