"""Everything in which the SGLang versions that we run in differ: 0.5.15.post1 (the one slime pins) and 0.5.23.

A version is told by the names it has, read from its source (`CONTRACTS`), so a later one that keeps the names of
a known one is taken for it; one that keeps neither's is refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

from megatron_rlspec import contracts

Hook = tuple[str, Callable, str]

# What `rlspec serve` and the plugin replace, call, and read of SGLang's objects beyond the calls that stand in their
# source: of every version, then of each.
_SPECULATIVE = "sglang.srt.speculative"
_MANAGERS = "sglang.srt.managers"
_EVERY: dict[str, tuple[str, ...]] = {
    "sglang.srt.plugins.load_plugins": (),
    "sglang.srt.plugins.hook_registry.HookRegistry.register": ("target", "hook", "hook_type"),
    "sglang.srt.entrypoints.engine._set_envs_and_config": ("server_args",),
    "sglang.srt.entrypoints.http_server.app": (),
    "sglang.srt.entrypoints.http_server._global_state": (),
    "sglang.srt.models.registry.ModelRegistry": (),
    "sglang.srt.runtime_context.get_parallel": (),
    f"{_SPECULATIVE}.adaptive_runtime_state.AdaptiveController": ("worker",),
    f"{_SPECULATIVE}.adaptive_runtime_state.AdaptiveController.candidate_steps": (),
    f"{_SPECULATIVE}.adaptive_runtime_state.AdaptiveController.activate_step_by_batch": ("batch_size",),
    f"{_SPECULATIVE}.adaptive_runtime_state.AdaptiveController.on_verify_complete": (
        "num_correct_drafts_per_req",
        "batch_size",
    ),
    f"{_SPECULATIVE}.adaptive_runtime_state.AdaptiveController._activate": ("speculative_num_steps",),
    f"{_SPECULATIVE}.eagle_worker_v2.speculative_moe_backend_context": (),
    f"{_SPECULATIVE}.eagle_worker_v2.speculative_moe_a2a_backend_context": (),
    f"{_SPECULATIVE}.eagle_worker_v2.EAGLEWorkerV2.forward_batch_generation": ("batch", "on_publish"),
    f"{_SPECULATIVE}.eagle_worker_v2.EAGLEWorkerV2._stub_skipped_draft_extend": ("batch", "batch_output"),
    f"{_SPECULATIVE}.eagle_worker_v2.EAGLEWorkerV2.draft_worker": (),
    f"{_SPECULATIVE}.eagle_worker_v2.EAGLEWorkerV2.target_worker": (),
    f"{_SPECULATIVE}.eagle_worker_v2.EAGLEWorkerV2.speculative_num_steps": (),
    f"{_SPECULATIVE}.eagle_worker_v2.EAGLEWorkerV2.adaptive_controller": (),
    f"{_SPECULATIVE}.eagle_worker_v2.EagleDraftWorker.draft_runner": (),
    f"{_SPECULATIVE}.eagle_worker_v2.EagleDraftWorker._draft_extend_for_decode": ("batch", "batch_result"),
    f"{_SPECULATIVE}.eagle_worker_v2.EagleDraftWorker._draft_extend_for_prefill": (
        "batch",
        "target_hidden_states",
        "next_token_ids",
    ),
    f"{_SPECULATIVE}.eagle_info.EagleDraftInput": ("topk_p", "topk_index", "hidden_states", "bonus_tokens"),
    f"{_SPECULATIVE}.eagle_info.EagleVerifyInput": ("positions", "draft_token_num"),
    f"{_SPECULATIVE}.eagle_utils.eagle_sample": ("verify_input", "batch", "logits_output"),
    f"{_SPECULATIVE}.eagle_utils.verify_tree_greedy_func": ("candidates", "target_predict"),
    "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch": ("batch", "vocab_size"),
    "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo": (
        "temperatures",
        "top_ps",
        "top_ks",
        "min_ps",
        "is_all_greedy",
        "need_top_p_sampling",
        "need_top_k_sampling",
        "need_min_p_sampling",
        "sampling_seed",
    ),
    "sglang.srt.layers.sampler.top_k_top_p_min_p_sampling_from_probs_torch": (
        "probs",
        "top_ks",
        "top_ps",
        "min_ps",
        "need_min_p_sampling",
        "sampling_seed",
        "positions",
    ),
    "sglang.srt.layers.sampler.sampling_from_probs_torch": ("probs", "sampling_seed", "positions"),
    f"{_MANAGERS}.scheduler.Scheduler.handle_dumper_control": ("recv_req",),
    f"{_MANAGERS}.scheduler.Scheduler.pause_generation": ("recv_req",),
    f"{_MANAGERS}.schedule_batch.Req.seqlen": (),
    f"{_MANAGERS}.schedule_batch.Req.output_ids": (),
    f"{_MANAGERS}.schedule_batch.Req.customized_info": (),
    f"{_MANAGERS}.schedule_batch.Req.update_spec_correct_drafts_histogram": ("num_correct_drafts",),
    f"{_MANAGERS}.schedule_batch.ScheduleBatch": (
        "reqs",
        "model_config",
        "req_to_token_pool",
        "spec_algorithm",
        "forward_mode",
        "seq_lens",
        "seq_lens_cpu",
        "seq_lens_sum",
        "orig_seq_lens",
        "req_pool_indices",
        "input_ids",
        "out_cache_loc",
        "sampling_info",
        "spec_info",
        "has_grammar",
        "hisparse_coordinator",
        "mamba_track_indices",
        "multimodal_inputs",
        "return_logprob",
        "top_logprobs_nums",
        "token_ids_logprobs",
        "is_extend_in_batch",
        "prefix_lens",
        "extend_lens",
        "extend_num_tokens",
        "extend_logprob_start_lens",
    ),
    f"{_MANAGERS}.utils.GenerationBatchResult": (
        "logits_output",
        "next_token_ids",
        "num_correct_drafts_per_req_cpu",
        "speculative_num_draft_tokens",
        "accept_lens",
        "new_seq_lens",
        "next_draft_input",
    ),
    f"{_MANAGERS}.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
    ".process_batch_result_decode": ("batch", "result"),
    f"{_MANAGERS}.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
    ".process_batch_result_prefill": ("batch", "result"),
    f"{_MANAGERS}.tokenizer_manager.TokenizerManager.generate_request": ("obj", "request"),
    f"{_MANAGERS}.tokenizer_manager.TokenizerManager._validate_one_request": ("obj", "input_ids"),
    "sglang.srt.sampling.sampling_params.SamplingParams.verify": ("vocab_size",),
    "sglang.srt.server_args.PortArgs.init_new": ("server_args",),
    f"{_MANAGERS}.scheduler_components.weight_updater.SchedulerWeightUpdaterManager.update_weights_from_tensor": (
        "recv_req",
    ),
    f"{_MANAGERS}.scheduler_components.weight_updater.SchedulerWeightUpdaterManager.init_weights_update_group": (
        "recv_req",
    ),
    f"{_MANAGERS}.tokenizer_manager.TokenizerManager.abort_request": ("rid", "abort_all"),
    f"{_MANAGERS}.tokenizer_manager.TokenizerManager.pause_generation": ("obj",),
    f"{_MANAGERS}.tokenizer_manager.TokenizerManager.continue_generation": ("obj",),
    f"{_MANAGERS}.tokenizer_manager.TokenizerManager.dumper_control": ("obj",),
    f"{_MANAGERS}.tokenizer_manager.TokenizerManager.init_weights_update_group": ("obj", "request"),
    f"{_MANAGERS}.tokenizer_manager.TokenizerManager.update_weights_from_tensor": ("obj", "request"),
    f"{_MANAGERS}.tokenizer_manager.TokenizerManager.update_weights_from_distributed": ("obj", "request"),
}
CONTRACTS: dict[str, dict[str, tuple[str, ...]]] = {
    "0.5.23": _EVERY
    | {
        "sglang.srt.arg_groups.attention_hook._attention_backend_platform_fallbacks": (),
        "sglang.srt.runtime_context.get_spec": (),
        f"{_SPECULATIVE}.eagle_worker_v2.EagleDraftWorker.parallel_layout": (),
        f"{_MANAGERS}.scheduler.Scheduler.send_control_output": ("output", "recv_req"),
        f"{_MANAGERS}.tp_worker.TpModelWorker.forward_batch_generation": ("batch", "capture_hidden_mode"),
        f"{_MANAGERS}.tokenizer_manager.TokenizerManager.begin_weight_update": ("obj",),
        f"{_MANAGERS}.tokenizer_manager.TokenizerManager.end_weight_update": ("obj",),
        f"{_MANAGERS}.scheduler.Scheduler.continue_generation": ("recv_req",),
        f"{_MANAGERS}.scheduler.Scheduler.weight_updater": (),
        f"{_MANAGERS}.scheduler_components.weight_updater.SchedulerWeightUpdaterManager._session": (),
        **{
            f"{_MANAGERS}.scheduler_components.weight_updater.SchedulerWeightUpdaterManager.{name}": ("recv_req",)
            for name in (
                "begin_weight_update",
                "end_weight_update",
                "update_weights_from_distributed",
                "update_weights_from_tensor",
            )
        },
    },
    "0.5.15.post1": _EVERY
    | {
        "sglang.srt.server_args.ServerArgs.speculative_use_rejection_sampling": (),
        f"{_SPECULATIVE}.eagle_worker_v2.EAGLEWorkerV2.server_args": (),
        f"{_SPECULATIVE}.eagle_worker_v2.EagleDraftWorker.draft_tp_context": (),
        f"{_SPECULATIVE}.eagle_utils._is_xpu": (),
        f"{_MANAGERS}.scheduler.Scheduler.ipc_channels": (),
        f"{_MANAGERS}.scheduler.Scheduler.flush_cache": (),
        f"{_MANAGERS}.scheduler.Scheduler.waiting_queue": (),
        f"{_MANAGERS}.scheduler.Scheduler._engine_paused": (),
        f"{_MANAGERS}.schedule_batch.ScheduleBatch.capture_hidden_mode": (),
        f"{_MANAGERS}.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
        ".update_weights_from_distributed": ("recv_req",),
    },
}


class Sglang0523:
    """0.5.23, and what keeps its names."""

    spans = True  # an answer tells under which weights each of its tokens was drawn
    cpu_arguments = ("--attention-backend=intel_amx",)
    cpu_environment: Mapping[str, str] = {}

    def answer(self, scheduler: Any, output: Any, request: Any) -> None:
        """Send a scheduler's answer to a control request."""
        scheduler.send_control_output(output, request)

    def softmax(self, logits: Any) -> Any:
        """Compute probabilities as plain decoding does."""
        from sglang.kernels.ops.sampling import softmax

        return softmax(logits)

    def tensor_group(self) -> Any:
        """The tensor parallel group: `world_size`, `broadcast`."""
        from sglang.srt.runtime_context import get_parallel

        return get_parallel().tp_group

    def drafting(self, drafter: Any) -> contextlib.AbstractContextManager:
        """Return the context in which a pass of the worker's `EagleDraftWorker` runs."""
        from sglang.srt.speculative.spec_utils import draft_tp_context

        return draft_tp_context(drafter.parallel_layout)

    def samples_drafts(self, worker: Any) -> bool:
        """Whether the `EAGLEWorkerV2` draws its drafts, and verifies them by rejection sampling."""
        from sglang.srt.runtime_context import get_spec

        return get_spec().speculative_use_rejection_sampling

    def forward(self, worker: Any, batch: Any, capture_hidden_mode: Any) -> Any:
        """Run a pass of the target's worker that keeps hidden states."""
        return worker.forward_batch_generation(batch, capture_hidden_mode=capture_hidden_mode)

    async def begin_push(self, manager: Any, selector: str) -> tuple[bool, str]:
        from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput

        return await manager.begin_weight_update(BeginWeightUpdateReqInput(selector=selector))

    async def end_push(self, manager: Any) -> tuple[bool, str]:
        from sglang.srt.managers.io_struct import EndWeightUpdateReqInput

        return await manager.end_weight_update(EndWeightUpdateReqInput())

    def tensors(self, selector: str, version: str, payloads: list[bytes]) -> Any:
        """A bucket of weights as a message; the last one bears a version, and flushes the cache."""
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput

        return UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=payloads,
            load_format="flattened_bucket",
            flush_cache=bool(version),
            weight_version=version or None,
            selector=selector,
        )

    def broadcast(self, selector: str, version: str, group: str, names: list, dtypes: list, shapes: list) -> Any:
        """As `tensors`, received through a process group."""
        from sglang.srt.managers.io_struct import UpdateWeightsFromDistributedReqInput

        return UpdateWeightsFromDistributedReqInput(
            names=names,
            dtypes=dtypes,
            shapes=shapes,
            group_name=group,
            flush_cache=bool(version),
            weight_version=version or None,
            selector=selector,
        )

    def prepare_cpu(self) -> None:
        """Keep SGLang from a CPU backend that cannot speculate, and skip the drafter's waits for a GPU."""
        import torch
        from sglang.srt.arg_groups import attention_hook

        attention_hook._attention_backend_platform_fallbacks = lambda view: {}
        torch.cuda.synchronize = lambda device=None: None

    def hooks(self) -> Iterator[Hook]:
        """Return the hooks of this version beyond those of `control` and `verifier`."""
        from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput, EndWeightUpdateReqInput

        from megatron_rlspec.rollout.sglang.server import protect
        from megatron_rlspec.rollout.sglang.server.push_session import PushSession

        session = PushSession(BeginWeightUpdateReqInput(selector="all"), EndWeightUpdateReqInput())
        yield from session.hooks()
        yield from protect.scheduler_hooks()


