"""The noise of `noise.py` in Triton: a hash of (seed, position, word), and the score of a word with it.

Every function here must compute what its counterpart in `noise.py` does: the tokens that an engine draws must not
depend on whether kernels or plain torch draw them. `kernels/chosen.py` compares both. A "word" is a token id.
"""

from __future__ import annotations

import triton
import triton.language as tl

# A factor of bounds on (1 - u) · 2^32 in float32: the 1e-4 covers rounding, so that no word that can win is left out.
SLACK = tl.constexpr(2.0**32 * (1 + 1e-4))


@triton.jit
def _mix(h, k):
    k = k * 0xCC9E2D51
    k = (k << 15) | (k >> 17)
    h = h ^ (k * 0x1B873593)
    h = (h << 13) | (h >> 19)
    return h * 5 + 0xE6546B64


@triton.jit
def hash_of_row(seeds, positions, row):
    """Return MurmurHash3's state after the seed's low and high 32 bits and the position, uint32."""
    seed = tl.load(seeds + row)
    # `* 0`: the state begins with 0, as uint32
    h = _mix(seed.to(tl.uint32) * 0, seed.to(tl.uint32))
    h = _mix(h, (seed >> 32).to(tl.uint32))
    return _mix(h, tl.load(positions + row).to(tl.uint32))


@triton.jit
def hash_of(state, words):
    """Return the hashes of words, uint32, from the state of `hash_of_row`."""
    # MurmurHash3 ends with the length: four words are 16 bytes
    h = _mix(state, words.to(tl.uint32)) ^ 16
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    return h ^ (h >> 16)


@triton.jit
def score_of(y, hashed):
    """Return y + noise in float64, by the formula of `noise.py`."""
    x = tl.log(hashed.to(tl.float64) / tl.full((), 4294967295, tl.float64))
    # the clamp of `noise.py`: float64's lowest number for u = 0, and for u = 1 the value below it
    x = tl.minimum(tl.maximum(x, -1.7976931348623157e308), -(2.0**-32))
    return y.to(tl.float64) - tl.log(-x)


@triton.jit
def beats(score, column, other_score, other_column):
    """Return whether a score is drawn before another one: of equal scores the lower column or word."""
    return (score > other_score) | ((score == other_score) & (column < other_column))
