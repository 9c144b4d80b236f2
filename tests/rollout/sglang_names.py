"""Names of SGLang that `rlspec serve` and the plugin replace, call or read, with the parameters or fields they need.

Names stand below their module in `sglang.srt`. Calls that stand in our own source are checked there, and left out here.
"""

from __future__ import annotations

EVERY_VERSION = """
entrypoints.engine
    _set_envs_and_config(server_args)
entrypoints.http_server
    _global_state
    app
layers.moe.fused_moe_triton.layer
    FusedMoE._map_global_expert_id_to_local_expert_id(expert_id)
    FusedMoE._num_global_routed
    FusedMoE.intermediate_size_per_partition
    FusedMoE.moe_tp_rank
    FusedMoE.moe_tp_size
    FusedMoE.num_fused_shared_experts
layers.sampler
    SGLANG_RETURN_ORIGINAL_LOGPROB
    Sampler._preprocess_logits(logits, sampling_info)
    Sampler._sync_token_ids_across_tp(batch_next_token_ids, sampling_info)
    Sampler.enable_deterministic
    Sampler.forward(logits_output, sampling_info, return_logprob, top_logprobs_nums, token_ids_logprobs, positions)
    Sampler.rl_on_policy_target
    multinomial_with_seed(logprobs, seed, positions)
    sampling_from_probs_torch(probs, sampling_seed, positions)
    top_k_top_p_min_p_sampling_from_probs_torch(probs, top_ks, top_ps, min_ps, need_min_p_sampling,
        sampling_seed, positions)
managers.schedule_batch
    Req._check_str_based_finish(new_accepted_len)
    Req._check_token_based_finish(new_accepted_tokens)
    Req.customized_info
    Req.finished_len
    Req.output_ids
    Req.seqlen
    Req.to_finish
    Req.update_finish_state
    Req.update_spec_correct_drafts_histogram(num_correct_drafts)
    ScheduleBatch(reqs, model_config, req_to_token_pool, spec_algorithm, forward_mode, seq_lens, seq_lens_cpu,
        seq_lens_sum, orig_seq_lens, req_pool_indices, input_ids, out_cache_loc, sampling_info, spec_info,
        has_grammar, hisparse_coordinator, mamba_track_indices, multimodal_inputs, return_logprob,
        top_logprobs_nums, token_ids_logprobs, is_extend_in_batch, prefix_lens, extend_lens,
        extend_num_tokens, extend_logprob_start_lens)
managers.scheduler
    Scheduler.handle_dumper_control(recv_req)
    Scheduler.pause_generation(recv_req)
managers.scheduler_components.batch_result_processor
    SchedulerBatchResultProcessor.process_batch_result_decode(batch, result)
    SchedulerBatchResultProcessor.process_batch_result_prefill(batch, result)
managers.scheduler_components.weight_updater
    SchedulerWeightUpdaterManager.init_weights_update_group(recv_req)
    SchedulerWeightUpdaterManager.update_weights_from_tensor(recv_req)
managers.tokenizer_manager
    TokenizerManager._update_weight_version_if_provided(weight_version)
    TokenizerManager.abort_request(rid, abort_all)
    TokenizerManager.continue_generation(obj)
    TokenizerManager.dumper_control(obj)
    TokenizerManager.generate_request(obj, request)
    TokenizerManager.init_weights_update_group(obj, request)
    TokenizerManager.pause_generation(obj)
    TokenizerManager.release_memory_occupation(obj, request)
    TokenizerManager.resume_memory_occupation(obj, request)
    TokenizerManager.update_weights_from_distributed(obj, request)
    TokenizerManager.update_weights_from_tensor(obj, request)
managers.utils
    GenerationBatchResult(logits_output, next_token_ids, num_correct_drafts_per_req_cpu,
        speculative_num_draft_tokens, accept_lens, new_seq_lens, next_draft_input)
models.registry
    ModelRegistry
plugins
    load_plugins
plugins.hook_registry
    HookRegistry.register(target, hook, hook_type)
runtime_context
    get_parallel
sampling.sampling_batch_info
    SamplingBatchInfo(temperatures, top_ps, top_ks, min_ps, is_all_greedy, need_top_p_sampling,
        need_top_k_sampling, need_min_p_sampling, sampling_seed)
    SamplingBatchInfo.from_schedule_batch(batch, vocab_size)
server_args
    PortArgs.init_new(server_args)
speculative.adaptive_runtime_state
    AdaptiveController(worker)
    AdaptiveController._activate(speculative_num_steps)
    AdaptiveController.activate_step_by_batch(batch_size)
    AdaptiveController.candidate_steps
    AdaptiveController.on_verify_complete(num_correct_drafts_per_req, batch_size)
speculative.eagle_info
    EagleDraftInput(topk_p, topk_index, hidden_states, bonus_tokens)
    EagleVerifyInput(positions, draft_token_num)
speculative.eagle_utils
    eagle_sample(verify_input, batch, logits_output)
    verify_tree_greedy_func(candidates, target_predict)
speculative.eagle_worker_v2
    EAGLEWorkerV2._stub_skipped_draft_extend(batch, batch_output)
    EAGLEWorkerV2.adaptive_controller
    EAGLEWorkerV2.draft_worker
    EAGLEWorkerV2.forward_batch_generation(batch, on_publish)
    EAGLEWorkerV2.speculative_num_steps
    EAGLEWorkerV2.target_worker
    EagleDraftWorker._draft_extend_for_decode(batch, batch_result)
    EagleDraftWorker._draft_extend_for_prefill(batch, target_hidden_states, next_token_ids)
    EagleDraftWorker.cuda_graph_runner_for_draft_extend
    EagleDraftWorker.draft(batch)
    EagleDraftWorker.draft_forward(forward_batch)
    EagleDraftWorker.draft_runner
    EagleDraftWorker.hot_token_id
    EagleDraftWorker.speculative_algorithm
    speculative_moe_a2a_backend_context
    speculative_moe_backend_context
"""
SGLANG_0523 = """
arg_groups.attention_hook
    _attention_backend_platform_fallbacks
layers.attention.flashinfer_backend
    FlashInferIndicesUpdaterPrefill.call_begin_forward(wrapper_paged, qo_indptr, spec_info)
    fast_prefill_plan(qo_indptr_host, uniform_verify_width)
layers.logits_processor
    LogitsProcessor._compute_lm_head(hidden_states, lm_head)
layers.quantization.unquant
    UnquantizedLinearMethod.apply(layer, x, bias)
layers.sampler
    Sampler.forward(logits_output, sampling_info, return_logprob, top_logprobs_nums, token_ids_logprobs, positions,
        logprob_logits)
managers.overlap_utils
    FutureMap.needs_cpu_seq_lens
    FutureMap.resolve_seq_lens_cpu(batch)
managers.schedule_batch
    ScheduleBatch(req_pool_indices_cpu)
managers.scheduler
    Scheduler._record_scheduler_state_for_paused_engine
    Scheduler.chunked_req
    Scheduler.collect_inflight_reqs
    Scheduler.continue_generation(recv_req)
    Scheduler.flush_cache
    Scheduler.idle_sleeper
    Scheduler.record_weight_version_change(new_version)
    Scheduler.send_control_output(output, recv_req)
    Scheduler.weight_updater
managers.scheduler_components.weight_updater
    SchedulerWeightUpdaterManager._session
    SchedulerWeightUpdaterManager.begin_weight_update(recv_req)
    SchedulerWeightUpdaterManager.check_weights(recv_req)
    SchedulerWeightUpdaterManager.end_weight_update(recv_req)
    SchedulerWeightUpdaterManager.resume_memory_occupation(recv_req)
    SchedulerWeightUpdaterManager.update_weights_from_disk(recv_req)
    SchedulerWeightUpdaterManager.update_weights_from_distributed(recv_req)
    SchedulerWeightUpdaterManager.update_weights_from_ipc(recv_req)
managers.tokenizer_manager
    TokenizerManager.begin_weight_update(obj)
    TokenizerManager.end_weight_update(obj)
    TokenizerManager.context_len
    TokenizerManager.num_reserved_tokens
managers.tp_worker
    BaseTpWorker.deserialize_own_rank(serialized_named_tensors)
    TpModelWorker.forward_batch_generation(batch, capture_hidden_mode)
model_executor.model_runner_components.weight_updater
    _unsupported_derived_weight_cache_error(model)
runtime_context
    get_spec
sampling.sampling_batch_info
    SamplingBatchInfo(temperatures, top_ps, top_ks, min_ps, is_all_greedy, need_top_p_sampling,
        need_top_k_sampling, need_min_p_sampling, sampling_seed, max_top_k, sampling_mask_batch_indices)
speculative.eagle_worker_common
    compute_spec_logprobs(batch, logits_output, predict, accept_index)
speculative.eagle_worker_v2
    EagleDraftWorker.parallel_layout
speculative.spec_info
    SpecInput
"""
SGLANG_0515 = """
managers.schedule_batch
    ScheduleBatch.capture_hidden_mode
managers.scheduler
    Scheduler._engine_paused
    Scheduler.flush_cache
    Scheduler.ipc_channels
    Scheduler.waiting_queue
managers.scheduler_components.weight_updater
    SchedulerWeightUpdaterManager.update_weights_from_distributed(recv_req)
server_args
    ServerArgs.speculative_use_rejection_sampling
speculative.eagle_utils
    _is_xpu
speculative.eagle_worker_v2
    EAGLEWorkerV2.server_args
    EagleDraftWorker.draft_tp_context
    compute_spec_v2_logprobs(batch, logits_output, predict, accept_index, speculative_num_steps)
"""


def contract(text: str) -> dict[str, tuple[str, ...]]:
    """Return the parameters or fields of each dotted name in a text of the form above."""
    entries: list[str] = []
    module = ""
    for line in text.splitlines():
        if line.startswith("        "):  # the rest of an entry
            entries[-1] += " " + line.strip()
        elif line.startswith("    "):
            entries.append(f"sglang.srt.{module}.{line.strip()}")
        else:
            module = line
    found = {}
    for entry in entries:
        name, _, parameters = entry.removesuffix(")").partition("(")
        found[name] = tuple(parameters.split(", ")) if parameters else ()
    return found


# The names of each version; of a name in both parts, the version's own parameters count.
CONTRACTS = {
    "0.5.23": contract(EVERY_VERSION) | contract(SGLANG_0523),
    "0.5.15.post1": contract(EVERY_VERSION) | contract(SGLANG_0515),
}
