"""Grow draft trees and cut them to the nodes to verify. Pure functions of logits and of callbacks.

Candidates are numbered level by level. The parent of a candidate is a candidate's number, or -1 for the pending token.
A candidate's score is the sum of the drafter's log-probabilities on its path (EAGLE-2; Li et al. 2024). No child scores
above its parent, so the best n candidates always form a tree.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_rlspec.noise import draw, noisy
from megatron_rlspec.rollout.embedded import verify
from megatron_rlspec.rollout.embedded.verify import Settings
from megatron_rlspec.types import SHARPNESS

# Runs the drafter on C candidates of each sample: (hidden [B, C, H] of their parents, tokens [B, C],
# ancestors [B, C, E] among the E nodes that the drafter has run on, these included, level)
# -> (hidden [B, C, H], logits [B, C, V])
Expand = Callable[[Tensor, Tensor, Tensor, int], tuple[Tensor, Tensor]]
# Picks children: (logits [B, C, V], level) -> (log-probabilities [B, C, topk], tokens [B, C, topk])
Pick = Callable[[Tensor, int], tuple[Tensor, Tensor]]


class Candidates(NamedTuple):
    """The M drafted candidates of each sample."""

    tokens: Tensor  # [B, M]
    parents: Tensor  # [B, M]
    scores: Tensor  # [B, M]
    depth: np.ndarray  # [M], from 1


class Tree(NamedTuple):
    """The nodes that a round verifies. Node 0 is the pending token. A sample with fewer than T nodes is padded."""

    tokens: np.ndarray  # [B, T]
    parents: np.ndarray  # [B, T] node numbers
    depth: np.ndarray  # [B, T]
    valid: np.ndarray  # [B, T]

    def joined(self, other: Tree) -> Tree:
        """Return the trees of two batches as one batch, padded to the larger number of nodes."""
        width = max(self.tokens.shape[1], other.tokens.shape[1])
        fields = []
        for both in zip(self, other, strict=True):
            padded = [_padded(values, width) for values in both]
            fields.append(np.concatenate(padded))
        return Tree(*fields)


def _padded(values: np.ndarray, width: int) -> np.ndarray:
    missing = width - values.shape[1]
    return np.pad(values, ((0, 0), (0, missing)))


def likeliest(topk: int) -> Pick:
    """Return a `Pick` of the drafter's topk likeliest tokens."""

    def pick(logits: Tensor, level: int) -> tuple[Tensor, Tensor]:
        if topk == 1:
            token = logits.argmax(-1, keepdim=True)
            score = logits.gather(-1, token)
            return score - logits.logsumexp(-1, keepdim=True), token
        return torch.log_softmax(logits, -1).topk(topk)

    return pick


class Coupling(NamedTuple):
    """The verifier's noise at the positions that B samples draft for, and what the target's logits go through.

    seeds      [B], of the samples
    keys       [B], the position that predicts the first draft
    settings   of the samples
    words      [V], the token ids of the drafter's columns; None: column i is token i
    sharpness  the factor s on log q
    """

    seeds: Tensor
    keys: Tensor
    settings: Settings
    words: Tensor | None = None
    sharpness: float = SHARPNESS[0]


def coupled(topk: int, coupling: Coupling) -> Pick:
    """Return a `Pick` of the topk tokens with the largest s · log q + noise, with the noise of the verifier.

    q has gone through temperature, top-k, top-p and min-p, as p will. At temperature 0 these are the likeliest tokens.
    The score of a tree's child is its log-probability under the softmax of these sums: how likely the target samples
    it, if log p differs from s · log q by independent noise of the same kind.
    """

    def pick(logits: Tensor, level: int) -> tuple[Tensor, Tensor]:
        batch, branches, width = logits.shape

        def spread(values: Tensor) -> Tensor:
            return values.repeat_interleave(branches)

        settings = Settings(*map(spread, coupling.settings))
        logq = verify.logprobs(logits.reshape(-1, width), settings.temperature)
        sharp = verify.filtered(logq, settings) * coupling.sharpness
        keys = spread(coupling.keys) + level - 1
        where = (spread(coupling.seeds), keys, coupling.words)
        greedy = (settings.temperature == 0)[:, None]
        if topk == 1:
            likeliest = logq.argmax(-1, keepdim=True)
            drawn = draw(sharp, *where)[:, None]
            token = torch.where(greedy, likeliest, drawn)
            score = logq.gather(1, token)
        else:
            summed = noisy(sharp, *where)
            scores = torch.log_softmax(summed, -1).to(logq.dtype)
            score, token = torch.where(greedy, logq, scores).topk(topk)
        shape = batch, branches, topk
        return score.view(shape), token.view(shape)

    return pick


