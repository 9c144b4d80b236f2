"""The weights that the policy is compared with: for the KL penalty, and to measure how far the policy has moved.

There is one model on the device. The reference's weights lie on the CPU, and change places with the policy's while the
reference computes. `Trainer.keep_reference` (`step.py`) makes a `Reference`; `run/session.py` calls its methods
before and after optimizer steps, never within one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state as ps
from torch import Tensor

from megatron_rlspec.losses.head import VocabParallelHead
from megatron_rlspec.packing.transfer import to_device
from megatron_rlspec.train import experts
from megatron_rlspec.train.attention import PackedSequences
from megatron_rlspec.train.objectives import Sums, reduce_sums, with_logprobs
from megatron_rlspec.types import PackedBatch

# The most tokens of a micro-batch whose distributions `drift` compares. One array `[DRIFT_TOKENS, V / tensor]` for each
# micro-batch is in memory at once.
DRIFT_TOKENS = 512


class Reference:
    """A copy of a `Trainer`'s policy on the CPU, made at construction. Every rank must call every method.

    Do not call a method while a training step runs: the policy's weights are others meanwhile.
    """

    def __init__(self, trainer: Any) -> None:  # a Trainer; `step.py` imports this module
        self._trainer = trainer
        self._copies = []  # (tensor of the policy, its copy on the CPU)
        policy = trainer.policy
        for tensor in [*policy.parameters(), *experts.biases(policy).values()]:
            self._copies.append((tensor, tensor.detach().cpu().clone()))

    @contextmanager
    def _as_policy(self) -> Iterator[None]:
        """Give the policy the reference's values during the block, and its own back afterwards, bit for bit.

        Nothing may update the policy inside the block: the optimizer's float32 weights are not exchanged.
        """
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _exchange(self) -> None:
        """Exchange the values of policy and reference. A second call restores both."""
        for tensor, copy in self._copies:
            present = tensor.detach().to("cpu", copy=True)
            # The values change in place, because Megatron's buffers and views refer to this tensor.
            tensor.data.copy_(copy)
            copy.copy_(present)

    @torch.no_grad()
    def logprobs(self, batches: Sequence[PackedBatch]) -> list[Tensor]:
        """Compute `Trainer.logprobs` with the reference; then restore the current weights bit for bit."""
        with self._as_policy():
            return self._trainer.logprobs(batches)

    def with_logprobs(self, batches: Sequence[PackedBatch]) -> list[PackedBatch]:
        """Return copies of the batches with `reference_logprobs` filled in, which the KL penalty reads."""
        return with_logprobs(batches, "reference_logprobs", self.logprobs(batches))

    @torch.no_grad()
    def drift(self, batches: Sequence[PackedBatch]) -> dict[str, float]:
        """Measure how far the policy is from the reference, on a sample of the trained tokens.

        drift/kl       mean KL(policy ‖ reference) of the next token, in nats, at the rollouts' temperature
        drift/changed  share of tokens whose likeliest token differs

        The sample is at most `DRIFT_TOKENS` tokens of each micro-batch, evenly spaced; both metrics are 0 without a
        trained token. `batches`: at least one, and as many on all ranks. The policy stays in eval mode;
        `Trainer.train_step` sets train mode.
        """
        self._trainer.policy.eval()
        with self._as_policy():
            of_reference = self._trainer.run_forward(batches, self._report_distribution)
        # The schedule runs the micro-batches in the same order again, so each takes the next array of the reference.
        report = partial(self._report_drift, iter(of_reference))
        totals = reduce_sums(self._trainer.run_forward(batches, report))
        # The number of sampled tokens is no metric: it divides the other sums.
        (tokens,) = totals.pop("drift/tokens")
        return {name: values[0] / max(tokens, 1.0) for name, values in totals.items()}

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
        head, logp = self._distribution(batch, hidden)  # p: the policy
        logq = next(reference)  # q: the reference
        # The sum over this rank's part of the vocabulary; `head.sum` below adds the other tensor-parallel ranks' parts.
        divergence = (logp.exp() * (logp - logq)).sum(-1)
        changed = head.argmax(logp) != head.argmax(logq)
        return {
            "drift/tokens": torch.tensor(len(logp), device=logp.device),
            "drift/kl": head.sum(divergence).sum(),
            "drift/changed": changed.sum(),
        }

    def _distribution(self, batch: PackedBatch, hidden: Tensor) -> tuple[VocabParallelHead, Tensor]:
        """Return the head and log-probabilities `[n, V / tensor]` of at most `DRIFT_TOKENS` of the trained tokens.

        hidden  `[T, 1, H]`. The choice of tokens depends on the batch only, so policy and reference have the same ones
        """
        layer = self._trainer.output_layer(self._trainer.temperature)
        group = ps.get_tensor_model_parallel_group()
        head = VocabParallelHead.of(layer.weight, layer.temperature, group)
        trained = batch.loss_mask.nonzero()[:, 0]
        spacing = max(1, math.ceil(len(trained) / DRIFT_TOKENS))
        rows = to_device(trained[::spacing], hidden.device)
        scores = head.scores(hidden[:, 0].index_select(0, rows))
        return head, scores - head.log_sum_exp(scores)[:, None]
