"""What torch's compiler makes of SGLang's keyed draw on a GPU; test_token_filter.py runs it in a process of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from unittest import mock

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch._inductor.ir import Layout
from torch._inductor.runtime import hints
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.library import Library

VOCABULARY = 151_680  # MiMo-7B
NODES = 256 * 4  # of a round of 256 requests and three drafts


@pytest.fixture(scope="module")
def sampler(sglang_models: ModuleType) -> ModuleType:
    from sglang.srt.layers import sampler

    return sampler


@contextmanager
def fake_gpu() -> Iterator[None]:
    """Let Inductor schedule kernels for an H100 that is not there."""
    h100 = hints.DeviceProperties(
        type="cuda", index=0, multi_processor_count=132, cc=90, major=9, regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048, warp_size=32,
    )  # fmt: skip
    cuda = "torch._dynamo.device_interface.CudaInterface"
    with ExitStack() as patches:
        for name, value in {
            "torch._inductor.runtime.hints.DeviceProperties.create": lambda device: h100,
            "torch.cuda.get_device_properties": lambda *_: h100,
            "torch.cuda.get_device_capability": lambda *_: (9, 0),
            "torch.cuda.current_device": lambda *_: 0,
            "torch.cuda.is_available": lambda: True,
            "torch._inductor.scheduler.has_triton": lambda *_, **__: True,
            f"{cuda}.Worker.get_device_properties": staticmethod(lambda *_: h100),
            f"{cuda}.get_compute_capability": staticmethod(lambda *_: 90),
        }.items():
            patches.enter_context(mock.patch(name, value))
        yield


@pytest.mark.parametrize("nodes", [1, 7, NODES])
def test_the_compiled_draw_keeps_the_noise_out_of_memory(sampler, nodes):
    """Inductor fuses the float64 noise into the reduction. Only the 32-bit hash is a buffer of nodes × vocabulary."""
    library = Library(f"rlspec_test_{nodes}", "DEF")  # SGLang's hash is a Triton kernel: opaque here
    library.define("murmur(Tensor seeds, Tensor positions, Tensor columns) -> Tensor")
    hashed = lambda s, p, c: torch.empty(len(s), len(c), dtype=torch.uint32, device=s.device)  # noqa: E731
    library.impl("murmur", hashed, "Meta")
    murmur = getattr(torch.ops, f"rlspec_test_{nodes}").murmur
    draw = getattr(sampler.multinomial_with_seed, "_torchdynamo_orig_callable", sampler.multinomial_with_seed)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode, fake_gpu(), mock.patch.object(sampler, "murmur_hash32", murmur):
        ids = torch.empty(nodes, dtype=torch.int64, device="cuda:0")
        given = (torch.empty(nodes, VOCABULARY, device="cuda:0"), ids, ids.clone())
        traced = make_fx(functionalize(draw), tracing_mode="fake", decomposition_table=select_decomp_table())(*given)
        graph = GraphLowering(traced, example_inputs=given, shape_env=mode.shape_env)
        with V.set_graph_handler(graph), V.set_fake_mode(mode), V.set_debug_handler(DebugContext()):
            graph.run(*given)
            graph._update_scheduler()
        nodes_of = {buffer.get_name(): buffer.node for buffer in graph.scheduler.name_to_buf.values()}
    kept = [node for name, node in nodes_of.items() if name not in graph.removed_buffers]
    sized = [node for node in kept if isinstance(node.layout, Layout)]
    large = [node.get_dtype() for node in sized if len(node.get_size()) > 1 and node.get_size()[-1] == VOCABULARY]
    assert large == [torch.uint32]


def test_a_new_number_of_nodes_seldom_compiles_anew(sampler, monkeypatch):
    monkeypatch.delenv("TORCHDYNAMO_DISABLE")  # set for engines on a CPU
    counter = CompileCounter()
    draw = getattr(sampler.multinomial_with_seed, "_torchdynamo_orig_callable", sampler.multinomial_with_seed)
    compiled = torch.compile(draw, dynamic=True, backend=counter)
    hashed = lambda seeds, positions, columns: (seeds.long()[:, None] * positions[:, None] + columns).int()  # noqa: E731
    with mock.patch.object(sampler, "murmur_hash32", hashed):
        for nodes in (1, 2, 7, 256, 1536):
            compiled(torch.zeros(nodes, 40), torch.arange(nodes), torch.arange(nodes))
    assert 1 <= counter.frame_count <= 3  # the first time, and at most two more
