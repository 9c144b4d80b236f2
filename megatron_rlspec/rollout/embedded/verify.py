"""Choose the tokens that a verify pass commits. Three verifiers, as pure functions of logits, drafts and keyed noise.

* position_keyed: the target's token at a position is argmax(log p + Gumbel noise). The noise is a hash of (seed,
  position, token). A draft is accepted if it equals the target's token and its parent was accepted. The text depends
  only on seed, prompt and weights.
* target_only: the same, with new noise in every round. It is lossless in distribution only.
* rejection: accept a draft x ~ q with probability min(1, p/q), else sample from the normalised (p - q)+ (Leviathan
  et al. 2023; Chen et al. 2023). It verifies chains only.

`noise.py` has the noise. It is that of SGLang's seeded sampler, so the same seed gives the same text on both
engines, up to floating-point ties.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_rlspec import token_filter
from megatron_rlspec.noise import draw, uniform

# Columns of `streams`: independent streams of one request's seed. Column 0 is the seed itself.
DRAFT = 1
COIN = 2
RESIDUAL = 3
TARGET = 4

_GOLDEN = 0x9E3779B97F4A7C15


class Settings(NamedTuple):
    """How N tokens are sampled, [N] each."""

    temperature: Tensor
    top_p: Tensor
    top_k: Tensor
    min_p: Tensor


class Committed(NamedTuple):
    """The tokens that one round appended to B rows: the first `accepted + 1` of each."""

    tokens: np.ndarray  # [B, P]
    logprobs: np.ndarray  # [B, P]
    accepted: np.ndarray  # [B] drafts
    verified: np.ndarray  # [B] drafts


def streams(seed: int) -> np.ndarray:
    """Return int64 [5]: the seed, then seeds of four independent streams, made by the finaliser of splitmix64."""
    steps = np.arange(5, dtype=np.uint64) * np.uint64(_GOLDEN)
    x = np.uint64(seed % (1 << 64)) + steps
    y = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    y = (y ^ (y >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    y ^= y >> np.uint64(31)
    y[0] = x[0]
    return y.view(np.int64)


def coin(probability: Tensor, seeds: Tensor, keys: Tensor) -> Tensor:
    """Sample bool [N], true with `probability [N]`."""
    drawn = uniform(seeds, keys, 1)[:, 0]
    return (drawn < probability) | (probability >= 1)


def logprobs(logits: Tensor, temperature: Tensor) -> Tensor:
    """Return log softmax(logits / T) [N, V] with `temperature [N]` as T; rows with T = 0 use T = 1."""
    divisor = torch.where(temperature > 0, temperature, 1.0).to(logits.dtype)
    return torch.log_softmax(logits / divisor[:, None], -1)


def filtered(logp: Tensor, settings: Settings) -> Tensor:
    """Return `logp [N, V]` with -inf outside top-k, top-p and min-p, not normalised again.

    A token stays if fewer than top_k tokens are likelier, if the likelier ones have a total probability of at most
    top_p, and if it is at least min_p times as likely as the likeliest. With top_p = 1, top_k <= 0 and min_p = 0 all
    tokens stay.
    """
    _, top_p, top_k, min_p = settings
    limited = (top_p < 1) | (top_k > 0) | (min_p > 0)
    if not limited.any():
        return logp
    probs = logp.exp()
    top_k = torch.where(top_k > 0, top_k, logp.shape[1])
    kept = token_filter.filtered(probs, top_k, top_p.to(probs), min_p.to(probs))
    return logp.masked_fill(kept == 0, float("-inf"))


def support(logp: Tensor, settings: Settings) -> Tensor:
    """Return probabilities [N, V] after the filters, normalised; one-hot where T = 0."""
    probs = filtered(logp, settings).softmax(-1)
    likeliest = logp.argmax(-1, keepdim=True)
    one_hot = torch.zeros_like(probs).scatter_(1, likeliest, 1.0)
    greedy = settings.temperature == 0
    return torch.where(greedy[:, None], one_hot, probs)


def sample(logp: Tensor, settings: Settings, seeds: Tensor, keys: Tensor) -> Tensor:
    """Sample the target's token [N] at every node from `logp [N, V]`, a result of `logprobs`."""
    greedy = settings.temperature == 0
    likeliest = logp.argmax(-1)
    if greedy.all():
        return likeliest
    drawn = draw(filtered(logp, settings), seeds, keys)
    return torch.where(greedy, likeliest, drawn)


def walk(
    tokens: np.ndarray, parents: np.ndarray, valid: np.ndarray, targets: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Follow each tree [B, T] from its root along the children that equal the target's tokens.

    Node 0 is the pending token; `parents` are node indices. Returns (path [B, P] of node indices, padded with the last
    one; accepted [B]). The tokens to commit are `targets` at path[: accepted + 1].
    """
    rows = np.arange(len(tokens))
    node = np.zeros(len(tokens), np.int64)
    accepted = np.zeros(len(tokens), np.int64)
    path = [node]
    eligible = valid & (np.arange(tokens.shape[1]) > 0)
    while True:
        wanted = targets[rows, node]
        children = eligible & (parents == node[:, None])
        match = children & (tokens == wanted[:, None])
        matched = match.any(1)
        if not matched.any():
            return np.stack(path, 1), accepted
        node = np.where(matched, match.argmax(1), node)
        accepted += matched
        path.append(node)


def reject(
    drafts: Tensor,
    q: Tensor,
    p: Tensor,
    coin_seeds: Tensor,
    residual_seeds: Tensor,
    keys: Tensor,
) -> Tensor:
    """Verify chains by rejection. Returns tokens [B, k + 1] to commit: accepted drafts, one sampled token, then -1.

    drafts `[B, k]`    sampled from `q [B, k, V]`
    p `[B, k + 1, V]`  the target's probabilities after filtering
    seeds `[B]`        streams COIN and RESIDUAL
    keys `[B, k + 1]`  new in every round
    """
    b, k = drafts.shape
    rows = torch.arange(b, device=drafts.device)
    index = drafts[:, :, None]
    ratio = p[:, :k].gather(2, index) / q.gather(2, index)
    seeds = coin_seeds.repeat_interleave(k)
    of_drafts = keys[:, :k].reshape(-1)
    ok = coin(ratio.reshape(-1), seeds, of_drafts).view(b, k)
    residual = p.clone()
    residual[:, :k] -= q
    residual.clamp_(min=0)
    # Where p = q up to rounding, the residual has nothing to sample from.
    ok |= residual[:, :k].sum(2) == 0
    accepted = ok.long().cumprod(1).sum(1)
    # of each row, the first draft that is not accepted, or the token after all
    first = (rows, accepted)
    commit = F.pad(drafts, (0, 1), value=-1)
    behind = torch.arange(k + 1, device=drafts.device) > accepted[:, None]
    commit[behind] = -1
    commit[first] = draw(residual[first].log(), residual_seeds, keys[first])
    return commit
