"""The folder in /dev/shm in which an engine leaves KV caches of samples that leave it. `scratch.remove` removes it."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from megatron_rlspec.rollout.sglang import scratch
from megatron_rlspec.rollout.sglang.scheduler import mounts


def own_name() -> str:
    """Return the name of this engine's folder; "" if no launcher gave it a directory."""
    directory = scratch.current()
    return f"rlspec-kv-{directory.name}" if directory else ""


def make() -> None:
    """Make this engine's folder, which only this user can read, where there is a /dev/shm."""
    if name := own_name():
        with suppress(OSError):
            (scratch.SHARED_MEMORY / name).mkdir(mode=0o700)


def shared_memory() -> str:
    """Name this process's /dev/shm. Processes have one name if a file that one of them writes there reaches all.

    A mounted tmpfs has a device number of its own among those of one running kernel.
    """
    boot = mounts.BOOT.read_text().strip() if mounts.BOOT.exists() else os.uname().nodename
    return (
        f"{boot}:{os.stat(scratch.SHARED_MEMORY).st_dev:x}"
        if scratch.SHARED_MEMORY.is_dir()
        else ""
    )


class Folder:
    """An open folder of KV caches, `own_name` of some engine. Its files are opened relative to it, and never by a link.

    Raises OSError unless it belongs to this user, and no other user can enter it.
    """

    def __init__(self, name: str, parent: Path = scratch.SHARED_MEMORY) -> None:
        above = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._opened = os.open(
                name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=above
            )
        finally:
            os.close(above)
        found = os.fstat(self._opened)
        if found.st_uid != os.geteuid() or found.st_mode & 0o077:
            os.close(self._opened)
            raise PermissionError(errno.EACCES, "not a folder of this user alone", name)

    @classmethod
    def own(cls) -> Folder:
        """Return that of this engine."""
        name = own_name()
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
        # `open` would refuse a directory, and not close it
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
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
