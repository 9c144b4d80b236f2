"""The cost of rounds without a cost table: a roofline that is fitted to the rounds that an engine ran.

The roofline knows the shares of layers and heads from the model's sizes. It does not know the machine. Three things are
learned from measured rounds: the ridge (tokens of a pass that take as long as reading the weights), the cost of a
drafter pass, and a correction for each configuration near each batch size. Only ratios of costs matter to a choice, so
the unit stays one plain pass.

Rounds are grouped into cells: one configuration, and batch sizes within a factor of two. A cell keeps its newest
timings and counts by their median, because single rounds of a busy machine may take many times as long.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from megatron_rlspec.speculation.roofline import Roofline, Work
from megatron_rlspec.types import OFF, SpecConfig

KEPT = 16  # newest timings of a cell
SPREAD = 0.15  # standard deviation of the logarithm of one timing, assumed in the fit
SHRINK = 0.5  # timings as many of which weigh as much as the roofline in a correction
RIDGES = 2.0 ** np.arange(-8, 7.5, 0.5)  # times the prior's ridge
DRAFTERS = 2.0 ** np.arange(-3, 3.5, 0.5)  # times the prior's drafter pass
# standard deviations of the logarithms of both factors before anything was measured
LIKELY_RIDGE = 3.0
LIKELY_DRAFTER = 1.0
FIRST_PLAIN = 4  # plain rounds that are run to time them before anything is drafted
NEAR_PLAIN = 2  # the same near each further batch size
PLAIN_SHARE = 0.005  # of the time that further plain rounds may lose
LEAST_LOSS = 0.04  # share of a round that a further plain round is counted to lose, at least

Cell = tuple[SpecConfig, int]  # configuration, octave of the batch size


class LearntCost:
    """Costs of rounds in passes, by a `Roofline` as prior and the timings that `add` receives.

    `fit` renews the costs; between two fits they do not change. Raises ValueError for timings that are not positive.
    """

    def __init__(self, prior: Roofline) -> None:
        self.prior = prior
        self.fitted = prior
        # log ms, batch, context tokens
        self._timings: dict[Cell, deque[tuple[float, int, int]]] = {}
        # octave, timings, logarithm
        self._residuals: dict[SpecConfig, list[tuple[int, int, float]]] = {}

    @property
    def switch_ms(self) -> float:
        return self.fitted.switch_ms

    @property
    def catch_up_ms(self) -> float:
        return self.fitted.catch_up_ms

    def add(self, config: SpecConfig, batch: int, context_tokens: int, ms: float) -> None:
        """Add the duration of one round, or the mean of several alike."""
        if not (ms > 0 and math.isfinite(ms)):
            raise ValueError(f"a round of {ms} ms, expected more than 0")
        self._keep(config, batch, context_tokens, math.log(ms))

    def _keep(self, config: SpecConfig, batch: int, context_tokens: int, log_ms: float) -> None:
        kept = self._timings.setdefault((config, octave(batch)), deque(maxlen=KEPT))
        kept.append((log_ms, batch, context_tokens))

    def timings(self, config: SpecConfig, batch: int) -> int:
        """Return how many timings of `config` are kept near this batch size."""
        return len(self._timings.get((config, octave(batch)), ()))

    def near(self, config: SpecConfig, batch: int) -> bool:
        """Return whether `config` was timed at a batch size within a factor of about two of this one."""
        at = octave(batch)
        return any(known == config and abs(other - at) <= 1 for known, other in self._timings)

    def fit(self) -> None:
        """Fit ridge, drafter pass and corrections to the timings. Takes about two milliseconds."""
        self._residuals = {}
        if not self._timings:
            self.fitted = self.prior
            return
        cells = list(self._timings)
        configs = [config for config, _ in cells]
        counts = np.array([len(kept) for kept in self._timings.values()])
        batch = np.array([np.mean([b for _, b, _ in kept]) for kept in self._timings.values()])
        context = np.array([np.mean([c for _, _, c in kept]) for kept in self._timings.values()])
        prior = self.prior
        work = Work.of(configs, batch, context)
        token_ms = prior.token_ms / RIDGES[:, None, None]
        modelled = np.log(prior.ms(work, token_ms, prior.drafter * DRAFTERS[None, :, None]))
        weight = counts / SPREAD**2
        penalty = (np.log(RIDGES)[:, None] / LIKELY_RIDGE) ** 2 + (
            np.log(DRAFTERS) / LIKELY_DRAFTER
        ) ** 2
        self.fitted = prior
        # the second time, rounds of one cell with other batch sizes are compared as fitted
        for _ in range(2):
            observed = self._medians() + np.log(self.fitted.ms(work))
            scale = (weight * (observed - modelled)).sum(-1, keepdims=True) / weight.sum()
            residual = observed - modelled - scale
            badness = (weight * residual**2).sum(-1) + penalty
            i, j = np.unravel_index(int(badness.argmin()), badness.shape)
            self.fitted = replace(
                prior,
                token_ms=prior.token_ms / float(RIDGES[i]),
                drafter=prior.drafter * float(DRAFTERS[j]),
            )
        for (config, at), count, rest in zip(
            cells, counts.tolist(), residual[i, j].tolist(), strict=True
        ):
            self._residuals.setdefault(config, []).append((at, count, rest))

    def _medians(self) -> np.ndarray:
        """Return, for each cell, the median logarithm of ms per pass of the fitted roofline."""
        found = []
        for (config, _), kept in self._timings.items():
            log_ms, batches, contexts = np.array(kept).T
            found.append(
                np.median(log_ms - np.log(self.fitted.grid([config], batches, contexts)[0]))
            )
        return np.array(found)

    def grid(
        self, configs: Sequence[SpecConfig], batch: np.ndarray, context: np.ndarray
    ) -> np.ndarray:
        """Compute the costs of a round in passes, `[configs, *broadcast(batch, context)]`."""
        passes = self.fitted.grid(configs, batch, context)
        octaves = np.broadcast_to(np.round(np.log2(np.asarray(batch, float))), passes.shape[1:])
        for i, config in enumerate(configs):
            if known := self._residuals.get(config):
                at, counts, rest = (np.array(column, float) for column in zip(*known, strict=True))
                near = counts * 4.0 ** -np.abs(octaves[..., None] - at)
                passes[i] *= np.exp((near * rest).sum(-1) / (near.sum(-1) + SHRINK))
        return passes

    def take_up(self, former: LearntCost) -> None:
        """Continue with the timings of another rule's cost, in place of the own ones."""
        self._timings = former._timings
        self.fit()

    def to_json(self) -> dict[str, Any]:
        cells = [
            [
                [config.num_steps, config.topk, config.num_draft_tokens],
                [list(timing) for timing in kept],
            ]
            for (config, _), kept in self._timings.items()
        ]
        return {"roofline": self.prior.to_json(), "cells": cells}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> LearntCost:
        """Restore what `to_json` returned. Raises ValueError."""
        try:
            cost = cls(Roofline.from_json(data["roofline"]))
            for config, kept in data["cells"]:
                for log_ms, batch, context in kept:
                    if not math.isfinite(log_ms):
                        raise ValueError(f"{log_ms} as the logarithm of ms")
                    cost._keep(SpecConfig(*config), int(batch), int(context), float(log_ms))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"learnt cost: expected a roofline and cells of timings ({error!r})"
            ) from None
        cost.fit()
        return cost


