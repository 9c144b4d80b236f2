"""Adapters to the SGLang versions that are supported: 0.5.23, 0.5.15.post1, which slime pins, and 0.5.16 to 0.5.19.

What the versions do differently stands in this file, or is chosen in this file (`hooks`). If only some versions have a
field, other files read it by `getattr`, and name the version. A version later than 0.5.23 is treated like 0.5.23, with
a warning. The tests compare every call of this package, and the names that it replaces or reads, with each version.

To support another version, add an entry to `KNOWN`, and a class below that overrides what differs.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

from packaging.version import Version

from megatron_rlspec.compat.installed import locate, version

logger = logging.getLogger(__name__)
# (name of SGLang's function, our function, "BEFORE", "AFTER", "AROUND" or "REPLACE") for SGLang's `HookRegistry`;
# `http/plugin.py` registers them.
Hook = tuple[str, Callable, str]


class Sglang0523:
    """Adapts to 0.5.23, and serves for later versions, too.

    The classes below override what differs in older versions. Their members without a docstring mean the same as here.
    Schedulers call `answer` to `forward` and `stamp`; the web process calls `begin_push`, `end_push`, `tensors`,
    `broadcast` and, with a manager, `weight_version`. `rlspec serve` calls `without_eagle3` and `prepare_cpu` before it
    starts SGLang, and `http/plugin.py` calls `hooks` in each of SGLang's processes.
    """

    spans = True  # whether an answer names the version of the weights under which each of its tokens was sampled
    # options of the server on a machine without a GPU
    cpu_arguments: tuple[str, ...] = ("--attention-backend=intel_amx",)
    # Huge pages: otherwise receiving a bucket of weights takes four times as long as copying it.
    cpu_environment: Mapping[str, str] = {"THP_MEM_ALLOC_ENABLE": "1"}
    # whether a round can verify another number of drafts of each request (`ragged.py`)
    ragged = True
    opens_handles = True  # whether schedulers can open a bucket in the trainer's GPU memory (`bucket_memory.py`)
    # SGLang's function that computes the log-probs of a round's accepted tokens; `verifier.py` wraps it
    spec_logprobs = "sglang.srt.speculative.eagle_worker_common.compute_spec_logprobs"

    def answer(self, scheduler: Any, output: Any, request: Any) -> None:
        """Send a scheduler's answer to a control request."""
        scheduler.send_control_output(output, request)

    def softmax(self, logits: Any) -> Any:
        """Compute probabilities [N, V] bit for bit as SGLang's plain decoding does."""
        from sglang.kernels.ops.sampling import softmax

        return softmax(logits)

    def captured(self, controller: Any, steps: int) -> list[int] | None:
        """Return the batch sizes at which an `AdaptiveController` has graphs of this step count; None: no graphs."""
        return controller.params.cuda_graph_bs_for_step(steps)

    def known_top_k(self, info: Any) -> dict[str, Any]:
        """Return the sampler's keyword argument with the largest top_k of a `SamplingBatchInfo`, if it has one."""
        return {"max_top_k": info.max_top_k}

    def weight_version(self, manager: Any = None) -> str:
        """Return the version of the weights, in a scheduler's process or in the one of the tokenizer `manager`.

        `server_args` cannot answer, because they keep the version that the engine started with. Older SGLang versions
        raise NotImplementedError in a scheduler's process.

        manager  SGLang's TokenizerManager in the web process; None: called in a scheduler's process
        """
        from sglang.srt.runtime_context import get_serving

        return get_serving().weight_version

    def drafting(self, drafter: Any) -> contextlib.AbstractContextManager:
        """Return the context in which a pass of the worker's `EagleDraftWorker` runs."""
        from sglang.srt.speculative.spec_utils import draft_tp_context

        return draft_tp_context(drafter.parallel_layout)

    def forward(self, worker: Any, batch: Any, capture_hidden_mode: Any) -> Any:
        """Run a pass of the target's worker that also returns hidden states."""
        return worker.forward_batch_generation(batch, capture_hidden_mode=capture_hidden_mode)

    def without_eagle3(self, config: Mapping[str, Any]) -> str:
        """Return why SGLang cannot draft for the target of this config.json with an EAGLE-3 drafter; "" if it can."""
        return without_eagle3(config)

    async def begin_push(self, manager: Any, selector: str) -> tuple[bool, str]:
        """Open a weight update; return success and SGLang's message. Call it in the web process.

        selector  "all", "target" or "draft": the models that the update will change
        """
        from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput

        return await manager.begin_weight_update(BeginWeightUpdateReqInput(selector=selector))

    async def end_push(self, manager: Any) -> tuple[bool, str]:
        """Close the weight update; return success and SGLang's message."""
        from sglang.srt.managers.io_struct import EndWeightUpdateReqInput

        return await manager.end_weight_update(EndWeightUpdateReqInput())

    def stamp(self, scheduler: Any, version: str) -> None:
        """Tell the scheduler the version of its weights, at the end of an update (`control._stamp`)."""
        scheduler.record_weight_version_change(new_version=version)

    def tensors(
        self, selector: str, payloads: list[bytes], load_format: str | None = "flattened_bucket"
    ) -> Any:
        """Return the message that has the ranks load a bucket of weights.

        The cache is not flushed with each bucket, but once at the end of the update (`control._stamp`).

        selector     "all", "target" or "draft": the models that load it
        payloads     one for each tensor-parallel rank
        load_format  "flattened_bucket": SGLang's bucket of the tensors' bytes; None: a message of `bucket_memory.py`
        """
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput

        return UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=payloads,
            load_format=load_format,
            flush_cache=False,
            **self.tensors_for(selector),
        )

    def broadcast(self, selector: str, group: str, names: list, dtypes: list, shapes: list) -> Any:
        """Return the message that has the ranks receive a bucket of weights in one broadcast, and load it.

        selector               as of `tensors`
        group                  name of the process group, which the trainer has made the ranks join
        names, dtypes, shapes  of the tensors in the bucket, in order
        """
        from sglang.srt.managers.io_struct import UpdateWeightsFromDistributedReqInput

        return UpdateWeightsFromDistributedReqInput(
            names=names,
            dtypes=dtypes,
            shapes=shapes,
            group_name=group,
            load_format="flattened_bucket",
            flush_cache=False,
            **self.broadcast_for(selector),
        )

    def tensors_for(self, selector: str) -> dict[str, Any]:
        """Return the fields of a `tensors` message that say which models load it."""
        return {"selector": selector}

    broadcast_for = tensors_for  # the same fields of a `broadcast` message

    def prepare_cpu(self) -> None:
        """Keep SGLang from a CPU backend that cannot speculate, and skip the drafter's waits for a GPU.

        Replaces functions of SGLang and torch in the whole process. Call it before SGLang starts.
        """
        import torch
        from sglang.srt.arg_groups import attention_hook

        attention_hook._attention_backend_platform_fallbacks = lambda view: {}
        torch.cuda.synchronize = lambda device=None: None

    def hooks(self) -> Iterator[Hook]:
        """Yield the hooks of this version, beyond those that all versions have (`http/plugin.py`)."""
        from sglang.srt.managers.io_struct import (
            BeginWeightUpdateReqInput,
            EndWeightUpdateReqInput,
        )

        from megatron_rlspec.rollout.sglang.cpu import products, stand_ins
        from megatron_rlspec.rollout.sglang.scheduler import (
            bucket_memory,
            draft_vocabulary,
            flashinfer_plans,
            protect,
        )
        from megatron_rlspec.rollout.sglang.scheduler.push_session import PushSession

        yield from draft_vocabulary.hooks()
        session = PushSession(BeginWeightUpdateReqInput(selector="all"), EndWeightUpdateReqInput())
        yield from session.hooks()
        yield bucket_memory.WORKER, bucket_memory.read, "AROUND"
        # After the hooks above on the same methods, and so around them: their errors become answers, too.
        yield from protect.scheduler_hooks()
        yield from flashinfer_plans.hooks()
        # On a CPU without SGLang's own kernels.
        if stand_ins.is_replaced("sgl_kernel"):
            yield from products.hooks()


