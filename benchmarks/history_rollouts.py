"""Measure real rollouts with old answers as drafts (`spec.history`), along recorded runs (docs/history.md).

    python benchmarks/history_rollouts.py days=RUN_DIR [NAME=RUN_DIR ...] [--steps 5] [--num-steps 3]

A RUN_DIR is a run with `--train.record_gib 20` that comes back to its prompts. The embedded engine generates the
answers of its last steps again, each step under the policy and with the seeds that it had:

    drafter    by the run's own drafter alone
    checked    with the beginning that old answers share checked, and the drafter behind it: what `spec.history` does

Rounds count for each sample, checks among them. Intervals are 95 % bootstrap intervals over prompts. Texts are compared
with the recorded ones. Speed does not matter, but for the CPU seconds.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from history import config_of, engine_of, gain, runs

from megatron_rlspec.commands.compare import estimate
from megatron_rlspec.run.engines import sampling
from megatron_rlspec.run.trajectory import Trajectory
from megatron_rlspec.speculation.history import Answers, agreed
from megatron_rlspec.types import Group, Request

WAYS = ("drafter", "checked")


class Way:
    """counts [prompts, 2]  rounds of samples, and their tokens beyond one a round"""

    def __init__(self) -> None:
        self.counts: list[tuple[int, int]] = []
        self.batch_rounds = self.verified = self.different = 0
        self.seconds = 0.0


class Rerun:
    """A recorded run whose last steps an embedded engine generates again, each under its own policy and seeds.

    answers  to the prompts, of the steps before the present one
    """

    def __init__(self, run_dir: Path, drafter: Path | None, num_steps: int, last: int) -> None:
        config = config_of(run_dir)
        self.trajectory = Trajectory(run_dir)
        self.engine = engine_of(run_dir, drafter or run_dir / "hf", config, num_steps=num_steps)
        self.sampling = sampling(config)
        self.answers = Answers()
        self._last = last
        self._step = self._version = 0

    def steps(self) -> Iterator[list[Group]]:
        """Yield the recorded groups of each of the last steps."""
        for step in range(self.trajectory.steps):
            groups = self.trajectory.groups(step)
            self._step = step
            if step >= self.trajectory.steps - self._last:
                yield groups
            for group in groups:
                self.answers.keep(group.prompt.id, step, [sample.response for sample in group.samples])

    def push(self) -> None:
        """Give the engine the policy of the present step. It forgets what it learnt."""
        self._version += 1
        self.engine.update_weights(self._version, self.trajectory.policy(self._step).items(), "target")

    def draft(self, prompt: int) -> np.ndarray:
        """Return what `spec.history` has an engine check."""
        return agreed(self.answers.of(prompt))


def measure(run_dir: Path, steps: int, num_steps: int) -> dict[str, Way]:
    run = Rerun(run_dir, None, num_steps, steps)
    engine = run.engine
    rounds: Counter[int] = Counter()  # by seed
    one_round = engine.rounds.round

    def counted(rows: np.ndarray, *rest: object) -> list:
        rounds.update(engine.rounds.seeds[rows, 0].tolist())
        return one_round(rows, *rest)

    engine.rounds.round = counted
    found = {way: Way() for way in WAYS}
    for groups in run.steps():
        for name in WAYS:
            requests = []
            for group in groups:
                for i, sample in enumerate(group.samples):
                    draft = run.draft(group.prompt.id) if name == "checked" else None
                    name_of = f"{group.prompt.id:07d}-{i:04d}"
                    requests.append(Request(name_of, group.prompt, sample.seed, draft=draft))
            run.push()
            rounds.clear()
            engine.stats()
            verified, began = engine.rounds.verified, time.process_time()
            drawn = engine.generate(requests, run.sampling)
            way = found[name]
            way.seconds += time.process_time() - began
            way.verified += engine.rounds.verified - verified
            way.batch_rounds += sum(stats.rounds for stats in engine.stats())
            tokens: Counter[int] = Counter()
            for sample, recorded in zip(drawn, [s for g in groups for s in g.samples], strict=True):
                way.different += not np.array_equal(sample.tokens, recorded.tokens)
                tokens[sample.prompt.id] += len(sample.response)
            for group in groups:
                used = sum(rounds[sample.seed] for sample in group.samples)
                way.counts.append((used, tokens[group.prompt.id] - used))
    return found


def show(name: str, found: dict[str, Way]) -> None:
    base = np.array(found["drafter"].counts)
    print(f"{name}: {len(base)} prompts, {base.sum()} tokens")
    for way, one in found.items():
        counts = np.array(one.counts)
        more = gain(counts, base)
        print(
            f"  {way:8}: {estimate(counts).value:.2f} tokens a round, {more.value:+.0%} [{more.low:.0%}, "
            f"{more.high:.0%}]; "
            f"{counts[:, 0].sum()} rounds of samples, {one.batch_rounds} of batches, {one.verified} tokens verified; "
            f"{one.seconds:.1f} s of CPU; {one.different} other texts"
        )


def main(argv: Sequence[str] | None = None) -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("runs", nargs="+", metavar="NAME=RUN_DIR")
    p.add_argument("--steps", type=int, default=5, help="the last ones of each run; default: 5")
    p.add_argument("--num-steps", type=int, default=3, help="the drafter's drafts in a round; default: 3")
    options = p.parse_args(argv)
    torch.set_num_threads(1)
    for name, run_dir in runs(options.runs):
        show(name, measure(run_dir, options.steps, options.num_steps))


if __name__ == "__main__":
    main()
