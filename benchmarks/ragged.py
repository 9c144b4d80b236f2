"""Simulate rounds that verify the drafts worth it, on the chains of a model and with an H100's costs.

    python benchmarks/ragged.py --round
    python benchmarks/ragged.py NAME=MODEL:PROMPTS ... [--drafter DIR] [--temperature 1] [--batches 1,64,256] [--engine]

MODEL is a run's `hf`, PROMPTS its held-out prompts. The embedded engine generates texts, drafts DEPTH tokens at every
position, and verifies none, so the texts are those of plain decoding. Then rounds are simulated: each of B requests
walks along texts, and accepts the leading drafts that agree with the text, at most those that it verifies. The best
fixed number of drafts is compared with `speculation/ragged.py`, which learns as in an engine, and with a choice that
knows the acceptance. Rounds begin at a text's second token, and at least DEPTH tokens before its end.

--round measures what a round of 256 requests with five drafts costs an engine's host, in ms of a core.

With --engine the embedded engine runs the rounds, too, by the costs of `CHECKED`. Printed are the drafts that both
verify and accept, of texts that all have --new-tokens tokens.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from megatron_rlspec.commands.compare import draw
from megatron_rlspec.config import Config
from megatron_rlspec.conversion.drafter_files import read_model, weights_of
from megatron_rlspec.rollout.embedded.engine import EmbeddedEngine
from megatron_rlspec.rollout.embedded.model import is_drafter
from megatron_rlspec.speculation.ragged import Selection
from megatron_rlspec.speculation.roofline import Roofline
from megatron_rlspec.speculation.rule import SpecRule
from megatron_rlspec.tasks import data
from megatron_rlspec.types import Sampling, SpecConfig

DEPTH = 8
STEPS = (1, 2, 3, 4, 6, 8)
WARM_UP = 60  # rounds from which the choice learns before it is measured

# ms of a round of a 7B model on an H100 with short contexts. These lines give the twelve measured rounds of 0 to 3
# drafts at 1, 64 and 256 requests within 3 % (benchmarks/results/gpu_session.md).
TOKENS = (1, 64, 128, 192, 256, 512, 768, 1024)
TARGET_MS = (5.2, 5.7, 6.3, 7.1, 8.1, 13.3, 19.4, 25.7)


def round_ms(batch: int, passes: int, drafts: np.ndarray | float) -> np.ndarray:
    """Return ms of a round whose requests verify so many drafts on average, after `passes` passes of the drafter."""
    tokens = batch * (1 + np.asarray(drafts, float))
    last = (TARGET_MS[-1] - TARGET_MS[-2]) / (TOKENS[-1] - TOKENS[-2])
    target = np.interp(tokens, TOKENS, TARGET_MS) + np.maximum(tokens - TOKENS[-1], 0) * last
    return target + 1.3 + 0.0078 * batch + passes * (0.7 + 0.0012 * batch)


RoundCost = Callable[[int, int, Any], Any]
# of the rounds of --engine: at 64 requests most tokens are computed for longer than the weights are read
CHECKED = Roofline(1.0, 1 / 64, 0.0, 0.02)


def checked_ms(batch: int, passes: int, drafts: np.ndarray | float) -> np.ndarray:
    """As `round_ms`, by `CHECKED`."""
    each = np.atleast_1d(np.asarray(drafts, float))
    ms = CHECKED.grid([SpecConfig(passes)], np.array(batch), np.array(batch), each)
    return ms if np.ndim(drafts) else ms[0]


class World(NamedTuple):
    """Positions where rounds can begin.

    logq   [N, DEPTH]
    right  [N] leading drafts that agree with the text
    after  [N, DEPTH + 2] the position that so many tokens lead to
    """

    logq: np.ndarray
    right: np.ndarray
    after: np.ndarray


class Nothing:
    """Verifies no draft."""

    def lengths(self, logq: np.ndarray) -> np.ndarray:
        return np.zeros(len(logq), np.int64)


def opened(options: argparse.Namespace, model: str, prompts: str, rows: int) -> tuple[EmbeddedEngine, list[Any]]:
    """Return an engine of so many requests at once, and the prompts."""
    hf_config, tensors = read_model(model, "")
    weights = {name: tensor.float() for name, tensor in weights_of(tensors)}
    if options.drafter:
        other = weights_of(read_model(options.drafter, "")[1])
        weights |= {name: tensor.float() for name, tensor in other if is_drafter(name)}
    longest = min(hf_config["max_position_embeddings"], 512)
    config = Config.model_validate({"model": {"max_length": longest}, "rollout": {"max_new_tokens": 1}})
    form = config.data.model_copy(update={"apply_chat_template": options.chat})
    room = longest - options.new_tokens - DEPTH
    asked, _ = data.read_prompts(Path(prompts), form, data.load_tokenizer(model), room)
    engine = EmbeddedEngine(
        hf_config, weights.items(), max_length=longest, max_running_requests=rows, max_total_tokens=rows * longest
    )
    engine.rounds.sharpness = 1.0
    return engine, asked[: options.count] * options.repeats


def sampling_of(options: argparse.Namespace) -> Sampling:
    return Sampling(options.temperature, max_new_tokens=options.new_tokens, ignore_eos=options.engine)


def record(options: argparse.Namespace, model: str, prompts: str) -> World:
    """Generate texts, and draft at every position."""
    engine, asked = opened(options, model, prompts, 64)
    engine.set_config(SpecConfig(DEPTH))
    engine.rounds.selection = Nothing()
    drafted: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}
    drafting = engine.rounds._chain

    def recorded(rows: np.ndarray, *arguments: Any) -> Any:
        chains, logq = drafting(rows, *arguments)
        seeds = engine.rounds.seeds[rows].tolist()
        for i, key in enumerate(zip(seeds, engine.cache.length[rows].tolist(), strict=True)):
            drafted[key] = chains[i].numpy(), logq[i].numpy()
        return chains, logq

    engine.rounds._chain = recorded  # type: ignore[method-assign]
    samples = draw(engine, asked, sampling_of(options), "sample")
    logq, right, starts, positions = [], [], [], []
    for sample in samples:
        places = range(sample.prompt_len + 1, len(sample.tokens) - DEPTH)
        starts += [len(logq)] * bool(places)
        for place in places:
            tokens, row = drafted[sample.seed, place]
            agree = tokens == sample.tokens[place : place + DEPTH]
            positions.append(len(places) - (place - places[0]) - 1)  # that follow in this text
            logq.append(row)
            right.append(np.cumprod(agree).sum())
    return World(np.array(logq), np.array(right), _after(np.array(positions), starts))


def _after(left: np.ndarray, starts: Sequence[int]) -> np.ndarray:
    """Return where a round that delivers 0 .. DEPTH + 1 tokens leads to: from an end to the next text."""
    places = np.arange(len(left))
    text = np.searchsorted(starts, places, side="right") - 1
    following = np.array(starts)[(text + 1) % len(starts)]
    columns = [np.where(tokens <= left, places + tokens, following) for tokens in range(DEPTH + 2)]
    return np.stack(columns, 1)


class Result(NamedTuple):
    rate: float  # tokens per ms
    accepted: float  # drafts of a request and round
    verified: float


def walk(
    world: World, batch: int, rounds: int, steps: int, choice: Selection | str, cost: RoundCost = round_ms
) -> Result:
    """Run rounds of `batch` requests. choice: a `Selection`; fixed: all drafts; known: those that will be accepted."""
    rng = np.random.default_rng(0)
    at = rng.integers(0, len(world.right), batch)
    threshold = tokens = ms = accepted_drafts = verified_drafts = 0.0
    warm_up = WARM_UP if isinstance(choice, Selection) else 0
    for number in range(warm_up + rounds):
        most = np.minimum(world.right[at], steps)
        verified = most if choice == "known" else np.full(batch, steps)
        if isinstance(choice, Selection):
            if number % 8 == 0:
                threshold = choice.plan(steps, lambda drafts: cost(batch, steps, drafts)).threshold
            logq = world.logq[at][:, :steps]
            verified = choice.lengths(logq, threshold)
        accepted = np.minimum(most, verified)
        if isinstance(choice, Selection):
            choice.observe(logq, verified, accepted)
        at = world.after[at, accepted + 1]
        if number >= warm_up:
            tokens += batch + accepted.sum()
            ms += float(cost(batch, steps, verified.mean()))
            accepted_drafts += accepted.mean()
            verified_drafts += verified.mean()
    return Result(tokens / ms, accepted_drafts / rounds, verified_drafts / rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="NAME=MODEL:PROMPTS")
    parser.add_argument("--round", action="store_true", help="measure the host's work for a round, and nothing else")
    parser.add_argument("--drafter", default="", help="a model whose drafter drafts in place of the model's own")
    parser.add_argument("--chat", action="store_true", help="apply the chat template")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--count", type=int, default=512, help="prompts")
    parser.add_argument("--repeats", type=int, default=3, help="samples of each")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--batches", default="1,16,64,256,512")
    parser.add_argument("--engine", action="store_true", help="compare the simulated rounds with those of an engine")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.round:
        host_work(256, 5)
    for named in options.models:
        name, place = named.split("=", 1)
        model, prompts = place.rsplit(":", 1)
        world = record(options, model, prompts)
        print(f"{name}, T = {options.temperature}: {len(world.right)} positions, {world.right.mean():.2f} right")
        if options.engine:
            for batch in map(int, options.batches.split(",")):
                check(options, model, prompts, world, batch)
            continue
        print("requests | drafts, accepted, over plain | passes, verified, accepted, over fixed | over fixed, known")
        for batch in map(int, options.batches.split(",")):
            compare(world, batch)


def host_work(batch: int, steps: int, rounds: int = 1000) -> None:
    """Print ms of a core that deciding on rounds and counting them takes, with the plans of every 32 rounds."""
    rng = np.random.default_rng(0)
    candidates = [SpecConfig(k) for k in (1, 2, 3, steps)]
    for ragged in (False, True):
        rule = SpecRule(candidates, CHECKED, ragged=ragged)
        seconds: dict[str, float] = dict.fromkeys(("choose", "lengths", "observe", "timed"), 0.0)

        def timed(name: str, *arguments: Any, of: SpecRule = rule, into: dict[str, float] = seconds) -> Any:
            began = time.thread_time()
            result = getattr(of, name)(*arguments)
            into[name] += time.thread_time() - began
            return result

        for number in range(200 + rounds):
            if number == 200:  # what is learnt first takes other paths
                seconds.update(dict.fromkeys(seconds, 0.0))
            config = timed("choose", batch, 300 * batch, lambda n: 0)
            logq = -rng.exponential(0.3, (batch, config.num_steps))
            right = np.cumprod(rng.random(logq.shape) < np.exp(logq), 1).sum(1)
            verified = timed("lengths", logq) if ragged else np.full(batch, config.num_steps)
            chosen = (verified, logq) if ragged else ()
            timed("observe", config, np.minimum(right, verified), *chosen)
            mean = (None, float(verified.mean())) if ragged else ()
            timed("timed", config, batch, 300 * batch, 10 + rng.random(), *mean)
        parts = ", ".join(f"{name} {1e3 * spent / rounds:.3f}" for name, spent in seconds.items())
        kind = "uneven" if ragged else "even"
        print(f"{kind} rounds, {batch} requests: {1e3 * sum(seconds.values()) / rounds:.3f} ms ({parts})")


def compare(world: World, batch: int) -> None:
    """Print one line: the best fixed number of drafts, the choice, and the choice that knows the acceptance."""
    rounds = max(60, 12_000 // batch)
    plain = walk(world, batch, rounds, 0, "fixed").rate
    fixed = {k: walk(world, batch, rounds, k, "fixed") for k in range(1, DEPTH + 1)}
    k = max(fixed, key=lambda steps: fixed[steps].rate)
    chosen = {d: walk(world, batch, rounds, d, Selection(DEPTH)) for d in STEPS}
    d = max(chosen, key=lambda steps: chosen[steps].rate)
    known = max(walk(world, batch, rounds, steps, "known").rate for steps in STEPS)
    best = fixed[k].rate
    gain = 100 * (chosen[d].rate / best - 1)
    print(
        f"{batch:8} | {k}, {fixed[k].accepted:.2f}, {best / plain:.3f} | {d}, {chosen[d].verified:.2f}, "
        f"{chosen[d].accepted:.2f}, {gain:+.1f} % | {100 * (known / best - 1):+.1f} %",
        flush=True,
    )


def check(options: argparse.Namespace, model: str, prompts: str, world: World, batch: int) -> None:
    """Print the drafts of a request and round that the engine and the simulation verify and accept."""
    engine, asked = opened(options, model, prompts, batch)
    for steps in (2, 4, 6):
        rule = {"candidates": [steps], "roofline": CHECKED.to_json(), "ragged": True}
        engine.set_spec_rule(rule)
        draw(engine, asked[:batch], sampling_of(options), "first")  # from which the rule learns
        engine.stats()
        draw(engine, asked, sampling_of(options), "second")
        rounds = [stats for stats in engine.stats() if stats.batch == batch]
        requests = sum(sum(stats.accepted) for stats in rounds)
        verified = sum(stats.verified for stats in rounds) / requests
        accepted = sum(drafts * count for stats in rounds for drafts, count in enumerate(stats.accepted)) / requests
        simulated = walk(world, batch, 200, steps, Selection(DEPTH), checked_ms)
        print(
            f"{batch} requests, {steps} passes: verified {verified:.2f} ({simulated.verified:.2f} simulated), "
            f"accepted {accepted:.2f} ({simulated.accepted:.2f}), accepted over verified "
            f"{accepted / verified:.3f} ({simulated.accepted / simulated.verified:.3f})",
            flush=True,
        )


if __name__ == "__main__":
    main()
