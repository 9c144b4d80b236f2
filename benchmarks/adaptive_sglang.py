"""Compare adaptive speculation in SGLang's engine on a CPU with plain decoding, fixed steps and SGLang's own rule.

    python benchmarks/adaptive_sglang.py [--quick] [--json FILE]

One engine speculates. In each run one contestant decides how:

off     our configuration without drafting
k0      SGLang's step 0
k1 ...  a fixed number of steps
stock   SGLang's own adaptive rule, with its built-in steps per batch size
ours    our rule, by a cost table that `rlspec profile` measures on this engine first
plain   a second engine, launched without speculation

All use the same position-keyed sampler. The workload has a long tail: most responses are short, a few are long, so the
batch shrinks from many to one. Each request has a fixed length, so all contestants emit the same tokens. All texts are
compared. A good, a middling and a useless drafter are pushed in turn.

Contestants run in turn within each repetition, in an order that rotates. A ratio is plain's time over the contestant's
time in the same repetition. Printed are medians over repetitions with the 95 % interval of their bootstrap, of wall
time and of the CPU seconds of the engine's scheduler process, in which all passes run. Other work on the machine
changes CPU seconds less. With --precision, repetitions go on until the CPU ratio of ours to plain is known that well.
The first repetition of each drafter is not counted: ours and stock learn its acceptance there and keep it, as in
training.
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

from megatron_rlspec.commands import profile
from megatron_rlspec.models.hf_files import write_hf
from megatron_rlspec.rollout.sglang.client.engine import SGLangEngine
from megatron_rlspec.rollout.sglang.client.launcher import launch
from megatron_rlspec.rollout.sglang.settings import KEY
from megatron_rlspec.speculation.cost_table import CostTable
from megatron_rlspec.speculation.learning import Learning
from megatron_rlspec.speculation.roofline import Roofline
from megatron_rlspec.speculation.rule import SpecRule
from megatron_rlspec.types import OFF, RoundStats, SpecConfig, SpecSchedule

STEPS = (0, 1, 2, 3, 5, 7)  # SGLang's built-in rule uses 7
FIXED = {"off": OFF} | {f"k{k}": SpecConfig(k) for k in (0, 1, 2, 3, 5)}
CONTESTANTS = ("plain", *FIXED, "stock", "ours")
NOISE = {"good": 0.0, "middling": 0.2, "useless": 1.0}
SHARPNESS = 16.0
PROMPT = 8


def long_tail(samples: int, longest: int, seed: int = 0) -> list[int]:
    """Draw log-normal response lengths, scaled so that the longest is `longest`; none is below 4 tokens."""
    drawn = np.random.default_rng(seed).lognormal(0.0, 1.0, samples)
    return np.maximum(4, np.round(longest * drawn / drawn.max())).astype(int).tolist()


def rollout(engine: SGLangEngine, lengths: Sequence[int], seed: int) -> tuple[float, list[list[int]]]:
    """Run one rollout. Return its seconds and texts. Prompts and seeds are the same for every engine."""
    rng = np.random.default_rng(seed)
    wanted = [
        {
            "id": f"{next(_serial):08d}.",
            "input_ids": rng.integers(3, VOCAB, PROMPT).tolist(),
            "sampling": {"max_new_tokens": n, "ignore_eos": True, "sampling_seed": 1000 * seed + i},
        }
        for i, n in enumerate(lengths)
    ]
    texts = {}
    start = time.perf_counter()
    bearer = {"Authorization": f"Bearer {os.environ[KEY]}"}
    url = f"{engine.url}/rlspec/generate"
    with requests.post(url, json={"requests": wanted}, headers=bearer, stream=True, timeout=600) as answer:
        for line in answer.iter_lines(chunk_size=None):
            found = json.loads(line)
            texts[found["id"]] = found["output_ids"]
    seconds = time.perf_counter() - start
    if [len(texts[w["id"]]) for w in wanted] != list(lengths):
        raise SystemExit(f"{engine.url}: the lengths of the responses are not the requested ones")
    return seconds, [texts[w["id"]] for w in wanted]


def share_a_key() -> None:
    """Give this process, `rlspec profile` in it and the engines that it starts one key for requests."""
    os.environ.setdefault(KEY, secrets.token_urlsafe(32))


_serial = itertools.count()


def scheduler_of(server: int) -> psutil.Process:
    """Return the scheduler process of the server process with this id."""
    found = [p for p in psutil.Process(server).children(recursive=True) if "scheduler" in " ".join(p.cmdline())]
    if len(found) != 1:
        raise SystemExit(f"server {server} has {len(found)} scheduler processes, expected one")
    return found[0]


class Contestants:
    """Run contestants: set the rule or schedule of the speculating engine, or use the plain one.

    `schedulers`: the scheduler processes of both.
    """

    def __init__(
        self,
        spec: SGLangEngine,
        plain: SGLangEngine,
        schedulers: tuple[psutil.Process, psutil.Process],
        table: Path,
        layers: int,
    ) -> None:
        self.spec = spec
        self.plain = plain
        self.schedulers = schedulers
        self.learning = Learning(STEPS, str(table), Roofline.of_layers(layers))
        self.rounds: dict[str, list[RoundStats]] = {}

    def run(self, name: str, lengths: Sequence[int], seed: int) -> tuple[tuple[float, float], list[list[int]]]:
        """Run one rollout under contestant `name`. Return its seconds, wall and of the scheduler's CPU, and texts."""
        scheduler = self.schedulers[name == "plain"]
        before = scheduler.cpu_times()
        seconds, texts = self._run(name, lengths, seed)
        after = scheduler.cpu_times()
        return (seconds, after.user - before.user + after.system - before.system), texts

    def _run(self, name: str, lengths: Sequence[int], seed: int) -> tuple[float, list[list[int]]]:
        if name == "plain":
            return rollout(self.plain, lengths, seed)
        if name == "ours":
            self.spec.set_spec_rule(self.learning.rule())
        elif name == "stock":
            self.spec.set_spec_rule({"stock": True})
        else:
            self.spec.set_schedule(SpecSchedule.fixed(FIXED[name]))
        self.spec.stats()
        self.spec.spec_rule_report()
        result = rollout(self.spec, lengths, seed)
        stats = self.spec.stats()
        if name == "ours":
            self.learning.observe(stats, [self.spec.spec_rule_report()])
        self.rounds.setdefault(name, []).extend(stats)
        return result


