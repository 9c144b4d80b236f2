"""Find out whether the installed SGLang has a known defect.

Each probe runs SGLang's own code on objects that record what is called. It returns one sentence if the defect is there,
None if it is not, and raises if it cannot tell. No engine starts and no weights are needed: once SGLang is imported, a
probe takes milliseconds.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from megatron_rlspec.rollout.sglang.cpu import stand_ins as cpu_stand_ins


class Recorder:
    """Takes the place of a worker: has every attribute, accepts every call, and keeps the dotted path of each call."""

    def __init__(self, name: str = "", calls: list[str] | None = None) -> None:
        self._name = name
        self.calls = [] if calls is None else calls

    def __getattr__(self, name: str) -> Recorder:
        if name.startswith("__"):
            raise AttributeError(name)
        return Recorder(f"{self._name}.{name}".lstrip("."), self.calls)

    def __call__(self, *_: Any, **__: Any) -> Any:
        self.calls.append(self._name)
        return True, "done"

    def __iter__(self) -> Iterator[Any]:
        return iter((True, "done"))


class _Worker(Recorder):
    """A worker that names one runner to update. The runner records into the same list."""

    def weight_update_runners(self) -> list[tuple[str, Any]]:
        return [("", Recorder("runner", self.calls))]


def prepare() -> None:
    """Make SGLang importable on a machine without compiled kernels for it."""
    if not torch.cuda.is_available():
        cpu_stand_ins.install()


def _srt(name: str) -> Any:
    prepare()
    return importlib.import_module(f"sglang.srt.{name}")


def nccl_stale_drafter() -> str | None:
    """Probe whether `update_weights_from_distributed` gives the received tensors to the target only."""
    manager = _srt("managers.scheduler_components.weight_updater").SchedulerWeightUpdaterManager
    target = _Worker()
    drafter = _Worker()
    updater = manager.__new__(manager)
    for name, value in {
        "tp_worker": target,
        "draft_worker": drafter,
        "metrics_collector": None,
        "scheduler": Recorder(),
        "flush_cache": lambda **_: True,
    }.items():
        setattr(updater, name, value)
    if "_session" in inspect.signature(manager).parameters:
        updater._session = _srt("managers.scheduler_components.weight_updater")._WeightUpdateSession(selector="all")
    request = SimpleNamespace(
        names=["w"],
        dtypes=["float32"],
        shapes=[[1]],
        group_name="g",
        load_format=None,
        selector="all",
        flush_cache=False,
        weight_version="1",
    )
    result = updater.update_weights_from_distributed(request)
    if not result.success or not target.calls:
        raise RuntimeError(f"the update itself failed: {result.message}")
    return None if drafter.calls else "update_weights_from_distributed called the target's worker, never the drafter's"


def adaptive_silently_off() -> str | None:
    """Probe whether SGLang goes on with a fixed step count, after a warning, where adaptive speculation cannot run."""
    hook = _srt("arg_groups.speculative_hook")
    asked = SimpleNamespace(speculative_adaptive=True)
    reason = "speculative_eagle_topk=4 (only topk=1 is supported)"
    declared: dict[str, Any] = {}

    def declare(args: Any, _: str, **values: Any) -> None:
        declared.update(values)
        vars(args).update(values)

    with contextlib.ExitStack() as patches:
        target = "sglang.srt.speculative.adaptive_spec_params.adaptive_unsupported_reason"
        patches.enter_context(mock.patch(target, lambda _: reason))
        if hasattr(hook, "declare_resolution"):
            patches.enter_context(mock.patch.object(hook, "declare_resolution", declare))
        patches.enter_context(mock.patch.object(hook.logger, "warning"))
        try:
            hook._maybe_disable_adaptive(asked)
        except ValueError:
            return None
    if asked.speculative_adaptive:
        raise RuntimeError("adaptive speculation stayed on, although SGLang cannot run it")
    return "speculative_adaptive=True with eagle_topk=4 becomes False; the only trace is a warning in the engine's log"


def unsupported_adaptive(server_args: Any) -> str | None:
    """Return SGLang's reason not to run adaptively under these resolved `ServerArgs`, or None if it would."""
    return _srt("speculative.adaptive_spec_params").adaptive_unsupported_reason(server_args)


def accept_metrics(verify: int = 10, correct: int = 10, tokens: int = 20, width: int = 4) -> dict[str, Any]:
    """Compute the speculation part of one request's `meta_info` as SGLang's tokenizer process does.

    The request had `verify` rounds, each of which accepted the same number of drafts, `correct` in all. They yielded
    `tokens` tokens on an engine started with `width` draft tokens per round.
    """
    module = _srt("managers.tokenizer_manager")
    histogram = [0] * (correct // verify) + [verify]
    output = SimpleNamespace(
        spec_verify_ct=[verify],
        spec_num_correct_drafts=[correct],
        completion_tokens=[tokens],
        spec_correct_drafts_histogram=[histogram],
    )
    spec = SimpleNamespace(speculative_num_draft_tokens=width)
    meta: dict[str, Any] = {}
    patch = (
        mock.patch.object(module, "get_spec", lambda: spec) if hasattr(module, "get_spec") else contextlib.nullcontext()
    )
    with patch:
        manager = SimpleNamespace(server_args=spec)
        module.TokenizerManager._calculate_spec_decoding_metrics(manager, meta, output, 0)
    return meta


def qwen3_next_projection(fc: torch.Tensor, embedding: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """Return the input [H] of the Qwen3-Next drafter's block in SGLang: `fc` [H, 2H], `embedding` [H], `hidden` [H]."""
    model = _srt("models.qwen3_next_mtp").Qwen3NextForCausalLMMTP
    drafter = SimpleNamespace(
        quant_config=None,
        pre_fc_norm_embedding=lambda x: x,
        pre_fc_norm_hidden=lambda x: x,
        fc=lambda x: x @ fc.T,
        model=lambda ids, positions, batch, states: states,
        logits_processor=lambda ids, states, head, batch: states,
        lm_head=None,
    )
    spec = SimpleNamespace(hidden_states=hidden[None])
    batch = SimpleNamespace(spec_info=spec, forward_mode=SimpleNamespace(is_idle=lambda: False))
    return model.forward(drafter, None, None, batch, input_embeds=embedding[None])[0]


def accept_rate_width() -> str | None:
    """Probe whether the accept rate divides by the engine's width at its start, not by the drafts proposed."""
    rate = accept_metrics()["spec_accept_rate"]  # ten rounds of one step each, every draft accepted
    return f"10 of 10 drafts accepted by an adaptive engine are reported as a rate of {rate:.2f}" if rate != 1 else None


def cpu_greedy() -> str | None:
    """Probe whether verification on a CPU takes the argmax at every temperature."""
    greedy = getattr(_srt("speculative.eagle_utils"), "_verify_uses_greedy", None)
    if greedy is None:
        return None  # 0.5.15 has no such rule, and no kernels to speculate on a CPU
    known = {"is_all_greedy": False, "is_cpu": True, "is_hip": False, "is_xpu": False, "use_rejection_sampling": False}
    accepted = inspect.signature(greedy).parameters
    return (
        "a sampled batch is verified greedily" if greedy(**{k: v for k, v in known.items() if k in accepted}) else None
    )


PROBES: dict[str, Callable[[], str | None]] = {
    "sglang-nccl-stale-drafter": nccl_stale_drafter,
    "sglang-adaptive-silently-off": adaptive_silently_off,
    "sglang-accept-rate-width": accept_rate_width,
    "sglang-cpu-greedy": cpu_greedy,
}
