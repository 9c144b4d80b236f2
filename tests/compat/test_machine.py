"""What `rlspec doctor` reports about a GPU machine, and a Transformer Engine that is installed and does not load."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import tiny_mimo

from megatron_rlspec.compat import machine
from megatron_rlspec.compat.machine import Machine

COMPLETE = Machine(
    gpus=8,
    driver_cuda=(13, 0),
    torch_cuda=(13, 0),
    modules=frozenset(machine.MODULES),
    shared_bytes=64 << 30,
)


def test_a_complete_machine_lacks_nothing():
    assert machine.lacks(COMPLETE) == []
    assert machine.lacks(replace(COMPLETE, driver_cuda=(12, 4), torch_cuda=(12, 9))) == []  # compatible within 12


@pytest.mark.parametrize(
    "changed, words",
    [
        ({"modules": frozenset(machine.MODULES) - {"sglang"}}, "sglang is not installed"),
        ({"driver_cuda": (12, 8)}, "built for CUDA 13.0, but the driver runs CUDA up to 12.8"),
        ({"failures": {"sgl_kernel": "ImportError: x"}}, "does not import (ImportError: x)"),
        ({"shared_bytes": 64 << 20}, "holds 64 MiB, but pushing weights to 8 engines"),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else str(value)[:40],
)
def test_what_is_missing_is_reported_in_one_line(changed, words):
    (lack,) = machine.lacks(replace(COMPLETE, **changed))
    assert lack.stops == ("shared_bytes" not in changed)
    assert words in lack.text and "\n" not in lack.text


def test_an_image_that_is_being_built_has_neither_driver_nor_devices():
    assert machine.lacks(replace(COMPLETE, gpus=0, driver_cuda=None, shared_bytes=64 << 20)) == []


ERROR = 'raise OSError("libtransformer_engine.so: undefined symbol: cublasLtGroupedMatrixLayoutInit")'
CONFIG = tiny_mimo.config(hidden=64, layers=2, heads=4, kv_heads=2, ffn=128, vocab=256)
CONFIG["max_position_embeddings"] = 8192


def run(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python where Transformer Engine is a package that raises `ERROR` when it is imported."""
    package = tmp_path / "installed/transformer_engine"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(ERROR)
    info = tmp_path / "installed/transformer_engine-2.20.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: transformer_engine\nVersion: 2.20.2\n")
    return python(tmp_path / "installed", *arguments)


def python(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python, which looks for packages in `folder` first."""
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-W", "ignore", *arguments]
    return subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)


def lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if "Transformer Engine" in line or "transformer_engine" in line]


@pytest.mark.slow
def test_the_trainer_is_imported_without_it(tmp_path):
    code = "from megatron_rlspec.train import optimizer, runtime; print(runtime.has_transformer_engine())"
    done = run(tmp_path, "-c", code)
    assert done.returncode == 0 and done.stdout.split() == ["False"], done.stderr[-2000:]
    (said,) = lines(done.stderr)
    assert said.startswith("Transformer Engine is installed but does not load, so layers are plain torch: ")
    assert said.endswith(ERROR.split('"')[1])


@pytest.mark.slow
def test_flash_mla_without_a_driver_is_left_out(tmp_path):
    """SGLang brings it, megatron-core imports it, and it needs libcuda.so.1, which a login node does not have."""
    package = tmp_path / "flash_mla"
    package.mkdir()
    (package / "__init__.py").write_text('raise OSError("Could not load this library: flash_mla/cuda.abi3.so")')
    done = python(tmp_path, "-c", "from megatron_rlspec.train import runtime")
    assert done.returncode == 0 and "flash_mla" not in done.stderr, done.stderr[-2000:]


@pytest.mark.slow
def test_commands_say_so_in_one_line(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(CONFIG))
    train = ("train", "--dry-run", "--model.path", str(tmp_path / "model"), "--data.path", "rows.jsonl")
    for name, arguments in {"train": train, "doctor": ("doctor", "--gpu")}.items():
        done = run(tmp_path / name, "-m", "megatron_rlspec.cli", *arguments)
        assert done.returncode == int(name == "doctor"), done.stderr[-2000:]
        assert "Traceback" not in done.stdout + done.stderr
        (said,) = (line for line in lines(done.stdout + done.stderr) if "undefined symbol" in line)
        assert "does not" in said
