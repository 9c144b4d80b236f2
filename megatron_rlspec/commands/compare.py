"""Compare drafters on one policy: accept lengths, and paired bootstrap intervals of their differences.

All drafters answer the same prompts with the same seeds. Under position-keyed sampling the texts are equal, too, so a
difference between two drafters comes from the drafters alone. A difference is shown only if its 95 % interval lies on
one side of 0. The intervals hold for this policy and for prompts drawn like these.

`rlspec compare POLICY NAME=DIR NAME=DIR ... --prompts FILE` prints the table.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_rlspec import arguments, files
from megatron_rlspec.config import Config, ConfigError, load
from megatron_rlspec.conversion.drafter_files import read_drafters, weights_of, words
from megatron_rlspec.engine import RolloutEngine
from megatron_rlspec.models.config import DRAFTER
from megatron_rlspec.models.hf_files import read_hf
from megatron_rlspec.records.recorder import read_records
from megatron_rlspec.rollout.embedded.engine import EmbeddedEngine
from megatron_rlspec.rollout.embedded.model import is_drafter
from megatron_rlspec.rollout.sglang.client.engine import SGLangEngine
from megatron_rlspec.tasks import data
from megatron_rlspec.types import Prompt, Request, Sample, Sampling, SpecConfig, SpecSchedule

RESAMPLES = 2000
TOTAL_TOKENS = 131_072  # in the embedded engine's cache
STEPS = (1, 3, 5)
BESIDE = ("drift/kl", "drift/changed", "policy/entropy", "rollout/reward")


@dataclass(frozen=True)
class Estimate:
    """A value and its 95 % bootstrap interval over prompts."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"

    @property
    def shown(self) -> str:
        """Say what a difference shows."""
        if self.low > 0:
            return "above 0"
        return "below 0" if self.high < 0 else "not shown"


@dataclass(frozen=True)
class Comparison:
    """Accept lengths of several drafters on one policy.

    rounds       (drafter, drafts a round) -> `[prompts, 2]`: verify rounds and accepted drafts of every prompt
    samples      the drawn samples, of the first drafter at the first number of drafts
    equal_texts  prompts whose text is the same in all draws
    """

    rounds: Mapping[tuple[str, int], np.ndarray]
    samples: Sequence[Sample]
    equal_texts: int

    def length(self, drafter: str, steps: int) -> Estimate:
        """Estimate a drafter's tokens per round at `steps` drafts a round: 1 + accepted drafts / rounds."""
        return estimate(self.rounds[drafter, steps])

    def difference(self, drafter: str, other: str, steps: int) -> Estimate:
        """Estimate by how much a drafter's accept length exceeds another's on the same prompts."""
        return estimate(self.rounds[drafter, steps], self.rounds[other, steps])

    def to_json(self) -> dict[str, Any]:
        """Return every accept length and every paired difference."""
        names = list(dict.fromkeys(name for name, _ in self.rounds))
        steps = list(dict.fromkeys(k for _, k in self.rounds))
        lengths = [
            {"steps": k, "drafter": n, **vars(self.length(n, k))} for k in steps for n in names
        ]
        differences = []
        for k, (name, other) in itertools.product(steps, itertools.combinations(names, 2)):
            found = self.difference(name, other, k)
            differences.append(
                {"steps": k, "drafter": name, "minus": other, **vars(found), "shown": found.shown}
            )
        return {
            "prompts": len(self.samples),
            "equal_texts": self.equal_texts,
            "accept_lengths": lengths,
            "differences": differences,
        }


def estimate(rounds: np.ndarray, other: np.ndarray | None = None, seed: int = 1) -> Estimate:
    """Estimate an accept length from `rounds [prompts, 2]`, or its difference to that of `other` on the same prompts.

    Both are resampled together. So what is hard about a prompt for every drafter does not widen the interval of a
    difference.
    """
    n = len(rounds)
    # of each prompt
    draws = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), size=RESAMPLES)
    draws = np.concatenate([np.ones((1, n), np.int64), draws])

    def lengths(table: np.ndarray) -> np.ndarray:
        total = draws @ table.astype(np.float64)
        # without a round no draft
        return 1 + total[:, 1] / np.where(total[:, 0] > 0, total[:, 0], 1)

    values = lengths(rounds) - (0 if other is None else lengths(other))
    low, high = np.percentile(values[1:], [2.5, 97.5])
    return Estimate(float(values[0]), float(low), float(high))


