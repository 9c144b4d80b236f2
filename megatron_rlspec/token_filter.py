"""Top-k, top-p and min-p, with the result of SGLang's `top_k_top_p_min_p_sampling_from_probs_torch` before it samples.

SGLang sorts every row whole. Here only the `CUT` largest values of a row are sorted. The tokens that stay are the first
ones in descending order, so two numbers describe them: how many stay, and the smallest probability among them. If fewer
than `CUT` tokens stay, the `CUT` largest values give both numbers. Rows in which more tokens may stay are then sorted
whole, `WHOLE_ROWS` at a time. A row without limits is not sorted again: all its tokens stay.

The tokens that stay must be those of SGLang, or the embedded engine and SGLang sample different texts.
"""

from __future__ import annotations

import torch
from torch import Tensor

CUT = 1024  # tokens; a nucleus seldom holds more
WHOLE_ROWS = 32  # rows that are sorted whole at a time; bounds the memory


def filtered(
    probs: Tensor,
    top_ks: Tensor,
    top_ps: Tensor,
    min_ps: Tensor | None,
    max_top_k: int | None = None,
) -> Tensor:
    """Return probs [N, V] with everything outside top-k, top-p and min-p set to 0, in token order, not renormalised.

    `probs` itself stays as it is.

    Top-p counts the mass before a token over the unfiltered distribution, as SGLang does. Of equal probabilities the
    token with the lower id stays. A row without limits (top_k >= V, top_p >= 1 and min_p <= 0) stays whole, even where
    its mass is rounded to more than 1.

    top_ks     [N], at least 1; V or more: no limit
    top_ps     [N]; 1: no limit
    min_ps     [N], from 0 to 1; 0: no limit; None: no row has one
    max_top_k  the largest of `top_ks`, or any number above it; None: unknown. If it is below `CUT`, or if V is at most
               `CUT`, this call does not wait for the device
    """
    cut = min(CUT, probs.shape[-1])
    result, exact = _filter_by_largest(probs, cut, top_ks, top_ps, min_ps)
    # `bool` waits for the device, so this condition comes last.
    if cut == probs.shape[-1] or (max_top_k is not None and max_top_k < cut) or bool(exact.all()):
        return result
    for rows in exact.logical_not().nonzero().view(-1).split(WHOLE_ROWS):
        limits = (top_ks[rows], top_ps[rows], None if min_ps is None else min_ps[rows])
        result[rows], _ = _filter_by_largest(probs[rows], probs.shape[-1], *limits)
    return result


def _filter_by_largest(
    probs: Tensor,
    cut: int,
    top_ks: Tensor,
    top_ps: Tensor,
    min_ps: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return `probs [N, V]` filtered by the `cut` largest values of each row, and `[N]` bool: whether that is exact.

    It is exact if no token beyond the `cut` largest could stay. Otherwise the row must be filtered again.
    """
    vocabulary = probs.shape[-1]
    # Only the values: which of equal tokens `topk` takes is not defined. `ties` below decides on them by their ids.
    ordered = probs.topk(cut, dim=-1).values
    top_ks, top_ps = top_ks.view(-1, 1), top_ps.view(-1, 1)
    drop = torch.arange(cut, device=probs.device) >= top_ks
    # The mass before a token, written as SGLang writes it, so that both round alike.
    drop |= (ordered.cumsum(-1) - ordered > top_ps) & (top_ps < 1)
    unlimited = (top_ks >= vocabulary) & (top_ps >= 1)
    if min_ps is not None:
        drop |= ordered < ordered[:, :1] * min_ps.view(-1, 1)
        unlimited &= min_ps.view(-1, 1) <= 0
    # Tokens before the first one to drop. The first token never is one: top_k >= 1, top_p >= 0 and min_p <= 1.
    count = (drop.cumsum(-1, dtype=torch.int32) == 0).sum(-1, keepdim=True)
    # `least` is the smallest probability that stays. Tokens above it stay, and of those that equal it the first `ties`.
    # In a row without limits `least` is 0.0 and `ties` is V, so that every token stays.
    least = ordered.gather(-1, count - 1).masked_fill_(unlimited, 0.0)
    ties = (count - (ordered > least).sum(-1, keepdim=True)).masked_fill_(unlimited, vocabulary)
    equal = probs == least
    stays = (probs > least) | (equal & (equal.cumsum(-1, dtype=torch.int32) <= ties))
    return probs.where(stays, 0.0), (unlimited | (count < cut)).view(-1)
