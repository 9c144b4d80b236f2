"""Compare drafters on one policy: accept lengths, and paired bootstrap intervals of their differences.

All drafters answer the same prompts with the same seeds. Under position-keyed sampling the texts are equal, too, so a
difference between two drafters comes from the drafters alone. The table calls a difference "above 0" or "below 0" if
its 95 % interval lies on one side of 0, otherwise "not shown". The intervals hold for this policy and for prompts like
these.

`rlspec compare POLICY NAME=DIR NAME=DIR ... --prompts FILE` prints the table. It makes an engine for each drafter, and
`draw_each` measures it. Programs that have an engine push the drafters to it by `measure` (`examples/`).
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from megatron_rlspec import arguments, files
from megatron_rlspec.config import Config, ConfigError, load
from megatron_rlspec.conversion.drafter_files import read_with_drafter, weights_of, words
from megatron_rlspec.engine import RolloutEngine
from megatron_rlspec.models import hub
from megatron_rlspec.models.config import DRAFTER
from megatron_rlspec.models.directory import ends_of_text
from megatron_rlspec.models.hf_files import read_hf
from megatron_rlspec.push.update import update_weights
from megatron_rlspec.rollout.embedded.engine import EmbeddedEngine
from megatron_rlspec.rollout.embedded.model import is_drafter
from megatron_rlspec.tasks import data
from megatron_rlspec.types import Prompt, Request, Sample, Sampling, SpecConfig

RESAMPLES = 2000  # of the prompts, for an interval
MOST_REQUESTS = 256  # that the embedded engine decodes at once
TOTAL_TOKENS = 131_072  # in the embedded engine's KV cache
# tokens in that cache beyond one whole sample: a round also writes drafts that are refused. `EmbeddedEngine` demands
# `config.spec.MOST_DRAFTS` of them
MARGIN = 64
MOST_NEW_TOKENS = 1024  # by default
STEPS = (1, 3, 5)  # default numbers of drafts a round


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
        """Say on which side of 0 the interval lies: "above 0", "below 0", or "not shown" if 0 is in it."""
        if self.low > 0:
            return "above 0"
        return "below 0" if self.high < 0 else "not shown"


# drafts a round -> drafter's name -> `[prompts, 2]` int: verify rounds and accepted drafts of every prompt
Rounds = Mapping[int, Mapping[str, np.ndarray]]


def table_of(rounds: Rounds, prompts: int, equal_texts: int) -> dict[str, Any]:
    """Return every accept length and every paired difference, as `--out` writes them and `show` prints them.

    prompts      number of prompts
    equal_texts  number of prompts whose text is the same in all generations
    """
    lengths = []
    differences = []
    for steps, of_drafters in rounds.items():
        for name, counts in of_drafters.items():
            lengths.append({"steps": steps, "drafter": name, **vars(estimate(counts))})
        for name, other in itertools.combinations(of_drafters, 2):
            difference = estimate(of_drafters[name], of_drafters[other])
            row = {"steps": steps, "drafter": name, "minus": other, **vars(difference)}
            differences.append(row | {"shown": difference.shown})
    return {
        "prompts": prompts,
        "equal_texts": equal_texts,
        "accept_lengths": lengths,
        "differences": differences,
    }


def estimate(rounds: np.ndarray, other: np.ndarray | None = None) -> Estimate:
    """Estimate an accept length from `rounds [prompts, 2]`, or its difference to that of `other` on the same prompts.

    Row i of both must be the same prompt, and there is at least one. Both are resampled by the same prompts. A prompt
    that is hard for every drafter then does not widen the interval of the difference.
    """
    n = len(rounds)
    rng = np.random.default_rng(1)  # the same resamples for every estimate, and in every call
    # [1 + RESAMPLES, prompts]: how often each prompt counts. The first row counts each once: the value itself.
    resamples = rng.multinomial(n, np.full(n, 1 / n), size=RESAMPLES)
    counts = np.concatenate([np.ones((1, n), np.int64), resamples])
    values = _accept_lengths(counts, rounds)
    if other is not None:
        values = values - _accept_lengths(counts, other)
    low, high = np.percentile(values[1:], [2.5, 97.5])
    return Estimate(float(values[0]), float(low), float(high))


def _accept_lengths(counts: np.ndarray, rounds: np.ndarray) -> np.ndarray:
    """Return the accept length `[resamples]` of prompts that count `counts [resamples, prompts]` times."""
    verified, accepted = (counts @ rounds.astype(np.float64)).T
    # A resample may have no verify round at all, and then no accepted draft: 1 in place of 0 / 0.
    return 1 + accepted / np.where(verified > 0, verified, 1)


# drafter's name -> drafts a round -> one sample per prompt, in the order of the prompts
Drawn = Mapping[str, Mapping[int, Sequence[Sample]]]


def measure(
    engine: RolloutEngine,
    drafters: Mapping[str, Mapping[str, Tensor]],
    prompts: Sequence[Prompt],
    sampling: Sampling,
    steps: Sequence[int],
    version: int = 2,
) -> tuple[Rounds, int]:
    """Generate one sample per prompt with every drafter, pushed one after the other, at each number of drafts a round.

    engine    holds the policy. Its drafter is replaced, and the last one measured stays
    drafters  name -> tensors under Hugging Face names, of which only the drafter's own are pushed
    steps     numbers of drafts a round
    version   version number of the first push; the others count on from it

    Returns `rounds` and `equal_texts` for `table_of`. Raises EngineError.
    """
    drawn = {}
    for number, (name, tensors) in enumerate(drafters.items(), start=version):
        drafter = {key: tensors[key] for key in tensors if is_drafter(key)}
        update_weights(engine, number, weights_of(drafter), "drafter")
        drawn[name] = draw_each(engine, prompts, sampling, steps, name)
    return counted(drawn)


def draw_each(
    engine: RolloutEngine,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    steps: Sequence[int],
    name: str,
) -> dict[int, list[Sample]]:
    """Generate one sample per prompt with the engine's drafter `name`, at each number of drafts a round."""
    files.tell(f"measuring the drafter {name}", sys.stderr)
    drawn = {}
    for k in steps:
        engine.set_config(SpecConfig(k))
        drawn[k] = draw(engine, prompts, sampling, f"k{k:02d}")
    return drawn


