"""A run records which of its engines sample on a GPU without the kernel."""

from types import SimpleNamespace

import pytest

from megatron_rlspec.run.engines import report_slow_sampling


@pytest.mark.parametrize(
    ("device", "kernels", "events"), [("cuda", "torch", 1), ("cuda", "triton", 0), ("cpu", "torch", 0)]
)
def test_plain_torch_on_a_gpu_is_an_event(device: str, kernels: str, events: int) -> None:
    recorded = []
    recorder = SimpleNamespace(event=lambda kind, message, **fields: recorded.append((kind, fields)))
    engine = SimpleNamespace(describe=lambda: {"device": device, "kernels": kernels})
    report_slow_sampling(recorder, {"engine-0": engine})
    assert recorded == [("kernels", {"engine": "engine-0"})] * events
