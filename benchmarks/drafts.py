"""Compare coupled drafts with argmax drafts: accept lengths of drafters on one policy, in pairs.

    python benchmarks/drafts.py --policy runs/quickstart/rl/hf --prompts runs/quickstart/task/eval.jsonl \\
        co-trained=runs/quickstart/rl/hf frozen=runs/quickstart/warm/hf control=runs/quickstart/control/hf
    python benchmarks/drafts.py --policy runs/smollm2/rl/hf --prompts runs/smollm2/task/eval.jsonl --chat --count 100 \\
        --max-new-tokens 32 --temperatures 1.0,0.7 \\
        co-trained=runs/smollm2/rl/hf frozen=runs/smollm2/warm/hf control=runs/smollm2/control/hf

Every row is one drafter, temperature and number of drafts: tokens per verify round with argmax drafts, with drafts that
take the verifier's noise, and the difference on the same prompts, with 95 % intervals; then by how much more drafts a
round are accepted, and tokens per CPU second of the embedded engine, and of --repeats draws in turn the medians and the
range of their ratios. Texts must be equal in all rows of a temperature. float32, one thread.

Coupled drafts are argmax(s · log q + noise). For each drafter and temperature s is chosen as in training:
other prompts, of --choose FILE, are drawn once, drafts are drawn anew with every s of `types.SHARPNESS` at the places
that rounds reached, and the s that accepts most is taken. Without --choose it is the first of --sharpness, else 2.

--sharpness 2,1,1.5,3 adds a row for each s: how often such a draft is the text's token, where the drafts before it in
its round were right. The tokens a round that follow from these rates are 1 + a_1 + a_1 a_2 + ...; intervals of their
differences to argmax drafts, s = inf, are over prompts.

--places computes rows of one draft a round from the logits at all places of the texts, for each s of --sharpness: the
probability that noise which samples the text's token makes it the draft, too. Rounds begin at a text's second token, as
in SGLang, which samples the first one without drafts.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import numpy as np
import torch

from megatron_rlspec.commands.compare import Estimate, draw, estimate, rounds_of
from megatron_rlspec.config import Config
from megatron_rlspec.conversion.drafter_files import read_model, weights_of
from megatron_rlspec.rollout.embedded import draft, verify
from megatron_rlspec.rollout.embedded.engine import EmbeddedEngine
from megatron_rlspec.rollout.embedded.model import is_drafter
from megatron_rlspec.tasks import data
from megatron_rlspec.types import OFF, SHARPNESS, Drafts, Prompt, Sample, Sampling, SpecConfig, SpecSchedule

CHOOSING = 128  # prompts on which the factor is chosen
NO_WORD = 0  # drafted where no draft is to be right; no text has it but as its end


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("drafters", nargs="+", metavar="NAME=DIR")
    p.add_argument("--policy", required=True)
    p.add_argument("--prompts", required=True, type=Path)
    p.add_argument("--chat", action="store_true", help="format prompts with the tokenizer's chat template")
    p.add_argument("--count", type=int, default=256)
    p.add_argument("--max-new-tokens", type=int, default=128)
    p.add_argument("--temperatures", default="1.0,0.7,1.5")
    p.add_argument("--steps", default="1,3,5")
    p.add_argument("--repeats", type=int, default=1, help="draws of each kind, in turn, for the speeds; default: 1")
    p.add_argument("--sharpness", default="", help="factors on log q to compare; none by default")
    p.add_argument("--choose", type=Path, help="prompts on which the factor of coupled drafts is chosen")
    p.add_argument("--places", action="store_true", help="compute accepted drafts at all places of the texts instead")
    options = p.parse_args()
    if options.places and not options.sharpness:
        p.error("--places needs --sharpness: the factors to compare")
    torch.set_num_threads(1)

    bench = Bench(options)
    steps = [int(k) for k in options.steps.split(",")]
    factors = [float(s) for s in options.sharpness.split(",") if s]
    print(
        f"{len(bench.prompts)} prompts of {options.prompts}, up to {options.max_new_tokens} tokens, embedded, float32"
    )
    for temperature in map(float, options.temperatures.split(",")):
        bench.sampling = Sampling(temperature, max_new_tokens=options.max_new_tokens)
        bench.texts.clear()
        samples, seconds = bench.drawn({}, None)
        tokens = [sample.behaviour_logprobs[sample.prompt_len :] for sample in samples]
        nats = -np.concatenate(tokens).mean()
        count = sum(map(len, tokens))
        print(
            f"\nT = {temperature}: {count / len(tokens):.1f} tokens a text, {nats:.2f} nats a token; plain decoding "
            f"{count / seconds:.0f} tokens per CPU second; load {os.getloadavg()[0]:.1f}"
        )
        if options.places:
            bench.by_place(factors)
        else:
            bench.table(steps, factors)
        print(f"T = {temperature}: {'all texts equal' if len(bench.texts) == 1 else 'TEXTS DIFFER'}", flush=True)


class Bench:
    """One policy with its prompts, several drafters, and the texts seen at the present temperature."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.hf_config, policy = read_model(options.policy, "")
        self.policy = dict(weights_of(policy))
        self.longest = min(self.hf_config["max_position_embeddings"], 4096)
        config = Config.model_validate({"model": {"max_length": self.longest}, "rollout": {"max_new_tokens": 1}})
        form = config.data.model_copy(update={"apply_chat_template": options.chat})
        tokenizer = data.load_tokenizer(options.policy)
        prompts, _ = data.read_prompts(options.prompts, form, tokenizer, self.longest - options.max_new_tokens)
        self.prompts: Sequence[Prompt] = prompts[: options.count]
        self.choosing: Sequence[Prompt] = ()
        if options.choose:
            found, _ = data.read_prompts(options.choose, form, tokenizer, self.longest - options.max_new_tokens)
            self.choosing = found[:CHOOSING]
        self.drafters = dict(named.split("=", 1) for named in options.drafters)
        self.repeats = options.repeats
        self.sharpness = SHARPNESS[0]
        self.sampling = Sampling()
        self.samples: Sequence[Sample] = ()
        self.engines: dict[Drafts, EmbeddedEngine] = {}
        self.version = 0
        self.texts: set[tuple] = set()

    def tensors_of(self, name: str) -> dict[str, torch.Tensor]:
        own = dict(weights_of(read_model(self.drafters[name], "")[1]))
        return {key: tensor for key, tensor in own.items() if is_drafter(key)}

    def table(self, steps: Sequence[int], factors: Sequence[float]) -> None:
        """Print argmax drafts beside coupled ones, and how `factors` on log q compare."""
        head = (
            f"{'drafter':>12} {'s':>4} {'k':>2} {'argmax':>7} {'coupled':>7} {'difference':>24} {'accepted drafts':>24}"
        )
        print(head + f" {'tokens per CPU second':>34}")
        for name in self.drafters:
            tensors = self.tensors_of(name)
            self.sharpness = self.chosen(tensors, max(steps)) if self.choosing else (*factors, SHARPNESS[0])[0]
            for k in steps:
                pairs = []
                for _ in range(self.repeats):
                    plain_draw = self.rounds(tensors, k, "argmax")
                    with beside((self.sharpness, *factors)) if factors else nullcontext() as drafted:
                        pairs.append((plain_draw, self.rounds(tensors, k, "coupled", drafted)))
                (plain, _), (coupled, _) = pairs[0]
                more = relative(coupled, plain)
                speeds = np.array([[one[1], other[1]] for one, other in pairs])
                ratios = speeds[:, 1] / speeds[:, 0]
                print(
                    f"{name:>12} {self.sharpness:4g} {k:2} {estimate(plain).value:7.3f} {estimate(coupled).value:7.3f} "
                    f"{signed(estimate(coupled, plain)):>24} "
                    f"{f'{more.value:+.1%} [{more.low:+.1%}, {more.high:+.1%}]':>24} "
                    f"{np.median(speeds[:, 0]):6.0f} {np.median(speeds[:, 1]):6.0f} "
                    f"{np.median(ratios):6.3f} [{ratios.min():.3f}, {ratios.max():.3f}]",
                    flush=True,
                )
                if drafted is not None:
                    self.by_factor(drafted, k, (self.sharpness, *factors))

    def chosen(self, tensors: Mapping[str, torch.Tensor], steps: int) -> float:
        """Return the sharpness whose drafts the prompts of --choose accept most of."""
        with beside(SHARPNESS) as drafted:
            samples, _ = self.drawn(tensors, steps, prompts=self.choosing)
        total = right(drafted, samples, steps, len(SHARPNESS) + 1).sum(0)
        rates = total[:-1, :, 1] / np.maximum(total[:-1, :, 0], 1)
        return SHARPNESS[int(rates.cumprod(1).sum(1).argmax())]

    def by_factor(self, drafted: Drafted, steps: int, factors: Sequence[float]) -> None:
        """Print how often drafts with each factor are the text's token, by depth."""
        counts = right(drafted, self.samples, steps, len(factors) + 1)
        draws = np.random.default_rng(1).multinomial(len(counts), np.full(len(counts), 1 / len(counts)), size=2000)
        draws = np.concatenate([np.ones((1, len(counts)), np.int64), draws])
        total = np.einsum("rp,pfdc->rfdc", draws, counts)  # [resamples, factors, depths, (drafted, right)]
        rates = total[..., 1] / np.maximum(total[..., 0], 1)
        lengths = 1 + rates.cumprod(2).sum(2)
        for number, factor in enumerate((*factors, float("inf"))):
            gain = lengths[:, number] - lengths[:, -1]
            low, high = np.percentile(gain[1:], [2.5, 97.5])
            shown = " ".join(f"{rate:.3f}" for rate in rates[0, number])
            tokens = f"{lengths[0, number]:.3f} {signed(Estimate(gain[0], low, high)):>24}"
            print(f"{f'(s = {factor:g})':>12} {steps:7}         {tokens}  by depth {shown}", flush=True)

    def by_place(self, factors: Sequence[float]) -> None:
        """Print how many drafts rounds of one draft accept with each factor, computed at all places of the texts."""
        for name in self.drafters:
            with every_place(factors) as found:
                samples, _ = self.drawn(self.tensors_of(name), 1)
            tables = [expected_rounds(sample, found) for sample in samples if len(sample.response) > 1]
            by_factor = np.stack(tables, 1)  # [factors + 1, samples, (rounds, accepted drafts)]
            for number, factor in enumerate((*factors, float("inf"))):
                more = relative(by_factor[number], by_factor[-1])
                change = f"{more.value:+.1%} [{more.low:+.1%}, {more.high:+.1%}]"
                print(f"{name:>12} {factor:4g}  1 {estimate(by_factor[number]).value:7.3f} {change:>24}", flush=True)

    def rounds(
        self, tensors: Mapping[str, torch.Tensor], steps: int, drafts: Drafts, aside: Drafted | None = None
    ) -> tuple[np.ndarray, float]:
        """Return the rounds `[prompts, 2]` of `rounds_of`, and tokens per CPU second without those of `aside`."""
        samples, seconds = self.drawn(tensors, steps, drafts)
        seconds -= 0.0 if aside is None else aside.seconds
        return np.array([rounds_of(sample) for sample in samples]), sum(len(s.response) for s in samples) / seconds

    def drawn(
        self,
        tensors: Mapping[str, torch.Tensor],
        steps: int | None,
        drafts: Drafts = "coupled",
        prompts: Sequence[Prompt] = (),
    ) -> tuple[list[Sample], float]:
        """Return one sample a prompt and the CPU seconds that they took; `steps` None: plain decoding."""
        if drafts not in self.engines:
            self.engines[drafts] = EmbeddedEngine(
                self.hf_config,
                (self.policy | dict(tensors)).items(),
                max_length=self.longest,
                max_running_requests=64,
                max_total_tokens=max(16384, self.longest + 64),
                drafts=drafts,
            )
            draw(self.engines[drafts], self.prompts, self.sampling, "warm-up")  # the first use of memory takes longer
        engine = self.engines[drafts]
        engine.rounds.sharpness = self.sharpness
        if tensors:
            self.version += 1
            engine.update_weights(self.version, tensors.items(), "drafter")
        engine.set_schedule(SpecSchedule.fixed(OFF if steps is None else SpecConfig(steps)))
        begun = time.process_time()
        samples = draw(engine, prompts or self.prompts, self.sampling, "sample")
        seconds = time.process_time() - begun
        if prompts:
            return samples, seconds
        self.samples = samples
        self.texts.add(tuple(tuple(sample.response.tolist()) for sample in samples))
        return samples, seconds


