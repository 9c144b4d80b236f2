"""Evaluate a run: the policy by its reward on held-out prompts, a warm start's drafter on held-out answers.

`session.py` calls it between steps, on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from megatron_rlspec.run import batches
from megatron_rlspec.run.rank0 import Rank0
from megatron_rlspec.run.recording import Records
from megatron_rlspec.run.rollouts import Rollouts
from megatron_rlspec.train.step import Trainer
from megatron_rlspec.types import Sample

PLATEAU = 0.01  # tokens per round: an accept length that rises by less has stopped rising
# drafts per round with which the accept length on held-out answers is measured
HELD_OUT_DRAFTS = (1, 3, 5)


@dataclass
class Evaluation:
    """Evaluates a run. Every rank holds one; engines are asked on rank 0.

    push            sends the engines the present weights; collective
    accept_lengths  of every measurement so far, the mean over HELD_OUT_DRAFTS; a checkpoint has them
    """

    trainer: Trainer
    rank0: Rank0
    records: Records
    push: Callable[[], None]
    accept_lengths: list[float]

    def evaluate(self, name: str, done: int) -> float:
        """Generate and score responses to held-out prompts, if there are any, and write an event for each set.

        Collective. Returns on rank 0 the mean reward on data.eval_path; NaN on other ranks, without such prompts, and
        if all rewards failed. The engines evaluate the weights of the last push.

        name  of the evaluation, as in `Generation.evaluate`
        done  steps of the run so far
        """
        reward = math.nan

        def evaluate_all(rollouts: Rollouts) -> None:
            nonlocal reward
            results = rollouts.generation.evaluate(name, done)
            reward = results.get("", {}).get("reward", math.nan)  # "" is the set of data.eval_path
            for which, result in results.items():
                self.records.evaluated(done, which, result)

        while not self.rank0.ask(evaluate_all):
            # All engines were lost, and one is starting again: `push` waits for it, and sends it the weights.
            self.push()
        return reward

    def measure_drafter(self, done: int, tokens: int, answers: list[Sample]) -> bool:
        """Measure a warm start's drafter after `done` steps. Returns whether its accept length has stopped rising.

        Collective; the result is the same on every rank. Each call adds a measurement to `accept_lengths`.

        tokens   that the drafter was trained on so far, for the event
        answers  the held-out demonstrations, at least one; the same on every rank
        """
        with self.records.clock("train"):
            packed = batches.micro_batches(
                self.trainer,
                answers,
                version=done + 1,
                depth=max(HELD_OUT_DRAFTS),
                supervised=True,
            )
            by_drafts = self.trainer.accept_lengths(packed, HELD_OUT_DRAFTS)
        past = self.accept_lengths
        past.append(float(np.mean(list(by_drafts.values()))))
        lengths = ", ".join(f"{value:.3f} at k = {k}" for k, value in by_drafts.items())
        self.records.event(
            "drafter",
            f"step {done}, {tokens} tokens: accept length {lengths} on {len(answers)} held-out answers",
            step=done,
            tokens=tokens,
            **{f"accept_length_{k}": value for k, value in by_drafts.items()},
        )
        # It has stopped if neither of the last two measurements is clearly above the best one before them.
        return len(past) > 2 and max(past[-2:]) < max(past[:-2]) + PLATEAU
