"""Hooks that answer a failing request with an error, so that it does not end SGLang's processes."""

from __future__ import annotations

import importlib
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial, update_wrapper
from typing import Any, cast

from megatron_rlspec.rollout.sglang.scheduler.push_session import MANAGER
from megatron_rlspec.rollout.sglang.settings import Settings

TOKENIZER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
SAMPLING = "sglang.srt.sampling.sampling_params.SamplingParams"
GROUP_PREFIX = "rlspec-"  # of the process groups that our trainer makes
GROUP_SECONDS = 120  # for its members to meet, and for one tensor
_INTEGERS = ("max_new_tokens", "min_new_tokens", "top_k", "n", "sampling_seed")
_NUMBERS = (
    "temperature",
    "top_p",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
)
# Methods of SGLang's weight updater -> the message with which they answer.
_OUTPUTS = {
    "begin_weight_update": "BeginWeightUpdateReqOutput",
    "end_weight_update": "EndWeightUpdateReqOutput",
    "update_weights_from_tensor": "UpdateWeightsFromTensorReqOutput",
    "update_weights_from_distributed": "UpdateWeightsFromDistributedReqOutput",
    "init_weights_update_group": "InitWeightsUpdateGroupReqOutput",
}
logger = logging.getLogger(__name__)


def scheduler_hooks(
    methods: tuple[str, ...] = tuple(_OUTPUTS),
) -> Iterator[tuple[str, Callable, str]]:
    """Yield hooks for the scheduler process: every exception of these methods becomes an answer."""
    for method in methods:
        yield (
            f"{MANAGER}.{method}",
            update_wrapper(partial(answer_errors, _OUTPUTS[method]), answer_errors),
            "AROUND",
        )


def http_hooks() -> Iterator[tuple[str, Callable, str]]:
    """Yield hooks for the HTTP process: SGLang's own routes refuse values that would end a scheduler."""
    yield f"{TOKENIZER}._validate_one_request", check_token_ids, "BEFORE"
    yield f"{SAMPLING}.verify", check_sampling, "BEFORE"


def answer_errors(output: str, original: Callable, manager: Any, request: Any) -> Any:
    """Run the original; if it raises, log the traceback and answer with one line."""
    try:
        with _bounded(request):
            return original(manager, request)
    except Exception as error:
        logger.exception("rlspec: a weight update failed")
        answer = getattr(importlib.import_module("sglang.srt.managers.io_struct"), output)
        first = (str(error).splitlines() or ["no message"])[0]
        return answer(
            success=False, message=f"the weight update failed inside the engine: {first[:500]}"
        )


@contextmanager
def _bounded(request: Any) -> Iterator[None]:
    """While a group of ours is joined, let its members wait for `GROUP_SECONDS` instead of torch's 30 minutes."""
    if not (hasattr(request, "master_port") and str(request.group_name).startswith(GROUP_PREFIX)):
        yield
        return
    module = cast(Any, importlib.import_module("torch.distributed.distributed_c10d"))
    default = module.default_pg_timeout
    module.default_pg_timeout = timedelta(seconds=GROUP_SECONDS)
    try:
        yield
    finally:
        module.default_pg_timeout = default


def check_token_ids(manager: Any, obj: Any, input_ids: list[int] | None) -> None:
    """Raise ValueError for a token id outside the vocabulary: the embedding lookup would end the scheduler.

    Also for what our drawing of tokens has no room for, see `verifier.py`.
    """
    settings = Settings.from_environment()
    if (
        getattr(obj, "return_sampling_mask", False)
        and settings is not None
        and settings.verifier == "position_keyed"
    ):
        raise ValueError(
            "return_sampling_mask changes how other samples of its batch are drawn; expected an engine without "
            "--verifier position_keyed"
        )
    # images put hashes in the place of ids
    if not input_ids or getattr(obj, "image_data", None) is not None:
        return
    size = manager.model_config.vocab_size
    if not all(type(token) is int for token in input_ids):
        raise ValueError("input_ids must hold integers only")
    if min(input_ids) < 0 or max(input_ids) >= size:
        wrong = next(token for token in input_ids if not 0 <= token < size)
        raise ValueError(f"input_ids holds {wrong}; expected token ids from 0 to {size - 1}")


def check_sampling(params: Any, vocab_size: int) -> None:
    """Raise ValueError for a sampling parameter of the wrong type, which the scheduler could not decode."""
    for name in _INTEGERS:
        value = getattr(params, name, None)
        if value is not None and type(value) is not int:
            raise ValueError(f"{name} is {str(value)[:60]}; expected an integer")
    for name in _NUMBERS:
        value = getattr(params, name, None)
        if value is not None and (type(value) not in (int, float) or not math.isfinite(value)):
            raise ValueError(f"{name} is {str(value)[:60]}; expected a finite number")
