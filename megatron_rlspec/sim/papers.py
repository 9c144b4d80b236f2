"""Which printed figures of four papers follow from the papers' own inputs. Writes docs/papers.md:

    python -m megatron_rlspec.sim.papers > docs/papers.md

Every number of ours is simulated or computed here from numbers that the papers print. Unstated settings may differ, so
"does not follow" says that an input is missing or another one is meant, not that a measurement is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np

from megatron_rlspec.sim.cluster import Cluster, Policies, Workload, draw
from megatron_rlspec.sim.hardware import Model, hardware_table
from megatron_rlspec.sim.samples import AcceptanceModel, LengthModel
from megatron_rlspec.speculation.acceptance import expected_tokens
from megatron_rlspec.speculation.roofline import HARDWARE, Roofline
from megatron_rlspec.tail.pace import Pace
from megatron_rlspec.types import OFF, SpecConfig

# PAT (seed text, figures 3, 4, 10, 12): LLaMA3.1-8B in bf16 on eight A40.
PAT_MS = {(2, 1): 15.37, (8, 1): 9.64, (2, 128): 24.41, (8, 128): 30.87}  # (TP, global batch) -> ms a token
PAT_TAIL = ((1 - 0.1085, 8192.0), (1 - 0.0218, 16384.0))  # quantiles of the response lengths
PAT_BATCH = 128
PAT_SWITCH_S = 5.52
PAT_PROMPT = 150
WEIGHTS = 16.06e9  # bytes
TOKEN_BYTES = 2 * 32 * 8 * 128 * 2  # keys and values of one token: 32 layers, 8 key heads of 128
HIDDEN = 4096
LAYERS = 32
SIBLING = 0.4  # rate of a tree's further child: assumed
READ = HARDWARE["A40"][0] * 1e12 * 0.8  # bytes a second


@dataclass(frozen=True)
class Finding:
    """One figure: where it is printed, what it says, what follows from which inputs, and the verdict."""

    where: str
    theirs: str
    ours: str
    inputs: str
    verdict: str


def amdahl(share: float, speedup: float) -> float:
    """Return the speedup of a step whose part `share` becomes `speedup` times as fast."""
    return 1 / (1 - share + share / speedup)


def share_for(step: float, part: float) -> float:
    """Return the share at which a part's speedup gives the step's."""
    return (1 - 1 / step) / (1 - 1 / part)


def part_for(step: float, share: float) -> float:
    """Return the speedup of a part of this share that gives the step's."""
    return 1 / (1 - (1 - 1 / step) / share)


class PatMachine:
    """PAT's eight A40, calibrated on its figure 4 alone: reading weights and caches, all-reduces, and a rest."""

    def __init__(self) -> None:
        weights = {tp: 1e3 * WEIGHTS / tp / READ for tp in (2, 8)}
        self.rest = {tp: PAT_MS[tp, 1] - weights[tp] for tp in (2, 8)}
        self.wire = {tp: 2 * LAYERS * 2 * (tp - 1) / tp * HIDDEN * 2 for tp in (2, 8)}  # bytes a token and rank
        growth = {tp: PAT_MS[tp, 128] - PAT_MS[tp, 1] for tp in (2, 8)}
        # Keys and values cost both sizes the same: 4 engines of TP 2 hold a quarter of the batch each.
        self.bus = (128 * self.wire[8] - 32 * self.wire[2]) / ((growth[8] - growth[2]) * 1e-3)

    def round_ms(self, tp: int, batch: np.ndarray, context: np.ndarray) -> np.ndarray:
        """Return ms of a round of one engine with `batch` samples of mean `context`."""
        read = 1e3 * (WEIGHTS / tp + batch * context * TOKEN_BYTES / tp) / READ
        ms: np.ndarray = read + self.rest[tp] + 1e3 * batch * self.wire[tp] / self.bus
        return ms

    def drain_s(self, lengths: np.ndarray, tp: int, done: int = 0) -> float:
        """Return the seconds until the last sample of an engine ends; all have `done` tokens already."""
        ends = np.unique(lengths[lengths > done])
        starts = np.concatenate([[done], ends[:-1]])
        batch = (lengths[None, :] >= ends[:, None]).sum(1)
        return float(((ends - starts) * self.round_ms(tp, batch, PAT_PROMPT + (starts + ends) / 2)).sum() / 1e3)

    def static_s(self, lengths: np.ndarray) -> float:
        """Return the seconds of a rollout on four engines of TP 2."""
        return max(self.drain_s(lengths[i::4], 2) for i in range(4))

    def switched_s(self, lengths: np.ndarray) -> float:
        """Return the seconds with one change to TP 8 at the best token, known in advance."""
        best = self.static_s(lengths)
        for at in np.unique(np.quantile(lengths, np.linspace(0.3, 0.999, 60)).astype(np.int64)).tolist():
            before = max(self.drain_s(np.minimum(lengths[i::4], at), 2) for i in range(4))
            if (lengths > at).any():
                best = min(best, before + PAT_SWITCH_S + self.drain_s(lengths[lengths > at], 8, at))
        return best


