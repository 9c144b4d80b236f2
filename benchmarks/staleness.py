"""Measure how drafters follow one recorded RL run: by loss, schedule, weights and learning rate.

    python benchmarks/staleness.py [--quick] [--question losses|dispute|share] [--workers N] [--seconds N] [--work DIR]
        [--csv FILE] [--plot FILE]

--question losses measures each loss with an update in every step. --question dispute compares drafters that are trained
once before RL, on the first policy's own answers, with drafters that are updated in every step or in every fifth.
--question share compares drafters that learn from a part of each step's samples with drafters that learn in some steps.

The policy does not depend on its drafter. So a run is recorded once per task and seed, and every variant is a replay of
it (docs/replay.md). All drafters answer the same held-out prompts with the same seeds, and the texts are the same; the
differences are paired, with 95 % bootstrap intervals over prompts. Tasks are those of the quickstart's make_task.py:
in `days` RL changes what the policy says, in `slips` it removes errors, in `writers` it chooses one of two ways to
answer.

The work is kept in --work: a finished job is not repeated, and several processes may share the directory. --workers
starts them. --seconds ends after so long; the next call continues. A table of unfinished work leaves out what is
missing.
"""

from __future__ import annotations

import argparse
import csv
import fcntl
import hashlib
import itertools
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from megatron_rlspec import files
from megatron_rlspec.commands import compare, training
from megatron_rlspec.config import Config, load_replay
from megatron_rlspec.models import tensor_file
from megatron_rlspec.models.hf_files import read_hf
from megatron_rlspec.rollout.embedded.engine import EmbeddedEngine
from megatron_rlspec.run.session import Session
from megatron_rlspec.run.trajectory import Trajectory
from megatron_rlspec.tasks import data
from megatron_rlspec.types import SHARPNESS, Prompt, Sampling

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples/quickstart"
SCHEDULES: dict[str, dict[str, str]] = {
    "every step": {},
    "every 5 steps": {"update_every": "5"},
    "before RL": {},  # trained on answers of the first policy, then left alone
    "replay": {"replay": "uniform"},
    "reward": {"reward_weight": "reward"},
    "after the step": {"replay": "newest"},
    "overlap": {"overlap": "true"},
    "disagreement": {"replay": "disagreement"},
}
SHARES: dict[str, dict[str, str]] = {
    "share 0.5": {"share": "0.5"},
    "share 0.25": {"share": "0.25"},
    "share 0.125": {"share": "0.125"},
    "every 2 steps": {"update_every": "2"},
    "every 4 steps": {"update_every": "4"},
}
LOSSES = ("ce", "forward_kl", "reverse_kl", "tv")
RATES = ("1e-3", "1e-4")  # ten times the policy's, and the policy's own
MORE_RATES = ("3e-4", "3e-3")  # of an update in every step only
DRAFTS = 3
FROZEN = "frozen"
ENVIRONMENT = dict(os.environ)  # for processes of their own: a Session adds the address of its process group


@dataclass(frozen=True)
class Size:
    """What is measured, in full or --quick.

    measured  policy steps at which all drafters are compared
    last      policy step of the last update in the curve over `ages`, steps since then
    """

    tasks: tuple[str, ...] = ("days", "slips", "writers")
    seeds: tuple[int, ...] = (1, 2)
    steps: int = 30
    measured: tuple[int, ...] = (5, 15, 30)
    last: int = 10
    ages: tuple[int, ...] = (0, 1, 2, 5, 10, 20)
    prompts: int = 128
    warm: tuple[str, ...] = ()
    train: tuple[str, ...] = ()


QUICK = Size(
    tasks=("days",),
    seeds=(1,),
    steps=4,
    measured=(2, 4),
    last=2,
    ages=(0, 1, 2),
    prompts=16,
    warm=("--sft.steps", "20"),
    train=("--rollout.prompts_per_step", "4", "--train.eval_prompts", "16"),
)


@dataclass(frozen=True)
class Variant:
    """One way to train the drafter along a recorded run."""

    schedule: str
    loss: str
    rate: str

    @property
    def name(self) -> str:
        return f"{self.schedule}, {self.loss}, {self.rate}"

    @property
    def options(self) -> dict[str, str]:
        own = (SCHEDULES | SHARES)[self.schedule]
        whole = {} if {"replay", "overlap"} & own.keys() else {"share": "1"}
        chosen = whole | own | {"loss": self.loss, "lr": self.rate}
        return {f"drafter.{key}": value for key, value in chosen.items()}


