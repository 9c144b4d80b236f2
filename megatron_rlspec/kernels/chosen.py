"""Choose between GPU kernels and plain torch: one place, one line in the log."""

from __future__ import annotations

import logging
from functools import cache
from types import ModuleType

import torch

from megatron_rlspec.noise import draw

logger = logging.getLogger(__name__)


def sampling(logits: torch.Tensor) -> ModuleType | None:
    """Return `kernels.sampling` if it draws from these logits, None for plain torch.

    It does on a CUDA device with Triton, if it draws the tokens there that plain torch draws.
    """
    if not logits.is_cuda or logits.dtype == torch.float64 or not torch.cuda.is_available():
        return None
    return _sampling(logits.device)


def prepare() -> None:
    """Choose for the current CUDA device, before graphs are captured: in a capture the host cannot compare tokens."""
    if torch.cuda.is_available():
        _sampling(torch.device("cuda", torch.cuda.current_device()))


@cache
def _sampling(device: torch.device) -> ModuleType | None:
    reason = "Triton is not installed"
    try:
        from megatron_rlspec.kernels import sampling as found

        if agrees(found, device):
            logger.info("rlspec: tokens are drawn by kernels/keyed_draw.py on %s", device)
            return found
        reason = "the kernel draws other tokens here"
    except ImportError:
        pass
    except Exception as error:  # of Triton's compiler, whose version is not ours; plain torch draws the same tokens
        reason = f"the kernel does not run here: {error}"
    logger.warning("rlspec: tokens are drawn by plain torch on %s, in more memory and time: %s", device, reason)
    return None


def agrees(kernel: ModuleType, device: torch.device) -> bool:
    """Return whether `kernels.sampling` draws what `noise.draw` does: 64 rows, a third of them with top-k."""
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(64, 5000, generator=generator)).to(device)
    rows = torch.arange(64, device=device)
    top_ks = torch.where(rows % 3 == 0, 1 + rows, 5000).to(torch.int32)
    tokens, _ = kernel.sample(logits, kernel.Draws(rows, rows * 7, torch.ones(64, device=device), top_ks))
    ranks = logits.argsort(dim=1, descending=True, stable=True).argsort(1)
    kept = logits.masked_fill(ranks >= top_ks[:, None], float("-inf"))
    return bool((draw(kept, rows, rows * 7) == tokens).all())
