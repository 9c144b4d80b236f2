"""HTTP requests to one `rlspec serve`, and one line for each way in which they fail.

`SGLangEngine` (`engine.py`) inherits from `Connection` and calls these functions. Paths are the keys of `ROUTES` in
`http/routes.py`, without the prefix /rlspec/. `post_to_sglang` and `get_from_sglang` call SGLang's own routes. No
request is sent twice: only a caller may repeat it.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

import requests
from urllib3.exceptions import NewConnectionError, ReadTimeoutError

from megatron_rlspec.engine import EngineError, RequestError
from megatron_rlspec.rollout.sglang.client.launcher import EngineProcess
from megatron_rlspec.rollout.sglang.settings import KEY

# Statuses of requests that another engine would refuse, too: malformed, or too large. They become RequestError, after
# which `rollout/dispatch.py` gives the request to no other engine.
MALFORMED = (400, 413)
_CONNECT_SECONDS = 10.0  # longest time to open a connection


class RefusedError(EngineError):
    """The engine refused with another status than 401 and those of MALFORMED, or another kind of server answered."""


class Connection:
    """Requests below `url`/rlspec. Several threads may call it: each request has a session of its own.

    url      http://HOST:PORT
    api_key  that the server was started with; "" sends none
    process  the server's, if this client started it; it tells how the server ended
    timeout  longest time in seconds without a byte of an answer
    """

    def __init__(
        self, url: str, api_key: str, timeout: float, process: EngineProcess | None = None
    ) -> None:
        self.url = url.rstrip("/")
        self.api_key = api_key
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout = timeout
        self._process = process

    def __repr__(self) -> str:
        return f"SGLangEngine({self.url})"  # the subclass of which callers have objects

    def post(self, path: str, **arguments: Any) -> dict[str, Any]:
        """Post a request and return its answer, a JSON object. Raises EngineError: RequestError for MALFORMED.

        arguments  of `requests.Session.request`, such as `json`, `params` or `data`
        """
        with self._send(path, **arguments) as answer:
            return self._object(path, answer.content)

    @contextmanager
    def answer_to(self, path: str, **arguments: Any) -> Iterator[dict[str, Any]]:
        """Post a request, and yield its answer to the `with` block. Raises as `post` and `reading`."""
        answer = self.post(path, **arguments)
        with self.reading(path, answer):
            yield answer

    @contextmanager
    def reading(self, path: str, answer: Any) -> Iterator[None]:
        """Raise RefusedError if the `with` block raises KeyError, TypeError or ValueError.

        So the block may only read the answer: an error of anything else in it would be blamed on the engine.

        answer  what the error's message quotes
        """
        try:
            yield
        except (KeyError, TypeError, ValueError):
            raise self.not_an_engine(path, answer) from None

    def post_to_sglang(self, route: str, body: dict[str, Any]) -> None:
        """Call one of SGLang's own routes. Raises EngineError unless the status is 200; the answer is not read."""
        self._send(route, under="/", json=body).close()

    def not_an_engine(self, path: str, answer: Any) -> RefusedError:
        """Return the error for an answer that is no answer of our server: raw bytes, or JSON of another form."""
        text = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        begins = text[:40].decode("ascii", "replace").replace("\ufffd", "?")
        return RefusedError(
            f"{self.url}: not an rlspec engine: {path} answered {' '.join(begins.split())!r}"
        )

    def stream(self, path: str, **arguments: Any) -> Generator[dict[str, Any], None, None]:
        """Post a request and yield the JSON objects of its answer, one a line, as they come. Raises EngineError.

        The request is sent at the first `next`. Closing the generator closes the connection, and the engine then ends
        what is left (`_lines` in `http/routes.py`).
        """
        with self._send(path, stream=True, **arguments) as answer:
            try:
                # Without a chunk size a line is yielded as soon as it has come, and not once 512 bytes have.
                for text in answer.iter_lines(chunk_size=None):  # type: ignore[call-overload]
                    if text:
                        yield self._object(path, text)
            except requests.RequestException as error:
                raise EngineError(
                    f"{self.url}: {path} broke off: {self._why_no_answer(error)}"
                ) from None

    def _object(self, path: str, text: bytes) -> dict[str, Any]:
        """Parse an answer, or one line of it. Raises RefusedError unless it is a JSON object."""
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            raise self.not_an_engine(path, text) from None
        if not isinstance(value, dict):
            raise self.not_an_engine(path, value)
        return value

    def get_from_sglang(self, route: str) -> dict[str, Any]:
        """Return the answer of one of SGLang's own routes, a JSON object. Raises EngineError."""
        with self._send(route, under="/", method="GET") as answer:
            return self._object(route, answer.content)

    def _send(
        self, path: str, under: str = "/rlspec/", method: str = "POST", **arguments: Any
    ) -> requests.Response:
        """Send a request. Return its answer, which the caller closes, if the status is 200. Raises EngineError.

        under      "/rlspec/" for our routes, "/" for SGLang's own
        arguments  of `requests.Session.request`; with `stream=True` the body has not been read yet
        """
        session = requests.Session()
        # No proxy lies between a trainer and its engines, and no .netrc replaces the key.
        session.trust_env = False
        try:
            answer = session.request(
                method,
                f"{self.url}{under}{path}",
                headers=self._headers,
                timeout=(_CONNECT_SECONDS, self._timeout),
                **arguments,
            )
        except requests.RequestException as error:
            raise EngineError(f"{self.url}: {path} failed: {self._why_no_answer(error)}") from None
        if answer.status_code == 200:
            return answer
        with answer:
            raise self._refusal(path, answer)

    def _refusal(self, path: str, answer: requests.Response) -> EngineError:
        """Return the error for an answer with another status than 200: RequestError if its status is MALFORMED."""
        status = answer.status_code
        if status == 401:
            needed = "another key than the one it was given"
            if not self._headers:
                needed = "a key, and was given none"
            return EngineError(
                f"{self.url}: it needs {needed}; set {KEY} to the key it was served with"
            )
        try:
            # `content` reads the body here if the request was sent with `stream`, so the connection may break.
            reason = json.loads(answer.content)["error"]
        except (requests.RequestException, ValueError, KeyError, TypeError, RecursionError):
            reason = None
        if not isinstance(reason, str):
            return RefusedError(
                f"{self.url}: not an rlspec engine: {path} answered with status {status}"
            )
        kind = RequestError if status in MALFORMED else RefusedError
        return kind(f"{self.url}: {path} refused ({status}): {reason[:500]}")

    def _why_no_answer(self, error: requests.RequestException) -> str:
        """Say in a few words why no answer came. An ended engine comes first: it explains all other errors."""
        # Within a stream, requests reports a timeout as a ConnectionError around urllib3's own.
        inner = error.args[0] if error.args else None
        silent = isinstance(error, requests.Timeout) or isinstance(inner, ReadTimeoutError)
        # A broken connection often means that the process is ending: wait up to 1 s for that. A silent one is not
        # broken, so the process is only looked at.
        if self._process is not None and self._process.ends_within(0 if silent else 1):
            code = self._process.process.returncode
            return f"the engine ended with code {code} (log: {self._process.log})"
        if isinstance(error, requests.exceptions.InvalidHeader):
            return f"{KEY} has a character that no header may have"
        reason = getattr(inner, "reason", None)
        # An address that requests cannot read is a ValueError, an unknown host name a NewConnectionError. InvalidHeader
        # is a ValueError, too, so it stands above.
        if isinstance(error, (ValueError, requests.ConnectTimeout)) or isinstance(
            reason, NewConnectionError
        ):
            return "cannot connect; expected http://HOST:PORT of a running engine"
        if silent:
            return f"silent for {self._timeout:.0f} s"
        if isinstance(error, requests.exceptions.SSLError):
            return "the TLS handshake failed; `rlspec serve` itself speaks http"
        return "the answer ended early: the engine ended, or closed the connection"