def pat_lengths(cap: int, seed: int) -> np.ndarray:
    """Return one batch of PAT's response lengths, through its two published quantiles."""
    return LengthModel.of_quantiles(*PAT_TAIL).draw(PAT_BATCH, 1, cap, np.random.default_rng(seed)).ravel()


@cache
def pat_generation_gains(rollouts: int = 20) -> dict[int, float]:
    """Return the mean speedup of generation by response cap, from figure 4 alone."""
    machine = PatMachine()
    gains = {}
    for cap in (6144, 8192, 12288, 16384):
        ratios = []
        for seed in range(rollouts):
            lengths = pat_lengths(cap, seed)
            ratios.append(machine.static_s(lengths) / machine.switched_s(lengths))
        gains[cap] = float(np.mean(ratios))
    return gains


def pat_step_gains(share: float) -> dict[int, float]:
    """Return the speedup of a step by response cap; generation takes `share` of it before."""
    return {cap: amdahl(share, gain) for cap, gain in pat_generation_gains().items()}


@cache
def pat_alone(cap: int = 16384, rollouts: int = 40) -> tuple[float, float]:
    """Return the share of a rollout in which one sample is left: over all engines, and within the slowest one."""
    machine = PatMachine()
    over_all, slowest = [], []
    for seed in range(rollouts):
        lengths = pat_lengths(cap, seed)
        engines = [np.sort(lengths[i::4]) for i in range(4)]
        times = [machine.drain_s(engine, 2) for engine in engines]
        total = max(times)
        last = engines[int(np.argmax(times))]
        slowest.append(1 - machine.drain_s(np.minimum(last, last[-2]), 2) / total)
        rest = np.sort(lengths)
        capped = max(machine.drain_s(np.minimum(engine, rest[-2]), 2) for engine in engines)
        over_all.append(1 - capped / total)
    return float(np.mean(over_all)), float(np.mean(slowest))


def respec_batches(steps: int = 3) -> tuple[float, float]:
    """Return (accept rate that gives 1.46 x at batch 2, the gain at batch 32 with it): H100, 7B, a roofline."""
    cost = Roofline.of_hardware(*HARDWARE["H100"], parameters=7.6e9)
    config = SpecConfig(steps)

    def gain(batch: int, rate: float) -> float:
        ms = cost.grid([OFF, config], np.array(batch), np.array(batch * 2048.0))
        return float(expected_tokens(config, [rate]) * ms[0] / ms[1])

    rate = _solve(lambda a: gain(2, a), 1.46)
    return rate, gain(32, rate)


def l40s_rate(samples: int, drafts: int, accept: float, context: float = 600.0) -> float:
    """Return tokens/s of one L40S with Llama-3.1-8B that verifies `drafts` tokens a sample, by a roofline."""
    cost = Roofline.of_hardware(*HARDWARE["L40S"], parameters=8.03e9, context_bytes=TOKEN_BYTES)
    ms = cost.host_ms + (1 + cost.drafter) * cost.target_ms(np.array(samples * drafts), np.array(samples * context))
    return 1e3 * samples * accept / float(ms)


