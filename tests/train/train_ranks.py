"""Run a function on several gloo ranks; configurations and samples for the tests in this folder."""

from __future__ import annotations

import hashlib
import io
import os
import traceback
from collections.abc import Callable
from typing import Any

import forked
import numpy as np
import torch
import torch.distributed as dist

from megatron_rlspec.config import Config, ParallelConfig
from megatron_rlspec.host import ports
from megatron_rlspec.packing.pack import pack
from megatron_rlspec.types import PackedBatch, Prompt, Sample

HF_CONFIG = {
    "architectures": ["MiMoForCausalLM"],
    "model_type": "qwen2",
    "attention_bias": True,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "num_nextn_predict_layers": 1,
    "hidden_act": "silu",
    "initializer_range": 0.2,
}


def on_ranks(size: int, function: Callable[..., Any], *args: Any, timeout: float = 840) -> list[Any]:
    """Return what `function(*args)` returns on each of `size` ranks. Raises AssertionError with a rank's traceback."""
    port = ports.free_port(ports.JOBS)
    context = forked.context()
    pipes = [context.Pipe() for _ in range(size)]
    payload = _pack(args)
    ranks = [
        context.Process(target=_rank, args=(rank, size, port, pipes[rank][1], function, payload))
        for rank in range(size)
    ]
    for process in ranks:
        process.start()
    try:
        results = []
        for rank, (receive, _) in enumerate(pipes):
            assert receive.poll(timeout), f"rank {rank} said nothing for {timeout} s"
            ok, answer = receive.recv()
            assert ok, f"rank {rank}:\n{answer}"
            results.append(_unpack(answer))
        for leave, _ in pipes:
            leave.send(None)
        return results
    finally:
        for process in ranks:
            process.join(5)
            if process.is_alive():
                process.kill()
            process.join()


def on_two(function: Callable[..., Any], *args: Any) -> list[Any]:
    """Return what `function(rank, *args)` returns on each of two ranks that have joined over gloo, without Megatron."""
    return on_ranks(2, _joined, function, args)


def _joined(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    dist.init_process_group("gloo")
    return function(dist.get_rank(), *args)


def _pack(x: Any) -> bytes:
    """Pickle a value, tensors included, without shared memory."""
    buffer = io.BytesIO()
    torch.save(x, buffer)
    return buffer.getvalue()


def _unpack(x: bytes) -> Any:
    return torch.load(io.BytesIO(x), weights_only=False)


def _rank(rank: int, size: int, port: int, pipe: Any, function: Callable[..., Any], args: bytes) -> None:
    os.environ.update(forked.rank_environment(rank, size, port))
    torch.set_num_threads(1)
    try:
        pipe.send((True, _pack(function(*_unpack(args)))))
        # gloo resets the connections of a process that ends, also where others have not read its last message.
        pipe.recv()
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    finally:
        os._exit(0)  # skip the shutdown of process groups: the job has ended or failed


def config(**sections: dict[str, Any]) -> Config:
    """Return a configuration in float64 with high learning rates, without clipping unless a test sets it."""
    defaults: dict[str, dict[str, Any]] = {
        "model": {"dtype": "float64"},
        "optimizer": {"lr": 1e-2, "clip_grad": 0.0},
        "drafter": {"lr": 1e-2, "loss": "ce"},
    }
    return Config.model_validate({key: defaults.get(key, {}) | sections.get(key, {}) for key in defaults | sections})


def samples(count: int, seed: int = 0, shortest: int = 6, longest: int = 30, vocab: int = 64) -> list[Sample]:
    """Make random samples: masks with gaps, some responses of one token, some samples without a response."""
    draw = np.random.default_rng(seed)
    out = []
    for i in range(count):
        length = int(draw.integers(shortest, longest + 1))
        prompt = int(draw.integers(1, length)) if i % 5 else length - i % 2
        tokens = draw.integers(0, vocab, length)
        mask = (np.arange(length) >= prompt) & (draw.random(length) > 0.1)
        behaviour = np.where(np.arange(length) >= prompt, -draw.random(length) * 4, 0).astype(np.float32)
        prompted = Prompt(i, tokens[:prompt])
        out.append(Sample(f"s{i:03d}", prompted, tokens, mask.astype(np.float32), behaviour, seed=1000 + i))
    return out


def use_layout(parallel: ParallelConfig) -> None:
    """Leave the job's groups if they are of another layout; otherwise they serve again, because making them is slow."""
    from megatron.core import parallel_state as ps

    sizes = {
        "tensor": ps.get_tensor_model_parallel_world_size,
        "pipeline": ps.get_pipeline_model_parallel_world_size,
        "context": ps.get_context_parallel_world_size,
        "expert": ps.get_expert_model_parallel_world_size,
    }
    if ps.model_parallel_is_initialized() and any(getattr(parallel, name) != size() for name, size in sizes.items()):
        ps.destroy_model_parallel()


def batches(chosen: list[Sample], config: Config, *, budget: int = 160, some=False) -> list[PackedBatch]:
    """Return the batches of this rank of the running job, if there is one; the drafter learns `some` samples."""
    from megatron.core import parallel_state as ps

    from megatron_rlspec.train import runtime

    place = runtime.placement() if ps.model_parallel_is_initialized() else {}
    parallel = config.parallel
    draw = np.random.default_rng(7)
    advantages = draw.normal(size=len(chosen))
    weights = draw.uniform(0.5, 2.0, size=len(chosen))
    if some:
        weights[::2] = 0
    return pack(
        chosen,
        depth=config.drafter.depth,
        tokens_per_micro_batch=budget,
        advantages=advantages.tolist(),
        drafter_weights=weights.tolist(),
        multiple=parallel.tensor if parallel.sequence else 1,
        **place,
    )


def moments(optimizer: Any) -> list[torch.Tensor]:
    """Return all state of an optimizer: torch's AdamW counts updates per parameter, fused ones in the group."""
    steps = [torch.tensor(group.get("step", 0)) for group in optimizer.param_groups if group["params"]]
    return [tensor for state in optimizer.state.values() for _, tensor in sorted(state.items())] + steps


def digest(tensors: Any) -> str:
    """Hash the bits of tensors, in order."""
    total = hashlib.sha256()
    for tensor in tensors:
        total.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()
