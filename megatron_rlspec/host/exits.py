"""Calls that end or replace this process at once: os._exit and os.exec*, which code of the user's can make.

They run no handler, and choose the exit code, so a run would end with 0 and without a word. Standard library only.
"""

from __future__ import annotations

import os
import posix
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

_REAL = {name: getattr(posix, name) for name in ("_exit", "execv", "execve")}  # os.execlp and others call these
_inside = threading.local()  # depth: blocks of `inside` that this thread is in
_lock = threading.Lock()
_watching = 0  # blocks of `watched` that are open


class ProcessExit(BaseException):
    """Code of the user's, in a block of `inside`, made such a call. The message says what it would do."""


def leave(code: int) -> NoReturn:
    """End this process at once, as os._exit: for this package, which prints its own line."""
    _REAL["_exit"](code)
    raise AssertionError


@contextmanager
def watched() -> Iterator[None]:
    """Refuse these calls in the block: in `inside` by ProcessExit, elsewhere by one line and an exit code above 0.

    Elsewhere is a thread, a signal handler or a hook that the user's code left behind. Forked children may call them.
    """
    global _watching
    with _lock:
        _watching += 1
        _set({name: _refusing(name) for name in _REAL})
    try:
        yield
    finally:
        with _lock:
            _watching -= 1
            if _watching <= 0:
                _set(_REAL)


@contextmanager
def inside() -> Iterator[None]:
    """Mark the block as code of the user's, in this thread."""
    _inside.depth = getattr(_inside, "depth", 0) + 1
    try:
        with watched():
            yield
    finally:
        _inside.depth -= 1


def _refusing(name: str) -> Any:
    def refused(*args: Any, **named: Any) -> Any:
        if not _watching:  # the user's code kept this function for a forked child, or for later
            return _REAL[name](*args, **named)
        if name == "_exit":
            what = f"end the process with exit code {_shown(args[0] if args else named.get('status'))}"
        else:
            what = f"replace the process by {_shown(args[0] if args else named.get('path'))}"
        if getattr(_inside, "depth", 0):
            raise ProcessExit(f"it would {what}")
        place = own_frame(traceback.extract_stack())
        where = f"{place.filename}:{place.lineno}, in {place.name}, thread {threading.current_thread().name}"
        rank = os.environ.get("RANK", "0")
        line = f"rlspec: {'' if rank == '0' else f'rank {rank}: '}a call would {what} ({where}); the run ends here\n"
        os.write(2, line.encode(errors="backslashreplace"))
        status = args[0] if name == "_exit" and args and isinstance(args[0], int) else 0
        leave(status & 0xFF or 1)

    return refused


def own_frame(frames: Sequence[traceback.FrameSummary]) -> traceback.FrameSummary:
    """Return the innermost frame that made such a call, or any other: without this file's, and os.execl's in os."""
    others = [frame for frame in frames if frame.filename not in (__file__, os.__file__, "<frozen os>")]
    return (others or list(frames))[-1]


def _shown(value: Any) -> str:
    return ascii(value if isinstance(value, int) else os.fsdecode(value))[:100]


def _set(functions: dict[str, Any]) -> None:
    for name, function in functions.items():
        setattr(os, name, function)
        setattr(posix, name, function)


def _free_child() -> None:
    global _watching
    _watching = 0
    _inside.depth = 0
    _set(_REAL)


os.register_at_fork(after_in_child=_free_child)
