"""Read files with limits; write them whole or not at all; lock them; check outputs that a command line names.

Also `tell`, which prints a line for people. Standard library only.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, TextIO

# The largest file that is read whole by default, in bytes: far more than any JSON file of this package has.
READ_MOST = 1 << 28
# what `flock` raises on a file system without locks, such as some network mounts
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class FileError(ValueError):
    """A file that cannot be read or written. One line: which file, what is wrong, what was expected."""

    exit_code = 2  # of the process (`cli.exit_code`): a mistake of the user


# ---- reading ----------------------------------------------------------------------------------------------------


def read_bytes(path: str | Path, most: int = READ_MOST) -> bytes:
    """Read a file of at most `most` bytes; a larger one is refused before anything is read. Raises FileError."""
    path = Path(path)
    try:
        size = path.stat().st_size
        if size > most:
            raise FileError(f"{path}: {size} bytes, expected at most {most}")
        return path.read_bytes()
    except OSError as error:
        raise FileError(f"{shown(path)}: {reason(error)}") from None


def read_text(path: str | Path, most: int = READ_MOST) -> str:
    """Read a UTF-8 file of at most `most` bytes; a byte order mark is dropped. Raises FileError."""
    content = read_bytes(path, most)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise FileError(
            f"{path}: not UTF-8 text (byte {error.start}: {content[error.start]:#04x})"
        ) from None


def read_json(path: str | Path, most: int = READ_MOST) -> Any:
    """Read one JSON value from a file, as `parse_json`. Raises FileError."""
    return parse_json(read_text(path, most), str(path))


def parse_json(text: str, source: str) -> Any:
    """Parse standard JSON, which has neither NaN nor infinity. Raises FileError, which names `source`."""

    def constant(name: str) -> NoReturn:
        raise FileError(f"{source}: not valid JSON: {name} is no JSON number")

    try:
        return json.loads(text, parse_constant=constant)
    except FileError:
        raise
    except RecursionError:
        raise FileError(f"{source}: not valid JSON: nested too deeply") from None
    except ValueError as error:
        what = reason(error) if text.strip() else "the file is empty"
        raise FileError(f"{source}: not valid JSON: {what}") from None


# ---- writing ----------------------------------------------------------------------------------------------------


def write(path: str | Path, content: str | bytes) -> None:
    """Write a whole file or none of it; missing directories are made. Raises OSError, which names `path`.

    A device or a pipe is written through: a file in place of `/dev/null` would destroy it.
    """
    path = Path(path)
    data = content.encode() if isinstance(content, str) else content
    if path.exists() and not path.is_file():
        with _naming(path):
            path.write_bytes(data)
        return
    with _naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as partial:
        partial.write_bytes(data)


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Yield a path beside `path` to write to. At the end it takes the name `path`; after an error it is removed.

    For libraries that write by themselves. Raises OSError, which names `path`, also where the block raised it for
    another file. Two threads of a process must not replace one file at once: they would share the partial file. A
    killed process leaves that: `records/recorder.py` and `run/trajectory.py` remove files named `.*.partial` when a
    run goes on.
    """
    path = Path(path)
    with _naming(path):
        real = path.resolve()  # replaces the file that a symbolic link names, not the link
        # In the same directory, because a rename is atomic within one file system only. File systems take names of
        # up to 255 bytes.
        partial = real.with_name(f".{real.name[-200:]}.{os.getpid()}.partial")
        try:
            yield partial
            # before the rename: else a crash of the machine can leave an empty file of the final name
            sync(partial)
            os.replace(partial, real)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise


