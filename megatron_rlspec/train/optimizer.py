"""Megatron's DDP and optimizers, one pair for the policy and one for the drafter, with no tensor in common.

`step.py` makes the policy's `Learner`, `drafter_step.py` the drafter's. `checkpoint.py` saves and loads both.

One optimizer for both would clip both by one norm and skip both after one overflow. One gradient buffer for both would
split the all-reduce differently and round the policy's gradient differently on three ranks or more.

With expert parallelism each of the two has two parts, as in Megatron's `get_megatron_optimizer`: experts, and all other
parameters. Ranks that are replicas of each other in one part hold different shards of the other. So each part has its
own optimizer, sums gradients over its own replicas and its squared norm over its own shards. Megatron's
`ChainedOptimizer` makes one gradient norm of both, and both are clipped by that norm.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.distributed.finalize_model_grads import (
    _allreduce_non_tensor_model_parallel_grads,
)
from megatron.core.optimizer import OptimizerConfig as MegatronConfig
from megatron.core.optimizer import _get_megatron_optimizer_based_on_param_groups
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megatron_rlspec.config import OptimizerConfig


@dataclass(frozen=True)
class Part:
    """A share of a module's parameters, all split over the same ranks, with Megatron's optimizer for them.

    experts    True: the experts, which are split over expert-parallel ranks; False: all other parameters
    optimizer  Megatron's `MegatronOptimizer` of these parameters; the experts' has none on a stage without experts
    replicas   the ranks that hold the same shard; `checkpoint.py` names files by the rank in this group
    """

    experts: bool
    optimizer: Any
    replicas: dist.ProcessGroup

    @property
    def groups(self) -> list[dict[str, Any]]:
        """Return the parameter groups, those of `_parameter_groups` in their order; [] without parameters."""
        return self.optimizer.param_groups

    def holds(self, parameter: Tensor) -> bool:
        """Return whether the module's `parameter` belongs to this part."""
        return _is_expert(parameter) == self.experts


