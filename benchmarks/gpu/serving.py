"""The engines of a session, which several parts ask in turn, and what they are asked to generate."""

from __future__ import annotations

import importlib.util
import itertools
import json
import re
import secrets
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gpu.figures import Figures
from gpu.plan import Plan
from megatron_rlspec import files
from megatron_rlspec.engine import EngineError
from megatron_rlspec.rollout.pool import EnginePool
from megatron_rlspec.rollout.sglang.client.engine import SGLangEngine
from megatron_rlspec.rollout.sglang.client.launcher import launch
from megatron_rlspec.rollout.sglang.settings import KEY
from megatron_rlspec.types import Prompt, Request, RoundStats, Sample, Sampling

PROMPT = 8  # tokens
MANY = 100  # generations of requests: more than a stream comes to
_numbers = itertools.count()


@dataclass(frozen=True)
class Engine:
    """An engine to start: its checkpoint, and options of `rlspec serve` and SGLang."""

    model: Path
    arguments: list[str]


# ---- engines: the session starts them, parts attach to them ----------------------------------------------------------


def key() -> Mapping[str, str]:
    """Return the environment in which the engines and all parts have one key."""
    return {KEY: secrets.token_urlsafe(32)}


def engine_set(name: str, plan: Plan, folder: Path) -> dict[str, Engine]:
    """Return the engines that run together under this name."""
    if name == "wide":
        return {"wide": _adaptive(plan, folder / "wide", max(plan.batches), plan.pool, 0.85)}
    if name == "uneven":
        requests = max(batch for batch, _ in plan.uneven_points)
        uneven = _adaptive(plan, folder / "peaked", requests, plan.pool, 0.85, plan.uneven_steps)
        uneven.arguments.append("--ragged")
        return {"uneven": uneven}
    if name == "widened":
        requests = plan.prompts * plan.samples
        tokens = requests * (plan.response + 512)
        return {"widened": _adaptive(plan, folder / "widened", requests, tokens, 0.4)}
    return _variants(plan, folder / "small")


def _adaptive(
    plan: Plan, model: Path, requests: int, tokens: int, memory: float, candidates: Sequence[int] = ()
) -> Engine:
    steps = ",".join(map(str, candidates or plan.steps))
    speculation = ["--spec", "adaptive", "--candidate-steps", steps, "--num-steps", str(plan.drafts)]
    return Engine(model, [*_options(plan, requests, tokens, memory), *speculation])


def _variants(plan: Plan, model: Path) -> dict[str, Engine]:
    """Return a plain and a drafting engine of each variant that can run here."""
    variants: dict[str, list[str]] = {"as served": []}
    if plan.on_gpu:
        variants["deterministic"] = ["--enable-deterministic-inference"]
    if has_flashinfer():
        variants["FlashInfer"] = ["--attention-backend", "flashinfer"]
    requests = max(plan.texts)
    # A response of `lossless` is short, and all its requests have one prompt.
    tokens = 2 * requests * (PROMPT + plan.text_tokens + 64)
    drafts = ["--spec", "fixed", "--num-steps", str(plan.drafts)]
    engines = {}
    for name, options in variants.items():
        common = [*_options(plan, requests, tokens, 0.85), *options]
        engines[f"{name}, plain"] = Engine(model, [*common, "--spec", "off"])
        engines[f"{name}, drafts"] = Engine(model, [*common, *drafts])
    fewer = [*_options(plan, requests, tokens, 0.85), *drafts, "--draft-vocabulary", str(plan.draft_vocabulary)]
    engines["draft vocabulary, drafts"] = Engine(model, fewer)
    return engines


def has_flashinfer() -> bool:
    """Return whether FlashInfer's attention is installed, and not only the stub of tools/offline_bundle.sh."""
    try:
        return importlib.util.find_spec("flashinfer.decode") is not None
    except ModuleNotFoundError:
        return False


def _options(plan: Plan, requests: int, tokens: int, memory: float) -> list[str]:
    """Return options of an engine.

    requests  that run at the same time
    tokens    that its KV cache holds at most
    memory    share of the memory that is free when it starts, for weights and KV cache
    """
    options = ["--device", plan.device, "--dtype", plan.dtype, "--max-running-requests", str(requests)]
    options += ["--max-total-tokens", str(tokens), "--log-level", "info", *plan.engine]
    if plan.on_gpu:
        options += ["--mem-fraction-static", str(memory)]
    return options


