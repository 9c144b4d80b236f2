"""How many drafts a round will accept: per-depth conditional rates, estimated from censored histograms.

a_d = P(depth d accepted | depth d reached). A round that drafted k steps and accepted i says: depths 1..i accepted,
depth i + 1 refused, and, where i = k, nothing about depth k + 1 (censored). Expected tokens of a round at k steps are
E = 1 + sum over d <= k of a_1 * ... * a_d (docs/design.md, Acceptance).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from megatron_rlspec.types import SpecConfig

_STATE = ("hits", "draws", "ratio_hits", "ratio_base")


def expected_tokens(config: SpecConfig, rates: Sequence[float], sibling: float = 0.4) -> float:
    """Tokens that one request emits per round under `config`, given the chain's rates a_1.. (the last one repeats).

    For topk > 1 the rates of further branches are modelled: each next sibling catches the share `sibling` of what the
    ones before it missed. The tree is SGLang's (topk beams, topk² candidates a step), its `num_draft_tokens - 1`
    likeliest nodes are kept, and a node counts the product along its path (RLHFSpec section 5.2).
    """
    if config.num_steps == 0:
        return 1.0
    depths = [rates[min(d, len(rates) - 1)] for d in range(config.num_steps)]
    if config.topk == 1:
        total, reach = 1.0, 1.0
        for rate in depths:
            reach *= rate
            total += reach
        return total
    beams, nodes = np.ones(1), []
    for rate in depths:
        missed = (1 - rate) * (1 - sibling) ** np.arange(config.topk - 1)
        branches = np.concatenate([[rate], np.minimum(rate, missed * sibling)])
        candidates = np.sort(np.outer(beams, branches).ravel())[::-1]
        nodes.append(candidates)
        beams = candidates[: config.topk]
    best = np.sort(np.concatenate(nodes))[::-1]
    return 1.0 + float(best[: config.num_draft_tokens - 1].sum())


def accept_length(histogram: Sequence[int] | np.ndarray) -> float:
    """Tokens per round, the target's own included: 1 + accepted drafts / rounds. NaN without rounds.

    `histogram[i]` rounds accepted i drafts; pool several histograms first, so that the result is a ratio of sums.
    """
    counts = np.asarray(histogram, dtype=np.int64)
    rounds = int(counts.sum())
    return 1 + int(counts @ np.arange(len(counts))) / rounds if rounds else float("nan")


def pooled(histograms: Iterable[Sequence[int]]) -> np.ndarray:
    """Sum histograms of different lengths, element by element; `[longest] int64`."""
    total = np.zeros(0, dtype=np.int64)
    for histogram in histograms:
        if len(histogram) > len(total):
            total = np.pad(total, (0, len(histogram) - len(total)))
        total[: len(histogram)] += np.asarray(histogram, dtype=np.int64)
    return total


def beta_interval(successes: float, failures: float, mass: float = 0.95) -> tuple[float, float]:
    """Central credible interval of Beta(successes, failures), integrated on a grid of the logit."""
    logit = np.linspace(-16 / min(successes, 1.0), 16 / min(failures, 1.0), 8001)  # a rate near 0 has a long tail
    log_p, log_q = -np.logaddexp(0, -logit), -np.logaddexp(0, logit)
    density = successes * log_p + failures * log_q
    cdf = np.cumsum(np.exp(density - density.max()))
    low, high = np.interp([(1 - mass) / 2, (1 + mass) / 2], cdf / cdf[-1], np.exp(log_p))
    return float(low), float(high)


def histogram_of(num_steps: int, accepted: Sequence[int]) -> list[int]:
    """`histogram[i]`: how many requests accepted i drafts in a round that drafted `num_steps`."""
    histogram = [accepted.count(i) for i in range(num_steps + 1)]
    if sum(histogram) != len(accepted):
        raise ValueError(f"accepted {min(accepted)}..{max(accepted)} drafts, but the round drafted {num_steps}")
    return histogram


class Acceptance:
    """Running estimate of a_1..a_depth. Deterministic in what it was shown, so equal on every tensor-parallel rank.

    Evidence is forgotten with `memory_rounds` (e-folding) and capped at `memory_draws` per depth: a drifting policy is
    followed by the clock at small batches and by the data at large ones. A depth's prior is its shallower neighbour's
    rate times a ratio that is remembered much longer: while only k = 1 runs, what depth 3 would do moves with a_1.
    Before any data the ratios are `prior_rate` for depth 1 and `prior_ratio` below it, worth `prior_strength` draws.
    """

    def __init__(
        self,
        depth: int = 8,
        *,
        memory_rounds: float = 200.0,
        memory_draws: float = 2000.0,
        prior_rate: float = 0.7,
        prior_ratio: float = 0.95,
        prior_strength: float = 4.0,
    ) -> None:
        if depth < 1 or min(memory_rounds, memory_draws, prior_strength) <= 0:
            raise ValueError(f"depth={depth}, memories and prior_strength={prior_strength} must be positive")
        if not (0 <= prior_rate <= 1 and 0 <= prior_ratio <= 1):
            raise ValueError(f"prior_rate={prior_rate} and prior_ratio={prior_ratio} must lie in [0, 1]")
        self.depth = depth
        self.memory_rounds = memory_rounds
        self.memory_draws = memory_draws
        self.prior_strength = prior_strength
        self.prior = [prior_rate] + [prior_ratio] * (depth - 1)
        self.hits, self.draws = [0.0] * depth, [0.0] * depth
        self.ratio_hits, self.ratio_base = (
            [0.0] * depth,
            [0.0] * depth,
        )  # of long memory: accepted / expected by a_(d-1)
        self._keep = float(np.exp(-1.0 / memory_rounds))
        self._refresh()

    def observe(self, num_steps: int, accepted: Sequence[int], elapsed: int = 1) -> None:
        """One round at `num_steps`: accepted drafts per request. `elapsed`: rounds since the last one shown here."""
        self.observe_histogram(num_steps, histogram_of(num_steps, accepted), elapsed)

    def observe_histogram(self, num_steps: int, histogram: Sequence[float], elapsed: int = 1) -> None:
        """`histogram[i]` requests accepted i drafts, in rounds at `num_steps`; the last entry is censored."""
        if len(histogram) > num_steps + 1:
            raise ValueError(
                f"histogram has {len(histogram)} entries, but num_steps={num_steps} allows {num_steps + 1}"
            )
        keep = self._keep**elapsed
        reached = float(sum(histogram))
        for d in range(self.depth):
            self.hits[d] *= keep
            self.draws[d] *= keep
            if d >= num_steps or reached <= 0:
                continue
            passed = reached - (histogram[d] if d < len(histogram) else 0.0)
            self.ratio_hits[d] += passed
            self.ratio_base[d] += reached * (self.rates[d - 1] if d else 1.0)
            _cap(self.ratio_hits, self.ratio_base, d, 10 * self.memory_draws)
            self.hits[d] += passed
            self.draws[d] += reached
            _cap(self.hits, self.draws, d, self.memory_draws)
            reached = passed
        self._refresh()

    def _refresh(self) -> None:
        """Posterior means a_1..a_depth, and `totals[k]`: expected tokens of a round at k = 0..depth steps."""
        m = self.prior_strength
        self.rates: list[float] = []
        self.totals: list[float] = [1.0]
        rate = reach = 1.0
        for d in range(self.depth):
            ratio = (self.ratio_hits[d] + m * self.prior[d]) / (self.ratio_base[d] + m)
            rate = (self.hits[d] + m * min(ratio * rate, 1.0)) / (self.draws[d] + m)
            reach *= rate
            self.rates.append(rate)
            self.totals.append(self.totals[-1] + reach)

    def intervals(self, mass: float = 0.95) -> list[tuple[float, float]]:
        """Credible interval of each rate, given the posterior mean of the depth above it."""
        bounds = []
        for rate, draws in zip(self.rates, self.draws, strict=True):
            weight = draws + self.prior_strength
            bounds.append(beta_interval(max(rate * weight, 1e-3), max((1 - rate) * weight, 1e-3), mass))
        return bounds

    def predict(self, rates: Sequence[float], draws: float = 200.0) -> None:
        """Start again from predicted rates (`mtp/predict.py`) as if `draws` drafts per depth had shown them."""
        if not rates or any(not 0 <= rate <= 1 for rate in rates):
            raise ValueError(f"predicted rates {list(rates)} must lie in [0, 1] and not be empty")
        shallower = 1.0
        for d in range(self.depth):
            rate = rates[d] if d < len(rates) else shallower * self.prior[d]
            weight = draws if d < len(rates) else 0.0
            self.hits[d], self.draws[d] = rate * weight, weight
            self.ratio_hits[d], self.ratio_base[d] = rate * weight, shallower * weight
            shallower = rate
        self._refresh()

    def to_json(self) -> dict[str, Any]:
        return {
            "depth": self.depth,
            "memory_rounds": self.memory_rounds,
            "memory_draws": self.memory_draws,
            "prior_strength": self.prior_strength,
            "prior": list(self.prior),
            **{name: list(getattr(self, name)) for name in _STATE},
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Acceptance:
        names = ("memory_rounds", "memory_draws", "prior_strength")
        acceptance = cls(data["depth"], **{name: data[name] for name in names})
        for name in ("prior", *_STATE):
            values = [float(v) for v in data[name]]
            if len(values) != acceptance.depth or not np.all(np.isfinite(values)):
                raise ValueError(
                    f"acceptance state: {name} must hold {acceptance.depth} finite numbers, got {data[name]}"
                )
            setattr(acceptance, name, values)
        acceptance._refresh()
        return acceptance


def _cap(hits: list[float], draws: list[float], d: int, most: float) -> None:
    if (over := draws[d] / most) > 1:
        hits[d] /= over
        draws[d] /= over
