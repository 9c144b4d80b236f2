"""SGLang's own runner of CUDA graphs and its FlashAttention backend, on a CPU, for the target of a drafting engine.

`install()` replaces what needs a GPU and leaves the rest: batches are padded to a captured size, inputs lie in buffers
of fixed address, FlashAttention's metadata are computed as for a replay.

- A graph is a function that is called again, on the same buffers. A replay fills the outputs of all graphs with NaN.
- FlashAttention's kernel is a loop over requests. What no request covers is NaN, and what is beyond `max_seqlen_q`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

REPLAYED = "rlspec: replayed ten more graphs of uneven rounds"  # in the log
ARGUMENTS = ["--cuda-graph-backend-decode=full", "--disable-prefill-cuda-graph"]
ARGUMENTS += ["--cuda-graph-bs-decode", "2", "8", "32"]


def install() -> None:
    from sglang.srt.layers.attention import attention_registry, flashattention_backend
    from sglang.srt.model_executor import model_runner
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.model_executor.model_runner_components import cuda_graph_setup
    from sglang.srt.model_executor.runner import decode_cuda_graph_runner as decode

    kernels = ModuleType("sgl_kernel.flash_attn")
    for name in ("flash_attn_with_kvcache", "flash_attn_varlen_func", "get_scheduler_metadata"):
        setattr(kernels, name, attend)
    sys.modules["sgl_kernel.flash_attn"] = kernels
    flashattention_backend.flash_attn_with_kvcache = attend
    flashattention_backend.normal_decode_set_metadata = set_metadata
    on_cpu = attention_registry.ATTENTION_BACKENDS["intel_amx"]

    def attention(runner: Any) -> Any:
        return on_cpu(runner) if runner.is_draft_worker else flashattention_backend.FlashAttentionBackend(runner)

    attention_registry.ATTENTION_BACKENDS["intel_amx"] = attention

    def capture(*, model_runner: Any) -> Any:
        runner = None if model_runner.is_draft_worker else decode.DecodeCudaGraphRunner(model_runner)
        return cuda_graph_setup.GraphCapture(
            runner=runner, memory_phase="target_verify", memory_usage_gb=0, capture_time=0
        )

    cuda_graph_setup.capture_decode_graph = model_runner.capture_decode_graph = capture
    decode.graph_capture = no_stream
    decode.get_or_create_global_graph_capture_stream = lambda: None
    decode.resolve_decode_backend = Graphs
    ForwardMode.is_cpu_graph = ForwardMode.is_cuda_graph
    torch.cpu.is_current_stream_capturing = lambda: False


@contextmanager
def no_stream(stream: Any = None) -> Iterator[SimpleNamespace]:
    yield SimpleNamespace(stream=None)


class Graphs:
    """SGLang's backend of graphs."""

    outputs: list[torch.Tensor] = []  # of all graphs of the process
    uneven = 0  # replays

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._passes: dict[Any, tuple[Callable, Any]] = {}

    @contextmanager
    def capture_session(self, stream: Any) -> Iterator[None]:
        yield

    replay_session = contextmanager(lambda self: iter([None]))

    def capture_one(self, key: Any, forward: Callable, **kwargs: Any) -> None:
        output = forward()
        self._passes[key] = forward, output
        Graphs.outputs += tensors(output).values()

    def can_run(self, batch: Any, key: Any) -> bool:
        return key in self._passes

    def replay(self, key: Any, batch: Any, **kwargs: Any) -> Any:
        forward, output = self._passes[key]
        for tensor in Graphs.outputs:
            tensor.fill_(float("nan"))
        for name, value in tensors(forward()).items():
            getattr(output, name).copy_(value)
        if len(batch.input_ids) != batch.batch_size * self._runner.captured_req_width:
            Graphs.uneven += 1
            if Graphs.uneven % 10 == 0:
                print(REPLAYED, flush=True)
        return output


def tensors(output: Any) -> dict[str, torch.Tensor]:
    named = {field.name: getattr(output, field.name) for field in fields(output)}
    return {name: value for name, value in named.items() if isinstance(value, torch.Tensor)}


def attend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int,
    softmax_scale: float,
    causal: bool,
    **others: Any,
) -> torch.Tensor:
    """FlashAttention 3 with a paged cache: q [tokens, heads, size], caches [pages, 1, heads, size]."""
    assert causal and k_cache.shape[1] == 1
    output = torch.full_like(q, float("nan"))
    for row, length in enumerate(cache_seqlens.tolist()):
        first, last = cu_seqlens_q[row : row + 2].tolist()
        last = min(last, len(q))
        new = min(last - first, max_seqlen_q)
        if new <= 0:
            continue
        places = page_table[row, :length].long()
        repeats = q.shape[1] // k_cache.shape[2]
        keys, values = (cache[places, 0].repeat_interleave(repeats, 1).transpose(0, 1) for cache in (k_cache, v_cache))
        queries = q[first : first + new].transpose(0, 1)
        scores = queries @ keys.transpose(1, 2) * softmax_scale
        last_seen = length - (last - first) + torch.arange(new)
        hidden = torch.arange(length) > last_seen[:, None]
        probabilities = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        output[first : first + new] = (probabilities @ values).transpose(0, 1)
    return output


def set_metadata(
    cache_seqlens: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    page_table: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    max_pages: int,
    seq_lens: torch.Tensor,
    delta: int,
    page_size: int,
    *others: Any,
    **more: Any,
) -> None:
    """SGLang's kernel of the same name. Other requests' entries stay behind a row's end, as there."""
    assert page_size == 1
    cache_seqlens.copy_(seq_lens + delta)
    cu_seqlens_k[1 : len(cache_seqlens) + 1] = cache_seqlens.cumsum(0)
    for row, length in enumerate(cache_seqlens.tolist()):
        page_table[row, :length] = req_to_token[req_pool_indices[row], :length]
