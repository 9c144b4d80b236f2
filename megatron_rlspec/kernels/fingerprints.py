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
    offsets = whole * 8 + rest
    single_bytes = address.to(tl.pointer_type(tl.uint8))
    byte = tl.load(single_bytes + offsets, mask=(offsets < size) & (end > whole), other=0)
    word = tl.sum(byte.to(tl.uint64) << (8 * rest).to(tl.uint64), 0)
    tail = (word ^ (word >> 32)) * mixed(((first + whole) % ROW + (1 << 40)).to(tl.uint64))
    of_row = (tl.sum(total, 0) + tail) * mixed((row % ROW + 1).to(tl.uint64))
    tl.atomic_add(sums + which, of_row.to(tl.int64, bitcast=True))


def sums(parts: Sequence[tuple[torch.Tensor, int]]) -> torch.Tensor:
    """Return the sums [n] int64 of contiguous tensors on one device, each from a word of its full tensor on.

    A tensor that does not begin at a multiple of 8 bytes is copied first.
    """
    device = parts[0][0].device
    aligned = []  # lives until the kernel has been launched
    described = []
    for tensor, first_word in parts:
        if tensor.data_ptr() % 8:
            tensor = tensor.clone()
        aligned.append(tensor)
        described.append((tensor.data_ptr(), tensor.nbytes, first_word))
    places = np.array(described, np.int64)
    sizes = places[:, 1]
    first_words = places[:, 2]

    # A program for each row that a tensor has a part of.
    first_rows = first_words // ROW
    last_rows = (first_words + (sizes + 7) // 8 - 1) // ROW
    rows = np.maximum(last_rows - first_rows + 1, 0)
    rows[sizes == 0] = 0
    which = np.repeat(np.arange(len(parts)), rows)
    row_in_tensor = np.arange(len(which)) - np.repeat(np.cumsum(rows) - rows, rows)
    programs = np.stack([which, row_in_tensor + np.repeat(first_rows, rows)], 1)

    table = torch.from_numpy(np.concatenate([places.ravel(), programs.ravel()])).to(device)
    result = torch.zeros(len(parts), dtype=torch.int64, device=device)
    if len(which):
        add_rows[(len(which),)](
            table[: places.size], table[places.size :], result, BLOCK=BLOCK, ROW=ROW
        )
    return result