def among(words: Tensor, pick: Pick) -> Pick:
    """Return a `Pick` whose tokens are `words [S]`, for logits over these words."""

    def of_words(logits: Tensor, level: int) -> tuple[Tensor, Tensor]:
        logprobs, columns = pick(logits, level)
        return logprobs, words[columns]

    return of_words


def grow(
    hidden: Tensor, logits: Tensor, steps: int, topk: int, expand: Expand, pick: Pick
) -> Candidates:
    """Grow candidates from the drafter's first output, `hidden [B, H]` and `logits [B, V]`.

    The first level has topk candidates. On every further level, the topk best-scored candidates of the level before get
    topk children each.
    """
    batch = hidden.shape[0]
    device = hidden.device
    logprobs, children = pick(logits[:, None], 1)
    score = logprobs[:, 0]
    token = children[:, 0]
    tokens = [token]
    scores = [score]
    parents = [torch.full_like(token, -1)]
    # numbers of the candidates to expand
    frontier = torch.arange(topk, device=device).expand(batch, topk)
    front_hidden = hidden[:, None].expand(-1, topk, -1)
    ancestors = torch.zeros((batch, topk, 0), dtype=torch.bool, device=device)
    itself = torch.eye(topk, dtype=torch.bool, device=device).expand(batch, topk, topk)
    for level in range(2, steps + 1):
        ancestors = torch.cat([ancestors, itself], 2)
        outputs, step_logits = expand(front_hidden, token, ancestors, level)
        logprobs, children = pick(step_logits, level)
        along_path = logprobs + score[:, :, None]
        of_children = frontier[:, :, None].expand_as(children)
        tokens.append(children.flatten(1))
        scores.append(along_path.flatten(1))
        parents.append(of_children.flatten(1))
        if level == steps:
            break
        score, best = scores[-1].topk(topk)
        token = tokens[-1].gather(1, best)
        origin = best // topk  # index of the expanded parent
        frontier = topk + (level - 2) * topk**2 + best
        above = origin[:, :, None]
        front_hidden = outputs.gather(1, above.expand_as(outputs))
        ancestors = ancestors.gather(1, above.expand_as(ancestors))
    sizes = [part.shape[1] for part in tokens]
    levels = np.arange(1, len(tokens) + 1)
    return Candidates(
        tokens=torch.cat(tokens, 1),
        parents=torch.cat(parents, 1),
        scores=torch.cat(scores, 1),
        depth=np.repeat(levels, sizes),
    )


def roots(pending: np.ndarray) -> Tree:
    """Return trees without drafts, which hold only the pending tokens [B]."""
    zeros = np.zeros((len(pending), 1), np.int64)
    return Tree(pending[:, None], zeros - 1, zeros, zeros == 0)


def cut(pending: np.ndarray, candidates: Candidates, keep: np.ndarray) -> Tree:
    """Return the trees of the candidates that the mask `keep [B, M]` marks. It must mark the parents of each, too."""
    count = keep.sum(1)
    width = int(count.max(initial=0))
    order = np.argsort(~keep, axis=1, kind="stable")[:, :width]
    number = np.cumsum(keep, 1)  # node number of each kept candidate; the root is 0
    parents = candidates.parents.cpu().numpy()
    above = np.take_along_axis(number, np.maximum(parents, 0), 1)
    above[parents < 0] = 0
    valid = np.arange(width) < count[:, None]
    tokens = candidates.tokens.cpu().numpy()
    nodes = Tree(
        np.take_along_axis(tokens, order, 1),
        np.take_along_axis(above, order, 1),
        np.where(valid, candidates.depth[order], 0),
        valid,
    )
    fields = []
    for both in zip(roots(pending), nodes, strict=True):
        fields.append(np.concatenate(both, 1))
    return Tree(*fields)


def ancestors(parents: np.ndarray) -> np.ndarray:
    """Return [B, T, T] bool: at (i, j), whether j is i or its ancestor in `parents [B, T]`; node 0 is the root."""
    batch, nodes = parents.shape
    itself = np.eye(nodes, dtype=bool)
    seen = np.repeat(itself[None], batch, axis=0)
    samples = np.arange(batch)
    for node in range(1, nodes):  # parents precede their children
        seen[:, node] |= seen[samples, parents[:, node]]
    return seen
