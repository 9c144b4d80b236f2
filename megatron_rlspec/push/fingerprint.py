"""A fingerprint of one tensor's bits: a sum over its 8-byte words, so that its shards' fingerprints add up to its own.

`push.py` compares what the trainer sent with what each engine holds. With w_i the i-th 8-byte word (the last one filled
up with zeros), lo and hi its 4-byte halves, and a and b tables of odd pseudo-random numbers:

    fingerprint = Σ_i a(i div R) · b(i mod R) · (hi_i, lo_i xor hi_i)   modulo 2⁶⁴,   R = 65,536

One changed word always changes the sum, since a·b is odd. Any other change is missed with a probability of about 2⁻⁶⁴,
or 2⁻³² in the worst case, where only topmost bits change. The exclusive-or serves that case: without it two flipped
signs would cancel. Neither shape nor dtype is part of the fingerprint, so compare tensors of one shape and dtype only.

The formula is fixed. Trainer and engines compute it in different processes and compare the results, and
`models/tensor_file.py` stores it in checkpoints as a checksum: after a change of any constant here, older checkpoints
would count as damaged. The implementations for CPUs (numpy) and GPUs (torch) must return the same number.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

# R, in words: half a megabyte, which stays in a core's cache while it is read, folded and summed
_ROW = 1 << 16
# rows that a GPU sums at once, 64 MiB: it bounds the memory for intermediate results
_ROWS_ON_GPU = 128
_WORD = 8  # bytes
# Clears the upper half of a word after a right shift: the shift of int64 fills it with copies of the sign bit.
_LOW = (1 << 32) - 1
_MODULUS = 1 << 64
# Its attribute `row` is the array that `_folded` returns. Each thread has its own, because several threads compute
# fingerprints at once.
_THREAD = threading.local()


def fingerprint(tensor: Tensor, start: int = 0) -> int:
    """Compute an unsigned 64-bit integer from the tensor's bits. -0.0 and 0.0 differ, as do NaNs with different bits.

    start  flat index (in elements) of the tensor's first element within the full tensor of which it is a shard

    The fingerprints of contiguous shards add up (modulo 2⁶⁴) to that of the full tensor; an empty tensor has 0. Raises
    ValueError unless the shard starts at a multiple of 8 bytes. It waits for a GPU: `fingerprints` waits once for many.
    """
    return from_raw_sums([raw_sum(tensor, start)])[0]


def fingerprints(tensors: Iterable[Tensor]) -> list[int]:
    """Compute the fingerprint of each whole tensor, in their order. The host waits for a GPU once."""
    return of_parts((tensor, 0) for tensor in tensors)


def of_parts(parts: Iterable[tuple[Tensor, int]]) -> list[int]:
    """Compute the fingerprint of each (tensor, start), with `start` as in `fingerprint`. The host waits for a GPU once.

    Each part gets a number of its own: shards of one tensor are not added up. Tensors are taken from `parts` one by
    one, so a generator may make and drop them.
    """
    return from_raw_sums([raw_sum(tensor, start) for tensor, start in parts])


def raw_sum(tensor: Tensor, start: int = 0) -> int | Tensor:
    """Start to compute a fingerprint without waiting for a GPU; `from_raw_sums` ends it. Arguments as of `fingerprint`.

    Returns a sum that is not yet reduced modulo 2⁶⁴: an integer for a tensor on the CPU, int64 [] on the device for
    one on a GPU, and 0 for an empty tensor.
    """
    first_byte = start * tensor.element_size()
    if first_byte % _WORD:
        raise ValueError(
            f"a shard that starts at byte {first_byte} of its tensor: expected a multiple of {_WORD}"
        )
    first = first_byte // _WORD
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    whole = len(data) // _WORD * _WORD
    total = _sum(data[:whole], first)
    # the last word, filled up with zeros
    rest = data[whole:]
    if len(rest):
        word = data.new_zeros(_WORD)
        word[: len(rest)] = rest
        total = total + _sum(word, first + whole // _WORD)
    return total


def from_raw_sums(sums: Sequence[int | Tensor]) -> list[int]:
    """Return the fingerprints, in [0, 2⁶⁴), of sums that `raw_sum` returned. The host waits once for all on GPUs."""
    on_device = [value for value in sums if isinstance(value, Tensor)]
    # Sums on other devices are copied to the first one's: `tolist` of one stacked tensor is the only wait.
    together = [value.to(on_device[0].device) for value in on_device]
    values = iter(torch.stack(together).tolist() if together else ())
    fingerprints = []
    for value in sums:
        number = next(values) if isinstance(value, Tensor) else value
        # Makes a GPU's signed number unsigned, and reduces a sum of whole words and the last one.
        fingerprints.append(number % _MODULUS)
    return fingerprints


def _sum(data: Tensor, first: int) -> int | Tensor:
    """Return the sum of the module's formula over whole words.

    data   [n] uint8, n a multiple of 8
    first  index of the first word within the full tensor

    Words on a CPU are summed by numpy, because torch takes 1.5 times as long. Both multiply and add modulo 2⁶⁴: numpy
    in uint64, and torch in int64, whose overflow wraps to the same bits.
    """
    if not len(data):
        return 0
    words: Any
    if data.is_cuda:
        at_once = _ROWS_ON_GPU
        # A view as int64 needs an address and an offset that are multiples of 8. numpy reads from any address.
        if data.data_ptr() % _WORD or data.storage_offset() % _WORD:
            data = data.clone()
        words = data.view(torch.int64)
    else:
        at_once = 1
        words = data.numpy().view(np.uint64)
    row_factors, column_factors = _factors(data.device)
    sums = []
    done = 0
    while done < len(words):
        # Rows are those of the full tensor, so a shard's first and last one may be partial.
        row, column = divmod(first + done, _ROW)
        row %= _ROW  # the table a has R numbers, and begins anew after R rows
        width = _ROW
        # The number of whole rows to sum now: of the words that are left, at most `at_once`, and not beyond a's end.
        rows = min((len(words) - done) // _ROW, at_once, _ROW - row)
        if column or not rows:
            # one partial row: up to the end of the row, or of the shard
            width = min(_ROW - column, len(words) - done)
            rows = 1
        part = words[done : done + rows * width].reshape(rows, width)
        # `folded` is a new array, or this thread's own, so changing it does not change the tensor.
        folded = _folded(part)
        folded *= column_factors[column : column + width]
        sums.append(folded.sum(1) * row_factors[row : row + rows])
        done += rows * width
    if data.is_cuda:
        return torch.cat(sums).sum()
    return int(np.concatenate(sums).sum())


def _folded(words: Any) -> Any:
    """Return for words [n, m] the pair (hi, lo xor hi) of the module's formula as one word each.

    words  int64 on a GPU; uint64 of one row (n = 1) on a CPU

    The caller may change the result. On a CPU the next call of the same thread overwrites it.
    """
    if isinstance(words, Tensor):
        return ((words >> 32) & _LOW) ^ words
    # A new array for every row would take longer than the sums, because the system fills new pages with zeros.
    if not hasattr(_THREAD, "row"):
        _THREAD.row = np.empty((1, _ROW), np.uint64)
    row = _THREAD.row[:, : words.shape[1]]
    np.right_shift(words, np.uint64(32), out=row)
    return np.bitwise_xor(row, words, out=row)


@cache
def _factors(device: torch.device) -> tuple[Any, Any]:
    """Return the factors a and b of the module's formula, [65,536] odd numbers each. a repeats after 32 GiB.

    The result is cached and shared by all calls and threads: do not write into it. It has uint64 arrays for the CPU,
    int64 tensors of the same bits for a GPU.
    """
    index = np.arange(_ROW, dtype=np.uint64)
    odd = np.uint64(1)
    # The two index ranges do not overlap, so a and b are different numbers. 1 << 40 is any number past the first range.
    factors = _splitmix(index + odd) | odd, _splitmix(index + np.uint64(1 << 40)) | odd
    if device.type == "cpu":
        return factors
    on_device = [
        torch.from_numpy(table.view(np.int64)).to(device, non_blocking=True) for table in factors
    ]
    return on_device[0], on_device[1]


def _splitmix(x: np.ndarray) -> np.ndarray:
    """Apply the finaliser of the random generator splitmix64 to uint64 numbers, modulo 2⁶⁴. It is a bijection."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@dataclass(frozen=True)
