"""A fingerprint of one tensor's bits: exact, cheap, and a sum over its words, so that shards add up to the whole.

With w_i the i-th 8-byte word (the last one filled up with zeros), lo and hi its halves, and odd pseudo-random a and b:

    fingerprint = Σ_i a(i div R) · b(i mod R) · (hi_i, lo_i xor hi_i)   modulo 2⁶⁴,   R = 65,536

One changed word always changes the sum, since a·b is odd. Any other change is missed with a probability of about 2⁻⁶⁴,
or 2⁻³² in the worst case, where only topmost bits change. The exclusive-or serves that case: without it two flipped
signs would cancel. The length is not part of it: compared tensors have one shape on both sides.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from megatron_rlspec.kernels import chosen

_ROW = 1 << 16  # words: half a megabyte, which stays in a core's cache through all passes
_WORD = 8  # bytes
_AT_ONCE = 1 << 30  # bytes of GPU tensors that one launch of the kernel sums, or one larger tensor
_HALF = np.uint64(32)  # bits
_MODULUS = 1 << 64
_THREAD = threading.local()


def fingerprint(tensor: Tensor, start: int = 0) -> int:
    """Compute an unsigned 64-bit integer from the tensor's bits. -0.0 and 0.0 differ, as do NaNs with different bits.

    `start` is the flat index of the first element within the full tensor: contiguous shards' fingerprints add up
    (modulo 2⁶⁴) to the fingerprint of the whole. Raises ValueError unless a shard starts at a multiple of 8 bytes.
    """
    return read([unread(tensor, start)])[0]


def fingerprints(tensors: Iterable[Tensor]) -> list[int]:
    """Compute the fingerprint of each tensor, as `of_parts`."""
    return of_parts((tensor, 0) for tensor in tensors)


def of_parts(parts: Iterable[tuple[Tensor, int]]) -> list[int]:
    """Compute the fingerprint of each (tensor, start). On a GPU with Triton: one wait, and one launch for each GiB.

    At most `_AT_ONCE` bytes of the parts not summed yet are kept.
    """
    sums: list[int] = []  # in the order of the parts; 0 until a GPU's sums are read
    launched: list[tuple[list[int], Tensor]] = []  # indices of parts, and their sums on a device
    waiting: dict[torch.device, dict[int, tuple[Tensor, int]]] = {}
    waiting_bytes: dict[torch.device, int] = {}

    def launch(device: torch.device) -> None:
        kernel = chosen.fingerprints(device, agrees)
        assert kernel is not None
        group = waiting.pop(device)
        del waiting_bytes[device]
        launched.append((list(group), kernel.sums(list(group.values()))))

    for index, (tensor, start) in enumerate(parts):
        first = _first_word(tensor, start)
        device = tensor.device
        if chosen.fingerprints(device, agrees) is None:
            sums.append(_sum(tensor, first))
            continue
        sums.append(0)
        waiting.setdefault(device, {})[index] = (tensor.detach().contiguous(), first)
        waiting_bytes[device] = waiting_bytes.get(device, 0) + tensor.nbytes
        if waiting_bytes[device] + tensor.nbytes > _AT_ONCE:
            launch(device)
    for device in list(waiting):
        launch(device)
    if launched:
        # one wait; sums of further devices travel to the first one
        first_device = launched[0][1].device
        values = torch.cat([on_device.to(first_device) for _, on_device in launched]).tolist()
        indices = itertools.chain.from_iterable(group for group, _ in launched)
        for index, value in zip(indices, values, strict=True):
            sums[index] = value % _MODULUS
    return sums


def agrees(kernel: ModuleType, device: torch.device) -> bool:
    """Return whether the kernel computes the sums of numpy: of a whole row and more, of a part of a word, and of bytes
    that do not begin at a multiple of 8."""
    data = torch.arange(1 << 18, dtype=torch.int64).mul_(0x9E3779B97F4A7C1).view(torch.uint8)
    on_device = data.to(device)
    pieces = ((0, 9 << 16, 5), (0, 13, 0), (3, 5 << 16, 70_000))  # first byte, end, first word
    sums = kernel.sums([(on_device[begin:end], first) for begin, end, first in pieces]).tolist()
    for (begin, end, first), value in zip(pieces, sums, strict=True):
        if value % _MODULUS != _sum(data[begin:end], first):
            return False
    return True


def unread(tensor: Tensor, start: int = 0) -> int | Tensor:
    """Return what `read` makes a `fingerprint` of: for a GPU's tensor, int64 [] on its device."""
    first = _first_word(tensor, start)
    kernel = chosen.fingerprints(tensor.device, agrees)
    if kernel is None:
        return _sum(tensor, first)
    return kernel.sums([(tensor.detach().contiguous(), first)])[0]


