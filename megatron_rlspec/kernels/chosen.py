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

from megatron_rlspec.noise import draw, draw_each
from megatron_rlspec.types import SHARPNESS

Agrees = Callable[[ModuleType, torch.device], bool]
logger = logging.getLogger(__name__)


def sampling(logits: Tensor) -> ModuleType | None:
    """Return `kernels.sampling` if it draws from these logits, None for plain torch.

    It does on a CUDA device with Triton, if it draws the tokens there that plain torch draws.
    """
    if not logits.is_cuda or logits.dtype == torch.float64 or not torch.cuda.is_available():
        return None
    return _choose("sampling", draws_agree, "tokens are drawn", logits.device)


def head(weight: Tensor, group: dist.ProcessGroup | None = None) -> ModuleType | None:
    """Return `kernels.head` if it computes losses from logits of this output layer, None for plain torch.

    It does on a CUDA device with Triton, in bfloat16 and float32, if losses and gradients there are those of float64,
    and on all ranks of `group`, which have parts of the layer, or on none.
    """
    if not weight.is_cuda or weight.dtype not in (torch.float32, torch.bfloat16):
        return None
    kernel = _choose("head", losses_agree, "losses are computed", weight.device)
    if group is not None and not on_all(kernel is not None, group, weight.device):
        return None
    return kernel


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
        device = torch.device("cuda", torch.cuda.current_device())
        _choose("sampling", draws_agree, "tokens are drawn", device)


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


def draws_agree(kernel: ModuleType, device: torch.device) -> bool:
    """Return whether `kernels.sampling` draws what `noise.draw` does, from 64 rows."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(64, 5000, generator=generator).to(device)
    rows = torch.arange(64, device=device)
    tokens, _ = kernel.sample(logits, rows, rows * 7, torch.ones(64, device=device))
    return torch.equal(draw(logits, rows, rows * 7), tokens)


def losses_agree(kernel: ModuleType, device: torch.device) -> bool:
    """Return whether `kernels.head` finds the losses and gradients of float64, on 4 rows in float32 and in bfloat16."""
    generator = torch.Generator().manual_seed(0)
    student, teacher = 3 * torch.randn(2, 4, 2500, generator=generator)
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 1e-2)):
        logits = student.to(device, dtype), teacher.to(device, dtype)
        near = _compare_losses(kernel, *logits, tolerance)
        if not bool(near.all()):
            return False
    return True


def _compare_losses(
    kernel: ModuleType, student: Tensor, policy: Tensor, tolerance: float
) -> Tensor:
    """Return, for each comparison with float64, whether the kernels agree. Logits of student and policy: [4, V]."""
    temperature = 0.9
    chunk = student, student.shape[1], temperature
    rows = torch.arange(len(student), device=student.device)
    z = student.double().div(temperature).requires_grad_()
    z_of_teacher = policy.double().div(temperature)
    logq = z.log_softmax(1)
    logp = z_of_teacher.log_softmax(1)
    q = logq.exp()
    p = logp.exp()
    labels = draw(logp, rows, rows)
    index = labels[:, None]
    losses = {
        "ce": -logq.gather(1, index)[:, 0],
        "entropy": -(q * logq).sum(1),
        "forward_kl": (p * (logp - logq)).sum(1),
    }
    teacher = kernel.Teacher(policy, z_of_teacher.logsumexp(1), rows)
    label_scores = z.detach().gather(1, index)[:, 0].float()
    sharpness = z.new_tensor(SHARPNESS).float()
    noise = kernel.Noise(rows, rows, labels, label_scores, sharpness)
    near = []
    for kind, loss in losses.items():
        taught = teacher if kind == "forward_kl" else None
        read = kernel.read(*chunk, kind == "entropy", taught, noise)
        log_total = read.total.log()
        lse = read.peak.double() + read.total.double().log()
        ones = torch.ones_like(log_total)
        grad = student.clone()  # the kernels write the gradient in place of the logits
        into = grad, *chunk[1:], lse
        if kind == "ce":
            value = read.peak + log_total - label_scores
            kernel.write_label(*into, labels, -ones)
        elif kind == "entropy":
            value = log_total - read.second / read.total
            kernel.write_label(*into, labels, 0 * ones, (ones, value))
        else:
            value = read.second + log_total
            overlap = kernel.write_against(*into, teacher, ones, ones)
            expected_overlap = torch.minimum(q, p).sum(1)
            near.append((overlap - expected_overlap).norm() <= 1e-4 * expected_overlap.norm())
        (expected,) = torch.autograd.grad(loss.sum(), z, retain_graph=True)
        near.append((value - loss).norm() <= 1e-4 * loss.norm())
        near.append((grad - expected).norm() <= tolerance * expected.norm())
        near.append((read.best == z.argmax(1)).all())
    coupled = draw_each(logq.detach().float(), rows, rows, SHARPNESS) == index
    near.append((coupled == ~read.beaten).all())
    return torch.stack(near)
