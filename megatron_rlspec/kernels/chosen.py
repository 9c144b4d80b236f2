"""Choose between GPU kernels and plain torch: one place, one line in the log."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from importlib import import_module
from types import ModuleType

import torch
import torch.distributed as dist

from megatron_rlspec.noise import draw, draw_each
from megatron_rlspec.types import SHARPNESS

Agrees = Callable[[ModuleType, torch.device], bool]
logger = logging.getLogger(__name__)


def sampling(logits: torch.Tensor) -> ModuleType | None:
    """Return `kernels.sampling` if it draws from these logits, None for plain torch.

    It does on a CUDA device with Triton, if it draws the tokens there that plain torch draws.
    """
    if not logits.is_cuda or logits.dtype == torch.float64 or not torch.cuda.is_available():
        return None
    return _choose("sampling", draws_agree, "tokens are drawn", logits.device)


def head(weight: torch.Tensor, group: dist.ProcessGroup | None = None) -> ModuleType | None:
    """Return `kernels.head` if it computes losses from logits of this output layer, None for plain torch.

    It does on a CUDA device with Triton, in bfloat16 and float32, if losses and gradients there are those of float64,
    and on all ranks of `group`, which have parts of the layer, or on none.
    """
    if not weight.is_cuda or weight.dtype not in (torch.float32, torch.bfloat16):
        return None
    found = _choose("head", losses_agree, "losses are computed", weight.device)
    if group is not None and not on_all(found is not None, group, weight.device):
        return None
    return found


def fingerprints(device: torch.device, agrees: Agrees) -> ModuleType | None:
    """Return `kernels.fingerprints` if it sums tensors of this device, and `agrees`; None for plain torch."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    return _choose("fingerprints", agrees, "tensors are compared", device)


@cache
def on_all(here: bool, group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return whether all ranks of `group` have kernels. The first call of a rank waits for the others."""
    flag = torch.tensor(int(here), device=device)
    dist.all_reduce(flag, dist.ReduceOp.MIN, group=group)
    if here and not flag:
        logger.warning(
            "rlspec: losses are computed by plain torch on %s, because another rank has no kernels",
            device,
        )
    return bool(flag)


def prepare() -> None:
    """Choose for the current CUDA device, before graphs are captured: in a capture the host cannot compare tokens."""
    if torch.cuda.is_available():
        _choose(
            "sampling",
            draws_agree,
            "tokens are drawn",
            torch.device("cuda", torch.cuda.current_device()),
        )


@cache
def _choose(name: str, agrees: Agrees, what: str, device: torch.device) -> ModuleType | None:
    reason = "Triton is not installed"
    try:
        found = import_module(f"megatron_rlspec.kernels.{name}")
        if agrees(found, device):
            logger.info("rlspec: %s by kernels/%s.py on %s", what, name, device)
            return found
        reason = "the kernel's results are other ones here"
    except ImportError:
        pass
    except (
        Exception
    ) as error:  # of Triton's compiler, whose version is not ours; plain torch has the same results
        reason = f"the kernel does not run here: {error}"
    logger.warning(
        "rlspec: %s by plain torch on %s, in more memory and time: %s", what, device, reason
    )
    return None


def draws_agree(kernel: ModuleType, device: torch.device) -> bool:
    """Return whether `kernels.sampling` draws what `noise.draw` does: 64 rows, a third of them with top-k."""
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(64, 5000, generator=generator)).to(device)
    rows = torch.arange(64, device=device)
    top_ks = torch.where(rows % 3 == 0, 1 + rows, 5000).to(torch.int32)
    tokens, _ = kernel.sample(
        logits, kernel.Draws(rows, rows * 7, torch.ones(64, device=device), top_ks)
    )
    ranks = logits.argsort(dim=1, descending=True, stable=True).argsort(1)
    kept = logits.masked_fill(ranks >= top_ks[:, None], float("-inf"))
    return bool((draw(kept, rows, rows * 7) == tokens).all())


def losses_agree(kernel: ModuleType, device: torch.device) -> bool:
    """Return whether `kernels.head` finds the losses and gradients of float64, on 4 rows in float32 and in bfloat16."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(2, 4, 2500, generator=generator)
    rows = torch.arange(4, device=device)
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 1e-2)):
        student, taught = (3 * normal).to(device, dtype)
        z = student.double().div(0.9).requires_grad_()
        logq, logp = z.log_softmax(1), taught.double().div(0.9).log_softmax(1)
        labels = draw(logp, rows, rows)
        teacher = kernel.Teacher(taught, torch.logsumexp(taught.double() / 0.9, 1), rows)
        noise = kernel.Noise(
            rows,
            rows,
            labels,
            z.detach().gather(1, labels[:, None])[:, 0].float(),
            z.new_tensor(SHARPNESS).float(),
        )
        near = []
        for kind, loss in {
            "ce": -logq.gather(1, labels[:, None])[:, 0],
            "entropy": -(logq.exp() * logq).sum(1),
            "forward_kl": (logp.exp() * (logp - logq)).sum(1),
            "reverse_kl": (logq.exp() * (logq - logp)).sum(1),
            "tv": 1 - torch.minimum(logq.exp(), logp.exp()).sum(1),
        }.items():
            found = kernel.read(
                student, 2500, 0.9, "none" if kind in ("ce", "tv") else kind, teacher, noise
            )
            lse = found.peak.double() + found.total.double().log()
            overlap, loser = kernel.write_against(student, 2500, 0.9, lse, "tv", teacher)
            log_total = found.total.log()
            value = {
                "ce": found.peak + log_total - noise.scores,
                "entropy": log_total - found.second / found.total,
                "forward_kl": found.second + log_total,
                "reverse_kl": found.second / found.total - log_total,
                "tv": 1 - overlap,
            }[kind]
            grad, ones = student.clone(), torch.ones_like(value)
            if kind == "ce":
                kernel.write_label(grad, 2500, 0.9, lse, labels, -ones)
            elif kind == "entropy":
                kernel.write_label(grad, 2500, 0.9, lse, labels, 0 * ones, (ones, value))
            else:
                second = {"forward_kl": ones, "reverse_kl": value, "tv": loser}[kind]
                kernel.write_against(grad, 2500, 0.9, lse, kind, teacher, ones, second)
            (expected,) = torch.autograd.grad(loss.sum(), z, retain_graph=True)
            near.append((value - loss).norm() <= 1e-4 * loss.norm())
            near.append((grad - expected).norm() <= tolerance * expected.norm())
        coupled = draw_each(logq.detach().float(), rows, rows, SHARPNESS) == labels[:, None]
        near += [(found.best == z.argmax(1)).all(), (coupled == ~found.beaten).all()]
        if not bool(torch.stack(near).all()):
            return False
    return True
