"""The drafter's online learner: which rollouts it learns from, with which weights, and when (ReSpec, section 5.3).

An update is either part of the policy's step, on the same rollouts and hidden states (`drafter.replay=none`), or a pass
of its own over stored rollouts (`separate`), whose hidden states the present policy computes. Such a pass runs after
the policy's step, or with `drafter.overlap` while engines draw the next rollout. In every case only the drafter's own
parameters change, so the policy and its texts are the same.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megatron_rlspec.config import Config
from megatron_rlspec.extensions.drafter_schedules.replay import Replay
from megatron_rlspec.extensions.drafter_schedules.updates import EverySteps
from megatron_rlspec.extensions.drafter_schedules.weights import drafter_weights
from megatron_rlspec.packing.pack import pack
from megatron_rlspec.tasks.rewards import failed
from megatron_rlspec.train import runtime
from megatron_rlspec.train.step import Trainer
from megatron_rlspec.types import Group, Sample


class OnlineLearner:
    """Every rank holds one. All hold the same rollouts, so all pack the same updates.

    last_update  the step that updated the drafter last; -1: none
    seconds      of the newest separate update
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        options = config.drafter
        self.separate = options.train and options.separate
        self.overlaps = options.train and options.overlap
        self.rule = EverySteps(options.update_every)
        self.held = Replay(options.replay_tokens, options.replay_bytes)
        self.last_update = -1
        self.seconds = 0.0
        self.updates = 0  # separate ones: the seed of the next draw

    def weights(self, samples: Sequence[Sample]) -> list[np.ndarray] | None:
        """Return the drafter's weight of every position, for `pack`; None if all are 1."""
        options = self.config.drafter
        if options.reward_weight == "none":
            return None
        return drafter_weights(
            samples,
            [not failed(sample) for sample in samples],
            kind=options.reward_weight,
            clip=options.reward_clip,
        )

    def add(self, groups: Sequence[Group]) -> None:
        """Store the rollouts of a step, if updates learn from stored ones."""
        if self.separate:
            if self.config.drafter.replay == "none":
                self.held.clear()
            self.held.add([sample for group in groups for sample in group.samples])

    def update(self, trainer: Trainer, step: int) -> dict[str, float]:
        """Update the drafter from stored rollouts; collective. Returns the drafter's metrics, {} without rollouts."""
        options = self.config.drafter
        by = "newest" if options.replay == "none" else options.replay
        samples = self.held.draw(options.update_tokens, by, (self.config.train.seed, self.updates))
        if not samples:
            return {}
        began = time.perf_counter()
        parallel = self.config.parallel
        batches = pack(
            samples,
            drafter_weights=self.weights(samples),
            depth=options.depth,
            tokens_per_micro_batch=self.config.train.tokens_per_micro_batch,
            **runtime.placement(),
            multiple=parallel.tensor if parallel.sequence else 1,
        )
        metrics = trainer.train_step(batches, objective="grpo", train_policy=False)
        self.seconds = time.perf_counter() - began
        self.updates += 1
        self.last_update = step
        metrics["drafter/update_tokens"] = float(sum(len(sample.tokens) for sample in samples))
        metrics["drafter/replay_tokens"] = float(self.held.tokens)
        metrics["drafter/replay_bytes"] = float(self.held.bytes)
        return metrics

    def observe(self, step: int) -> dict[str, float]:
        """Count a step. Returns metrics."""
        updated = self.last_update == step
        self.rule.observe(updated)
        return {"drafter/updated": float(updated)}

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as JSON; `held.groups()` are the rest."""
        return {"rule": self.rule.state(), "updates": self.updates, "last_update": self.last_update}

    def restore(self, state: Mapping[str, Any], groups: Sequence[Group]) -> None:
        """Restore what `state` and `held.groups` returned; nothing for a run without them."""
        if state:
            self.rule.restore(state["rule"])
            self.updates = state["updates"]
            self.last_update = state["last_update"]
        self.held.restore(groups)
