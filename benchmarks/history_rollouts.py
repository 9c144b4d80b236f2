"""Measure real rollouts with old answers as drafts (`spec.history`), along recorded runs (docs/history.md).

    python benchmarks/history_rollouts.py days=RUN_DIR [NAME=RUN_DIR ...] [--steps 5] [--drafts 8] [--num-steps 3]

A RUN_DIR is a run with `--train.record true` that comes back to its prompts. The embedded engine generates the answers
of its last steps again, each step under the policy and with the seeds that it had:

    drafter    by the run's own drafter alone
    history    with the answers of the epoch before as drafts, where the engine prefers them
    checked    with the old answer of the same seed checked whole, if there is one, else the beginning that old answers
               share, and the drafter behind it
    both       the last two: what `spec.history` does

Rounds count for each sample, checks among them. Intervals are 95 % bootstrap intervals over prompts. Texts are compared
with the recorded ones. Speed does not matter, but for the CPU seconds.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from megatron_rlspec.commands.compare import estimate
from megatron_rlspec.config import Config
from megatron_rlspec.conversion.drafter_files import read_model, weights_of
from megatron_rlspec.records.recorder import read_records
from megatron_rlspec.rollout.embedded.engine import EmbeddedEngine
from megatron_rlspec.run.engines import sampling
from megatron_rlspec.run.trajectory import Trajectory
from megatron_rlspec.speculation.history import Answers, agreed
from megatron_rlspec.types import SHARPNESS, Request, SpecConfig, SpecSchedule

WAYS = {"drafter": (False, False), "history": (True, False), "checked": (False, True), "both": (True, True)}


class Way:
    """counts [prompts, 2]  rounds of samples, and their tokens beyond one a round"""

    def __init__(self) -> None:
        self.counts: list[tuple[int, int]] = []
        self.batch_rounds = self.verified = self.different = 0
        self.history = np.zeros(2, np.int64)  # requests in rounds whose drafts were old answers', and accepted ones
        self.seconds = 0.0


def engine_of(run_dir: Path, model: Path, config: Config, num_steps: int) -> tuple[EmbeddedEngine, int]:
    """Return an engine for a recorded run with the drafter of a model's directory, and the size of the vocabulary."""
    hf_config, tensors = read_model(str(model), "")
    engine = EmbeddedEngine(
        hf_config,
        weights_of(tensors),
        dtype=getattr(torch, config.model.dtype),
        max_length=config.model.max_length,
        max_running_requests=config.rollout.max_running_requests,
        max_total_tokens=config.rollout.max_total_tokens,
        schedule=SpecSchedule.fixed(SpecConfig(num_steps)),
    )
    engine.rounds.sharpness.fix(read_records(run_dir / "metrics.jsonl")[-1].get("spec/sharpness", SHARPNESS[0]))
    return engine, hf_config["vocab_size"]


def measure(run_dir: Path, steps: int, drafts: int, num_steps: int) -> dict[str, Way]:
    config = Config.model_validate_json((run_dir / "config.json").read_text())
    trajectory = Trajectory(run_dir)
    engine, vocabulary = engine_of(run_dir, run_dir / "hf", config, num_steps)
    engine.rounds.history.drafts = drafts
    rounds: Counter[int] = Counter()  # by seed
    run = engine.rounds.round

    def counted(rows: np.ndarray, *rest: object) -> list:
        rounds.update(engine.rounds.seeds[rows, 0].tolist())
        return run(rows, *rest)

    engine.rounds.round = counted
    answers = Answers()
    found = {way: Way() for way in WAYS}
    version = 0
    for step in range(trajectory.steps):
        groups = trajectory.groups(step, vocabulary)
        for name, (history, checked) in WAYS.items() if step >= trajectory.steps - steps else ():
            requests = []
            for group in groups:
                old = answers.of(group.prompt.id)
                begun = agreed(old.values())
                for i, sample in enumerate(group.samples):
                    text = old.get(sample.seed, begun) if checked else None
                    texts = tuple(old.values()) if history else ()
                    name_of = f"{group.prompt.id:07d}-{i:04d}"
                    requests.append(Request(name_of, group.prompt, sample.seed, draft=text, history=texts))
            version += 1
            engine.update_weights(version, trajectory.policy(step).items(), "target")
            rounds.clear()
            engine.stats()
            verified, began = engine.rounds.verified, time.process_time()
            drawn = engine.generate(requests, sampling(config))
            way = found[name]
            way.seconds += time.process_time() - began
            way.verified += engine.rounds.verified - verified
            for stats in engine.stats():
                way.batch_rounds += stats.rounds
                way.history += [sum(stats.history), sum(i * n for i, n in enumerate(stats.history))]
            tokens: Counter[int] = Counter()
            for sample, recorded in zip(drawn, [s for g in groups for s in g.samples], strict=True):
                way.different += not np.array_equal(sample.tokens, recorded.tokens)
                tokens[sample.prompt.id] += len(sample.response)
            for group in groups:
                used = sum(rounds[sample.seed] for sample in group.samples)
                way.counts.append((used, tokens[group.prompt.id] - used))
        for group in groups:
            answers.keep(group.prompt.id, step, {sample.seed: sample.response for sample in group.samples})
    return found


def show(name: str, found: dict[str, Way]) -> None:
    base = np.array(found["drafter"].counts)
    print(f"{name}: {len(base)} prompts, {base.sum()} tokens")
    for way, one in found.items():
        counts = np.array(one.counts)
        length, more = estimate(counts), estimate(counts, base)
        share = [100 * value / estimate(base).value for value in (more.value, more.low, more.high)]
        requests, accepted = one.history.tolist()
        print(
            f"  {way:8}: {length.value:.2f} tokens a round, {share[0]:+.0f} % [{share[1]:.0f}, {share[2]:.0f}]; "
            f"{counts[:, 0].sum()} rounds of samples, {one.batch_rounds} of batches, {one.verified} tokens verified; "
            f"{one.seconds:.1f} s of CPU; history in {requests} rounds, {accepted / max(requests, 1):.2f} drafts each; "
            f"{one.different} other texts"
        )


def main(argv: Sequence[str] | None = None) -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("runs", nargs="+", metavar="NAME=RUN_DIR")
    p.add_argument("--steps", type=int, default=5, help="the last ones of each run; default: 5")
    p.add_argument("--drafts", type=int, default=8, help="from old answers in a round; default: 8")
    p.add_argument("--num-steps", type=int, default=3, help="the drafter's drafts in a round; default: 3")
    options = p.parse_args(argv)
    torch.set_num_threads(1)
    for text in options.runs:
        name, _, run_dir = text.partition("=")
        if not run_dir:
            raise SystemExit(f"{text}: expected NAME=RUN_DIR")
        show(name, measure(Path(run_dir), options.steps, options.drafts, options.num_steps))


if __name__ == "__main__":
    main()
