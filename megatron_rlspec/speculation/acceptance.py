"""Estimate how many drafts a round accepts: conditional rates per depth, from censored histograms.

a_d = P(depth d accepted | depth d reached). A round that drafted k steps and accepted i shows that depths 1..i were
accepted and that depth i + 1 was refused. If i = k, it shows nothing about depth k + 1 (censored). A round of k steps
emits E = 1 + sum over d <= k of a_1 * ... * a_d tokens on average (docs/design.md, Acceptance).

`Acceptance` estimates the rates from the rounds that engines run: each engine's `SpecRule` holds one, and the trainer's
`Learning`. `Prediction` has the trainer's sums for the next rollout; `train/drafter_step.py` makes it. The functions
before them are about histograms of accepted drafts; only `expected_tokens` takes rates.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_rlspec.speculation.ragged import BINS
from megatron_rlspec.types import SHARPNESS, SpecConfig

PRIOR_RATE = 0.7  # of depth 1, before anything was observed
PRIOR_RATIO = 0.95  # of a_d to a_(d - 1)
PRIOR_STRENGTH = 4.0  # drafts that the prior of a rate weighs
# PRIOR_STRENGTH * RATIO_STRENGTH drafts is the weight of a ratio's prior. It is more, because few drafts of deep depths
# are seen at batch 1.
RATIO_STRENGTH = 4.0
# attributes in `Acceptance.to_json`, which engines, the trainer and checkpoints exchange
_STATE = ("hits", "draws", "ratio_hits", "ratio_base")


def expected_tokens(config: SpecConfig, rates: Sequence[float]) -> float:
    """Return the tokens that a request emits per round of `config`, on average.

    rates  a_1, a_2, ..., at least one unless `config` drafts nothing; the last one stands for all deeper depths
    """
    total = 1.0
    reach = 1.0
    for d in range(config.num_steps):
        reach *= rates[min(d, len(rates) - 1)]
        total += reach
    return total


def accept_length(histogram: Sequence[float] | np.ndarray) -> float:
    """Return tokens per round, with the target's own token: 1 + accepted drafts / rounds. NaN without rounds.

    histogram  at index i, the number of rounds that accepted i drafts. Join several by `pooled` first, so that the
               result is a ratio of sums and not a mean of ratios

    For `Sample.accepted` the result is the number of tokens that a verify round delivers (`delivered`).
    """
    counts = np.asarray(histogram, dtype=float)
    rounds = float(counts.sum())
    if not rounds:
        return float("nan")
    drafts = float(counts @ np.arange(len(counts)))
    return 1 + drafts / rounds


def delivered(rounds: int, spans: Iterable[tuple[int, int]], tokens: int) -> tuple[int, ...]:
    """Return `Sample.accepted`: at index i, the verify rounds that delivered 1 + i tokens; empty without rounds.

    rounds  verify rounds of the sample, without the pass that draws the response's first token
    spans   `Sample.accepted_spans`: (first, last + 1) of the accepted drafts of each round that had any
    tokens  of the whole response

    The pass over the prompt draws the first token: a prefill in SGLang, which drafts nothing. The embedded engine's
    first round drafts already; its drafts are left out here, so that both engines count the same rounds. Tokens past
    the end of the response are drawn and not delivered. A response that ends with a draft lost its last round's own
    token: that round counts one draft less. Raises ValueError if there are more spans than rounds.
    """
    drafts = []
    for first, last in spans:
        if first > 0:  # a span from 0 on is of the embedded engine's first round
            drafts.append(last - first - (last == tokens))
    if len(drafts) > rounds:
        raise ValueError(f"{len(drafts)} spans of accepted drafts in {rounds} verify rounds")
    if not rounds:
        return ()
    histogram = np.zeros(max(drafts, default=0) + 1, np.int64)
    for count in drafts:
        histogram[count] += 1
    histogram[0] += rounds - len(drafts)  # rounds without a span accepted no draft
    return tuple(histogram.tolist())


def runs_of_ones(marks: Sequence[int | None]) -> Iterator[tuple[int, int]]:
    """Yield (first, last + 1) of every run of ones in `marks`; None counts as 0."""
    first = None
    for i, mark in enumerate(marks):
        if mark and first is None:
            first = i
        elif not mark and first is not None:
            yield first, i
            first = None
    if first is not None:
        yield first, len(marks)


def pooled(histograms: Iterable[Sequence[float] | np.ndarray]) -> np.ndarray:
    """Sum histograms of different lengths, element by element: `[longest]`, int64 if all are counts."""
    rows = [np.asarray(histogram) for histogram in histograms]
    # an empty row is float64 in numpy, and would make all floats
    counted = [row.dtype for row in rows if len(row)]
    longest = max(map(len, rows), default=0)
    total = np.zeros(longest, np.result_type(np.int64, *counted))
    for row in rows:
        total[: len(row)] += row.astype(total.dtype)
    return total


def histogram_of(num_steps: int, accepted: Sequence[int] | np.ndarray) -> list[int]:
    """Return how many requests accepted 0, 1, … drafts in a round that drafted `num_steps`."""
    counts = np.asarray(accepted, np.int64)
    histogram: list[int] = np.bincount(counts, minlength=num_steps + 1).tolist()
    return histogram


@dataclass(frozen=True)
class Prediction:
    """The acceptance that the trainer predicts for the next rollout (`losses/predict.py`), as sums over rounds.

    Predictions of several updates are added (`sum_of_predictions`). Those of ranks are summed before (`of_sums`).

    steps     [K] step counts (drafts of a round) that were predicted
    reached   [F, K, D]: `reached[:, i, d]` drafts of depth d + 1 were reached in rounds of `steps[i]`. F: the
              sharpnesses of coupled drafts (`types.SHARPNESS`), 1 for other drafts. D: the largest of `steps`
    accepted  [F, K, D]: how many of them were accepted
    by_logq   [F, 2, BINS]: drafts of all depths that were reached, by the drafter's log-probability, and those of them
              that were accepted; None: not known
    """

    steps: tuple[int, ...]
    reached: np.ndarray
    accepted: np.ndarray
    by_logq: np.ndarray | None = None

    @classmethod
    def of_sums(
        cls,
        steps: Sequence[int],
        reached: Sequence[float],
        accepted: Sequence[float],
        by_logq: Sequence[float] | None = None,
    ) -> Prediction:
        """Build one from the arrays in any shape, as a reduction over ranks or `sums` returns them."""
        shape = (-1, len(steps), max(steps))
        counts = None
        if by_logq is not None:
            counts = np.array(by_logq).reshape(-1, 2, BINS)
        sums = np.array(reached).reshape(shape), np.array(accepted).reshape(shape)
        return cls(tuple(steps), *sums, counts)

    def sums(self) -> list[Any]:
        """Return the arguments of `of_sums`, as JSON. `Learning.state` saves them in checkpoints."""
        by_logq = None if self.by_logq is None else self.by_logq.tolist()
        return [list(self.steps), self.reached.tolist(), self.accepted.tolist(), by_logq]

    def __add__(self, other: Prediction) -> Prediction:
        """Add the sums of two predictions of the same steps and sharpnesses.

        This is not checked: other steps of the same number and the same largest one would be added silently.
        """
        by_logq = None
        if self.by_logq is not None and other.by_logq is not None:
            by_logq = self.by_logq + other.by_logq
        sums = self.reached + other.reached, self.accepted + other.accepted
        return Prediction(self.steps, *sums, by_logq)

    @property
    def chances(self) -> np.ndarray | None:
        """Return `by_logq` [2, BINS] of the best sharpness, for `ragged.Selection.add_predicted`; None: not known."""
        return None if self.by_logq is None else self.by_logq[self._best_index]

    @property
    def sharpness(self) -> float | None:
        """Return the sharpness of coupled drafts with the most tokens per round; None for other drafts (F = 1)."""
        if len(self.accepted) != len(SHARPNESS):
            return None
        return SHARPNESS[self._best_index]

    def rates(self, num_steps: int | None = None) -> list[float]:
        """Return a_1..a_num_steps in rounds of `num_steps`; 0 where nothing was reached.

        num_steps  one of `steps`, else it raises ValueError; None: the deepest one
        """
        if num_steps is None:
            num_steps = max(self.steps)
        return self._rates(self._best_index, num_steps)

    @property
    def _best_index(self) -> int:
        """Return the index of the sharpness with the most tokens per round, at the deepest step count."""
        chain = SpecConfig(max(self.steps))
        tokens = []
        for index in range(len(self.accepted)):
            rates = self._rates(index, chain.num_steps)
            tokens.append(expected_tokens(chain, rates))
        return int(np.argmax(tokens))

    def _rates(self, index: int, num_steps: int) -> list[float]:
        """Return `rates` of the sharpness with this index."""
        row = self.steps.index(num_steps)
        reached = self.reached[index, row]
        accepted = self.accepted[index, row]
        rates = np.divide(accepted, reached, out=np.zeros_like(accepted), where=reached > 0)
        return [float(rate) for rate in rates[:num_steps]]

    def tokens_per_round(self, num_steps: int) -> float:
        """Return the predicted tokens of a round; `num_steps` is 0 or one of `steps`."""
        if num_steps == 0:
            return 1.0
        return expected_tokens(SpecConfig(num_steps), self.rates(num_steps))


def sum_of_predictions(before: Prediction | None, newest: Prediction | None) -> Prediction | None:
    """Return the sum of the predictions of two updates on one rollout; None counts as nothing. See `__add__`."""
    return before + newest if before and newest else before or newest


class Acceptance:
    """Running estimate of a_1..a_depth. It depends on the observations only, so tensor-parallel ranks agree.

    Observations fade by a factor of e in 200 rounds, and count as at most 2,000 drafts per depth. So the estimate
    follows a changing policy by the newest 200 rounds at small batches, and by the newest 2,000 drafts at large ones.

    The prior of a_d is a_(d - 1) times a ratio, which is learnt, too. A ratio does not fade, and counts as at most
    20,000 drafts: while only k = 1 runs, the estimate of a_3 follows a_1.

    hits, draws              [depth] accepted and reached drafts, faded
    ratio_hits, ratio_base   [depth] for the ratios: accepted drafts, and the number expected if a_d were a_(d - 1)
    prior                    [depth] the rate of depth 1, then the ratios of the others, before any observation
    rates                    [depth] posterior means of a_1..a_depth
    totals                   [depth + 1] expected tokens of a round of 0..depth steps

    `rates` and `totals` are computed from the other fields. Call `_refresh` after a change of those.
    """

    weight_per_round = float(np.exp(-1 / 200))  # weight of earlier observations, per round
    most_draws = 2000.0  # per depth

    def __init__(self, depth: int = 8) -> None:
        self.depth = depth
        self.prior = [PRIOR_RATE] + [PRIOR_RATIO] * (depth - 1)
        self.hits = [0.0] * depth
        self.draws = [0.0] * depth
        self.ratio_hits = [0.0] * depth
        self.ratio_base = [0.0] * depth
        self._refresh()

    def observe_histogram(
        self, num_steps: int, histogram: Sequence[float], elapsed: int = 1
    ) -> None:
        """Learn from rounds of `num_steps` in which `histogram[i]` requests accepted i drafts, i up to `num_steps`.

        Earlier observations fade by `elapsed` rounds: those since the last call, also rounds without drafts. With 0
        steps and an empty histogram they only fade. Depths beyond `depth` are ignored. Raises ValueError for a
        histogram with more entries than `num_steps` + 1.
        """
        if len(histogram) > num_steps + 1:
            raise ValueError(
                f"histogram has {len(histogram)} entries, but num_steps={num_steps} allows {num_steps + 1}"
            )
        earlier = self.weight_per_round**elapsed
        reached = float(sum(histogram))
        for d in range(self.depth):
            self.hits[d] *= earlier
            self.draws[d] *= earlier
            if d >= num_steps or reached <= 0:
                continue
            refused = histogram[d] if d < len(histogram) else 0.0
            # a histogram of floats may give a little less than 0
            passed = max(reached - refused, 0.0)  # requests that accepted this depth
            # the estimate before this round: `_refresh` comes after the last depth
            shallower = self.rates[d - 1] if d else 1.0
            self.ratio_hits[d] += passed
            self.ratio_base[d] += reached * shallower
            _cap(self.ratio_hits, self.ratio_base, d, 10 * self.most_draws)
            self.hits[d] += passed
            self.draws[d] += reached
            _cap(self.hits, self.draws, d, self.most_draws)
            reached = passed  # at the next depth
        self._refresh()

    def _refresh(self) -> None:
        """Compute `rates` and `totals` from the observations."""
        strength = PRIOR_STRENGTH
        self.rates: list[float] = []
        self.totals: list[float] = [1.0]
        # of depth 0, which is always accepted: so the "ratio" of depth 1 is its rate
        rate = reach = 1.0
        for d in range(self.depth):
            # a posterior mean: observations, and a prior that weighs `weight` drafts
            weight = strength * RATIO_STRENGTH if d else strength
            ratio_hits = self.ratio_hits[d] + weight * self.prior[d]
            ratio = ratio_hits / (self.ratio_base[d] + weight)
            expected = min(ratio * rate, 1.0)
            rate = (self.hits[d] + strength * expected) / (self.draws[d] + strength)
            reach *= rate
            self.rates.append(rate)
            self.totals.append(self.totals[-1] + reach)

    def error(self, num_steps: int, other_steps: int, changed: float = 0.0) -> float:
        """Return the standard deviation of log(tokens of a round of `num_steps` / those of `other_steps`).

        num_steps, other_steps  at most `depth`
        changed                 standard deviation by which rates may have changed since they were observed

        The errors of rates count as independent, and each changes the logarithm by its derivative (`slope`).
        """
        variance = 0.0
        for d in range(max(num_steps, other_steps)):
            rate = self.rates[d]
            if rate <= 0:  # nothing deeper is reached
                break
            of_draws = rate * (1 - rate) / (self.draws[d] + PRIOR_STRENGTH)
            of_rate = of_draws + changed**2
            slope = 0.0
            for steps, sign in ((num_steps, 1), (other_steps, -1)):
                total = self.totals[steps]
                beyond = total - self.totals[min(d, steps)]
                slope += sign * beyond / rate / total
            variance += slope**2 * of_rate
        return float(variance**0.5)

    def predict(self, rates: Sequence[float], draws: float = 200.0) -> None:
        """Replace all observations, also those of the ratios, by predicted rates, which weigh `draws` drafts per depth.

        Depths deeper than those of `rates` start from their prior ratios again. Raises ValueError for rates
        outside of [0, 1], or for none.
        """
        if not rates or any(not 0 <= rate <= 1 for rate in rates):
            raise ValueError(f"predicted rates {list(rates)} must lie in [0, 1] and not be empty")
        shallower = 1.0
        for d in range(self.depth):
            predicted = d < len(rates)
            rate = rates[d] if predicted else shallower * self.prior[d]
            weight = draws if predicted else 0.0
            self.hits[d] = self.ratio_hits[d] = rate * weight
            self.draws[d] = weight
            self.ratio_base[d] = shallower * weight
            shallower = rate
        self._refresh()

    def fresh(self, most: float) -> Acceptance:
        """Copy the estimate for rounds under new weights: the observations of a depth weigh at most `most` drafts.

        Those of the ratios keep their weight, as in `limit`.
        """
        copy = Acceptance.from_json(self.to_json())
        copy.limit(most)
        return copy

    def limit(self, most: float) -> None:
        """Let the observations of every depth weigh at most `most` drafts, above 0. Those of the ratios stay."""
        for d in range(self.depth):
            _cap(self.hits, self.draws, d, most)
        self._refresh()

    def to_json(self) -> dict[str, Any]:
        """Return the state, for `from_json`: in rules, and in checkpoints."""
        state: dict[str, Any] = {"depth": self.depth}
        for name in _STATE:
            state[name] = list(getattr(self, name))
        return state

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Acceptance:
        """Restore the state that `to_json` returned. Raises ValueError for bad numbers, KeyError for missing parts."""
        acceptance = cls(data["depth"])
        if acceptance.depth < 1:
            raise ValueError(f"acceptance state: depth={acceptance.depth} must be positive")
        for name in _STATE:
            values = np.array(data[name], float)
            if values.shape != (acceptance.depth,) or not ((0 <= values) & (values < np.inf)).all():
                raise ValueError(
                    f"acceptance state: {name} must hold {acceptance.depth} finite numbers from 0 on, got {data[name]}"
                )
            setattr(acceptance, name, values.tolist())
        if not (np.array(acceptance.hits) <= acceptance.draws).all():
            raise ValueError("acceptance state: expected hits <= draws")
        acceptance._refresh()
        return acceptance


def _cap(hits: list[float], draws: list[float], d: int, most: float) -> None:
    """Scale hits and draws at depth d, in place, so that `draws[d]` is at most `most`; the rate stays."""
    over = draws[d] / most
    if over > 1:
        hits[d] /= over
        draws[d] /= over
