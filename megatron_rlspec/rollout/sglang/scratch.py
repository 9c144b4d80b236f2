"""The temporary directory of one engine, and its removal together with SGLang's shared memory, however it ends."""

from __future__ import annotations

import os
import select
import shutil
import signal
import tempfile
from pathlib import Path

PREFIX = "rlspec-engine-"
_SHARED_MEMORY = Path("/dev/shm")


def make() -> Path:
    """Make a directory that only this user can read."""
    return Path(tempfile.mkdtemp(prefix=PREFIX))


def current() -> Path | None:
    """Return the directory that the launcher gave this process; None without one."""
    directory = Path(tempfile.gettempdir())
    return directory if directory.name.startswith(PREFIX) else None


def remove(directory: Path) -> None:
    """Remove the directory and the shared memory that bears its name. Safe to repeat."""
    for file in _SHARED_MEMORY.glob(f"sglang_loads_{directory.name}_*.shm"):
        file.unlink(missing_ok=True)
    shutil.rmtree(directory, ignore_errors=True)


def remove_at_end(directory: Path) -> None:
    """Start a small process that removes the directory once this process has ended, by SIGKILL too.

    It leaves the tree of this process's children, because SGLang kills these when it ends.
    """
    try:
        server = os.pidfd_open(os.getpid())
    except (AttributeError, OSError):  # before Linux 5.3; the launcher still removes what it made
        return
    child = os.fork()
    if child:
        os.close(server)
        os.waitpid(child, 0)
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(null, stream)
    select.select([server], [], [])
    remove(directory)
    os._exit(0)
