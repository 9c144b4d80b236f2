"""Set the engines' rules and log acceptance, around slime's rollouts in its RolloutManager.

Acceptance is counted from SGLang's histogram and reported as ratios of sums. Of `meta_info`, slime keeps only what
`Sample.SpecInfo.add` reads, and that reads keys that SGLang no longer sends. The manager imports this module as its
rollout function, before the first sample is drawn.
"""

from __future__ import annotations

import json
import logging
import math
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import requests
from slime.observability import logging_utils
from slime.observability.metric_utils import compute_rollout_step
from slime.rollout import sglang_rollout
from slime.utils.misc import load_function
from slime.utils.types import Sample

from megatron_rlspec.config import ConfigError
from megatron_rlspec.engine import EngineError
from megatron_rlspec.integrations.slime import seeds
from megatron_rlspec.integrations.slime import state as slime_state
from megatron_rlspec.integrations.slime.engines import (
    SlimeEngine,
    after_push,
    described,
    drafter_names,
)
from megatron_rlspec.integrations.slime.speculation import Speculation
from megatron_rlspec.push.detectors import HealthSettings
from megatron_rlspec.rollout.sglang.settings import DRAFTED
from megatron_rlspec.rollout.start import describe_drafter, shown_drafter
from megatron_rlspec.speculation.acceptance import accept_length, delivered, pooled, runs
from megatron_rlspec.speculation.learning import Learning
from megatron_rlspec.speculation.roofline import Roofline
from megatron_rlspec.types import Sampling, SpecConfig

logger = logging.getLogger(__name__)
SLIMES_OWN = "slime.rollout.sglang_rollout.generate_rollout"
_add = Sample.SpecInfo.add
_speculation: Speculation | None = None
_checked_version = 0  # of the full updates through the disk, which are checked here only
_found: dict[str, float] = {}  # since the last log
_prompts: list[list[int]] = []  # of the last rollout, for canaries
CANARY_PROMPTS = 16


def generate_rollout(
    args: Namespace, rollout_id: int, data_source: Any, evaluation: bool = False
) -> Any:
    """Run the user's rollout or evaluation function, or slime's, and set the engines' rules before and after.

    It is the function of `--rollout-function-path` and `--eval-function-path`.
    """
    inner = getattr(args, "rlspec_inner_rollout_path", None) or SLIMES_OWN
    if evaluation:
        inner = getattr(args, "rlspec_inner_eval_path", None) or inner
    urls = engine_urls(args)
    before(args, urls, rollout_id)
    drawn = load_function(inner)(args, rollout_id, data_source, evaluation)
    if evaluation:
        if _speculation is not None:
            _speculation.forget(urls)
    else:
        samples = list(flat(getattr(drawn, "samples", drawn)))
        after(args, urls, samples)
        _prompts[:] = prompts_of(samples, CANARY_PROMPTS)
    return drawn


def flat(samples: Any) -> Iterator[Sample]:
    """Yield slime's samples from lists of any depth."""
    if isinstance(samples, Sample):
        yield samples
    else:
        for part in samples:
            yield from flat(part)


def prompts_of(samples: Iterable[Sample], most: int) -> list[list[int]]:
    """Return token ids of the first `most` different text prompts."""
    found: dict[tuple[int, ...], None] = {}
    for sample in samples:
        prompt = sample.tokens[: len(sample.tokens) - sample.response_length]
        if prompt and not sample.multimodal_inputs:
            found[tuple(prompt)] = None
        if len(found) == most:
            break
    return [list(prompt) for prompt in found]


def before(args: Namespace, urls: Sequence[str], rollout_id: int) -> None:
    """Check what engines hold after a full update through the disk; take training's prediction; run canaries."""
    global _checked_version, _speculation
    if args.update_weight_mode == "full" and args.update_weight_transport == "disk":
        push = slime_state.read_sent(args)
        if push is not None and push["version"] != _checked_version:
            config = json.loads(Path(args.hf_checkpoint, "config.json").read_text())
            health = after_push(
                urls,
                push["sent"],
                push["version"],
                drafter_names(args.hf_checkpoint, _eagle3(args)),
                api_key=_key(args),
                quantised="quantization_config" in config,
            )
            _found.update(health.metrics())
            _checked_version = push["version"]
    if _speculation is None and urls:
        _speculation = speculation(args, urls)
    if _speculation is not None:
        folder = slime_state.folder(args)
        _found.update(_speculation.expect(slime_state.read_prediction(folder, rollout_id)))
        sampling = Sampling(args.rollout_temperature, args.rollout_top_p, args.rollout_top_k)
        _found.update(_speculation.canary(urls, _prompts, sampling))
        _found.update(_speculation.before_rollout(urls))


def after(args: Namespace, urls: Sequence[str], samples: Iterable[Sample]) -> None:
    """Learn from this rollout, set every engine's rule, and save the result for slime's next checkpoint."""
    if _speculation is not None:
        delivered = acceptance(sample.spec_info for sample in samples).get(
            "accept_length", math.nan
        )
        _found.update(_speculation.after_rollout(urls, delivered))
        slime_state.write_rollouts(slime_state.folder(args), _speculation.learning.state())


