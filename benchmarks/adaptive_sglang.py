"""Compare adaptive speculation in SGLang's engine on a CPU with plain decoding, fixed steps and SGLang's own rule.

    python benchmarks/adaptive_sglang.py [--quick] [--drafters good,middling,useless] [--json FILE]

One engine speculates; in each rollout one contestant decides how:

off, k1 ...   a fixed number of drafts
SGLang        SGLang's own adaptive rule, with its built-in steps per batch size
ours          our rule
plain         a second engine, launched without speculation

All use the same position-keyed sampler and all texts are compared. The workload has a long tail: most responses are
short, a few are long, so the batch shrinks from many to one. A good, a middling and a useless drafter are pushed in
turn.

Contestants run in turn within each repetition, in an order that rotates. A ratio is plain's time over the contestant's
in the same repetition, of wall time and of the CPU seconds of the engine's scheduler process, in which all passes run.
Other work on the machine changes CPU seconds less. Printed are medians over repetitions with the 95 % interval of their
bootstrap. The first repetition of each drafter does not count: ours and SGLang's learn its acceptance there and keep
it, as in training.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import secrets
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import requests
import torch
from bigram_model import VOCAB, checkpoint, worse_drafter

from megatron_rlspec.models.hf_files import write_hf
from megatron_rlspec.rollout.sglang.client.engine import SGLangEngine
from megatron_rlspec.rollout.sglang.client.launcher import launch
from megatron_rlspec.rollout.sglang.settings import KEY
from megatron_rlspec.speculation.learning import Learning
from megatron_rlspec.speculation.roofline import Roofline
from megatron_rlspec.types import OFF, RoundStats, SpecConfig

STEPS = (0, 1, 2, 3, 5, 7)  # SGLang's built-in rule uses 7
FIXED = {"off": OFF, "k1": SpecConfig(1), "k2": SpecConfig(2), "k3": SpecConfig(3), "k5": SpecConfig(5)}
NOISE = {"good": 0.0, "middling": 0.2, "useless": 1.0}
SHARPNESS = 16.0
PROMPT = 8


def long_tail(samples: int, longest: int, seed: int = 0) -> list[int]:
    """Sample log-normal response lengths, scaled so that the longest is `longest`; none is below 4 tokens."""
    lengths = np.random.default_rng(seed).lognormal(0.0, 1.0, samples)
    return np.maximum(4, np.round(longest * lengths / lengths.max())).astype(int).tolist()


def share_a_key() -> None:
    """Give this process and the engines that it starts one key for requests."""
    os.environ.setdefault(KEY, secrets.token_urlsafe(32))


_serial = itertools.count()


def rollout(engine: SGLangEngine, lengths: Sequence[int], seed: int) -> tuple[float, list[list[int]]]:
    """Run one rollout. Return its seconds and texts. Prompts and seeds are the same for every engine."""
    rng = np.random.default_rng(seed)
    wanted = []
    for i, tokens in enumerate(lengths):
        sampling = {"max_new_tokens": tokens, "ignore_eos": True, "sampling_seed": 1000 * seed + i}
        prompt = rng.integers(3, VOCAB, PROMPT).tolist()
        wanted.append({"id": f"{next(_serial):08d}.", "input_ids": prompt, "sampling": sampling})
    texts = {}
    start = time.perf_counter()
    bearer = {"Authorization": f"Bearer {os.environ[KEY]}"}
    url = f"{engine.url}/rlspec/generate"
    with requests.post(url, json={"requests": wanted}, headers=bearer, stream=True, timeout=600) as answer:
        for line in answer.iter_lines(chunk_size=None):
            sample = json.loads(line)
            texts[sample["id"]] = sample["output_ids"]
    seconds = time.perf_counter() - start
    return seconds, [texts[request["id"]] for request in wanted]


def forget_cache(engine: SGLangEngine) -> None:
    """Empty an engine's KV cache, as each push does in training.

    Otherwise a rollout gets the slots in the order in which the one before freed them, and drafts scatter that order.
    Attention on a CPU then takes longer: plain rounds by about 5 %.
    """
    bearer = {"Authorization": f"Bearer {os.environ[KEY]}"}
    requests.post(f"{engine.url}/flush_cache", headers=bearer, timeout=60).raise_for_status()


def scheduler_of(server: int) -> psutil.Process:
    """Return the scheduler process of the server process with this id."""
    [scheduler] = [p for p in psutil.Process(server).children(recursive=True) if "scheduler" in " ".join(p.cmdline())]
    return scheduler


class Contestants:
    """Runs rollouts of one drafter under each contestant. `rounds`: their rounds, by contestant."""

    def __init__(
        self,
        spec: SGLangEngine,
        plain: SGLangEngine,
        schedulers: tuple[psutil.Process, psutil.Process],
        learning: Learning,
    ) -> None:
        self.spec = spec
        self.plain = plain
        self.schedulers = schedulers
        self.learning = learning
        self.rounds: dict[str, list[RoundStats]] = {}

    def run(self, name: str, lengths: Sequence[int], seed: int) -> tuple[tuple[float, float], list[list[int]]]:
        """Run one rollout. Return its seconds, wall and of the scheduler's CPU, and texts."""
        forget_cache(self.plain if name == "plain" else self.spec)
        scheduler = self.schedulers[name == "plain"]
        before = scheduler.cpu_times()
        wall, texts = self._run(name, lengths, seed)
        after = scheduler.cpu_times()
        return (wall, after.user - before.user + after.system - before.system), texts

    def _run(self, name: str, lengths: Sequence[int], seed: int) -> tuple[float, list[list[int]]]:
        if name == "plain":
            return rollout(self.plain, lengths, seed)
        if name == "ours":
            self.spec.set_spec_rule(self.learning.rule())
        elif name == "SGLang":
            self.spec.set_spec_rule({"stock": True})
        else:
            self.spec.set_config(FIXED[name])
        self.spec.stats()
        self.spec.spec_rule_report()
        result = rollout(self.spec, lengths, seed)
        stats = self.spec.stats()
        if name == "ours":
            self.learning.observe(stats, [self.spec.spec_rule_report()])
        self.rounds.setdefault(name, []).extend(stats)
        return result


