"""Grows and cuts draft trees: pure functions of logits and of a callback for the drafter's pass.

Candidates are numbered level by level; `parent` is a candidate's number, -1 under the pending token. A node's `score`
is the sum of the drafter's log-probabilities on its path (EAGLE-2; Li et al. 2024), so no child scores above its
parent and the best n candidates always hang together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

# (hidden [B, C, H] of the parents, tokens [B, C], ancestors [B, C, E] among the E nodes passed so far, themselves
# included, level) -> (hidden [B, C, H], logits [B, C, V])
Expand = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]
# (logits [B, C, V], level) -> (log-probabilities [B, C, topk], tokens [B, C, topk])
Pick = Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]


class Candidates(NamedTuple):
    tokens: torch.Tensor  # [B, M]
    parents: torch.Tensor  # [B, M]
    scores: torch.Tensor  # [B, M]
    depth: np.ndarray  # [M], from 1


class Tree(NamedTuple):
    """What a round verifies: node 0 is the pending token; T nodes, samples with fewer are padded at the end."""

    tokens: np.ndarray  # [B, T]
    parents: np.ndarray  # [B, T] node numbers
    depth: np.ndarray  # [B, T]
    valid: np.ndarray  # [B, T]
    scores: np.ndarray  # [B, T], 0 at the root


def likeliest(topk: int) -> Pick:
    """Pick the drafter's topk likeliest tokens."""

    def pick(logits: torch.Tensor, level: int) -> tuple[torch.Tensor, torch.Tensor]:
        if topk == 1:
            token = logits.argmax(-1, keepdim=True)
            return logits.gather(-1, token) - logits.logsumexp(-1, keepdim=True), token
        return torch.log_softmax(logits, -1).topk(topk)

    return pick


def grow(hidden: torch.Tensor, logits: torch.Tensor, steps: int, topk: int, expand: Expand, pick: Pick) -> Candidates:
    """Grow candidates from the drafter's first output (`hidden [B, H]`, `logits [B, V]`): topk, then topk² a level.

    After each level the topk best-scored candidates are expanded, each into topk children.
    """
    b, device = hidden.shape[0], hidden.device
    score, token = (x[:, 0] for x in pick(logits[:, None], 1))
    tokens, scores, parents = [token], [score], [torch.full_like(token, -1)]
    frontier = torch.arange(topk, device=device).expand(b, topk)  # candidate numbers
    front_hidden = hidden[:, None].expand(-1, topk, -1)
    ancestors = torch.zeros((b, topk, 0), dtype=torch.bool, device=device)
    itself = torch.eye(topk, dtype=torch.bool, device=device).expand(b, topk, topk)
    for level in range(2, steps + 1):
        ancestors = torch.cat([ancestors, itself], 2)
        outputs, step_logits = expand(front_hidden, token, ancestors, level)
        logq, children = pick(step_logits, level)
        tokens.append(children.flatten(1))
        scores.append((logq + score[:, :, None]).flatten(1))
        parents.append(frontier[:, :, None].expand_as(children).flatten(1))
        if level == steps:
            break
        score, best = scores[-1].topk(topk) if topk > 1 else (scores[-1], torch.zeros_like(frontier))
        token, origin = tokens[-1].gather(1, best), best // topk
        frontier = topk + (level - 2) * topk**2 + best
        front_hidden = outputs.gather(1, origin[:, :, None].expand_as(outputs))
        ancestors = ancestors.gather(1, origin[:, :, None].expand_as(ancestors))
    depth = np.repeat(np.arange(1, len(tokens) + 1), [part.shape[1] for part in tokens])
    return Candidates(torch.cat(tokens, 1), torch.cat(parents, 1), torch.cat(scores, 1), depth)


def roots(pending: np.ndarray) -> Tree:
    """Return trees without drafts: the pending tokens [B] alone."""
    zeros = np.zeros((len(pending), 1), np.int64)
    return Tree(pending[:, None], zeros - 1, zeros, zeros == 0, zeros.astype(np.float32))


def cut(pending: np.ndarray, candidates: Candidates, keep: np.ndarray) -> Tree:
    """Return the trees of the kept candidates, a mask [B, M] that contains the parents of each."""
    count = keep.sum(1)
    width = int(count.max(initial=0))
    order = np.argsort(~keep, axis=1, kind="stable")[:, :width]
    number = np.cumsum(keep, 1)  # of a kept candidate in the tree: the root is 0
    above = candidates.parents.cpu().numpy()
    above = np.where(above < 0, 0, np.take_along_axis(number, np.maximum(above, 0), 1))
    valid = np.arange(width) < count[:, None]
    root = roots(pending)
    return Tree(
        np.concatenate([root.tokens, np.take_along_axis(candidates.tokens.cpu().numpy(), order, 1)], 1),
        np.concatenate([root.parents, np.take_along_axis(above, order, 1)], 1),
        np.concatenate([root.depth, np.where(valid, candidates.depth[order], 0)], 1),
        np.concatenate([root.valid, valid], 1),
        np.concatenate([root.scores, np.take_along_axis(candidates.scores.float().cpu().numpy(), order, 1)], 1),
    )


def ancestors(parents: np.ndarray) -> np.ndarray:
    """Return [B, T, T], true at (node, itself or an ancestor), from `parents [B, T]` with node 0 as the root."""
    b, t = parents.shape
    seen = np.broadcast_to(np.eye(t, dtype=bool), (b, t, t)).copy()
    for node in range(1, t):  # parents precede their children
        seen[:, node] |= seen[np.arange(b), parents[:, node]]
    return seen
