"""However an engine ends, no process, shared memory or file of it remains. It listens on local addresses only."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Listener
from pathlib import Path

import psutil
import pytest
import requests
import tiny_mimo

from megatron_rlspec.config import ConfigError, load
from megatron_rlspec.rollout.placement import GpuLayout
from megatron_rlspec.rollout.sglang import scratch
from megatron_rlspec.rollout.sglang.client.launcher import EngineProcess
from megatron_rlspec.rollout.start import ServedEngines

CONFIG = tiny_mimo.config(hidden=64, layers=1, heads=4, kv_heads=2, ffn=64, vocab=64)
SERVE = "--device cpu --dtype float32 --max-total-tokens 1024 --max-running-requests 4".split()
LAUNCHER = """
import json, sys, time
from megatron_rlspec.rollout.sglang.client.launcher import launch
process = launch(sys.argv[1], sys.argv[2], arguments=sys.argv[3:]).wait()
print(json.dumps([process.process.pid, str(process.directory), process.url, process.api_key]), flush=True)
time.sleep(600)
"""


@dataclass
class Started:
    """An engine that another process has launched."""

    launcher: subprocess.Popen
    server: psutil.Process
    directory: Path
    url: str
    api_key: str
    log: Path

    def post(self, path: str, body: object) -> requests.Response:
        headers = {"Authorization": f"Bearer {self.api_key}"}
        return requests.post(f"{self.url}/rlspec/{path}", json=body, headers=headers, timeout=60)

    def processes(self) -> list[psutil.Process]:
        return [self.server, *self.server.children(recursive=True)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_mimo.write(tmp_path_factory.mktemp("model") / "mimo", CONFIG, tiny_mimo.weights(CONFIG))


def left(directory: Path) -> list[str]:
    """List files, shared memory and processes of the engine with this directory."""
    found = [str(directory)] if directory.exists() else []
    found += map(str, Path("/dev/shm").glob(f"*{directory.name}*"))
    for process in psutil.process_iter():
        try:
            if process.environ().get("TMPDIR") == str(directory) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(f"process {process.pid} {process.name()}")
        except psutil.Error:
            continue
    return found


def ended(directory: Path, seconds: float = 120.0) -> list[str]:
    deadline = time.monotonic() + seconds
    while left(directory) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left(directory)


def start(model: Path, log: Path, *arguments: str) -> Started:
    """Start a launcher as a process, and wait until its engine answers."""
    command = [sys.executable, "-c", LAUNCHER, str(model), str(log), *SERVE, *arguments]
    launcher = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    pid, directory, url, key = json.loads(launcher.stdout.readline())
    return Started(launcher, psutil.Process(pid), Path(directory), url, key, log)


@pytest.fixture(scope="module")
def started(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    """The engine of three tests, the last of which kills it."""
    engine = start(model, tmp_path_factory.mktemp("started") / "log")
    yield engine
    engine.launcher.kill()
    engine.launcher.wait()


@pytest.mark.slow
def test_an_engine_listens_on_loopback_only_and_keeps_its_key_in_no_file(started: Started) -> None:
    places = {
        c.laddr.ip
        for process in started.processes()
        for c in process.net_connections("tcp")
        if c.status == psutil.CONN_LISTEN
    }
    assert places and places <= {"127.0.0.1", "::1"}, places
    assert started.directory.stat().st_mode & 0o077 == 0
    shared = list(Path("/dev/shm").glob(f"*{started.directory.name}*"))
    assert shared and all(file.stat().st_mode & 0o077 == 0 for file in shared)
    key = started.api_key
    assert len(key) > 40 and started.post("control/describe", {}).json()["held"] == ""
    assert not [f for f in started.directory.rglob("*") if f.is_file() and key.encode() in f.read_bytes()]


@pytest.mark.slow
def test_an_engine_that_was_started_otherwise_is_refused(started: Started, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("RLSPEC_API_KEY", started.api_key)
    other = load(None, {"rollout.urls": started.url, "spec.verifier": "target_only"})
    with pytest.raises(ConfigError, match="verifier=target_only.*started with --verifier position_keyed"):
        ServedEngines(other, tmp_path, GpuLayout())
    fewer = load(None, {"rollout.urls": started.url, "spec.num_steps": "1", "spec.candidate_steps": "1"})
    with pytest.raises(ConfigError, match=r"candidate_steps=1, but .* chooses among \[0, 1, .*--candidate"):
        ServedEngines(fewer, tmp_path, GpuLayout())


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["all", "launcher", "server", "scheduler"])
def test_nothing_remains_after_a_kill(model: Path, tmp_path: Path, victim: str, request) -> None:
    """`all` takes the engine of the tests above, of which it is the last."""
    engine = request.getfixturevalue("started") if victim == "all" else start(model, tmp_path / "log")
    try:
        assert any("sglang_loads" in name for name in left(engine.directory))
        children = engine.server.children(recursive=True)
        if victim in ("server", "all"):
            engine.server.kill()
        if victim == "scheduler":
            next(child for child in children if "schedul" in child.name()).kill()
        if victim in ("launcher", "all"):
            engine.launcher.kill()
        assert not ended(engine.directory)
    finally:
        engine.launcher.kill()
        engine.launcher.wait()
        assert not ended(engine.directory)


@pytest.mark.slow
def test_nothing_remains_of_an_engine_whose_launcher_ends_at_once(model: Path, tmp_path: Path) -> None:
    """The engine is still importing when it becomes another process' child."""
    launches = """
import os, sys
from megatron_rlspec.rollout.sglang.client.launcher import launch
process = launch(sys.argv[1], sys.argv[2], arguments=sys.argv[3:])
print(process.directory, flush=True)
os._exit(0)
"""
    command = [sys.executable, "-c", launches, str(model), str(tmp_path / "log"), *SERVE]
    directory = Path(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.strip())
    try:
        assert not ended(directory)
    finally:
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get("TMPDIR") == str(directory):
                    process.kill()


