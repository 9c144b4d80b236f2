"""Files of a sample's KV cache between engines that share no memory: the target's server fetches the source's.

A file is named by 32 digits, so no path crosses the network. It is sent once, in chunks; its size is announced before.
What it holds, and its checksums, the scheduler examines as in any file (`kv_file.read`).
"""

from __future__ import annotations

import asyncio
import json
import os
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, BinaryIO

import requests
import urllib3
from fastapi import Request
from fastapi.responses import JSONResponse, StreamingResponse

from megatron_rlspec.extensions.migration.sglang import kv_file, limits, schemas
from megatron_rlspec.extensions.migration.sglang.folder import Folder
from megatron_rlspec.extensions.migration.sglang.reservations import reservations
from megatron_rlspec.rollout.sglang.http.bodies import manager, one_line, parsed, run_command
from megatron_rlspec.rollout.sglang.limits import MEGABYTE
from megatron_rlspec.rollout.sglang.schemas import Refusal

CHUNK = MEGABYTE


async def send(request: Request) -> StreamingResponse:
    """Send one rank's file of this engine, and remove it."""
    asked = await parsed(request, schemas.SendBody)
    file = await asyncio.to_thread(_take, f"{asked.name}.{asked.rank}")
    size = os.fstat(file.fileno()).st_size
    headers = {"Content-Length": str(size)}
    return StreamingResponse(_parts(file), media_type="application/octet-stream", headers=headers)


async def fetch(request: Request) -> JSONResponse:
    """Fetch the files of all ranks of another engine, all or none; return {"names"} for `kv_accept`."""
    asked = await parsed(request, schemas.FetchBody)
    room = int((await run_command("kv_room", {}))["bytes"])
    headers = (kv_file.HEADER_BYTES + kv_file.TOKEN_BYTES * manager().context_len) * len(asked.names) * asked.ranks
    most = room * manager().server_args.tp_size + headers
    if _fetches.waiting >= limits.FETCHES + limits.FETCHES_WAITING:
        raise Refusal(503, f"{_fetches.waiting} columns/fetch are being carried out; send this one later")
    _fetches.waiting += 1
    try:
        found = await asyncio.get_running_loop().run_in_executor(_fetches.threads, _fetch, asked, most)
    finally:
        _fetches.waiting -= 1
    reservations.files(found)
    return JSONResponse({"names": found})


class _Fetches:
    """The threads in which columns are fetched: a slow source keeps one of these, and none that others need."""

    def __init__(self) -> None:
        self.threads = ThreadPoolExecutor(limits.FETCHES, "rlspec-fetch")
        self.waiting = 0


_fetches = _Fetches()


def _own() -> Folder:
    try:
        return Folder.own()
    except OSError as error:
        raise Refusal(409, f"no folder for columns: {error.strerror}") from None


def _take(name: str) -> BinaryIO:
    with _own() as folder:
        try:
            file = folder.open(name)
        except OSError:
            raise Refusal(404, f"no columns {name} are here; they are sent once") from None
        folder.remove(name)
    return file


def _parts(file: BinaryIO) -> Iterator[bytes]:
    with file:
        while part := file.read(CHUNK):
            yield part


def _fetch(asked: schemas.FetchBody, most: int) -> list[str]:
    """Write files of at most so many bytes together. Returns their names. Raises Refusal."""
    here = [uuid.uuid4().hex for _ in asked.names]
    deadline = time.monotonic() + limits.SOURCE_SECONDS
    with _own() as folder, requests.Session() as session:
        session.trust_env = False
        try:
            for rank in range(asked.ranks):
                for there, name in zip(asked.names, here, strict=True):
                    what = {"name": there, "rank": rank}
                    with folder.create(f"{name}.{rank}") as file:
                        most -= _download(session, asked, what, file, most, deadline)
        except BaseException as error:
            for name in here:
                folder.remove(f"{name}.")
            if isinstance(error, (requests.RequestException, urllib3.exceptions.HTTPError)):
                raise Refusal(424, f"{asked.url}: {_why(error)}") from None
            if isinstance(error, OSError):
                raise Refusal(424, f"columns of {asked.url} cannot be kept: {error.strerror or error}") from None
            raise
    return here


def _download(
    session: requests.Session,
    asked: schemas.FetchBody,
    what: dict[str, Any],
    file: BinaryIO,
    most: int,
    deadline: float,
) -> int:
    """Write one file and return its size. Raises Refusal, OSError, and the errors of requests and urllib3."""
    headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {asked.key}"} if asked.key else {})
    url = f"{asked.url.rstrip('/')}/rlspec/columns/send"
    answer = session.post(
        url,
        json=what,
        headers=headers,
        stream=True,
        timeout=(limits.SOURCE_SILENT, limits.SOURCE_SILENT),
        allow_redirects=False,
    )
    with answer:
        if answer.status_code != 200:
            raise Refusal(424, f"{asked.url}: {_refusal(answer)}")
        text = answer.headers.get("Content-Length", "")
        size = int(text) if text.isascii() and text.isdigit() and len(text) < 18 else -1
        if not 0 < size <= most:
            raise Refusal(424, f"{asked.url} announces {text[:30] or 'no number of'} bytes; expected at most {most}")
        while part := answer.raw.read(CHUNK, decode_content=False):
            file.write(part)
            if time.monotonic() > deadline:
                raise Refusal(424, f"{asked.url}: its columns took longer than {limits.SOURCE_SECONDS:.0f} s")
        if file.tell() != size:
            raise Refusal(424, f"{asked.url}: {file.tell()} of {size} bytes came")
    return size


def _refusal(answer: requests.Response) -> str:
    if answer.status_code == 401:
        return "it takes no columns' request with this key"
    text = ""
    with suppress(ValueError, KeyError, TypeError, RecursionError):
        text = json.loads(answer.raw.read(4096, decode_content=False))["error"]
    return one_line(text) if isinstance(text, str) and text else f"it answered with status {answer.status_code}"


def _why(error: Exception) -> str:
    inner = (*error.args, None)[0]
    if isinstance(error, requests.ConnectTimeout):
        return f"no answer within {limits.SOURCE_SILENT:.0f} s"
    if isinstance(error, (requests.Timeout, urllib3.exceptions.TimeoutError)) or isinstance(
        inner, urllib3.exceptions.ReadTimeoutError
    ):
        return f"silent for {limits.SOURCE_SILENT:.0f} s"
    if isinstance(error, requests.ConnectionError):
        return "this engine cannot connect to it"
    return "it ended early"