def counted(drawn: Drawn) -> tuple[Rounds, int]:
    """Return `rounds` and `equal_texts` for `table_of`, from what `draw_each` returned for each drafter."""
    rounds: dict[int, dict[str, np.ndarray]] = {}
    # number of the prompt -> the different responses to it, as token ids
    texts: dict[int, set[tuple[int, ...]]] = {}
    for name, by_steps in drawn.items():
        for k, samples in by_steps.items():
            rounds.setdefault(k, {})[name] = np.array([rounds_of(sample) for sample in samples])
            for i, sample in enumerate(samples):
                texts.setdefault(i, set()).add(tuple(sample.response))
    return rounds, sum(len(different) == 1 for different in texts.values())


def draw(
    engine: RolloutEngine, prompts: Sequence[Prompt], sampling: Sampling, name: str, seed: int = 0
) -> list[Sample]:
    """Generate one sample per prompt. The ids of requests begin with `name`.

    The noise follows from `seed` and the number of the prompt alone. So all drafters get the same noise, and under
    position-keyed sampling the same texts.
    """
    requests = []
    for i, prompt in enumerate(prompts):
        # the factor keeps the seeds of a million prompts apart; below 2**31 as those of `noise.seed_of`
        prompt_seed = (seed * 1_000_003 + i) & 0x7FFF_FFFF
        # numbers of fixed width: no id may be the beginning of another (`types.Request`)
        requests.append(Request(f"{name}-s{seed:06d}-p{i:06d}", prompt, prompt_seed))
    return engine.generate(requests, sampling)


def rounds_of(sample: Sample) -> tuple[int, int]:
    """Return the number of verify rounds of a sample, and of the drafts that they delivered: (0, 0) without rounds."""
    # `Sample.accepted[i]` rounds delivered i drafts each
    accepted = sum(drafts * count for drafts, count in enumerate(sample.accepted))
    return sum(sample.accepted), accepted


def parser() -> arguments.Parser:
    p = arguments.Parser(
        prog="rlspec compare",
        description=__doc__.splitlines()[0],
        example="rlspec compare POLICY new=runs/mine/hf old=warm/hf --prompts held-out.jsonl",
    )
    add = p.add_argument
    add("policy", type=Path, help="Hugging Face directory of the policy")
    add(
        "drafters",
        nargs="+",
        metavar="NAME=DIR",
        help="Hugging Face directory with MTP layers, or of an EAGLE-3 drafter",
    )
    add("--prompts", type=Path, required=True, help="held-out prompts, as data.eval_path")
    add(
        "--config",
        type=Path,
        metavar="FILE",
        help="TOML file of a run: its [data] makes prompts of rows",
    )
    # from 2: with one prompt every resample is the same
    add("--count", type=arguments.integer(2, 10**6), default=512, help="prompts; default: 512")
    add(
        "--steps",
        type=arguments.distinct_integers(1, 63),
        default=list(STEPS),
        help="numbers of drafts a round; default: 1,3,5",
    )
    add("--temperature", type=arguments.number(0, 100), default=1.0)
    add(
        "--max-new-tokens",
        type=arguments.integer(1, 2**24),
        help=f"default: {MOST_NEW_TOKENS}, or half of the model's context if that is less",
    )
    add("--out", type=Path, metavar="FILE", help="also write the table as JSON")
    return p


