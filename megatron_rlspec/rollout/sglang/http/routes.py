"""Our routes on SGLang's HTTP server, all below /rlspec. Weights travel as safetensors: nothing sent here is unpickled.

docs/http-api.md describes them; `ROUTES` lists them. Every body and query is checked against `schemas.py` before
anything reaches a scheduler. Every error is a JSON object with one sentence.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, StreamingResponse
from sglang.srt.managers.io_struct import GenerateReqInput

from megatron_rlspec.rollout.sglang import ids, schemas
from megatron_rlspec.rollout.sglang.http import guard, weight_routes
from megatron_rlspec.rollout.sglang.http.bodies import (
    Handler,
    answering,
    control,
    internal,
    manager,
    one_line,
    parsed,
)
from megatron_rlspec.rollout.sglang.http.progress import Progress, logprobs
from megatron_rlspec.rollout.sglang.scheduler import versions
from megatron_rlspec.rollout.sglang.scheduler.stop_strings import BEGUN
from megatron_rlspec.rollout.sglang.schemas import Refusal
from megatron_rlspec.rollout.sglang.settings import DRAFTED, Settings
from megatron_rlspec.texts import StopStrings
from megatron_rlspec.types import ended

PROGRESS_TOKENS = 64  # between two lines of a sample that is being generated
STARTED_AT_ONCE = 64  # samples; the server answers others in between
_sglang = versions.installed()
logger = logging.getLogger(__name__)


async def generate(request: Request) -> StreamingResponse:
    """Turn {"requests": [{"id", "input_ids", "sampling"}]} into lines {"id", "output_ids", "logprobs", "finish", ...}.

    Lines hold the tokens after `begun` only. A sample that fails is a line {"id", "error"}, with the `status` that it
    would have alone if SGLang refused it; a defect of the server ends the stream with a line {"error"}.
    """
    body = await parsed(request, schemas.GenerateBody)
    tokenizer = manager()
    await weight_routes.may_generate()
    sizes = tokenizer.model_config.vocab_size, tokenizer.context_len, tokenizer.num_reserved_tokens
    schemas.check_batch(body, *sizes)
    if tokenizer.tokenizer is None and any(asked.sampling.stop for asked in body.requests):
        raise Refusal(400, "sampling.stop needs a tokenizer, and the model's directory has none")
    finished = {asked.id: _finish(asked) for asked in body.requests if asked.begun}
    # With --incremental-streaming-output the last answer of a stream is only its end.
    progress = (
        body.progress
        and _position_keyed()
        and not tokenizer.server_args.incremental_streaming_output
    )
    return StreamingResponse(
        _lines(body.requests, finished, progress), media_type="application/x-ndjson"
    )


def _position_keyed() -> bool:
    return Settings.from_environment().verifier == "position_keyed"


def _finish(asked: schemas.RequestBody) -> dict[str, Any] | None:
    """Return SGLang's reason if a sample has ended before. Raises Refusal if it cannot go on here."""
    if not _position_keyed():
        raise Refusal(
            400,
            f"request {asked.id}: a sample goes on only in an engine with --verifier position_keyed",
        )
    sampling = asked.sampling
    try:
        status = ended(asked.begun, _stop_tokens(sampling), sampling.max_new_tokens)
    except ValueError as error:
        raise Refusal(400, f"request {asked.id}: {error}") from None
    if sampling.stop and status != "finished":
        strings = StopStrings(sampling.stop, manager().tokenizer.decode)
        if strings.end(asked.begun, len(asked.begun) - 1) is not None:
            status = "finished"
    if status is None:
        return None
    return {"type": "stop" if status == "finished" else "length"}


def _stop_tokens(sampling: schemas.SamplingBody) -> set[int]:
    stops: set[int] = set()
    if not sampling.ignore_eos:  # SGLang then ignores stop_token_ids, too
        stops = set(sampling.stop_token_ids) | set(manager().model_config.hf_eos_token_id or ())
        if (tokenizer := manager().tokenizer) is not None:
            stops |= {tokenizer.eos_token_id, *(tokenizer.additional_stop_token_ids or ())} - {None}
    return stops


async def _lines(
    requests: list[schemas.RequestBody], finished: dict[str, dict[str, Any] | None], progress: bool
) -> AsyncIterator[bytes]:
    lines: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    tasks: dict[str, asyncio.Task[None]] = {}
    left = len(requests)
    try:
        for asked in requests:
            rid = ids.inner(asked.id)
            tasks[rid] = asyncio.create_task(
                _one(asked, rid, finished.get(asked.id), progress, lines)
            )
            if len(tasks) % STARTED_AT_ONCE == 0:
                await asyncio.sleep(0)
        while left:
            line = await lines.get()
            left -= "drawn" not in line
            yield json.dumps(line, allow_nan=False).encode() + b"\n"
    except Exception as error:
        logger.exception("rlspec: a stream of samples ended early")
        yield json.dumps({"error": internal(error)}).encode() + b"\n"
    finally:
        # Also reached when the client has disconnected: end the requests whose samples it no longer reads.
        for rid, task in tasks.items():
            if not task.done():
                manager().abort_request(rid=rid)
                task.cancel()  # one that SGLang's scheduler does not know yet


