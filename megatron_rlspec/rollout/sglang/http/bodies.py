"""Read the bodies of our routes, run commands in the scheduler, and answer every error with one sentence.

`routes.py` and `weight_routes.py` call these functions in the event loop of SGLang's HTTP process.
"""

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
    """Return SGLang's TokenizerManager. It exists once the server has started, not when this module is imported."""
    return http_server._global_state.tokenizer_manager


async def parsed(request: Request, model: type[Body]) -> Body:
    """Read and check a JSON body. Raises Refusal."""
    return parse(model, await request.body())


async def run_command(command: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Run a command of `scheduler/control.py` in every scheduler, and merge the answers of data-parallel ranks.

    Raises Refusal with a scheduler's error. Other data-parallel ranks may then have run the command.

    arguments  the command's keyword arguments, of JSON types; none is named `command`, which the message uses
    """
    message = DumperControlReqInput(method=METHOD, body=arguments | {"command": command})
    results = await manager().dumper_control(message)
    for result in results:
        if not result.success:
            raise Refusal(400, one_line(result.error))
    # `control._handle` answers with a list of one object.
    return merge(command, [result.response[0] for result in results])


def command_handler(command: str, schema: type[Body]) -> Handler:
    """Return the handler of a route that runs a command in the scheduler.

    schema  of the command, in `schemas.COMMANDS`

    A field that the body leaves out is not passed on, so the defaults are those of the command in `control.py`.
    """

    async def run(request: Request) -> JSONResponse:
        body = await parsed(request, schema)
        return JSONResponse(await run_command(command, body.model_dump(exclude_unset=True)))

    run.__name__ = command  # FastAPI names the route by it
    return run


def check_success(success: bool, message: str) -> None:
    """Raise Refusal unless SGLang's answer says that it succeeded."""
    if not success:
        raise Refusal(400, one_line(message))


def one_line(text: str) -> str:
    """Return an error's text on one line of at most 1000 characters."""
    return (" ".join(text.split()) or "the engine gave no reason")[:1000]


def internal_error(error: Exception) -> str:
    """Return the sentence for a defect of the server. The error's own text may show what no client should see."""
    return f"internal error ({type(error).__name__}); the engine's log has its traceback"


def errors_as_json(handler: Handler) -> Handler:
    """Wrap a handler: every exception of it becomes a JSON object with one sentence.

    Not those of a streamed body, which is made after the handler has returned: `routes._lines` treats its own.
    """

    async def answer(request: Request) -> Response:
        try:
            return await handler(request)
        except Refusal as refusal:
            return JSONResponse({"error": str(refusal)}, refusal.status)
        except ClientDisconnect:
            return JSONResponse({"error": "the client closed the connection"}, 400)
        except Exception as error:  # anything else: SGLang would answer it with a page of text
            logger.exception("rlspec: %s failed", request.url.path)
            return JSONResponse({"error": internal_error(error)}, 500)

    answer.__name__ = handler.__name__
    answer.__doc__ = handler.__doc__
    return answer