def main(argv: list[str] | None = None) -> int:
    """Run `rlspec compare`. Raises ConfigError, CheckpointError, DataError or FileError for what cannot be compared."""
    command = parser()
    options = command.parse_args(argv)
    directories: dict[str, str] = {}
    for text in options.drafters:
        name, _, directory = text.partition("=")
        if not name or not directory or name in directories:
            command.error(f"{text}: expected NAME=DIR, each name once")
        directories[name] = hub.local(directory)
    options.policy = hub.local(str(options.policy))
    inputs = {"the policy": options.policy, "--prompts": options.prompts}
    inputs["--config"] = options.config
    for name, directory in directories.items():
        inputs[f"the drafter {name}"] = directory
    if options.out:
        files.check_output(options.out, inputs)

    drafters = {}
    for name, directory in directories.items():
        drafters[name] = read_with_drafter(options.policy, directory)
    longest = read_hf(options.policy)[0]["max_position_embeddings"]  # in config.json
    new_tokens = options.max_new_tokens or min(MOST_NEW_TOKENS, longest // 2)
    if new_tokens >= longest:
        command.error(
            f"--max-new-tokens {new_tokens}: {options.policy} has room for {longest} tokens, prompt included"
        )
    config = load(options.config) if options.config else Config()
    tokenizer = data.load_tokenizer(options.policy, config.model.trust_remote_code)
    room = longest - new_tokens
    prompts, _ = data.read_prompts(options.prompts, config.data, tokenizer, room)
    prompts = prompts[: options.count]
    sampling = Sampling(options.temperature, max_new_tokens=new_tokens)
    ends = ends_of_text(options.policy, tokenizer)
    drawn = {}
    for name, (hf_config, tensors) in drafters.items():
        with closing(_engine(hf_config, tensors, ends)) as engine:
            drawn[name] = draw_each(engine, prompts, sampling, options.steps, name)
    rounds, equal_texts = counted(drawn)
    # The first token of a response comes without a verify round (`acceptance.delivered`).
    if not np.any([[*of_drafters.values()] for of_drafters in rounds.values()]):
        raise ConfigError(
            f"every answer to {options.prompts} ended with its first token, which no drafter can shorten; expected "
            f"longer answers (--max-new-tokens is {new_tokens})"
        )
    result = table_of(rounds, len(prompts), equal_texts)
    show(result)
    if options.out is not None:
        files.write_output(options.out, json.dumps(result, indent=1) + "\n")
    return 0


def _engine(
    hf_config: dict[str, Any], tensors: Mapping[str, Tensor], ends: Sequence[int]
) -> EmbeddedEngine:
    """Return an embedded engine with policy and drafter.

    On a CPU it computes in float32, on a GPU in the type of the files.

    ends  token ids that end a response
    """
    on_gpu = torch.cuda.is_available()
    as_saved = tensors[next(iter(tensors))].dtype
    longest = hf_config["max_position_embeddings"]
    return EmbeddedEngine(
        hf_config,
        weights_of(tensors),
        device="cuda" if on_gpu else "cpu",
        dtype=as_saved if on_gpu else torch.float32,
        draft_words=words(tensors, hf_config) if DRAFTER in hf_config else None,
        max_length=longest,
        max_running_requests=MOST_REQUESTS,
        max_total_tokens=max(TOTAL_TOKENS, longest + MARGIN),
        ends=ends,
    )


def show(result: Mapping[str, Any]) -> None:
    """Print a result of `table_of`."""
    table = Table(
        "drafts",
        "drafter",
        "accept length",
        "shown",
        title=f"Tokens per round, {result['prompts']} prompts, 95 % intervals over prompts",
    )
    for row in result["accept_lengths"]:
        table.add_row(str(row["steps"]), row["drafter"], _interval(row), "")
    for row in result["differences"]:
        names = f"{row['drafter']} - {row['minus']}"
        table.add_row(str(row["steps"]), names, _interval(row), row["shown"])
    console = Console()
    console.print(table)
    console.print(f"texts equal under all drafters: {result['equal_texts']} of {result['prompts']}")


def _interval(row: Mapping[str, Any]) -> str:
    return str(Estimate(row["value"], row["low"], row["high"]))
