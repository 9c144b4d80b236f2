"""Fingerprints of many tensors (push/fingerprint.py) in one launch, each byte read once.

A program sums what one tensor holds of one row of 65,536 words. Sums are modulo 2^64, so their order does not matter.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

BLOCK = 2048  # words that a program reads at once
ROW = 1 << 16  # words, as in push/fingerprint.py


@triton.jit
def mixed(x):
    """Apply splitmix64's finaliser, and make the result odd."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return (x ^ (x >> 31)) | 1


@triton.jit
def add_rows(places, programs, sums, BLOCK: tl.constexpr, ROW: tl.constexpr):
    """Add one row of one tensor to its sum.

    places    [n, 3] int64: address, bytes, and the first word's place in the full tensor
    programs  [p, 2] int64: tensor, row of the full tensor
    sums      [n] int64
    """
    program = tl.program_id(0)
    which = tl.load(programs + 2 * program)
    row = tl.load(programs + 2 * program + 1)
    address = tl.load(places + 3 * which)
    size = tl.load(places + 3 * which + 1)
    first = tl.load(places + 3 * which + 2)
    whole = size // 8
    begin = tl.maximum(row * ROW - first, 0)
    end = tl.minimum((row + 1) * ROW - first, (size + 7) // 8)
    last = tl.minimum(end, whole)
    words = address.to(tl.pointer_type(tl.int64))
    total = tl.zeros([BLOCK], tl.uint64)
    for block in range(0, ROW // BLOCK):
        i = begin + block * BLOCK + tl.arange(0, BLOCK)
        word = tl.load(words + i, mask=i < last, other=0).to(tl.uint64, bitcast=True)
        column = ((first + i) % ROW + (1 << 40)).to(tl.uint64)
        total += (word ^ (word >> 32)) * mixed(column)
    # The bytes after the last whole word, filled up with zeros; none in other rows.
    rest = tl.arange(0, 8)
    at = whole * 8 + rest
    one = tl.load(
        address.to(tl.pointer_type(tl.uint8)) + at, mask=(at < size) & (end > whole), other=0
    )
    word = tl.sum(one.to(tl.uint64) << (8 * rest).to(tl.uint64), 0)
    tail = (word ^ (word >> 32)) * mixed(((first + whole) % ROW + (1 << 40)).to(tl.uint64))
    found = (tl.sum(total, 0) + tail) * mixed((row % ROW + 1).to(tl.uint64))
    tl.atomic_add(sums + which, found.to(tl.int64, bitcast=True))


def sums(parts: Sequence[tuple[torch.Tensor, int]]) -> torch.Tensor:
    """Return the sums [n] int64 of contiguous tensors on one device, each from a word of its full tensor on.

    A tensor that does not begin at a multiple of 8 bytes is copied first.
    """
    aligned = [tensor if tensor.data_ptr() % 8 == 0 else tensor.clone() for tensor, _ in parts]
    device = aligned[0].device
    places = np.array(
        [(x.data_ptr(), x.nbytes, first) for x, (_, first) in zip(aligned, parts, strict=True)],
        np.int64,
    )
    begins = places[:, 2] // ROW
    rows = np.maximum((places[:, 2] + (places[:, 1] + 7) // 8 - 1) // ROW - begins + 1, 0)
    rows[places[:, 1] == 0] = 0
    which = np.repeat(np.arange(len(parts)), rows)
    row = np.arange(len(which)) - np.repeat(np.cumsum(rows) - rows, rows) + np.repeat(begins, rows)
    table = np.concatenate([places.ravel(), np.stack([which, row], 1).ravel()])
    there = torch.from_numpy(table).to(device)
    found = torch.zeros(len(parts), dtype=torch.int64, device=device)
    if len(which):
        add_rows[(len(which),)](
            there[: places.size], there[places.size :], found, BLOCK=BLOCK, ROW=ROW
        )
    return found