def compete(
    contestants: Contestants, names: Sequence[str], lengths: Sequence[int], repetitions: int, salt: int
) -> dict[str, np.ndarray]:
    """Measure seconds [repetitions, 2] of each contestant, wall and CPU. Their texts must agree."""
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for repetition in range(-1, repetitions):
        if repetition == 0:
            contestants.rounds.clear()
        turn = max(repetition, 0) * 3 % len(names)
        texts = {}
        for name in [*names[turn:], *names[:turn]]:
            taken, texts[name] = contestants.run(name, lengths, salt + repetition + 1)
            if repetition >= 0:
                seconds[name].append(taken)
        for name in names:
            if texts[name] != texts["plain"]:
                raise SystemExit(f"{name}: texts differ from those of plain decoding")
    return {name: np.array(values) for name, values in seconds.items()}


def ratio(slow: np.ndarray, fast: np.ndarray) -> tuple[float, float, float]:
    """Compute the median of slow / fast within repetitions, and the 95 % interval of its bootstrap."""
    paired = slow / fast
    rng = np.random.default_rng(0)
    medians = np.median(paired[rng.integers(0, len(paired), (4000, len(paired)))], axis=1)
    return float(np.median(paired)), *map(float, np.quantile(medians, [0.025, 0.975]))


def tokens_per_round(stats: Sequence[RoundStats]) -> float:
    """Compute tokens per request and round."""
    requests_seen = tokens = 0
    for row in stats:
        requests_seen += sum(row.accepted)
        tokens += sum((1 + drafts) * count for drafts, count in enumerate(row.accepted))
    return tokens / requests_seen


def shares(stats: Sequence[RoundStats]) -> str:
    """Render the share of rounds of each configuration, without those below 0.5 %."""
    by: dict[SpecConfig, int] = {}
    for row in stats:
        by[row.config] = by.get(row.config, 0) + row.rounds
    total = sum(by.values())
    return " ".join(f"{config} {n / total:.0%}" for config, n in sorted(by.items()) if n / total >= 0.005)


