"""Compute the figures of docs/papers.md: what follows from the inputs that four papers print.

    python benchmarks/papers.py

Numbers are simulated, or computed from numbers that the papers print.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import numpy as np

from megatron_rlspec.extensions.migration.plans.pace import Pace
from megatron_rlspec.extensions.simulator.cluster import Cluster, Policies, Simulation, Workload
from megatron_rlspec.extensions.simulator.hardware import ModelSizes, hardware_table
from megatron_rlspec.extensions.simulator.samples import AcceptanceModel, LengthModel
from megatron_rlspec.speculation.acceptance import expected_tokens
from megatron_rlspec.speculation.roofline import HARDWARE, Roofline
from megatron_rlspec.types import OFF, SpecConfig

# PAT, figures 3, 4, 10 and 12: LLaMA3.1-8B in bf16 on eight A40.
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
    cluster = Cluster(hardware_table("L40S", ModelSizes(8.03e9), (1,), (), Policies.of(names[-1]).shapes), 8)
    lengths = LengthModel.of_quantiles((0.5, 378), (0.95, 1373), 0.5)
    work = Workload(lengths, acceptance, prompts=samples, samples=8, cap=2048)
    seconds = [
        [Simulation(cluster, work, Policies.of(name), seed).run().makespan_ms for seed in range(seeds)]
        for name in names
    ]
    return [float(np.mean(np.divide(seconds[0], row))) for row in seconds[1:]]


def _solve(rising: Callable[[float], float], wanted: float) -> float:
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < wanted else (low, middle)
    return (low + high) / 2


def rlhfspec() -> None:
    lengths = LengthModel.of_quantiles((0.5, 378), (0.95, 1373))
    above = 1 - 0.5 * (1 + math.erf((math.log(2048) - lengths.mu) / lengths.sigma / math.sqrt(2)))
    print(f"RLHFSpec, fig. 3: sigma {lengths.sigma:.3f}, {above:.1%} above 2,048 tokens")
    print(
        f"  fig. 5: {(1415 + 765) / (1453 + 103):.2f} x; samples differ by {765 / 6 / 103:.2f} x; a roofline:", end=" "
    )
    print(", ".join(f"{l40s_gain(drafts):.2f} x with {drafts} tokens" for drafts in (24, 32)))
    steps = ", ".join(f"{amdahl(0.684, part):.2f} x" for part in (2.10, 2.17, 2.16, 2.32))
    shares = ", ".join(f"{share_for(step, part):.2f}" for step, part in ((1.47, 2.10), (1.42, 2.17)))
    print(f"  fig. 11, 12: steps {steps}; shares {shares}")
    evens = {n: [f"{break_even(samples, n):.1f}" for samples in (8, 24, 40)] for n in (48, 24)}
    print(f"  fig. 4: accept lengths at which drafts break even: {evens}")
    cost = Roofline.of_hardware(*HARDWARE["L40S"], parameters=8.03e9, context_bytes=TOKEN_BYTES)
    print(f"  fig. 9: {[Pace(cost, [config], [0.7]).turning_point(600.0) for config in (OFF, SpecConfig(3))]} samples")
    for samples in (4, 64):
        gains = ", ".join(f"{gain:.2f}" for gain in rlhfspec_breakdown(samples))
        print(f"  fig. 13, simulated, {samples} samples an engine: {gains} x")


def respec() -> None:
    rate, large = respec_batches()
    print(f"ReSpec, fig. 7: accept rate {rate:.2f}, {large:.2f} x at batch 32")
    print(
        "  fig. 13, 14: generation "
        + ", ".join(f"{part_for(s, 0.845):.2f}" for s in (1.84, 1.69, 1.50, 1.48, 1.66, 1.78))
    )
    print("  fig. 13, the largest: " + ", ".join(f"{part_for(step, 0.86):.1f}" for step in (2.41, 2.60, 4.53)))
    print(f"  an accept length of 5 bounds a step at {amdahl(0.86, 5.0):.1f} x")


def pat() -> None:
    machine = PatMachine()
    print(
        f"PAT, fig. 4: all-reduces at {machine.bus / 1e9:.1f} GB/s; rest {machine.rest[2]:.2f}, {machine.rest[8]:.2f}"
    )
    print("  fig. 3: one sample left: {:.0%} over all engines, {:.0%} of the slowest".format(*pat_alone()))
    for share in (0.73, 0.817):
        gains = ", ".join(f"{gain:.2f} x at {cap}" for cap, gain in pat_step_gains(share).items())
        print(f"  fig. 10, share {share}: {gains}")
    tokens = 9 * 12_000
    size = tokens * TOKEN_BYTES
    wire = 7 / 8 * size / 2.36  # bytes a second
    print(
        f"  fig. 12: {size / 1e9:.1f} GB at {wire / 1e9:.2f} GB/s; prefill {tokens * machine.wire[8] / wire:.1f} s;",
        end=" ",
    )
    print(f"weights {WEIGHTS / 2 / wire:.2f} s; with the hidden dimension {tokens * 4 * LAYERS * HIDDEN / 1e9:.1f} GB")
    print(
        f"  fig. 13: a layer {(size + WEIGHTS) / LAYERS / 1e9:.2f} GB, {2.5e9 / (size + WEIGHTS) * LAYERS:.1f} layers"
    )
    print(f"  fig. 11: {172.5 / (172.5 - 134.3 + 87.9):.3f} x")


def slime() -> None:
    print(f"slime: training {148 / 138 - 1:.1%} longer; tokens/s {1580 / 1300:.3f} x, of the tail {62 / 52:.2f} x")


if __name__ == "__main__":
    for paper in (rlhfspec, respec, pat, slime):
        paper()
