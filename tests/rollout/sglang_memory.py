"""Print the share of memory that SGLang gives to weights and caches by itself: `python sglang_memory.py JOBS`.

JOBS is JSON, {name: [bytes of the GPU, options of SGLang]}. torch reports eight GPUs of compute capability 9.0. Apart
from that, only compiled packages are replaced, and none of their functions is called.
"""

import json
import os
import sys
from types import SimpleNamespace

import torch

GIB = 1 << 30


def as_on(total: int) -> None:
    """Let torch report GPUs of `total` bytes."""
    gpu = SimpleNamespace(major=9, minor=0, name="NVIDIA", total_memory=total, multi_processor_count=132, uuid="0")
    torch.version.cuda = "13.0"
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 8
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch.cuda.get_device_properties = lambda *_: gpu
    torch.cuda.get_device_name = lambda *_: gpu.name
    torch.cuda.mem_get_info = lambda *_: (total - GIB, total)


as_on(80 * GIB)
from megatron_rlspec.rollout.sglang.cpu import stand_ins  # noqa: E402

stand_ins.install()
for name in stand_ins.ENVIRONMENT:
    del os.environ[name]
os.environ["SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK"] = "1"

from sglang.srt.arg_groups import memory_hook, overrides  # noqa: E402
from sglang.srt.server_args import ServerArgs  # noqa: E402


def resolved(total: int, options: dict) -> dict:
    as_on(total)
    memory_hook.get_device_memory_capacity = lambda *_: total / (1 << 20)
    server = ServerArgs(**options)
    server.resolve_once()
    found = overrides.resolving_view(server)
    return {"share": found.mem_fraction_static, "chunk": found.chunked_prefill_size}


if __name__ == "__main__":
    print(json.dumps({name: resolved(*job) for name, job in json.loads(sys.argv[1]).items()}))
