"""The RL loop, the supervised warm start before it, and replays of a recorded run.

`commands/training.py` calls one of these functions on every rank. `Session` (run/session.py) implements the steps, most
of which are collective: all ranks must call them in the same order. Only rank 0 talks to the engines.
"""

from __future__ import annotations

from megatron_rlspec.config import Config
from megatron_rlspec.host.interruption import Interruption
from megatron_rlspec.run.extension import Extensions
from megatron_rlspec.run.session import Session


def train(
    config: Config, interruption: Interruption | None = None, extensions: Extensions | None = None
) -> None:
    """Train the policy by GRPO, and the drafter with it. Raises RunStopped if the run ends early."""
    with Session(config, interruption=interruption, extensions=extensions) as run:
        run.push()  # the engines need the initial weights
        for step in run.records.steps(config.train.steps):
            # before the step, so that a resumed run makes up for an evaluation that was interrupted
            if run.due(config.train.eval_every) or step == 0:
                run.evaluate(f"step-{step:06d}" if step else "first")
            with run.clock("generate"):
                # rank 0: engines generate, rewards score; all ranks get the groups
                groups = run.collect(step)
            # with train.record_gib, for `rlspec replay`: these rollouts, and the policy before it learns from them
            run.record_trajectory(groups)
            with run.clock("train"):
                # advantages within each group, then this rank's micro-batches of each optimizer step
                mini_batches = run.pack(groups)
                # train.updates_per_rollout optimizer steps of policy and drafter each
                metrics = run.train_step(mini_batches, objective="grpo")
            with run.clock("generate"):
                # with rollout.staleness: wait for the next step's rollout, which already runs
                run.settle()
            # Give the speculation rule the engines' acceptance and round times. This comes before the push: its canary
            # drops all rounds that are not read yet.
            run.adapt()
            with run.clock("push"):
                # both models as one version; compare fingerprints, run the canary prompts
                run.push()
            run.record(step, metrics, groups)
            run.checkpoint()
        run.record_trajectory()  # the policy after the last step
        run.evaluate("last")
        run.finish()


def warm_start(
    config: Config, interruption: Interruption | None = None, extensions: Extensions | None = None
) -> None:
    """Train policy and drafter on demonstrations, or the drafter alone until its held-out accept length rises no more.

    Raises RunStopped if the run ends early.
    """
    with Session(config, "sft", interruption=interruption, extensions=extensions) as run:
        for step in run.records.steps(config.sft.steps):
            with run.clock("train"):
                metrics = run.train_step(
                    run.pack(run.demonstrations()),
                    objective="sft",
                    train_policy=not config.sft.drafter_only,
                )
            run.record(step, metrics)
            run.checkpoint()
            if run.evaluate_warm_start():
                break
        run.finish()


def replay(
    config: Config, interruption: Interruption | None = None, extensions: Extensions | None = None
) -> None:
    """Train a drafter along a recorded run: with the policy and rollouts of every step, or with one policy of it.

    Only the drafter learns, so the policy runs forward only. Raises RunStopped if the run ends early.
    """
    generates = config.replay.policy_step >= 0  # one policy stays, and engines generate from it
    with Session(config, "replay", interruption=interruption, extensions=extensions) as run:
        if generates:
            run.push()
        for step in run.records.steps(config.train.steps):
            with run.clock("generate"):
                groups = run.collect(step) if generates else run.load_recorded(step)
            with run.clock("train"):
                metrics = run.train_step(run.pack(groups), objective="grpo", train_policy=False)
            if generates:
                run.settle()  # as in `train`: with rollout.staleness the next rollout already runs
                run.adapt()
                with run.clock("push"):
                    run.push()
            run.record(step, metrics, groups if generates else ())
            run.checkpoint()
        run.finish()