BASE = Variant("every step", "ce", "1e-3")


def variants(quick: bool, question: str = "all") -> list[Variant]:
    """Return the variants, those that differ from `BASE` in one thing first."""
    if question == "losses":
        return [replace(BASE, loss=loss) for loss in LOSSES]
    if question == "share":
        return [BASE, *(replace(BASE, schedule=schedule) for schedule in SHARES)]
    if question == "dispute":
        schedules = (BASE.schedule, "every 5 steps", "before RL")
        return [Variant(schedule, loss, BASE.rate) for loss in ("ce", "tv") for schedule in schedules]
    grid = [Variant(*cell) for cell in itertools.product(SCHEDULES, LOSSES, RATES)]
    grid += [replace(BASE, rate=rate) for rate in MORE_RATES]

    def order(v: Variant) -> tuple[int, bool]:
        return (v.schedule != BASE.schedule) + (v.loss != BASE.loss) + (v.rate != BASE.rate), v.loss != BASE.loss

    grid.sort(key=order)
    return [v for v in grid if v.loss == "ce" and v.rate == RATES[0]] if quick else grid


@dataclass(frozen=True)
class Job:
    """Something to make once, by one process: `make` writes `made`, when all `needs` exist. `lock`: its file."""

    name: str
    lock: Path
    made: Path
    needs: Sequence[Path]
    make: Callable[[], None]

    @property
    def ready(self) -> bool:
        return all(path.exists() for path in self.needs)

    @contextmanager
    def claim(self) -> Iterator[bool]:
        """Yield whether this process may make it; the claim ends with the process."""
        self.lock.parent.mkdir(parents=True, exist_ok=True)
        with self.lock.open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            yield not self.made.exists()


def work_off(jobs: Sequence[Job], ends: float) -> None:
    """Make the jobs in their order, as far as `ends` of time.monotonic() allows, beside processes that do the same.

    A job that fails is a printed line; the others go on.
    """
    failed: set[Path] = set()
    while time.monotonic() < ends:
        left = [job for job in jobs if job.made not in failed and not job.made.exists()]
        if not left:
            return
        for job in left:
            if not job.ready:
                continue
            with job.claim() as mine:
                if not mine:
                    continue
                print(job.name, flush=True)
                try:
                    job.make()
                except (RuntimeError, ValueError, OSError, subprocess.CalledProcessError) as error:
                    print(f"{job.name}: failed: {error}", flush=True)
                    failed.add(job.made)
                break
        else:
            time.sleep(1)  # others make what is left, or what it needs