class Serving:
    """Starts the engines that a part needs, and ends those that the part before needed.

    name  of the set that runs, as `engine_set` has it; "": none
    """

    def __init__(self, plan: Plan, folder: Path, out: Path) -> None:
        self._plan = plan
        self._folder = folder
        self._out = out
        self.name = ""
        self._running = ExitStack()

    def need(self, name: str) -> None:
        """Have these engines, and no others, answer. Those that do not start are left out; EngineError if none does."""
        if name == self.name:
            return
        self.close()
        if not name:
            return
        figures = Figures(self._out, f"engines-{name}")
        began = time.perf_counter()
        processes = {}
        for label, engine in engine_set(name, self._plan, self._folder).items():
            log = figures.log(label.replace(", ", "-").replace(" ", "-"))
            processes[label] = self._running.enter_context(launch(engine.model, log, arguments=engine.arguments))
        urls = {}
        for label, process in processes.items():
            try:
                urls[label] = process.wait(240 if self._plan.on_gpu else 600).url
            except EngineError as error:
                figures.without(label, "failed", str(error)[:300])
        if not urls:
            self.close()
            raise EngineError(f"no engine of {name} started; the logs say why")
        figures.say("answer after", time.perf_counter() - began, "s", f"{len(processes)} start together")
        for label in urls:
            graphs, seconds, gigabytes = captures(processes[label].log.read_text(errors="replace"))
            if graphs:
                figures.say(f"{label}: CUDA graphs", graphs, "", f"captured in {seconds:.0f} s, {gigabytes:.1f} GB")
        (self._folder / "engines.json").write_text(json.dumps(urls))
        self.name = name

    def close(self) -> None:
        self.name = ""
        self._running.close()


def attached(folder: Path) -> dict[str, SGLangEngine]:
    """Return the session's engines by name."""
    urls = files.read_json(folder / "engines.json")
    return {name: SGLangEngine(url, timeout=300) for name, url in urls.items()}


# ---- requests --------------------------------------------------------------------------------------------------------


def asked(plan: Plan, count: int, prompt: int = PROMPT, seed: int = 0) -> list[Request]:
    """Make requests with random prompts of `prompt` tokens. The same seed gives the same prompts and noise."""
    rng = np.random.default_rng(seed)
    prompts = rng.integers(3, plan.shape.vocab, (count, prompt))
    return requests_of([Prompt(i, tokens) for i, tokens in enumerate(prompts)], 1000 * seed)


def requests_of(prompts: Sequence[Prompt], first_seed: int) -> list[Request]:
    """Make a request of each prompt, whose seeds follow one another."""
    serial = next(_numbers)
    return [Request(f"{serial:04d}-{i:06d}.", prompt, seed=first_seed + i) for i, prompt in enumerate(prompts)]


def rollout(engine: SGLangEngine, requests: Sequence[Request], tokens: int) -> tuple[float, list[Sample]]:
    """Generate `tokens` tokens for each request. Returns seconds and samples."""
    began = time.perf_counter()
    samples = engine.generate(requests, Sampling(max_new_tokens=tokens, ignore_eos=True))
    return time.perf_counter() - began, samples


@contextmanager
def stream(plan: Plan, engine: SGLangEngine, requests: int, context: int) -> Iterator[None]:
    """Keep so many requests running, each with a prompt of `context` tokens. One that ends is replaced.

    Yields once the first of them has ended. The prompts of later requests are those of the first ones, so the prefix
    cache has them.
    """
    rng = np.random.default_rng(requests * context)
    tokens = rng.integers(3, plan.shape.vocab, (requests, context))
    prompts = [Prompt(i, tokens[i % requests]) for i in range(MANY * requests)]
    pool = EnginePool({"engine": engine}, max_in_flight=requests)
    ended = threading.Event()
    errors: list[Exception] = []

    def work() -> None:
        sampling = Sampling(max_new_tokens=plan.tokens, ignore_eos=True)
        try:
            pool.generate(requests_of(prompts, 0), sampling, lambda sample: ended.set())
        except Exception as error:
            errors.append(error)
            ended.set()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        ended.wait()
        if errors:
            raise errors[0]
        yield
    finally:
        pool.abort()
        thread.join()


def window(engine: SGLangEngine, seconds: float) -> tuple[float, list[RoundStats]]:
    """Return the tokens per second that an engine delivers from now on, and its rounds."""
    engine.stats()
    began = time.perf_counter()
    time.sleep(seconds)
    rounds = engine.stats()
    return sum(tokens_of(stats) for stats in rounds) / (time.perf_counter() - began), rounds


def tokens_of(stats: RoundStats) -> int:
    """Return the tokens that rounds delivered to all their requests."""
    return sum((1 + drafts) * count for drafts, count in enumerate(stats.accepted))


# ---- logs ------------------------------------------------------------------------------------------------------------

_CAPTURED = re.compile(
    r"Capture (?P<name>[\w -]+?) \w+ graph end\..*?elapsed=(?P<s>[\d.]+) s, mem usage=(?P<gb>-?[\d.]+) GB"
)
_CAPTURES = re.compile(r"Capture [\w -]+? \w+ graph (?:begin|end)\..*?bs=\[(?P<sizes>[\d, ]*)\]")


def captures(log: str) -> tuple[int, float, float]:
    """Read in SGLang's log what capturing CUDA graphs took: (graphs of decode rounds, seconds, GB).

    Those of prefill are in the seconds and the memory only.
    """
    graphs = sum(len(match["sizes"].split(",")) for match in _CAPTURES.finditer(log) if match["sizes"])
    ends = list(_CAPTURED.finditer(log))
    return graphs, sum(float(match["s"]) for match in ends), sum(float(match["gb"]) for match in ends)