class Difference:
    """How the tensors that an engine holds differ from those that it was sent: Hugging Face names, sorted.

    missing    sent, but not held
    extra      held, but not sent
    differing  held with other bits
    names      all of them
    """

    missing: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    differing: tuple[str, ...] = ()

    @property
    def empty(self) -> bool:
        return not (self.missing or self.extra or self.differing)

    @property
    def names(self) -> tuple[str, ...]:
        return self.missing + self.extra + self.differing

    def __str__(self) -> str:
        parts = []
        if self.missing:
            parts.append(f"lacks {_first_names(self.missing)}")
        if self.extra:
            parts.append(f"has besides {_first_names(self.extra)}")
        if self.differing:
            parts.append(f"holds otherwise {_first_names(self.differing)}")
        return "; ".join(parts) or "holds what it was sent"


def compare(expected: Mapping[str, int], held: Mapping[str, int]) -> Difference:
    """Compare the tensors that an engine was sent (`expected`) with those that it holds, as name -> fingerprint."""
    common = expected.keys() & held.keys()
    differing = sorted(name for name in common if expected[name] != held[name])
    missing = sorted(expected.keys() - held.keys())
    extra = sorted(held.keys() - expected.keys())
    return Difference(tuple(missing), tuple(extra), tuple(differing))


def as_delivered(
    delivered: Mapping[str, Mapping[str, int]], is_drafter: Callable[[str], bool]
) -> dict[str, int]:
    """Join the fingerprints of the tensors that an engine's two loaders were given, for `compare`.

    delivered  "target" and "drafter" -> name -> fingerprint, as the engine's route `control/delivered` answers

    A push gives each loader all tensors, and each loads its own. So a tensor of the drafter counts only if the
    drafter's loader was given it, and any other tensor only if the target's loader was. What a loader then did with a
    tensor is not known.
    """
    joined = {}
    for name, mark in delivered["target"].items():
        if not is_drafter(name):
            joined[name] = mark
    for name, mark in delivered["drafter"].items():
        if is_drafter(name):
            joined[name] = mark
    return joined


def _first_names(names: tuple[str, ...]) -> str:
    """Return at most four names, and how many more there are, for one line of a log."""
    text = ", ".join(names[:4])
    if len(names) > 4:
        text += f" and {len(names) - 4} more"
    return text
