"""The fingerprint kernel, in Triton's interpreter: the sums of the definition, in one launch, each word read once."""

import importlib
from unittest import mock

import numpy as np
import pytest
import torch
from interpreted import interpreter

from megatron_rlspec.kernels import chosen
from megatron_rlspec.push import fingerprint as module
from megatron_rlspec.push.fingerprint import fingerprint, of_parts

triton = pytest.importorskip("triton", reason="Triton is not installed; the kernel was not run")
ROW = 1 << 16  # words


@pytest.fixture(scope="module")
def kernel():
    with interpreter(), np.errstate(all="ignore"):
        yield importlib.import_module("megatron_rlspec.kernels.fingerprints")


def parts() -> list[tuple[torch.Tensor, int]]:
    """Tensors of several widths and sizes, an empty one, one that begins at 2 bytes, and shards of larger ones."""
    generator = torch.Generator().manual_seed(0)
    narrow = torch.randn(20_000, generator=generator).bfloat16()
    wide = torch.randn(2 * ROW + 5, dtype=torch.float64, generator=generator)
    flags = torch.tensor([True, False, True])
    few = [(narrow[:7], 0), (narrow[1:500], 0), (narrow, 4 * ROW - 4096), (flags, 0), (torch.empty(0), 0)]
    return [*few, (wide, 0), (wide, ROW - 6), (wide[:ROW], 3 * ROW), (torch.randn((33, 65), generator=generator), 0)]


def test_the_kernel_computes_the_definition(kernel):
    given = parts()
    firsts = [start * tensor.element_size() // 8 for tensor, start in given]
    with np.errstate(all="ignore"):
        found = kernel.sums([(tensor, first) for (tensor, _), first in zip(given, firsts, strict=True)])
    assert [one % 2**64 for one in found.tolist()] == [fingerprint(tensor, start) for tensor, start in given]


def test_the_check_at_the_start_sees_a_wrong_sum(kernel):
    with np.errstate(all="ignore"):
        assert module.agrees(kernel, torch.device("cpu"))
        with mock.patch.object(kernel, "ROW", 1 << 15):
            assert not module.agrees(kernel, torch.device("cpu"))


def test_44_000_tensors_take_one_launch_a_gibibyte(monkeypatch):
    """On meta tensors, which pass for a GPU's: 44,000 of 44 GB together, as a mixture of experts has."""
    launches = []

    class Kernel:
        @staticmethod
        def sums(parts):
            launches.append(sum(tensor.nbytes for tensor, _ in parts))
            return torch.arange(len(parts))

    monkeypatch.setattr(chosen, "fingerprints", lambda device, agrees: Kernel)
    tensor = torch.empty(1000, 500, dtype=torch.bfloat16, device="meta")
    assert len(of_parts((tensor, 0) for _ in range(44_000))) == 44_000
    assert len(launches) == -(-44_000 // ((1 << 30) // 1_000_000)) and max(launches) <= module._AT_ONCE