def l40s_gain(drafts: int) -> float:
    """Return the gain of RLHFSpec's figure 5, with the acceptance that gives 103 tokens/s to one sample."""
    accept = 103 / l40s_rate(1, drafts, 1.0)
    rates = {samples: l40s_rate(samples, drafts, accept) for samples in (1, 6, 19, 24)}
    return (rates[19] + rates[6]) / (rates[24] + rates[1])


def break_even(samples: int, drafts: int) -> float:
    """Return the accept length at which verifying so many tokens a sample is as fast as plain decoding on an L40S."""
    return l40s_rate(samples, 1, 1.0) / l40s_rate(samples, drafts, 1.0)


@cache
def rlhfspec_breakdown(samples: int, tree: str = "k5t4n48", seeds: int = 1) -> list[float]:
    """Simulate RLHFSpec's figure 13 on eight L40S: gains of a tree, of the live budget, and of the live moves."""
    rates = np.array([[0.9, 0.87, 0.85, 0.83, 0.8], [0.55, 0.5, 0.45, 0.4, 0.4]])
    acceptance = AcceptanceModel(rates, 0.8, np.array([0.4, 0.6, 0.8]), SIBLING)
    names = ("off", tree, f"{tree}+sample", f"{tree}+sample+kv")
    cluster = Cluster(hardware_table("L40S", Model(8.03e9), (1,), (), Policies.of(names[-1]).shapes), 8)
    lengths = LengthModel.of_quantiles((0.5, 378), (0.95, 1373), 0.5)
    work = Workload(lengths, acceptance, prompts=samples, samples=8, cap=2048)
    seconds = [[draw(cluster, work, Policies.of(name), seed).makespan_ms for seed in range(seeds)] for name in names]
    return [float(np.mean(np.divide(seconds[0], row))) for row in seconds[1:]]


def _solve(rising: Callable[[float], float], wanted: float) -> float:
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < wanted else (low, middle)
    return (low + high) / 2


def findings() -> list[Finding]:
    """Return all findings, in the order of the papers."""
    return [
        *_rlhfspec(),
        *_rlhfspec_generation(),
        *_respec(),
        *_pat_rollouts(),
        *_pat_changes(),
        *_slime(),
    ]


def _rlhfspec() -> list[Finding]:
    lengths = LengthModel.of_quantiles((0.5, 378), (0.95, 1373))
    above = 1 - 0.5 * (1 + math.erf((math.log(2048) - lengths.mu) / lengths.sigma / math.sqrt(2)))
    gain = (1415 + 765) / (1453 + 103)
    apart = 765 / 6 / 103
    return [
        Finding(
            "RLHFSpec, fig. 3: lengths",
            "median 378, 95 % below 1,373",
            f"lognormal with σ = {lengths.sigma:.3f}; {above:.1%} above 2,048 tokens",
            "both quantiles",
            "input of the rest",
        ),
        Finding(
            "RLHFSpec, fig. 5: five of 24 samples move",
            "1,453 + 103 → 1,415 + 765 tokens/s",
            f"{gain:.2f} x together. Six samples at 765 tokens/s draw {765 / 6:.0f} each, one alone draws 103: samples "
            f"differ in acceptance by at least {apart:.2f} x. A roofline with one acceptance for all gives "
            f"{l40s_gain(24):.2f} x with 24 verified tokens a sample and {l40s_gain(32):.2f} x with 32",
            "the four rates and the counts; the tokens verified are missing",
            "follows only if samples differ in acceptance",
        ),
        Finding(
            "RLHFSpec, fig. 11 and 12: end to end",
            "1.47 x and 1.42 x",
            f"generation at 2.10 x and 2.17 x of a share of 0.684 gives {amdahl(0.684, 2.10):.2f} x and "
            f"{amdahl(0.684, 2.17):.2f} x; the printed ones need shares of {share_for(1.47, 2.10):.2f} and "
            f"{share_for(1.42, 2.17):.2f}",
            "share of generation, its mean speedup",
            "does not follow from its share",
        ),
        Finding(
            "RLHFSpec, fig. 12: the largest gains",
            "1.50 x and 1.43 x over Verl",
            f"generation at 2.16 x and 2.32 x gives {amdahl(0.684, 2.16):.2f} x and {amdahl(0.684, 2.32):.2f} x",
            "share of generation, its largest speedup",
            "does not follow from its share",
        ),
    ]