class Sglang0515(Sglang0523):
    """Adapts to 0.5.15.post1.

    This version updates weights without a session. Through a process group it updates the target only; our hook
    `drafter_push.load_twice` adds the drafter.
    """

    spans = False
    # The CPU backend of this version cannot speculate. Its Triton backend can, in Triton's interpreter.
    cpu_arguments = (
        "--attention-backend=triton",
        "--triton-attention-num-kv-splits=1",
        "--disable-overlap-schedule",
    )
    cpu_environment = {**Sglang0523.cpu_environment, "TRITON_INTERPRET": "1"}
    ragged = False
    opens_handles = False
    # the module of a kernel that `prepare_cpu` selects
    cache_locs = "sglang.srt.speculative.triton_ops.cache_locs"
    spec_logprobs = "sglang.srt.speculative.eagle_worker_v2.compute_spec_v2_logprobs"

    def weight_version(self, manager: Any = None) -> str:
        if manager is None:
            raise NotImplementedError(
                "SGLang before 0.5.23 does not tell its schedulers the version of the weights"
            )
        return manager.server_args.weight_version

    def answer(self, scheduler: Any, output: Any, request: Any) -> None:
        scheduler.ipc_channels.send_to_tokenizer.send_output(output, request)

    def softmax(self, logits: Any) -> Any:
        import torch

        return torch.softmax(logits, dim=-1)

    def captured(self, controller: Any, steps: int) -> list[int] | None:
        return None

    def known_top_k(self, info: Any) -> dict[str, Any]:
        return {}

    def drafting(self, drafter: Any) -> contextlib.AbstractContextManager:
        return drafter.draft_tp_context(drafter.draft_runner.tp_group)

    def without_eagle3(self, config: Mapping[str, Any]) -> str:
        return "EAGLE-3 was not run with SGLang before 0.5.23"

    def forward(self, worker: Any, batch: Any, capture_hidden_mode: Any) -> Any:
        batch.capture_hidden_mode = capture_hidden_mode
        return worker.forward_batch_generation(batch)

    async def begin_push(self, manager: Any, selector: str) -> tuple[bool, str]:
        return True, ""

    async def end_push(self, manager: Any) -> tuple[bool, str]:
        return True, ""

    def stamp(self, scheduler: Any, version: str) -> None:
        """Do nothing: its schedulers keep no version."""

    def tensors_for(self, selector: str) -> dict[str, Any]:
        return {"disable_draft_model": selector == "target"}

    def broadcast_for(self, selector: str) -> dict[str, Any]:
        return {}

    def prepare_cpu(self) -> None:
        """Select the Triton form of two kernels that also exist in CUDA, and skip the drafter's waits for a GPU."""
        import torch

        # Two modules take the Triton form of their kernel where they find an XPU (Intel's GPU).
        for name in ("sglang.srt.speculative.eagle_utils", self.cache_locs):
            vars(importlib.import_module(name))["_is_xpu"] = True
        torch.cuda.synchronize = lambda device=None: None
        torch.Tensor.record_stream = lambda tensor, stream: None

    def hooks(self) -> Iterator[Hook]:
        # There is no session, so no `PushSession`, and no draft vocabulary, whose rows are copied when a session ends.
        from megatron_rlspec.rollout.sglang.scheduler import drafter_push, protect
        from megatron_rlspec.rollout.sglang.scheduler.push_session import MANAGER

        yield from protect.scheduler_hooks(
            ("update_weights_from_tensor", "init_weights_update_group")
        )
        yield f"{MANAGER}.update_weights_from_distributed", drafter_push.load_twice, "AROUND"
        yield "sglang.srt.managers.scheduler.Scheduler.flush_cache", _flush_while_paused, "AROUND"
        yield "sglang.srt.layers.sampler.multinomial_with_seed", _draw_finite, "REPLACE"


