"""The RL loop, and the supervised warm start before it. Every rank runs these lines; `Session` does the rest."""

from __future__ import annotations

from megatron_rlspec.config import Config
from megatron_rlspec.interruption import Interruption
from megatron_rlspec.session import Session


def train(config: Config, interruption: Interruption | None = None) -> None:
    """Train by GRPO with a co-trained drafter: collect, learn, adapt, push."""
    with Session(config, config.data.path, interruption=interruption) as run:
        run.push()
        if run.done == 0:
            run.evaluate("first")
        for step in run.steps(config.train.steps):
            with run.clock("generate"):
                groups = run.collect(step)  # rank 0 draws and scores; every rank gets the groups
            with run.clock("train"):
                batches = run.pack(groups)  # this rank's share; labels are shifted before it is cut
                metrics = run.train_step(batches, objective="grpo")  # policy and drafter, one step each
            with run.clock("generate"):
                run.settle()  # wait for the rollout that runs ahead: weights change between rollouts
            run.adapt()  # read which configurations ran and what was accepted
            with run.clock("push"):
                run.push()  # both models as one version; compare fingerprints, run the canary prompts
            run.record(step, metrics, groups)
            run.checkpoint()
            if run.due(config.train.eval_every):
                run.evaluate(f"step-{run.done:06d}")
        run.evaluate("last")
        run.finish()


def warm_start(config: Config, interruption: Interruption | None = None) -> None:
    """Train policy and drafter on written answers, until held-out reward and accept length are good enough for RL."""
    with Session(config, config.sft.path, supervised=True, interruption=interruption) as run:
        for step in run.steps(config.sft.steps):
            with run.clock("train"):
                batches = run.pack(run.demonstrations())
                metrics = run.train_step(batches, objective="sft", train_policy=not config.sft.drafter_only)
            run.record(step, metrics)
            run.checkpoint()
            if run.good_enough(step):
                break
        run.finish()
