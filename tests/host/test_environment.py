"""The variables that CUDA and NCCL read in ranks and engines, where ranks meet, and memory that is used again."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from megatron_rlspec import cli
from megatron_rlspec.commands import training
from megatron_rlspec.commands.training import TORCHRUN
from megatron_rlspec.config import ConfigError
from megatron_rlspec.engine import EngineError
from megatron_rlspec.host import environment
from megatron_rlspec.rollout.sglang.client.launcher import launch


@pytest.mark.parametrize("command", [training.train, training.sft])
def test_a_rank_sets_what_megatron_and_nccl_need_before_anything_else(command, monkeypatch):
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "1")
    with pytest.raises(ConfigError):
        command(["--no.such", "option"])
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert os.environ["NCCL_CUMEM_ENABLE"] == "1", "the user's value"


def test_an_engine_gets_the_environment_of_the_rank_that_starts_it(monkeypatch, tmp_path):
    """SGLang keeps a NCCL_CUMEM_ENABLE that is set, so both have the same. Visible devices are also the rank's."""
    recorded = {}

    def record(command, env, **options):
        recorded.update(env)
        return popen([sys.executable, "-c", ""], env=env, **options)

    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", record)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    for name in environment.RANK_DEFAULTS:
        monkeypatch.delenv(name, raising=False)
    environment.prepare(os.environ)
    launch("model", tmp_path / "log").close()
    assert environment.disagreement(recorded["NCCL_CUMEM_ENABLE"], os.environ) == ""
    assert recorded["CUDA_VISIBLE_DEVICES"] == "4,5"
    launch("model", tmp_path / "log", environment={"CUDA_VISIBLE_DEVICES": "6"}).close()
    assert recorded["CUDA_VISIBLE_DEVICES"] == "6"


@pytest.mark.parametrize(("engine", "rank"), [("1", {}), ("0", {"NCCL_CUMEM_ENABLE": "1"})])
def test_a_weight_group_over_nccl_is_refused_where_engine_and_rank_differ(engine, rank, monkeypatch):
    import torch

    from megatron_rlspec.push.bucket import Bucket
    from megatron_rlspec.rollout.sglang.client.transport import GroupBroadcast

    monkeypatch.delenv("NCCL_CUMEM_ENABLE", raising=False)
    for name, value in rank.items():
        monkeypatch.setenv(name, value)
    asked = []

    def post(path, **_):
        asked.append(path)
        return {"tensor_parallel": 1, "nccl_cumem_enable": engine}

    with pytest.raises(EngineError) as error:
        GroupBroadcast(backend="nccl").send([post], Bucket([("x", torch.zeros(1))]))
    own = rank.get("NCCL_CUMEM_ENABLE", "0")
    told = f"weight group: NCCL_CUMEM_ENABLE is {own} for this rank and {engine} for the engine"
    assert str(error.value) == f"{told}; start both with the same value"
    assert asked == ["control/describe"]


def test_too_few_open_files_are_told_as_that(capsys):
    def act():
        raise RuntimeError("[enforce fail at third_party/gloo/gloo/transport/tcp/socket.cc:24] Too many open files")

    assert cli.run(act) == 1
    assert re.fullmatch(
        r"rlspec: Too many open files: this process may have \d+ \(`ulimit -n`\).*\n", capsys.readouterr().err
    )


def test_transformer_engine_gets_the_cudnn_that_torch_brings(tmp_path, monkeypatch):
    (tmp_path / "nvidia" / "cudnn").mkdir(parents=True)
    (tmp_path / "nvidia" / "cudnn" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "nvidia"]:
        monkeypatch.delitem(sys.modules, name)
    found: dict[str, str] = {}
    environment.prepare(found)
    assert found["CUDNN_HOME"] == str(tmp_path / "nvidia" / "cudnn")
    own = {"CUDNN_HOME": "/own"}
    environment.prepare(own)
    assert own["CUDNN_HOME"] == "/own"
    monkeypatch.setattr(environment, "find_spec", lambda name: None)
    without: dict[str, str] = {}
    environment.prepare(without)
    assert "CUDNN_HOME" not in without


def test_a_command_without_a_standard_output_ends_as_with_one(monkeypatch):
    """`rlspec doctor >&-`"""
    monkeypatch.setattr(sys, "stdout", None)
    assert cli.run(lambda: None) == 0


NAMELESS = """
import socket
socket.getfqdn = lambda *_: "no-such-host.invalid"
"""


@pytest.mark.slow
def test_the_host_s_name_need_not_resolve(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(NAMELESS)
    program = tmp_path / "rank.py"
    # One write each: the ranks share the pipe, and `print` writes the line's end on its own.
    program.write_text("""import os; os.write(1, f"{os.environ['MASTER_ADDR']} {os.environ['RANK']}\\n".encode())""")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, *TORCHRUN, "2", str(program)],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert sorted(done.stdout.splitlines()) == ["127.0.0.1 0", "127.0.0.1 1"], done.stderr[-2000:]


PAGES = """
import ctypes, resource, sys
from megatron_rlspec.host import memory
if sys.argv[1] == "kept":
    memory.keep_freed()
malloc, free = ctypes.CDLL(None).malloc, ctypes.CDLL(None).free
malloc.restype, free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    blocks = [malloc(31 * 2**20) for _ in range(4)]
    for block in blocks:
        ctypes.memset(block, 1, 31 * 2**20)
    for block in blocks:
        free(block)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how: str) -> int:
    run = subprocess.run([sys.executable, "-c", PAGES, how], check=True, capture_output=True, text=True)
    return int(run.stdout)


def test_freed_memory_is_used_again() -> None:
    assert faults("kept") < faults("as usual") / 5
