"""Noise that is keyed by (seed, position, token), and samples by it: argmax(log p + noise), the Gumbel-max trick.

The hash is 32-bit MurmurHash3 over four words: the seed's low and high word, the position of the predicting token, and
the token's id. The noise is -log(-log(hash / (2³² - 1))) in float64. Both are those of SGLang's
`multinomial_with_seed`. The verifier samples the target's token with this noise. A drafter that takes the same noise
proposes the sampled token more often than a drafter that proposes its likeliest token (`docs/losslessness.md`, Coupled
drafts).

The noise is a contract: the same seed, position and token must give the same bits in SGLang's sampler, here, and in
`kernels/keyed_noise.py` (the same in Triton). If one of them changes alone, texts depend on the engine and the kernel.
`rollout/sglang/cpu/operators.py` gives SGLang this hash on a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor

# Most elements [rows x vocabulary] that are hashed at once, by whole rows:
_CHUNK = 1 << 19  # on a CPU; they fit into its cache
_CHUNK_ON_DEVICE = 1 << 24  # on a GPU: 128 MiB of float64


def _i32(x: int) -> int:
    """Return the int32 with the bits of an unsigned 32-bit constant. torch has few operations on uint32."""
    return x - (1 << 32) if x >= 1 << 31 else x


def _rotate(x: Tensor, by: int) -> Tensor:
    high = x << by
    return high.bitwise_or_(_shift(x, 32 - by))


def _shift(x: Tensor, by: int) -> Tensor:
    # a right shift of int32 repeats the sign bit in the high bits: clear them, as a shift of uint32 would
    return (x >> by).bitwise_and_((1 << (32 - by)) - 1)


# All constants and rotations below are those of MurmurHash3 (x86, 32 bit), with hash seed 0.


def _scramble(k: Tensor) -> Tensor:
    """Return a word of the key as it enters the hash; works on a copy."""
    return _rotate(k * _i32(0xCC9E2D51), 15).mul_(0x1B873593)


def _absorb(h: Tensor, scrambled: Tensor) -> Tensor:
    """Return the state of the hash after one more word."""
    return _rotate(h ^ scrambled, 13).mul_(5).add_(_i32(0xE6546B64))


@cache  # nothing is ever evicted: a captured CUDA graph reads these tensors at their addresses
def _columns(width: int, device: torch.device) -> Tensor:
    """Return the scrambled token ids 0 to `width` - 1, `[width]` int32. Callers must not write to it."""
    return _scramble(torch.arange(width, dtype=torch.int32, device=device))


def murmur3(seeds: Tensor, positions: Tensor, tokens: int | Tensor) -> Tensor:
    """Return hashes [N, V] of (seeds [N] int64, positions [N], token), as int32 bit patterns; arithmetic wraps.

    tokens  the ids of the columns, [V] or [N, V]; or V, if column i is token i
    """
    # the key's first three words, [3, N]: the conversion keeps the low 32 bits of each
    words = torch.stack([seeds, seeds >> 32, positions]).to(torch.int32)
    h = torch.zeros_like(words[0])
    for scrambled in _scramble(words):
        h = _absorb(h, scrambled)
    if isinstance(tokens, int):
        columns = _columns(tokens, seeds.device)
    else:
        columns = _scramble(tokens.to(torch.int32))
    h = _absorb(h[:, None], columns).bitwise_xor_(16)  # the key's length: four words of 4 bytes
    h.bitwise_xor_(_shift(h, 16)).mul_(_i32(0x85EBCA6B))
    h.bitwise_xor_(_shift(h, 13)).mul_(_i32(0xC2B2AE35))
    return h.bitwise_xor_(_shift(h, 16))


def uniform(seeds: Tensor, keys: Tensor, width: int) -> Tensor:
    """Return float64 [N, width] in [0, 1]: the hash over 2³² - 1, at tokens 0 to `width` - 1."""
    return _uniform(murmur3(seeds, keys, width))


def _uniform(hashes: Tensor) -> Tensor:
    x = hashes.to(torch.float64)
    # a negative int32 stands for the unsigned number that is 2³² larger
    return x.add_((hashes < 0).to(torch.float64), alpha=float(1 << 32)).div_(float((1 << 32) - 1))


def _with_noise(logprobs: Tensor, hashes: Tensor) -> Tensor:
    """Return log p + Gumbel noise, in float64 as SGLang computes it: in float32 other tokens would win at times."""
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
    """Return log p + Gumbel noise, float64 [N, V]; arguments as for `draw`, and `vocabulary` may be [N, V], too."""
    tokens = logprobs.shape[1] if vocabulary is None else vocabulary
    return _with_noise(logprobs, murmur3(seeds, keys, tokens))


def draw(
    logprobs: Tensor,
    seeds: Tensor,
    keys: Tensor,
    vocabulary: Tensor | None = None,
) -> Tensor:
    """Sample one column [N] per row of `logprobs [N, V]` (up to a constant per row), by the Gumbel-max trick.

    seeds       int64 [N], one per request; all 64 bits count
    keys        [N], what differs between the draws of a seed, such as the position of the predicting token; the low 32
                bits count. Two draws with the same seed and key have the same noise, so they are not independent
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
    """Sample columns [N, F] of `factor * logprobs` for each of F factors, with the same noise; see `draw`.

    The rows are drawn in parts, which bounds the memory for hashes and noise; `vocabulary` is the same for all rows.
    """
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
    """Return the same columns as `_likeliest`, from the noise of all columns.

    It makes no tensor whose size depends on values, as `nonzero` does. So the host does not wait for the device, and a
    CUDA graph can capture it.
    """
    return _with_noise(logprobs, hashes).argmax(1)


def _likeliest(logprobs: Tensor, hashes: Tensor) -> Tensor:
    """Return the column [N] of the largest log p + noise of each row.

    The two logarithms of the noise are slow on a CPU, so they are computed for few columns. The largest log p + noise
    is the smallest cost exp(-(log p + noise)) = -log(x) / p, for x in [0, 1]. A cost is at least (1 - x) / p, which is
    cheap. So a column whose (1 - x) / p exceeds the cost of another column cannot win.
    """
    # (1 - x) / p, times 2³² - 1: the inverted bits are 2³² - 1 - hash. The clamp keeps 0 / 0 out.
    least_cost = (~hashes).view(torch.uint32).to(torch.float32)
    least_cost.div_(logprobs.exp().clamp_(min=1e-38))
    guess = least_cost.argmin(1, keepdim=True)
    cost = _with_noise(logprobs.gather(1, guess), hashes.gather(1, guess)).neg_().exp_()
    # 1e-4 more than the cost of the guess: `least_cost` is rounded to float32
    row, column = (least_cost <= cost.mul_(2.0**32 * (1 + 1e-4)).to(torch.float32)).nonzero(
        as_tuple=True
    )
    score = _with_noise(logprobs[row, column], hashes[row, column])
    best = score.new_full((len(logprobs),), float("-inf")).scatter_reduce_(0, row, score, "amax")
    won = score == best[row]
    # of equal scores the lowest column, as argmax takes it
    return guess[:, 0].scatter_reduce(0, row[won], column[won], "amin", include_self=False)


def seed_of(*parts: int) -> int:
    """Return a sampling seed below 2³¹, made from non-negative integers.

    With up to four parts below 2³², zeros at the end do not count: (1, 2) and (1, 2, 0) give one seed. So callers that
    share a run give as many parts.

    Interrupted runs and `rlspec answer` compute the seeds again when they go on, so the same parts must always give the
    same seed.
    """
    return int(np.random.SeedSequence(parts).generate_state(1)[0]) & 0x7FFF_FFFF
