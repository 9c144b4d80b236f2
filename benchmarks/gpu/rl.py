"""Take RL steps that alternate plain, frozen and co-trained, in one process and on the same prompts.

plain       the engine drafts nothing, and the drafter does not learn
frozen      the engine drafts with the drafter as it was at the start
co-trained  the engine drafts with the trained drafter, which learns in the step

Responses have one length, so steps differ by the drafts and by the drafter's training alone. A plain step runs on an
engine that can draft, whose rounds without drafts take about 3 % longer than those of a plain engine. The policy learns
in every step. Trainer and engine share the card, and both stay in its memory.
"""

from __future__ import annotations

import os
import shutil
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from adaptive_sglang import ratio

from gpu import serving
from gpu.figures import Figures
from gpu.plan import Plan
from gpu.widened import PROMPTS
from megatron_rlspec.config import Config
from megatron_rlspec.records.recorder import read_records
from megatron_rlspec.rollout.sglang.client.engine import SGLangEngine
from megatron_rlspec.run.extension import DrafterSchedule, Extensions
from megatron_rlspec.run.session import Session

PLAIN, FROZEN, CO_TRAINED = KINDS = ("plain", "frozen", "co-trained")
ROOM = 256  # tokens of a prompt at most
MICRO_BATCH = 8192  # tokens


def run(plan: Plan, folder: Path, figures: Figures) -> None:
    kinds = [CO_TRAINED]  # the first step does not count
    for block in range(plan.blocks):
        turn = block % len(KINDS)
        kinds += [*KINDS[turn:], *KINDS[:turn]]
    config = config_of(plan, folder, figures.out.parent / "rl-run", len(kinds))
    seconds = alternate(config, serving.attached(folder)["widened"], kinds)
    say(figures, config, kinds, seconds)
    for kind in (FROZEN, CO_TRAINED):
        say_ratio(figures, kinds, seconds, kind, plan.blocks)


def config_of(plan: Plan, folder: Path, run_dir: Path, steps: int, staleness: int = 0) -> Config:
    """Return the configuration of a run on the session's engine."""
    shutil.rmtree(run_dir, ignore_errors=True)
    here = str(Path(__file__).parent.parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH", "")]))  # of rewards
    longest = plan.response + ROOM
    settings: dict[str, Any] = {
        "model": {"path": str(folder / "widened"), "dtype": plan.dtype, "max_length": longest},
        "data": {"path": str(folder / PROMPTS), "shuffle": False},
        "reward": {"kind": "gpu.reward:variety", "workers": 1},
        "rollout": {
            "urls": [serving.attached(folder)["widened"].url],
            "prompts_per_step": plan.prompts,
            "samples_per_prompt": plan.samples,
            "max_new_tokens": plan.response,
            "max_running_requests": plan.prompts * plan.samples,
            "temperature": 0.7,
            "staleness": staleness,
        },
        "spec": {"mode": "adaptive", "candidate_steps": list(plan.steps), "num_steps": plan.drafts},
        "optimizer": {"lr": 1e-5, "warmup_steps": 2, "clip_grad": 1.0},
        "drafter": {"depth": plan.train_depth},
        "parallel": {"recompute": plan.on_gpu},
        "push": {"transport": "handles" if plan.on_gpu else "http"},
        "train": {
            "steps": steps,
            "run_dir": str(run_dir),
            "tokens_per_micro_batch": max(MICRO_BATCH, longest),
            "eval_every": 0,
            "save_every": 0,
        },
    }
    return Config.model_validate(settings)


class Alternating(DrafterSchedule):
    """The drafter's schedule: it learns in the co-trained steps. `kind` is that of the present step."""

    def __init__(self) -> None:
        self.kind = CO_TRAINED

    def train_step(
        self, step: int, train: Callable[[bool], dict[str, float]], rollout_seconds: float | None
    ) -> dict[str, float]:
        learns = self.kind == CO_TRAINED
        return train(learns) | {"drafter/updated": float(learns)}


def alternate(config: Config, engine: SGLangEngine, kinds: Sequence[str]) -> list[float]:
    """Take one step of each kind, as `loop.train` takes them. Returns the seconds of each step."""
    schedule = Alternating()
    seconds = []
    with Session(config, extensions=Extensions(drafter=lambda *_: schedule)) as run:
        assert run.rollouts is not None
        generation = run.rollouts.generation
        generation.sampling = replace(generation.sampling, ignore_eos=True)
        drafter = run.trainer.drafter
        first = weights_of(drafter)
        push(run, engine, kinds[0], first)
        for step in run.records.steps(len(kinds)):
            began = time.perf_counter()
            schedule.kind = kinds[step]
            with run.clock("generate"):
                groups = run.collect(step)
            with run.clock("train"):
                metrics = run.train_step(run.pack(groups), objective="grpo")
            with run.clock("generate"):
                run.settle()
            run.adapt()
            with run.clock("push"):
                push(run, engine, kinds[min(step + 1, len(kinds) - 1)], first)
            run.record(step, metrics, groups)
            seconds.append(time.perf_counter() - began)
    return seconds


def push(run: Session, engine: SGLangEngine, kind: str, first: Sequence[torch.Tensor]) -> None:
    """Push the policy, and the drafter that a step of this kind drafts with. `first`: the drafter's first weights."""
    engine.release()
    drafter = run.trainer.drafter
    trained = weights_of(drafter)
    if kind == FROZEN:
        set_weights(drafter, first)
    run.push()
    set_weights(drafter, trained)
    if kind == PLAIN:
        engine.hold("a plain step")


def weights_of(module: Any) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in module.parameters()]


