"""Commands and ranks as processes of their own that need not import torch and megatron-core again.

They are forked from a server that has imported them once, never joins a job and starts no threads. (A test process that
has joined a job, or whose libraries have started threads, must not be forked.) A process that a test kills, or that
torchrun must start, is started as a user would: short_run.train.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_rlspec.host import ports

# The last two are imported by a run when it needs them: without them here, each run would spend more than a second so.
PRELOADED = ["megatron_rlspec.loop", "megatron_rlspec.rollout.embedded.engine", "megatron_rlspec.commands.training"]
PRELOADED += ["transformers.models.auto.tokenization_auto", "tokenizers"]


def context() -> Any:
    """Return multiprocessing's fork server, which imports PRELOADED when it starts."""
    # Importing Megatron asks torch for a GPU. Unless torch asks NVML, that starts CUDA, and a forked process has none.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(PRELOADED)
    return found


def rank_environment(rank: int, size: int, port: int) -> dict[str, str]:
    """Return the variables that torchrun gives to a rank."""
    given = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return {name: str(value) for name, value in given.items()}


def run_module(
    module: str,
    arguments: list[str],
    *,
    folder: Path,
    environment: Mapping[str, str] | None = None,
    ranks: int = 1,
    timeout: float = 840,
) -> subprocess.CompletedProcess[str]:
    """Run `python -m module arguments` in `folder`; with more ranks than one, as ranks of one job.

    The exit code is the first one that is not 0. Raises TimeoutError after `timeout` seconds.
    """
    given = os.environ | (environment or {})
    port = ports.free_port(ports.JOBS)
    with tempfile.TemporaryDirectory() as logs:
        outputs = [(f"{logs}/{rank}.out", f"{logs}/{rank}.err") for rank in range(ranks)]
        processes = []
        for rank in range(ranks):
            own = given | (rank_environment(rank, ranks, port) if ranks > 1 else {})
            started = (module, arguments, str(folder), own, outputs[rank])
            processes.append(context().Process(target=_run, args=started))
        for process in processes:
            process.start()
        deadline = time.monotonic() + timeout
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        late = [process for process in processes if process.is_alive()]
        for process in late:
            process.kill()
            process.join()
        out, err = ("".join(Path(files[i]).read_text() for files in outputs) for i in (0, 1))
    if late:
        raise TimeoutError(f"{module} {' '.join(arguments)} ran longer than {timeout} s: {err[-3000:]}")
    codes = [process.exitcode for process in processes]
    return subprocess.CompletedProcess([module, *arguments], next(filter(None, codes), 0), out, err)


def _run(module: str, arguments: list[str], folder: str, environment: dict[str, str], outputs: tuple[str, str]) -> None:
    for descriptor, path in zip((1, 2), outputs, strict=True):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # the server's TMPDIR may be gone
    os.chdir(folder)
    sys.argv = [module, *arguments]
    sys.path.insert(0, folder)
    runpy.run_module(module, run_name="__main__", alter_sys=True)