def measure(
    engine: RolloutEngine,
    drafters: Mapping[str, Mapping[str, Tensor]],
    prompts: Sequence[Prompt],
    sampling: Sampling,
    steps: Sequence[int] = STEPS,
    seed: int = 0,
    version: int = 1,
) -> Comparison:
    """Draw one sample per prompt with every drafter, at each number of drafts a round.

    engine    holds the policy. Its drafter is replaced, and the last one measured stays
    drafters  name -> tensors under Hugging Face names, of which the drafter's are used
    version   of the first drafter's push; the others follow

    Raises EngineError.
    """
    rounds = {}
    texts = []
    first: list[Sample] = []
    for number, (name, tensors) in enumerate(drafters.items(), start=version):
        own = {key: tensors[key] for key in tensors if is_drafter(key)}
        engine.update_weights(number, weights_of(own), "drafter")
        for k in steps:
            engine.set_schedule(SpecSchedule.fixed(SpecConfig(k)))
            samples = draw(engine, prompts, sampling, f"d{number:04d}-k{k:02d}", seed)
            rounds[name, k] = np.array([rounds_of(sample) for sample in samples])
            texts.append([tuple(sample.response) for sample in samples])
            first = first or samples
    return Comparison(
        rounds, first, sum(len(set(drawn)) == 1 for drawn in zip(*texts, strict=True))
    )


def draw(
    engine: RolloutEngine, prompts: Sequence[Prompt], sampling: Sampling, name: str, seed: int = 0
) -> list[Sample]:
    """Draw one sample per prompt. The ids of requests begin with `name`; equal seeds draw equal texts."""
    seeds = [(seed * 1_000_003 + i) & 0x7FFF_FFFF for i in range(len(prompts))]
    requests = [Request(f"{name}-s{seed:06d}-p{i:06d}", p, seeds[i]) for i, p in enumerate(prompts)]
    return engine.generate(requests, sampling)


def rounds_of(sample: Sample) -> tuple[int, int]:
    """Return the verify rounds and the accepted drafts of a sample."""
    return sum(sample.accepted), sum(drafts * count for drafts, count in enumerate(sample.accepted))


def policy_of(run_dir: Path) -> dict[str, float]:
    """Return how far a run's policy has moved, and what it earned: the newest recorded values of `BESIDE`."""
    found: dict[str, float] = {}
    for record in read_records(run_dir / "metrics.jsonl"):
        found |= {name: record[name] for name in BESIDE if name in record}
    for event in read_records(run_dir / "events.jsonl"):
        if event.get("kind") == "evaluation" and "reward" in event:
            names = filter(None, [event.get("set"), event.get("name")])
            found["_".join(["held_out_reward", *names])] = event["reward"]
    return found


def parser() -> arguments.Parser:
    p = arguments.Parser(
        prog="rlspec compare",
        description=__doc__.splitlines()[0],
        example="rlspec compare POLICY new=runs/mine/hf old=warm/hf --prompts held-out.jsonl",
        first=("--config", "--count", "--steps", "--url", "--out"),
    )
    p.add_argument("policy", type=Path, help="Hugging Face directory of the policy")
    p.add_argument(
        "drafters",
        nargs="+",
        metavar="NAME=DIR",
        help="Hugging Face directory with a drafter, or a checkpoint of slime's",
    )
    p.add_argument(
        "--prompts", type=Path, required=True, help="held-out prompts, as data.eval_path"
    )
    p.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="TOML file of a run: its [data] makes prompts of rows",
    )
    p.add_argument(
        "--count", type=arguments.integer(2, 10**6), default=512, help="prompts; default: 512"
    )
    p.add_argument(
        "--steps",
        type=arguments.distinct_integers(1, 63),
        default=list(STEPS),
        help="numbers of drafts a round; default: 1,3,5",
    )
    p.add_argument("--temperature", type=arguments.number(0, 100), default=1.0)
    most = "default: 1024, or half of the model's context if that is less"
    p.add_argument("--max-new-tokens", type=arguments.integer(1, 2**24), help=most)
    p.add_argument("--max-running-requests", type=arguments.integer(1, 2**20), default=256)
    p.add_argument(
        "--max-total-tokens", type=arguments.integer(1, 2**31 - 1), help=f"default: {TOTAL_TOKENS}"
    )
    p.add_argument(
        "--url",
        help="a running `rlspec serve`, which gets the policy; default: the embedded engine",
    )
    p.add_argument(
        "--run", type=Path, help="run directory whose KL, entropy and reward stand beside the table"
    )
    p.add_argument("--out", type=Path, metavar="FILE", help="also write the table as JSON")
    p.excludes("--url", "--max-running-requests --max-total-tokens")
    return p