def compete(
    contestants: Contestants,
    names: Sequence[str],
    lengths: Sequence[int],
    repetitions: int,
    salt: int,
    precision: float,
    most: int,
) -> dict[str, np.ndarray]:
    """Measure seconds `[repetitions, 2]` of each contestant, wall and CPU. Their texts must agree.

    Goes on beyond `repetitions`, up to `most`, until half the interval of ours' CPU ratio is below `precision`.
    """
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    repetition = -1
    while repetition < repetitions or (repetition < most and not _known(seconds, precision)):
        turn = max(repetition, 0) % len(names)
        order = [*names[turn:], *names[:turn]]
        if repetition == 0:
            contestants.rounds.clear()
        texts = {}
        for name in order:
            taken, texts[name] = contestants.run(name, lengths, salt + repetition + 1)
            if repetition >= 0:
                seconds[name].append(taken)
        for name in names:
            same = sum(a == b for a, b in zip(texts[name], texts["plain"], strict=True))
            if same != len(lengths):
                raise SystemExit(f"{name}: {len(lengths) - same} of {len(lengths)} texts differ from plain decoding's")
        repetition += 1
    return {name: np.array(values) for name, values in seconds.items()}


def _known(seconds: Mapping[str, Sequence[tuple[float, float]]], precision: float) -> bool:
    if not precision or "ours" not in seconds:
        return True
    _, low, high = ratio(np.array(seconds["plain"])[:, 1], np.array(seconds["ours"])[:, 1])
    return (high - low) / 2 <= precision


def ratio(slow: np.ndarray, fast: np.ndarray) -> tuple[float, float, float]:
    """Compute the median of slow / fast within repetitions, and the 95 % interval of its bootstrap."""
    paired = slow / fast
    rng = np.random.default_rng(0)
    medians = np.median(paired[rng.integers(0, len(paired), (4000, len(paired)))], axis=1)
    return float(np.median(paired)), *map(float, np.quantile(medians, [0.025, 0.975]))


def tokens_per_round(stats: Sequence[RoundStats]) -> float:
    """Compute committed tokens per request and round."""
    drawn = 0
    committed = 0
    for s in stats:
        drawn += sum(s.accepted)
        committed += sum((1 + drafts) * count for drafts, count in enumerate(s.accepted))
    return committed / drawn