class Work:
    """One task and seed, in `folder/TASK/seedN`."""

    def __init__(self, folder: Path, task: str, seed: int, size: Size) -> None:
        self.task = folder / task
        self.name = task
        self.seed = seed
        self.size = size
        self.run = self.task / f"seed{seed}"

    def recording(self) -> list[Job]:
        """Return the jobs that make task, model, warm start and the recorded run."""
        task, model, warm = self.task / "task", self.task / "model", self.task / "warm"
        make_task = (str(EXAMPLES / "make_task.py"), "--task", self.name, "--out", str(task))
        make_model = (str(EXAMPLES / "make_model.py"), "--task", str(task), "--out", str(model))
        sft = self._command("sft", {"model.path": model, "train.run_dir": warm, "sft.path": task / "train.jsonl"})
        sft += ["--optimizer.lr", "3e-3", "--drafter.lr", "3e-3", "--optimizer.warmup_steps", "40"]
        sft += ["--optimizer.decay_steps", "600", *self.size.warm]
        rl = self._rl(self.run, {"train.record_gib": "20", "train.drift_every": "5"})
        return [
            self._job("task", "", task / "eval.jsonl", (), make_task),
            self._job("model", "", model / "config.json", (task / "eval.jsonl",), make_model),
            self._job("warm start", "", warm / "hf", (model / "config.json",), sft),
            self._job("RL", str(self.seed), self.run / "hf", (warm / "hf",), rl),
        ]

    def _command(self, name: str, options: Mapping[str, object]) -> list[str]:
        command = ["-m", "megatron_rlspec.cli", name, "--config", str(EXAMPLES / "quickstart.toml")]
        for key, value in options.items():
            command += [f"--{key}", str(value)]
        return command

    def _rl(self, run_dir: Path, options: Mapping[str, object]) -> list[str]:
        own = {"data.path": self.task / "task/rl.jsonl", "model.path": self.task / "warm/hf", "train.run_dir": run_dir}
        own |= {"rollout.engine": "embedded", "spec.mode": "fixed", "data.eval_path": self.task / "task/eval.jsonl"}
        # Without tis_clip, rounding of the engine's log-probs, which drafts change, does not reach the policy.
        steps = {"train.seed": self.seed, "train.steps": self.size.steps, "algorithm.tis_clip": 0}
        steps |= {"rollout.prompts_per_step": 16, "rollout.samples_per_prompt": 8}
        return [*self._command("train", {**own, **steps, **options}), *self.size.train]

    def _job(self, name: str, seed: str, made: Path, needs: Sequence[Path], command: Sequence[str]) -> Job:
        def make() -> None:
            shutil.rmtree(made.parent, ignore_errors=True)  # what an earlier call left unfinished
            subprocess.run([sys.executable, *command], cwd=ROOT, env=ENVIRONMENT, check=True, stdout=subprocess.DEVNULL)

        return Job(f"{self.name}, seed {seed or 'any'}: {name}", self._lock(f"{seed} {name}"), made, needs, make)

    def _lock(self, name: str) -> Path:
        return self.task / "locks" / name.replace(" ", "_")

    def measuring(self, variant: Variant | None) -> Job:
        """Return the job that trains a drafter and measures it on every policy; None: the warm start's, untrained."""
        name = variant.name if variant else FROZEN
        needs = (self.run / "hf",)

        def make() -> None:
            if variant:
                self.replay(variant)
            self.measure(variant)

        return Job(
            f"{self.name}, seed {self.seed}: {name}",
            self._lock(f"{self.seed} {name}"),
            self.measured(name),
            needs,
            make,
        )

    def drafter(self, variant: Variant, step: int) -> Path:
        return self.run / "drafters" / variant.name / f"step-{step:04d}.safetensors"

    def replay(self, variant: Variant) -> None:
        """Train the variant along the recorded run; keep its drafter at the steps that are measured."""
        before = variant.schedule == "before RL"
        kept = [self.size.steps] if before else sorted({*self.size.measured, self.size.last})
        if self.drafter(variant, kept[-1]).exists():
            return
        folder = self.drafter(variant, 0).parent
        overrides = variant.options | {"train.run_dir": str(folder / "run"), "train.steps": str(self.size.steps)}
        overrides["rollout.engine"] = "embedded"
        overrides |= {"replay.policy_step": "0"} if before else {}
        shutil.rmtree(folder, ignore_errors=True)
        config = load_replay(str(self.run), None, overrides)
        updates = 0.0
        own = training.extensions(config)
        with Session(config, config.data.path, extensions=own) as run:
            if before:
                run.push()
            for step in range(self.size.steps):
                groups = run.collect(step) if before else run.recorded(step)
                updates += run.train_step(run.pack(groups), objective="grpo", train_policy=False)["drafter/updated"]
                if before:
                    run.adapt()
                    run.push()
                if step + 1 in kept:
                    found = {key: tensor.clone() for key, tensor in run.trainer.export("drafter")}
                    age = step - run.drafting.last_update
                    found |= {"updates": torch.tensor(int(updates)), "age": torch.tensor(age)}
                    predicted = run.trainer.prediction
                    best = predicted.sharpness if predicted else None
                    found["sharpness"] = torch.tensor(best or SHARPNESS[0])
                    tensor_file.save(found, self.drafter(variant, step + 1))

    def cells(self, variant: Variant | None) -> list[tuple[int, str, Path]]:
        """Return (policy step, drafter's name, its file or that of the warm start) of all that is measured."""
        ages = sorted({self.size.last + age for age in self.size.ages})
        if variant is None:
            return [(step, FROZEN, self.task / "warm/hf") for step in sorted({*self.size.measured, *ages})]
        if variant.schedule == "before RL":
            only = self.drafter(variant, self.size.steps)
            return [(step, variant.name, only) for step in self.size.measured]
        found = [(step, variant.name, self.drafter(variant, step)) for step in self.size.measured]
        if variant.schedule == BASE.schedule and self.size.ages:
            left = self.drafter(variant, self.size.last)
            found += [(step, f"{variant.name}, after {self.size.last}", left) for step in ages]
        return found

    def rounds(self, step: int, name: str) -> Path:
        return self.run / "rounds" / f"{step:04d}" / f"{name}.json"

    def measured(self, name: str) -> Path:
        """Return the file that exists when all of a drafter's cells do."""
        return self.run / "rounds" / f"{name}.done"

    def measure(self, variant: Variant | None) -> None:
        """Draw with the variant's drafter, or the untrained one, on every policy that it is measured on."""
        trajectory = Trajectory(self.run)
        config = Config.model_validate_json((self.run / "config.json").read_text())
        warm, tensors = read_hf(self.task / "warm/hf")
        prompts = self.prompts(config)
        cells = sorted(self.cells(variant))
        for step, group in itertools.groupby(cells, key=lambda cell: cell[0]):
            first = {key: tensors[key] for key in tensors} | dict(trajectory.policy(step))
            engine = EmbeddedEngine(warm, first.items(), max_length=512, max_running_requests=self.size.prompts)
            for number, (_, name, path) in enumerate(group):
                self._draw(engine, step, name, path, prompts, number)
        files.write(self.measured(variant.name if variant else FROZEN), "")

    def _draw(
        self, engine: EmbeddedEngine, step: int, name: str, path: Path, prompts: Sequence[Prompt], number: int
    ) -> None:
        counts: dict[str, int] = {}
        sharpness = SHARPNESS[0]
        if path.is_dir():
            tensors = dict(read_hf(path)[1].items())
        else:
            with tensor_file.TensorFile(path) as file:
                tensors = {key: file[key] for key in file}
            counts = {key: int(tensors.pop(key)) for key in ("updates", "age")}
            sharpness = float(tensors.pop("sharpness"))
        engine.rounds.sharpness = sharpness
        found = compare.measure(
            engine, {name: tensors}, prompts, Sampling(max_new_tokens=384), (DRAFTS,), version=2 + number
        )
        text = hashlib.sha256(b"".join(sample.tokens.tobytes() for sample in found.samples)).hexdigest()
        content = {"rounds": found.rounds[name, DRAFTS].tolist(), "text": text, "sharpness": sharpness, **counts}
        self.rounds(step, name).parent.mkdir(parents=True, exist_ok=True)
        files.write(self.rounds(step, name), json.dumps(content))

    def prompts(self, config: Config) -> list[Prompt]:
        tokenizer = data.load_tokenizer(self.task / "warm/hf")
        found, _ = data.read_prompts(self.task / "task/eval.jsonl", config.data, tokenizer, 128)
        return found[: self.size.prompts]


