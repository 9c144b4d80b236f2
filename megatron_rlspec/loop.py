"""The RL loop, and the supervised warm start before it. Every rank runs these lines; `Session` knows who does what."""

from __future__ import annotations

from megatron_rlspec.config import Config
from megatron_rlspec.interruption import Interruption
from megatron_rlspec.session import Session


def train(config: Config, interruption: Interruption | None = None) -> None:
    """GRPO with a co-trained drafter: collect, learn, push, adapt."""
    with Session(config, config.data.path, interruption=interruption) as run:
        run.push()
        if run.done == 0:
            run.evaluate("first")
        for step in run.steps(config.train.steps):
            with run.clock("generate"):
                groups = run.collect(step)  # rank 0's engines draw and score; every rank gets the groups
            with run.clock("train"):
                batches = run.pack(groups)  # this rank's share, rolled before the context-parallel slice
                metrics = run.train_step(batches, objective="grpo")  # policy and drafter, one step each
            with run.clock("generate"):
                run.settle()  # a rollout that runs ahead ends first: weights change between rollouts only
            run.adapt()  # what the engines' policies did, and what was accepted
            with run.clock("push"):
                run.push()  # target and drafter, one versioned session: fingerprints compared, a canary heard
            run.record(step, metrics, groups)
            run.checkpoint()
            if run.due(config.train.eval_every):
                run.evaluate(f"step-{run.done:06d}")
        run.evaluate("last")
        run.finish()


def warm_start(config: Config, interruption: Interruption | None = None) -> None:
    """Policy and drafter on written answers, until held-out reward and accept length are good enough to start from."""
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