class Learner:
    """A module with its own gradient buffers and its own AdamW. One-dimensional parameters have no weight decay.

    One step: `zero_grad`, backward passes through `ddp`, then `finalize` once, which sums gradients over ranks, and
    `step` once. Megatron's schedule calls the policy's `finalize`, and `DrafterStep.update` the drafter's.
    Construction, `finalize` and `step` are collective over the ranks that hold a part of the module; construct a
    Learner on exactly these.

    pipelined  True: the module is split over pipeline stages (the policy). False: it is whole on this one (the drafter)
    overlap    sum gradients over replicas while the last micro-batch's backward still computes. The schedule must run
               the other micro-batches in `ddp.no_sync()`. Not for the drafter: its backward runs in the forward
               pass of every micro-batch, without `no_sync`
    pace       the learning rate decays by the number of updates of this other learner, if it has made any; None: by the
               learner's own. The drafter can have several updates in a step, or none, and follows the policy
    steps      updates so far, also those before a resume; `checkpoint.py` saves and sets it
    parts      one, or with expert parallelism two, in this order: all other parameters, experts
    """

    def __init__(
        self,
        module: MegatronModule,
        adam: OptimizerConfig,
        *,
        pipelined: bool,
        overlap: bool = False,
        pace: Learner | None = None,
    ) -> None:
        dtype = module.config.params_dtype
        is_bfloat16 = dtype == torch.bfloat16
        if adam.distributed and dtype == torch.float64:
            raise ValueError(
                "optimizer.distributed keeps gradients in float32; with model.dtype=float64 it must be off"
            )
        if adam.offload and not is_bfloat16:
            raise ValueError(
                f"optimizer.offload needs model.dtype=bfloat16, whose weights have float32 copies; got {dtype}"
            )
        # None is off: what `auto` means is decided before (`memory_choices.with_distributed`).
        adam = adam.model_copy(update={"distributed": bool(adam.distributed)})
        self.adam = adam
        self.pipelined = pipelined
        self.steps = 0
        self._pace = pace or self
        self._offloaded = False  # whether `release_memory` moved the optimizer to the host
        self.ddp = DistributedDataParallel(
            module.config,
            DistributedDataParallelConfig(
                grad_reduce_in_fp32=is_bfloat16,
                use_distributed_optimizer=adam.distributed,
                overlap_grad_reduce=overlap,
            ),
            module,
        )
        config = MegatronConfig(
            lr=adam.lr,
            weight_decay=adam.weight_decay,
            adam_beta2=adam.beta2,
            clip_grad=adam.clip_grad,
            bf16=is_bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=adam.distributed,
        )
        self.parts = [self._build_part(config, experts=False)]
        if module.config.num_moe_experts and module.config.expert_model_parallel_size > 1:
            self.parts.append(self._build_part(config, experts=True))
        self.optimizer = ChainedOptimizer([part.optimizer for part in self.parts])

    def _build_part(self, config: MegatronConfig, *, experts: bool) -> Part:
        """Build one part as Megatron's `get_megatron_optimizer` does.

        That function communicates over all ranks, and only those of the last pipeline stage have a drafter. So this
        calls the private function behind it, with groups of the ranks that have the module.
        """
        # replicas  the ranks over which gradients are summed
        # shards    the ranks over which squared norms are summed: `stage` has those of this pipeline stage, and
        #           `all_stages` those of all
        # instance  takes the place of `shards` with a distributed optimizer, whose state is split over replicas, too
        # "partial" groups are what `get_megatron_optimizer` takes. Here they are whole: there is one instance.
        if experts:
            replicas = ps.get_expert_data_parallel_group(partial_expert_data_parallel=True)
            replicas_gloo = ps.get_expert_data_parallel_group_gloo(
                partial_expert_data_parallel=True
            )
            stage = ps.get_expert_tensor_and_model_parallel_group
            all_stages = ps.get_expert_tensor_model_pipeline_parallel_group
        else:
            replicas = ps.get_data_parallel_group(
                with_context_parallel=True, partial_data_parallel=True
            )
            replicas_gloo = ps.get_data_parallel_group_gloo(
                with_context_parallel=True, partial_data_parallel=True
            )
            stage = ps.get_tensor_model_parallel_group
            all_stages = ps.get_model_parallel_group
        if self.pipelined:
            shards = all_stages()
            instance = ps.get_intra_distributed_optimizer_instance_group()
        else:
            shards = stage()
            instance = ps.get_tensor_and_data_parallel_group(with_context_parallel=True)
        groups = _parameter_groups(self.ddp, config, experts=experts)
        with warnings.catch_warnings():
            # Megatron warns of a stage without experts. Such a stage is no mistake.
            warnings.filterwarnings("ignore", message=".*there is no optimizer on RANK")
            optimizer = _get_megatron_optimizer_based_on_param_groups(
                config=config,
                model_chunks=[self.ddp],
                param_groups=groups,
                per_model_buffers={  # by the index in `model_chunks`
                    0: self.ddp.expert_parallel_buffers if experts else self.ddp.buffers
                },
                model_parallel_group=shards,
                data_parallel_group=replicas,
                data_parallel_group_gloo=replicas_gloo,
                data_parallel_group_idx=shards.rank(),
                intra_dist_opt_group=instance,
            )
        return Part(experts, optimizer, replicas)

    def release_memory(self) -> None:
        """Free the gradient buffers and, with `optimizer.offload`, move Adam's state and float32 weights to the host.

        The next `zero_grad` takes all of it back; no backward pass may run before it. Safe to repeat.
        """
        # Only the storage is emptied. The tensor stays, because gradients of parameters and buckets are views of it.
        for gradients in self._gradients():
            gradients.untyped_storage().resize_(0)
        if self.adam.offload and not self._offloaded:
            self.optimizer.offload_to_cpu()
            self._offloaded = True

    def zero_grad(self) -> None:
        """Zero the gradients, after taking back what `release_memory` freed or moved. Backward passes come after it."""
        if self._offloaded:
            self.optimizer.restore_from_cpu()
            self._offloaded = False
        for gradients in self._gradients():
            storage = gradients.untyped_storage()
            if storage.nbytes() == 0:
                # The values are undefined until `zero_grad_buffer` below.
                storage.resize_(gradients.nbytes)
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()

    def _gradients(self) -> list[Tensor]:
        """Return Megatron's gradient buffers. Gradients of parameters and buckets are views of them."""
        buffers = self.ddp.buffers + self.ddp.expert_parallel_buffers
        return [buffer.grad_data for buffer in buffers]

    def finalize(self, *_: Any, **__: Any) -> None:
        """Sum gradients over replicas, then over ranks that share norms (sequence parallel) or tied embeddings.

        Call it once, after the last backward pass. Megatron's schedule calls it with the model and a count of tokens.
        Both are ignored: losses are divided by the step's count already.
        """
        if self.pipelined:
            finalize_model_grads([self.ddp])
        else:
            self.ddp.finish_grad_sync()
            _allreduce_non_tensor_model_parallel_grads([self.ddp], self.ddp.config)

    def step(self, allowed: bool = True) -> tuple[float, bool]:
        """Clip and update; return (gradient norm before clipping, updated?). No update if the norm is not finite.

        allowed  False: no update. It must be equal on all ranks

        Weights are changed in place. After no update the gradients are still those of this step, until `zero_grad`.
        """
        # The norm is collective, so every rank computes it, also where `allowed` is False.
        self.optimizer.prepare_grads()
        norm = float(self.optimizer.get_grad_norm())
        if not (allowed and math.isfinite(norm)):
            return norm, False
        if self.adam.clip_grad > 0:
            for part in self.parts:
                parameters = part.optimizer.get_parameters()
                clip_grad_by_total_norm_fp32(parameters, self.adam.clip_grad, norm)
        # Counted before `rate` is called, so that the first update of a warm-up has a rate above 0. A skipped update
        # does not count.
        self.steps += 1
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate()
            group["weight_decay"] = self.adam.weight_decay * group["wd_mult"]
        self.optimizer.step_with_ready_grads()
        return norm, True

    def rate(self) -> float:
        """Return the learning rate of the newest update: linear warm-up, linear decay to a tenth by `pace`."""
        adam = self.adam
        warmup = 1.0
        if adam.warmup_steps:
            warmup = min(1.0, self.steps / adam.warmup_steps)
        decay = 1.0
        if adam.decay_steps:
            # A policy that is not trained has 0 updates. Then the drafter's rate decays by its own updates.
            paced_steps = self._pace.steps or self.steps
            decay = max(0.1, 1 - 0.9 * paced_steps / adam.decay_steps)
        return adam.lr * min(warmup, decay)


