"""The temporary directory of one engine, and its removal together with its shared memory, however it ends."""

from __future__ import annotations

import errno
import glob
import os
import select
import shutil
import signal
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

PREFIX = "rlspec-engine-"
SHARED_MEMORY = Path("/dev/shm")
# Of TMPDIR: the path of a socket has at most 107, and multiprocessing makes one below the engine's directory.
MOST_BYTES = 107 - len("/rlspec-engine-XXXXXXXX/pymp-XXXXXXXX/listener-XXXXXXXX")


def make() -> Path:
    """Make a directory that only this user can read, and its folder for KV caches where there is a /dev/shm.

    Raises OSError, also where the directory's name would be too long for the sockets in it.
    """
    above = tempfile.gettempdir()
    if len(os.fsencode(above)) > MOST_BYTES:
        what = (
            f"expected a temporary directory of at most {MOST_BYTES} bytes (TMPDIR), because engines keep sockets there"
        )
        raise OSError(errno.ENAMETOOLONG, what, above)
    directory = Path(tempfile.mkdtemp(prefix=PREFIX))
    with suppress(OSError):
        (SHARED_MEMORY / columns(directory)).mkdir(mode=0o700)
    return directory


def current() -> Path | None:
    """Return the directory that the launcher gave this process; None without one."""
    directory = Path(tempfile.gettempdir())
    return directory if directory.name.startswith(PREFIX) else None


def columns(directory: Path | None) -> str:
    """Return the name of the folder in /dev/shm for KV caches of samples that leave an engine; "" without one."""
    return f"rlspec-kv-{directory.name}" if directory else ""


class Folder:
    """An open folder of KV caches, `columns` of some engine. Its files are opened relative to it, and never by a link.

    Raises OSError unless it belongs to this user, and no other user can enter it.
    """

    def __init__(self, name: str, parent: Path = SHARED_MEMORY) -> None:
        above = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._opened = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=above)
        finally:
            os.close(above)
        found = os.fstat(self._opened)
        if found.st_uid != os.geteuid() or found.st_mode & 0o077:
            os.close(self._opened)
            raise PermissionError(errno.EACCES, "not a folder of this user alone", name)

    @classmethod
    def own(cls) -> Folder:
        """Return that of this engine."""
        name = columns(current())
        if not name:
            raise FileNotFoundError(
                errno.ENOENT, "this engine has no folder of its own; start it with rlspec serve", ""
            )
        return cls(name)

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._opened)

    def names(self) -> list[str]:
        return os.listdir(self._opened)

    def create(self, name: str) -> BinaryIO:
        """Create a file that no other user can read. Raises OSError if there is one."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        return open(os.open(name, flags, 0o600, dir_fd=self._opened), "wb")

    def open(self, name: str) -> BinaryIO:
        """Open a regular file; a pipe or a device neither blocks nor is read. Raises OSError."""
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(name, flags, dir_fd=self._opened)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):  # `open` would refuse a directory, and not close it
            os.close(descriptor)
            raise FileNotFoundError(errno.ENOENT, "no regular file", name)
        return open(descriptor, "rb")

    def rename(self, before: str, after: str) -> None:
        os.rename(before, after, src_dir_fd=self._opened, dst_dir_fd=self._opened)

    def remove(self, begins: str = "", ends: str = "") -> None:
        """Remove the files whose names begin and end so."""
        for name in self.names():
            if name.startswith(begins) and name.endswith(ends):
                with suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=self._opened)


def remove(directory: Path) -> None:
    """Remove the directory and the shared memory that bears its name. Safe to repeat."""
    for name in glob.glob(f"{SHARED_MEMORY}/sglang_loads_{glob.escape(directory.name)}_*"):
        Path(name).unlink(missing_ok=True)
    shutil.rmtree(SHARED_MEMORY / columns(directory), ignore_errors=True)
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
