"""The temporary directory of one engine, and its removal together with its shared memory, however it ends."""

from __future__ import annotations

import errno
import glob
import os
import select
import shutil
import signal
import tempfile
from contextlib import suppress
from pathlib import Path

PREFIX = "rlspec-engine-"
SHARED_MEMORY = Path("/dev/shm")
# Of TMPDIR: the path of a socket has at most 107, and multiprocessing makes one below the engine's directory.
MOST_BYTES = 107 - len("/rlspec-engine-XXXXXXXX/pymp-XXXXXXXX/listener-XXXXXXXX")


def make() -> Path:
    """Make a directory that only this user can read.

    Raises OSError, also where the directory's name would be too long for the sockets in it.
    """
    above = tempfile.gettempdir()
    if len(os.fsencode(above)) > MOST_BYTES:
        what = (
            f"expected a temporary directory of at most {MOST_BYTES} bytes (TMPDIR), "
            "because engines keep sockets there"
        )
        raise OSError(errno.ENAMETOOLONG, what, above)
    return Path(tempfile.mkdtemp(prefix=PREFIX))


def current() -> Path | None:
    """Return the directory that the launcher gave this process; None without one."""
    directory = Path(tempfile.gettempdir())
    return directory if directory.name.startswith(PREFIX) else None


def remove(directory: Path) -> None:
    """Remove the directory and the shared memory that bears its name. Safe to repeat."""
    for name in glob.glob(f"{SHARED_MEMORY}/*{glob.escape(directory.name)}*"):
        with suppress(OSError):
            os.unlink(name)
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
