"""What `rlspec doctor` reports about a GPU machine: decisions from invented facts, and the facts of this machine."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from megatron_rlspec.commands import doctor
from megatron_rlspec.compat import machine
from megatron_rlspec.compat.machine import Lack, Machine

COMPLETE = Machine(
    gpus=8,
    driver_cuda=(13, 0),
    torch_cuda=(13, 0),
    modules=frozenset(machine.MODULES),
    versions={
        "megatron-rlspec": "0.3.0",
        "torch": "2.14.1+cu130",
        "megatron-core": "0.19.2",
        "transformers": "5.19.0",
        "sglang": "0.5.23",
        "sglang-kernel": "0.4.10",
        "transformer-engine": "2.12.0",
        "apex": "0.1",
        "numpy": "2.3.5",
        "math-verify": "0.9.0",
        "fastapi": "0.110",
    },
    requirements={
        "megatron-rlspec": ("numpy>=1.26", "math-verify"),
        "sglang": ("torch==2.14.1", "sglang-kernel==0.4.10", "fastapi>=0.115"),
    },
    shared_bytes=64 << 30,
    variables={"NCCL_CUMEM_ENABLE": "0", "CUDA_DEVICE_MAX_CONNECTIONS": "1"},
)


def without(what: str) -> frozenset[str]:
    return frozenset(name for name in machine.MODULES if name.partition(".")[0] != what)


def versions(**changed: str | None) -> dict[str, str]:
    named = {name.replace("_", "-"): version for name, version in changed.items()}
    return {name: version for name, version in (COMPLETE.versions | named).items() if version is not None}


def test_a_complete_machine_lacks_nothing():
    assert machine.lacks(COMPLETE) == []
    assert machine.lacks(replace(COMPLETE, driver_cuda=(13, 2), torch_cuda=(13, 0))) == []
    assert machine.lacks(replace(COMPLETE, variables={})) == []  # train ranks set both
    assert machine.lacks(replace(COMPLETE, driver_cuda=(12, 4), torch_cuda=(12, 9))) == []  # compatible within 12


@pytest.mark.parametrize(
    "changed, name, stops, words",
    [
        ({"versions": versions(math_verify=None)}, "gpu-dependency", True, "math-verify is needed, is not installed"),
        ({"versions": versions(numpy="1.24.0")}, "gpu-dependency", True, "numpy>=1.26 is needed, 1.24.0 is installed"),
        ({"modules": without("sglang")}, "gpu-sglang", True, "sglang is not installed"),
        ({"modules": without("transformer_engine")}, "gpu-transformer-engine", True, "--no-build-isolation"),
        ({"torch_cuda": None}, "gpu-torch", True, "torch 2.14.1+cu130 is built without CUDA"),
        ({"driver_cuda": (12, 8)}, "gpu-driver", True, "built for CUDA 13.0, but the driver runs CUDA up to 12.8"),
        ({"driver_cuda": None}, "gpu-driver", True, "--gpus all"),
        (
            {"failures": {"transformer_engine.pytorch": "ImportError: undefined symbol: _ZN3c10"}},
            "gpu-transformer_engine.pytorch",
            True,
            "does not import (ImportError: undefined symbol: _ZN3c10)",
        ),
        (
            {"versions": versions(torch="2.13.0")},
            "gpu-versions",
            False,
            "sglang 0.5.23 asks for torch==2.14.1, but 2.13.0 is installed",
        ),
        ({"modules": without("apex") | {"apex"}}, "gpu-apex", False, "another project of that name"),
        ({"modules": without("apex")}, "gpu-apex", False, "--no-gradient-accumulation-fusion"),
        ({"shared_bytes": 64 << 20}, "gpu-shared-memory", False, "holds 64 MiB, but pushing weights to 8 engines"),
        ({"variables": {"NCCL_CUMEM_ENABLE": "1"}}, "gpu-environment", False, "unset NCCL_CUMEM_ENABLE"),
        (
            {"modules": frozenset(machine.MODULES) - {"megatron.training"}},
            "gpu-megatron-training",
            True,
            "export PYTHONPATH",
        ),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else str(value)[:40],
)
def test_what_is_missing_is_reported_in_one_line(changed, name, stops, words):
    (lack,) = machine.lacks(replace(COMPLETE, **changed))
    assert (lack.name, lack.stops) == (name, stops)
    assert words in lack.text and "\n" not in lack.text


def test_a_pre_release_meets_a_requirement():
    asks = COMPLETE.requirements | {"slime": ("torch>=2.6",)}
    nightly = versions(torch="2.15.0a0+1", sglang="0.5.24.dev1", slime="0.3.1")
    lacks = machine.lacks(replace(COMPLETE, versions=nightly, requirements=asks))
    assert [lack.name for lack in lacks] == ["gpu-versions"]  # SGLang's exact pin; slime's lower bound is met


def test_an_image_that_is_being_built_has_neither_driver_nor_devices():
    image = replace(COMPLETE, gpus=0, driver_cuda=None, shared_bytes=64 << 20, variables={})
    assert machine.lacks(image) == []


def test_only_slime_needs_apex():
    own_loop = replace(COMPLETE, modules=frozenset(machine.MODULES) - {"apex", "apex.optimizers", "slime"})
    assert machine.lacks(own_loop) == []


def test_what_stops_a_run_comes_first():
    machine_ = replace(
        COMPLETE, shared_bytes=0, variables={"NCCL_CUMEM_ENABLE": "1"}, modules=without("sglang"), driver_cuda=(12, 0)
    )
    stops = [lack.stops for lack in machine.lacks(machine_)]
    assert stops == [True, True, False, False]


def test_the_facts_of_this_machine_are_read(tmp_path):
    """A CPU build of torch and no Transformer Engine are reported, and the build of such an image would fail."""
    command = [sys.executable, "-m", "megatron_rlspec.cli", "doctor", "--gpu", "--json", "-"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    told = {row["name"]: row["text"] for row in json.loads(done.stdout)}
    assert done.returncode == 1, done.stderr
    assert "Transformer Engine is not installed" in told["gpu-transformer-engine"]
    assert "gpu-dependency" not in told and "gpu-megatron-core" not in told


def test_a_module_that_does_not_import_is_quoted(tmp_path):
    engine = tmp_path / "transformer_engine"
    engine.mkdir()
    (engine / "__init__.py").write_text("")
    (engine / "pytorch.py").write_text("raise ImportError('undefined symbol: _ZN2at4')")
    assert machine._import_error("transformer_engine.pytorch", [str(tmp_path)]) == (
        "ImportError: undefined symbol: _ZN2at4"
    )
    (engine / "pytorch.py").write_text("")
    assert machine._import_error("transformer_engine.pytorch", [str(tmp_path)]) == ""


@pytest.mark.parametrize("asked, devices, shown", [([], 0, False), ([], 2, True), (["--gpu"], 0, True)])
def test_the_doctor_shows_lacks_with_a_gpu_or_on_request(asked, devices, shown, monkeypatch, capsys):
    monkeypatch.setattr(machine, "visible_gpus", lambda: devices)
    monkeypatch.setattr(machine, "gather", lambda path: replace(COMPLETE, torch_cuda=None))
    monkeypatch.setattr(doctor, "examine", lambda path: [])
    code = doctor.main(asked)
    assert ("GPU machine: torch 2.14.1+cu130 is built without CUDA" in capsys.readouterr().out) == shown
    assert code == (1 if asked else 0)


def test_a_lack_that_does_not_stop_leaves_the_exit_status(monkeypatch, capsys):
    monkeypatch.setattr(machine, "gather", lambda path: COMPLETE)
    monkeypatch.setattr(machine, "lacks", lambda facts: [Lack("gpu-nccl", "a line")])
    monkeypatch.setattr(doctor, "examine", lambda path: [])
    assert doctor.main(["--gpu"]) == 0
    assert "GPU machine: a line" in capsys.readouterr().out
