"""A run directory: whether a run can start in it, and the lock that keeps other runs out. Standard library only."""

from __future__ import annotations

import os
import socket
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
    option = f"train.run_dir={run_dir}"
    lock = run_dir / LOCK
    made = [path for path in (run_dir, *run_dir.parents) if not path.exists()]
    with ExitStack() as stack:
        try:
            stack.enter_context(files.locked(lock))
        except files.FileError:
            with suppress(files.FileError):
                option += f" ({files.read_text(lock, 200)})"
            raise ConfigError(
                f"{option}: another run goes on in it; expected one run at a time"
            ) from None
        except OSError as error:
            raise ConfigError(
                f"{option}: {files.reason(error)}; expected a directory that the run can write to"
            ) from None
        try:
            if taken := taken_by(run_dir, resume):
                raise ConfigError(f"{option}: {taken}")
            lock.write_text(f"process {os.getpid()} on {socket.gethostname()}")
            yield
        finally:
            lock.unlink(missing_ok=True)
            with suppress(OSError):  # it holds a run
                for path in made:
                    path.rmdir()


def taken_by(run_dir: Path, resume: bool) -> str:
    """Return why no run can start in `run_dir`, or with `resume` continue there; "" if it can."""
    for result in ("hf", "hf_drafter"):
        # A link to nothing counts, too: the result could not replace it.
        if os.path.lexists(run_dir / result):
            return f"holds {result}/, the result of a finished run; expected another directory, or move it away"
    checkpoints = run_dir / "checkpoints"
    if os.path.lexists(checkpoints) and not checkpoints.is_dir():
        # A link to nothing: a disk that is not mounted. The run would begin anew, and drop its records.
        what = "a file" if checkpoints.exists() else "a link to nothing"
        return f"checkpoints is {what}; expected a directory"
    if resume:
        return ""
    records = run_dir / "metrics.jsonl"
    found = sorted(path.name for path in checkpoints.glob("step-*/"))
    if not found and not (records.exists() and records.stat().st_size):
        return ""
    newest = f"checkpoint {found[-1]}" if found else "metrics.jsonl"
    return f"holds a run already ({newest}); add --train.resume true to continue it, or take another train.run_dir"
