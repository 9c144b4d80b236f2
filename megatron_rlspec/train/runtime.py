"""The process of a rank: its device, Megatron's groups, random streams, and options that depend on the machine.

`Trainer` (`step.py`) calls `init_distributed` before it builds a model. `commands/training.py` calls `leave` last.
Messages between ranks over gloo are in `host/ranks.py`; the layout of ranks is an option (`config`), and nothing here
chooses it.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.tensor_parallel import layers

from megatron_rlspec.config import ParallelConfig
from megatron_rlspec.host import loopback, ranks
from megatron_rlspec.host.ports import JOBS, free_port
from megatron_rlspec.train import without_cuda

LEAVING_SECONDS = 10.0  # the longest that `leave` waits


def device() -> torch.device:
    """Return the device of this rank."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def be_deterministic() -> None:
    """Let kernels add in one order, for the rest of the process.

    Call it before the first product on a GPU, when cuBLAS reads its variable, and before layers are built, when
    Transformer Engine's attention reads its own. From then on torch raises RuntimeError in an operation that has no
    deterministic kernel. With `warn_only` torch would not raise, but its flash attention would stay nondeterministic.
    """
    os.environ |= {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}
    torch.use_deterministic_algorithms(True)
    # No need to fill new tensors with NaN, which only helps to find reads of uninitialised memory.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # set by its metaclass


def placement() -> dict[str, Any]:
    """Return this rank's data- and context-parallel position, as arguments of `packing.pack.pack`."""
    return {
        "dp_size": parallel_state.get_data_parallel_world_size(),
        "dp_rank": parallel_state.get_data_parallel_rank(),
        "cp_size": parallel_state.get_context_parallel_world_size(),
        "cp_rank": parallel_state.get_context_parallel_rank(),
    }


def set_launch_env() -> None:
    """Set torchrun's variables, for a job of one rank, in a process that torchrun did not start (it has no RANK)."""
    if "RANK" in os.environ:
        return
    os.environ |= {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port(JOBS)),
    }


def init_distributed(parallel: ParallelConfig, seed: int = 1) -> None:
    """Join the job, make Megatron's groups if there are none yet, and seed its random streams. Collective.

    A second call keeps the groups, whatever `parallel` says, and only seeds again. On a GPU each rank takes the device
    with the number LOCAL_RANK.
    """
    without_cuda.install()  # first: on a machine without a GPU, all else needs its replacements
    if not parallel_state.model_parallel_is_initialized():
        _create_groups(parallel)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def _create_groups(parallel: ParallelConfig) -> None:
    """Make torch's process group, if there is none, and Megatron's groups."""
    set_launch_env()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if not dist.is_initialized():
        loopback.bind_stores()  # before the store opens, which would listen on all addresses
        dist.init_process_group(
            "nccl" if torch.cuda.is_available() else "gloo", timeout=ranks.PATIENCE
        )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        context_parallel_size=parallel.context,
        expert_model_parallel_size=parallel.expert,
    )


def shut_down() -> None:
    """Leave the job: Megatron's groups, which refer to torch's, then torch's. Without a job it does nothing."""
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def leave() -> None:
    """Destroy the process groups at the end of a command, also after an error. Otherwise NCCL prints a warning.

    Destroying waits for the other ranks, and after an error these may not come. So a thread does it, and this function
    waits LEAVING_SECONDS at most. No error is raised. Use no collective afterwards.
    """

    def act() -> None:
        with contextlib.suppress(Exception):
            # Wait for this rank's kernels: other ranks still receive from them, and would fail if this rank left.
            if torch.cuda.is_initialized():
                torch.cuda.synchronize(int(os.environ.get("LOCAL_RANK", "0")))
        with contextlib.suppress(Exception):
            shut_down()

    # A daemon: after LEAVING_SECONDS the process can end although the thread still waits.
    leaving = threading.Thread(target=act, daemon=True)
    leaving.start()
    leaving.join(LEAVING_SECONDS)


def first_message(message: str) -> str:
    """Return, on every rank, the first rank's message that is not empty; "" if all are. Collective."""
    texts: list[str] = ranks.job().share(message)
    return next(filter(None, texts), "")


def has_transformer_engine() -> bool:
    """Return whether layers are Transformer Engine's: on a GPU, if it loads (`train/__init__.py`)."""
    from megatron.core.models.gpt import gpt_layer_specs

    return torch.cuda.is_available() and gpt_layer_specs.HAVE_TE


def device_options() -> dict[str, Any]:
    """Return the `TransformerConfig` fields that depend on the machine, as a new dict."""
    gpu = torch.cuda.is_available()
    return {
        "use_cpu_initialization": not gpu,
        "bias_activation_fusion": has_transformer_engine(),
        # Megatron names this field after Transformer Engine. True means: the activation is the one in the layer spec
        # (`layer_specs.py`).
        "use_te_activation_func": not has_transformer_engine(),
        "bias_dropout_fusion": gpu,
        "masked_softmax_fusion": False,
        # The option is for Transformer Engine's layers. But Megatron's own output layer refuses it without Apex's
        # kernel.
        "gradient_accumulation_fusion": has_transformer_engine()
        and layers._grad_accum_fusion_available,
        "apply_rope_fusion": has_transformer_engine(),
        "batch_p2p_sync": gpu,
    }


@contextlib.contextmanager
def own_random_stream(seed: int) -> Iterator[None]:
    """Seed torch's and Megatron's generators inside the `with` block, and restore them after it.

    Call it after `init_distributed`.

    `drafter.py` builds drafters in it, so that the policy draws the same random numbers with and without a drafter.
    """
    tracker = tensor_parallel.get_cuda_rng_tracker()
    states = dict(tracker.get_states())
    seeds = set(tracker.seeds_)  # restored, too: Megatron's tracker refuses a seed that it has seen
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        tensor_parallel.model_parallel_cuda_manual_seed(seed)
        torch.manual_seed(seed)
        try:
            yield
        finally:
            tracker.set_states(states)
            tracker.seeds_ = seeds
