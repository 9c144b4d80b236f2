"""`rlspec` on a CPU with a fake NCCL: prints who waits on it, as `WAIT file function`.

Its groups are gloo's, but they have another name. Groups that a program asks for by the name gloo stay what they are.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

import megatron_rlspec
from megatron_rlspec import cli

NAME = "device"
PACKAGE = Path(megatron_rlspec.__file__).parent


def waiting():
    """Return the file and the function of the package that wait now."""
    frame = sys._getframe(2)
    while not Path(frame.f_code.co_filename).is_relative_to(PACKAGE) or frame.f_code.co_name == "__torch_function__":
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).relative_to(PACKAGE)} {frame.f_code.co_name}"


class Device(dist.ProcessGroup):
    """gloo under another name, which prints who calls it."""

    def __init__(self, store, rank, size, timeout):
        super().__init__(rank, size)
        gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._inner = dist.ProcessGroup(rank, size)
        for group in (self, self._inner):
            group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)

    def getBackendName(self):  # noqa: N802
        return NAME


def noted(name):
    def call(self, *arguments):
        print(f"WAIT {waiting()}", flush=True)
        return getattr(self._inner, name)(*arguments)

    return call


WORDS = ("all", "barrier", "broadcast", "gather", "recv", "reduce", "scatter", "send", "_all", "_reduce", "_start_coal")
for name in dir(dist.ProcessGroup):
    if name.startswith(WORDS):
        setattr(Device, name, noted(name))

if __name__ == "__main__":
    dist.Backend.register_backend(NAME, Device, devices=["cpu"])
    inner = dist.init_process_group
    dist.init_process_group = lambda backend, **options: inner(NAME, **options)
    cli.main()
