"""Small files: read with limits, written whole or not at all. Standard library only.

A file is replaced atomically only where a regular file stands or will stand. Devices, pipes and sockets are written
through, because replacing `/dev/stdout` or `/dev/full` by a file would destroy them.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

# bytes of a text file that is read whole; a cost table of 100,000 rows has 2.5e7
READ_MOST = 1 << 28
_STREAMS = {"/dev/stdout": "stdout", "/dev/stderr": "stderr"}


_LOCKED: set[int] = set()  # descriptors that hold a lock
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class FileError(ValueError):
    """A file that cannot be read or written. One line: which file, what is wrong, what was expected."""


class LockedError(FileError):
    """Another process holds the lock of a file."""


# ---- reading ----------------------------------------------------------------------------------------------------


def read_bytes(path: str | Path, most: int = READ_MOST) -> bytes:
    """Read a regular file of at most `most` bytes. Raises FileError, also for a directory, a pipe or a device."""
    path = Path(path)
    try:
        # a pipe without a writer must not block
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(handle, "rb") as file:
            about = os.fstat(handle)
            if not stat.S_ISREG(about.st_mode):
                raise FileError(f"{path}: expected a regular file, found a {kind(about.st_mode)}")
            if about.st_size > most:
                raise FileError(f"{path}: {about.st_size} bytes, expected at most {most}")
            return file.read(most + 1)
    except (OSError, ValueError) as error:
        if isinstance(error, FileError):
            raise
        raise FileError(f"{shown(path)}: {reason(error)}") from None


def read_text(path: str | Path, most: int = READ_MOST) -> str:
    """Read a regular UTF-8 file; a byte order mark is dropped. Raises FileError."""
    content = read_bytes(path, most)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise FileError(
            f"{path}: not UTF-8 text (byte {error.start}: {content[error.start]:#04x})"
        ) from None


def read_json(path: str | Path, most: int = READ_MOST, *, finite: bool = True) -> Any:
    """Read one JSON value from a file, as `parse_json`. Raises FileError."""
    return parse_json(read_text(path, most), str(path), finite=finite)


def parse_json(text: str, source: str, *, finite: bool = True) -> Any:
    """Parse standard JSON. Raises FileError for NaN, infinities, keys that appear twice, and deep nesting.

    `finite=False` reads NaN and infinities, for callers that check the numbers and report their position.
    """

    def refuse(constant: str) -> float:
        if finite:
            raise FileError(f"{source}: not valid JSON: {constant} is no JSON number")
        return float(constant)

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            keys = [key for key, _ in pairs]
            repeated = next(key for key in keys if keys.count(key) > 1)
            raise FileError(f"{source}: the key {repeated[:60]!r} appears twice in one object")
        return found

    try:
        return json.loads(text, parse_constant=refuse, object_pairs_hook=unique)
    except FileError:
        raise
    except RecursionError:
        raise FileError(f"{source}: not valid JSON: nested too deeply") from None
    except json.JSONDecodeError as error:
        what = "the file is empty" if not text.strip() else str(error)
        raise FileError(f"{source}: not valid JSON: {what}") from None
    except ValueError:  # an integer of more than 4,300 digits
        raise FileError(f"{source}: not valid JSON: a number has too many digits") from None


# ---- writing ----------------------------------------------------------------------------------------------------


def write(path: str | Path, content: str | bytes) -> None:
    """Write a whole file or none of it; missing directories are made. Raises OSError, which names `path`."""
    path = Path(path)
    data = content.encode() if isinstance(content, str) else content
    with _naming(path):
        special = _is_special(path)
        if special:
            _write_through(path, data)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
    if not special:
        with replacing(path) as partial:
            partial.write_bytes(data)


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Yield a path beside `path` to write to. At the end it takes the name `path`; after an error it is removed.

    For libraries that write by themselves. Raises OSError, which names `path`.
    """
    path = Path(path)
    with _naming(path):
        real = path.resolve()  # replaces the file that a symbolic link names, not the link
        partial = real.with_name(f".{real.name[-200:]}.{os.getpid()}.partial")
        try:
            yield partial
            sync(partial)
            os.replace(partial, real)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise


def sync(path: Path) -> None:
    """Wait until a file or directory is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# ---- locks --------------------------------------------------------------------------------------------------------


@contextmanager
def locked(path: str | Path) -> Iterator[None]:
    """Hold the lock of a file during the block. The file and its directory are made if they are missing.

    The system frees the lock when the process ends, however it ends. Processes that this one starts or forks do not
    hold it. NFS passes it on to its server. A file system without locks gets one line on stderr. Raises LockedError at
    once if another process has it, and OSError, which names `path`.
    """
    with _naming(Path(path)):
        handle = _locked(Path(path))
    _LOCKED.add(handle)
    try:
        yield
    finally:
        if handle in _LOCKED:  # else this is a forked child
            _LOCKED.remove(handle)
            os.close(handle)


def _locked(path: Path) -> int:
    """Return the descriptor of a locked file. Tries again if its last owner removes file or directory meanwhile."""
    for _ in range(100):
        handle = -1
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(handle), path.stat()):
                return handle
        except BlockingIOError:
            os.close(handle)
            raise LockedError(f"{path}: another process uses it") from None
        except FileNotFoundError:
            pass
        except OSError as error:
            if handle < 0 or error.errno not in _NO_LOCKS:
                raise
            line = f"{path}: this file system has no locks ({reason(error)}); let one process at a time use it"
            tell(line, sys.stderr)
            return handle
        if handle >= 0:
            os.close(handle)
    raise FileNotFoundError(errno.ENOENT, "its directory is removed again and again", str(path))


def _close_in_child() -> None:
    """Close what a forked child inherits: a lock lasts as long as any copy of its descriptor."""
    for handle in _LOCKED:
        os.close(handle)
    _LOCKED.clear()


os.register_at_fork(after_in_child=_close_in_child)


# ---- lines for people --------------------------------------------------------------------------------------------


def tell(line: str, stream: TextIO | None) -> None:
    """Print a line at once. If it cannot be printed, it and all later ones of this stream are dropped.

    The reader of a pipe or a terminal can be gone, the disk of a log be full, or a function of the user's have closed
    the stream. That must not end the work.
    """
    if stream is not None and stream.closed:
        return
    try:
        print(line, file=stream, flush=True)
    except OSError:
        assert stream is not None
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), stream.fileno())


# ---- outputs of commands ------------------------------------------------------------------------------------------


def check_output(path: str | Path) -> None:
    """Raise FileError if a file that a command line named cannot be written. Call it before the work begins."""
    path = Path(path)
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        mode = None
    except (OSError, ValueError) as error:
        raise FileError(f"{shown(path)}: cannot be written: {reason(error)}") from None
    if mode is not None and stat.S_ISDIR(mode):
        raise FileError(f"{path}: cannot be written: it is a directory; expected a file name")
    if mode is not None and not stat.S_ISREG(mode):
        return
    parent = path.resolve().parent if path.is_symlink() else path.parent
    if not parent.is_dir():
        raise FileError(f"{path}: cannot be written: there is no directory {parent}")
    refused = _refuses(parent)
    if refused:
        raise FileError(f"{path}: cannot be written: {parent}: {refused}")


def check_outputs(
    outputs: Mapping[str, str | Path | None], inputs: Mapping[str, str | Path | None] | None = None
) -> None:
    """Refuse output files that cannot be written, that replace an input, or that two options share.

    outputs  option -> file that it names; None or empty: not asked for
    inputs   what a message calls it -> file or directory that the command reads. A file below such a directory is read

    Call it before the work begins. Files are compared by their resolved paths, and by inode where they exist. Devices,
    pipes and standard streams may be shared. Raises FileError.
    """
    taken = [
        (Path(path), f"this file is read: {what}") for what, path in (inputs or {}).items() if path
    ]
    for option, name in outputs.items():
        if not name:
            continue
        path = Path(name)
        check_output(path)
        if _is_special(path):
            continue
        for other, why in taken:
            if _same(path, other):
                raise FileError(f"{option} {shown(path)}: {why}; name another file")
        taken.append((path, f"{option} writes this file, too"))


def _same(path: Path, other: Path) -> bool:
    """Return whether `path` is the file `other`, or exists and lies below the directory `other`."""
    path = Path(os.path.realpath(path))
    if other.is_dir():
        return path.exists() and path.is_relative_to(os.path.realpath(other))
    return path == Path(os.path.realpath(other)) or (
        path.exists() and other.exists() and path.samefile(other)
    )


def check_new_directory(path: str | Path) -> None:
    """Raise FileError unless a directory of this name, which a command line asked for, can be made."""
    path = Path(path)
    try:
        parent = path.parent.stat()
        path.lstat()
        problem = "exists already; expected the name of a new directory"
    except FileNotFoundError as error:
        problem = "" if path.parent.exists() else f"cannot be made: {reason(error)}"
    except (OSError, ValueError) as error:
        problem = f"cannot be made: {reason(error)}"
    if not problem and not stat.S_ISDIR(parent.st_mode):
        problem = f"cannot be made: {path.parent} is not a directory"
    elif not problem and (refused := _refuses(path.parent)):
        problem = f"cannot be made: {path.parent}: {refused}"
    elif (
        not problem and len(os.fsencode(path.name)) > 240
    ):  # the temporary name beside it is longer
        problem = "cannot be made: File name too long"
    if problem:
        raise FileError(f"{shown(path)}: {problem}")


def write_output(path: str | Path, content: str | bytes) -> None:
    """Write a file that was named on a command line, as `write`. Raises FileError; makes no directory."""
    check_output(path)
    try:
        write(path, content)
    except OSError as error:
        raise FileError(f"{path}: cannot be written: {reason(error)}") from None


def _refuses(directory: Path) -> str:
    """Return why no file can be made in a directory, found by making one without a name; "" if one can."""
    try:
        with tempfile.TemporaryFile(dir=directory):
            return ""
    except OSError as error:
        return reason(error)


def kind(mode: int) -> str:
    """Return the kind of a file with this `st_mode`, in one or two words."""
    kinds: Sequence[tuple[Any, str]] = (
        (stat.S_ISDIR, "directory"),
        (stat.S_ISFIFO, "pipe"),
        (stat.S_ISCHR, "device"),
        (stat.S_ISBLK, "disk device"),
        (stat.S_ISSOCK, "socket"),
    )
    return next((name for test, name in kinds if test(mode)), "file")


def reason(error: Exception) -> str:
    """Return the message of an OSError, without its number and path."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return " ".join(str(error).split())


def shown(path: str | Path) -> str:
    """Format a path for a message: long ones are cut in the middle, control characters are escaped."""
    text = str(path)
    text = text if text.isprintable() else repr(text)
    return text if len(text) <= 240 else f"{text[:100]}...{text[-100:]}"


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Make an OSError name `path`. It may name a temporary file, or no file."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from None


def _is_special(path: Path) -> bool:
    if "\0" in str(path):
        raise OSError(errno.EINVAL, "a null byte in the name")
    return str(path) in _STREAMS or (path.exists() and not path.is_file() and not path.is_dir())


def _write_through(path: Path, data: bytes) -> None:
    """Write into a device, pipe or standard stream. Raises OSError; a disk is refused."""
    stream = _STREAMS.get(str(path))
    if stream is not None:
        file = getattr(sys, stream)
        file.write(data.decode())
        file.flush()
        return
    if stat.S_ISBLK(path.stat().st_mode):
        raise OSError(errno.EPERM, "a disk device is not written to")
    # a pipe without a reader must not block
    handle = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    os.set_blocking(handle, True)
    with open(handle, "wb") as file:
        file.write(data)
