"""Choose between GPU kernels and plain torch: one place, one line in the log."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from importlib import import_module
from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rlspec.noise import draw

Agrees = Callable[[ModuleType, torch.device], bool]
logger = logging.getLogger(__name__)


def sampling(logits: Tensor) -> ModuleType | None:
    """Return `kernels.sampling` if it draws from these logits, None for plain torch.

    It does on a CUDA device with Triton, if it draws the tokens there that plain torch draws. The first call compares
    them, so it comes before graphs are captured.
    """
    if not logits.is_cuda or logits.dtype == torch.float64 or not torch.cuda.is_available():
        return None
    return _choose("sampling", draws_agree, "tokens are drawn", logits.device)


def draws_agree(kernel: ModuleType, device: torch.device) -> bool:
    """Return whether `kernels.sampling` draws what `noise.draw` does, from 64 rows."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(64, 5000, generator=generator).to(device)
    rows = torch.arange(64, device=device)
    tokens, _ = kernel.sample(logits, rows, rows * 7, torch.ones(64, device=device))
    return torch.equal(draw(logits, rows, rows * 7), tokens)


def head(
    weight: Tensor, agrees: Agrees, group: dist.ProcessGroup | None = None
) -> ModuleType | None:
    """Return `kernels.head` if it computes losses from logits of this output layer, None for plain torch.

    It does on a CUDA device with Triton, in bfloat16 and float32, if it `agrees` with plain torch there, and on all
    ranks of `group`, which have parts of the layer, or on none.
    """
    if not weight.is_cuda or weight.dtype not in (torch.float32, torch.bfloat16):
        return None
    kernel = _choose("head", agrees, "losses are computed", weight.device)
    if group is not None and not on_all(kernel is not None, group, weight.device):
        return None
    return kernel


@cache
def on_all(here: bool, group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return whether all ranks of `group` have kernels. The first call of a rank waits for the others."""
    flag = torch.tensor(int(here), device=device)
    dist.all_reduce(flag, dist.ReduceOp.MIN, group=group)
    return bool(flag)


@cache
def _choose(name: str, agrees: Agrees, what: str, device: torch.device) -> ModuleType | None:
    reason = "Triton is not installed"
    try:
        kernel = import_module(f"megatron_rlspec.kernels.{name}")
        if agrees(kernel, device):
            logger.info("rlspec: %s by kernels/%s.py on %s", what, name, device)
            return kernel
        reason = "the kernel's results are other ones here"
    except ImportError:
        pass
    except Exception as error:
        # of Triton's compiler, whose version is not ours; plain torch has the same results
        reason = f"the kernel does not run here: {error}"
    logger.warning(
        "rlspec: %s by plain torch on %s, in more memory and time: %s", what, device, reason
    )
    return None
