"""Log-probabilities of labels under the policy, and the policy's entropy, with a vocabulary split over ranks.

They are computed in chunks of rows, so that logits `[N, V/tp]` never exist at once. `policy_logprobs` is the entry;
`train/objectives.py` calls it and makes the policy's losses of its results. The drafter's losses are in
`losses/drafter.py`; it can read the same chunks (`observe`).

Shapes as in `losses/drafter.py`: N rows, H hidden size, V vocabulary, V/tp this tensor-parallel rank's share, C rows of
one chunk.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_rlspec.losses.choice import head_of, policy_gradient, read
from megatron_rlspec.losses.head import accumulate_in
from megatron_rlspec.packing.transfer import to_device

# Takes (rows, scores, log-sum-exp) of a chunk, as `Student.observe` does; see the argument `observe` below.
Observer = Callable[[Tensor, Tensor, Tensor], None]


def policy_logprobs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    tp_group: dist.ProcessGroup | None = None,
    with_entropy: bool = False,
    *,
    mask: Tensor | None = None,
    chunk: int | None = None,
    observe: Observer | None = None,
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities of `labels [N]` and the entropy `[N]`, float32 (float64 for float64 inputs).

    Both are differentiable in `hidden [N, H]` and `weight [V/tp, H]`. The backward computes the logits again, chunk by
    chunk. Forward and backward are collective: all ranks of `tp_group` must call them with the same rows and the same
    `chunk`. Raises ValueError for a label that is no token id, in a row that is computed.

    labels, mask  on one device; best on the CPU, so that choosing the rows does not wait for a GPU
    temperature   above 0; the distribution is softmax(logits / temperature), from which engines sample
    with_entropy  False: the entropy is 0
    mask          [N]; where it is 0 the results are 0, and no logits are computed; None: all rows
    chunk         C, above 0; None: `VocabParallelHead.chunk`
    observe       called after each chunk of the forward with three tensors: the indices `[C]` of its rows among the N,
                  ascending, on the device of `labels`; their scores `[C, V/tp]`, which it may overwrite; log Σ exp
                  `[C]`. Where kernels compute the losses, the scores are raw logits, and log Σ exp is that of
                  logits / temperature. Else they are `VocabParallelHead.scores`, and log Σ exp is that of the scores
    """
    head = head_of(weight, temperature, tp_group)
    if mask is None:
        mask = torch.ones_like(labels)
    rows_of_labels = head.rows_of(mask, labels)  # on the device of `labels`
    rows = to_device(rows_of_labels, hidden.device)
    picked, entropy = _LogProbs.apply(
        hidden.index_select(0, rows),
        weight,
        to_device(labels.index_select(0, rows_of_labels), hidden.device),
        (head, chunk or head.chunk, with_entropy, observe, rows_of_labels),
    )
    zeros = picked.new_zeros(len(labels))
    logprobs = zeros.index_copy(0, rows, picked)
    return logprobs, zeros.index_copy(0, rows, entropy)


class _LogProbs(torch.autograd.Function):
    """Compute log p(label) and the entropy of each row. The backward computes the logits of each chunk again.

    Otherwise autograd would keep the logits of all rows until the backward.
    """

    @staticmethod
    def forward(ctx, hidden, weight, labels, options):
        head, chunk, with_entropy, observe, rows = options
        picked = hidden.new_zeros(len(labels), dtype=accumulate_in(hidden))
        # Kernels read raw logits, whose log Σ exp needs float64 (`losses/fused.py`).
        lse_dtype = picked.dtype if head.kernel is None else torch.float64
        lses = torch.zeros_like(picked, dtype=lse_dtype)
        entropy = torch.zeros_like(picked)
        for first in range(0, len(labels), chunk):
            part = slice(first, first + chunk)
            read_rows = read(head, hidden[part], labels[part], with_entropy)
            lses[part] = read_rows.lse
            picked[part] = read_rows.logprob
            entropy[part] = read_rows.value
            if observe is not None:
                observe(rows[part], read_rows.scores, read_rows.lse)
        ctx.save_for_backward(hidden, weight, labels, lses, entropy)
        ctx.options = options
        return picked, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_picked, grad_entropy):
        # All tensors are saved by autograd, which detects a weight that was overwritten since the forward.
        hidden, weight, labels, lses, entropy = ctx.saved_tensors
        head, chunk, with_entropy, *_ = ctx.options
        grad_hidden = torch.zeros_like(hidden)
        # Chunks are summed in float32 or float64, because bfloat16 would lose small contributions.
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = torch.zeros_like(weight, dtype=entropy.dtype)
        for first in range(0, len(labels), chunk):
            part = slice(first, first + chunk)
            entropy_term = (grad_entropy[part], entropy[part]) if with_entropy else None
            grad = policy_gradient(
                head, hidden[part], labels[part], lses[part], grad_picked[part], entropy_term
            )
            grad_hidden[part] = head.back(grad)
            if grad_weight is not None:
                grad_weight += grad.t() @ hidden[part]
        # Each rank has the part of its columns. The gradient of the weight needs no sum: its rows are this rank's own.
        head.sum(grad_hidden)
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None
