"""Start `rlspec serve` as a process of its own, wait until it answers, and end it with everything it started.

`launch` returns at once; `EngineProcess.wait` waits; `EngineProcess.close` ends it. A run calls them in
`rollout/start.py`. The requests themselves are sent by `engine.py`.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import requests

from megatron_rlspec.engine import EngineError
from megatron_rlspec.host.ports import ENGINES, free_port
from megatron_rlspec.rollout.sglang import scratch
from megatron_rlspec.rollout.sglang.settings import KEY, given_or_environment_key


class EngineProcess:
    """A running or starting server. Close it, or use it as a context manager; it also ends when this process does.

    process    leads a process group of its own, which `close` kills
    url        http://127.0.0.1:PORT
    log        file of its output, in which `wait` looks for the reason of an early end
    directory  its TMPDIR (`scratch.py`), which `close` removes
    api_key    that its requests need; never ""
    """

    def __init__(
        self, process: subprocess.Popen, url: str, log: Path, directory: Path, api_key: str
    ) -> None:
        self.process = process
        self.url = url
        self.log = log
        self.directory = directory
        self.api_key = api_key

    def wait(self, timeout: float = 600.0) -> EngineProcess:
        """Return `self` when the engine answers.

        Closes the engine and raises EngineError if it ends, or does not answer in time. An interruption of the wait
        does not close it: the caller must.

        timeout  in seconds; loading a large model takes minutes
        """
        started = time.monotonic()
        headers = {"Authorization": f"Bearer {self.api_key}"}
        with requests.Session() as session:
            session.trust_env = False  # no proxy: the engine is on this machine
            while True:
                if self.ended:
                    self.close()
                    raise EngineError(
                        f"engine {self.url} ended while starting: {self._reason()} (log: {self.log})"
                    )
                try:
                    answer = session.post(
                        f"{self.url}/rlspec/control/describe", headers=headers, timeout=5
                    )
                    # After any other status it is asked again until `timeout`.
                    if answer.status_code == 200:
                        return self
                except requests.RequestException:
                    pass  # it does not listen yet
                if time.monotonic() - started > timeout:
                    self.close()
                    raise EngineError(
                        f"engine {self.url} did not answer within {timeout:.0f} s (log: {self.log})"
                    )
                time.sleep(0.5)

    @property
    def ended(self) -> bool:
        """Return whether the server's process has ended."""
        return self.process.poll() is not None

    def ends_within(self, seconds: float) -> bool:
        """Wait up to `seconds` for the end of the process; return whether it ended.

        The connections of a killed process break a moment before it has ended.
        """
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _reason(self) -> str:
        """Return the log's last line of an error or of `rlspec serve`, else the last line, else the exit code."""
        lines = [
            line.strip()
            for line in self.log.read_text(errors="replace").splitlines()
            if line.strip()
        ]
        # "rror:" stands in "Error:", "error:" and "ValueError:". `rlspec serve` names itself in its errors, but also in
        # its other lines.
        errors = [line for line in lines if line.startswith("rlspec serve:") or "rror:" in line]
        return (errors or lines or [f"exit code {self.process.returncode}"])[-1]

    def close(self) -> None:
        """Kill the process and everything it started, and remove `directory`. No graceful shutdown. Safe to repeat.

        It takes 3 s at most if children do not end by themselves.
        """
        self.process.kill()
        self.process.wait()
        # Its children end with it, and their resource trackers then clean up: they get 3 s for that. What still runs of
        # the group is killed below.
        deadline = time.monotonic() + 3
        while self._group_runs() and time.monotonic() < deadline:
            time.sleep(0.02)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        # Last: no process of the engine may make files in it any more.
        scratch.remove(self.directory)

    def _group_runs(self) -> bool:
        """Return whether a process of the group runs; ended ones, which a container may never reap, do not count."""
        for pid in psutil.pids():
            with suppress(ProcessLookupError, psutil.NoSuchProcess):
                if (
                    os.getpgid(pid) == self.process.pid
                    and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
                ):
                    return True
        return False

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def launch(
    model: str | Path,
    log: str | Path,
    *,
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    api_key: str = "",
) -> EngineProcess:
    """Start a server on a free port of this machine, and return at once. The caller must `close` the result.

    model        directory of the policy, for --model
    arguments    further options of `rlspec serve` or of SGLang. --port must not be among them: `url` has the one chosen
                 here
    log          file for the server's output; overwritten, and its directory made
    environment  variables of the server beside this process's own. They win over all others, so TMPDIR and
                 RLSPEC_API_KEY must not be among them: `close` removes `directory`, and `wait` sends `api_key`
    api_key      that requests need; "": the key in RLSPEC_API_KEY, or else a random key that only this process and the
                 server know. It travels in the server's environment, which other users cannot read.
    """
    port = free_port(ENGINES)
    log = Path(log)
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable,
        "-m",
        "megatron_rlspec.cli",
        "serve",
        "--model",
        str(model),
    ]
    command += ["--port", str(port), f"--stop-with-parent={os.getpid()}", *arguments]
    api_key = given_or_environment_key(api_key) or secrets.token_urlsafe(32)
    directory = scratch.make()  # SGLang does not remove its sockets
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a process group of its own, which `close` kills as a whole
            env={
                **os.environ,
                "PYTHONUNBUFFERED": "1",
                "TMPDIR": str(directory),
                KEY: api_key,
                **(environment or {}),
            },
        )
    return EngineProcess(process, f"http://127.0.0.1:{port}", log, directory, api_key)
