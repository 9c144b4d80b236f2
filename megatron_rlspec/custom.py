"""A loss, an advantage, a drafter's loss or a rollout of your own, as `module:function`: what each is given and must
return.

    algorithm.loss       PolicyLoss     in place of the clipped policy-gradient loss
    algorithm.advantage  Advantage      in place of the group-relative advantage
    drafter.loss         DrafterLoss    in place of ce and forward_kl
    rollout.function     Turns          in place of one reply to each prompt

Functions are called with one argument: an object of a class below, or the `Conversation` of `rollout/conversation.py`.
Modules are found from the working directory; `FILE.py:function` names a function, too. `examples/custom_loss/` and
`examples/calculator/` have one of each.

T: packed positions of one micro-batch on this rank; C: rows of one chunk; V: vocabulary; n: samples of one group.
"""

from __future__ import annotations

import functools
import inspect
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from megatron_rlspec.config import AlgorithmConfig, ConfigError
from megatron_rlspec.functions import imported
from megatron_rlspec.host.interruption import Interrupted
from megatron_rlspec.texts import one_line, shown

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from megatron_rlspec.types import Sample


@dataclass(frozen=True)
class PolicyTokens:
    """One micro-batch for the policy's loss. Tensors are `[T]`, aligned to the predicted token.

    All but `sequence_ids` are of floating point, and 0 where `mask` is 0. They are copies: a function may change them.

    logprobs            log-probabilities of the tokens under the policy being trained; carries the gradient
    old_logprobs        the same under the policy before the first update of the step; the engine's own with
                        algorithm.old_logprobs=engine. Without gradient
    behaviour_logprobs  the same as the engine that sampled the tokens reported them. Without gradient
    advantages          of the tokens' samples
    entropy             of the policy at each position, nats; carries a gradient
    mask                1 where a token is trained
    sequence_ids        int64, number of the token's sample within the step; -1: padding
    staleness           steps between the policy that sampled the token and this one; None if rollout.staleness and
                        rollout.partial are 0
    options             the section [algorithm]
    """

    logprobs: Tensor
    old_logprobs: Tensor
    behaviour_logprobs: Tensor
    advantages: Tensor
    entropy: Tensor
    mask: Tensor
    sequence_ids: Tensor
    staleness: Tensor | None
    options: AlgorithmConfig


class PolicyLoss(Protocol):
    """Return the loss of each token, `[T]`, differentiable in `tokens.logprobs`; a lower loss is better.

    Values where `mask` is 0 are set to 0 before the result is checked for finite numbers and averaged. The average is
    that of `algorithm.aggregation`, over all ranks. `kl_coef` and `entropy_coef` are added to the loss; `ratio`,
    `clip_*` and `tis_clip` are not applied.
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
    """Return one finite advantage for each sample, `[n]`, of at most `MOST`; every token of a sample gets it.

    Samples whose reward failed need one, too: `known` is False for them.
    """

    def __call__(self, group: RewardedGroup, /) -> Sequence[float]: ...


@dataclass(frozen=True)
class DrafterRows:
    """Predictions of the drafter beside the policy's own at the same place; one row is one position at one depth.

    draft_logprobs   `[C, V]`, log-probabilities of the drafter at the rollouts' temperature; carries the gradient
    policy_logprobs  `[C, V]`, of the policy at the same temperature, without gradient
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
    """Sample in several turns, by a `rollout.conversation.Conversation`.

    Return None, or the sample's reward in place of `reward.kind`'s.

    Conversations run in threads, so the function must not change state that another call of it reads.
    """

    def __call__(self, conversation: Any, /) -> float | None: ...


class FunctionError(ConfigError):
    """A function of the user's own failed, or returned something that it must not.

    It can fail on one rank alone, for example for one sample. So `cli.run` prints it on every rank, not on rank 0 only.
    """

    every_rank = True


class Unwound(BaseException):
    """Ends a function of the user's from inside a call that it made (`rollout/conversation.py`).

    It is no Exception, so that `except Exception` in the user's code does not catch it.
    """


# Errors that this package raises through the user's code: no mistakes of that code. Signals raise Interrupted.
OURS = (Unwound, Interrupted)
MOST = 2.0**127  # largest absolute value of an advantage: tensors of float32 hold it


def is_function(text: str) -> bool:
    """Return whether an option's value names a function instead of something built in."""
    return ":" in text


