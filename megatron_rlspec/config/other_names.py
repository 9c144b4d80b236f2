"""Options of slime, verl, Megatron and SGLang: what stands for them here, as a page shows it."""

OTHERS = {
    ("rollout_batch_size", "train_batch_size"): "`rollout.prompts_per_step`",
    ("n_samples_per_prompt", "n"): "`rollout.samples_per_prompt`",
    ("global_batch_size", "ppo_mini_batch_size"): "one optimizer step takes a whole rollout",
    (
        "max_tokens_per_gpu",
        "micro_batch_size",
    ): "`train.tokens_per_micro_batch`: micro-batches are packed by tokens",
    ("rollout_max_response_len", "max_response_length"): "`rollout.max_new_tokens`",
    ("num_rollout", "total_training_steps", "train_iters"): "`train.steps`",
    ("hf_checkpoint", "model_name_or_path"): "`model.path`",
    ("prompt_data", "train_files"): "`data.path`",
    ("rm_type", "custom_rm_path", "reward_fn"): "`reward.kind`",
    ("eps_clip", "clip_ratio"): "`algorithm.clip_low`, `algorithm.clip_high`",
    ("kl_loss_coef", "kl_coeff"): "`algorithm.kl_coef`",
    ("loss_agg_mode", "calculate_per_token_loss"): "`algorithm.aggregation`",
    (
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
    ): "`parallel.tensor`, `parallel.pipeline`",
    (
        "gpu_memory_utilization",
        "mem_fraction_static",
    ): "`rollout.engine_options`, `--mem-fraction-static`",
    ("engine_kwargs",): "`rollout.engine_options`",
    ("num_layers", "hidden_size"): "`config.json` of `model.path`",
    ("n_gpus_per_node", "actor_num_nodes"): "torchrun's `--nproc-per-node` and `--nnodes`",
}