def _is_expert(parameter: Tensor) -> bool:
    """Return whether the parameter is an expert's. Under expert parallelism Megatron gives it `allreduce=False`."""
    return not getattr(parameter, "allreduce", True)


def _parameter_groups(
    ddp: DistributedDataParallel, config: MegatronConfig, *, experts: bool
) -> list[dict[str, Any]]:
    """Make Megatron's parameter groups: matrices, then parameters without weight decay; [] without parameters.

    `step` reads "wd_mult", and sets "lr" and "weight_decay"; the other keys are those that Megatron's optimizer
    expects. The order of groups and parameters is part of a checkpoint (`checkpoint._named_tensors`): do not change it.
    """
    common = {
        "lr_mult": 1.0,
        "is_expert_parallel": experts,
        "is_decoupled_lr": False,
        "default_config": True,
        "max_lr": config.lr,
        "min_lr": config.min_lr,
    }
    decayed: list[Tensor] = []
    others: list[Tensor] = []
    for parameter in ddp.parameters():
        if not parameter.requires_grad or _is_expert(parameter) != experts:
            continue
        if parameter.dim() > 1:
            decayed.append(parameter)
        else:
            others.append(parameter)
    if not decayed and not others:
        return []
    return [
        {"params": decayed, "wd_mult": 1.0, **common},
        {"params": others, "wd_mult": 0.0, **common},
    ]
