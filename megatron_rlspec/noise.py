"""Noise that is keyed by (seed, position, token), and samples by it: argmax(log p + noise), the Gumbel-max trick.

The hash is 32-bit MurmurHash3 over four words: the seed's low and high word, the position of the predicting token, and
the token's id. The noise is -log(-log(hash / (2³² - 1))) in float64. Both are those of SGLang's
`multinomial_with_seed`. The verifier samples the target's token with this noise. A drafter that takes the same noise
proposes the same token more often than its likeliest one is sampled (`docs/losslessness.md`, Coupled drafts).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor

_CHUNK = 1 << 19  # elements hashed at once on a CPU; they fit into its cache
_CHUNK_ON_DEVICE = 1 << 24  # 128 MiB of float64


def _i32(x: int) -> int:
    return x - (1 << 32) if x >= 1 << 31 else x


def _rotate(x: Tensor, by: int) -> Tensor:
    high = x << by
    return high.bitwise_or_(_shift(x, 32 - by))


def _shift(x: Tensor, by: int) -> Tensor:
    # int32 shifts repeat the sign bit: mask it off
    return (x >> by).bitwise_and_((1 << (32 - by)) - 1)


def _scramble(k: Tensor) -> Tensor:
    return _rotate(k * _i32(0xCC9E2D51), 15).mul_(0x1B873593)


def _absorb(h: Tensor, scrambled: Tensor) -> Tensor:
    return _rotate(h ^ scrambled, 13).mul_(5).add_(_i32(0xE6546B64))


@cache  # without bounds, since CUDA graphs read these tensors by their addresses
def _columns(width: int, device: torch.device) -> Tensor:
    return _scramble(torch.arange(width, dtype=torch.int32, device=device))


def murmur3(seeds: Tensor, positions: Tensor, tokens: int | Tensor) -> Tensor:
    """Return hashes [N, V] of (seeds [N] int64, positions [N], token), as int32 bit patterns; arithmetic wraps.

    tokens  the ids of the columns, [V] or [N, V]; or V, if column i is token i
    """
    words = torch.stack([seeds, seeds >> 32, positions]).to(torch.int32)  # the low 32 bits
    h = torch.zeros_like(words[0])
    for scrambled in _scramble(words):
        h = _absorb(h, scrambled)
    if isinstance(tokens, int):
        columns = _columns(tokens, seeds.device)
    else:
        columns = _scramble(tokens.to(torch.int32))
    h = _absorb(h[:, None], columns).bitwise_xor_(16)
    h.bitwise_xor_(_shift(h, 16)).mul_(_i32(0x85EBCA6B))
    h.bitwise_xor_(_shift(h, 13)).mul_(_i32(0xC2B2AE35))
    return h.bitwise_xor_(_shift(h, 16))


def uniform(seeds: Tensor, keys: Tensor, width: int) -> Tensor:
    """Return float64 [N, width] in [0, 1]: the hash over 2³² - 1."""
    return _uniform(murmur3(seeds, keys, width))


def _uniform(hashes: Tensor) -> Tensor:
    x = hashes.to(torch.float64)
    return x.add_((hashes < 0).to(torch.float64), alpha=float(1 << 32)).div_(float((1 << 32) - 1))


def _noisy(logprobs: Tensor, hashes: Tensor) -> Tensor:
    """Return log p + Gumbel noise, in float64."""
    x = _uniform(hashes)
    # At x = 1 the noise would be infinite; the clamp gives x = 1 the noise of the value below it. At x = 0 the
    # noise is a very low finite number, so a column of probability 0 never beats one of positive probability.
    x.log_().clamp_(min=torch.finfo(x.dtype).min, max=-(2.0**-32)).neg_().log_().neg_()
    return x.add_(logprobs)


def noisy(
    logprobs: Tensor,
    seeds: Tensor,
    keys: Tensor,
    vocabulary: Tensor | None = None,
) -> Tensor:
    """Return log p + Gumbel noise, float64 [N, V]; arguments as for `draw`."""
    tokens = logprobs.shape[1] if vocabulary is None else vocabulary
    return _noisy(logprobs, murmur3(seeds, keys, tokens))


def draw(
    logprobs: Tensor,
    seeds: Tensor,
    keys: Tensor,
    vocabulary: Tensor | None = None,
) -> Tensor:
    """Sample one column [N] per row of `logprobs [N, V]` (up to a constant per row), by the Gumbel-max trick.

    seeds       int64 [N], one per request
    keys        int64 [N], what differs between the draws of a seed, such as the position of the predicting token
    vocabulary  the token ids of the columns [V]; None: column i is token i
    """
    return draw_each(logprobs, seeds, keys, (1.0,), vocabulary)[:, 0]


def draw_each(
    logprobs: Tensor,
    seeds: Tensor,
    keys: Tensor,
    factors: Sequence[float],
    vocabulary: Tensor | None = None,
) -> Tensor:
    """Sample columns [N, F] of `factor * logprobs` for each of F factors, with the same noise; see `draw`."""
    on_cpu = logprobs.device.type == "cpu"
    likeliest = _likeliest if on_cpu else _likeliest_without_waiting
    rows = max(1, (_CHUNK if on_cpu else _CHUNK_ON_DEVICE) // logprobs.shape[1])
    tokens = logprobs.shape[1] if vocabulary is None else vocabulary
    picks = []
    for part, seed, key in zip(
        logprobs.split(rows), seeds.split(rows), keys.split(rows), strict=True
    ):
        hashes = murmur3(seed, key, tokens)
        scaled = [part if factor == 1 else part * factor for factor in factors]
        picks.append(torch.stack([likeliest(logp, hashes) for logp in scaled], 1))
    return torch.cat(picks)


def _likeliest_without_waiting(logprobs: Tensor, hashes: Tensor) -> Tensor:
    """Return the same columns as `_likeliest`, by the noise of all of them: the host does not wait for a device."""
    return _noisy(logprobs, hashes).argmax(1)


def _likeliest(logprobs: Tensor, hashes: Tensor) -> Tensor:
    """Return the column [N] of the largest log p + noise of each row.

    The noise is computed for few columns. For x in [0, 1], exp(-(log p + noise)) = -log(x) / p, which is at least
    (1 - x) / p. So a column whose (1 - x) / p exceeds the left side of another column cannot win.
    """
    # (1 - x) / p · 2³²
    least = (~hashes).view(torch.uint32).to(torch.float32).div_(logprobs.exp().clamp_(min=1e-38))
    first = least.argmin(1, keepdim=True)
    bound = _noisy(logprobs.gather(1, first), hashes.gather(1, first)).neg_().exp_()
    row, column = (least <= bound.mul_(2.0**32 * (1 + 1e-4)).to(torch.float32)).nonzero(
        as_tuple=True
    )
    score = _noisy(logprobs[row, column], hashes[row, column])
    best = score.new_full((len(logprobs),), float("-inf")).scatter_reduce_(0, row, score, "amax")
    won = score == best[row]
    return first[:, 0].scatter_reduce(0, row[won], column[won], "amin", include_self=False)


def seed_of(*parts: int) -> int:
    """Return a sampling seed below 2³¹, made from non-negative integers."""
    return int(np.random.SeedSequence(parts).generate_state(1)[0]) & 0x7FFF_FFFF
