"""Measure what earlier answers are worth as drafts beside the drafter's own, along recorded runs (docs/history.md).

    python benchmarks/history.py quickstart=runs/quickstart/rl [NAME=RUN_DIR ...] [--quick] [--out FILE] [--plot FILE]

A RUN_DIR is a run with `--train.record_gib 20`, on any task, also one of several turns (rollout.function). The newest
policy of the run answers prompts of its last steps again, with the seeds that they had, and so do earlier policies.
From these texts the program counts:

    survival   the first tokens of an old answer that the newest policy generates again under the same seed. A row
               "0 steps" is the newest policy itself in batches of another shape: what is below 1 there is rounding
    tokens a   by the run's own drafter, MTP or EAGLE-3, with 3 drafts a round; by the prompt's old answer under the
    round      same seed, with 8

Rounds are followed on the final text, from every position at which one can begin. So one engine run serves both.
Intervals are 95 % bootstrap intervals over prompts (`rlspec compare`). Speed does not matter: the figures are the same
on a busy machine.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from pydantic import ValidationError

from megatron_rlspec import custom, files
from megatron_rlspec.commands.compare import Estimate, estimate
from megatron_rlspec.config import Config
from megatron_rlspec.config.base import first_mistake
from megatron_rlspec.conversion.drafter_files import read_model, weights_of, words
from megatron_rlspec.models.config import DRAFTER
from megatron_rlspec.records.recorder import read_records
from megatron_rlspec.rollout.conversation import Conversations
from megatron_rlspec.rollout.embedded import verify
from megatron_rlspec.rollout.embedded.engine import EmbeddedEngine
from megatron_rlspec.rollout.pool import EnginePool
from megatron_rlspec.run.engines import sampling
from megatron_rlspec.run.trajectory import Trajectory
from megatron_rlspec.tasks import data
from megatron_rlspec.types import OFF, SHARPNESS, Group, Request, Sample, SpecConfig, SpecSchedule

DRAFTS = 3  # of the drafter in a round
OLD_DRAFTS = 8  # of an old answer in a round


# ---- texts ----------------------------------------------------------------------------------------------------------


def config_of(run_dir: Path) -> Config:
    try:
        return Config.model_validate_json((run_dir / "config.json").read_text())
    except ValidationError as error:
        raise SystemExit(f"{run_dir}/config.json: another version wrote it: {first_mistake(error)}") from None


def engine_of(
    run_dir: Path, model: Path, config: Config, dtype: str = "", num_steps: int = 0, running: int = 0
) -> EmbeddedEngine:
    """Return an engine for a recorded run, with the drafter of a model's directory and drafts as in its last step.

    dtype, running  "", 0: the run's type and number of running requests
    """
    hf_config, tensors = read_model(str(model), "")
    rollout = config.rollout
    engine = EmbeddedEngine(
        hf_config,
        weights_of(tensors),
        dtype=getattr(torch, dtype or config.model.dtype),
        max_length=config.model.max_length,
        max_running_requests=running or rollout.max_running_requests,
        max_total_tokens=max(rollout.max_total_tokens, config.model.max_length + 64),
        schedule=SpecSchedule.fixed(SpecConfig(num_steps) if num_steps else OFF),
        draft_words=words(tensors, hf_config) if DRAFTER in hf_config else None,
    )
    # Drafts of the run's last step were argmax(s · log q + noise) with this s.
    engine.rounds.sharpness = read_records(run_dir / "metrics.jsonl")[-1].get("spec/sharpness", SHARPNESS[0])
    return engine


def runs(named: Sequence[str]) -> Iterator[tuple[str, Path]]:
    """Yield the name and the folder of each NAME=RUN_DIR."""
    for text in named:
        name, equals, run_dir = text.partition("=")
        if not equals:
            raise SystemExit(f"{text}: expected NAME=RUN_DIR, for example quickstart=runs/quickstart/rl")
        lacks = [part for part in ("trajectory", "hf") if not (Path(run_dir) / part).is_dir()]
        if lacks:
            raise SystemExit(f"{run_dir}: no {lacks[0]}/; expected a finished run with --train.record_gib 20")
        yield name, Path(run_dir)


class Recorded:
    """A recorded run: the groups that are measured, and texts of policies under their seeds."""

    def __init__(self, name: str, run_dir: Path, prompts: int, samples: int, dtype: str) -> None:
        self.name = name
        self.config = config_of(run_dir)
        self.trajectory = Trajectory(run_dir)
        self.steps = self.trajectory.steps
        running = min(self.config.rollout.max_running_requests, 64)
        self.engine = engine_of(run_dir, run_dir / "hf", self.config, dtype, running=running)
        self.groups: list[Group] = []
        self.earlier: list[Group] = []
        seen: dict[int, int] = {}
        self.epoch = 0  # steps between two answers to one prompt; 0: no prompt came twice
        for step in range(self.steps - 1, -1, -1):
            for group in self.trajectory.groups(step):
                if group.prompt.id in seen and not self.epoch:
                    self.epoch = seen[group.prompt.id] - step
                if group.prompt.id not in seen and len(self.groups) < prompts:
                    self.groups.append(Group(group.prompt, group.samples[:samples]))
                else:
                    self.earlier.append(group)
                seen.setdefault(group.prompt.id, step)
        self.distances = sorted({min(d, self.steps) for d in (1, 5, self.epoch or self.steps, self.steps)})
        self.dtype = dtype or self.config.model.dtype
        self.version = 1

    def distance_name(self, distance: int) -> str:
        if distance == self.epoch:
            return f"{distance} steps, an epoch"
        return "1 step" if distance == 1 else f"{distance} steps"

    def answers(self, step: int, config: SpecConfig) -> list[Sample]:
        """Return one answer for each sample of `groups`, in their order, by the policy before `step`."""
        self.version += 1
        self.engine.update_weights(self.version, self.trajectory.policy(step).items(), "target")
        self.engine.set_schedule(SpecSchedule.fixed(config))
        requests = []
        for i, group in enumerate(self.groups):
            for j, sample in enumerate(group.samples):
                name = f"v{self.version:04d}-g{i:05d}-s{j:05d}"
                requests.append(Request(name, group.prompt, sample.seed or 0))
        how = sampling(self.config)
        if not self.config.rollout.function:
            return self.engine.generate(requests, how)
        function = custom.load("rollout.function", self.config.rollout.function)
        tokenizer = data.load_tokenizer(self.config.model.path)
        return Conversations(function, EnginePool({"engine": self.engine}), tokenizer).draw(requests, how)


@contextmanager
def one_token_a_round(engine: EmbeddedEngine) -> Iterator[dict[tuple[int, int], int]]:
    """Let every round commit one token. Yield how many drafts of each it would have accepted, by (seed, position)."""
    found: dict[tuple[int, int], int] = {}
    follow, run = verify.walk, engine.rounds.round
    present: list[tuple[int, int]] = []

    def first_only(*tree: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        path, accepted = follow(*tree)
        found.update(zip(present, accepted.tolist(), strict=True))
        return path, np.zeros_like(accepted)

    def noted(rows: np.ndarray, *rest: object) -> list:
        seeds, lengths = engine.rounds.seeds[rows, 0].tolist(), engine.cache.length[rows].tolist()
        present[:] = zip(seeds, lengths, strict=True)
        return run(rows, *rest)

    verify.walk, engine.rounds.round = first_only, noted
    try:
        yield found
    finally:
        verify.walk, engine.rounds.round = follow, run


# ---- figures --------------------------------------------------------------------------------------------------------


class Texts(NamedTuple):
    """What the figures are made of, a list entry a sample; `group` has the index of its prompt.

    old     steps between the policies -> answers of the older one
    drafts  way -> for each sample, how many drafts of a round at each position of the text are right, `[L]`
    """

    new: Sequence[Sample]
    old: Mapping[int, Sequence[Sample]]
    group: Sequence[int]
    drafts: Mapping[str, Sequence[np.ndarray]]


def collect(run: Recorded) -> Texts:
    """Draw all texts of a run, and find how many drafts are right along the newest policy's."""
    old = {}
    for distance in sorted(run.distances, reverse=True):  # a trajectory is read forwards
        old[distance] = timed(run, f"policy {distance} steps old", run.steps - distance, OFF)
    old[0] = timed(run, "newest policy, other batches", run.steps, OFF)
    with one_token_a_round(run.engine) as accepted:
        new = timed(run, "newest policy, every round", run.steps, SpecConfig(DRAFTS))
    group = [i for i, one in enumerate(run.groups) for _ in one.samples]
    drafts = {run.config.drafter.kind: [by_drafter(sample, accepted) for sample in new]}
    for distance in run.distances:
        drafts[f"same seed, {run.distance_name(distance)} old"] = list(map(same_seed, new, old[distance]))
    # What is left of that where epochs have seeds of their own: the answer of a sibling.
    oldest = run.distances[-1]
    siblings = shifted(old[oldest], group)
    drafts[f"another seed, {run.distance_name(oldest)} old (control)"] = list(map(same_seed, new, siblings))
    return Texts(new, old, group, drafts)


