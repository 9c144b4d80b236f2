"""Commands to a running scheduler, and the record it keeps of its rounds.

Commands travel as SGLang's `DumperControlReqInput`, the one request whose body is free-form. Each command takes and
returns a JSON object. Under tensor parallelism every rank executes each command, in the scheduler's thread, between two
rounds.

The web process sends the commands: `http/bodies.py` builds the request, and `COMMANDS` in `schemas.py` checks the
arguments of all but `stamp`. A command's parameters have the names of the fields there. docs/http-api.md describes the
answers.

The hooks at the end of the file record each decode round, and mark in each answer which tokens were drafts.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from megatron_rlspec.host.environment import MUST_AGREE
from megatron_rlspec.kernels import chosen
from megatron_rlspec.models.config import DRAFTER
from megatron_rlspec.models.names import name_table
from megatron_rlspec.rollout.sglang import ids
from megatron_rlspec.rollout.sglang.description import in_force
from megatron_rlspec.rollout.sglang.scheduler import (
    aborts,
    coupled,
    decisions,
    draft_vocabulary,
    eagle3,
    prefix_tree,
    shared_times,
    stop_strings,
    versions,
)
from megatron_rlspec.rollout.sglang.scheduler.rounds import rounds
from megatron_rlspec.rollout.sglang.scheduler.served_weights import (
    Deliveries,
    UnnamedError,
    fingerprints,
    models_of,
    parts_of_scheduler,
)
from megatron_rlspec.rollout.sglang.settings import DRAFTED, Settings
from megatron_rlspec.types import OFF, SpecConfig

METHOD = "rlspec"  # tells our requests from SGLang's own
logger = logging.getLogger(__name__)
# Of this process. The keys are those of the answer of `delivered`, in the order of `models_of`.
_deliveries = {"target": Deliveries(), "drafter": Deliveries()}


def hooks(settings: Settings) -> Iterator[tuple[str, Callable, str]]:
    """Yield the hooks of this file, `aborts.py`, `shared_times.py` and `stop_strings.py`, for every SGLang."""
    processor = "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"

    def start(returned: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
        scheduler.rlspec_settings = settings
        # SGLang calls hooks of the kind AFTER in the order of registration, so `draft_vocabulary._after_start` wraps
        # the drafter's loader after this.
        _watch_loaders(scheduler)
        logger.info("rlspec: %s", in_force(_describe(scheduler)))

    yield "sglang.srt.managers.scheduler.Scheduler.handle_dumper_control", _handle, "AROUND"
    yield "sglang.srt.managers.scheduler.Scheduler.__init__", start, "AFTER"
    yield "sglang.srt.managers.scheduler.Scheduler.pause_generation", _after_pause, "AFTER"
    yield (
        "sglang.srt.managers.schedule_batch.Req.update_spec_correct_drafts_histogram",
        _mark_drafts,
        "BEFORE",
    )
    yield f"{processor}.process_batch_result_decode", _after_decode, "AROUND"
    yield f"{processor}.process_batch_result_prefill", _before_prefill, "BEFORE"
    yield from aborts.hooks()
    yield from shared_times.hooks()
    yield from stop_strings.hooks()


def _handle(original: Callable, scheduler: Any, request: Any) -> Any:
    """Wrap SGLang's handler: run a command and send its answer. Other requests go to SGLang.

    Like SGLang's handler it returns None, because the answer has been sent.
    """
    if request.method != METHOD:
        return original(scheduler, request)
    from sglang.srt.managers.io_struct import DumperControlReqOutput

    body = dict(request.body)
    command = body.pop("command", None)
    try:
        result = _COMMANDS[command](scheduler, **body) or {}
        answer = DumperControlReqOutput(success=True, response=[result])
    except Exception as error:  # an exception that leaves this method ends the scheduler
        if not isinstance(error, (ValueError, NotImplementedError)):
            logger.exception("rlspec: %s failed", command)
        answer = DumperControlReqOutput(
            success=False, response=[], error=f"{command}: {_reason(error)}"
        )
    versions.installed().answer(scheduler, answer, request)
    return None


def merge(command: str, answers: list[dict[str, Any]]) -> dict[str, Any]:
    """Merge the answers of an engine's data-parallel ranks into one; called in the web process.

    Rounds are those of all ranks. A tensor counts as delivered if every rank was given the same. For any other command
    the first rank's answer is returned. The other ranks' answers to `progress` and `spec_rule_report` may differ.

    answers  one for each data-parallel rank, at least one
    """
    if command in ("stats", "recent_rounds"):
        return {"rounds": [row for answer in answers for row in answer["rounds"]]}
    if command == "delivered":
        agreed, *others = answers
        for other in others:
            agreed = {model: _agreeing(marks, other[model]) for model, marks in agreed.items()}
        return agreed
    return answers[0]


def _agreeing(marks: dict[str, int], others: dict[str, int]) -> dict[str, int]:
    """Return the fingerprints that are the same in both, by tensor name."""
    return {name: mark for name, mark in marks.items() if others.get(name) == mark}


def _reason(error: Exception) -> str:
    """Return the message of our own errors (ValueError, NotImplementedError); for any other error, one sentence."""
    if isinstance(error, (ValueError, NotImplementedError)):
        return str(error)
    if isinstance(error, (TypeError, LookupError, AttributeError)):
        return "the request does not have the expected shape; see docs/http-api.md"
    return f"internal error ({type(error).__name__}); the engine's log has its traceback"


def _describe(scheduler: Any) -> dict[str, Any]:
    """Report which parts of the plugin are active, with the engine's sizes.

    `EngineDescription` in `megatron_rlspec/engine.py` has the meaning of most keys. `description.in_force` makes a line
    for the log of the answer; `rollout/start.py` and `client/transport.py` check the answer.
    """
    settings = scheduler.rlspec_settings
    worker = scheduler.draft_worker
    adaptive = getattr(worker, "adaptive_controller", None)
    runner = scheduler.tp_worker.model_runner
    return {
        "sglang": importlib.metadata.version("sglang"),
        "verifier": settings.verifier,
        "drafts": "coupled" if coupled.active(settings) else "argmax",
        "sharpness": decisions.decider.sharpness,
        "controller": type(adaptive).__name__ if adaptive is not None else "",
        "configs": [config.to_json() for config in decisions.decider.candidates],
        "speculative": worker is not None,
        "tensor_parallel": scheduler.server_args.tp_size,
        "max_total_tokens": scheduler.max_total_num_tokens,
        "max_running_requests": scheduler.max_running_requests,
        "draft_vocabulary": draft_vocabulary.size(worker),
        "eagle3": eagle3.describe(scheduler),
        "held": decisions.decider.why_held,
        "even": decisions.decider.why_even,
        "unnamed": scheduler.rlspec_unnamed,
        "nccl_cumem_enable": os.environ.get(MUST_AGREE, ""),
        "rule": decisions.decider.name,
        "kernels": _kernels(settings, runner),
        "attention": runner.decode_attention_backend_str,
        "graphs": max(getattr(runner.decode_cuda_graph_runner, "capture_bs", ()), default=0),
        "overlap": scheduler.enable_overlap,
        "device": runner.device,
        "dtype": str(runner.dtype).removeprefix("torch."),
    }


def _kernels(settings: Settings, runner: Any) -> str:
    """Return what samples tokens: "triton" (our kernel), "torch" or "sglang"."""
    device = next(runner.model.parameters()).device
    if settings.verifier != "position_keyed" and device.type != "cpu":
        return "sglang"
    # An empty tensor, because `chosen.sampling` reads only its device and type.
    ours = chosen.sampling(torch.empty(0, device=device))
    return "triton" if ours else "torch"


def _stamp(scheduler: Any, version: str) -> None:
    """End an update of weights: drop the cached prefixes of older weights, and remember the new version.

    The cache is dropped first: a prefix of older weights must never be used under the new version. Raises ValueError
    while requests run, and then the version stays. `http/weight_routes.py` takes requests off the batch before an
    update.
    """
    if not scheduler.flush_cache():
        raise ValueError("requests are running, so the cache of older weights was not dropped")
    versions.installed().stamp(scheduler, version)


def _set_config(scheduler: Any, config: int | str, sharpness: float | None = None) -> None:
    decisions.decider.set_config(SpecConfig.from_json(config), sharpness)


def _set_spec_rule(scheduler: Any, spec_rule: dict[str, Any]) -> None:
    decisions.decider.replace(spec_rule)


def _set_draft_vocabulary(scheduler: Any, words: list[int]) -> None:
    draft_vocabulary.renew(scheduler.draft_worker, words)


def _hold(scheduler: Any, reason: str) -> None:
    decisions.decider.hold(reason)


def _release(scheduler: Any) -> None:
    decisions.decider.why_held = ""


def _spec_rule_report(scheduler: Any) -> dict[str, Any]:
    """Return our rule's report, whose counts begin again; an empty report without a rule or with a fixed choice."""
    decider = decisions.decider
    # `set_config` leaves the rule before it in place.
    rule = decider.rule if decider.fixed is None else None
    return {"report": {} if rule is None else rule.report()}


