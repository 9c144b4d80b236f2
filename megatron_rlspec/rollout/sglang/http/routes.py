"""Our routes on SGLang's HTTP server, all below /rlspec. Weights travel as safetensors: nothing sent here is unpickled.

docs/http-api.md describes them; `ROUTES` lists them; `client/engine.py` calls them. Every JSON body and query is
checked against `schemas.py`, and every bucket by `bucket_checks.py`, before anything reaches a scheduler. Every error
is a JSON object with one sentence. All functions here run in the event loop of SGLang's HTTP process.
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
    command_handler,
    errors_as_json,
    internal_error,
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
# After so many samples of one request are started, the event loop first turns to the server's other work.
STARTED_AT_ONCE = 64
_sglang = versions.installed()
logger = logging.getLogger(__name__)


async def generate(request: Request) -> StreamingResponse:
    """Turn {"requests": [{"id", "input_ids", "sampling"}]} into lines {"id", "output_ids", "logprobs", "finish", ...}.

    A sample's last line has all its tokens after `begun`. With `progress` there are lines {"id", "drawn", "rounds",
    "version"} before it, each with the tokens since the line before; the client keeps them if the engine dies. A sample
    that fails gets a line {"id", "error"}, with the HTTP `status` of the refusal if SGLang refused it. A defect of the
    server ends the stream with a line {"error"}. Raises Refusal before the first line.
    """
    body = await parsed(request, schemas.GenerateBody)
    tokenizer = manager()
    await weight_routes.wait_until_may_generate()
    sizes = tokenizer.model_config.vocab_size, tokenizer.context_len, tokenizer.num_reserved_tokens
    schemas.check_batch(body, *sizes)
    if tokenizer.tokenizer is None and any(sample.sampling.stop for sample in body.requests):
        raise Refusal(400, "sampling.stop needs a tokenizer, and the model's directory has none")
    finished = {sample.id: _finish_of_begun(sample) for sample in body.requests if sample.begun}
    # Only position-keyed samples can go on elsewhere, so only they need progress. With --incremental-streaming-output
    # the last answer of SGLang's stream lacks the earlier tokens, and the last line must have all.
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


def _finish_of_begun(sample: schemas.RequestBody) -> dict[str, Any] | None:
    """Return SGLang's `finish_reason` of a sample that its `begun` tokens have ended; None if it goes on.

    `begun` has at least one token.

    Raises Refusal if it cannot go on here.
    """
    if not _position_keyed():
        raise Refusal(
            400,
            f"request {sample.id}: a sample goes on only in an engine with --verifier position_keyed",
        )
    sampling = sample.sampling
    try:
        status = ended(sample.begun, _stop_tokens(sampling), sampling.max_new_tokens)
    except ValueError as error:
        raise Refusal(400, f"request {sample.id}: {error}") from None
    if sampling.stop and status != "finished":
        # The last begun token alone decides: the engine before this one would have ended at an earlier stop string.
        strings = StopStrings(sampling.stop, manager().tokenizer.decode)
        if strings.end(sample.begun, len(sample.begun) - 1) is not None:
            status = "finished"
    if status is None:
        return None
    return {"type": "stop" if status == "finished" else "length"}


def _stop_tokens(sampling: schemas.SamplingBody) -> set[int]:
    """Return the token ids at which SGLang ends this sample."""
    stops: set[int] = set()
    if not sampling.ignore_eos:  # SGLang then ignores stop_token_ids, too
        stops = set(sampling.stop_token_ids) | set(manager().model_config.hf_eos_token_id or ())
        if (tokenizer := manager().tokenizer) is not None:
            stops |= {tokenizer.eos_token_id, *(tokenizer.additional_stop_token_ids or ())} - {None}
    return stops


async def _lines(
    requests: list[schemas.RequestBody], finished: dict[str, dict[str, Any] | None], progress: bool
) -> AsyncIterator[bytes]:
    """Generate all samples at once, and yield their lines as they come, as JSON.

    requests  with distinct ids (`schemas.check_batch`)
    finished  by id, for requests with `begun`: what `_finish_of_begun` returned
    """
    lines: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    tasks: dict[str, asyncio.Task[None]] = {}
    left = len(requests)
    try:
        for sample in requests:
            rid = ids.inner(sample.id)
            tasks[rid] = asyncio.create_task(
                _put_lines(sample, rid, finished.get(sample.id), progress, lines)
            )
            if len(tasks) % STARTED_AT_ONCE == 0:
                await asyncio.sleep(0)
        while left:
            line = await lines.get()
            left -= "drawn" not in line  # a sample's last line
            yield json.dumps(line, allow_nan=False).encode() + b"\n"
    except Exception as error:
        logger.exception("rlspec: a stream of samples ended early")
        yield json.dumps({"error": internal_error(error)}).encode() + b"\n"
    finally:
        # Also reached when the client has disconnected: end the requests whose samples it no longer reads.
        for rid, task in tasks.items():
            if not task.done():
                manager().abort_request(rid=rid)
                task.cancel()  # one that SGLang's scheduler does not know yet


async def _put_lines(
    sample: schemas.RequestBody,
    rid: str,
    finished: dict[str, Any] | None,
    progress: bool,
    lines: asyncio.Queue[dict[str, Any]],
) -> None:
    """Put the lines of one sample into the queue, the last of them without `drawn`. Raises nothing.

    Exactly one line without `drawn` must come, whatever fails: `_lines` waits for one of each sample.
    """
    try:
        if finished is not None:
            no_tokens: list[int] = []  # after those in `begun`
            line = dict.fromkeys(
                ("output_ids", "logprobs", "weight_versions", "accepted", "drafted"), no_tokens
            )
            lines.put_nowait({"id": sample.id, "finish": finished, **line})
            return
        async for line in _generated_lines(sample, rid, progress):
            lines.put_nowait({"id": sample.id, **line})
    except ValueError as error:
        # SGLang's, of a request that it does not take; or `progress.logprobs`', for weights with NaN or infinity.
        manager().abort_request(rid=rid)
        lines.put_nowait({"id": sample.id, "error": one_line(str(error)), "status": 400})
    except (
        HTTPException
    ) as error:  # SGLang's, for example of a sample that the KV cache cannot hold
        lines.put_nowait(
            {"id": sample.id, "error": one_line(str(error.detail)), "status": error.status_code}
        )
    except Exception as error:
        logger.exception("rlspec: request %s failed", sample.id)
        lines.put_nowait({"id": sample.id, "error": internal_error(error)})


async def _generated_lines(
    sample: schemas.RequestBody, rid: str, progress: bool
) -> AsyncIterator[dict[str, Any]]:
    """Yield the lines of a sample: with `progress` its new tokens now and then, and at the end all of it.

    Raises ValueError and HTTPException for a sample that SGLang refuses, and ValueError for NaN log-probs.
    """
    sampling = sample.sampling.model_dump()
    # SGLang gets `begun` as a part of the prompt, so its count of new tokens excludes them.
    sampling["max_new_tokens"] -= len(sample.begun)
    if sample.sampling.stop and sample.begun:
        sampling["custom_params"] = {BEGUN: len(sample.begun)}
    message = GenerateReqInput(
        rid=rid,
        input_ids=sample.input_ids + sample.begun,
        sampling_params=sampling | ({"stream_interval": PROGRESS_TOKENS} if progress else {}),
        stream=progress,  # otherwise the one answer comes when the sample is finished
        return_logprob=True,
        logprob_start_len=-1,  # none of the prompt's
    )
    first_version = _sglang.weight_version(manager())
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
            if _sglang.weight_version(manager()) == first_version:
                # A retracted sample is prefilled once more.
                line = sent.line(tokens, entries, marks, 1 + meta["num_retractions"])
                if line is not None:
                    yield line | {"version": first_version}
            continue
        # SGLang itself aborted the sample. Without `stream` it raises an error; with `stream` it only answers.
        if finish["type"] == "abort" and finish.get("status_code"):
            raise HTTPException(finish["status_code"], finish["message"])
        # SGLang 0.5.15 gives the last token only if a sample is aborted while it waits
        if len(tokens) < len(entries):
            tokens = [token for _, token, *_ in entries]  # of (log-prob, token, text)
        yield {
            "output_ids": tokens,
            "logprobs": logprobs(entries),
            "finish": finish,
            # Without spans, a sample that was running during a push counts as generated under the older weights.
            "weight_versions": meta["weight_versions"]
            if _sglang.spans
            else [{"version": first_version, "start": 0, "end": len(tokens)}],
            "accepted": meta.get("spec_correct_drafts_histogram", []),
            "drafted": marks,
        }


async def abort(request: Request) -> JSONResponse:
    """Abort the samples of these ids, or all. SGLang's own route would also abort ids that begin with one of them.

    A client's id may be running more than once (`ids.py`); all of them end.
    """
    wanted = (await parsed(request, schemas.AbortBody)).ids
    tokenizer = manager()
    if wanted is None:
        tokenizer.abort_request(abort_all=True)
    else:
        named = set(wanted)
        for rid in [rid for rid in tokenizer.rid_to_state if ids.outer(rid) in named]:
            tokenizer.abort_request(rid=rid)
    return JSONResponse({})


# Path below /rlspec/ -> what answers a POST there.
ROUTES: dict[str, Handler] = {
    # One route for each command of `scheduler/control.py` that clients may give.
    **{
        f"control/{name}": command_handler(name, schema)
        for name, schema in schemas.COMMANDS.items()
    },
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

    Call it once, before the server starts: `plugin._add_routes` does.

    They are added one by one and not as a router: SGLang's metrics read the attribute `path` of every route, and an
    included router has none.
    """
    for path, handler in ROUTES.items():
        app.add_api_route(
            f"/rlspec/{path}", errors_as_json(handler), methods=["POST"], response_model=None
        )
    guard.close_to_other_sites(app)