async def _one(
    asked: schemas.RequestBody,
    rid: str,
    finished: dict[str, Any] | None,
    progress: bool,
    lines: asyncio.Queue[dict[str, Any]],
) -> None:
    """Put the lines of one sample into the queue, the last of them without `drawn`."""
    try:
        if finished is not None:
            nothing: list[int] = []
            line = dict.fromkeys(
                ("output_ids", "logprobs", "weight_versions", "accepted", "drafted"), nothing
            )
            lines.put_nowait({"id": asked.id, "finish": finished, **line})
            return
        async for line in _generated(asked, rid, progress):
            lines.put_nowait({"id": asked.id, **line})
    except ValueError as error:  # SGLang's, of a request that it does not take
        manager().abort_request(rid=rid)
        lines.put_nowait({"id": asked.id, "error": one_line(str(error)), "status": 400})
    except (
        HTTPException
    ) as error:  # SGLang's, for example of a sample that the KV cache cannot hold
        lines.put_nowait(
            {"id": asked.id, "error": one_line(str(error.detail)), "status": error.status_code}
        )
    except Exception as error:
        logger.exception("rlspec: request %s failed", asked.id)
        lines.put_nowait({"id": asked.id, "error": internal(error)})


async def _generated(
    asked: schemas.RequestBody, rid: str, progress: bool
) -> AsyncIterator[dict[str, Any]]:
    """Yield the lines of a sample: with `progress` its new tokens now and then, and at the end all of it."""
    sampling = asked.sampling.model_dump()
    sampling["max_new_tokens"] -= len(asked.begun)
    if asked.sampling.stop and asked.begun:
        sampling["custom_params"] = {BEGUN: len(asked.begun)}
    message = GenerateReqInput(
        rid=rid,
        input_ids=asked.input_ids + asked.begun,
        sampling_params=sampling | ({"stream_interval": PROGRESS_TOKENS} if progress else {}),
        stream=progress,  # otherwise the one answer comes when the sample is finished
        return_logprob=True,
        logprob_start_len=-1,
    )
    began = _sglang.weight_version(manager())
    sent = Progress()
    async for answer in manager().generate_request(message, None):
        meta = answer["meta_info"]
        finish = meta["finish_reason"]
        tokens, entries, marks = (
            answer["output_ids"],
            meta["output_token_logprobs"],
            meta.get(DRAFTED, []),
        )
        if finish is None:
            # SGLang names the weights of a token when its sample ends. Until then they are known only before a push.
            if _sglang.weight_version(manager()) == began:
                line = sent.line(tokens, entries, marks, 1 + meta["num_retractions"])
                if line is not None:
                    yield line | {"version": began}
            continue
        # not by us; SGLang raises it without `stream`
        if finish["type"] == "abort" and finish.get("status_code"):
            raise HTTPException(finish["status_code"], finish["message"])
        # SGLang 0.5.15 gives the last token only if a sample is aborted while it waits
        if len(tokens) < len(entries):
            tokens = [token for _, token, *_ in entries]
        yield {
            "output_ids": tokens,
            "logprobs": logprobs(entries),
            "finish": finish,
            # Without spans, a sample that was running during a push counts as generated under the older weights.
            "weight_versions": meta["weight_versions"]
            if _sglang.spans
            else [{"version": began, "start": 0, "end": len(tokens)}],
            "accepted": meta.get("spec_correct_drafts_histogram", []),
            "drafted": marks,
        }


async def abort(request: Request) -> JSONResponse:
    """Abort the samples of these ids, or all. SGLang's own route would also abort ids that begin with one of them."""
    wanted = (await parsed(request, schemas.AbortBody)).ids
    tokenizer = manager()
    if wanted is None:
        tokenizer.abort_request(abort_all=True)
    else:
        named = set(wanted)
        for rid in [rid for rid in tokenizer.rid_to_state if ids.outer(rid) in named]:
            tokenizer.abort_request(rid=rid)
    return JSONResponse({})


ROUTES: dict[str, Handler] = {
    **{f"control/{name}": control(name, schema) for name, schema in schemas.COMMANDS.items()},
    "generate": generate,
    "abort": abort,
    "weights/begin": weight_routes.begin,
    "weights/bucket": weight_routes.bucket,
    "weights/handle": weight_routes.handle,
    "weights/join": weight_routes.join,
    "weights/receive": weight_routes.receive,
    "weights/end": weight_routes.end,
    "weights/abandon": weight_routes.abandon,
}


def add_routes(app: FastAPI) -> None:
    """Add our routes, and refuse other sites' pages, which SGLang would let in (`guard`).

    Each stands in the application itself: SGLang's metrics read `path` of every route, which a router has not.
    """
    for path, handler in ROUTES.items():
        app.add_api_route(
            f"/rlspec/{path}", answering(handler), methods=["POST"], response_model=None
        )
    guard.close_to_other_sites(app)