class Sglang0515(Sglang0523):
    """0.5.15.post1. Weights are updated without a session; over a process group only the target's, but for our hook."""

    spans = False
    # It has no speculation on a CPU: its Triton backend does it, in Triton's interpreter.
    cpu_arguments = ("--attention-backend=triton", "--triton-attention-num-kv-splits=1", "--disable-overlap-schedule")
    cpu_environment = {"TRITON_INTERPRET": "1"}

    def answer(self, scheduler: Any, output: Any, request: Any) -> None:
        scheduler.ipc_channels.send_to_tokenizer.send_output(output, request)

    def softmax(self, logits: Any) -> Any:
        import torch

        return torch.softmax(logits, dim=-1)

    def drafting(self, drafter: Any) -> contextlib.AbstractContextManager:
        return drafter.draft_tp_context(drafter.draft_runner.tp_group)

    def samples_drafts(self, worker: Any) -> bool:
        return worker.server_args.speculative_use_rejection_sampling

    def forward(self, worker: Any, batch: Any, capture_hidden_mode: Any) -> Any:
        batch.capture_hidden_mode = capture_hidden_mode
        return worker.forward_batch_generation(batch)

    async def begin_push(self, manager: Any, selector: str) -> tuple[bool, str]:
        return True, ""

    async def end_push(self, manager: Any) -> tuple[bool, str]:
        return True, ""

    def tensors(self, selector: str, version: str, payloads: list[bytes]) -> Any:
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput

        return UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=payloads,
            load_format="flattened_bucket",
            flush_cache=bool(version),
            weight_version=version or None,
            disable_draft_model=selector == "target",
        )

    def broadcast(self, selector: str, version: str, group: str, names: list, dtypes: list, shapes: list) -> Any:
        from sglang.srt.managers.io_struct import UpdateWeightsFromDistributedReqInput

        return UpdateWeightsFromDistributedReqInput(
            names=names,
            dtypes=dtypes,
            shapes=shapes,
            group_name=group,
            flush_cache=bool(version),
            weight_version=version or None,
        )

    def prepare_cpu(self) -> None:
        """Select the Triton form of two kernels that also exist in CUDA, and skip the drafter's waits for a GPU."""
        import torch
        from sglang.srt.speculative import eagle_utils
        from sglang.srt.speculative.triton_ops import cache_locs

        eagle_utils._is_xpu = cache_locs._is_xpu = True
        torch.cuda.synchronize = lambda device=None: None
        torch.Tensor.record_stream = lambda tensor, stream: None

    def hooks(self) -> Iterator[Hook]:
        from megatron_rlspec.rollout.sglang.server import drafter_push, protect

        yield from protect.scheduler_hooks(("update_weights_from_tensor", "init_weights_update_group"))
        target = f"{drafter_push.TARGET}.update_weights_from_distributed"
        yield target, drafter_push.load_twice, "AROUND"
        yield "sglang.srt.managers.scheduler.Scheduler.flush_cache", _flush_while_paused, "AROUND"


