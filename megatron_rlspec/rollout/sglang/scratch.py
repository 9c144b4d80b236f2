"""The temporary directory of one engine, and its removal together with its shared memory, however it ends.

The launcher makes the directory and gives it to the engine as TMPDIR (`client/launcher.py`); an engine that somebody
starts by hand makes its own (`serve._scratch`). SGLang's shared memory has the directory's name in its own
(`serve._name_shared_memory`), so that `remove` finds both.
"""

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
# Longest TMPDIR in bytes: Linux allows 107 for the path of a socket, and multiprocessing makes one below the engine's
# directory.
MOST_BYTES = 107 - len("/rlspec-engine-XXXXXXXX/pymp-XXXXXXXX/listener-XXXXXXXX")


def make() -> Path:
    """Make a directory that only this user can read. `remove` or `remove_at_end` must follow.

    Raises OSError, also where the directory's name would be too long for the sockets in it.
    """
    parent = tempfile.gettempdir()
    if len(os.fsencode(parent)) > MOST_BYTES:
        what = (
            f"expected a temporary directory of at most {MOST_BYTES} bytes (TMPDIR), "
            "because engines keep sockets there"
        )
        raise OSError(errno.ENAMETOOLONG, what, parent)
    return Path(tempfile.mkdtemp(prefix=PREFIX))


def current() -> Path | None:
    """Return the directory that the launcher gave this process as TMPDIR; None without one."""
    directory = Path(tempfile.gettempdir())
    return directory if directory.name.startswith(PREFIX) else None


def remove(directory: Path) -> None:
    """Remove the directory and the shared memory whose names contain its name. Safe to repeat.

    directory  one of `make`: only its random name keeps the shared memory of other processes from being removed
    """
    for name in glob.glob(f"{SHARED_MEMORY}/*{glob.escape(directory.name)}*"):
        with suppress(OSError):
            os.unlink(name)
    shutil.rmtree(directory, ignore_errors=True)


def remove_at_end(directory: Path) -> None:
    """Start a small process that removes the directory once this process has ended, by SIGKILL too.

    Call it once, and better before this process starts threads or imports SGLang: the small process is a fork of it,
    and keeps what this process has in memory.
    """
    try:
        # It refers to this very process, also after its number is given to another one.
        this_process = os.pidfd_open(os.getpid())
    except (AttributeError, OSError):  # before Linux 5.3; the launcher still removes what it made
        return
    # Forked twice: the process in between ends, so the small one is no child of ours. SGLang kills all children when it
    # ends, and the launcher kills our process group; `setsid` leaves that.
    child = os.fork()
    if child:
        os.close(this_process)
        os.waitpid(child, 0)
        return
    os.setsid()
    if os.fork():
        os._exit(0)  # `_exit` runs no handlers of the process that was forked
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    # The small process closes its copies of the output streams. Otherwise a reader of this process's output would wait
    # until both processes end.
    null = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(null, stream)
    select.select([this_process], [], [])  # a pidfd becomes readable when its process has ended
    remove(directory)
    os._exit(0)