def shares(stats: Sequence[RoundStats]) -> str:
    """Render the share of rounds of each configuration, without those below 0.5 %."""
    total = sum(s.rounds for s in stats)
    by: dict[SpecConfig, int] = {}
    for s in stats:
        by[s.config] = by.get(s.config, 0) + s.rounds
    return " ".join(f"{config} {n / total:.0%}" for config, n in sorted(by.items()) if n / total >= 0.005)


def overhead(table: CostTable, most: int) -> dict[int, float]:
    """Measure choosing and observing as a share of the cheapest round of the table, by batch."""
    found = {}
    for batch in (1, most):
        rule = SpecRule(table.configs(), table)
        took = []
        for t in range(2000):
            start = time.perf_counter()
            rule.choose(batch, batch * (64 + t % 512))
            rule.observe(SpecConfig(3), [t % 4] * batch)
            took.append(1000 * (time.perf_counter() - start))
        found[batch] = float(np.median(took)) / min(table.ms(c, batch, 64 * batch) for c in table.configs())
    return found


def judged(found: Mapping[str, Mapping[str, Any]], spent: Mapping[int, float]) -> dict[str, bool]:
    """Return for each aim, with its measured figure, whether it is met. Medians decide; intervals stand beside them."""
    aims = {}
    for drafter, row in found.items():
        ahead = row["ours / stock"]
        behind = row["ours / best fixed"]
        aims[f"{drafter} drafter: ours ahead of SGLang's rule ({ahead[0]:.3f} x)"] = ahead[1] > 1.0
        best = f"{drafter} drafter: 1.00 x the best fixed choice, {row['best']}"
        aims[f"{best} ({behind[0]:.3f} x, {behind[1]:.3f} to {behind[2]:.3f})"] = behind[0] >= 1.0
    for clock in ("x plain", "x plain, CPU"):
        middle, low, high = found["useless"][clock]["ours"]
        met = middle >= 0.99
        aims[f"useless drafter: 0.99 {clock} ({middle:.3f} x, {low:.3f} to {high:.3f})"] = met
    aims[f"rule <= 0.5 % of a round ({max(spent.values()):.2%})"] = max(spent.values()) <= 0.005
    return aims


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--quick", action="store_true", help="fewer repetitions and a coarser cost table")
    p.add_argument("--json", type=Path, help="write all figures to this file")
    p.add_argument("--layers", type=int, default=16, help="layers of the target; many, so that a drafter is cheap")
    p.add_argument("--hidden", type=int, default=32, help="width of the model")
    p.add_argument("--samples", type=int, default=64, help="requests of a rollout")
    p.add_argument(
        "--longest", type=int, default=0, help="tokens of the longest response; default: 192, or 96 with --quick"
    )
    p.add_argument("--repetitions", type=int, default=0, help="default: 9, or 3 with --quick")
    p.add_argument("--precision", type=float, default=0.0, help="go on until ours / plain is known to this share")
    p.add_argument("--most", type=int, default=40, help="most repetitions with --precision")
    p.add_argument("--drafters", default=",".join(NOISE), help=f"among {','.join(NOISE)}")
    p.add_argument("--contestants", default=",".join(CONTESTANTS), help="plain, and others of the default list")
    p.add_argument("--cost-table", type=Path, help="a table of this engine, instead of profiling")
    args = p.parse_args(argv)
    repetitions = args.repetitions or (3 if args.quick else 9)
    names = args.contestants.split(",")
    if "plain" not in names or set(names) - set(CONTESTANTS):
        p.error(f"--contestants {args.contestants}: plain and others among {','.join(CONTESTANTS)}")
    args.longest = args.longest or (96 if args.quick else 192)
    os.environ["OMP_NUM_THREADS"] = "1"
    share_a_key()
    lengths = long_tail(args.samples, args.longest)
    conditions = {
        "machine": f"{platform.machine()}, {len(os.sched_getaffinity(0))} of {os.cpu_count()} cores",
        "load": round(os.getloadavg()[0], 2),
        "torch": torch.__version__,
        "model": f"{args.layers} layers of {args.hidden}, vocabulary {VOCAB}, float32",
        "workload": f"{args.samples} requests, {min(lengths)} to {max(lengths)} tokens, median {np.median(lengths)}",
        "repetitions": repetitions,
    }
    print("conditions:", "; ".join(f"{k} {v}" for k, v in conditions.items()), flush=True)
    config, tensors = checkpoint(SHARPNESS, args.layers, args.hidden)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_hf(folder / "model", config, tensors)
        serve = ["--device", "cpu", "--dtype", "float32", "--max-running-requests", str(max(64, args.samples))]
        serve += ["--max-total-tokens", "32768", "--disable-radix-cache"]
        steps = ",".join(map(str, STEPS))
        adaptive = ["--spec", "adaptive", "--candidate-steps", steps, "--num-steps", "3"]
        with (
            launch(folder / "model", folder / "spec.log", arguments=[*serve, *adaptive]) as first,
            launch(folder / "model", folder / "plain.log", arguments=[*serve, "--spec", "off"]) as second,
        ):
            spec, plain = (SGLangEngine.of(process.wait()) for process in (first, second))
            schedulers = scheduler_of(first.process.pid), scheduler_of(second.process.pid)
            table = args.cost_table or _profile(folder, spec, steps, args)
            spent = overhead(CostTable.load(table), args.samples)
            found = {}
            for version, drafter in enumerate(args.drafters.split(","), start=1):
                spec.update_weights(version, worse_drafter(tensors, NOISE[drafter]).items(), scope="drafter")
                # A new object: what was learnt of the last drafter does not hold for this one.
                contestants = Contestants(spec, plain, schedulers, table, args.layers)
                seconds = compete(contestants, names, lengths, repetitions, 1000 * version, args.precision, args.most)
                found[drafter] = _report(drafter, seconds, contestants.rounds, sum(lengths))
    aims = judged(found, spent) if "useless" in found and len(names) == len(CONTESTANTS) else {}
    print("\n" + "\n".join(f"{'ok' if met else 'MISSED':7}{aim}" for aim, met in aims.items()))
    print(f"load at the end {os.getloadavg()[0]:.2f}")
    if args.json:
        result = {"conditions": conditions, "aims": aims, "rule_share_of_a_round": spent, "drafters": found}
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if all(aims.values()) else 1


