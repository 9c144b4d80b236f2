"""Answer a failing weight update with an error, so that it does not end SGLang's scheduler.

After such an error the weights may be partly new. Our routes refuse the request with the error (`check_success` in
`http/bodies.py`) and remember that the update failed (`http/update.py`). SGLang's own routes pass the error on.
`versions.py` registers these hooks.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial, update_wrapper
from typing import Any, cast

from megatron_rlspec.rollout.sglang.scheduler.push_session import MANAGER

# Of the process groups that our trainer makes (`client/transport.py`); `JoinBody` in `schemas.py` requires it.
GROUP_PREFIX = "rlspec-"
GROUP_SECONDS = 120  # for the members of such a group to meet, and for one tensor
# Methods of SGLang's weight updater -> the class in `io_struct` of the message with which they answer.
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
    """Yield hooks for the scheduler process: every exception of these methods becomes an answer.

    methods  keys of `_OUTPUTS`: those that the installed SGLang has
    """
    for method in methods:
        hook = update_wrapper(partial(answer_errors, _OUTPUTS[method]), answer_errors)
        yield f"{MANAGER}.{method}", hook, "AROUND"


def answer_errors(output: str, original: Callable, manager: Any, request: Any) -> Any:
    """Run the original; if it raises, log the traceback and answer with one line. `output`: the answer's class."""
    try:
        with _bounded(request):
            return original(manager, request)
    except Exception as error:
        logger.exception("rlspec: a weight update failed")
        answer = getattr(importlib.import_module("sglang.srt.managers.io_struct"), output)
        first = (str(error).splitlines() or ["no message"])[0]
        message = f"the weight update failed inside the engine: {first[:500]}"
        return answer(success=False, message=message)


@contextmanager
def _bounded(request: Any) -> Iterator[None]:
    """While a group of ours is joined, let its members wait for `GROUP_SECONDS` instead of torch's 30 minutes.

    SGLang joins with torch's default timeout (`default_pg_timeout`), so this global is changed meanwhile. That is safe
    because a scheduler joins groups in one thread. Any other request is left as it is.
    """
    # only the request of `init_weights_update_group` has a `master_port`
    joins = hasattr(request, "master_port")
    if not joins or not request.group_name.startswith(GROUP_PREFIX):
        yield
        return
    module = cast(Any, importlib.import_module("torch.distributed.distributed_c10d"))
    default = module.default_pg_timeout
    module.default_pg_timeout = timedelta(seconds=GROUP_SECONDS)
    try:
        yield
    finally:
        module.default_pg_timeout = default
