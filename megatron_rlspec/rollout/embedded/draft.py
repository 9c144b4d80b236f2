"""Choose drafts from the drafter's logits. A round verifies a chain of them for each sample.

B: samples; k: drafts of a sample; V: columns of the drafter's logits, which can be fewer than the vocabulary has tokens
(`Decoder.draft_ids`). Functions return columns of the logits; `RoundRunner._chain`, their only caller, maps columns to
token ids and runs the drafter itself.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_rlspec.noise import draw
from megatron_rlspec.rollout.embedded import verify
from megatron_rlspec.rollout.embedded.verify import Settings
from megatron_rlspec.types import SHARPNESS


class Chains(NamedTuple):
    """What a round verifies of B samples. k is the largest number of `drafts`.

    tokens  [B, 1 + k] int64: the pending token, then drafts
    drafts  [B] int64, how many of a row's drafts are verified, from 0 to k; the row's later drafts are padding
    logq    [B, drafts made] float32, the drafter's log-probability of each draft, also of those that no row verifies:
            so it can have more than k columns. None: no rule chose which drafts are verified, so all are
    """

    tokens: np.ndarray
    drafts: np.ndarray
    logq: np.ndarray | None = None

    @property
    def valid(self) -> np.ndarray:
        """Return the mask [B, 1 + k] of the tokens that the target runs on: the pending one and `drafts` drafts."""
        return np.arange(self.tokens.shape[1]) <= self.drafts[:, None]


def likeliest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Draft the likeliest columns of `logits [B, V]`. Returns (log q at temperature 1, columns), [B] each."""
    column = logits.argmax(-1)
    # one column of the log-softmax, without the others
    score = logits.gather(-1, column[:, None])[:, 0]
    return score - logits.logsumexp(-1), column


def coupled(
    logits: Tensor,
    settings: Settings,
    seeds: Tensor,
    keys: Tensor,
    words: Tensor | None = None,
    sharpness: float = SHARPNESS[0],
) -> tuple[Tensor, Tensor]:
    """Draft, for each sample, the column of `logits [B, V]` with the largest s · log q + noise.

    q is the drafter's distribution. The noise is the noise with which the verifier will sample, so draft and sample
    agree more often. Temperature, top-k, top-p and min-p apply to q as `verify.sample` will apply them to the target's
    p. At temperature 0 the likeliest column is drafted.

    settings   how the B samples are sampled
    seeds      [B], of the samples
    keys       [B], the positions before the drafts; `RoundRunner._verify` must use the same keys
    words      [V], the token ids of the columns, -1 for a column whose logits are -inf; None: column i is token i.
               The noise is keyed by token ids, which the verifier uses, and not by columns
    sharpness  the factor s on log q (`types.SHARPNESS`)

    Returns (log q, columns), [B] each. This log q is at the request's temperature, before filters and sharpness: the
    rule estimates from it how likely the draft is accepted.
    """
    logq = verify.logprobs(logits, settings.temperature)
    # filtered first: top-p sums q, and not the sharpened q
    sharp = verify.filtered(logq, settings) * sharpness
    drawn = draw(sharp, seeds, keys, words)
    column = torch.where(settings.temperature == 0, logq.argmax(-1), drawn)
    return logq.gather(1, column[:, None])[:, 0], column