@torch.no_grad()
def set_weights(module: Any, weights: Sequence[torch.Tensor]) -> None:
    for parameter, weight in zip(module.parameters(), weights, strict=True):
        parameter.copy_(weight)


def say(figures: Figures, config: Config, kinds: Sequence[str], seconds: Sequence[float]) -> None:
    """Write seconds of a step and of its parts, accept length and reward, by kind; the first step does not count."""
    records = read_records(Path(config.train.run_dir) / "metrics.jsonl")
    for kind in dict.fromkeys(kinds):
        steps = [step for step in range(1, len(kinds)) if kinds[step] == kind]
        chosen = [records[step] for step in steps]
        note = f"{len(steps)} steps: " + ", ".join(f"{seconds[step]:.1f}" for step in steps)
        figures.say(f"{kind}: a step", statistics.median(seconds[step] for step in steps), "s", note)
        for part in ("generate", "train", "push"):
            figures.say(f"{kind}: {part}", middle(chosen, f"seconds_{part}"), "s")
        if not config.rollout.staleness:  # then a step trains on the rollout of the step before
            length = middle(chosen, "rollout/accept_length") if kind != PLAIN else 1.0
            figures.say(f"{kind}: accept length", length, "tokens a round")
    rewards = [record["rollout/reward"] for record in records]
    note = "reward of each step: " + ", ".join(f"{reward:.3f}" for reward in rewards)
    figures.say("reward, last over first step", rewards[-1] / max(rewards[0], 1e-9), "x", note)


def middle(records: Sequence[Mapping[str, Any]], name: str) -> float:
    return statistics.median(float(record[name]) for record in records)


def say_ratio(figures: Figures, kinds: Sequence[str], seconds: Sequence[float], kind: str, blocks: int) -> None:
    """Write how many times as long a plain step takes as one of this kind, in pairs of the same prompts."""
    pairs = {name: [seconds[step] for step in range(1, len(kinds)) if kinds[step] == name] for name in (PLAIN, kind)}
    value, low, high = ratio(np.array(pairs[PLAIN]), np.array(pairs[kind]))
    note = f"95 % interval of the median over {blocks} blocks: {low:.2f} to {high:.2f}"
    figures.say(f"plain / {kind}, a step", value, "x", note)