def _rlhfspec_generation() -> list[Finding]:
    cost = Roofline.of_hardware(*HARDWARE["L40S"], parameters=8.03e9, context_bytes=TOKEN_BYTES)
    turning = [Pace(cost, [config], [0.7]).turning_point(600.0) for config in (OFF, SpecConfig(3))]
    return [
        Finding(
            "RLHFSpec, fig. 4: draft tokens",
            "more than 48 a sample always lose",
            f"48 are as fast as plain decoding at accept lengths of {break_even(8, 48):.1f}, {break_even(24, 48):.1f} "
            f"and {break_even(40, 48):.1f} with 8, 24 and 40 samples; 24 at {break_even(8, 24):.1f}, "
            f"{break_even(24, 24):.1f} and {break_even(40, 24):.1f}",
            "L40S, 8B; depth, temperature and acceptance are missing",
            "possible for many samples; with 8, a roofline says that 48 still gain. Needs acceptance",
        ),
        Finding(
            "RLHFSpec, fig. 9: threshold of samples",
            "a roofline; no value",
            f"{turning[0]} samples for plain decoding and {turning[1]} for chains of 3 at a context of 600 "
            "(`Pace.turning_point`)",
            "L40S, 8B",
            "follows in kind",
        ),
        Finding(
            "RLHFSpec, fig. 11 and 13: generation",
            "speculation 1.18 x, with selection 1.95 x, with reallocation 2.32 x; means over Verl 2.10 x and 2.17 x",
            "; ".join(
                f"{n} samples an engine: " + ", ".join(f"{gain:.2f}" for gain in rlhfspec_breakdown(n)) + " x"
                for n in (4, 64)
            )
            + " (simulated: trees of 5 steps, 4 branches and 48 tokens; the live budget; the live moves)",
            "lengths, L40S, 8B; acceptance is assumed, also that of siblings; the tree and an engine's samples are "
            "missing",
            "speculation and selection follow for large trees and many samples; reallocation adds less at these "
            "lengths: the longest sample ends a rollout",
        ),
        Finding(
            "RLHFSpec, fig. 14: five samples move",
            "2,127 → 2,531 tokens/s: 1.19 x",
            "not computed",
            "the samples of both instances are missing",
            "needs the counts",
        ),
        Finding(
            "RLHFSpec, all overheads",
            "below 3.87 %",
            "`benchmarks/tail.py` prints ours",
            "none",
            "measured here",
        ),
        Finding(
            "RLHFSpec, table 1: selection against the best n",
            "95.53 to 99.90 %",
            "96 to 99 % (measured on a CPU: `benchmarks/embedded.py --parts selection`)",
            "none",
            "reproduced in kind",
        ),
    ]


