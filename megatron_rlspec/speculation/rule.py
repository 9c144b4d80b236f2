"""The speculation rule: before every decode round it chooses how many drafts are made, or none.

It takes what delivers the most tokens per ms:

    tokens of a round   from the drafts that were accepted (`acceptance`)
    ms of a round       from the model's sizes, corrected by the engine's own rounds (`round_times`)

One candidate is the incumbent. Another one replaces it when the rounds lost by staying repay the change. Where one of
the others could be better than is known, a few of its rounds are run to find out (`trials`). Plain decoding (`OFF`) is
a candidate, and the first to be tried.

An engine calls `choose` before each round, and `observe` and `timed` after it. The rule reads no clock. So ranks that
see the same rounds and are told the same durations choose the same. It follows ReSpec, section 5.2, which profiles
before training only; the rule goes on measuring.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from megatron_rlspec.speculation.acceptance import Acceptance, histogram_of
from megatron_rlspec.speculation.ragged import EXPLORE, Plan, Selection, counts_of
from megatron_rlspec.speculation.roofline import Roofline
from megatron_rlspec.speculation.round_times import RoundTimes
from megatron_rlspec.speculation.trials import CHANGE, Situation, Trials
from megatron_rlspec.types import OFF, SpecConfig

PATIENCE = 0.08  # rounds that staying must have lost, beyond what the change takes
CATCH_UP = 0.1  # part of the time of catching up that staying off must have lost
CAUTION = 0.2  # errors by which more drafts must be ahead
MOST_CATCH_UP = 0.25  # part of a round that can be measured and taken off
PUSH = 10  # rounds without drafts for which a push of weights counts
REPLAN = 32  # rounds for which the thresholds of a ragged rule stay


@dataclass
class _Tally:
    """Counts since the last report."""

    rounds: Counter[SpecConfig] = field(default_factory=Counter)
    switches: int = 0
    trial_rounds: int = 0


class SpecRule:
    """Chooses the configuration of each round.

    candidates  configurations that the engine can run
    cost        of rounds, by the model's sizes
    acceptance  what is known of accepted drafts
    forecast    acceptance a_1, a_2, ... that the trainer predicts for new weights. A configuration that pays off by it
                is tried at once, and only once
    ragged      whether rounds verify of each request the drafts worth it (`ragged.py`). The engine then calls `lengths`
                or `drafts` between drafting and verifying
    catch_up    after `choose`: the number of requests for which the drafter must read before the round what it has
                missed; they are those that missed fewest tokens
    """

    def __init__(
        self,
        candidates: Sequence[SpecConfig],
        cost: Roofline,
        *,
        acceptance: Acceptance | None = None,
        forecast: Sequence[float] | None = None,
        ragged: bool = False,
    ) -> None:
        self.candidates = tuple(sorted(set(candidates)))
        deepest = max(config.num_steps for config in self.candidates)
        self.acceptance = acceptance or Acceptance(max(deepest, 1))
        if self.acceptance.depth < deepest:
            raise ValueError(
                f"acceptance holds {self.acceptance.depth} depths, but a candidate drafts {deepest}"
            )
        self.selection = Selection(max(deepest, 1)) if ragged else None
        self._plans: list[Plan] = []  # of each candidate
        self._chosen = 0  # the candidate of the round just chosen
        self._planned = (-1, -1)  # batch and context that the plans are for, as octaves
        self._since_plan = 0
        self.cost = cost
        self.catch_up = 0
        self.times = RoundTimes(cost, self.candidates)
        self.trials = Trials(self.candidates, self.acceptance, self.times, forecast)
        self._off = self.candidates.index(OFF) if OFF in self.candidates else -1
        self.limit({})
        self._incumbent = -1
        self._lost = [0.0] * len(self.candidates)  # rounds, by not running each candidate
        self._batch = 0  # of the last round
        self._catching_up = False  # in the round just chosen
        self._tally = _Tally()

    # What an engine calls

    def choose(
        self,
        batch: int,
        context_tokens: int,
        missed: Callable[[int], int],
        *,
        apart: bool = True,
    ) -> SpecConfig:
        """Return the configuration of the next round, of `batch` requests with `context_tokens` tokens together.

        missed  returns how many tokens the drafter has not read of the n requests that missed least. The engine must
                let it read those of `catch_up` requests before the round
        apart   whether a part of the requests can catch up; if not, all of them do when a round drafts
        """
        self.trials.unseen += 1

        def catch_up_ms(requests: int) -> float:
            return self.cost.catch_up_ms * missed(requests)

        if self.selection is not None:
            self._plan(self.selection, batch, context_tokens)
        ms = self.times.ms(batch, context_tokens)
        rates = self._rates(batch, ms)
        self._follow(batch, ms, rates, catch_up_ms)
        now = Situation(batch, self._incumbent, ms, rates, catch_up_ms, apart)
        chosen = self.trials.next(now)
        tries = chosen >= 0
        drafting = min(self.trials.requests, batch) if tries else batch
        self._chosen = chosen if tries else self._incumbent
        config = self.candidates[self._chosen]
        self._catching_up = not config.off and missed(drafting) > 0
        self.catch_up = 0 if config.off else drafting
        self._tally.rounds[config] += 1
        self._tally.trial_rounds += tries
        return config

    def lengths(self, logq: np.ndarray) -> np.ndarray:
        """Return how many drafts [B] of each request to verify, by the drafter's log-probabilities [B, k] of them."""
        assert self.selection is not None
        return self.selection.lengths(logq, self._plans[self._chosen].threshold)

    def drafts(self, batch: int) -> int:
        """Return how many drafts of the batch to verify in the round just chosen, for an engine that chooses them."""
        assert self.selection is not None
        steps = self.candidates[self._chosen].num_steps
        exploring = len(range(self.selection.exploring(), batch, EXPLORE))
        usual = round(self._plans[self._chosen].verified * (batch - exploring))
        return usual + exploring * steps

    def observe(
        self,
        config: SpecConfig,
        accepted: Sequence[int] | np.ndarray,
        verified: Sequence[int] | np.ndarray | None = None,
        logq: np.ndarray | None = None,
    ) -> Sequence[float]:
        """Learn how many drafts each request accepted in a round of `config`; it may come some rounds late.

        verified  drafts of each request that were verified
        logq      log-probabilities of the drafts among which the round chose [C, k]; None: it verified all. Requests
                  behind the first C verified all

        Returns how many requests accept 0, 1, ... drafts if all are verified; () from a rule that is not ragged.
        """
        if config.num_steps == 0 or len(accepted) == 0:
            return ()
        histogram: Sequence[float]
        # A round can have been launched under the rule before.
        if self.selection is not None and logq is not None and config in self.candidates:
            histogram = self.selection.observe(logq, np.asarray(verified), np.asarray(accepted))
        else:
            histogram = histogram_of(config.num_steps, accepted)
        changed = self.trials.changed
        if changed > CHANGE:
            # Older observations say no more than this.
            self.acceptance.limit(0.25 / changed**2)
        rounds = max(self.trials.unseen, 1)
        self.acceptance.observe_histogram(config.num_steps, histogram, rounds)
        self.trials.unseen = 0
        return histogram if self.selection else ()

    def timed(
        self,
        config: SpecConfig,
        batch: int,
        context_tokens: int,
        ms: float,
        caught_up_ms: float | None = None,
        drafts: float | None = None,
    ) -> None:
        """Learn the duration of a round without a prefill. All tensor-parallel ranks must pass the same.

        drafts        that it verified of a request, on average; None: all. Counts if the rule is ragged
        caught_up_ms  ms of the round in which the drafter read what it had missed; None: not measured. The round does
                      not count if this time is unknown or a large part of it
        """
        runs = config in self.candidates and batch <= self._most_batch.get(config, batch)
        if not runs:
            return
        decoding: float | None = ms
        if caught_up_ms is None and self._catching_up:
            decoding = None
        elif caught_up_ms is not None:
            decoding = ms - caught_up_ms if caught_up_ms < MOST_CATCH_UP * ms else None
        chosen = drafts if self.selection else None
        self.times.timed(config, batch, context_tokens, decoding, chosen)

    def limit(self, most_batch: Mapping[SpecConfig, int]) -> None:
        """Do not run these configurations above these batches, as by their captured graphs."""
        self._most_batch = most_batch
        self._most = [most_batch.get(config, math.inf) for config in self.candidates]

    def inherit(self, former: SpecRule) -> None:
        """Go on from the rule before, after a push: limits, times of rounds, and what trials may lose.

        Acceptance is that of the new weights, and not taken over. Trials come earlier, because old ones say less.
        """
        self.limit(former._most_batch)
        if not self.times.restore(former.times.to_json()):
            return
        if self.selection is not None and former.selection is not None:
            self.selection.inherit(former.selection)
        self.trials.inherit(former.trials, PUSH)
        self._incumbent = former._incumbent
        self._batch = former._batch

    def report(self) -> dict[str, Any]:
        """Return the choices since the last report and the state, as JSON."""
        tally, self._tally = self._tally, _Tally()
        return {
            "rounds": {str(config): n for config, n in sorted(tally.rounds.items())},
            "switches": tally.switches,
            "probes": tally.trial_rounds,
            "acceptance": [round(rate, 4) for rate in self.acceptance.rates],
            "learnt": self._learnt(),
        }

    # Decisions

    def _plan(self, selection: Selection, batch: int, context_tokens: int) -> None:
        """Find the threshold of each candidate, if the last plans are old or for another batch."""
        place = round(4 * math.log2(batch)), round(math.log2(max(context_tokens / batch, 1.0)))
        self._since_plan += 1
        if place == self._planned and self._since_plan < REPLAN:
            return
        self._planned = place
        self._since_plan = 0
        self._plans = []
        for i, config in enumerate(self.candidates):
            ms = partial(self.times.uneven, i, batch, context_tokens)
            self._plans.append(selection.plan(config.num_steps, ms))
        self.times.verify([plan.verified for plan in self._plans])

    def _tokens(self, candidate: int) -> float:
        """Return the tokens that a request gets in a round of a candidate."""
        tokens = self.acceptance.totals[self.candidates[candidate].num_steps]
        return tokens * self._plans[candidate].share if self._plans else tokens

    def _rates(self, batch: int, ms: Sequence[float]) -> list[float]:
        """Return tokens per ms of one request under each candidate; 0 where it must not run."""
        rates = []
        for i, most in enumerate(self._most):
            rates.append(self._tokens(i) / ms[i] if batch <= most else 0.0)
        return rates

    def _follow(
        self,
        batch: int,
        ms: Sequence[float],
        rates: Sequence[float],
        catch_up_ms: Callable[[int], float],
    ) -> None:
        """Add up what each candidate would have gained, and make the best one the incumbent if that is enough."""
        best = rates.index(max(rates))
        new_rollout = batch > 2 * self._batch
        self._batch = batch
        now = self._incumbent
        if now < 0:
            self._incumbent = best
            return
        if rates[now] == 0:
            self._change(best)
            return
        reading = catch_up_ms(batch) / ms[now]
        threshold = PATIENCE
        if now == self._off:
            threshold += CATCH_UP * reading
        errors = self.times.errors(now)
        for i, rate in enumerate(rates):
            if rate == 0:
                continue
            gain = math.log(rate / rates[now])
            if self.candidates[i].num_steps > self.candidates[now].num_steps:
                gain -= CAUTION * errors[i]
            # one round alone is not enough
            counted = min(max(gain, -threshold / 2), threshold / 2)
            if i == self._off and i != now and gain >= 0 and reading > 0:
                # New requests: the drafter would first read their prompts.
                counted = threshold + reading
            elif new_rollout and gain > 0:
                counted = gain + PATIENCE
            self._lost[i] = max(self._lost[i] + counted, 0.0)
        if best != now and self._lost[best] > threshold:
            self._change(best)

    def _change(self, new: int) -> None:
        self._incumbent = new
        self._lost = [0.0] * len(self.candidates)
        self.trials.restart()
        self._tally.switches += 1

    # State

    def _learnt(self) -> dict[str, Any]:
        """Return what outlives an engine: the times of rounds, what trials may lose, and how likely drafts are."""
        learnt: dict[str, Any] = {
            "times": self.times.to_json(),
            "trials": self.trials.to_json(),
        }
        if self.selection is not None:
            learnt["chances"] = self.selection.counts.tolist()
        return learnt

    def to_json(self) -> dict[str, Any]:
        """Return settings and learnt state, for `from_json`."""
        return {
            "candidates": [config.to_json() for config in self.candidates],
            "roofline": self.cost.to_json(),
            "acceptance": self.acceptance.to_json(),
            "forecast": self.trials.forecast,
            "ragged": self.selection is not None,
            "learnt": self._learnt(),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> SpecRule:
        """Make a rule from JSON. Raises ValueError.

        Required: `candidates`, a list of numbers of drafts and "off", and `roofline`. Optional:
        `acceptance`, `forecast`, `ragged`, `chances` (drafts by log q that the trainer predicts), and
        `learnt` (as `report` returns it), which counts if it is of the same cost and candidates.
        """
        unknown = set(data) - _KEYS
        if unknown:
            expected = ", ".join(sorted(_KEYS))
            raise ValueError(
                f"speculation rule: unknown field {min(unknown)!r}, expected among {expected}"
            )
        for name in ("candidates", "roofline"):
            if not data.get(name):
                raise ValueError(f"speculation rule: no field {name!r}, or an empty one")
        acceptance = data.get("acceptance")
        forecast = data.get("forecast")
        if forecast is not None and not _are_rates(forecast):
            raise ValueError(
                f"speculation rule: forecast={forecast!r}: expected a list of numbers from 0 to 1, at least one"
            )
        rule = cls(
            [SpecConfig.from_json(value) for value in data["candidates"]],
            Roofline.from_json(data["roofline"]),
            acceptance=None if acceptance is None else Acceptance.from_json(acceptance),
            forecast=forecast,
            ragged=data.get("ragged", False),
        )
        if rule.selection is not None and data.get("chances") is not None:
            rule.selection.foresee(counts_of(data["chances"]))
        if data.get("learnt") is not None:
            rule._restore(data["learnt"])
        return rule

    def _restore(self, learnt: Mapping[str, Any]) -> None:
        try:
            if not self.times.restore(learnt["times"]):
                return
            self.trials.restore(learnt["trials"])
            if self.selection is not None and "chances" in learnt:
                self.selection.restore(learnt["chances"])
        except (KeyError, TypeError) as error:
            raise ValueError(f"speculation rule: learnt state without {error}") from None


def _are_rates(value: Any) -> bool:
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(rate, int | float) and 0 <= rate <= 1 for rate in value)


_KEYS = {"candidates", "acceptance", "chances", "forecast", "learnt", "ragged", "roofline"}
