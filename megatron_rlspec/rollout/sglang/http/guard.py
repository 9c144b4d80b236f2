"""Guard every route, SGLang's included: require the API key, and refuse pages of other sites."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse
from starlette.middleware.cors import CORSMiddleware

App = Callable[
    [MutableMapping[str, Any], Callable[[], Awaitable[Any]], Callable[[Any], Awaitable[None]]],
    Awaitable[None],
]
_OPEN = ("/health", "/ready", "/metrics")  # as SGLang has it, for probes that hold no key


def close_to_other_sites(app: FastAPI) -> None:
    """Remove SGLang's CORS rule, under which a page of any site may read what this server answers."""
    app.user_middleware = [
        layer for layer in app.user_middleware if layer.cls is not CORSMiddleware
    ]


def require_key(app: FastAPI, key: str) -> Callable[[], None]:
    """Answer 401 to every request without `Authorization: Bearer KEY`, before SGLang sees it.

    SGLang's own check is not used: it keeps the key where /server_info and its log show it, and fails with a traceback
    on a token that is not ASCII. During its start SGLang calls its own route /freeze_gc without a key. Call the
    returned function after the start: from then on that route needs the key, too.
    """
    build = app.build_middleware_stack
    expected = key.encode()
    unguarded = [*_OPEN, "/freeze_gc"]

    def guarded() -> App:
        inner = build()

        async def check(scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
            asked = scope["type"] in ("http", "websocket") and not scope["path"].startswith(
                tuple(unguarded)
            )
            if not asked or _holds(scope, expected):
                await inner(scope, receive, send)
            elif scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
            else:
                sentence = "expected the header `Authorization: Bearer KEY` with this server's key"
                await JSONResponse({"error": sentence}, 401)(scope, receive, send)

        return check

    app.build_middleware_stack = guarded
    return lambda: unguarded.remove("/freeze_gc")


def _holds(scope: MutableMapping[str, Any], expected: bytes) -> bool:
    given = [value for name, value in scope["headers"] if name == b"authorization"]
    if len(given) != 1:
        return False
    kind, _, token = given[0].partition(b" ")
    return kind.lower() == b"bearer" and secrets.compare_digest(token.strip(), expected)