def timed(run: Recorded, what: str, step: int, config: SpecConfig) -> list[Sample]:
    began = time.process_time()
    samples = run.answers(step, config)
    tokens = sum(len(sample.response) for sample in samples)
    print(f"  {run.name}: {what}: {tokens} tokens, {time.process_time() - began:.0f} s of CPU", flush=True)
    return samples


def by_drafter(sample: Sample, accepted: Mapping[tuple[int, int], int]) -> np.ndarray:
    right = np.zeros(len(sample.tokens), np.int64)
    for at in range(sample.prompt_len, len(right)):
        right[at] = accepted.get((sample.seed or 0, at), 0)
    return right


def same_seed(sample: Sample, old: Sample) -> np.ndarray:
    """Return how many tokens of an old answer are right at the same positions; right after a difference none is."""
    text, before = sample.tokens, old.tokens
    right = np.zeros(len(text), np.int64)
    both = min(len(text), len(before))
    agree = text[:both] == before[:both]
    for at in range(sample.prompt_len, both):
        if at == sample.prompt_len or agree[at - 1]:
            differ = np.flatnonzero(~agree[at : at + OLD_DRAFTS])
            right[at] = differ[0] if len(differ) else min(OLD_DRAFTS, both - at)
    return right


def walk(own: np.ndarray, right: np.ndarray) -> tuple[int, int]:
    """Return the rounds of a text, and their accepted drafts. A turn's first token comes from a prefill.

    own    [L], whether the policy generated the token
    right  [L], drafts of a round at this position that are right
    """
    rounds = accepted = 0
    edges = np.flatnonzero(np.diff(np.concatenate([[0], own.astype(np.int8), [0]])))
    for first, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        at = first + 1
        while at < end:
            taken = min(int(right[at]), end - at - 1)
            rounds += 1
            accepted += taken
            at += taken + 1
    return rounds, accepted


