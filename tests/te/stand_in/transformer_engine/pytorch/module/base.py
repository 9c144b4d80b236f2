"""What all modules with FP8 state share."""

import torch
from torch import nn


def get_dummy_wgrad(shape, dtype, zero=False):
    return (torch.zeros if zero else torch.empty)(shape, dtype=dtype)


class TransformerEngineBaseModule(nn.Module):
    """A module with Transformer Engine's extra state, which is empty as FP8 is off, and a tensor-parallel group."""

    def __init__(self):
        super().__init__()
        self.fp8 = False
        self.fp8_calibration = False
        self.fp8_meta = {"fp8_checkpoint": False}
        self.tp_group = None
        self.tp_size = 1

    def init_fp8_metadata(self, num_gemms=1):
        return None

    def get_extra_state(self):
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state):
        assert state is None or state.numel() == 0, "this stand-in has no FP8"

    def set_tensor_parallel_group(self, tp_group):
        self.tp_group = tp_group

    def _join(self, tp_group, tp_size):
        self.tp_size = tp_size if tp_group is None else tp_group.size()
        if tp_group is not None or tp_size == 1:
            self.set_tensor_parallel_group(tp_group)

    def _make(self, name, shape, params_dtype, device, init, tracker=None, stream=None):
        """Register a parameter, initialised from the tracker's stream of that name."""
        parameter = nn.Parameter(torch.empty(shape, dtype=params_dtype, device=device))
        self.register_parameter(name, parameter)
        with torch.no_grad():
            if tracker is None:
                init(parameter)
            else:
                with tracker().fork(*filter(None, [stream])):
                    init(parameter)

    def _check(self, x):
        for name, parameter in self.named_parameters():
            assert x.dtype == parameter.dtype, f"input is {x.dtype}, but {name} is {parameter.dtype}"