def _stats(scheduler: Any) -> dict[str, Any]:
    """Return the sums of the rounds since the last call by any client, and forget them."""
    return {"rounds": [asdict(s) for s in rounds.take()]}


def _progress(scheduler: Any) -> dict[str, Any]:
    """Return what the engine decodes, how many requests wait, and the free room of its KV cache in tokens.

    running  rows (request id, prompt tokens, context tokens, tokens per verify round): the fields of `RunningSample`,
             in its order
    waiting  number of requests
    version  of the weights

    Raises NotImplementedError before SGLang 0.5.23, whose schedulers do not know the version.
    """
    running = []
    for request in scheduler.collect_inflight_reqs():
        decodes = request.output_ids and request.kv.holds_kv
        if not decodes or request.finished() or request.is_retracted:
            continue
        prompt = len(request.origin_input_ids)
        context = prompt + len(request.output_ids)
        accept = 1 + request.spec_num_correct_drafts / max(1, request.spec_verify_ct)
        # `ids.outer` is the id that the client gave.
        running.append([ids.outer(request.rid), prompt, context, accept])
    allocator = scheduler.token_to_kv_pool_allocator
    return {
        "running": sorted(running),
        "waiting": len(scheduler.waiting_queue) + (scheduler.chunked_req is not None),
        "free_tokens": allocator.available_size() + scheduler.tree_cache.evictable_size(),
        "version": versions.installed().weight_version(),
    }