class Sglang0516(Sglang0515):
    """Adapts to 0.5.16 and 0.5.17."""

    cache_locs = "sglang.kernels.ops.speculative.cache_locs"
    spec_logprobs = "sglang.srt.speculative.eagle_worker_common.compute_spec_v2_logprobs"
    forward = Sglang0523.forward


class Sglang0518(Sglang0516):
    """Adapts to 0.5.18 and 0.5.19."""

    spec_logprobs = Sglang0523.spec_logprobs


# SGLang's classes of targets that were tested to give an EAGLE-3 drafter the hidden states of their layers. MiMo's
# class gives none.
# `tools/families_page.py` prints them.
EAGLE3_TARGETS = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


def without_eagle3(config: Mapping[str, Any]) -> str:
    """Return why SGLang cannot draft with EAGLE-3 for the target of this config.json, in one sentence; "" if it can."""
    name = (config.get("architectures") or [""])[0]
    if name in EAGLE3_TARGETS:
        return ""
    return f"SGLang's {name} is not known to give an EAGLE-3 drafter its states; expected {', '.join(EAGLE3_TARGETS)}"


def _draw_finite(logprobs: Any, seed: Any, positions: Any) -> Any:
    """Replace `multinomial_with_seed`: draw columns [B, 1] by the same noise, but never by infinite noise.

    The noise of 0.5.15.post1 is infinite for one hash of 2³², which samples that token whatever its probability is.
    With 152,000 tokens that happens once in 28,000 draws. 0.5.23 clamps the noise as we do.
    """
    from megatron_rlspec.noise import draw  # imports torch

    return draw(logprobs, seed, positions)[:, None]