def _respec() -> list[Finding]:
    rate, large = respec_batches()
    return [
        Finding(
            "ReSpec, fig. 7: speedup by batch",
            "1.46 x at batch 2, 0.76 x at 32",
            f"a roofline of the H100 with three drafts: 1.46 x needs an accept rate of {rate:.2f}, which gives "
            f"{large:.2f} x at batch 32",
            "GPU and model; tree and depth are missing",
            "does not follow from a roofline: needs overheads that grow with the batch, or wide trees",
        ),
        Finding(
            "ReSpec, table 1: shares of a step",
            "math: generation 83 to 86 %, training 12.3 to 14.6 %",
            f"infinitely fast generation gives {1 / (1 - 0.83):.1f} to {1 / (1 - 0.86):.1f} x",
            "the shares",
            "input of the rest",
        ),
        Finding(
            "ReSpec, fig. 13: mean step speedups of 3B, 7B, 14B",
            "1.84, 1.69 and 1.50 x",
            "generation at "
            + ", ".join(f"{part_for(step, 0.845):.2f}" for step in (1.84, 1.69, 1.50))
            + " x with a share of 0.845",
            "share of generation; acceptance and lengths are missing",
            "possible: accept lengths of 2 to 3 suffice",
        ),
        Finding(
            "ReSpec, fig. 14: distillation, adaptive server, overlap",
            "1.48 → 1.66 → 1.78 x",
            "generation at "
            + ", ".join(f"{part_for(step, 0.845):.2f}" for step in (1.48, 1.66, 1.78))
            + f" x; or the overlap hides {1 - 1.66 / 1.78:.1%} of the step before it, "
            f"{(1 - 1.66 / 1.78) / 1.66:.1%} of the first one: a third of its training",
            "share of generation; seconds of a drafter update are missing",
            "possible; needs the drafter's seconds. Our grid is below",
        ),
        Finding(
            "ReSpec, fig. 13: largest step speedups of 7B and 14B",
            "2.41 and 2.60 x",
            f"generation at {part_for(2.41, 0.86):.1f} and {part_for(2.60, 0.86):.1f} x with a share of 0.86",
            "share of generation",
            "possible for accept lengths above 3.5, at small batches",
        ),
        Finding(
            "ReSpec, fig. 13: largest step speedup, 3B",
            "4.53 x",
            f"at a share of 0.86 generation would be {part_for(4.53, 0.86):.1f} x as fast; an accept length of 5 "
            f"bounds the step at {amdahl(0.86, 5.0):.1f} x",
            "share of generation",
            "does not follow from speculation alone",
        ),
        Finding(
            "ReSpec, fig. 4, 5, 10, 12, 15: decay, collapse of rewards, intervals",
            "4 → below 1 drafts in 100 steps; rewards collapse without weights",
            "see [staleness](staleness.md): accept lengths are measured; a reward cannot depend on the drafter here",
            "not a question of time",
            "by construction, and by measurement",
        ),
    ]


def _pat_rollouts() -> list[Finding]:
    machine = PatMachine()
    gains = pat_step_gains(0.73)
    most = pat_step_gains(0.817)[16384]
    over_all, slowest = pat_alone()
    return [
        Finding(
            "PAT, fig. 4: ms a token by size and batch",
            "TP 2: 15.37 and 24.41, TP 8: 9.64 and 30.87 at batch 1 and 128",
            f"all-reduces at {machine.bus / 1e9:.1f} GB/s; {machine.rest[2]:.2f} and {machine.rest[8]:.2f} ms that no "
            "reading of weights explains",
            "the four points",
            "input of the rest",
        ),
        Finding(
            "PAT, fig. 3b: samples above 16k in a batch",
            "2.8 of 128",
            f"{PAT_BATCH * 0.0218:.1f}",
            "2.18 % above 16k",
            "follows",
        ),
        Finding(
            "PAT, fig. 3: one sample left",
            "46 to 82 % of generation",
            f"{over_all:.0%} over all engines, {slowest:.0%} within the slowest one, at a cap of 16k",
            "the two quantiles of lengths, figure 4",
            "does not follow from its lengths: several samples reach the cap together",
        ),
        Finding(
            "PAT, fig. 10: step speedup on eight A40, caps of 6k to 16k",
            "1.05 to 1.27 x",
            ", ".join(f"{gain:.2f}" for gain in gains.values())
            + f" x at 6k, 8k, 12k, 16k with a share of 0.73; {most:.2f} x at 16k with 0.817. The change is made at the "
            "best token, known in advance",
            "figure 4 (calibration), lengths, 5.52 s a change, share",
            "follows in kind; the largest is 0.05 to 0.1 higher than ours",
        ),
        Finding(
            "PAT, fig. 10: sixteen A40, and 14B",
            "at most 1.19 x; 1.05 to 1.18 x",
            "not computed",
            "the latencies of 14B, the batch on sixteen GPUs and the time of training are missing",
            "needs these",
        ),
    ]