def _profile(folder: Path, spec: SGLangEngine, steps: str, args: argparse.Namespace) -> Path:
    table = folder / "table.json"
    points = "1,4,16,64" if args.quick else "1,2,4,8,16,32,64"
    wanted = ["--batches", points, "--lengths", "16", "--steps", steps, "--seconds", "100"]
    if profile.main([str(table), "--url", spec.url, "--model", str(folder / "model"), *wanted]):
        raise SystemExit("rlspec profile failed on the speculating engine; its output is above")
    return table


def _report(
    drafter: str, seconds: dict[str, np.ndarray], rounds: Mapping[str, Sequence[RoundStats]], tokens: int
) -> dict[str, Any]:
    wall, cpu = ({name: values[:, i] for name, values in seconds.items()} for i in (0, 1))
    fixed = [name for name in ("plain", *FIXED) if name in seconds]
    best = min(fixed, key=lambda name: float(np.median(wall[name] / wall["plain"])))
    row = {
        "seconds": {name: values.tolist() for name, values in seconds.items()},
        "x plain": {name: ratio(wall["plain"], values) for name, values in wall.items()},
        "x plain, CPU": {name: ratio(cpu["plain"], values) for name, values in cpu.items()},
        "best": best,
        "ours / best fixed": ratio(wall[best], wall["ours"]) if "ours" in seconds else None,
        "ours / best fixed, CPU": ratio(cpu[best], cpu["ours"]) if "ours" in seconds else None,
        "ours / stock": ratio(wall["stock"], wall["ours"]) if {"ours", "stock"} <= set(seconds) else None,
        "tokens per round": {name: tokens_per_round(stats) for name, stats in rounds.items()},
        "rounds": {name: shares(stats) for name, stats in rounds.items()},
    }
    print(f"\n{drafter} drafter, {len(wall['plain'])} repetitions; all texts equal")
    print("contestant  tokens/s  per round  x plain (95 %)        x plain in CPU (95 %)  rounds")
    for name in seconds:
        shown = "  ".join("{:5.3f} [{:.3f}, {:.3f}]".format(*row[clock][name]) for clock in ("x plain", "x plain, CPU"))
        per_round = f"{row['tokens per round'][name]:.2f}" if name in rounds else "1.00"
        decided = row["rounds"][name] if name in ("stock", "ours") else ""
        print(f"{name:10}{tokens / float(np.median(wall[name])):10.0f}{per_round:>11}  {shown}  {decided}", flush=True)
    return row


if __name__ == "__main__":
    sys.exit(main())
