"""Guard every route, SGLang's included: require the API key, and let no page of another site read an answer.

Both functions change how the application builds its middleware, so they work only before the server starts.
`routes.add_routes` calls `close_to_other_sites` for every server with the plugin. `serve._launch` calls `require_key`
if `rlspec serve` has a key; SGLang's own server checks its key itself.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse
from starlette.middleware.cors import CORSMiddleware

# An ASGI application: called with scope, receive and send (https://asgi.readthedocs.io).
App = Callable[
    [MutableMapping[str, Any], Callable[[], Awaitable[Any]], Callable[[Any], Awaitable[None]]],
    Awaitable[None],
]
# Beginnings of paths that need no key, as in SGLang (utils/auth.py), for probes that hold none.
_OPEN = ("/health", "/ready", "/metrics")


def close_to_other_sites(app: FastAPI) -> None:
    """Remove SGLang's CORS rule, under which a page of any site may read what this server answers."""
    app.user_middleware = [
        layer for layer in app.user_middleware if layer.cls is not CORSMiddleware
    ]


def require_key(app: FastAPI, key: str) -> Callable[[], None]:
    """Answer 401 to every request without `Authorization: Bearer KEY`, before SGLang sees it.

    SGLang's own check is not used: it keeps the key where /server_info and its log show it, and fails with a traceback
    on a token that is not ASCII. During its start SGLang calls its own route /freeze_gc without a key. Call the
    returned function once, after the start (`serve._launch`): from then on that route needs the key, too.

    key  not empty, printable ASCII (`checks._check_address`)
    """
    original = app.build_middleware_stack
    expected = key.encode()
    unguarded = [*_OPEN, "/freeze_gc"]  # read at every request; the returned function changes it

    def build_guarded() -> App:
        inner = original()

        async def check(scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
            # The third type, "lifespan", starts and stops the application; no client sends it.
            needs_key = scope["type"] in ("http", "websocket") and not scope["path"].startswith(
                tuple(unguarded)
            )
            if not needs_key or _has_key(scope, expected):
                await inner(scope, receive, send)
            elif scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})  # policy violation
            else:
                sentence = "expected the header `Authorization: Bearer KEY` with this server's key"
                await JSONResponse({"error": sentence}, 401)(scope, receive, send)

        return check

    # Starlette calls it once, at the first event. What it returns stands before all middleware, SGLang's own included.
    app.build_middleware_stack = build_guarded
    return lambda: unguarded.remove("/freeze_gc")


def _has_key(scope: MutableMapping[str, Any], expected: bytes) -> bool:
    """Return whether the request has exactly one header `Authorization: Bearer KEY` with the `expected` key."""
    headers = [value for name, value in scope["headers"] if name == b"authorization"]
    if len(headers) != 1:
        return False
    kind, _, token = headers[0].partition(b" ")
    # In constant time, and on bytes: `compare_digest` raises TypeError for text that is not ASCII.
    return kind.lower() == b"bearer" and secrets.compare_digest(token.strip(), expected)