def sync(path: Path) -> None:
    """Wait until the content of a file, or the names in a directory, are on the disk. Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# ---- locks --------------------------------------------------------------------------------------------------------


@contextmanager
def locked(path: str | Path) -> Iterator[None]:
    """Hold the lock of a file during the block. The file and its directory are made if they are missing.

    The system frees the lock when the process ends, however it ends. On a file system without locks the block runs
    without one, after a line on stderr. Raises FileError at once if another process has the lock, or this one already,
    and OSError, which names `path`.
    """
    with _naming(Path(path)):
        handle = _locked(Path(path))
    try:
        yield
    finally:
        os.close(handle)


def _locked(path: Path) -> int:
    """Lock a file and return its descriptor, open. The lock lasts until the descriptor is closed."""
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            raise FileError(f"{path}: another process uses it") from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                os.close(handle)
                raise
            line = f"{path}: this file system has no locks ({reason(error)}); let one process at a time use it"
            tell(line, sys.stderr)
            return handle
        # The last owner may have removed the file between `open` and `flock`, as `config/run_dir.py` does. Then this
        # lock is on a file without a name, and the next process would lock a new file of that name. So try again.
        if path.exists() and os.path.samestat(os.fstat(handle), path.stat()):
            return handle
        os.close(handle)


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
        # the stream's descriptor becomes that of /dev/null: later prints, and Python's flush at its end, do not fail
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), stream.fileno())


# ---- outputs of commands ------------------------------------------------------------------------------------------


def check_output(path: str | Path, inputs: Mapping[str, str | Path | None] | None = None) -> None:
    """Raise FileError if a file that a command line named cannot be written. Call it before the work begins.

    inputs  name in the message -> file or directory that the command reads; the output must not replace one of them
    """
    path = Path(path)
    if path.is_dir():
        raise FileError(f"{path}: cannot be written: it is a directory; expected a file name")
    if path.exists() and not path.is_file():
        return  # a device or a pipe, such as /dev/stdout
    parent = path.resolve().parent
    if not parent.is_dir():
        raise FileError(f"{shown(path)}: cannot be written: there is no directory {parent}")
    if problem := _write_problem(parent):
        raise FileError(f"{path}: cannot be written: {parent}: {problem}")
    for what, read in (inputs or {}).items():
        if read and _replaces(path, Path(read)):
            raise FileError(f"{shown(path)}: this file is read: {what}; name another file")


def _replaces(path: Path, read: Path) -> bool:
    """Return whether `path` is the file `read`, or is a file that exists in the directory `read`."""
    if read.is_dir():
        return path.exists() and path.resolve().is_relative_to(read.resolve())
    if path.exists() and read.exists():
        return path.samefile(read)  # also by hard links
    return path.resolve() == read.resolve()


def check_new_directory(path: str | Path) -> None:
    """Raise FileError unless a directory of this name, which a command line asked for, can be made."""
    path = Path(path)
    if os.path.lexists(path):
        problem = "exists already; expected the name of a new directory"
    elif not path.parent.is_dir():
        problem = f"cannot be made: there is no directory {path.parent}"
    elif refused := _write_problem(path.parent):
        problem = f"cannot be made: {path.parent}: {refused}"
    else:
        return
    raise FileError(f"{shown(path)}: {problem}")


def write_output(path: str | Path, content: str | bytes) -> None:
    """Write a file that was named on a command line, as `write`. Raises FileError; makes no directory."""
    check_output(path)
    try:
        write(path, content)
    except OSError as error:
        raise FileError(f"{path}: cannot be written: {reason(error)}") from None


def _write_problem(directory: Path) -> str:
    """Return why no file can be made in a directory; "" if one can. Permissions do not tell, so a file is tried."""
    try:
        with tempfile.TemporaryFile(dir=directory):
            return ""
    except OSError as error:
        return reason(error)


def reason(error: Exception) -> str:
    """Return the message of an error in one line; of an OSError without its number and path."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return " ".join(str(error).split())


def shown(path: str | Path) -> str:
    """Format a path for a message: long ones are cut in the middle, control characters are escaped.

    For other values there is `texts.shown`.
    """
    text = str(path)
    text = text if text.isprintable() else repr(text)
    return text if len(text) <= 240 else f"{text[:100]}...{text[-100:]}"


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Raise an OSError of the block again, with `path` as its file name: it may name a temporary file, or none."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from None
