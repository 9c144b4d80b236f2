"""A run directory: whether a run can start in it, and the lock that keeps other runs out.

`commands/training.py` calls `claimed` before anything heavy is imported, so nothing here may import torch.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from megatron_rlspec import files
from megatron_rlspec.config.base import ConfigError

LOCK = ".lock"  # holds process and host of the run, for the message to another one


@contextmanager
def claimed(run_dir: Path, resume: bool) -> Iterator[None]:
    """Keep `run_dir` for one run during the block.

    Makes the directory and its parents if they are missing. At the end those that it made are removed if they are
    empty. Only rank 0 does this, for all ranks of the run; on other ranks nothing happens. The block must not claim the
    same directory again.

    Raises ConfigError at once if another run has the directory, or if no run can start in it (`why_taken`).
    """
    if os.environ.get("RANK", "0") != "0":
        yield
        return
    option = f"train.run_dir={run_dir}"
    lock = run_dir / LOCK
    # the innermost first, as they are removed again
    made = [path for path in (run_dir, *run_dir.parents) if not path.exists()]
    with ExitStack() as stack:
        try:
            stack.enter_context(files.locked(lock))
        except files.FileError:  # another process has the lock
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
            if taken := why_taken(run_dir, resume):
                raise ConfigError(f"{option}: {taken}")
            lock.write_text(f"process {os.getpid()} on {socket.gethostname()}")
            yield
        finally:
            # still locked: another run that opened the file before sees that it lost its name (`files._locked`)
            lock.unlink(missing_ok=True)
            with suppress(OSError):  # not empty: it holds a run
                for path in made:
                    path.rmdir()


def why_taken(run_dir: Path, resume: bool) -> str:
    """Return why no run can start in `run_dir`; "" if one can. With `resume`: why none can continue there.

    The names of files and directories are those of `run/result.py`, `run/checkpoints.py` and `records/recorder.py`.
    """
    for result in ("hf", "hf_drafter"):
        # A link to nothing counts, too: the result could not replace it.
        if os.path.lexists(run_dir / result):
            return f"holds {result}/, the result of a finished run; expected another directory, or move it away"
    checkpoints = run_dir / "checkpoints"
    if os.path.lexists(checkpoints) and not checkpoints.is_dir():
        # A link to nothing may be a disk that is not mounted: with `resume` the run would find no checkpoint, begin at
        # step 0, and drop its records.
        what = "a file" if checkpoints.exists() else "a link to nothing"
        return f"checkpoints is {what}; expected a directory"
    if resume:
        return ""
    records = run_dir / "metrics.jsonl"
    steps = sorted(path.name for path in checkpoints.glob("step-*/"))
    if not steps and not (records.exists() and records.stat().st_size):
        return ""
    newest = f"checkpoint {steps[-1]}" if steps else "metrics.jsonl"
    return f"holds a run already ({newest}); add --train.resume true to continue it, or take another train.run_dir"
