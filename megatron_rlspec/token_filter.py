"""Top-k, top-p and min-p, with the result of SGLang's `top_k_top_p_min_p_sampling_from_probs_torch` before it samples.

SGLang sorts every row whole. Here only its `CUT` largest values are sorted. The tokens that stay are the first ones in
descending order, so two numbers describe them: how many stay, and the smallest probability among them. If fewer than
`CUT` stay, the `CUT` largest values give both. The other rows are then sorted whole, `WHOLE_ROWS` at a time, but not
those without limits, in which all tokens stay.
"""

from __future__ import annotations

import torch
from torch import Tensor

CUT = 1024  # tokens; a nucleus seldom holds more
WHOLE_ROWS = 32  # rows that are sorted whole at a time


def filtered(
    probs: Tensor,
    top_ks: Tensor,
    top_ps: Tensor,
    min_ps: Tensor | None,
    max_top_k: int | None = None,
) -> Tensor:
    """Return probs [N, V] with everything outside top-k, top-p and min-p set to 0, in token order, not renormalised.

    top_ks, top_ps, min_ps [N]. Top-p counts the mass before a token over the unfiltered distribution, as SGLang does.
    Of equal probabilities the lower token stays. A row without limits (top_k >= V, top_p >= 1 and min_p <= 0) stays
    whole, whatever rounding makes of its mass.
    `max_top_k`: the largest of `top_ks`, or any number above it; None: unknown. Below `CUT`, and if V is at most `CUT`,
    this call does not wait for the device.
    """
    cut = min(CUT, probs.shape[-1])
    kept, complete = _first_of_order(probs, cut, top_ks, top_ps, min_ps)
    if (
        cut == probs.shape[-1]
        or (max_top_k is not None and max_top_k < cut)
        or bool(complete.all())
    ):
        return kept
    for rows in complete.logical_not().nonzero().view(-1).split(WHOLE_ROWS):
        limits = (top_ks[rows], top_ps[rows], None if min_ps is None else min_ps[rows])
        kept[rows], _ = _first_of_order(probs[rows], probs.shape[-1], *limits)
    return kept


def _first_of_order(
    probs: Tensor,
    cut: int,
    top_ks: Tensor,
    top_ps: Tensor,
    min_ps: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Filter by the `cut` largest values of each row. Also returns [N] whether no token beyond them could stay."""
    vocabulary = probs.shape[-1]
    ordered = probs.topk(cut, dim=-1).values
    top_ks, top_ps = top_ks.view(-1, 1), top_ps.view(-1, 1)
    drop = torch.arange(cut, device=probs.device) >= top_ks
    drop |= (ordered.cumsum(-1) - ordered > top_ps) & (top_ps < 1)
    whole = (top_ks >= vocabulary) & (top_ps >= 1)
    if min_ps is not None:
        drop |= ordered < ordered[:, :1] * min_ps.view(-1, 1)
        whole &= min_ps.view(-1, 1) <= 0
    # Tokens before the first one to drop. The first token never is one: top_k >= 1, top_p >= 0 and min_p <= 1.
    count = (drop.cumsum(-1, dtype=torch.int32) == 0).sum(-1, keepdim=True)
    # Tokens above `least` stay, and the first `ties` of those that equal it. 0.0 and V keep a row whole.
    least = ordered.gather(-1, count - 1).masked_fill_(whole, 0.0)
    ties = (count - (ordered > least).sum(-1, keepdim=True)).masked_fill_(whole, vocabulary)
    equal = probs == least
    keep = (probs > least) | (equal & (equal.cumsum(-1, dtype=torch.int32) <= ties))
    return probs.where(keep, 0.0), (whole | (count < cut)).view(-1)
