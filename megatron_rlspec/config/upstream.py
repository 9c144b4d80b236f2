"""Names that Megatron, slime, verl and SGLang give to our options.

Such a name is refused like any unknown option, but the message says its name here. `OURS` maps it to one of our
options, or to several; `ELSEWHERE` says where a setting comes from that is no option here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

OURS: dict[str, str] = {
    # Megatron
    "tensor_model_parallel_size": "parallel.tensor",
    "pipeline_model_parallel_size": "parallel.pipeline",
    "context_parallel_size": "parallel.context",
    "expert_model_parallel_size": "parallel.expert",
    "sequence_parallel": "parallel.sequence",
    "recompute_granularity": "parallel.recompute",
    "recompute_method": "parallel.recompute",
    "recompute_num_layers": "parallel.recompute",
    "recompute_activations": "parallel.recompute",
    "use_distributed_optimizer": "optimizer.distributed",
    "adam_beta1": "optimizer.beta1",
    "adam_beta2": "optimizer.beta2",
    "adam_eps": "optimizer.eps",
    "lr_warmup_iters": "optimizer.warmup_steps",
    "lr_warmup_samples": "optimizer.warmup_steps",
    "lr_decay_iters": "optimizer.decay_steps",
    "mtp_num_layers": "drafter.depth",
    "mtp_use_repeated_layer": "drafter.repeated_layer",
    "enable_mtp_training": "drafter.train",
    "speculative_draft_model_path": "drafter.path",
    "params_dtype": "model.dtype",
    "bf16": "model.dtype",
    "fp16": "model.dtype",
    "save_interval": "train.save_every",
    "eval_interval": "train.eval_every",
    "eval_iters": "train.eval_prompts",
    "save": "train.run_dir",
    "load": "train.resume",
    "train_iters": "train.steps",
    "seq_length": "model.max_length",
    "max_position_embeddings": "model.max_length",
    "moe_router_bias_update": "model.moe_router_bias_update_rate",
    # slime
    "hf_checkpoint": "model.path",
    "ref_load": "model.path",
    "rollout_batch_size": "rollout.prompts_per_step",
    "over_sampling_batch_size": "rollout.over_sampling",
    "partial_rollout": "rollout.partial",
    "mask_offpolicy_in_partial_rollout": "rollout.mask_offpolicy",
    "dynamic_sampling_filter_path": "algorithm.dynamic_sampling",
    "n_samples_per_prompt": "rollout.samples_per_prompt",
    "rollout_max_response_len": "rollout.max_new_tokens",
    "rollout_max_prompt_len": "model.max_length",
    "rollout_max_context_len": "model.max_length",
    "rollout_temperature": "rollout.temperature",
    "rollout_top_p": "rollout.top_p",
    "rollout_top_k": "rollout.top_k",
    "rollout_seed": "train.seed",
    "rollout_shuffle": "data.shuffle",
    "num_rollout": "train.steps",
    "max_tokens_per_gpu": "train.tokens_per_micro_batch",
    "eps_clip": "algorithm.clip_low",
    "eps_clip_high": "algorithm.clip_high",
    "eps_clip_c": "algorithm.dual_clip",
    "kl_loss_coef": "algorithm.kl_coef",
    "kl_loss_type": "algorithm.kl_kind",
    "use_kl_loss": "algorithm.kl_coef",
    "advantage_estimator": "algorithm.ratio",
    "disable_grpo_std_normalization": "algorithm.normalise_std",
    "grpo_std_normalization": "algorithm.normalise_std",
    "use_rollout_logprobs": "algorithm.old_logprobs",
    "use_tis": "algorithm.tis_clip",
    "calculate_per_token_loss": "algorithm.aggregation",
    "prompt_data": "data.path",
    "eval_prompt_data": "data.eval_path",
    "input_key": "data.prompt_key",
    "rm_type": "reward.kind",
    "custom_rm_path": "reward.kind",
    "rm_url": "reward.kind",
    "n_samples_per_eval_prompt": "train.eval_prompts",
    "mtp_loss_scaling_factor": "drafter.lr",
    "rollout_num_engines": "rollout.engines",
    "rollout_external_engine_addrs": "rollout.urls",
    "update_weight_transfer_mode": "push.transport",
    # verl
    "train_batch_size": "rollout.prompts_per_step",
    "ppo_max_token_len_per_gpu": "train.tokens_per_micro_batch",
    "log_prob_max_token_len_per_gpu": "train.tokens_per_micro_batch",
    "max_prompt_length": "model.max_length",
    "max_response_length": "rollout.max_new_tokens",
    "response_length": "rollout.max_new_tokens",
    "train_files": "data.path",
    "val_files": "data.eval_path",
    "actor_rollout_ref.model.path": "model.path",
    "actor_rollout_ref.rollout.n": "rollout.samples_per_prompt",
    "actor_rollout_ref.rollout.name": "rollout.engine",
    "actor_rollout_ref.actor.optim.lr": "optimizer.lr",
    "actor_rollout_ref.actor.grad_clip": "optimizer.clip_grad",
    "grad_clip": "optimizer.clip_grad",
    "lr_warmup_steps": "optimizer.warmup_steps",
    "lr_warmup_steps_ratio": "optimizer.warmup_steps",
    "lr_decay_steps": "optimizer.decay_steps",
    "clip_ratio": "algorithm.clip_low",
    "clip_ratio_low": "algorithm.clip_low",
    "clip_ratio_high": "algorithm.clip_high",
    "clip_ratio_c": "algorithm.dual_clip",
    "entropy_coeff": "algorithm.entropy_coef",
    "loss_agg_mode": "algorithm.aggregation",
    "adv_estimator": "algorithm.ratio",
    "norm_adv_by_std_in_grpo": "algorithm.normalise_std",
    "tis_imp_ratio_cap": "algorithm.tis_clip",
    "rollout_is_threshold": "algorithm.tis_clip",
    "filter_groups": "algorithm.dynamic_sampling",
    "overlong_buffer": "algorithm.overlong_tokens",
    "kl_ctrl": "algorithm.kl_coef",
    "kl_penalty": "algorithm.kl_kind",
    "kl_coeff": "algorithm.kl_coef",
    "kl_beta": "algorithm.kl_coef",
    "gpu_memory_utilization": "rollout.mem_fraction",
    "max_num_seqs": "rollout.max_running_requests",
    "save_freq": "train.save_every",
    "test_freq": "train.eval_every",
    "resume_mode": "train.resume",
    "default_local_dir": "train.run_dir",
    "total_training_steps": "train.steps",
    "max_ckpt_to_keep": "train.keep",
    "max_actor_ckpt_to_keep": "train.keep",
    "reward_fn": "reward.kind",
    "reward_function": "reward.kind",
    "custom_reward_function": "reward.kind",
    "reward_model": "reward.kind",
    "gradient_checkpointing": "parallel.recompute",
    "enable_gradient_checkpointing": "parallel.recompute",
    # SGLang
    "model_path": "model.path",
    "mem_fraction_static": "rollout.mem_fraction",
    "max_running_requests": "rollout.max_running_requests",
    "max_total_tokens": "rollout.max_total_tokens",
    "context_length": "model.max_length",
    "random_seed": "train.seed",
    "speculative_algorithm": "spec.mode",
    "speculative_num_steps": "spec.num_steps",
    "speculative_eagle_topk": "spec.topk",
    "speculative_num_draft_tokens": "spec.num_draft_tokens",
    "speculative_adaptive": "spec.mode",
    "speculative_use_rejection_sampling": "spec.verifier",
    "max_new_token": "rollout.max_new_tokens",
    "max_tokens": "rollout.max_new_tokens",
    # spellings that are at home in several of them
    "learning_rate": "optimizer.lr",
    "max_grad_norm": "optimizer.clip_grad",
    "warmup_iters": "optimizer.warmup_steps",
    "normalize_std": "algorithm.normalise_std",
    "num_generations": "rollout.samples_per_prompt",
    "group_size": "rollout.samples_per_prompt",
    "num_return_sequences": "rollout.samples_per_prompt",
    "max_completion_length": "rollout.max_new_tokens",
    "model_name_or_path": "model.path",
    "output_dir": "train.run_dir",
    "save_steps": "train.save_every",
    "eval_steps": "train.eval_every",
    "max_steps": "train.steps",
    "num_steps_per_epoch": "train.steps",
    "resume_from_checkpoint": "train.resume",
    "save_total_limit": "train.keep",
}

_BATCH = "one optimizer step takes a whole rollout: rollout.prompts_per_step x rollout.samples_per_prompt samples"
_PACKED = "micro-batches are packed by tokens: train.tokens_per_micro_batch"
_MODEL = "it is read from config.json in model.path"
_ENGINE = "engines with options of their own are started by `rlspec serve` and named in rollout.urls"
_RANKS = "torchrun says how many ranks there are; data parallelism takes those that [parallel] leaves"
ELSEWHERE: dict[str, str] = {
    "global_batch_size": _BATCH,
    "ppo_mini_batch_size": _BATCH,
    "ppo_epochs": _BATCH,
    "num_steps_per_rollout": _BATCH,
    "gradient_accumulation_steps": _BATCH,
    "micro_batch_size": _PACKED,
    "ppo_micro_batch_size": _PACKED,
    "ppo_micro_batch_size_per_gpu": _PACKED,
    "log_prob_micro_batch_size_per_gpu": _PACKED,
    "use_dynamic_batch_size": _PACKED,
    "use_dynamic_bsz": _PACKED,
    "num_epoch": "the length of a run is train.steps; epochs follow one another",
    "total_epochs": "the length of a run is train.steps; epochs follow one another",
    "num_train_epochs": "the length of a run is train.steps; epochs follow one another",
    "num_layers": _MODEL,
    "hidden_size": _MODEL,
    "ffn_hidden_size": _MODEL,
    "num_attention_heads": _MODEL,
    "num_query_groups": _MODEL,
    "rotary_base": _MODEL,
    "rope_theta": _MODEL,
    "vocab_size": _MODEL,
    "norm_epsilon": _MODEL,
    "untie_embeddings_and_output_weights": _MODEL,
    "num_experts": _MODEL,
    "expert_tensor_parallel_size": "experts are split over parallel.tensor, as every layer is",
    "tie_word_embeddings": _MODEL,
    "min_lr": "the learning rate falls to a tenth of optimizer.lr over optimizer.decay_steps",
    "lr_decay_style": "the learning rate falls linearly over optimizer.decay_steps",
    "lr_scheduler_type": "the learning rate falls linearly over optimizer.decay_steps",
    "tp_size": _ENGINE,
    "dp_size": _ENGINE,
    "ep_size": _ENGINE,
    "tp": _ENGINE,
    "attention_backend": _ENGINE,
    "quantization": _ENGINE,
    "rollout_num_gpus": _ENGINE,
    "rollout_num_gpus_per_engine": _ENGINE,
    "nproc_per_node": _RANKS,
    "data_parallel_size": _RANKS,
    "actor_num_nodes": _RANKS,
    "actor_num_gpus_per_node": _RANKS,
    "n_gpus_per_node": _RANKS,
    "nnodes": _RANKS,
    "num_gpus_per_node": _RANKS,
    "colocate": "engines share the machine's GPUs with the trainer, or run elsewhere with rollout.urls",
    "tokenizer_path": "the tokenizer is read from model.path",
    "api_key": "the engines' key is read from the environment variable RLSPEC_API_KEY",
    "use_wandb": "log.sinks=tensorboard,wandb sends the records there, too",
    "wandb_project": "log.project, for log.sinks=wandb",
    "project_name": "log.project, for log.sinks=wandb",
    "experiment_name": "metrics are written to train.run_dir, for TensorBoard too",
    "tensorboard_dir": "metrics are written to train.run_dir, for TensorBoard too",
}


def answer(given: str) -> str:
    """Return the advice for an upstream option, written with or without dots, with - or _; "" for any other name."""
    for name in _spellings(given):
        if name in OURS:
            return f"here it is {OURS[name]}"
        if name in ELSEWHERE:
            return ELSEWHERE[name]
    return ""


def plain(given: str) -> str:
    """Return the name as TOML files write it: lower case, with _."""
    return given.strip("-").replace("-", "_").lower()


def leaves(value: Any, path: str, most: int = 100) -> Iterator[str]:
    """Return at most `most` dotted names of the options in a table with an unknown name."""
    waiting = [(path, value)]
    for _ in range(most):
        if not waiting:
            return
        name, inner = waiting.pop()
        if isinstance(inner, dict) and inner:
            waiting += [(f"{name}.{key}", below) for key, below in inner.items()]
        else:
            yield name


def _spellings(given: str) -> Iterator[str]:
    """Return the whole name, then without its first parts, then without slime's prefix of SGLang's flags."""
    parts = plain(given).split(".")
    for start in range(len(parts)):
        yield ".".join(parts[start:])
    for prefix in ("sglang_", "no_", "enable_", "use_", "actor_", "rollout_", "train_"):
        yield parts[-1].removeprefix(prefix)
