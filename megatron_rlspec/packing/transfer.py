"""Move a micro-batch's tensors to the device while it computes."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Return `x` on `device`. A copy to a GPU starts from pinned memory, so it does not wait for earlier kernels."""
    if device.type != "cuda" or x.is_cuda:
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)
