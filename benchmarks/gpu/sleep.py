"""An engine beside a trainer: it releases its memory, gets it back, is pushed to, and drafts as before."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from gpu import serving
from gpu.figures import GIB, Figures, free_gib
from gpu.plan import Plan
from megatron_rlspec.models.hf_files import read_hf
from megatron_rlspec.push.canary import Canary
from megatron_rlspec.push.detectors import HealthSettings
from megatron_rlspec.push.push import Pusher
from megatron_rlspec.rollout.sglang.client.engine import SGLangEngine
from megatron_rlspec.rollout.sglang.client.transport import Handles, Http
from megatron_rlspec.types import Prompt, Sampling, SpecConfig


def run(plan: Plan, folder: Path, figures: Figures) -> None:
    found = read_hf(serving.directory(plan, folder))[1]
    tensors = {name: found[name].to(plan.device) for name in found}  # the trainer's copy
    requests = plan.shared_batch
    tokens = requests * (serving.PROMPT + plan.tokens + 64)
    arguments = [*serving.options(plan, requests, tokens, 0.6), "--spec", "fixed", "--num-steps", "3"]
    if plan.on_gpu:
        arguments += ["--enable-memory-saver", "--enable-draft-weights-cpu-backup"]
    with serving.launched(plan, folder, figures, "engine", arguments) as process:
        engine = SGLangEngine.of(process, timeout=240, transport=Handles() if plan.on_gpu else Http())
        pusher = Pusher({"engine": engine})
        _push(figures, pusher, tensors, 1, "awake")
        before = _canary(plan, figures, engine, 1, "before")
        awake = free_gib()
        _timed(figures, "sleep", engine.sleep)
        asleep = free_gib()
        if math.isnan(asleep):
            figures.without("memory that sleep releases", "not on a CPU", "")
        else:
            figures.say("memory that sleep releases", asleep - awake, "GiB", f"{asleep:.1f} GiB are free then")
            with figures.attempt("a tensor of nine tenths of it"):
                size = int(0.9 * (asleep - awake) * GIB)
                torch.empty(size, dtype=torch.uint8, device=plan.device).fill_(1)
                figures.say("a tensor of nine tenths of it", size / GIB, "GiB", "allocated and written while it sleeps")
        torch.cuda.empty_cache()
        _timed(figures, "wake", engine.wake)
        _push(figures, pusher, tensors, 2, "after it woke")
        after = _canary(plan, figures, engine, 2, "after")
        figures.say("accept length after / before", after / before, "x", "of the canary; 1 if it drafts as before")


def _timed(figures: Figures, name: str, work: Callable[[], None]) -> None:
    began = time.perf_counter()
    work()
    figures.say(name, time.perf_counter() - began, "s")


def _push(figures: Figures, pusher: Pusher, tensors: dict[str, torch.Tensor], version: int, when: str) -> None:
    report = pusher.push(version, lambda scope: tensors.items())
    if report.failed:
        raise RuntimeError(report.failed["engine"])
    figures.say(f"a push, {when}", report.seconds, "s", "fingerprints compared")


def _canary(plan: Plan, figures: Figures, engine: SGLangEngine, version: int, when: str) -> float:
    rng = np.random.default_rng(0)
    prompts = [Prompt(i, rng.integers(3, plan.shape.vocab, serving.PROMPT)) for i in range(plan.shared_batch)]
    canary = Canary(HealthSettings())
    sampling = Sampling(max_new_tokens=plan.tokens, ignore_eos=True)
    result = canary.run({"engine": engine}, {"engine": version}, prompts, sampling, SpecConfig(3), None)["engine"]
    if result.error:
        raise RuntimeError(result.error)
    told = "; ".join(map(str, result.findings)) or "no finding"
    figures.say(f"canary, {when}", canary.seconds, "s", f"{result.accept_length:.2f} tokens a round; {told}")
    return result.accept_length
