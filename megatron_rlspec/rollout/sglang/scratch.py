"""The temporary directory of one engine, and its removal together with its shared memory, however it ends."""

from __future__ import annotations

import glob
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


def columns(directory: Path | None) -> str:
    """Return how the paths of the files begin into which an engine writes the KV caches of samples that leave it."""
    return f"{_SHARED_MEMORY}/rlspec-kv-" + (f"{directory.name}-" if directory else "")


def remove(directory: Path) -> None:
    """Remove the directory and the shared memory that bears its name. Safe to repeat."""
    for begins in (f"{_SHARED_MEMORY}/sglang_loads_{directory.name}_", columns(directory)):
        remove_files(begins)
    shutil.rmtree(directory, ignore_errors=True)


def remove_files(begins: str, ends: str = "") -> None:
    """Remove the files whose paths begin and end so."""
    for name in glob.glob(f"{glob.escape(begins)}*{ends}"):
        Path(name).unlink(missing_ok=True)


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
