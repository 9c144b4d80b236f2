"""Read the bodies of our routes up to a size limit, and answer every error with one sentence."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from sglang.srt.entrypoints import http_server
from sglang.srt.managers.io_struct import DumperControlReqInput
from starlette.requests import ClientDisconnect

from megatron_rlspec.rollout.sglang import limits
from megatron_rlspec.rollout.sglang.scheduler.control import METHOD
from megatron_rlspec.rollout.sglang.schemas import Body, Nothing, Refusal, parse, shown

logger = logging.getLogger(__name__)
_UNREAD = (408, 413, 503)
Handler = Callable[[Request], Awaitable[Response]]


class _Reading:
    """The JSON bodies that are being read."""

    bytes = 0


_reading = _Reading()


def manager() -> Any:
    """Return SGLang's TokenizerManager."""
    return http_server._global_state.tokenizer_manager


async def parsed(request: Request, model: type[Body]) -> Body:
    """Read and check a JSON body, in a thread. Raises Refusal."""
    return await asyncio.to_thread(parse, model, await read_body(request, model.limit))


async def read_body(request: Request, limit: int = limits.JSON_BYTES) -> bytes:
    """Read the body, at most `limit` bytes. Raises Refusal for a longer one, if possible before it is read."""
    found: list[bytes] = []
    content_length(request, limit)
    try:
        async for part in parts(request, limit, limits.BODY_SECONDS):
            found.append(part)
            _reading.bytes += len(part)
            if _reading.bytes > limits.READING_BYTES:
                raise Refusal(
                    503,
                    f"bodies of {limits.READING_BYTES} bytes are being read; send this one later",
                )
        return b"".join(found)
    finally:
        _reading.bytes -= sum(map(len, found))


async def parts(
    request: Request, limit: int, seconds: float, heard: Callable[[], None] = lambda: None
) -> AsyncIterator[bytes]:
    """Yield the parts of a body of at most `limit` bytes. Raises Refusal for a longer, a slow or an unfinished one.

    heard  is called for each part
    """
    until = time.monotonic() + seconds
    stream = request.stream()
    size = 0
    while True:
        left = min(limits.BODY_SILENT, until - time.monotonic())
        try:
            async with asyncio.timeout(left):
                part = await anext(stream, None)
        except TimeoutError:
            slow = (
                f"silent for {left:.0f} s"
                if left == limits.BODY_SILENT
                else f"unfinished after {seconds:.0f} s"
            )
            raise Refusal(
                408, f"the body is {slow}, after {size} bytes; expected it whole"
            ) from None
        if part is None:
            return
        heard()
        size += len(part)
        if size > limit:
            raise Refusal(413, f"the body has more than {limit} bytes; expected at most {limit}")
        yield part


def content_length(request: Request, limit: int) -> int | None:
    """Return the Content-Length, or None for a chunked body."""
    text = request.headers.get("content-length")
    if text is None:
        return None
    if not (text.isascii() and text.isdigit()):
        raise Refusal(400, f"Content-Length is {shown(text)}; expected a whole number")
    if len(text) > 18 or int(text) > limit:
        raise Refusal(413, f"Content-Length is {text[:30]}; expected at most {limit} bytes")
    return int(text)


async def read_nothing(request: Request) -> None:
    """Raise Refusal unless the body is empty or `{}`."""
    await parsed(request, Nothing)


async def run_command(command: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Run a command of `control.py` in the scheduler. Raises Refusal with its error."""
    message = DumperControlReqInput(method=METHOD, body=arguments | {"command": command})
    [result] = await manager().dumper_control(message)
    if not result.success:
        raise Refusal(400, one_line(result.error))
    return result.response[0]


def control(command: str, schema: type[Body], then: Callable[[Any], None] | None = None) -> Handler:
    """Return the handler of a route that runs a command in the scheduler. `then` is called with the body after it."""

    async def run(request: Request) -> JSONResponse:
        body = await parsed(request, schema)
        answer = await run_command(command, body.model_dump(exclude_unset=True))
        if then is not None:
            then(body)
        return JSONResponse(answer)

    run.__name__ = command
    return run


def done(success: bool, message: str) -> JSONResponse:
    if not success:
        raise Refusal(400, one_line(message))
    return JSONResponse({})


def one_line(text: str) -> str:
    return (" ".join(text.split()) or "the engine gave no reason")[:1000]


def internal(error: Exception) -> str:
    return f"internal error ({type(error).__name__}); the engine's log has its traceback"


def answering(handler: Handler) -> Handler:
    """Turn every exception of a handler into a JSON object with one sentence."""

    async def answer(request: Request) -> Response:
        try:
            return await handler(request)
        except Refusal as refusal:
            # The rest of a body that is not read would be taken for the next request.
            unread = {"Connection": "close"} if refusal.status in _UNREAD else None
            return JSONResponse({"error": str(refusal)}, refusal.status, unread)
        except ClientDisconnect:
            return JSONResponse({"error": "the client closed the connection"}, 400)
        except Exception as error:
            logger.exception("rlspec: %s failed", request.url.path)
            return JSONResponse({"error": internal(error)}, 500)

    answer.__name__ = handler.__name__
    answer.__doc__ = handler.__doc__
    return answer
