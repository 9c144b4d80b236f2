"""Megatron's DDP and optimizers, one pair for the policy and one for the drafter, with nothing in common.

One optimizer for both would clip both by one norm and skip both after one overflow. One gradient buffer for both would
split the all-reduce differently and round the policy's gradient differently on three ranks or more.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.distributed.finalize_model_grads import _allreduce_non_tensor_model_parallel_grads
from megatron.core.optimizer import OptimizerConfig, _get_megatron_optimizer_based_on_param_groups
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megatron_rlspec.train import experts


@dataclass(frozen=True)
class AdamW:
    """Options of AdamW for the policy or the drafter. One-dimensional parameters have no weight decay."""

    lr: float
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    clip_grad: float = 1.0
    warmup_steps: int = 0
    decay_steps: int = 0
    distributed: bool = False

    def rate(self, step: int, updates_before: int = 0) -> float:
        """Learning rate of a run's step-th update, from 1: linear up, then linear down to a tenth.

        Updates before the run, whose moments it continues with, count for the way up.
        """
        warmth = min(1.0, (step + updates_before) / self.warmup_steps) if self.warmup_steps else 1.0
        left = max(0.1, 1 - 0.9 * step / self.decay_steps) if self.decay_steps else 1.0
        return self.lr * min(warmth, left)


class Learner:
    """A module with its own gradient buffers and its own AdamW.

    `pipelined` says whether the module is split over pipeline stages (the policy) or whole on this one (the drafter).
    Gradient norm and finalisation run over the ranks that hold a part of it, and only these construct a Learner.
    """

    def __init__(self, module: MegatronModule, adam: AdamW, *, pipelined: bool) -> None:
        dtype = module.config.params_dtype
        low = dtype == torch.bfloat16
        if adam.distributed and dtype == torch.float64:
            raise ValueError(
                "optimizer.distributed keeps gradients in float32; with model.dtype=float64 it must be off"
            )
        self.adam = adam
        self.pipelined = pipelined
        self.steps = 0  # updates of this run
        self.updates_before = 0  # updates of the run whose moments this one continues with
        self._biases_before: list[tuple[Tensor, Tensor]] = []
        self.ddp = DistributedDataParallel(
            module.config,
            DistributedDataParallelConfig(grad_reduce_in_fp32=low, use_distributed_optimizer=adam.distributed),
            module,
        )
        self.optimizer = self._optimizer(
            OptimizerConfig(
                lr=adam.lr,
                weight_decay=adam.weight_decay,
                adam_beta1=adam.beta1,
                adam_beta2=adam.beta2,
                adam_eps=adam.eps,
                clip_grad=adam.clip_grad,
                bf16=low,
                params_dtype=dtype,
                use_distributed_optimizer=adam.distributed,
            )
        )

    def _optimizer(self, config: OptimizerConfig) -> Any:
        # get_megatron_optimizer() communicates over all ranks; only those of the last pipeline stage have a drafter.
        ps = parallel_state
        replicas = ps.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=True)
        replicas_gloo = ps.get_data_parallel_group_gloo(with_context_parallel=True, partial_data_parallel=True)
        if self.pipelined:
            shards = ps.get_model_parallel_group()
            everyone = ps.get_intra_distributed_optimizer_instance_group()
        else:
            shards = ps.get_tensor_model_parallel_group()
            everyone = ps.get_tensor_and_data_parallel_group(with_context_parallel=True)
        return _get_megatron_optimizer_based_on_param_groups(
            config=config,
            model_chunks=[self.ddp],
            param_groups=_groups(self.ddp, config),
            per_model_buffers={0: self.ddp.buffers},
            model_parallel_group=shards,
            data_parallel_group=replicas,
            data_parallel_group_gloo=replicas_gloo,
            data_parallel_group_idx=shards.rank(),
            intra_dist_opt_group=everyone,
        )

    def zero_grad(self) -> None:
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()

    def optimized(self) -> Iterator[tuple[str, tuple[Tensor, int]]]:
        """By parameter name: the tensor that the inner optimizer updates, and where it begins in the flat parameter.

        Under the distributed optimizer that is this replica's part; a parameter of which it has none is left out.
        """
        outer = self.optimizer
        copies = {id(model): copy for model, copy in _float32_copies(outer)}
        for name, parameter in self.ddp.module.named_parameters():
            if not self.adam.distributed:
                yield name, (copies.get(id(parameter), parameter), 0)
            elif parameter in outer.model_param_group_index_map:
                group, order = outer.model_param_group_index_map[parameter]
                start = outer._get_model_param_range_map(parameter)["param"].start
                yield name, (outer.optimizer.param_groups[group]["params"][order], start)

    def start_from(self, updates_before: int) -> None:
        """Make empty moments, as if `updates_before` updates had been taken, for a caller that fills them in."""
        self.updates_before = updates_before
        self.create_moments()

    def create_moments(self) -> None:
        """Give every parameter an optimizer state to load into, or none where no update was ever taken.

        torch's AdamW counts updates in that state, the fused ones in the group.
        """
        inner = self.optimizer.optimizer
        updates = self.steps + self.updates_before
        if not updates:
            inner.state.clear()
            return
        counts_in_state = isinstance(inner, torch.optim.AdamW)
        for group in inner.param_groups:
            for parameter in group["params"]:
                state = inner.state[parameter]
                if not state:
                    state |= {"exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}
                    if counts_in_state:
                        state["step"] = torch.tensor(float(updates))
        if not counts_in_state:
            for group in self.optimizer.param_groups:
                group["step"] = updates

    def finalize(self, *_: Any, **__: Any) -> None:
        """Sum gradients over replicas, then over ranks that share norms (sequence parallel) or tied embeddings."""
        if self.pipelined:
            self._biases_before = [(bias, bias.clone()) for bias in experts.biases(self.ddp).values()]
            finalize_model_grads([self.ddp])  # moves the biases, too
        else:
            self.ddp.finish_grad_sync()
            _allreduce_non_tensor_model_parallel_grads([self.ddp], self.ddp.config)

    def step(self, allowed: bool = True) -> tuple[float, bool]:
        """Clip and update; return (gradient norm before clipping, updated?). No update if the norm is not finite."""
        self.optimizer.prepare_grads()
        norm = float(self.optimizer.get_grad_norm())
        if not (allowed and math.isfinite(norm)):
            for bias, before in self._biases_before:
                bias.copy_(before)
            return norm, False
        if self.adam.clip_grad > 0:
            clip_grad_by_total_norm_fp32(self.optimizer.get_parameters(), self.adam.clip_grad, norm)
        self.steps += 1
        for group in self.optimizer.param_groups:
            group["lr"] = self.adam.rate(self.steps, self.updates_before)
            group["weight_decay"] = self.adam.weight_decay * group["wd_mult"]
        self.optimizer.step_with_ready_grads()
        return norm, True


def _groups(ddp: DistributedDataParallel, config: OptimizerConfig) -> list[dict[str, Any]]:
    """Make Megatron's parameter groups: matrices, and parameters without weight decay."""
    common = {"lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False, "default_config": True}
    common |= {"max_lr": config.lr, "min_lr": config.min_lr}

    def group(decayed: bool) -> dict[str, Any]:
        params: list[Tensor] = [p for p in ddp.parameters() if p.requires_grad and (p.dim() > 1) == decayed]
        return {"params": params, "wd_mult": 1.0 if decayed else 0.0, **common}

    return [group(True), group(False)]


def _float32_copies(optimizer: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Each bfloat16 parameter of Megatron's optimizer with its float32 copy; nothing for other parameters."""
    groups = getattr(optimizer, "float16_groups", []), getattr(optimizer, "fp32_from_float16_groups", [])
    for models, copies in zip(*groups, strict=True):
        yield from zip(models, copies, strict=True)
