"""What `rlspec doctor` reports about a GPU machine, from invented facts, and how it reads them."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from megatron_rlspec.compat import machine
from megatron_rlspec.compat.machine import Machine

COMPLETE = Machine(
    gpus=8,
    driver_cuda=(13, 0),
    torch_cuda=(13, 0),
    modules=frozenset(machine.MODULES),
    versions={"megatron-rlspec": "0.3.0", "numpy": "2.3.5", "math-verify": "0.9.0"},
    requirements=("numpy>=1.26", "math-verify"),
    shared_bytes=64 << 30,
)


def test_a_complete_machine_lacks_nothing():
    assert machine.lacks(COMPLETE) == []
    assert machine.lacks(replace(COMPLETE, driver_cuda=(12, 4), torch_cuda=(12, 9))) == []  # compatible within 12
    assert machine.lacks(replace(COMPLETE, versions=COMPLETE.versions | {"numpy": "2.4.0rc1"})) == []


@pytest.mark.parametrize(
    "changed, words",
    [
        ({"versions": {"numpy": "2.3.5"}}, "math-verify is needed, is not installed"),
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


def test_facts_are_read_without_an_import_of_torch_or_a_cuda_context(monkeypatch, tmp_path):
    def version(pointer):
        pointer._obj.value = 13010
        return 0

    for name, content in {"torch/__init__.py": "1 / 0", "torch/version.py": "cuda: Optional[str] = '13.0'\n"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    for name in ("nvidiactl", "nvidia0", "nvidia1"):
        (tmp_path / name).touch()
    assert machine._torch_cuda([str(tmp_path)]) == (13, 0)
    monkeypatch.setattr(machine.ctypes, "CDLL", lambda name: SimpleNamespace(cuDriverGetVersion=version))
    assert machine._driver_cuda() == (13, 1)
    monkeypatch.setattr(machine, "Path", lambda folder: tmp_path)
    assert machine.visible_gpus() == 2
