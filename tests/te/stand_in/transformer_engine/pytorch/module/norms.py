"""Norms. Our layers have RMSNorm alone."""

import torch
import torch.nn.functional as F
from torch import nn


def rms_norm(x, weight, eps):
    exact = torch.promote_types(x.dtype, torch.float32)
    return F.rms_norm(x.to(exact), weight.shape, weight.to(exact), eps).to(x.dtype)


class RMSNorm(nn.Module):
    def __init__(self, hidden_size, eps=1e-5, sequence_parallel=None, zero_centered_gamma=False, **kwargs):
        super().__init__()
        unknown = set(kwargs) - {"device", "dtype", "params_dtype"}
        assert not unknown and not zero_centered_gamma, unknown
        dtype = kwargs.get("params_dtype") or kwargs.get("dtype") or torch.get_default_dtype()
        self.eps = eps
        self.sequence_parallel = sequence_parallel
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=dtype, device=kwargs.get("device")))
        if sequence_parallel is not None:
            self.weight.sequence_parallel = sequence_parallel

    def get_extra_state(self):
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state):
        assert state is None or state.numel() == 0, "this stand-in has no FP8"

    def forward(self, inp):
        return rms_norm(inp, self.weight, self.eps)