def _pat_changes() -> list[Finding]:
    tokens = 9 * 12_000
    size = tokens * TOKEN_BYTES
    wire = 7 / 8 * size / 2.36
    again = tokens * PatMachine().wire[8] / wire
    longer = 2292.6 / 1780
    return [
        Finding(
            "PAT, fig. 12: a whole change",
            "58.98 → 5.52 s, 1.23 % of 447 s",
            f"the parts sum to {7.47 + 19.01 + 3.59:.2f} and {1.03 + 2.36 + 0.73:.2f} s: "
            f"{58.98 - 7.47 - 19.01 - 3.59:.1f} and {5.52 - 1.03 - 2.36 - 0.73:.1f} s are not named; "
            f"{5.52 / 447:.2%} of 447 s",
            "the parts",
            "follows",
        ),
        Finding(
            "PAT, fig. 13: memory of a change",
            "2.5 GB instead of 14 GB",
            f"one layer of caches and weights is {(size + WEIGHTS) / LAYERS / 1e9:.2f} GB; 2.5 GB are "
            f"{2.5e9 / (size + WEIGHTS) * LAYERS:.1f} layers on one GPU, if it gathers them whole",
            "9 x 12k tokens, 16.06 GB",
            "follows in kind",
        ),
        Finding(
            "PAT, fig. 12: moving keys and values, and prefilling again",
            "2.36 s and 19.01 s",
            f"{size / 1e9:.1f} GB at {wire / 1e9:.2f} GB/s take 2.36 s; all-reduces of {tokens:,} tokens at the same "
            f"bandwidth take {again:.1f} s",
            "9 samples of 12k, TP 8",
            "follows: one bandwidth explains both",
        ),
        Finding(
            "PAT, fig. 12: resharding weights",
            "1.03 s",
            f"{WEIGHTS / 2 / wire:.2f} s for half of the weights at that bandwidth",
            "16.06 GB",
            "follows within 1.5 x",
        ),
        Finding(
            "PAT, eq. 1 with the hidden dimension",
            "14 GB of keys and values",
            f"{size / 1e9:.1f} GB with key heads, {tokens * 2 * LAYERS * HIDDEN * 2 / 1e9:.1f} GB with the hidden "
            "dimension",
            "9 x 12k tokens",
            "the text means key heads x head dimension",
        ),
        Finding(
            "PAT, fig. 11: step from generation, H100",
            "134.3 → 87.9 s of 172.5 s: 1.37 x",
            f"{172.5 / (172.5 - 134.3 + 87.9):.3f} x",
            "the three times",
            "follows",
        ),
        Finding(
            "PAT, fig. 11: tokens/s, H100",
            "8B 2,570.6 → 3,510.9; 14B 1,780 → 2,292.6 with generation at 133.9 → 91.1 s",
            f"8B: {2570.6 * 172.5 / 1e3:.0f}k tokens before and {3510.9 * 125.6 / 1e3:.0f}k after. 14B: {longer:.2f} x "
            f"means a step of {(133.9 - 91.1) / (1 - 1 / longer):.0f} s before, "
            f"{133.9 * (1 - 1 / longer) / 42.8:.0%} of it generation",
            "the times and rates",
            "follows",
        ),
        Finding(
            "PAT, fig. 14: error of predictions",
            "4.04 and 3.07 %",
            "`benchmarks/retile.py` prints ours",
            "none",
            "measured here",
        ),
    ]


def _slime() -> list[Finding]:
    return [
        Finding(
            "slime: training time with and without MTP",
            "148 and 138 s",
            f"{148 / 138 - 1:.1%} more",
            "both times",
            "follows",
        ),
        Finding(
            "slime: rollout time, all and tail",
            "1,580 → 1,300 s; tail 62 → 52 s",
            "not computed",
            "lengths, batch and acceptance are missing",
            "needs lengths",
        ),
    ]


def page() -> str:
    """Return docs/papers.md."""
    lines = [
        "# The papers' figures from their own inputs",
        "",
        "Written by `python -m megatron_rlspec.sim.papers > docs/papers.md`. Numbers of ours are simulated or computed",
        "from the inputs named, unless a row says measured. Unstated settings of a paper may differ: *does not follow*",
        "says that an input is missing or another one is meant, not that a measurement is wrong.",
        "",
        "| figure | printed | what follows here | from | verdict |",
        "|---|---|---|---|---|",
    ]
    lines += [f"| {f.where} | {f.theirs} | {f.ours} | {f.inputs} | {f.verdict} |" for f in findings()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