def read(sums: Sequence[int | Tensor]) -> list[int]:
    """Return fingerprints. Those on a GPU are read with one wait."""
    on_device = [value for value in sums if isinstance(value, Tensor)]
    values = iter(torch.stack(on_device).tolist() if on_device else ())
    fingerprints = []
    for value in sums:
        number = next(values) if isinstance(value, Tensor) else value
        fingerprints.append(number % _MODULUS)
    return fingerprints


def _first_word(tensor: Tensor, start: int) -> int:
    first_byte = start * tensor.element_size()
    if first_byte % _WORD:
        raise ValueError(
            f"a shard that starts at byte {first_byte} of its tensor: expected a multiple of {_WORD}"
        )
    return first_byte // _WORD


def _sum(tensor: Tensor, first: int) -> int:
    """Sum with numpy: unlike torch it shifts unsigned integers, and each of its passes is vectorised."""
    data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    whole = len(data) // _WORD
    total = _sum_of_words(data[: whole * _WORD].view(np.uint64), first)
    rest = bytes(data[whole * _WORD :])
    if rest:
        last = np.frombuffer(rest.ljust(_WORD, b"\0"), np.uint64)
        total += _sum_of_words(last, first + whole)
    return total % _MODULUS


def _sum_of_words(words: np.ndarray, first: int) -> int:
    row_factors, column_factors = _factors()
    total = 0
    done = 0
    buffer = _scratch()
    while done < len(words):
        # Rows are those of the full tensor, so a shard's first and last one may be partial.
        column = (first + done) % _ROW
        part = words[done : done + _ROW - column]
        mixed = buffer[: len(part)]
        np.right_shift(part, _HALF, out=mixed)
        np.bitwise_xor(mixed, part, out=mixed)
        np.multiply(mixed, column_factors[column : column + len(part)], out=mixed)
        total += int(mixed.sum()) * int(row_factors[(first + done) // _ROW % _ROW])
        done += len(part)
    return total


def _scratch() -> np.ndarray:
    """Return this thread's row of words. New pages for every tensor would take longer than the sums."""
    if not hasattr(_THREAD, "row"):
        _THREAD.row = np.empty(_ROW, np.uint64)
    return _THREAD.row


@cache
def _factors() -> tuple[np.ndarray, np.ndarray]:
    """Return 65,536 odd numbers each for rows and columns; rows repeat them after 32 GiB."""
    index = np.arange(_ROW, dtype=np.uint64)
    odd = np.uint64(1)
    return _mix(index + odd) | odd, _mix(index + np.uint64(1 << 40)) | odd


def _mix(x: np.ndarray) -> np.ndarray:
    """Apply splitmix64's finaliser, with wrap-around."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@dataclass(frozen=True)
class Difference:
    """Names that an engine lacks, has in addition to what it was sent, or holds with other bits."""

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
    """Compare what an engine was sent with what it holds, both as name -> fingerprint."""
    common = expected.keys() & held.keys()
    differing = sorted(name for name in common if expected[name] != held[name])
    missing = sorted(expected.keys() - held.keys())
    extra = sorted(held.keys() - expected.keys())
    return Difference(tuple(missing), tuple(extra), tuple(differing))


def as_delivered(
    delivered: Mapping[str, Mapping[str, int]], is_drafter: Callable[[str], bool]
) -> dict[str, int]:
    """Join the fingerprints of what an engine's loaders of `target` and `drafter` were given.

    A push gives each loader all tensors, and each takes its own. So the drafter's tensors count by the drafter's loader
    alone, and all others by the target's.
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
    text = ", ".join(names[:4])
    if len(names) > 4:
        text += f" and {len(names) - 4} more"
    return text