def rows_of_all(works: Sequence[Work], chosen: Sequence[Variant]) -> list[dict[str, object]]:
    """Return the rows of every seed, and of all seeds together."""
    together = rows(works, chosen) if len(works) > 1 else []
    return together + [row for work in works for row in rows([work], chosen)]


def rows(works: Sequence[Work], chosen: Sequence[Variant]) -> list[dict[str, object]]:
    """Return a row for each task, policy step and drafter that all given seeds have measured; seeds are pooled."""
    found = []
    ages = {f"{v.name}, after {works[0].size.last}": v for v in chosen}
    named = {v.name: v for v in chosen}
    for step in sorted({step for step, _, _ in works[0].cells(None)}):
        drafters = [FROZEN, *named, *ages]
        loaded = {name: _pooled(works, step, name) for name in drafters}
        for name in drafters:
            if (here := loaded[name]) is None:
                continue
            variant = named.get(name) or ages.get(name)
            row: dict[str, object] = {"task": works[0].name, "seeds": " ".join(str(w.seed) for w in works)}
            row["policy_step"] = step
            row |= {"schedule": variant.schedule if variant else FROZEN, "loss": variant.loss if variant else ""}
            row |= {
                "lr": float(variant.rate) if variant else "",
                "drafter_step": works[0].size.last if name in ages else step,
            }
            row["curve"] = name in ages
            if not variant or variant.schedule == "before RL":
                row["drafter_step"] = 0
            row |= {"updates": here["updates"], "age": here["age"] + step - int(str(row["drafter_step"]))}
            row |= _numbers("accept_length", compare.estimate(here["rounds"]))
            for other, label in ((FROZEN, "minus_frozen"), (BASE.name, "minus_every_step")):
                if name != other and (there := loaded.get(other)) is not None:
                    row |= _numbers(label, compare.estimate(here["rounds"], there["rounds"]))
            row["same_text"] = here["text"] == (loaded[FROZEN] or here)["text"]
            found.append(row)
    return found


