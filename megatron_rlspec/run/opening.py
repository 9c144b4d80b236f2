"""What `Session` opens in one piece: the trainer with the weights that a run begins with, and the drafter's side."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from megatron_rlspec.config import Config
from megatron_rlspec.run.checkpoints import Drawn
from megatron_rlspec.run.drafter_training import Drafting
from megatron_rlspec.run.extension import DrafterSchedule, Extensions
from megatron_rlspec.run.loading import Loaded
from megatron_rlspec.train.step import Trainer


def build_trainer(config: Config, loaded: Loaded, supervised: bool) -> Trainer:
    """Build the trainer with the weights that the run begins with, before any checkpoint. Collective."""
    trainer = Trainer(config, loaded.hf_config)
    trainer.load_hf(loaded.tensors, fresh_drafter=config.replay.fresh_drafter)
    if loaded.eagle3_ids is not None:
        trainer.set_draft_vocabulary(loaded.eagle3_ids.numpy())
    if loaded.replay is not None:
        loaded.replay.load(trainer, loaded.replay.first)
        return trainer
    measures_drift = config.train.drift_every and not supervised
    if config.algorithm.kl_coef or measures_drift:
        # The reference has the weights of model.path, also when a checkpoint is loaded next.
        trainer.keep_reference()
    return trainer


def make_drafting(
    loaded: Loaded,
    trainer: Trainer,
    extensions: Extensions,
    state: Mapping[str, Any],
    drawn: Drawn,
    supervised: bool,
) -> Drafting:
    """Return what decides on the drafter's updates; `state` and `drawn` of a checkpoint, or empty."""
    config = trainer.config
    # A warm start learns from every batch alike.
    learns_from_rollouts = config.drafter.train and not supervised
    schedule = DrafterSchedule()
    if learns_from_rollouts and extensions.drafter is not None:
        load_policy = None
        if loaded.followed is not None:
            load_policy = partial(loaded.followed.load, trainer)
        schedule = extensions.drafter(trainer, load_policy, state.get("online", {}), drawn.replay)
    drafting = Drafting(
        trainer,
        loaded.vocabulary,
        schedule,
        records=learns_from_rollouts,
        fresh=config.drafter.fresh
        and learns_from_rollouts
        and extensions.drafter is None
        and not config.replay.run,
    )
    drafting.restore(state, drawn.replay)
    return drafting
