"""The weights that the policy is compared with: for the KL penalty, and to measure how far the policy has moved."""

from __future__ import annotations

import math
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
        self._pairs = []
        for tensor in tensors:
            copy = tensor.detach().cpu().clone()
            self._pairs.append((tensor, copy))

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

    read      `Trainer.read`
    logprobs  `Trainer.logprobs`
    layer     returns the policy's output layer at the rollouts' temperature
    """

    def __init__(
        self,
        policy: nn.Module,
        read: Callable[..., list[Any]],
        logprobs: Callable[[Sequence[PackedBatch]], list[Tensor]],
        layer: Callable[[], OutputLayer],
    ) -> None:
        self._policy = policy
        self._read = read
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
            rows = self._read(batches, self._report_distribution)
        report = partial(self._report_drift, iter(rows))
        sums = self._read(batches, report)
        return drift_of(reduce_sums(sums))

    def _report_distribution(
        self, batch: PackedBatch, packed: PackedSequences, hidden: Tensor
    ) -> Tensor:
        _, logp = self._distribution(batch, hidden)
        return logp

    def _report_drift(
        self,
        reference: Iterator[Tensor],
        batch: PackedBatch,
        packed: PackedSequences,
        hidden: Tensor,
    ) -> Sums:
        head, logp = self._distribution(batch, hidden)
        return drift_sums(head, logp, next(reference))

    def _distribution(self, batch: PackedBatch, hidden: Tensor) -> tuple[VocabParallelHead, Tensor]:
        """Return the head and log-probabilities `[n, V / tensor]` of at most `ROWS` of the trained tokens."""
        layer = self._layer()
        head = VocabParallelHead.of(layer.weight, layer.temperature, layer.tensor_group)
        trained = batch.loss_mask.nonzero()[:, 0]
        every = max(1, math.ceil(len(trained) / ROWS))
        rows = to_device(trained[::every], hidden.device)
        scores = head.scores(hidden[:, 0].index_select(0, rows))
        return head, scores - head.log_sum_exp(scores)[:, None]


def drift_sums(head: VocabParallelHead, logp: Tensor, logq: Tensor) -> Sums:
    """Return the sums for `drift_of`, from rows of log-probabilities `[n, V / tensor]` of policy and reference."""
    divergence = (logp.exp() * (logp - logq)).sum(-1)
    changed = head.argmax(logp) != head.argmax(logq)
    return {
        "drift/tokens": torch.tensor(len(logp), device=logp.device),
        "drift/kl": head.sum(divergence).sum(),
        "drift/changed": changed.sum(),
    }


def drift_of(totals: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return `Reference.drift` from the sums over all ranks."""
    (tokens,) = totals["drift/tokens"]
    means = {}
    for name in ("drift/kl", "drift/changed"):
        means[name] = totals[name][0] / max(tokens, 1.0)
    return means
