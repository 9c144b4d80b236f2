"""Read the bodies of our routes up to a size limit, and answer every error with one sentence."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from sglang.srt.entrypoints import http_server
from sglang.srt.managers.io_struct import DumperControlReqInput
from starlette.requests import ClientDisconnect

from megatron_rlspec.rollout.sglang.server.control import METHOD, of_all
from megatron_rlspec.rollout.sglang.server.schemas import MEGABYTE, Nothing, Refusal, parse, shown

BODY_BYTES = 64 * MEGABYTE  # of a JSON body; a cost table has a few
logger = logging.getLogger(__name__)
Handler = Callable[[Request], Awaitable[Response]]


def manager() -> Any:
    """Return SGLang's TokenizerManager."""
    return http_server._global_state.tokenizer_manager


async def read_body(request: Request, limit: int = BODY_BYTES) -> bytes:
    """Read the body, at most `limit` bytes. Raises Refusal for a longer one, if possible before it is read."""
    content_length(request, limit)
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise Refusal(413, f"the body has more than {limit} bytes; expected at most {limit}")
        parts.append(part)
    return b"".join(parts)


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
    parse(Nothing, await read_body(request))


async def run_command(command: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Run a command of `control.py` in the scheduler. Raises Refusal with its error."""
    results = await manager().dumper_control(
        DumperControlReqInput(method=METHOD, body=arguments | {"command": command})
    )
    errors = [result.error for result in results if not result.success]
    if errors:
        raise Refusal(400, one_line(errors[0]))
    return of_all(command, [result.response[0] for result in results])


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
            return JSONResponse({"error": str(refusal)}, refusal.status)
        except ClientDisconnect:
            return JSONResponse({"error": "the client closed the connection"}, 400)
        except Exception as error:
            logger.exception("rlspec: %s failed", request.url.path)
            return JSONResponse({"error": internal(error)}, 500)

    answer.__name__ = handler.__name__
    answer.__doc__ = handler.__doc__
    return answer
