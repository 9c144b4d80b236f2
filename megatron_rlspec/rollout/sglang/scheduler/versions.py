"""Adapters to the SGLang versions that are supported: 0.5.15.post1, which slime pins, and 0.5.23.

Everything in which they differ stands here. `installed` reads the names in SGLang's source (`CONTRACTS`) and chooses
the adapter whose names are all there. A later version that keeps them is treated alike; any other is refused.
"""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from megatron_rlspec.compat import contracts

Hook = tuple[str, Callable, str]

# Names of SGLang that `rlspec serve` and the plugin replace, call or read, with the parameters or fields they need.
# `_EVERY` holds those of every version. Calls that stand in our own source are checked there, and left out here.
_SPECULATIVE = "sglang.srt.speculative"
_MANAGERS = "sglang.srt.managers"
_SAMPLING = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo"
_EXPERTS = "sglang.srt.layers.moe.fused_moe_triton.layer.FusedMoE"
_EVERY: dict[str, tuple[str, ...]] = {
    "sglang.srt.plugins.load_plugins": (),
    "sglang.srt.plugins.hook_registry.HookRegistry.register": ("target", "hook", "hook_type"),
    "sglang.srt.entrypoints.engine._set_envs_and_config": ("server_args",),
    "sglang.srt.entrypoints.http_server.app": (),
    "sglang.srt.entrypoints.http_server._global_state": (),
    "sglang.srt.models.registry.ModelRegistry": (),
    "sglang.srt.runtime_context.get_parallel": (),
    f"{_EXPERTS}._map_global_expert_id_to_local_expert_id": ("expert_id",),
    f"{_EXPERTS}._num_global_routed": (),
    f"{_EXPERTS}.intermediate_size_per_partition": (),
    f"{_EXPERTS}.moe_tp_rank": (),
    f"{_EXPERTS}.moe_tp_size": (),
    f"{_EXPERTS}.num_fused_shared_experts": (),
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
    f"{_SPECULATIVE}.eagle_worker_v2.EagleDraftWorker.hot_token_id": (),
    f"{_SPECULATIVE}.eagle_worker_v2.EagleDraftWorker.speculative_algorithm": (),
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
    f"{_SAMPLING}.from_schedule_batch": ("batch", "vocab_size"),
    _SAMPLING: (
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
    f"{_MANAGERS}.tokenizer_manager.TokenizerManager._update_weight_version_if_provided": ("weight_version",),
    f"{_MANAGERS}.tokenizer_manager.TokenizerManager.abort_request": ("rid", "abort_all"),
    f"{_MANAGERS}.tokenizer_manager.TokenizerManager.pause_generation": ("obj",),
    f"{_MANAGERS}.tokenizer_manager.TokenizerManager.continue_generation": ("obj",),
    f"{_MANAGERS}.tokenizer_manager.TokenizerManager.dumper_control": ("obj",),
    f"{_MANAGERS}.tokenizer_manager.TokenizerManager.release_memory_occupation": ("obj", "request"),
    f"{_MANAGERS}.tokenizer_manager.TokenizerManager.resume_memory_occupation": ("obj", "request"),
    f"{_MANAGERS}.tokenizer_manager.TokenizerManager.init_weights_update_group": ("obj", "request"),
    f"{_MANAGERS}.tokenizer_manager.TokenizerManager.update_weights_from_tensor": ("obj", "request"),
    f"{_MANAGERS}.tokenizer_manager.TokenizerManager.update_weights_from_distributed": ("obj", "request"),
}
CONTRACTS: dict[str, dict[str, tuple[str, ...]]] = {
    "0.5.23": _EVERY
    | {
        "sglang.srt.arg_groups.attention_hook._attention_backend_platform_fallbacks": (),
        "sglang.srt.runtime_context.get_spec": (),
        "sglang.srt.layers.quantization.unquant.UnquantizedLinearMethod.apply": ("layer", "x", "bias"),
        "sglang.srt.layers.logits_processor.LogitsProcessor._compute_lm_head": ("hidden_states", "lm_head"),
        _SAMPLING: (*_EVERY[_SAMPLING], "max_top_k"),
        f"{_SPECULATIVE}.eagle_worker_v2.EagleDraftWorker.parallel_layout": (),
        f"{_SPECULATIVE}.eagle_worker_v2.EagleDraftWorker.draft": ("batch",),
        f"{_SPECULATIVE}.eagle_worker_v2.EagleDraftWorker.draft_forward": ("forward_batch",),
        f"{_SPECULATIVE}.eagle_worker_v2.EagleDraftWorker.cuda_graph_runner_for_draft_extend": (),
        f"{_MANAGERS}.scheduler.Scheduler.send_control_output": ("output", "recv_req"),
        f"{_MANAGERS}.tp_worker.TpModelWorker.forward_batch_generation": ("batch", "capture_hidden_mode"),
        f"{_MANAGERS}.tokenizer_manager.TokenizerManager.begin_weight_update": ("obj",),
        f"{_MANAGERS}.tokenizer_manager.TokenizerManager.end_weight_update": ("obj",),
        f"{_MANAGERS}.scheduler.Scheduler.continue_generation": ("recv_req",),
        f"{_MANAGERS}.scheduler.Scheduler.record_weight_version_change": ("new_version",),
        f"{_MANAGERS}.scheduler.Scheduler.weight_updater": (),
        f"{_MANAGERS}.scheduler.Scheduler._record_scheduler_state_for_paused_engine": (),
        f"{_MANAGERS}.scheduler.Scheduler.idle_sleeper": (),
        f"{_MANAGERS}.scheduler.Scheduler.collect_inflight_reqs": (),
        f"{_MANAGERS}.scheduler.Scheduler.flush_cache": (),
        f"{_MANAGERS}.scheduler.Scheduler.forward_stream": (),
        f"{_MANAGERS}.scheduler.Scheduler.chunked_req": (),
        f"{_MANAGERS}.schedule_batch.Req.update_finish_state": (),
        f"{_MANAGERS}.schedule_batch.ScheduleBatch.check_decode_mem": ("selected_indices",),
        f"{_MANAGERS}.schedule_batch.Req.to_finish": (),
        f"{_MANAGERS}.schedule_batch.ReqKvInfo": ("req_pool_idx", "kv_committed_len"),
        f"{_MANAGERS}.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
        "._prepare_kv_cache_release": ("req",),
        f"{_MANAGERS}.scheduler_components.pool_stats_observer.SchedulerPoolStatsObserver.session_held_tokens": (),
        "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.path_device_indices": ("node",),
        "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.lock": ("node_id",),
        "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.unlock": ("lock",),
        "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.tree_core": (),
        "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool": ("head_num", "head_dim", "layer_num", "v_head_dim"),
        f"{_MANAGERS}.tp_worker.BaseTpWorker.deserialize_own_rank": ("serialized_named_tensors",),
        "sglang.srt.model_executor.model_runner_components.weight_updater._unsupported_derived_weight_cache_error": (
            "model",
        ),
        f"{_MANAGERS}.scheduler_components.weight_updater.SchedulerWeightUpdaterManager._session": (),
        **{
            f"{_MANAGERS}.scheduler_components.weight_updater.SchedulerWeightUpdaterManager.{name}": ("recv_req",)
            for name in (
                "begin_weight_update",
                "check_weights",
                "end_weight_update",
                "resume_memory_occupation",
                "update_weights_from_disk",
                "update_weights_from_distributed",
                "update_weights_from_ipc",
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
    """Adapts to 0.5.23, and to later versions that keep its names."""

    spans = True  # an answer names the weights under which each of its tokens was sampled
    cpu_arguments: tuple[str, ...] = ("--attention-backend=intel_amx",)
    # Huge pages: otherwise receiving a bucket of weights takes four times as long as copying it.
    cpu_environment: Mapping[str, str] = {"THP_MEM_ALLOC_ENABLE": "1"}
    reads_files = True  # schedulers read a bucket's file themselves
    couples = True  # drafts can take the verifier's noise
    moves = True  # running samples can leave with their KV cache, and arrive with it

    def answer(self, scheduler: Any, output: Any, request: Any) -> None:
        """Send a scheduler's answer to a control request."""
        scheduler.send_control_output(output, request)

    def softmax(self, logits: Any) -> Any:
        """Compute probabilities as SGLang's plain decoding does."""
        from sglang.kernels.ops.sampling import softmax

        return softmax(logits)

    def captured(self, controller: Any, steps: int) -> list[int] | None:
        """Return the batch sizes at which an `AdaptiveController` has graphs of this step count; None: no graphs."""
        return controller.params.cuda_graph_bs_for_step(steps)

    def known_top_k(self, info: Any) -> dict[str, Any]:
        """Return the argument by which a `SamplingBatchInfo` tells the sampler its largest top_k, on the host."""
        return {"max_top_k": info.max_top_k}

    def tensor_group(self) -> Any:
        """Return the tensor parallel group, which has `world_size` and `broadcast`."""
        from sglang.srt.runtime_context import get_parallel

        return get_parallel().tp_group

    def weight_version(self, manager: Any = None) -> str:
        """Return the version of the weights, in a scheduler's process or in the one of the tokenizer `manager`.

        `server_args` keep the version of the start.
        """
        from sglang.srt.runtime_context import get_serving

        return get_serving().weight_version

    def abortion(self) -> Any:
        """Return the reason with which a request ends that is aborted."""
        from sglang.srt.managers.schedule_batch import FINISH_ABORT

        return FINISH_ABORT()

    def asked_for(self, reason: Any) -> bool:
        """Return whether a request ends because a client or a move aborted it, and not for an error."""
        from sglang.srt.managers.schedule_batch import FINISH_ABORT

        return isinstance(reason, FINISH_ABORT) and reason.status_code is None

    def cached(self, tree: Any, tokens: Sequence[int]) -> tuple[Any, Any]:
        """Return the slots of the longest prefix of these tokens in the prefix tree, and its last node."""
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams

        match = tree.match_prefix(MatchPrefixParams(key=self._key(tree, tokens)))
        return tree.path_device_indices(match.last_device_node)[: match.device_prefix_len], match.last_device_node

    def insert(self, tree: Any, tokens: Sequence[int], slots: Any, present: int) -> Any:
        """Put the slots of these tokens into the prefix tree, which has the first `present`. Returns the last node."""
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams

        return tree.insert(
            InsertParams(key=self._key(tree, tokens), value=slots, prev_prefix_len=present)
        ).last_device_node

    def evict(self, tree: Any, slots: int) -> None:
        """Free at least so many slots of the prefix tree, if they are evictable."""
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        tree.evict(EvictParams(num_tokens=slots))

    def _key(self, tree: Any, tokens: Sequence[int]) -> Any:
        from sglang.srt.mem_cache.radix_cache import RadixKey

        key = RadixKey(array("q", tokens), None, is_bigram=tree.tree_core.is_eagle)
        return key.page_aligned(tree.page_size)

    def drafting(self, drafter: Any) -> contextlib.AbstractContextManager:
        """Return the context in which a pass of the worker's `EagleDraftWorker` runs."""
        from sglang.srt.speculative.spec_utils import draft_tp_context

        return draft_tp_context(drafter.parallel_layout)

    def samples_drafts(self, worker: Any) -> bool:
        """Return whether the `EAGLEWorkerV2` samples its drafts and verifies them by rejection sampling."""
        from sglang.srt.runtime_context import get_spec

        return get_spec().speculative_use_rejection_sampling

    def forward(self, worker: Any, batch: Any, capture_hidden_mode: Any) -> Any:
        """Run a pass of the target's worker that returns hidden states."""
        return worker.forward_batch_generation(batch, capture_hidden_mode=capture_hidden_mode)

    def without_eagle3(self, config: Mapping[str, Any]) -> str:
        """Return why SGLang cannot draft for the target of this config.json with an EAGLE-3 drafter; "" if it can."""
        return without_eagle3(config, contracts.installed())

    async def begin_push(self, manager: Any, selector: str) -> tuple[bool, str]:
        """Open a weight update; return success and SGLang's message."""
        from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput

        return await manager.begin_weight_update(BeginWeightUpdateReqInput(selector=selector))

    async def end_push(self, manager: Any) -> tuple[bool, str]:
        """Close the weight update; return success and SGLang's message."""
        from sglang.srt.managers.io_struct import EndWeightUpdateReqInput

        return await manager.end_weight_update(EndWeightUpdateReqInput())

    def stamp(self, scheduler: Any, version: str) -> None:
        """Tell the scheduler the version of its weights."""
        scheduler.record_weight_version_change(new_version=version)

    def tensors(self, selector: str, payloads: list[bytes]) -> Any:
        """Return a bucket of weights as a message. The cache is flushed at the end of the update."""
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput

        return UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=payloads,
            load_format="flattened_bucket",
            flush_cache=False,
            **self.tensors_for(selector),
        )

    def broadcast(self, selector: str, group: str, names: list, dtypes: list, shapes: list) -> Any:
        """Return the message that has the ranks receive a bucket in one broadcast; otherwise as `tensors`."""
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
        """Return the fields of a `tensors` message that say which models load it: "all", "target" or "draft"."""
        return {"selector": selector}

    def broadcast_for(self, selector: str) -> dict[str, Any]:
        """As `tensors_for`, of a `broadcast` message."""
        return {"selector": selector}

    def prepare_cpu(self) -> None:
        """Keep SGLang from a CPU backend that cannot speculate, and skip the drafter's waits for a GPU."""
        import torch
        from sglang.srt.arg_groups import attention_hook

        attention_hook._attention_backend_platform_fallbacks = lambda view: {}
        torch.cuda.synchronize = lambda device=None: None

    def hooks(self) -> Iterator[Hook]:
        """Return the hooks of this version beyond those of `control` and `verifier`."""
        from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput, EndWeightUpdateReqInput

        from megatron_rlspec.rollout.sglang.cpu import products, stand_ins
        from megatron_rlspec.rollout.sglang.scheduler import bucket_file, draft_vocabulary, protect
        from megatron_rlspec.rollout.sglang.scheduler.push_session import PushSession, cost_hooks

        yield from draft_vocabulary.hooks()
        session = PushSession(BeginWeightUpdateReqInput(selector="all"), EndWeightUpdateReqInput())
        yield from session.hooks()
        yield from cost_hooks()
        yield bucket_file.WORKER, bucket_file.read, "AROUND"
        yield from protect.scheduler_hooks()
        if stand_ins.standing_in("sgl_kernel"):
            yield from products.hooks()


class Sglang0515(Sglang0523):
    """Adapts to 0.5.15.post1.

    It updates weights without a session. Through a process group it updates the target only; our hook adds the drafter.
    """

    spans = False
    # It has no speculation on a CPU: its Triton backend does it, in Triton's interpreter.
    cpu_arguments = ("--attention-backend=triton", "--triton-attention-num-kv-splits=1", "--disable-overlap-schedule")
    cpu_environment = {**Sglang0523.cpu_environment, "TRITON_INTERPRET": "1"}
    reads_files = False
    couples = False
    moves = False

    def weight_version(self, manager: Any = None) -> str:
        if manager is None:
            raise NotImplementedError("SGLang 0.5.15.post1 does not tell its schedulers the version of the weights")
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

    def samples_drafts(self, worker: Any) -> bool:
        return worker.server_args.speculative_use_rejection_sampling

    def without_eagle3(self, config: Mapping[str, Any]) -> str:
        return "EAGLE-3 was not run with SGLang 0.5.15.post1; expected 0.5.23"

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
        from sglang.srt.speculative import eagle_utils
        from sglang.srt.speculative.triton_ops import cache_locs

        eagle_utils._is_xpu = cache_locs._is_xpu = True
        torch.cuda.synchronize = lambda device=None: None
        torch.Tensor.record_stream = lambda tensor, stream: None

    def hooks(self) -> Iterator[Hook]:
        from megatron_rlspec.rollout.sglang.scheduler import drafter_push, protect

        yield from protect.scheduler_hooks(("update_weights_from_tensor", "init_weights_update_group"))
        target = f"{drafter_push.TARGET}.update_weights_from_distributed"
        yield target, drafter_push.load_twice, "AROUND"
        yield "sglang.srt.managers.scheduler.Scheduler.flush_cache", _flush_while_paused, "AROUND"


# Targets that were shown to hand hidden states of their layers to an EAGLE-3 drafter, and SGLang's files with them.
EAGLE3_TARGETS = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}


def without_eagle3(config: Mapping[str, Any], read: contracts.Read | None = None) -> str:
    """Return why SGLang cannot draft with EAGLE-3 for the target of this config.json, in one sentence; "" if it can.

    MiMo's class hands out no hidden states, though a MiMo is a Qwen2. With `read`, SGLang's source is asked, too.
    """
    name = (config.get("architectures") or [""])[0]
    file = EAGLE3_TARGETS.get(name)
    capture = f"sglang.srt.models.{file}.{name}.set_eagle3_layers_to_capture"
    if file is None or (read is not None and contracts.lacking({capture: ()}, read)):
        return (
            f"SGLang's {name} is not known to give an EAGLE-3 drafter its states; expected {', '.join(EAGLE3_TARGETS)}"
        )
    return ""


def _flush_while_paused(original: Callable, scheduler: Any, *args: Any, **kwargs: Any) -> bool:
    """Flush the cache although requests wait, after which SGLang would end.

    Requests that a pause took off the batch hold no cache.
    """
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
    """Return the adapter to the installed SGLang. Raises ImportError, in one line, if no adapter fits."""
    if contracts.locate("sglang") is None:
        raise ImportError("SGLang is not installed here: pip install sglang==0.5.23")
    return adapter(contracts.installed())


def adapter(read: contracts.Read) -> Sglang0523:
    """Return the adapter to these sources. Raises ImportError, naming what the nearest version has and they lack."""
    version = contracts.kept(CONTRACTS, read)
    if version is None:
        nearest = min(CONTRACTS, key=lambda known: len(contracts.lacking(CONTRACTS[known], read)))
        missing = contracts.broken(CONTRACTS[nearest], read)
        raise ImportError(f"this SGLang is neither {' nor '.join(KNOWN)}; of {nearest} {missing}")
    return KNOWN[version]()
