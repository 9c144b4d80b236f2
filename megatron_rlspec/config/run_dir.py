"""A run directory: whether a run can start in it, and the lock that keeps other runs out. Standard library only."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from megatron_rlspec import files
from megatron_rlspec.config.base import ConfigError

LOCK = ".lock"  # names host and process of a run while it goes on


@contextmanager
def claimed(run_dir: Path, resume: bool) -> Iterator[None]:
    """Keep `run_dir` for one run during the block. Makes the directory, and removes what it made if it is empty then.

    Raises ConfigError at once if another run has it, or if no run can start in it. Other ranks than 0 do nothing.
    """
    if os.environ.get("RANK", "0") != "0":
        yield
        return
    option, lock, owner = f"train.run_dir={run_dir}", run_dir / LOCK, os.getpid()
    made = [path for path in (run_dir, *run_dir.parents) if not path.exists()]
    with suppress(OSError):
        about = lock.lstat()
        # a link's target would be locked, and replaced
        if not stat.S_ISREG(about.st_mode) or about.st_nlink > 1:
            linked = stat.S_ISLNK(about.st_mode) or (
                stat.S_ISREG(about.st_mode) and about.st_nlink > 1
            )
            what = f"{LOCK} is {'a link' if linked else 'no file'}"
            raise ConfigError(f"{option}: {what}; expected a file of this run's own, or none")
    with ExitStack() as held:
        try:
            held.enter_context(files.locked(lock))
        except files.LockedError:
            with suppress(files.FileError):
                option += f" ({files.read_text(lock, 200)})"
            raise ConfigError(
                f"{option}: another run goes on in it; expected one run at a time"
            ) from None
        except OSError as error:
            wanted = "expected a directory that the run can write to"
            raise ConfigError(f"{option}: {files.reason(error)}; {wanted}") from None
        try:
            if taken := taken_by(run_dir, resume):
                raise ConfigError(f"{option}: {taken}")
            lock.write_text(f"process {owner} on {socket.gethostname()}")
            yield
        finally:
            if os.getpid() == owner:  # else this is a forked child
                lock.unlink(missing_ok=True)
                with suppress(OSError):  # it holds a run
                    for path in made:
                        path.rmdir()


def taken_by(run_dir: Path, resume: bool) -> str:
    """Return why no run can start in `run_dir`, or with `resume` continue there; "" if it can."""
    # also a link to nothing, which the result could not replace
    if os.path.lexists(run_dir / "hf"):
        return "holds hf/, the result of a finished run; expected another directory, or move hf/ away to go on"
    if os.path.lexists(run_dir / "hf_drafter"):
        return "holds hf_drafter/, the result of a finished run; expected another directory, or move it away to go on"
    checkpoints = run_dir / "checkpoints"
    if os.path.lexists(checkpoints) and not checkpoints.is_dir():
        return f"checkpoints is a {'file' if checkpoints.exists() else 'link to nothing'}; expected a directory"
    if resume:
        return ""
    records = run_dir / "metrics.jsonl"
    found = sorted(path.name for path in checkpoints.glob("step-*/"))
    if not found and not (records.exists() and records.stat().st_size):
        return ""
    newest = f"checkpoint {found[-1]}" if found else "metrics.jsonl"
    return f"holds a run already ({newest}); add --train.resume true to continue it, or take another train.run_dir"