def _pooled(works: Sequence[Work], step: int, name: str) -> dict | None:
    """Join the prompts of all seeds; None unless every seed has been measured."""
    paths = [work.rounds(step, name) for work in works]
    if not all(path.exists() for path in paths):
        return None
    read = [json.loads(path.read_text()) for path in paths]
    return {
        "rounds": np.concatenate([np.array(r["rounds"]) for r in read]),
        "text": [r["text"] for r in read],
        "updates": float(np.mean([r.get("updates", 0) for r in read])),
        "age": float(np.mean([r.get("age", 0) for r in read])),
    }


def _numbers(label: str, found: compare.Estimate) -> dict[str, float]:
    return {label: round(found.value, 4), f"{label}_low": round(found.low, 4), f"{label}_high": round(found.high, 4)}


def most_seeds(found: Sequence[Mapping]) -> list[Mapping]:
    """Return for each drafter and policy step the row of most seeds."""
    best: dict[tuple, Mapping] = {}
    for row in found:
        key = tuple(row[name] for name in ("task", "policy_step", "schedule", "loss", "lr", "curve"))
        if key not in best or len(row["seeds"]) > len(best[key]["seeds"]):
            best[key] = row
    return list(best.values())


def table(found: Sequence[Mapping]) -> str:
    """Render the rows of the last policy step of each task, and the curves over steps since the last update."""
    lines = []
    for task in dict.fromkeys(row["task"] for row in found):
        own = most_seeds([row for row in found if row["task"] == task])
        same = [row for row in own if not row["curve"]]
        last = max((row["policy_step"] for row in same if row["schedule"] != FROZEN), default=0)
        lines.append(f"\n{task}: policy of step {last}, tokens per round of {DRAFTS} drafts")
        head = f"{'schedule':<16}{'loss':<12}{'lr':>7}{'seeds':>6}{'updates':>9}  "
        lines.append(head + f"{'accept length':<24}{'- frozen':<24}- {BASE.name}")
        for row in same:
            if row["policy_step"] == last:
                figures = [_cell(row, label) for label in ("accept_length", "minus_frozen", "minus_every_step")]
                head = (
                    f"{row['schedule']:<16}{row['loss']:<12}{row['lr']!s:>7}{row['seeds']:>6}{row['updates']:>9.1f}  "
                )
                lines.append(head + "  ".join(figures))
        curves = [row for row in own if row["curve"]]
        if curves:
            lines.append(f"{task}: every step until one, then no update; by steps since the last update")
        for row in curves:
            age = row["policy_step"] - row["drafter_step"]
            cells = f"{_cell(row, 'accept_length')}  - frozen {_cell(row, 'minus_frozen')}"
            lines.append(f"{row['loss']:<12}{row['lr']!s:>7}  {age:>3} steps  {cells}")
    texts = [bool(row["same_text"]) for row in found]
    lines.append(f"\ntexts equal to those under the frozen drafter: {sum(texts)} of {len(texts)} cells")
    return "\n".join(lines)


def _cell(row: Mapping, label: str) -> str:
    if label not in row:
        return " " * 22
    return f"{row[label]:6.3f} [{row[f'{label}_low']:6.3f},{row[f'{label}_high']:6.3f}]"


