"""The rollout function that slime's RolloutManager calls: set the engines' rules, learn, and log acceptance.

Importing this module replaces two functions of slime (at the end of this file): one counts accepted drafts, the other
gives samples their seeds. The module's state below belongs to the one RolloutManager process of a run. slime finds
`generate_rollout` and `log_rollout` by the dotted paths in `plan.FUNCTIONS`.
"""

from __future__ import annotations

import logging
import math
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import requests
from slime.observability import logging_utils
from slime.observability.metric_utils import compute_rollout_step
from slime.rollout import sglang_rollout
from slime.utils.misc import load_function
from slime.utils.types import Sample

from megatron_rlspec.engine import EngineError
from megatron_rlspec.integrations.slime import acceptance, seeds
from megatron_rlspec.integrations.slime import state as slime_state
from megatron_rlspec.integrations.slime.engines import (
    SlimeEngine,
    after_push,
    drafter_test,
    hf_config_of,
)
from megatron_rlspec.integrations.slime.options import Options, rollout_sampling
from megatron_rlspec.integrations.slime.speculation import SlimeDraftRule
from megatron_rlspec.push.canary import CANARY_PROMPTS
from megatron_rlspec.rollout.start import check_served_drafter
from megatron_rlspec.speculation.learning import Learning
from megatron_rlspec.speculation.roofline import Roofline
from megatron_rlspec.types import SpecConfig

logger = logging.getLogger(__name__)
SLIME_ROLLOUT = "slime.rollout.sglang_rollout.generate_rollout"
_speculation: SlimeDraftRule | None = None  # made before the first rollout whose engines answer
# Version of the last full update through the disk that was checked. Only such updates are checked here.
_checked_version = 0
# metrics for the next `log_rollout`, which empties it; a later value of a name replaces an earlier one
_metrics: dict[str, float] = {}
_prompts: list[list[int]] = []  # token ids of the last rollout's first prompts, for canaries


def generate_rollout(
    args: Namespace, rollout_id: int, data_source: Any, evaluation: bool = False
) -> Any:
    """Run the user's rollout or evaluation function, or slime's. Set the engines' rules before, and learn after.

    It is the function of `--rollout-function-path` and `--eval-function-path`; arguments and result are slime's.
    """
    user_functions = Options.from_args(args).user_functions
    function = user_functions.get("--rollout-function-path", SLIME_ROLLOUT)
    if evaluation:
        # as in slime, which evaluates by the rollout function unless a function for evaluations is given
        function = user_functions.get("--eval-function-path", function)
    urls = engine_urls(args)
    before_rollout(args, urls, rollout_id)
    output = load_function(function)(args, rollout_id, data_source, evaluation)
    if not evaluation:
        samples = list(flat(getattr(output, "samples", output)))
        after_rollout(args, urls, samples)
        _prompts[:] = first_prompts(samples, CANARY_PROMPTS)
    elif _speculation is not None:
        _speculation.forget(urls)  # an evaluation's rounds must not count for the next rollout
    return output


def flat(samples: Any) -> Iterator[Sample]:
    """Yield slime's samples from lists of any depth: a rollout's result has groups of samples, or groups of lists."""
    if isinstance(samples, Sample):
        yield samples
        return
    for part in samples:
        yield from flat(part)


def first_prompts(samples: Iterable[Sample], number: int) -> list[list[int]]:
    """Return token ids of the first `number` different prompts that are text only: canaries send no images."""
    prompts: dict[tuple[int, ...], None] = {}
    for sample in samples:
        prompt = sample.tokens[: len(sample.tokens) - sample.response_length]
        if prompt and not sample.multimodal_inputs:
            prompts[tuple(prompt)] = None  # a dictionary keeps the order
        if len(prompts) == number:
            break
    return [list(prompt) for prompt in prompts]


def before_rollout(args: Namespace, urls: Sequence[str], rollout_id: int) -> None:
    """Check what engines hold after an update through the disk; set the engines' rules; run canaries.

    In this order: canaries must not ask engines with wrong weights. Raises HealthError if a target may be wrong.
    """
    global _speculation
    options = Options.from_args(args)
    if urls and args.update_weight_transport == "disk":
        _check_disk_update(args, urls, options)
    if _speculation is None and urls:
        _speculation = make_speculation(args, urls, options)
    if _speculation is not None:
        prediction = slime_state.read_prediction(options.folder, rollout_id)
        _metrics.update(_speculation.before_rollout(urls, prediction))
        _metrics.update(_speculation.canary(urls, _prompts, rollout_sampling(args)))