def speculation(args: Namespace, urls: Sequence[str]) -> Speculation | None:
    """Make the run's `Speculation` from its checkpoint. None if an engine cannot switch or be reached."""
    try:
        engines = {url: SlimeEngine(url, _key(args)).describe() for url in urls}
    except (
        EngineError
    ) as error:  # tried again before the next rollout; slime restarts engines itself
        logger.warning("rlspec: the engines' speculation stays as they were started: %s", error)
        return None
    if drafter := _eagle3(args):
        _check_drafter(drafter, args.hf_checkpoint, engines)
    configs = {SpecConfig(*config) for engine in engines.values() for config in engine["configs"]}
    if not configs:
        if len(getattr(args, "rlspec_candidate_steps", ())) > 1:
            logger.warning(
                "rlspec: draft steps stay as they are: SGLang adapts none here; its log has the reason"
            )
        return None
    config = described(args.hf_checkpoint, _eagle3(args))
    table = getattr(args, "rlspec_cost_table", "")
    steps = sorted({config.num_steps for config in configs})
    learning = Learning(
        steps,
        table,
        Roofline.of_model(config.get("text_config", config)),
        tp=getattr(args, "rollout_num_gpus_per_engine", 1),
        scale_table=True,
    )
    settings = HealthSettings()
    found = Speculation(learning, configs, settings, _key(args))
    if state := slime_state.read_rollouts(slime_state.folder(args)):
        if lost := found.learning.restore(state):
            logger.warning("rlspec: %s", lost)
    return found


def _check_drafter(drafter: str, hf_checkpoint: str, engines: Mapping[str, Any]) -> None:
    """Raise ConfigError for an engine whose drafter reads other layers or drafts from other words: no push can tell."""
    expected = describe_drafter(hf_checkpoint, drafter)
    for url, engine in engines.items():
        if (theirs := engine.get("eagle3", {})) != expected:
            raise ConfigError(
                f"--drafter.path {drafter} is {shown_drafter(expected)}, but the engine at {url} was started with "
                f"{shown_drafter(theirs)}; see --sglang-speculative-draft-model-path"
            )


def engine_urls(args: Namespace) -> list[str]:
    """Return the URLs of the engines behind slime's router; [] if rollouts are read from a file."""
    if not getattr(args, "sglang_router_ip", None) or getattr(
        args, "load_debug_rollout_data", None
    ):
        return []
    with requests.Session() as session:
        session.trust_env = False  # no proxy lies between the machines of a job
        answer = session.get(
            f"http://{args.sglang_router_ip}:{args.sglang_router_port}/workers", timeout=60
        )
    answer.raise_for_status()
    return sorted(worker["url"] for worker in answer.json()["workers"])


def _eagle3(args: Namespace) -> str:
    """Return the directory of the EAGLE-3 drafter; "" if the MTP layer drafts."""
    return getattr(args, "rlspec_path", "")


def _key(args: Namespace) -> str:
    return getattr(args, "sglang_api_key", None) or ""


def log_rollout(
    rollout_id: int, args: Namespace, samples: Sequence[Sample], extra: Any, seconds: float
) -> bool:
    """Log acceptance by slime's own logging, then call the user's function (`--custom-rollout-log-function-path`)."""
    metrics = {
        f"rollout/{name}": value for name, value in acceptance(s.spec_info for s in samples).items()
    } | _found
    if metrics:
        logger.info("rollout %d: %s", rollout_id, metrics)
        step = compute_rollout_step(args, rollout_id)
        logging_utils.log(args, {**metrics, "rollout/step": step}, step_key="rollout/step")
    _found.clear()
    inner = getattr(args, "rlspec_inner_log_path", None)
    return bool(load_function(inner)(rollout_id, args, samples, extra, seconds)) if inner else False


def acceptance(infos: Iterable[Any]) -> dict[str, float]:
    """Compute over all samples: tokens per round, and the acceptance rate at every depth.

    The rate at depth d is the share of rounds that accepted draft d among those that accepted draft d - 1. It is a
    lower bound if engines drafted fewer than d steps in some rounds.
    """
    total = pooled(getattr(info, "histogram", ()) for info in infos).tolist()
    rounds = sum(total)
    if not rounds:
        return {}
    metrics = {"accept_length": accept_length(total), "accept_rounds": float(rounds)}
    for depth in range(1, len(total)):
        reached = sum(total[depth - 1 :])
        metrics[f"accept_depth_{depth}"] = sum(total[depth:]) / reached if reached else 0.0
    return metrics


def add(self: Any, meta_info: Mapping[str, Any]) -> None:
    """Replace `SpecInfo.add`: fill slime's counts from the keys that SGLang sends, and keep the histogram."""
    renamed = dict(meta_info)
    for theirs, ours in (
        ("spec_num_correct_drafts", "spec_accept_token_num"),
        ("spec_num_proposed_drafts", "spec_draft_token_num"),
    ):
        if theirs in renamed:
            renamed.setdefault(ours, renamed[theirs])
    _add(self, meta_info=renamed)
    seen = getattr(self, "histogram", ())
    histogram = meta_info.get("spec_correct_drafts_histogram") or ()
    if DRAFTED in meta_info:  # SGLang's histogram counts drafts past the end of the sample, too
        marks = meta_info[DRAFTED]
        histogram = delivered(sum(histogram), runs(marks), len(marks))
    self.histogram = pooled([seen, histogram]).tolist()


Sample.SpecInfo.add = add
sglang_rollout.generate_and_rm = seeds.seeded(sglang_rollout.generate_and_rm)
