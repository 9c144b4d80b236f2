"""Predict the acceptance of the next rollout from the logits of the training forward.

Training computes every position once. An engine drafts only at positions where a round starts. Rounds start more often
where drafts are refused, because accepted drafts skip positions. A mean over positions is therefore too high. Example:
half of the text accepts with rate 0.95 and half with 0.1, at three steps; the mean over positions gives 2.41 tokens per
round, the true value is 1.71. `walk` follows each sequence instead: a round starts at the first position and ends after
the drafts that this text accepts, and the next round starts there.

Shapes: T positions in sequence order, with context-parallel shards joined; D depths; K step counts. Row t, depth d is
the drafter's prediction of token t + 1 + d, as in `PackedBatch.drafter_*`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from megatron_rlspec.speculation.forecast import Prediction
from megatron_rlspec.types import Verifier


def target_probabilities(
    logits: torch.Tensor, temperature: float = 1.0, top_p: float = 1.0, top_k: int = -1
) -> torch.Tensor:
    """Return the distribution that an engine samples from, `[N, V]`: softmax, cut to top-k and top-p, renormalised.

    Temperature 0 is greedy. A token stays if the likelier ones have a total probability of at most `top_p`, as in
    SGLang.
    """
    if temperature == 0:
        return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    p = (logits / temperature).softmax(-1)
    if top_p >= 1 and top_k < 0:
        return p
    ordered, tokens = p.sort(dim=-1, descending=True, stable=True)
    drop = ordered.cumsum(-1) - ordered > top_p
    if top_k > 0:
        drop[..., top_k:] = True
    ordered = ordered.masked_fill(drop, 0.0)
    return torch.zeros_like(p).scatter_(-1, tokens, ordered / ordered.sum(-1, keepdim=True))


def accept_probabilities(
    target: torch.Tensor,
    draft_logits: torch.Tensor,
    tokens: torch.Tensor,
    verifier: Verifier = "position_keyed",
    temperature: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (accept, reach), both `[N]`, for rows of one depth.

    target        the engine's distribution of the predicted token, `[N, V]` (`target_probabilities`)
    draft_logits  the drafter's, `[N, V]`; under rejection the draft is drawn from their softmax at `temperature`,
                  otherwise it is their argmax
    tokens        the token that the text holds at this place, `[N]`

    `accept` is the probability that a draft of this depth is accepted, over all tokens that the target could sample.
    `reach` is the same given the token that the target did sample. It decides whether the round continues with the next
    depth. Both have the same mean; `accept` varies less. Raises ValueError for an unknown verifier.
    """
    if verifier in ("position_keyed", "target_only"):
        best = draft_logits.argmax(-1)
        return target.gather(-1, best[:, None])[:, 0], (best == tokens).to(target.dtype)
    if verifier != "rejection":
        raise ValueError(f"verifier={verifier!r}; known: position_keyed, target_only, rejection")
    q = target_probabilities(draft_logits, temperature)
    p_token, q_token = (x.gather(-1, tokens[:, None])[:, 0] for x in (target, q))
    reach = (q_token / p_token.clamp_min(torch.finfo(p_token.dtype).tiny)).clamp(max=1.0)
    return torch.minimum(target, q).sum(-1), reach


