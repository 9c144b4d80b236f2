"""Read the bodies of our routes, run commands in the scheduler, and answer every error with one sentence."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from sglang.srt.entrypoints import http_server
from sglang.srt.managers.io_struct import DumperControlReqInput
from starlette.requests import ClientDisconnect

from megatron_rlspec.rollout.sglang.scheduler.control import METHOD, merge
from megatron_rlspec.rollout.sglang.schemas import Body, Refusal, parse

logger = logging.getLogger(__name__)
Handler = Callable[[Request], Awaitable[Response]]


def manager() -> Any:
    """Return SGLang's TokenizerManager."""
    return http_server._global_state.tokenizer_manager


async def parsed(request: Request, model: type[Body]) -> Body:
    """Read and check a JSON body. Raises Refusal."""
    return parse(model, await request.body())


async def run_command(command: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Run a command of `control.py` in the scheduler. Raises Refusal with its error."""
    message = DumperControlReqInput(method=METHOD, body=arguments | {"command": command})
    results = await manager().dumper_control(message)
    for result in results:
        if not result.success:
            raise Refusal(400, one_line(result.error))
    return merge(command, [result.response[0] for result in results])


def control(command: str, schema: type[Body]) -> Handler:
    """Return the handler of a route that runs a command in the scheduler."""

    async def run(request: Request) -> JSONResponse:
        body = await parsed(request, schema)
        return JSONResponse(await run_command(command, body.model_dump(exclude_unset=True)))

    run.__name__ = command
    return run


def check_success(success: bool, message: str) -> None:
    """Raise Refusal unless SGLang's answer says that it succeeded."""
    if not success:
        raise Refusal(400, one_line(message))


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
