"""Choose between GPU kernels and plain torch, once for each device, and log the choice.

Kernels are taken if they give plain torch's results on this machine's GPU: `draws_agree` compares the sampler, and
`losses/choice.py` the losses. The hooks in `rollout/sglang/scheduler/` call `sampling`; `losses/choice.py` calls
`losses`. The modules that need Triton are imported inside `_choose` only, because this file must work where Triton is
not installed.
"""

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

# Takes the module with the kernels and a device; returns whether the module gives plain torch's results there.
Agrees = Callable[[ModuleType, torch.device], bool]
logger = logging.getLogger(__name__)


def sampling(logits: Tensor) -> ModuleType | None:
    """Return `kernels.sampling` if it draws from these logits, None for plain torch.

    The kernel draws on a CUDA device with Triton, if it draws the same tokens there as plain torch, and not from
    float64. The first call for a device compares the tokens of both, and waits for the device. Waiting is not allowed
    while a CUDA graph is captured, so call this function once before a capture;
    `rollout/sglang/scheduler/coupled.py` does so with empty logits.
    """
    if not logits.is_cuda or logits.dtype == torch.float64 or not torch.cuda.is_available():
        return None
    return _choose("sampling", draws_agree, "tokens are drawn", logits.device)


def draws_agree(kernel: ModuleType, device: torch.device) -> bool:
    """Return whether `kernels.sampling` draws the same tokens as `noise.draw`, from 64 rows of 5,000 random logits."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(64, 5000, generator=generator).to(device)
    rows = torch.arange(64, device=device)
    tokens, _ = kernel.sample(logits, rows, rows * 7, torch.ones(64, device=device))
    return torch.equal(draw(logits, rows, rows * 7), tokens)


def losses(
    weight: Tensor, agrees: Agrees, group: dist.ProcessGroup | None = None
) -> ModuleType | None:
    """Return `kernels.losses` if it can compute losses from logits of this output layer, None for plain torch.

    weight  [V/tp, H]: kernels need a CUDA device with Triton, and bfloat16 or float32
    agrees  compares the module with plain torch on a device (`losses.choice.agrees`). It is called once for each
            device, so pass the same function every time
    group   the tensor-parallel ranks. All of them must call it: they get kernels all together or not at all, because
            the collective calls of `losses/fused.py` and `losses/plain.py` differ
    """
    if not weight.is_cuda or weight.dtype not in (torch.float32, torch.bfloat16):
        return None
    kernel = _choose("losses", agrees, "losses are computed", weight.device)
    if group is not None and not all_have_kernels(kernel is not None, group, weight.device):
        return None
    return kernel


@cache  # one collective call for each group, not one for each loss
def all_have_kernels(this_has: bool, group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return whether all ranks of `group` have kernels; `this_has`: whether this one has.

    The first call for a group is collective: every rank of it must make the call, and waits for the others. A rank must
    always pass the same `this_has` and `device`, as `_choose` gives them: other arguments are not in the cache, so the
    rank would begin the collective call again, and wait alone.
    """
    flag = torch.tensor(int(this_has), device=device)
    dist.all_reduce(flag, dist.ReduceOp.MIN, group=group)
    return bool(flag)


# the comparison compiles kernels, which takes seconds; and the log gets one line for each device
@cache
def _choose(name: str, agrees: Agrees, what: str, device: torch.device) -> ModuleType | None:
    """Return the module `kernels/<name>.py` if it agrees with plain torch on `device`, else None.

    what  the start of the log's line, such as "tokens are drawn"
    """
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
        # Triton's compiler raises errors of many classes, by version. Plain torch gives the same results.
        reason = f"the kernel does not run here: {error}"
    logger.warning(
        "rlspec: %s by plain torch on %s, in more memory and time: %s", what, device, reason
    )
    return None