def gain(total: np.ndarray, base: np.ndarray) -> Estimate:
    """Estimate by what share a way has more tokens a round than `base` on the same prompts; both `[prompts, 2]`."""
    found, of = estimate(total, base), estimate(base).value
    return Estimate(found.value / of, found.low / of, found.high / of)


def table(texts: Texts) -> list[dict]:
    """Return a row for each way: tokens a round, and the gain over the drafter."""
    rows, base = [], None
    for way, drafts in texts.drafts.items():
        total = np.zeros((max(texts.group) + 1, 2), np.int64)
        for sample, right, g in zip(texts.new, drafts, texts.group, strict=True):
            total[g] += walk(sample.loss_mask > 0, right)
        base = total if base is None else base
        rows.append({"way": way, "tokens": vars(estimate(total)), "gain": vars(gain(total, base))})
    return rows


def survival(run: Recorded, texts: Texts) -> list[dict]:
    """Return a row for each age: the share of old tokens that survive, and the curve over the answer's length."""
    compared = {
        f"{run.distance_name(d)} old" if d else "0 steps (control)": old for d, old in sorted(texts.old.items())
    }
    compared["another seed (control)"] = shifted(texts.new, texts.group)
    rows = []
    for name, old in compared.items():
        counts = np.zeros((max(texts.group) + 1, 2), np.int64)
        kept, ends = [], []
        for a, b, g in zip(old, texts.new, texts.group, strict=True):
            same = a.response[: len(b.response)] == b.response[: len(a.response)]
            kept.append(len(same) if same.all() else int(np.argmin(same)))
            ends.append(len(a.response))
            counts[g] += (ends[-1], kept[-1])
        share = estimate(counts)  # 1 + survived / all
        longest = max(ends)
        points = sorted({round(longest * part) for part in np.linspace(0, 1, 41)})
        # Of the answers that reach n tokens, the share whose first n tokens survive.
        reach = [sum(end >= n for end in ends) for n in points]
        alive = [sum(k >= n for k in kept) for n in points]
        curve = [[n, a / r] for n, a, r in zip(points, alive, reach, strict=True) if r >= max(4, len(ends) // 10)]
        rows.append(
            {
                "age": name,
                "share": [share.value - 1, share.low - 1, share.high - 1],
                "whole": float(np.mean([k == e for k, e in zip(kept, ends, strict=True)])),
                "tokens": float(np.mean(kept)),
                "curve": curve,
            }
        )
    return rows


def shifted(samples: Sequence[Sample], group: Sequence[int]) -> list[Sample]:
    """Return for each answer that of a sibling: the same prompt and policy under another seed."""
    members: dict[int, list[int]] = defaultdict(list)
    for i, g in enumerate(group):
        members[g].append(i)
    other = list(samples)
    for own in members.values():
        for i, j in zip(own, [*own[1:], own[0]], strict=True):
            other[i] = samples[j]
    return other


def measure(name: str, run_dir: Path, prompts: int, samples: int, dtype: str) -> dict:
    run = Recorded(name, run_dir, prompts, samples, dtype)
    texts = collect(run)
    lengths = [int(sample.loss_mask.sum()) for sample in texts.new]
    return {
        "run": run.name,
        "steps": run.steps,
        "epoch": run.epoch,
        "prompts": len(run.groups),
        "samples": len(texts.new),
        "tokens": float(np.mean(lengths)),
        "longest": max(lengths),
        "dtype": run.dtype,
        "ways": table(texts),
        "survival": survival(run, texts),
    }


def show(found: Mapping) -> None:
    epoch = f"an epoch of {found['epoch']} steps" if found["epoch"] else "an epoch is longer"
    print(
        f"\n{found['run']}: {found['steps']} recorded steps ({epoch}), {found['prompts']} prompts, {found['samples']} "
        f"answers of {found['tokens']:.1f} tokens, the longest {found['longest']}, {found['dtype']}"
    )
    print(f"  {'tokens a round, 3 drafts by the drafter, 8 of an old answer':60} {'':>22} {'over the drafter':>24}")
    for way in found["ways"]:
        more = Estimate(**way["gain"])
        shown = f"{more.value:+.1%} [{more.low:+.1%}, {more.high:+.1%}]"
        print(f"  {way['way']:60} {str(Estimate(**way['tokens'])):>22} {shown:>24}")
    print(f"  {'share of old tokens that survive':42} {'':24} whole answers  tokens")
    for age in found["survival"]:
        value, low, high = age["share"]
        shown = f"{value:.3f} [{low:.3f}, {high:.3f}]"
        print(f"  {age['age']:42} {shown:24} {age['whole']:13.3f}  {age['tokens']:6.1f}")


def plot(results: Sequence[Mapping], path: Path) -> None:
    """Draw the share of answers whose first n tokens survive, over n, a panel a run."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    columns = min(4, len(results))
    rows = -(-len(results) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(3.2 * columns, 3 * rows), layout="constrained", squeeze=False)
    for axis in axes.flat[len(results) :]:
        axis.axis("off")
    for axis, found in zip(axes.flat, results, strict=False):
        for age in found["survival"]:
            style = "--" if "control" in age["age"] else "-"
            axis.plot(*zip(*age["curve"], strict=True), style, label=age["age"], linewidth=1.2)
        axis.set(title=f"{found['run']} ({found['tokens']:.0f} tokens)", xlabel="first n tokens", ylim=(0, 1.03))
        axis.set_ylabel("share of answers")
        axis.legend(fontsize="x-small")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("runs", nargs="+", metavar="NAME=RUN_DIR", help="runs with --train.record_gib 20")
    p.add_argument("--prompts", type=int, default=32, help="of the last steps; default: 32")
    p.add_argument("--samples", type=int, default=4, help="of each prompt, its siblings among them; default: 4")
    dtypes = ("bfloat16", "float32")
    p.add_argument("--dtype", choices=dtypes, default="", help="of the engine; default: the run's")
    p.add_argument("--quick", action="store_true", help="4 prompts with 2 samples each: shows that it runs")
    p.add_argument("--out", type=Path, help="also write the figures to this file, as JSON")
    p.add_argument("--plot", type=Path, help="draw the survival curves into this file")
    options = p.parse_args(argv)
    torch.set_num_threads(1)
    prompts, samples = (4, 2) if options.quick else (options.prompts, options.samples)
    results = []
    for name, run_dir in runs(options.runs):
        results.append(measure(name, run_dir, prompts, samples, options.dtype))
        show(results[-1])
        if options.out is not None:
            files.write(options.out, json.dumps(results, indent=1) + "\n")
    if options.plot is not None:
        plot(results, options.plot)


if __name__ == "__main__":
    main()
