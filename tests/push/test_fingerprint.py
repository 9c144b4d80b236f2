"""Fingerprints see every change of bits and of place, and shards add up."""

import pytest
import torch
from host_reads import HostReads

from megatron_rlspec.push.fingerprint import Difference, compare, fingerprint, of_parts

ROW = 1 << 16  # words of 8 bytes


def slow(tensor: torch.Tensor) -> int:
    """Compute the definition in Python's integers."""

    def mix(x: int) -> int:
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
        return x ^ (x >> 31)

    data = bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist())
    total = 0
    for i in range(0, len(data), 8):
        word = int.from_bytes(data[i : i + 8], "little")
        word ^= word >> 32
        row, column = divmod(i // 8, ROW)
        total += (mix(row + 1) | 1) * (mix(column + (1 << 40)) | 1) * word
    return total % 2**64


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.bool])
@pytest.mark.parametrize("shape", [(1,), (7,), (3, 5), (), (0,), (33, 129)])
def test_fingerprint_equals_its_definition(dtype, shape):
    tensor = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 9).to(dtype)
    assert fingerprint(tensor) == slow(tensor)


def test_rows_are_those_of_the_definition():
    tensor = torch.arange(2 * ROW + 100)
    assert fingerprint(tensor) == slow(tensor)


@pytest.mark.parametrize("cut", [1, 100, ROW - 1, ROW, ROW + 1, 3 * ROW, 3 * ROW + 17])
def test_contiguous_shards_add_up(cut):
    tensor = torch.randn(3 * ROW + 50, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    parts = fingerprint(tensor[:cut]) + fingerprint(tensor[cut:], start=cut)
    assert parts % 2**64 == fingerprint(tensor)
    narrow = tensor.bfloat16()
    parts = fingerprint(narrow[: 4 * (cut // 4)]) + fingerprint(narrow[4 * (cut // 4) :], start=4 * (cut // 4))
    assert parts % 2**64 == fingerprint(narrow)
    with pytest.raises(ValueError, match="starts at byte 6 of its tensor: expected a multiple of 8"):
        fingerprint(narrow, start=3)


def test_every_small_change_changes_the_fingerprint():
    tensor = torch.randn(64, 64, generator=torch.Generator().manual_seed(2)).bfloat16()
    seen = {fingerprint(tensor)}
    bits = tensor.view(torch.int16)
    for element in range(0, 4096, 97):
        for bit in range(16):
            changed = bits.clone().view(-1)
            changed[element] ^= -(2**15) if bit == 15 else 2**bit
            seen.add(fingerprint(changed.view(torch.bfloat16)))
    assert len(seen) == 1 + 43 * 16
    for other in (tensor.T, tensor.roll(1, 0), tensor.roll(32, 1), tensor.flip(0), tensor * -1, tensor * 2):
        seen.add(fingerprint(other))
    assert len(seen) == 1 + 43 * 16 + 6


def test_flipped_signs_do_not_cancel():
    """A plain sum of products would miss changes of the topmost bits of two words."""
    tensor = torch.randn(400, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    whole = fingerprint(tensor)
    for i in range(0, 400, 2):
        flipped = tensor.clone()
        flipped[i : i + 2] *= -1
        assert fingerprint(flipped) != whole


def test_layout_in_memory_does_not_matter():
    tensor = torch.randn(65, 33).bfloat16()
    assert fingerprint(tensor.T.contiguous().T) == fingerprint(tensor)
    storage = torch.randn(1 + tensor.numel()).bfloat16()
    storage[1:] = tensor.view(-1)
    assert fingerprint(storage[1:].view(65, 33)) == fingerprint(tensor)


def test_differences_are_listed_by_name():
    expected = {f"layer.{i}": i for i in range(8)}
    assert compare(expected, dict(expected)).empty
    held = {**{f"layer.{i}": 0 for i in range(6)}, "layer.6": 6, "extra": 1}
    difference = compare(expected, held)
    assert difference == Difference(("layer.7",), ("extra",), tuple(f"layer.{i}" for i in range(1, 6)))
    assert str(difference) == (
        "lacks layer.7; has besides extra; holds otherwise layer.1, layer.2, layer.3, layer.4 and 1 more"
    )


def test_a_gpus_fingerprints_are_those_of_a_cpu():
    """Of several widths and sizes, an empty one, one that begins at 2 bytes, and shards of larger ones; one wait."""
    generator = torch.Generator().manual_seed(0)
    narrow = torch.randn(20_000, generator=generator).bfloat16()
    wide = torch.randn(131 * ROW + 5, dtype=torch.float64, generator=generator)
    flags = torch.tensor([True, False, True])
    given = [(narrow[:7], 0), (narrow[1:500], 0), (narrow, 4 * ROW - 4096), (flags, 0), (torch.empty(0), 0)]
    given += [(wide, 0), (wide, ROW - 6), (wide[:ROW], 3 * ROW), (wide, 65_530 * ROW), (narrow.view(100, 200).T, 0)]
    with HostReads() as reads:
        reads.put(narrow, wide, flags, given[4][0])
        found = of_parts(given)
        assert list(reads.found.values()) == [1], reads.found
    assert found == [fingerprint(reads.take(tensor), start) for tensor, start in given]
