"""A loss, an advantage, a drafter's loss or a rollout of your own, as `module:function`: what each is given and must
return.

    algorithm.loss       PolicyLoss     in place of the clipped policy-gradient loss
    algorithm.advantage  Advantage      in place of the group-relative advantage
    drafter.loss         DrafterLoss    in place of ce, forward_kl, reverse_kl and tv
    rollout.function     Turns          in place of one reply to each prompt

Functions are called with one argument, an object of a class below, and are found from the working directory.
`examples/custom_loss/` and `examples/calculator/` have one of each. T: packed positions of one micro-batch on this
rank; C: rows of one chunk; V: vocabulary; n: samples of one group.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from megatron_rlspec.config import AlgorithmConfig, Config, ConfigError

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from megatron_rlspec.rollout.conversation import Conversation
    from megatron_rlspec.types import Sample


@dataclass(frozen=True)
class PolicyTokens:
    """One micro-batch for the policy's loss. Tensors are `[T]`, aligned to the predicted token, 0 where `mask` is 0.

    logprobs            of the tokens under the policy being trained; carries the gradient
    old_logprobs        under the policy at the start of the step (algorithm.old_logprobs)
    behaviour_logprobs  as the engine that drew the tokens reported them; None in supervised batches
    advantages          of the tokens' samples
    entropy             of the policy at each position; carries a gradient
    mask                1 where a token is trained
    sequence_ids        int64, number of the token's sample within the step; -1: padding
    staleness           optimizer steps between the policy that drew the token and this one; None with
                        rollout.staleness=0
    options             the section [algorithm]
    """

    logprobs: Tensor
    old_logprobs: Tensor
    behaviour_logprobs: Tensor | None
    advantages: Tensor
    entropy: Tensor | None
    mask: Tensor
    sequence_ids: Tensor
    staleness: Tensor | None
    options: AlgorithmConfig


class PolicyLoss(Protocol):
    """Return the loss of each token, `[T]`, differentiable in `tokens.logprobs`; a lower loss is better.

    It is averaged as `algorithm.aggregation` says, over all ranks. `kl_coef` and `entropy_coef` are added to it;
    `ratio`, `clip_*`, `dual_clip` and `tis_clip` are not applied.
    """

    def __call__(self, tokens: PolicyTokens, /) -> Tensor: ...


@dataclass(frozen=True)
class RewardedGroup:
    """The samples of one prompt, with their rewards.

    samples  n of them, `megatron_rlspec.types.Sample`: prompt, text, tokens, reward, status
    rewards  `[n]` float64, the penalty for overlong answers included
    known    `[n]` bool, False where the reward failed
    options  the section [algorithm]
    """

    samples: Sequence[Sample]
    rewards: np.ndarray
    known: np.ndarray
    options: AlgorithmConfig


class Advantage(Protocol):
    """Return one finite advantage for each sample, `[n]`; every token of a sample gets it."""

    def __call__(self, group: RewardedGroup, /) -> Sequence[float]: ...


@dataclass(frozen=True)
class DrafterRows:
    """Predictions of the drafter beside the policy's own at the same place; one row is one position at one depth.

    draft_logprobs   `[C, V]`, log-probabilities of the drafter at the rollouts' temperature; carries the gradient
    policy_logprobs  `[C, V]`, of the policy, without gradient
    tokens           `[C]` int64, the tokens that follow in the text
    depths           `[C]` int64, from 1
    """

    draft_logprobs: Tensor
    policy_logprobs: Tensor
    tokens: Tensor
    depths: Tensor


class DrafterLoss(Protocol):
    """Return the loss of each row, `[C]`, differentiable in `rows.draft_logprobs`.

    It is weighted by `drafter.depth_decay` and averaged over the step. Under tensor parallelism every rank computes it
    on the whole vocabulary.
    """

    def __call__(self, rows: DrafterRows, /) -> Tensor: ...


class Turns(Protocol):
    """Draw one sample in several turns. Return None, or the sample's reward in place of `reward.kind`'s.

    Conversations run in threads, so the function must not change state that another call of it reads.
    """

    def __call__(self, conversation: Conversation, /) -> float | None: ...


class FunctionError(ConfigError):
    """A function of the user's own raised an exception. The other ranks may not meet it, so every rank prints it."""

    every_rank = True


def is_function(text: str) -> bool:
    """Whether an option's value names a function instead of something built in."""
    return ":" in text


def load(option: str, name: str) -> Callable[..., Any]:
    """Import `module:function` from the working directory. Raises ConfigError, one line that names `option`.

    The function that is returned raises FunctionError, with file and line, for whatever the user's code raises.
    """
    module, _, function = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), function)
    except Exception as error:  # the module's own code can raise any error
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"{option}={name}: cannot be imported: {type(error).__name__}: {reason}") from None
    if not callable(found) or inspect.iscoroutinefunction(found):
        raise ConfigError(f"{option}={name}: expected a function of one argument, found {type(found).__name__}")
    try:
        inspect.signature(found).bind(None)
    except TypeError as error:
        signature = f"{function}{inspect.signature(found)}"
        raise ConfigError(f"{option}={name}: {signature}: {error}; expected a function of one argument") from None
    except ValueError:  # some built-in callables have no signature
        pass

    @functools.wraps(found)
    def told(rows: Any, /) -> Any:
        try:
            return found(rows)
        except Exception as error:  # whatever the function's own code raises
            place = traceback.extract_tb(error.__traceback__)[-1]
            reason = " ".join(str(error).split())[:300]
            raise FunctionError(
                f"{option}={name}: {type(error).__name__}: {reason} ({place.filename}:{place.lineno}, in {place.name})"
            ) from error

    return told


def check(config: Config) -> None:
    """Import every function that the configuration names. Raises ConfigError."""
    for option, name in (
        ("algorithm.loss", config.algorithm.loss),
        ("algorithm.advantage", config.algorithm.advantage),
        ("drafter.loss", config.drafter.loss),
        ("rollout.function", config.rollout.function),
    ):
        if is_function(name):
            load(option, name)


def checked(option: str, result: Tensor, rows: int) -> Tensor:
    """Return the result of a loss. Raises ConfigError if it is no tensor `[rows]`."""
    shape = list(getattr(result, "shape", ()))
    if shape != [rows]:
        raise ConfigError(
            f"{option}: the function returned {type(result).__name__} {shape}; expected a tensor [{rows}]"
        )
    return result
