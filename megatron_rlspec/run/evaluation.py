"""Held-out prompts and answers: how good policy and drafter are, and whether a warm start may end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from megatron_rlspec.host import ranks
from megatron_rlspec.run import batches
from megatron_rlspec.run.rank0 import Rank0
from megatron_rlspec.run.recording import Records
from megatron_rlspec.run.rollouts import Rollouts
from megatron_rlspec.train.step import Trainer
from megatron_rlspec.types import Sample

PLATEAU = 0.01  # tokens a round by which an accept length still rises
HELD_OUT_DRAFTS = (1, 3, 5)  # a round, at which the accept length on held-out answers is measured


@dataclass
class Evaluation:
    """Every rank holds one; engines are asked on rank 0.

    generates       whether the run has engines
    push            sends the engines the present weights; collective
    accept_lengths  means on held-out answers, of every measurement so far
    """

    trainer: Trainer
    rank0: Rank0
    records: Records
    generates: bool
    push: Callable[[], None]
    accept_lengths: list[float]
    _last_accept_length: float = 0.0  # of the newest evaluation of a warm start

    def evaluate(self, name: str, done: int) -> dict[str, dict[str, float]]:
        """Generate and score responses to held-out prompts, if there are any, and write an event for each set.

        done  steps of the run so far

        Returns the results on rank 0 by the name of the set, {} on the others. Collective.
        """
        results: dict[str, dict[str, float]] = {}

        def answer(rollouts: Rollouts) -> None:
            results.update(rollouts.generation.evaluate(name, done))

        while not self.rank0.ask(answer):
            # All engines were lost. One has started again, and needs the weights.
            self.push()
        for which, result in results.items():
            self.records.evaluated(done, which, result)
        return results

    def warm_enough(self, done: int, tokens: int, held_out: list[Sample]) -> bool:
        """Measure policy and drafter of a warm start after `done` steps. Returns whether it may end, on every rank.

        tokens    that the drafter was trained on so far, for the event
        held_out  answers that are not trained on

        It may end if only the drafter is trained, and the accept length grew by less than `PLATEAU` since the last
        evaluation. With `sft.held_out` the accept length on held-out answers must have stopped rising, too.
        """
        options = self.trainer.config.sft
        settled = self._drafter_settled(done, tokens, held_out) if options.held_out else True
        steady = self._rollouts_steady(done) if self.generates else True
        return options.drafter_only and steady and settled

    def _drafter_settled(self, done: int, tokens: int, answers: list[Sample]) -> bool:
        """Measure the drafter on held-out answers. Returns whether its accept length has stopped rising."""
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
        return len(past) > 2 and max(past[-2:]) < max(past[:-2]) + PLATEAU

    def _rollouts_steady(self, done: int) -> bool:
        """Push, and evaluate with the engines. Returns whether their accept length has stopped rising."""
        with self.records.clock("push"):
            self.push()
        with self.records.clock("generate"):
            results = self.evaluate(f"step-{done:06d}", done)
        steady = False
        if "" in results:
            accept_length = results[""]["accept_length"]
            steady = accept_length - self._last_accept_length < PLATEAU
            self._last_accept_length = accept_length
        return bool(ranks.job().tell(steady))
