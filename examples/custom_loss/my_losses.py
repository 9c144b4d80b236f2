"""Define a loss, an advantage and a drafter's loss of your own. README.md says how to use them.

`megatron_rlspec.custom` documents the fields of their arguments.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from megatron_rlspec.custom import DrafterRows, PolicyTokens, RewardedGroup


def reinforce(tokens: PolicyTokens) -> Tensor:
    """Compute the policy gradient loss without a ratio, -A log p. Returns `[T]`."""
    return -tokens.advantages * tokens.logprobs


def ranks(group: RewardedGroup) -> np.ndarray:
    """Compute advantages in [-1, 1] from the order of the rewards alone. Returns `[n]`; a failed reward gets 0."""
    found = np.zeros(len(group.samples))
    judged = np.flatnonzero(group.known)
    if len(judged) > 1:
        rewards = group.rewards[judged]
        below = (rewards[:, None] > rewards).sum(1)
        above = (rewards[:, None] < rewards).sum(1)
        found[judged] = (below - above) / (len(judged) - 1)
    return found


def mixed(rows: DrafterRows) -> Tensor:
    """Compute half the cross-entropy on the token plus half KL(policy, draft). Returns `[C]`."""
    token = rows.draft_logprobs.gather(1, rows.tokens[:, None])[:, 0]
    divergence = (rows.policy_logprobs.exp() * (rows.policy_logprobs - rows.draft_logprobs)).sum(-1)
    return 0.5 * divergence - 0.5 * token
