"""How losslessness is measured: exact enumeration of an engine's randomness, and a chi-square test of stated power."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import embedded_oracle as oracle
import numpy as np
import torch

from megatron_rlspec.rollout.embedded import verify


@dataclass
class Choice:
    options: list[tuple[int, float]]  # (outcome, probability), all positive
    index: int = 0
    idle: bool = False  # drawn behind a draft that was refused


class Enumeration:
    """Replaces `verify.draw` by exhaustive branching.

    `paths(run)` repeats `run()` until every outcome of positive probability has been taken and yields (probability,
    result). Noise is taken as independent from draw to draw, which is right as long as no key decides two tokens of
    one text. What was drawn behind a refused draft is not varied, unless `lazy` is False.
    """

    def __init__(self, monkeypatch, lazy: bool = True) -> None:
        self.choices: list[Choice] = []
        self.at = self.rows = 0
        monkeypatch.setattr(verify, "draw", self.draw)
        if lazy:
            self.real_count = verify.count_accepted
            monkeypatch.setattr(verify, "count_accepted", self.count_accepted)

    def choose(self, options: list[tuple[int, float]]) -> int:
        options = [(outcome, p) for outcome, p in options if p > 0]
        if self.at == len(self.choices):
            self.choices.append(Choice(options))
        choice = self.choices[self.at]
        choice.options, choice.idle = options, False
        self.at += 1
        return options[choice.index][0]

    def draw(self, logprobs, seeds, keys):
        probs = torch.softmax(logprobs.double(), -1).tolist()
        self.rows = len(probs)
        return torch.tensor([self.choose(list(enumerate(row))) for row in probs])

    def count_accepted(self, tokens, valid, targets):
        accepted = self.real_count(tokens, valid, targets)
        if self.rows == valid.sum() == valid.shape[1] and self.at >= self.rows:  # the last draw was one per token
            for place in range(accepted[0] + 1, self.rows):
                self.choices[self.at - self.rows + place].idle = True
        return accepted

    def paths(self, run: Callable[[], object]) -> Iterator[tuple[float, object]]:
        self.choices = []
        while True:
            self.at = 0
            result = run()
            assert self.at == len(self.choices)
            yield math.prod(c.options[c.index][1] for c in self.choices if not c.idle), result
            while self.choices and (
                self.choices[-1].idle or self.choices[-1].index + 1 == len(self.choices[-1].options)
            ):
                self.choices.pop()
            if not self.choices:
                return
            self.choices[-1].index += 1


class Target:
    """The distribution that must come out: the naive decoder's, with temperature and filters restated plainly."""

    def __init__(self, config, tensors, sampling) -> None:
        self.naive, self.sampling, self.known = oracle.Oracle(config, tensors), sampling, {}

    def next(self, tokens: tuple[int, ...]) -> list[float]:
        if tokens not in self.known:
            logits, s = self.naive.logits(list(tokens))[-1], self.sampling
            p = torch.softmax(logits / (s.temperature or 1.0), 0).tolist()
            ranked = sorted(range(len(p)), key=lambda t: -p[t])
            kept, mass = [], 0.0
            for rank, token in enumerate(ranked):
                if (s.top_k <= 0 or rank < s.top_k) and mass <= s.top_p and p[token] >= s.min_p * max(p):
                    kept.append(token)
                mass += p[token]
            if s.temperature == 0:
                kept = ranked[:1]
            total = sum(p[t] for t in kept)
            self.known[tokens] = [p[t] / total if t in kept else 0.0 for t in range(len(p))]
        return self.known[tokens]

    def sequences(self, prompt: tuple[int, ...], length: int) -> dict[tuple[int, ...], float]:
        """Probability of every continuation of this length."""
        out = {}
        for sequence in itertools.product(range(len(self.next(prompt))), repeat=length):
            p, tokens = 1.0, prompt
            for token in sequence:
                p *= self.next(tokens)[token]
                tokens += (token,)
            out[sequence] = p
        return out

    def complete(self, blocks: dict[tuple[int, ...], float], prompt: tuple[int, ...], length: int):
        """Distribution of continuations when each block (no longer than `length`) is continued by the target."""
        out = defaultdict(float)
        for block, weight in blocks.items():
            for rest, p in self.sequences(prompt + block, length - len(block)).items():
                out[block + rest] += weight * p
        return out


def total_variation(p: dict, q: dict) -> float:
    return 0.5 * sum(abs(p.get(k, 0.0) - q.get(k, 0.0)) for k in {*p, *q})


def bins_of(expected: dict[tuple[int, ...], float], bins: int = 16) -> dict[tuple[int, ...], int]:
    """Outcome -> bin, the bins as equal in mass as a greedy filling makes them; impossible outcomes get bin -1."""
    mass, where = [0.0] * bins, {}
    for outcome, p in sorted(expected.items(), key=lambda item: -item[1]):
        where[outcome] = -1 if p == 0 else int(np.argmin(mass))
        mass[where[outcome]] += p
    return where


def chi_square(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """p-value of the counts under the probabilities."""
    expected = counts.sum() * probabilities
    statistic = float(((counts - expected) ** 2 / expected).sum())
    return upper_tail(statistic, len(counts) - 1)


def upper_tail(statistic: float, freedom: int) -> float:
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def critical_value(alpha: float, freedom: int) -> float:
    low, high = 0.0, 1000.0
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if upper_tail(middle, freedom) > alpha else (low, middle)
    return low


def power(samples: int, variation: float, bins: int, alpha: float) -> float:
    """Least power of the chi-square test at level `alpha` against any distribution of bins that far in TV.

    The non-centrality is N Σ (q - p)²/p >= N (Σ |q - p|)² = 4 N TV², by Cauchy-Schwarz; the power of the non-central
    law is a Poisson mixture of central tails.
    """
    threshold, rate = critical_value(alpha, bins - 1), 2 * samples * variation**2
    weights = [
        math.exp(-rate + j * math.log(rate) - math.lgamma(j + 1)) for j in range(int(rate + 20 * rate**0.5) + 20)
    ]
    return sum(w * upper_tail(threshold, bins - 1 + 2 * j) for j, w in enumerate(weights))