def of_rows(
    rows: Mapping[str, torch.Tensor], depth: int, verifier: Verifier, *, sampled: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (accept, reach), `[T, depth]`, from `Student.kept_rows` of a training step, `[depth * T]`, depth by depth.

    sampled  the rollout draws from the policy's softmax at the training temperature, unfiltered. Otherwise (greedy,
             top-p, top-k) this function does not know the distribution, and `accept` is `reach`

    Raises ValueError for rejection without a teacher's unfiltered distribution.
    """
    if verifier == "rejection":
        if not sampled or "overlap" not in rows:
            raise ValueError("verifier=rejection: acceptance can be predicted from an unfiltered teacher only")
        accept = rows["overlap"]
        reach = rows["label_ratio"].clamp(max=1.0)
    else:
        reach = rows["match"]
        accept = rows["argmax_prob"] if sampled and "argmax_prob" in rows else reach
    return accept.view(depth, -1).T, reach.view(depth, -1).T


def deepen(table: torch.Tensor, depth: int) -> torch.Tensor:
    """Extend `[T, D]` to `[T, depth]`: a depth beyond D takes the values of depth D at later positions.

    Row t at depth D + j and row t + j at depth D predict the same token. The rule holds for accept, reach and mask: row
    t is within its response at depth D + j if row t + j is within it at depth D.
    """
    columns = list(table.unbind(1))
    while len(columns) < depth:
        last = columns[-1]
        columns.append(torch.cat([last[1:], torch.zeros_like(last[:1])]))
    return torch.stack(columns[:depth], 1)


def walk(accept: torch.Tensor, reach: torch.Tensor, mask: torch.Tensor, steps: Sequence[int]) -> Prediction:
    """Follow the rounds of each sequence at every step count; accept, reach and mask are `[T, D]`.

    `mask[t, d]` is 1 where depth d + 1 at t predicts a generated token (`drafter_targets`). Consecutive rows with a
    mask are one response, or one turn of it; the first of them starts a round. Drafts past its end are not counted.
    Raises ValueError for shapes that differ and for steps outside 1..D.
    """
    depth = accept.shape[1]
    if not (accept.shape == reach.shape == mask.shape):
        raise ValueError(f"accept {list(accept.shape)}, reach {list(reach.shape)} and mask {list(mask.shape)} differ")
    if not steps or min(steps) < 1 or max(steps) > depth:
        raise ValueError(f"steps={list(steps)} must lie between 1 and the {depth} depths of `accept`")
    valid = mask.detach().cpu().numpy() != 0
    alpha = np.where(valid, accept.detach().double().cpu().numpy(), 0.0)
    carried = np.cumprod(np.where(valid, reach.detach().double().cpu().numpy(), 0.0), axis=1)
    carried = np.concatenate([np.ones((len(carried), 1)), carried], axis=1)  # [T, D + 1]: depth d reached from t
    starts = _round_starts(valid[:, 0], carried, steps)
    weight = starts[:, :, None] * (carried[:, :-1] * valid)[:, None, :]  # [T, K, D]
    weight *= np.arange(depth)[None, None, :] < np.array(steps)[None, :, None]
    return Prediction(tuple(steps), weight.sum(0), (weight * alpha[:, None, :]).sum(0))


def _round_starts(inside: np.ndarray, carried: np.ndarray, steps: Sequence[int]) -> np.ndarray:
    """Return the probability that a round starts at each position, `[T, K]`; all responses run in parallel."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], inside, [False]]).astype(np.int8)))
    first = edges[::2]
    length = edges[1::2] - edges[::2]
    order = np.argsort(-length, kind="stable")
    first = first[order]
    length = length[order]
    depth = carried.shape[1] - 1
    ends = np.zeros((len(carried), depth + 1, len(steps)))  # P(a round from t at steps[k] accepts exactly j)
    for k, most in enumerate(steps):
        ends[:, :most, k] = carried[:, :most] - carried[:, 1 : most + 1]
        ends[:, most, k] = carried[:, most]
    starts = np.zeros((len(carried), len(steps)))
    ahead = np.zeros((len(first), depth + 1, len(steps)))  # P(start) at the present position and the next `depth`
    ahead[:, 0] = 1.0
    running = np.searchsorted(-length, -np.arange(1, (length[0] if len(length) else 0) + 1), side="right")
    for offset, n in enumerate(running):
        at = first[:n] + offset
        now = starts[at] = ahead[:n, 0].copy()
        ahead[:n, :-1] = ahead[:n, 1:]
        ahead[:n, -1] = 0.0
        ahead[:n] += now[:, None, :] * ends[at]
    return starts
