"""Run slime's train ranks on a machine without a GPU: an accelerator backend that slime does not have.

With it and `train.without_cuda.install`, slime's `get_batch`, loss and `train_one_step` run unchanged over gloo.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from slime.utils import accelerator
from slime.utils.accelerator.base import Accelerator

from megatron_rlspec.train import without_cuda


class CpuAccelerator(Accelerator):
    """slime's accelerator interface on the CPU: one device, no streams, no memory statistics."""

    name = device_type = "cpu"
    communication_backend_name = "gloo"

    def is_available(self) -> bool:
        return True

    def device(self, index: Any = None) -> torch.device:
        return torch.device("cpu")

    def device_name(self, index: Any = None) -> str:
        return "cpu"

    def set_device(self, index: Any) -> None:
        return None

    def current_device(self) -> str:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def synchronize(self, device: Any = None) -> None:
        return None

    def current_stream(self, device: Any = None) -> SimpleNamespace:
        return SimpleNamespace(synchronize=lambda: None)

    def empty_cache(self) -> None:
        return None

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        return (0, 0)

    def memory_allocated(self, device: Any = None) -> int:
        return 0

    def memory_reserved(self, device: Any = None) -> int:
        return 0


def install() -> None:
    """Install the CPU accelerator. Idempotent; does nothing if there is a CUDA device."""
    without_cuda.install()
    if torch.cuda.is_available():
        return
    accelerator.set_accelerator(CpuAccelerator())
    # Megatron's argument checks ask for the architecture.
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(major=9, minor=0)


def layer_spec(args: Any, config: Any, vp_stage: Any = None) -> Any:
    """`--spec`: the decoder of slime's provider with our packed attention, which runs on a CPU."""
    from megatron_rlspec.train import layer_specs

    return layer_specs.decoder_spec(config)


def packed_for_cpu(get_batch: Callable, args: Any) -> Callable:
    """Wrap slime's `get_batch`: complete `packed_seq_params` for our attention."""
    from megatron.core import parallel_state as ps

    from megatron_rlspec.cotrainer.fields import drafter_fields
    from megatron_rlspec.integrations.slime.batch import micro_batch
    from megatron_rlspec.models.rope import Rope
    from megatron_rlspec.train.attention import packed_sequences
    from megatron_rlspec.train.model import at_positions

    config = SimpleNamespace(
        kv_channels=args.kv_channels,
        params_dtype=torch.float32,
        multi_latent_attention=False,
        rotary_percent=args.rotary_percent,
    )

    def wrapped(*rest: Any, **kwargs: Any) -> Any:
        batch = get_batch(*rest, **kwargs)
        size = ps.get_context_parallel_world_size()
        rank = ps.get_context_parallel_rank()
        groups = args.num_query_groups // ps.get_tensor_model_parallel_world_size()
        here = drafter_fields(micro_batch(batch), 1, cp_rank=rank, cp_size=size)
        packed = packed_sequences(here.cu_seqlens_padded, groups, size, rank, torch.device("cpu"))
        batch["packed_seq_params"] = at_positions(packed, here.position_ids, config, Rope(float(args.rotary_base)))
        return batch

    return wrapped


def with_new_moments(load: Callable) -> Callable:
    """Wrap slime's `load_checkpoint`: the policy's moments start anew, everything else of a checkpoint is loaded.

    Without Transformer Engine this Megatron asks for moments before it loads, and cannot take torch's AdamW's back.
    """

    def loading(model: Any, optimizer: Any, *rest: Any, **kwargs: Any) -> Any:
        inners = [part.optimizer for part in getattr(optimizer, "chained_optimizers", [optimizer]) if part is not None]
        for inner in inners:
            for parameter in (p for group in inner.param_groups for p in group["params"]):
                zeros = {"exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}
                inner.state[parameter] = {"step": torch.tensor(1.0), **zeros}
        if optimizer is not None:
            optimizer.load_state_dict = lambda _: None
        found = load(model, optimizer, *rest, **kwargs)
        for inner in inners:
            inner.state.clear()
        return found

    return loading
