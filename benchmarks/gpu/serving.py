"""Engines of a session, and what they are asked to generate."""

from __future__ import annotations

import itertools
import re
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

from gpu.figures import Figures
from gpu.plan import Plan
from megatron_rlspec.rollout.sglang.client.engine import SGLangEngine
from megatron_rlspec.rollout.sglang.client.launcher import EngineProcess, launch
from megatron_rlspec.types import Prompt, Request, Sample, Sampling

PROMPT = 8  # tokens
UNCACHED = "--disable-radix-cache"  # prompts repeat, and no prefill of theirs may be left out
_numbers = itertools.count()


def directory(plan: Plan, folder: Path) -> Path:
    """Return the served checkpoint."""
    return Path(plan.model) if plan.model else folder / "model"


def options(plan: Plan, requests: int, tokens: int, memory: float, *more: str) -> list[str]:
    """Return options of an engine.

    requests  that run at the same time
    tokens    that its KV cache holds
    memory    share of the memory that is free when it starts, for weights and KV cache
    more      further options
    """
    found = ["--device", plan.device, "--dtype", plan.dtype, "--max-running-requests", str(requests)]
    found += ["--max-total-tokens", str(tokens), "--log-level", "info", *plan.engine]
    return [*found, *more, "--mem-fraction-static", str(memory)] if plan.on_gpu else [*found, *more]


@contextmanager
def launched(
    plan: Plan, folder: Path, figures: Figures, name: str, arguments: Sequence[str], model: Path | None = None
) -> Iterator[EngineProcess]:
    """Start an engine and wait until it answers; it ends with the context."""
    with launch(model or directory(plan, folder), figures.log(name), arguments=arguments) as process:
        began = time.perf_counter()
        process.wait()
        figures.say(f"{name}: the engine answers after", time.perf_counter() - began, "s")
        yield process


@contextmanager
def launched_together(
    plan: Plan, folder: Path, figures: Figures, engines: Mapping[str, Sequence[str]]
) -> Iterator[list[EngineProcess]]:
    """Start engines at the same time, by name with their arguments, and wait until all answer."""
    with ExitStack() as stack:
        began = time.perf_counter()
        processes = [
            stack.enter_context(launch(directory(plan, folder), figures.log(name), arguments=arguments))
            for name, arguments in engines.items()
        ]
        for name, process in zip(engines, processes, strict=True):
            process.wait()
            taken = time.perf_counter() - began
            figures.say(f"{name}: the engine answers after", taken, "s", f"{len(engines)} start together")
        yield processes


def asked(plan: Plan, count: int, prompt: int = PROMPT, seed: int = 0) -> list[Request]:
    """Make requests with random prompts of `prompt` tokens. The same seed gives the same prompts and noise."""
    rng = np.random.default_rng(seed)
    prompts = rng.integers(3, plan.shape.vocab, (count, prompt))
    first = next(_numbers)
    return [Request(f"{first:04d}-{i:06d}.", Prompt(i, prompts[i]), seed=1000 * seed + i) for i in range(count)]


def rollout(plan: Plan, engine: SGLangEngine, requests: Sequence[Request], tokens: int) -> tuple[float, list[Sample]]:
    """Generate `tokens` tokens for each request. Returns seconds and samples."""
    began = time.perf_counter()
    samples = engine.generate(requests, Sampling(max_new_tokens=tokens, ignore_eos=True))
    return time.perf_counter() - began, samples


def speed(plan: Plan, engine: SGLangEngine, batch: int) -> float:
    """Return tokens/s of `batch` requests: the median of the repetitions, after one that is left out."""
    seconds = [rollout(plan, engine, asked(plan, batch), plan.tokens)[0] for _ in range(plan.repetitions + 1)]
    return batch * plan.tokens / statistics.median(seconds[1:])


_CAPTURED = re.compile(
    r"Capture (?P<name>[\w -]+?) \w+ graph end\..*?elapsed=(?P<s>[\d.]+) s, mem usage=(?P<gb>-?[\d.]+) GB"
)
_CAPTURES = re.compile(r"Capture [\w -]+? \w+ graph (?:begin|end)\..*?bs=\[(?P<sizes>[\d, ]*)\]")


def captures(log: str) -> tuple[int, float, float]:
    """Read in SGLang's log what capturing CUDA graphs took: (graphs of decode rounds, seconds, GB).

    Those of prefill are in the seconds and the memory only.
    """
    graphs = sum(len(found["sizes"].split(",")) for found in _CAPTURES.finditer(log) if found["sizes"])
    ends = list(_CAPTURED.finditer(log))
    return graphs, sum(float(found["s"]) for found in ends), sum(float(found["gb"]) for found in ends)


def say_captures(figures: Figures, name: str, note: str) -> None:
    """Write what the engine's CUDA graphs took."""
    graphs, seconds, gigabytes = captures(figures.log(name).read_text(errors="replace"))
    figures.say("graphs captured", graphs, "", note)
    figures.say("capturing graphs", seconds, "s")
    figures.say("memory of graphs", gigabytes, "GB")