def relative(rounds: np.ndarray, other: np.ndarray, resamples: int = 2000) -> Estimate:
    """Estimate by what share `rounds [prompts, 2]` accept more drafts a round than `other`, with a 95 % interval."""
    draws = np.random.default_rng(1).integers(0, len(rounds), (resamples, len(rounds)))

    def accepted(table: np.ndarray) -> np.ndarray:
        total = np.concatenate([table.sum(0)[None], table[draws].sum(1)])
        return total[:, 1] / total[:, 0]

    values = accepted(rounds) / accepted(other) - 1
    low, high = np.percentile(values[1:], [2.5, 97.5])
    return Estimate(float(values[0]), float(low), float(high))


class Drafted:
    """What was drafted beside coupled drafts, and the CPU seconds that it took.

    rows  (level, seeds [B], keys [B] of the level's position, tokens [B, factors + 1]); column 0 has the real drafts,
          the last one the likeliest tokens
    """

    def __init__(self) -> None:
        self.rows: list[tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self.seconds = 0.0


@contextmanager
def beside(factors: Sequence[float]) -> Iterator[Drafted]:
    """Let coupled drafts be argmax(s · log q + noise), s the first factor; yield them with those of the others."""
    original = draft.coupled
    found = Drafted()

    def coupled(topk: int, coupling: draft.Coupling) -> draft.Pick:
        picks = [original(topk, coupling._replace(sharpness=factor)) for factor in factors]

        def picked(logits: torch.Tensor, level: int) -> tuple[torch.Tensor, torch.Tensor]:
            result = picks[0](logits, level)
            begun = time.process_time()
            others = [pick(logits, level)[1][..., 0] for pick in picks[1:]]
            tokens = torch.cat([result[1][..., 0], *others, logits.argmax(-1)], 1)
            found.rows.append((level, coupling.seeds, coupling.keys + level - 1, tokens))
            found.seconds += time.process_time() - begun
            return result

        return picked

    draft.coupled = coupled
    try:
        yield found
    finally:
        draft.coupled = original


Place = tuple[int, int]  # seed of a sample, position whose logits predict the place's token


@contextmanager
def every_place(factors: Sequence[float]) -> Iterator[dict[Place, list[float]]]:
    """Let no draft be right, so that rounds of one draft start everywhere. Yields, by place, the probability that a
    draft with each factor is the text's token, given the text, and whether the likeliest word is it."""
    original, original_sample = draft.coupled, verify.sample
    drafted: dict[Place, torch.Tensor] = {}
    found: dict[Place, list[float]] = {}

    def coupled(topk: int, coupling: draft.Coupling) -> draft.Pick:
        real = original(topk, coupling)

        def picked(logits: torch.Tensor, level: int) -> tuple[torch.Tensor, torch.Tensor]:
            logq = verify.logprobs(logits[:, 0], coupling.temperature)
            drafted.update(zip(zip(coupling.seeds.tolist(), coupling.keys.tolist(), strict=True), logq, strict=True))
            scores, tokens = real(logits, level)
            return scores, torch.full_like(tokens, NO_WORD)

        return picked

    def sample(logp: torch.Tensor, *sampling: torch.Tensor) -> torch.Tensor:
        tokens = original_sample(logp, *sampling)
        for row, place in enumerate(zip(sampling[-2].tolist(), sampling[-1].tolist(), strict=True)):
            if place in drafted:
                found[place] = _right_at(logp[row].double(), drafted.pop(place).double(), int(tokens[row]), factors)
        return tokens

    draft.coupled, verify.sample = coupled, sample
    try:
        yield found
    finally:
        draft.coupled, verify.sample = original, original_sample


def _right_at(logp: torch.Tensor, logq: torch.Tensor, token: int, factors: Sequence[float]) -> list[float]:
    """Return P(draft = token | the target samples token) for each factor: with x the token, q raised to the factor and
    normalised, and the same noise, 1 / Σ_y max(p_y, q_y · p_x / q_x). Last: 1.0 if argmax q is the token."""
    chances = []
    for factor in factors:
        sharp = (factor * logq).log_softmax(-1)
        chances.append(1 / torch.maximum(logp, sharp + logp[token] - sharp[token]).exp().sum().item())
    return [*chances, float(logq.argmax() == token)]


def expected_rounds(sample: Sample, found: Mapping[Place, list[float]]) -> np.ndarray:
    """Return `[factors + 1, 2]`: the rounds of one draft that a text takes from its second token on, and the drafts
    that they accept."""
    length = len(sample.response)
    chances = np.array([found[sample.seed, sample.prompt_len + i] for i in range(length - 1)]).T
    starts = np.zeros((len(chances), length + 1))
    starts[:, 0] = 1
    for place in range(length - 1):
        starts[:, place + 1] += starts[:, place] * (1 - chances[:, place])
        starts[:, place + 2] += starts[:, place] * chances[:, place]
    rounds = starts[:, : length - 1].sum(1)
    return np.stack([rounds, length - 1 - rounds], 1)


def right(drafted: Drafted, samples: Sequence[Sample], steps: int, columns: int) -> np.ndarray:
    """Return `[prompts, columns, depths, 2]`: drafts at places that were reached, and those that are the text's token.

    A place is reached if the real drafts before it in its round are the text's. Left out: the round that draws a text's
    first token, and places past its end.
    """
    number = {sample.seed: i for i, sample in enumerate(samples)}
    counts = np.zeros((len(samples), columns, steps, 2), np.int64)
    reached: dict[int, bool] = {}  # by sample, in its present round
    for level, seeds, keys, tokens in drafted.rows:
        for seed, key, words in zip(seeds.tolist(), keys.tolist(), tokens.tolist(), strict=True):
            i = number[seed]
            sample = samples[i]
            if level == 1:
                reached[i] = key >= sample.prompt_len
            if key + 1 >= len(sample.tokens):
                reached[i] = False
            if reached[i]:
                hits = [word == sample.tokens[key + 1] for word in words]
                counts[i, :, level - 1, 0] += 1
                counts[i, :, level - 1, 1] += hits
                reached[i] = hits[0]
    return counts


def signed(found: Estimate) -> str:
    return f"{found.value:+.3f} [{found.low:+.3f}, {found.high:+.3f}]"


if __name__ == "__main__":
    main()