def _check_disk_update(args: Namespace, urls: Sequence[str], options: Options) -> None:
    """Check every engine against the fingerprints that `push.py` wrote, once a version. Raises HealthError.

    No second push is possible here: the train ranks have finished.
    """
    global _checked_version
    push = slime_state.read_sent(args)
    if push is None or push["version"] == _checked_version:
        return
    health = after_push(
        urls,
        push["sent"],
        push["version"],
        drafter_test(args.hf_checkpoint, options.drafter.path),
    )
    _metrics.update(health)
    _checked_version = push["version"]


def after_rollout(args: Namespace, urls: Sequence[str], samples: Iterable[Sample]) -> None:
    """Learn from this rollout, and save the result for slime's next checkpoint.

    urls  as of `before_rollout`
    """
    if _speculation is None:
        return
    _metrics.update(_speculation.after_rollout(urls, acceptance.of_samples(samples)))
    folder = Options.from_args(args).folder
    slime_state.write_rollouts(folder, _speculation.learning.state())


def make_speculation(
    args: Namespace, urls: Sequence[str], options: Options
) -> SlimeDraftRule | None:
    """Make the run's `SlimeDraftRule`. A resumed run goes on with what it had learnt.

    That is in `rollouts.json`, which the train ranks copy out of slime's checkpoint (`state.hand_on`).
    Returns None if an engine cannot be reached, or if none can switch its draft steps. Raises ConfigError for an engine
    with another EAGLE-3 drafter.
    """
    try:
        engines = {url: SlimeEngine(url).describe() for url in urls}
    except EngineError as error:
        # It is tried again before the next rollout; slime restarts engines itself.
        logger.warning("rlspec: the engines' speculation stays as they were started: %s", error)
        return None
    drafter = options.drafter.path
    if drafter:
        check_served_drafter(engines, args.hf_checkpoint, drafter)
    configs = {
        SpecConfig.from_json(value) for engine in engines.values() for value in engine["configs"]
    }
    if not configs:
        if len(options.candidate_steps) > 1:
            logger.warning(
                "rlspec: draft steps stay as they are: SGLang adapts none here; its log has the reason"
            )
        return None
    config = hf_config_of(args.hf_checkpoint, drafter)
    learning = Learning(
        sorted({config.num_steps for config in configs}),
        Roofline.of_model(config.get("text_config", config)),
    )
    if state := slime_state.read_rollouts(options.folder):
        if lost := learning.restore(state):
            logger.warning("rlspec: %s", lost)
    return SlimeDraftRule(learning, configs)


def engine_urls(args: Namespace) -> list[str]:
    """Return the URLs of the engines behind slime's router, sorted; [] if rollouts are read from a file."""
    router = getattr(args, "sglang_router_ip", None)
    if not router or getattr(args, "load_debug_rollout_data", None):
        return []
    with requests.Session() as session:
        session.trust_env = False  # no proxy lies between the machines of a job
        answer = session.get(f"http://{router}:{args.sglang_router_port}/workers", timeout=60)
    answer.raise_for_status()
    return sorted(worker["url"] for worker in answer.json()["workers"])


def log_rollout(
    rollout_id: int, args: Namespace, samples: Sequence[Sample], extra: Any, seconds: float
) -> bool:
    """Log `_metrics` and the accept length by slime's own logging, then call the user's function.

    slime finds it by `--custom-rollout-log-function-path`; `Options.user_functions` has the function that the user gave
    there.

    seconds  that the rollout took

    Returns what the user's function returns: True keeps slime from logging its own metrics.
    """
    metrics: dict[str, Any] = dict(_metrics)
    delivered = acceptance.of_samples(samples)
    if not math.isnan(delivered):
        metrics["rollout/accept_length"] = delivered
    _metrics.clear()
    if metrics:
        logger.info("rollout %d: %s", rollout_id, metrics)
        metrics["rollout/step"] = compute_rollout_step(args, rollout_id)
        logging_utils.log(args, metrics, step_key="rollout/step")
    user_functions = Options.from_args(args).user_functions
    user_log_function = user_functions.get("--custom-rollout-log-function-path")
    if user_log_function is None:
        return False
    return bool(load_function(user_log_function)(rollout_id, args, samples, extra, seconds))


# slime's manager imports this module, as its rollout function, before the first sample is generated. slime's functions
# in these modules look both names up when they are called, so they call ours from now on. Not idempotent: a reload of
# this module would wrap the wrappers, and count every histogram twice.
Sample.SpecInfo.add = acceptance.with_histogram(Sample.SpecInfo.add)
sglang_rollout.generate_and_rm = seeds.seeded(sglang_rollout.generate_and_rm)