def _recent_rounds(scheduler: Any) -> dict[str, Any]:
    """Return the newest rounds since the last call, and forget them. `recent_rounds` in `client/engine.py` reads them.

    Each is [config, batch, context tokens, ms; None if the round was not timed].
    """
    return {"rounds": [[asdict(config), *rest] for config, *rest in rounds.take_recent()]}


def _fingerprints(scheduler: Any) -> dict[str, Any]:
    return {"fingerprints": fingerprints(scheduler, _deliveries["target"], _deliveries["drafter"])}


def _watch_loaders(scheduler: Any) -> None:
    """From now on, record the tensors that the models' loaders are given. Sets two attributes of the scheduler.

    Call it once: each call wraps the loaders again.

    rlspec_unnamed    why pushes are checked by what the loaders were given; "" if by what the engine holds
    rlspec_remembers  whether fingerprints of what the loaders were given are remembered, for the command `delivered`
    """
    unnamed = _why_unnamed(scheduler)
    scheduler.rlspec_unnamed = unnamed
    # Before the loaders are watched: the last wrapper of a loader sees the tensors first, with the names of the push.
    if eagle3.draft_worker(scheduler):
        eagle3.separate_loaders(*models_of(scheduler))
    if unnamed:
        logger.warning(
            "rlspec: pushes are checked by what the models' loaders were given: %s", unnamed
        )
    # What is stored of quantised weights cannot be compared with what was pushed.
    incomparable = unnamed or scheduler.model_config.quantization
    scheduler.rlspec_remembers = scheduler.rlspec_settings.deliveries or bool(incomparable)
    for model, deliveries in zip(models_of(scheduler), _deliveries.values(), strict=True):
        if model is not None:
            deliveries.watch(model, fingerprints=scheduler.rlspec_remembers)


def _why_unnamed(scheduler: Any) -> str:
    """Return why weights cannot be read under their checkpoint's names; "" if they can."""
    try:
        list(parts_of_scheduler(scheduler))
    except UnnamedError as error:
        return str(error)
    return ""


def _delivered(scheduler: Any) -> dict[str, Any]:
    """Return the fingerprints of what the loaders were last given: {"target": {name: mark}, "drafter": ...}."""
    if not scheduler.rlspec_remembers:
        raise ValueError('deliveries are not remembered: set "deliveries" in RLSPEC_SGLANG')
    return {name: deliveries.marks for name, deliveries in _deliveries.items()}


def _shapes(scheduler: Any) -> dict[str, Any]:
    """Return the full tensors' shapes by name, and the names of the drafter's own tensors.

    Where names cannot be read (`unnamed` says why), there are no shapes, and the drafter's names are those of the
    family's name table. Read by `http/weight_routes.py` and `client/engine.py`.
    """
    unnamed = scheduler.rlspec_unnamed
    parts = [] if unnamed else list(parts_of_scheduler(scheduler))
    return {
        "shapes": {part.name: list(part.shape) for part in parts},
        "drafter": _drafter_names(scheduler)
        if unnamed
        else [part.name for part in parts if part.drafter],
        "unnamed": unnamed,
    }