def _flush_while_paused(original: Callable, scheduler: Any, *args: Any, **kwargs: Any) -> bool:
    """Flush although requests wait: SGLang would end. Requests that a pause took off the batch hold no cache."""
    waiting = scheduler.waiting_queue
    if scheduler._engine_paused:
        scheduler.waiting_queue = []
    try:
        return original(scheduler, *args, **kwargs)
    finally:
        scheduler.waiting_queue = waiting


KNOWN: dict[str, type[Sglang0523]] = {"0.5.23": Sglang0523, "0.5.15.post1": Sglang0515}


@cache
def installed() -> Sglang0523:
    """The adapter to the SGLang that would be imported. Raises ImportError, in one line, if it is none we know."""
    if contracts.locate("sglang") is None:
        raise ImportError("SGLang is not installed here: pip install sglang==0.5.23")
    return adapter(contracts.installed())


def adapter(read: contracts.Read) -> Sglang0523:
    """The adapter to these sources. Raises ImportError, naming what is missing of the version that is nearest."""
    version = contracts.kept(CONTRACTS, read)
    if version is None:
        nearest = min(CONTRACTS, key=lambda known: len(contracts.lacking(CONTRACTS[known], read)))
        missing = contracts.broken(CONTRACTS[nearest], read)
        raise ImportError(f"this SGLang is neither {' nor '.join(KNOWN)}; of {nearest} {missing}")
    return KNOWN[version]()