def by_octave(stats: Sequence[RoundStats]) -> str:
    """Render the rounds of each configuration near each batch size."""
    counts: dict[int, dict[str, int]] = {}
    for row in stats:
        near = counts.setdefault(2 ** round(np.log2(row.batch)), {})
        near[str(row.config)] = near.get(str(row.config), 0) + row.rounds
    return "; ".join(
        f"{batch}: " + " ".join(f"{config} {n}" for config, n in sorted(near.items()))
        for batch, near in sorted(counts.items(), reverse=True)
    )


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--quick", action="store_true", help="3 repetitions of 96 tokens")
    p.add_argument("--json", type=Path, help="write all figures to this file")
    p.add_argument("--layers", type=int, default=16, help="layers of the target; many, so that a drafter is cheap")
    p.add_argument("--hidden", type=int, default=32, help="width of the model")
    p.add_argument("--samples", type=int, default=64, help="requests of a rollout")
    p.add_argument("--longest", type=int, default=0, help="tokens of the longest response; default: 192, or 96")
    p.add_argument("--repetitions", type=int, default=0, help="default: 5, or 3")
    p.add_argument("--drafters", default=",".join(NOISE))
    p.add_argument("--contestants", default=",".join((*FIXED, "SGLang", "ours")))
    args = p.parse_args(argv)
    repetitions = args.repetitions or (3 if args.quick else 5)
    names = ["plain", *args.contestants.split(",")]
    lengths = long_tail(args.samples, args.longest or (96 if args.quick else 192))
    os.environ["OMP_NUM_THREADS"] = "1"
    share_a_key()
    conditions = {
        "machine": f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}",
        "torch": torch.__version__,
        "model": f"{args.layers} layers of {args.hidden}, vocabulary {VOCAB}, float32",
        "workload": f"{args.samples} requests of {min(lengths)} to {max(lengths)} tokens, median {np.median(lengths)}",
        "repetitions": repetitions,
    }
    print("conditions:", "; ".join(f"{name} {value}" for name, value in conditions.items()), flush=True)
    config, tensors = checkpoint(SHARPNESS, args.layers, args.hidden)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_hf(folder / "model", config, tensors)
        serve = ["--device", "cpu", "--dtype", "float32", "--max-running-requests", str(max(64, args.samples))]
        serve += ["--max-total-tokens", "32768", "--disable-radix-cache"]
        adaptive = ["--spec", "adaptive", "--candidate-steps", ",".join(map(str, STEPS))]
        with (
            launch(folder / "model", folder / "spec.log", arguments=[*serve, *adaptive]) as first,
            launch(folder / "model", folder / "plain.log", arguments=[*serve, "--spec", "off"]) as second,
        ):
            spec, plain = SGLangEngine.of(first.wait()), SGLangEngine.of(second.wait())
            schedulers = scheduler_of(first.process.pid), scheduler_of(second.process.pid)
            learnt: dict[str, Any] | None = None
            results = {}
            for version, drafter in enumerate(args.drafters.split(","), start=1):
                spec.update_weights(version, worse_drafter(tensors, NOISE[drafter]).items(), scope="drafter")
                learning = Learning(STEPS, Roofline.of_model(config))
                learning.learnt = learnt  # of rounds' times; not the last drafter's acceptance
                contestants = Contestants(spec, plain, schedulers, learning)
                seconds = compete(contestants, names, lengths, repetitions, 1000 * version)
                learnt = learning.learnt
                results[drafter] = report(drafter, seconds, contestants.rounds)
    print(f"load at the end {os.getloadavg()[0]:.2f}")
    if args.json:
        args.json.write_text(json.dumps({"conditions": conditions, "drafters": results}, indent=1) + "\n")
    return 0


def report(
    drafter: str, seconds: Mapping[str, np.ndarray], rounds: Mapping[str, Sequence[RoundStats]]
) -> dict[str, Any]:
    """Print one drafter's figures, and return them."""
    wall = {name: values[:, 0] for name, values in seconds.items()}
    cpu = {name: values[:, 1] for name, values in seconds.items()}
    fixed = [name for name in ("plain", *FIXED) if name in seconds]
    best = max(fixed, key=lambda name: ratio(cpu["plain"], cpu[name])[0])
    print(f"\n{drafter} drafter: best fixed choice in CPU seconds {best}")
    print(f"{'contestant':14}{'x plain [95 %]':>24}{'in CPU':>24}{'x SGLang':>10}{'x best':>8}  (CPU)  rounds")
    row: dict[str, Any] = {"best": best}
    for name in seconds:
        shown = ""
        for clock in (wall, cpu):
            middle, low, high = ratio(clock["plain"], clock[name])
            interval = f"{middle:.3f} [{low:.3f}, {high:.3f}]"
            shown += f"{interval:>24}"
        over_sglang = ratio(cpu["SGLang"], cpu[name])[0] if "SGLang" in cpu else float("nan")
        over_best = ratio(cpu[best], cpu[name])[0]
        stats = rounds.get(name, ())
        tokens = f"{tokens_per_round(stats):.2f}" if stats else "1.00"
        print(f"{name:14}{shown}{over_sglang:10.3f}{over_best:8.3f}  {tokens}  {shares(stats)}", flush=True)
        row[name] = {"seconds": seconds[name].tolist(), "rounds": by_octave(stats)}
    return row


if __name__ == "__main__":
    sys.exit(main())