def octave(batch: int) -> int:
    """Return the cell of a batch size: the nearest power of two."""
    return round(math.log2(batch))


class PlainRounds:
    """Decides when a rule that learns costs runs a plain round to time it.

    The first rounds near a batch size are free. Later ones lose at most PLAIN_SHARE of the time, so plain decoding is
    timed often where it is nearly as good, and rarely where drafting pays.
    """

    def __init__(self) -> None:
        # octave of the batch -> plain rounds so far, the round of the last
        self._runs: dict[int, tuple[int, int]] = {}

    @classmethod
    def of(cls, cost: object, rounds: int) -> PlainRounds:
        """Count the timings of plain rounds that a `LearntCost` holds, so that they are not run again."""
        found = cls()
        if isinstance(cost, LearntCost):
            for near in range(17):
                if known := cost.timings(OFF, 2**near):
                    found._runs[near] = (known, rounds)
        return found

    def due(self, batch: int, rounds: int, drafts: bool, loses: float) -> bool:
        """Return whether round number `rounds` must be plain, and count it if so.

        drafts  whether the present configuration drafts
        loses   share of a round that a plain round loses to it
        """
        near = octave(batch)
        runs, last = self._runs.get(near, (0, rounds))
        free = NEAR_PLAIN if self._runs.keys() - {near} else FIRST_PLAIN
        if drafts and runs >= free and (rounds - last) * PLAIN_SHARE < max(loses, LEAST_LOSS):
            return False
        self._runs[near] = (runs + 1, rounds)
        return True
