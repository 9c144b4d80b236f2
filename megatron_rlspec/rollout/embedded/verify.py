"""Choose the tokens that a verify pass commits, by one of two verifiers. Both sample argmax(log p + Gumbel noise).

N: tokens that a pass verifies; V: vocabulary; B: samples; k: drafts of a sample.

* position_keyed: the noise is a hash of (seed, position, token). So the text depends on seed, prompt and weights only.
* target_only: the noise is a hash of (seed, number of the draw, token), and no round uses a number again. So texts have
  the target's distribution, but a text also depends on how many drafts its rounds had.

`rounds.py` passes the position or the number of the draw as `keys`, and `draft.py` drafts with functions of this file.

The target samples a token at each place of a chain of drafts. A draft is accepted if it equals the target's token there
and all drafts before it were accepted.

The noise (`noise.py`) is that of SGLang's seeded sampler. So under position_keyed both engines give the same text for
the same seed, except where two tokens are equally good up to rounding.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_rlspec import token_filter
from megatron_rlspec.noise import draw
from megatron_rlspec.types import Verifier

_MASK_64 = (1 << 64) - 1
# Four steps of splitmix64's state. An arbitrary choice, but another one changes every text under target_only.
_FOUR_STEPS = 4 * 0x9E3779B97F4A7C15


class Settings(NamedTuple):
    """How N tokens are sampled, [N] float64 each. The fields have the names and the meaning of `types.Sampling`.

    `RoundRunner.settings` stores them in this order, and reads them from a `Sampling` by these names.
    """

    temperature: Tensor
    top_p: Tensor
    top_k: Tensor
    min_p: Tensor


class Committed(NamedTuple):
    """What one round sampled for B rows. The first `accepted + 1` tokens of each row are appended, the others dropped.

    tokens    int64, the target's token behind the pending token and behind each draft; -1 on padding
    logprobs  float32, of these tokens, at the request's temperature and before top-k, top-p and min-p
    """

    tokens: np.ndarray  # [B, 1 + k]
    logprobs: np.ndarray  # [B, 1 + k]
    accepted: np.ndarray  # [B] drafts that the target accepted
    verified: np.ndarray  # [B] drafts that the target has run on, accepted or not
    logq: np.ndarray | None  # as `draft.Chains.logq`


def noise_seed(seed: int, verifier: Verifier) -> np.int64:
    """Return the seed of a request's noise: the 64 bits that `noise.murmur3` hashes, as an int64 that may be negative.

    Under position_keyed it is the request's own seed. Under target_only the keys are numbers of draws: with the
    request's own seed, draw n would have the noise that position n has under position_keyed. So target_only hashes the
    seed first (splitmix64).
    """
    x = seed & _MASK_64
    if verifier == "target_only":
        x = (x + _FOUR_STEPS) & _MASK_64
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK_64
        x ^= x >> 31
    return np.uint64(x).astype(np.int64)


def logprobs(logits: Tensor, temperature: Tensor) -> Tensor:
    """Return log softmax(logits / T) [N, V] with `temperature [N]` as T; greedy rows, with T = 0, use T = 1."""
    divisor = torch.where(temperature > 0, temperature, 1.0).to(logits.dtype)
    return torch.log_softmax(logits / divisor[:, None], -1)


def filtered(logp: Tensor, settings: Settings) -> Tensor:
    """Return `logp [N, V]` with -inf outside top-k, top-p and min-p, not normalised again.

    A token stays if fewer than top_k tokens are likelier, if the likelier ones have a total probability of at most
    top_p, and if it is at least min_p times as likely as the likeliest. Of equally likely tokens the lowest id counts
    as the likeliest. With top_p = 1, top_k <= 0 and min_p = 0 all tokens stay.
    """
    _, top_p, top_k, min_p = settings
    # The filter needs probabilities and a sort of the vocabulary. Most runs set no limits and skip both.
    limited = (top_p < 1) | (top_k > 0) | (min_p > 0)
    if not limited.any():
        return logp
    probs = logp.exp()
    top_k = torch.where(top_k > 0, top_k, logp.shape[1])
    kept = token_filter.filtered(probs, top_k, top_p.to(probs), min_p.to(probs))
    return logp.masked_fill(kept == 0, float("-inf"))


def sample(logp: Tensor, settings: Settings, seeds: Tensor, keys: Tensor) -> Tensor:
    """Sample the target's token [N] at N places from `logp [N, V]`, a result of `logprobs`.

    seeds, keys  [N], of the noise, as in `noise.draw`; not used at temperature 0, which takes the likeliest token
    """
    greedy = settings.temperature == 0
    likeliest = logp.argmax(-1)  # at temperature 0, `logp` is that of temperature 1: the same order
    if greedy.all():
        return likeliest  # no noise to compute
    drawn = draw(filtered(logp, settings), seeds, keys)
    return torch.where(greedy, likeliest, drawn)


def count_accepted(tokens: np.ndarray, valid: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Return [B], how many drafts of each chain are accepted: the leading ones that equal the target's tokens.

    tokens   [B, 1 + k]: the pending token, then the drafts
    valid    [B, 1 + k]: False where a chain is padded; True for every pending token
    targets  [B, 1 + k]: the token that the target samples behind each column; `accepted + 1` of them are committed

    With k = 0 all counts are 0.
    """
    # Column i of `targets` is the token behind column i of `tokens`, so a draft is compared with the column before it.
    accepted = valid[:, 1:] & (tokens[:, 1:] == targets[:, :-1])
    return accepted.cumprod(1).sum(1)  # the product is 0 from the first refused draft on