def _flush_while_paused(original: Callable, scheduler: Any, *args: Any, **kwargs: Any) -> bool:
    """Wrap `flush_cache`: flush the cache of a paused engine although requests wait. SGLang's own would not flush.

    Requests that a pause took off the batch hold no cache. So the waiting queue is hidden during the flush. Returns
    whether the cache was flushed.
    """
    waiting = scheduler.waiting_queue
    if scheduler._engine_paused:
        scheduler.waiting_queue = []
    try:
        return original(scheduler, *args, **kwargs)
    finally:
        scheduler.waiting_queue = waiting


# tested version -> its adapter
KNOWN: dict[str, type[Sglang0523]] = {
    "0.5.15.post1": Sglang0515,
    "0.5.16": Sglang0516,
    "0.5.17": Sglang0516,
    "0.5.18": Sglang0518,
    "0.5.19": Sglang0518,
    "0.5.23": Sglang0523,
}


@cache
def installed() -> Sglang0523:
    """Return the adapter to the installed SGLang. Raises ImportError, in one line, if none fits."""
    installed_version = version("sglang")
    if locate("sglang") is None or not installed_version:
        raise ImportError("SGLang is not installed here: pip install sglang==0.5.23")
    return adapter(installed_version)


@cache  # so that a process warns once
def adapter(sglang_version: str) -> Sglang0523:
    """Return the adapter to a version of SGLang. Raises ImportError, in one line, if none fits.

    `.post` and `.dev` parts do not count.
    """
    release = Version(sglang_version).release
    if release > (0, 5, 23):
        logger.warning(
            "rlspec: SGLang %s is later than 0.5.23, the latest version with which this was tested",
            sglang_version,
        )
        return Sglang0523()
    for tested, adapter_class in KNOWN.items():
        if Version(tested).release == release:
            return adapter_class()
    raise ImportError(
        f"this SGLang is {sglang_version}; expected 0.5.15.post1 to 0.5.19, or 0.5.23 or later"
    )