def load(option: str, name: str) -> Callable[..., Any]:
    """Import `module:function` or `FILE.py:function`. Raises ConfigError, one line that names `option`.

    The function that is returned raises FunctionError, with file and line, for whatever the user's code raises, the
    SystemExit of `sys.exit` included. `named` reads its attribute `named`.
    """
    try:
        function_of_user = imported(name)
    except OURS:
        raise
    except BaseException as error:  # the module's own code can raise any error
        raise ConfigError(f"{option}={name}: cannot be imported: {_error_line(error)}") from None
    _check_signature(f"{option}={name}", function_of_user)
    code = getattr(inspect.unwrap(function_of_user), "__code__", None)
    place = f" ({code.co_filename}:{code.co_firstlineno})" if code else ""

    @functools.wraps(function_of_user)
    def guarded(argument: Any, /) -> Any:
        try:
            return function_of_user(argument)
        except OURS:
            raise
        except BaseException as error:  # whatever the function's own code raises
            last = traceback.extract_tb(error.__traceback__)[-1]  # the line that raised it
            where = f"{last.filename}:{last.lineno}, in {last.name}"
            raise FunctionError(f"{option}={name}: {_error_line(error)} ({where})") from error

    guarded.named = f"{option}={name}{place}"  # type: ignore[attr-defined]
    return guarded


def _check_signature(option: str, function: Any) -> None:
    """Raise ConfigError unless `function` can be called with one argument."""
    try:
        inspect.signature(function).bind(None)
    except ValueError:  # some built-in callables have none
        return
    except TypeError as error:
        raise ConfigError(f"{option}: {error}; expected a function of one argument") from None


def named(option: str, function: Callable[..., Any]) -> str:
    """Return how the message of an error begins: `OPTION=NAME (FILE:LINE)` for a function that `load` returned.

    FILE:LINE is where the function is defined. Tests and Python callers pass plain functions: the result is `option`.
    """
    return str(getattr(function, "named", option))


def _error_line(error: BaseException) -> str:
    """Return type and text of an error of the user's code in one line. The error's own methods may fail, too."""
    if isinstance(error, SystemExit):
        return (
            f"it would end the process with exit code {shown(error.args[0] if error.args else 0)}"
        )
    return one_line(error)


def checked(option: str, result: Any, like: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the result of the user's loss, with 0 where `mask` is False. Raises FunctionError if it does not fit.

    option  begins the message of the error
    like    log-probabilities that the function was given, `[rows]`. The result must have their shape and device, be of
            floating point, and be differentiable and finite if they are
    mask    `[rows]` bool; None: every row counts
    """
    import torch

    returned = f"{shown(result)}, a {type(result).__name__}"
    fits = False
    if isinstance(result, torch.Tensor):
        dtype = str(result.dtype).removeprefix("torch.")
        returned = f"a tensor {list(result.shape)} of {dtype} on {result.device}"
        same_place = (result.shape, result.device) == (like.shape, like.device)
        fits = same_place and result.is_floating_point()
    if not fits:
        raise FunctionError(
            f"{option}: the function returned {returned}; expected a tensor {list(like.shape)} of floating point on "
            f"{like.device}"
        )
    if like.requires_grad and not result.requires_grad:
        raise FunctionError(
            f"{option}: the function returned a tensor without gradient; expected one that is differentiable in the "
            "log-probabilities that it was given"
        )
    # before the check for finite numbers: a loss may return anything where nothing is trained
    if mask is not None:
        result = result.masked_fill(~mask, 0)
    # If the model's own log-probabilities are not finite, the step is skipped and counted elsewhere: no error here.
    if not bool(result.detach().isfinite().all()) and bool(like.detach().isfinite().all()):
        bad = int(result.detach().isfinite().logical_not().nonzero()[0])
        raise FunctionError(
            f"{option}: the function returned {float(result[bad])} at [{bad}]; expected finite numbers"
        )
    return result


def numbers(option: str, result: Any, count: int) -> np.ndarray:
    """Return `result` as float64 `[count]`. Raises FunctionError unless it is `count` numbers of at most `MOST`."""
    import numpy as np

    try:
        values = np.asarray(result, np.float64)
    except Exception:  # a tensor with a gradient, or no numbers
        values = np.zeros(())
    # NaN fails the comparison, too
    if values.shape != (count,) or not (np.abs(values) <= MOST).all():
        raise FunctionError(
            f"{option}: the function returned {shown(result)}; expected {count} finite numbers"
        )
    return values
