"""The weights that the policy is compared with: for the KL penalty, and to measure how far the policy has moved."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron_rlspec.losses.head import VocabParallelHead
from megatron_rlspec.packing.transfer import to_device
from megatron_rlspec.train import experts
from megatron_rlspec.train.attention import PackedSequences
from megatron_rlspec.train.objectives import OutputLayer, Sums, filled, reduce_sums
from megatron_rlspec.types import PackedBatch

ROWS = 512  # tokens of a micro-batch whose distributions `drift` compares


class Copies:
    """Copies of tensors on the CPU, made at construction, which take the tensors' place for a while."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._pairs = [(tensor, tensor.detach().cpu().clone()) for tensor in tensors]

    def exchange(self) -> None:
        """Exchange the tensors' values and the copies' values, bit for bit."""
        for tensor, copy in self._pairs:
            present = tensor.detach().to("cpu", copy=True)
            tensor.data.copy_(copy)
            copy.copy_(present)

    @contextmanager
    def exchanged(self) -> Iterator[None]:
        """Exchange during the block."""
        self.exchange()
        try:
            yield
        finally:
            self.exchange()


class Reference:
    """A copy of the policy on the CPU, made at construction. Every method is collective.

    run       `Trainer.run`
    logprobs  `Trainer.logprobs`
    layer     returns the policy's output layer at the rollouts' temperature
    """

    def __init__(
        self,
        policy: nn.Module,
        run: Callable[..., list[Any]],
        logprobs: Callable[[Sequence[PackedBatch]], list[Tensor]],
        layer: Callable[[], OutputLayer],
    ) -> None:
        self._policy = policy
        self._run = run
        self._logprobs = logprobs
        self._layer = layer
        self._weights = Copies([*policy.parameters(), *experts.biases(policy).values()])

    @torch.no_grad()
    def logprobs(self, batches: Sequence[PackedBatch]) -> list[Tensor]:
        """Compute `Trainer.logprobs` with the reference; then restore the current weights bit for bit."""
        with self._weights.exchanged():
            return self._logprobs(batches)

    def filled(self, batches: Sequence[PackedBatch]) -> list[PackedBatch]:
        """Return the batches with the log-probs of the reference."""
        return filled(batches, "reference_logprobs", self.logprobs(batches))

    @torch.no_grad()
    def drift(self, batches: Sequence[PackedBatch]) -> dict[str, float]:
        """Measure how far the policy is from the reference, on a sample of the trained tokens.

        drift/kl       mean KL(policy ‖ reference) of the next token, in nats, at the rollouts' temperature
        drift/changed  share of tokens whose likeliest token differs

        The sample is at most `ROWS` tokens of a micro-batch, evenly spaced.
        """
        self._policy.eval()
        with self._weights.exchanged():
            rows = self._run(batches, self._report_distribution, forward_only=True)
        reference = iter(rows)
        sums = self._run(batches, partial(self._report_drift, reference), forward_only=True)
        return drift_of(reduce_sums(sums))

    def _report_distribution(
        self, batch: PackedBatch, packed: PackedSequences, hidden: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        _, logp = self._distribution(batch, hidden)
        return hidden.new_zeros(()), torch.zeros((), dtype=torch.int), logp

    def _report_drift(
        self,
        reference: Iterator[Tensor],
        batch: PackedBatch,
        packed: PackedSequences,
        hidden: Tensor,
    ) -> tuple[Tensor, Tensor, Sums]:
        head, logp = self._distribution(batch, hidden)
        sums = drift_sums(head, logp, next(reference))
        return hidden.new_zeros(()), torch.zeros((), dtype=torch.int), sums

    def _distribution(self, batch: PackedBatch, hidden: Tensor) -> tuple[VocabParallelHead, Tensor]:
        """Return the head and log-probabilities `[n, V / tensor]` of at most `ROWS` of the trained tokens."""
        layer = self._layer()
        head = VocabParallelHead.of(layer.weight, layer.temperature, layer.tensor_group)
        rows = batch.loss_mask.nonzero()[:, 0]
        rows = to_device(rows[:: max(1, -(-len(rows) // ROWS))], hidden.device)
        scores = head.scores(hidden[:, 0].index_select(0, rows))
        return head, scores - head.log_sum_exp(scores)[:, None]


def drift_sums(head: VocabParallelHead, logp: Tensor, logq: Tensor) -> Sums:
    """Return the sums for `drift_of`, from rows of log-probabilities `[n, V / tensor]` of policy and reference."""
    return {
        "drift/tokens": torch.tensor(len(logp), device=logp.device),
        "drift/kl": head.sum((logp.exp() * (logp - logq)).sum(-1)).sum(),
        "drift/changed": (head.argmax(logp) != head.argmax(logq)).sum(),
    }


def drift_of(totals: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return `Reference.drift` from the sums over all ranks."""
    (tokens,) = totals["drift/tokens"]
    return {name: totals[name][0] / max(tokens, 1.0) for name in ("drift/kl", "drift/changed")}