def _drafter_names(scheduler: Any) -> list[str]:
    """Return the drafter's names by the family's table; [] for a family without one."""
    config = scheduler.model_config.hf_config.to_dict()
    if worker := eagle3.draft_worker(scheduler):
        config[DRAFTER] = worker.draft_runner.model_config.hf_config.to_dict()
    try:
        return list(name_table(config).drafter_names)
    except ValueError:
        return []


_COMMANDS: dict[str, Callable[..., dict[str, Any] | None]] = {
    "describe": _describe,
    "set_config": _set_config,
    "set_spec_rule": _set_spec_rule,
    "set_draft_vocabulary": _set_draft_vocabulary,
    "hold": _hold,
    "release": _release,
    "spec_rule_report": _spec_rule_report,
    "stats": _stats,
    "progress": _progress,
    "recent_rounds": _recent_rounds,
    "fingerprints": _fingerprints,
    "delivered": _delivered,
    "shapes": _shapes,
    "stamp": _stamp,  # of `weights/end` only: no route has this name
}


def _after_decode(original: Callable, processor: Any, batch: Any, result: Any) -> Any:
    """Wrap SGLang's processing of a decode round's results, and record the round.

    The overlap scheduler launches a round before it has processed the one before. So requests that ended or were
    retracted meanwhile take part in it once more. SGLang drops their tokens, and the record leaves them out.

    `controller.py` sets `result.rlspec_round`. An engine without our controller has none.
    """
    ran = getattr(result, "rlspec_round", None)
    # Before SGLang processes the results, because its processing puts tokens into the prefix tree.
    if ran is not None:
        prefix_tree.follow(batch.reqs, ran.behind(len(batch.reqs)))
    else:
        config = (
            OFF
            if batch.spec_algorithm.is_none()
            else SpecConfig(result.speculative_num_draft_tokens - 1)
        )
        ran = decisions.DecodeRound(config, sum(r.seqlen for r in batch.reqs), None)
    # Indices of the requests that count. Also before SGLang processes the results, because that ends requests.
    running = []
    for i, request in enumerate(batch.reqs):
        if not (request.finished() or request.is_retracted):
            running.append(i)
    # SGLang's processing waits for the copies to the host, and fills `num_correct_drafts_per_req_cpu`. So the tensors
    # of `ran` (`verified`, `logq`) and the accepted counts must not be read before this call.
    returned = original(processor, batch, result)
    if not running:
        rounds.interrupt()
        return returned
    # None in an engine without speculation
    accepted = result.num_correct_drafts_per_req_cpu or [0] * len(batch.reqs)
    if ran.drafting is not None:  # the drafts of the others were random
        running = sorted({*running} & {*ran.drafting})
    requests = np.array(running, int)  # `int` also if it is empty, since it is an index
    counted = np.array(accepted)[requests]
    verified = ran.drafts(requests)
    if_all = decisions.decider.observe(ran, counted, verified, requests)
    last = all(request.finished() for request in batch.reqs)
    ms = rounds.observe(ran, counted, int(verified.sum()), len(accepted), last, if_all)
    if ms is not None:
        decisions.decider.timed(ran, len(accepted), ms)
    return returned


def _mark_drafts(request: Any, accepted: int) -> None:
    """Append one mark for each output token of a round, 1 for a draft, before SGLang sends the round's tokens.

    A round gives `accepted` drafts and then one token of the target's own. SGLang adds these tokens to `output_ids`
    after this hook. `http/routes.py` and `integrations/slime/acceptance.py` read the marks.
    """
    marks = _marks(request)
    # Earlier tokens without a mark are no drafts.
    marks += [0] * (len(request.output_ids) - len(marks))
    if accepted:
        marks += [1] * accepted
    marks.append(0)


def _before_prefill(processor: Any, batch: Any, result: Any) -> None:
    """Note that the next round has no start time, and that the drafters have read all of these requests' tokens.

    Append the mark 0 for the token that a prefill samples, because it is no draft.
    """
    rounds.interrupt()
    prefix_tree.follow(batch.reqs, ())
    if batch.spec_algorithm.is_none():
        return
    for request in batch.reqs:
        marks = _marks(request)
        # One mark more than there are output tokens: SGLang adds the prefill's token after this hook.
        marks += [0] * (len(request.output_ids) + 1 - len(marks))


def _marks(request: Any) -> list[int]:
    """Return the request's list of marks, which SGLang sends in `meta_info` with its tokens."""
    if request.customized_info is None:
        request.customized_info = {}
    marks: list[int] = request.customized_info.setdefault(DRAFTED, [])
    return marks


def _after_pause(returned: Any, *args: Any, **kwargs: Any) -> None:
    """Note that the time of the pause belongs to no round."""
    rounds.interrupt()