def plot(found: Sequence[Mapping], path: Path) -> None:
    """Draw, for each task, the gain over the frozen drafter by step, and by steps since the last update."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    tasks = list(dict.fromkeys(row["task"] for row in found))
    figure, axes = plt.subplots(len(tasks), 2, figsize=(11, 3.6 * len(tasks)), layout="constrained", squeeze=False)
    for (left, right), task in zip(axes, tasks, strict=True):
        own = most_seeds([row for row in found if row["task"] == task and "minus_frozen" in row])
        for number, schedule in enumerate(SCHEDULES):
            line = [r for r in own if not r["curve"] and (r["schedule"], r["loss"], r["lr"]) == (schedule, "ce", 1e-3)]
            _curve(left, line, [r["policy_step"] + 0.12 * (number - 4) for r in line], schedule)
        for number, (loss, rate) in enumerate(itertools.product(LOSSES, RATES)):
            line = [r for r in own if r["curve"] and (r["loss"], r["lr"]) == (loss, float(rate))]
            ages = [r["policy_step"] - r["drafter_step"] + 0.12 * (number - 4) for r in line]
            _curve(right, line, ages, f"{loss}, {rate}")
        left.set(title=f"{task}: schedules and weights (ce, lr 1e-3)", xlabel="RL step")
        right.set(title=f"{task}: an update in every step, then none", xlabel="steps since the last update")
        for axis in (left, right):
            axis.set(ylabel="accept length − frozen drafter's")
            axis.axhline(0, color="grey", linewidth=0.8)
            axis.legend(fontsize="x-small", ncols=2)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _curve(axis, line: Sequence[Mapping], x: Sequence[float], label: str) -> None:
    if not line:
        return
    value = np.array([row["minus_frozen"] for row in line])
    bars = [value - [row["minus_frozen_low"] for row in line], [row["minus_frozen_high"] for row in line] - value]
    axis.errorbar(x, value, yerr=bars, label=label, marker=".", linewidth=1, capsize=2)


def jobs(folder: Path, size: Size, chosen: Sequence[Variant]) -> list[Job]:
    """Return all jobs, the most informative first."""
    works = [Work(folder, task, seed, size) for seed in size.seeds for task in size.tasks]
    found = [job for work in works for job in work.recording()]
    return found + [work.measuring(variant) for variant in (None, *chosen) for work in works]


def work(folder: Path, size: Size, chosen: Sequence[Variant], seconds: float) -> None:
    """Run as one worker."""
    torch.set_num_threads(1)
    work_off(jobs(folder, size, chosen), time.monotonic() + seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one task, one seed, four steps, few variants")
    parser.add_argument("--question", choices=("all", "losses", "dispute", "share"), default="all", help="default: all")
    parser.add_argument("--losses", nargs="+", choices=LOSSES, default=LOSSES, help="default: all")
    parser.add_argument("--json", type=Path, help="write all rows to this file")
    parser.add_argument("--csv", type=Path, help="write all rows to this file")
    parser.add_argument("--plot", type=Path, help="write the picture to this file")
    parser.add_argument("--work", type=Path, help="directory of the parts; default: runs/staleness, with -quick")
    parser.add_argument("--tasks", nargs="+", choices=("days", "slips", "writers"), help="default: all")
    parser.add_argument("--seeds", nargs="+", type=int, help="default: 1 and 2")
    parser.add_argument("--workers", type=int, default=1, help="processes that share the work; default: 1")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="end after so long")
    args = parser.parse_args()
    size = QUICK if args.quick else Size()
    size = replace(size, tasks=tuple(args.tasks or size.tasks), seeds=tuple(args.seeds or size.seeds))
    if args.question != "all":
        size = replace(size, ages=(), last=size.steps)
    chosen = [variant for variant in variants(args.quick, args.question) if variant.loss in args.losses]
    chosen.sort(key=lambda variant: args.losses.index(variant.loss))
    folder = (args.work or ROOT / f"runs/staleness{'-quick' if args.quick else ''}").absolute()
    start = multiprocessing.get_context("spawn").Process
    shared = (folder, size, chosen, args.seconds)
    workers = [start(target=work, args=shared) for _ in range(args.workers)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    works = {task: [Work(folder, task, seed, size) for seed in size.seeds] for task in size.tasks}
    missing = [job.name for job in jobs(folder, size, chosen) if not job.made.exists()]
    if missing:
        print(f"unfinished: {len(missing)} jobs are left; call again to go on")
    found = [row for of_task in works.values() for row in rows_of_all(of_task, chosen)]
    cpu = f"{os.cpu_count()} cores, torch {torch.__version__}, one thread, float32, the quickstart's model"
    cpu += f"; {size.prompts} held-out prompts a seed, seeds {', '.join(map(str, size.seeds))}"
    print(f"conditions: {cpu}; load {os.getloadavg()[0]:.1f}")
    if not found:
        return
    print(table(found))
    if args.json:
        args.json.write_text(json.dumps({"conditions": cpu, "rows": found}, indent=1) + "\n")
    if args.csv:
        with args.csv.open("w", newline="") as out:
            writer = csv.DictWriter(out, list(dict.fromkeys(key for row in found for key in row)))
            writer.writeheader()
            writer.writerows(found)
    if args.plot:
        plot(found, args.plot)


if __name__ == "__main__":
    main()