def main(argv: list[str] | None = None) -> int:
    """Run `rlspec compare`."""
    own = parser()
    options = own.parse_args(argv)
    places = {}
    for text in options.drafters:
        name, _, place = text.partition("=")
        if not name or not place or name in places:
            own.error(f"{text}: expected NAME=DIR, each name once")
        places[name] = place
    reads = {"the policy": options.policy, "--prompts": options.prompts, "--config": options.config}
    reads |= {"--run": options.run}
    reads |= {f"the drafter {name}": place for name, place in places.items()}
    files.check_outputs({"--out": options.out}, reads)
    if options.run and not (options.run / "metrics.jsonl").is_file():
        own.error(
            f"--run {options.run}: no metrics.jsonl; expected a run directory of `rlspec train`"
        )
    beside = {"policy": policy_of(options.run)} if options.run else {}
    hf_config, drafters = read_drafters(options.policy, places)
    policy = next(iter(drafters.values())) if DRAFTER in hf_config else read_hf(options.policy)[1]
    longest = hf_config["max_position_embeddings"]
    config = Config.model_validate(
        {"model": {"max_length": longest}, "rollout": {"max_new_tokens": 1}}
    )
    tokenizer = data.load_tokenizer(options.policy)
    most_tokens = options.max_new_tokens or min(1024, longest // 2)
    if most_tokens >= longest:
        own.error(
            f"--max-new-tokens {most_tokens}: {options.policy} has room for {longest} tokens, prompt included"
        )
    if options.max_total_tokens and options.max_total_tokens < longest + 64:
        own.error(
            f"--max-total-tokens {options.max_total_tokens}: expected at least {longest + 64}, one whole sample"
        )
    rows = load(options.config).data if options.config else config.data
    prompts, _ = data.read_prompts(options.prompts, rows, tokenizer, longest - most_tokens)
    engine: RolloutEngine
    if options.url:
        engine = SGLangEngine(options.url)
        engine.update_weights(1, weights_of(policy))
    else:
        gpu = torch.cuda.is_available()
        engine = EmbeddedEngine(
            hf_config,
            weights_of(policy),
            device="cuda" if gpu else "cpu",
            dtype=policy[next(iter(policy))].dtype if gpu else torch.float32,
            draft_words=words(policy, hf_config) if DRAFTER in hf_config else None,
            max_length=longest,
            max_running_requests=options.max_running_requests,
            max_total_tokens=options.max_total_tokens or max(TOTAL_TOKENS, longest + 64),
        )
    sampling = Sampling(options.temperature, max_new_tokens=most_tokens)
    with closing(engine):
        found = measure(
            engine, drafters, prompts[: options.count], sampling, options.steps, version=2
        )
    if not all(rounds[:, 0].any() for rounds in found.rounds.values()):
        raise ConfigError(
            f"every answer to {options.prompts} ended with its first token, which no drafter can shorten; expected "
            f"longer answers (--max-new-tokens is {most_tokens})"
        )
    result = found.to_json() | beside
    show(result)
    if options.out is not None:
        files.write_output(options.out, (json.dumps(result, indent=1) + "\n").encode())
    return 0


def show(result: Mapping[str, Any]) -> None:
    """Print accept lengths, paired differences with what they show, and the policy's figures."""
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=f"Tokens per round, {result['prompts']} prompts, 95 % intervals over prompts"
    )
    for column in ("drafts", "drafter", "accept length", "shown"):
        table.add_column(column)
    for row in result["accept_lengths"]:
        table.add_row(str(row["steps"]), row["drafter"], str(_estimate_of(row)), "")
    for row in result["differences"]:
        text = f"{row['drafter']} - {row['minus']}"
        table.add_row(str(row["steps"]), text, str(_estimate_of(row)), row["shown"])
    console = Console()
    console.print(table)
    console.print(f"texts equal under all drafters: {result['equal_texts']} of {result['prompts']}")
    for name, value in result.get("policy", {}).items():
        console.print(f"{name}: {value:.3f}")


def _estimate_of(row: Mapping[str, Any]) -> Estimate:
    return Estimate(row["value"], row["low"], row["high"])