def test_ended_processes_that_nobody_waited_for_do_not_delay_the_close(tmp_path: Path) -> None:
    """PID 1 of a container may never wait for them, so the group exists for ever."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    engine = EngineProcess(child, "", tmp_path / "log", tmp_path / "none", "")
    assert engine._group_runs()
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    os.killpg(child.pid, 0)  # it is there
    assert not engine._group_runs()
    engine.close()


@pytest.mark.slow
def test_a_server_started_by_hand_cleans_up_after_ctrl_c(model: Path) -> None:
    """SIGINT becomes SIGTERM, which SGLang obeys."""
    with tempfile.TemporaryDirectory() as folder:  # a short path: those of sockets are limited
        command = [sys.executable, "-m", "megatron_rlspec.cli", "serve", "--model", str(model)]
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", "TMPDIR": folder}
        server = subprocess.Popen(
            [*command, "--port", "32101", *SERVE], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment
        )
        try:
            said = b""
            while b"ready on" not in said:
                line = server.stdout.readline()
                assert line, said.decode()
                said += line
            [directory] = Path(folder).glob(f"{scratch.PREFIX}*")
            assert list(Path("/dev/shm").glob(f"*{directory.name}*"))
            server.send_signal(signal.SIGINT)
            server.wait(60)
            assert not ended(directory)
            assert b"SIGTERM received" in server.stdout.read()
        finally:
            server.kill()
            server.wait()


@pytest.mark.parametrize("more", [0, 1])
def test_a_temporary_directory_whose_name_is_too_long_for_sockets_is_refused(monkeypatch, more):
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        above = Path(short, "x" * (scratch.MOST_BYTES + more - len(short) - 1))
        above.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(above))
        if more:
            with pytest.raises(OSError, match=f"at most {scratch.MOST_BYTES} bytes") as told:
                scratch.make()
            assert told.value.filename == str(above) and not list(above.iterdir())
            return
        directory = scratch.make()
        try:
            own = tempfile.mkdtemp(prefix="pymp-", dir=directory)  # as multiprocessing
            Listener(tempfile.mktemp(prefix="listener-", dir=own)).close()
        finally:
            scratch.remove(directory)
