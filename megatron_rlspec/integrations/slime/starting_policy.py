"""How far the policy has moved from the weights with which a run began, for which a frozen drafter was made."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

import torch
from slime.backends.megatron_utils.loss import get_responses
from slime.backends.megatron_utils.model import forward_only
from torch import Tensor, nn

from megatron_rlspec.integrations.slime import routing
from megatron_rlspec.losses.head import VocabParallelHead
from megatron_rlspec.train.objectives import OutputLayer, sum_over_replicas
from megatron_rlspec.train.reference import ROWS, Held, drift_of, drift_sums


class StartingPolicy:
    """The weights with which a run began, on the host of each train rank. Every method is collective."""

    def __init__(self, model: nn.Module, load: Callable[[], Any] | None = None) -> None:
        """Copy the weights of `model`; or those that `load` gives it, after which it has its own again."""
        buffers = dict(model.named_buffers()).values()  # `buffers` of a DDP is something else
        self._held = Held([*model.parameters(), *buffers])
        if load is not None:
            load()
            self._held.exchange()

    @torch.no_grad()
    def drift(self, args: Namespace, model: Sequence[Any], iterators: Sequence[Any]) -> dict[str, float]:
        """Return `drift_kl` and `drift_changed` as `Reference.drift` has them; {} before the last pipeline stage.

        Compares about `ROWS` response tokens of the rollout's first micro-batch on each rank, in two forward passes.
        Call it before the rollout's first step, when no forward hook gathers parameters.
        """
        # With dynamic batches slime sorts the outputs of all micro-batches, and this is one of them.
        given = vars(args) | {"use_dynamic_batch_size": False, "custom_megatron_before_log_prob_hook_path": None}
        seen: list[Tensor] = []

        def keep(logits: Tensor, *, args: Namespace, with_entropy: bool, **lengths: Any) -> tuple[Tensor, dict]:
            chunks = [rows for rows, _ in get_responses(logits, args=args, apply_temperature=False, **lengths)]
            every = max(1, -(-sum(map(len, chunks)) // ROWS))
            scores = torch.cat([rows[::every] for rows in chunks]) / args.rollout_temperature
            seen.append(scores - _head(scores).log_sum_exp(scores)[:, None])
            return logits.new_empty(0), {"rows": []}

        def run() -> None:
            forward_only(keep, Namespace(**given), model, iterators, [1])

        with routing.unreplayed():
            with self._held.exchanged():
                run()
            run()
        for iterator in iterators:
            iterator.reset()
        if not seen:
            return {}
        start, now = seen
        found = drift_of(sum_over_replicas([drift_sums(_head(now), now, start)]))
        return {name.replace("/", "_"): value for name, value in found.items()}


def _head(rows: Tensor) -> VocabParallelHead:
    """Return what reduces `rows [n, V / tensor]` over the vocabulary; it never reads the layer's weights."""
    layer = OutputLayer(rows.new_empty(rows.shape[1], 0), 1.0)
    return VocabParallelHead.of(layer.weight, layer.temperature, layer.tensor_group, None)
