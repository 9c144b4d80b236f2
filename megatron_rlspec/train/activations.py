"""What the tensors of one micro-batch take: the trainer's own forward and backward pass, on tensors without values.

Nothing in a micro-batch depends on a value that the device holds, so torch's meta device can run all of it: the policy,
the output layer's chunks, the drafter with its attention, the prediction of acceptance, and the backward pass.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed._tools.fake_collectives  # noqa: F401  collectives of tensors without values
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_rlspec.packing.pack import pack
from megatron_rlspec.train.model import describe
from megatron_rlspec.train.step import Trainer
from megatron_rlspec.types import PackedBatch, Prompt, Sample

_META = torch.device("meta")
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Activations:
    """Bytes of one micro-batch on a rank: after its forward pass until its backward pass, and at most."""

    after_forward: int
    peak: int


def measure_micro_batch(trainer: Trainer) -> Activations:
    """Run a micro-batch of GRPO on the trainer of a fake job (`stages.py`), and count the bytes of its tensors.

    Every token but the first of a sequence is trained, and experts draw equally many tokens.
    """
    with mock.patch.object(MoELayer, "forward", _balanced), torch.device(_CPU), LiveBytes() as live:
        batch = _batch(trainer)
        packed = describe(batch, trainer.model_config, trainer.rope, _META)
        if not parallel_state.is_pipeline_first_stage():
            trainer.policy.set_input_tensor(_stage_input(trainer, len(batch.tokens)))
        tokens = batch.tokens.to(_META)[None]
        positions = batch.position_ids.to(_META)[None]
        hidden = trainer.policy(tokens, positions, None, packed_seq_params=packed)
        after_forward = live.now
        if trainer.last_stage:
            trainer._head_is_finite = True
            hidden, _, _ = trainer._losses("grpo", True, True, batch, packed, hidden)
        hidden.backward(torch.empty_like(hidden))
    return Activations(after_forward, live.peak)


def _stage_input(trainer: Trainer, tokens: int) -> Tensor:
    """Return what the stage before sends: hidden states `[rows, 1, H]`."""
    parallel = trainer.config.parallel
    rows = tokens // parallel.tensor if parallel.sequence else tokens
    shape = (rows, 1, trainer.model_config.hidden_size)
    dtype = trainer.model_config.params_dtype
    return torch.empty(shape, dtype=dtype, device=_META, requires_grad=True)


def _batch(trainer: Trainer) -> PackedBatch:
    """Fill a micro-batch with samples of one length, as long as they may be."""
    config = trainer.config
    parallel = config.parallel
    total = config.train.tokens_per_micro_batch // parallel.packed * parallel.packed
    count = -(-total // config.model.max_length)
    length = total // count // parallel.packed * parallel.packed
    tokens = np.zeros(length, dtype=np.int64)
    mask = (np.arange(length) > 0).astype(np.float32)
    samples = [Sample(str(i), Prompt(i, tokens[:1]), tokens, mask, -mask) for i in range(count)]
    return pack(
        samples,
        depth=config.drafter.depth,
        tokens_per_micro_batch=total,
        advantages=[1.0] * len(samples),
        cp_size=parallel.context,
        multiple=parallel.tensor if parallel.sequence else 1,
    )[0]


def untrained(learner: Any, module: nn.Module, *_: Any, **__: Any) -> None:
    """Stand in for `Learner.__init__`: no optimizer, and gradients that are freed when they are complete."""
    learner.ddp = module
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))


def _balanced(self: Any, hidden: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    """Do what `MoELayer.forward` does if every expert draws as many tokens: where they go depends on values."""
    gathered = self.config.tensor_model_parallel_size if self.config.sequence_parallel else 1
    rows = hidden.flatten(0, -2)
    routed = rows.repeat_interleave(self.config.moe_router_topk * gathered, 0)
    of_experts, _bias = self.experts.local_experts[0](routed)
    out = of_experts.unflatten(0, (len(rows), -1)).sum(1).view_as(hidden)
    if self.shared_experts is not None:
        out = out + self.shared_experts(hidden)
    return out, None


class LiveBytes(TorchDispatchMode):
    """Count what operators allocate inside the `with` block: bytes `now`, and their `peak`.

    Tensors without values count with the size that they would have.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor):
                self._count(x.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._seen:
            return
        self._seen.add(key)
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._freed, key, storage.nbytes())

    def _freed(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size
