"""The speculation rule: before every decode round it chooses how many drafts are made, or none.

It takes what delivers the most tokens per ms:

    tokens of a round   from the drafts that were accepted (`acceptance`)
    ms of a round       from the model's sizes, corrected by the engine's own rounds (`round_times`)

One candidate is the incumbent, which runs. Another one replaces it when the rounds that were lost by staying repay the
change. If another one could be better within the errors of the estimates, a few of its rounds are run to measure it
(`trials`). Plain decoding (`OFF`) can be a candidate. Once rounds are timed, it is the first to be tried.

An engine calls `choose` before each round, and `observe` and `timed` after it. Engines that verify a part of the drafts
also call `lengths` or `drafts` in between. The callers are, in SGLang, `decisions.py` and `controller.py` of
`rollout/sglang/scheduler/`; in the embedded engine `choice.py`, `engine.py` and `rounds.py` of `rollout/embedded/`.

Every tensor-parallel rank has a rule of its own, and all must choose the same, because they run one round together. So
the rule reads no clock and draws no random numbers: it depends only on its calls and their arguments, which must be the
same on all ranks.

The trainer sends a new rule as JSON between rollouts (`learning.py`, `from_json`). The rule follows ReSpec, section
5.2, which profiles before training only; this rule goes on measuring.
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

# How much the incumbent must have lost before another candidate replaces it, in units of its rounds.
PATIENCE = 0.08
CATCH_UP = 0.1  # from OFF, this share of the time of catching up is added to PATIENCE
# standard deviations of the estimated time that are taken off the gain of a deeper candidate
CAUTION = 0.2
# largest share of a round's time that catching up may take if the round is to be timed
MOST_CATCH_UP = 0.25
PUSH = 10  # a push makes acceptance as uncertain as this number of rounds without drafts
REPLAN = 32  # rounds after which the thresholds of a ragged rule are computed again


@dataclass
class _Tally:
    """Counts since the last report."""

    rounds: Counter[SpecConfig] = field(default_factory=Counter)
    switches: int = 0
    trial_rounds: int = 0


class SpecRule:
    """Chooses the configuration of each round.

    candidates  configurations that the engine can run; sorted, so OFF comes first and the deepest last. Lists and
                indices in this file and in `trials.py` follow this order
    cost        of rounds, by the model's sizes
    acceptance  the estimate of accepted drafts, of at least the deepest candidate's depth; the rule changes it. None: a
                prior
    forecast    acceptance a_1, a_2, ... that the trainer predicts for new weights. While `OFF` is the incumbent, a
                configuration that pays off by it is tried without waiting, once
    ragged      whether a round verifies only the drafts of each request that pay (`ragged.py`). The engine then calls
                `lengths` or `drafts` between drafting and verifying
    catch_up    after `choose`: the number of requests that draft in the round, 0 under OFF. They are those of which the
                drafter missed the fewest tokens. Before the round, it must read what it missed of them

    It has no lock: calls must not overlap.
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
        self._plans: list[Plan] = []  # of each candidate; empty unless ragged
        self._chosen = 0  # index of the candidate of the round just chosen
        # batch and context that the plans are for, rounded logarithms (`_plan`)
        self._planned = (-1, -1)
        self._since_plan = 0  # rounds since these plans
        self.cost = cost
        self.catch_up = 0
        self.times = RoundTimes(cost, self.candidates)
        self.trials = Trials(self.candidates, self.acceptance, self.times, forecast)
        self._off = self.candidates.index(OFF) if OFF in self.candidates else -1
        self.limit({})
        self._incumbent = -1  # -1: before the first round
        # rounds of the incumbent, lost by not running each candidate
        self._lost = [0.0] * len(self.candidates)
        self._batch = 0  # of the last round
        # whether the drafter reads what it missed in the round just chosen
        self._catching_up = False
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

        batch   at least 1
        missed  takes n; returns how many tokens the drafter has not read of the n requests that missed least. The
                engine must let it read those of `catch_up` requests before the round
        apart   whether a part of the requests can catch up and draft while the others do not; if not, all of them do

        It changes state (trials, losses, the tally): call it once for each round. `lengths`, `drafts` and `catch_up`
        are of the newest call.
        """
        self.trials.unseen += 1

        def catch_up_ms(requests: int) -> float:
            return self.cost.catch_up_ms * missed(requests)

        # The order matters: plans change the costs that `ms` returns, and a trial is weighed against the new incumbent.
        if self.selection is not None:
            self._plan(self.selection, batch, context_tokens)
        ms = self.times.ms(batch, context_tokens)
        rates = self._rates(batch, ms)
        self._update_incumbent(batch, ms, rates, catch_up_ms)
        now = Situation(batch, self._incumbent, ms, rates, catch_up_ms, apart)
        chosen = self.trials.next(now)
        is_trial = chosen >= 0
        # In a trial out of OFF only a few requests may draft, because catching up takes time for each.
        drafting = min(self.trials.requests, batch) if is_trial else batch
        self._chosen = chosen if is_trial else self._incumbent
        config = self.candidates[self._chosen]
        self._catching_up = not config.off and missed(drafting) > 0
        self.catch_up = 0 if config.off else drafting
        self._tally.rounds[config] += 1
        self._tally.trial_rounds += is_trial
        return config

    def lengths(self, logq: np.ndarray) -> np.ndarray:
        """Return how many drafts [B] of each request to verify, by the drafter's log-probabilities [B, k] of them.

        Only for a ragged rule, in the round just chosen. Pass the same array to `observe`: it saves time there.
        """
        assert self.selection is not None
        return self.selection.lengths(logq, self._plans[self._chosen].threshold)

    def drafts(self, batch: int) -> int:
        """Return how many drafts of the whole batch to verify in the round just chosen.

        In place of `lengths`, for an engine that chooses on its device which ones: `RaggedRound` in
        `rollout/sglang/scheduler/ragged.py`. Requests that explore verify all their drafts.
        """
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

        All tensor-parallel ranks must pass the same numbers. A round without drafts need not be passed.

        accepted  [B] drafts of each request that drafted
        verified  [B] drafts of each request that were verified; only read with `logq`
        logq      [C, k], C <= B: log-probabilities of the drafts among which the round chose; None: it verified all.
                  Requests from the C-th on verified all

        Returns the histogram for `RoundStats.if_all`: how many requests would accept 0, 1, ... drafts if all were
        verified. () from a rule that is not ragged.
        """
        if config.num_steps == 0 or len(accepted) == 0:
            return ()
        histogram: Sequence[float]
        # The round can have been launched under the rule before this one, with other candidates or another depth.
        if self.selection is not None and logq is not None and config in self.candidates:
            histogram = self.selection.observe(logq, np.asarray(verified), np.asarray(accepted))
        else:
            histogram = histogram_of(config.num_steps, accepted)
        changed = self.trials.changed
        if changed > CHANGE:
            # n drafts give a rate with a variance of at most 0.25 / n. The rate may have changed by `changed` since the
            # older observations, so they weigh no more drafts than have that error.
            self.acceptance.limit(0.25 / changed**2)
        # Observations fade by rounds: by all since the last call, also those that drafted nothing.
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
        """Learn the duration of a round without a prefill. All tensor-parallel ranks must pass the same numbers.

        Rounds must be passed in the order in which they ran: of two rounds in a row one counts (`RoundTimes.timed`).

        drafts        drafts that it verified of a request, on average; None: all. Ignored unless the rule is ragged
        caught_up_ms  ms of the round in which the drafter read what it had missed; None: not measured. The round does
                      not count if the drafter caught up in a time that is unknown or a large part of `ms`. With None
                      the round must be the one just chosen: whether the drafter caught up is known of that one only
        """
        can_run = config in self.candidates and batch <= self._most_batch.get(config, batch)
        if not can_run:
            return
        decoding: float | None = ms
        if caught_up_ms is None and self._catching_up:
            decoding = None
        elif caught_up_ms is not None:
            decoding = ms - caught_up_ms if caught_up_ms < MOST_CATCH_UP * ms else None
        verified = drafts if self.selection else None
        # also with None: `RoundTimes` must know that another round came between
        self.times.timed(config, batch, context_tokens, decoding, verified)

    def limit(self, most_batch: Mapping[SpecConfig, int]) -> None:
        """Do not run these configurations above these batch sizes, for which they have no CUDA graphs.

        A configuration that is missing has no limit. Each call replaces all earlier limits. The engine must leave one
        that may run at every batch size: above all limits the shallowest one would run, without a graph.
        """
        self._most_batch = most_batch  # by configuration, for `inherit` and `timed`
        self._most = [most_batch.get(config, math.inf) for config in self.candidates]

    def inherit(self, former: SpecRule) -> None:
        """Go on from the rule before, after a push: limits, times of rounds, the incumbent, and what trials may lose.

        Call it before the first `choose`. Acceptance is that of the new weights, and not taken over. Trials come
        earlier, because old ones say less. If cost or candidates differ, only the limits are taken over.
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
        """Return the choices since the last report, and the state, as JSON. The counts then begin again.

        This is an engine's `spec_rule_report`. `learning.py` reads "rounds", "switches", "probes" (rounds of trials)
        and "learnt", and sends "learnt" back to `from_json`.
        """
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
        """Compute the threshold of each candidate anew, if the last plans are old or for another batch or context.

        "Another" is measured on rounded logarithms: of batches in quarters of log2, of mean contexts in whole ones.
        """
        place = round(4 * math.log2(batch)), round(math.log2(max(context_tokens / batch, 1.0)))
        self._since_plan += 1
        if place == self._planned and self._since_plan < REPLAN:
            return
        self._planned = place
        self._since_plan = 0
        self._plans = []
        for i, config in enumerate(self.candidates):
            ms = partial(self.times.ragged_ms, i, batch, context_tokens)
            self._plans.append(selection.plan(config.num_steps, ms))
        # From now on `times.ms` is of rounds that verify these numbers of drafts.
        self.times.set_verified([plan.verified for plan in self._plans])

    def _tokens(self, candidate: int) -> float:
        """Return the tokens that a request gets in a round of a candidate, on average."""
        tokens = self.acceptance.totals[self.candidates[candidate].num_steps]
        return tokens * self._plans[candidate].share if self._plans else tokens

    def _rates(self, batch: int, ms: Sequence[float]) -> list[float]:
        """Return tokens per ms of one request under each candidate; 0 where it must not run (`limit`)."""
        rates = []
        for i, most in enumerate(self._most):
            rates.append(self._tokens(i) / ms[i] if batch <= most else 0.0)
        return rates

    def _update_incumbent(
        self,
        batch: int,
        ms: Sequence[float],
        rates: Sequence[float],
        catch_up_ms: Callable[[int], float],
    ) -> None:
        """Add up what each candidate would have gained, and make the best one the incumbent if that is enough.

        ms, rates    of each candidate in the round to come; a rate of 0: it must not run
        catch_up_ms  takes n; returns the ms in which the drafter reads what the n requests missed that missed least
        """
        best = rates.index(max(rates))  # of equal rates the first, which drafts least
        # The batch shrinks within a rollout, so one of more than twice the size is of a new rollout.
        new_rollout = batch > 2 * self._batch
        self._batch = batch
        incumbent = self._incumbent
        if incumbent < 0:
            self._incumbent = best
            return
        if rates[incumbent] == 0:  # the batch is above its limit
            self._make_incumbent(best)
            return
        reading = catch_up_ms(batch) / ms[incumbent]  # in rounds of the incumbent
        threshold = PATIENCE
        if incumbent == self._off:
            threshold += CATCH_UP * reading
        errors = self.times.errors(incumbent)
        for i, rate in enumerate(rates):
            if rate == 0:
                continue
            gain = math.log(rate / rates[incumbent])
            if self.candidates[i].num_steps > self.candidates[incumbent].num_steps:
                gain -= CAUTION * errors[i]
            # At most half the threshold: one round alone must not change the incumbent.
            counted = min(max(gain, -threshold / 2), threshold / 2)
            # The two cases below may change it at once.
            if i == self._off and i != incumbent and gain >= 0 and reading > 0:
                # New requests: the drafter would first read their prompts, which OFF saves.
                counted = threshold + reading
            elif new_rollout and gain > 0:
                counted = gain + PATIENCE
            self._lost[i] = max(self._lost[i] + counted, 0.0)
        # Only the best one now: another candidate may have gained more over the last rounds.
        if best != incumbent and self._lost[best] > threshold:
            self._make_incumbent(best)

    def _make_incumbent(self, new: int) -> None:
        """Make candidate `new` the incumbent. Losses and the wait for trials were relative to the one before."""
        self._incumbent = new
        self._lost = [0.0] * len(self.candidates)
        self.trials.restart()
        self._tally.switches += 1

    # State

    def _learnt(self) -> dict[str, Any]:
        """Return what the trainer keeps and sends with the next rule, for `_restore`: see `Learning.learnt`.

        The times of rounds, what trials may lose, and, if ragged, how likely drafts are accepted by log q.
        """
        learnt: dict[str, Any] = {
            "times": self.times.to_json(),
            "trials": self.trials.to_json(),
        }
        if self.selection is not None:
            learnt["chances"] = self.selection.counts.tolist()
        return learnt

    def to_json(self) -> dict[str, Any]:
        """Return settings and learnt state, for `from_json` of a rule elsewhere. The incumbent is not in it."""
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
        """Make a rule from JSON: `Learning.rule` of the trainer, with the engine's candidates.

        Required: `candidates`, a list of numbers of drafts and "off", and `roofline`. Optional: `acceptance`,
        `forecast`, `ragged`, `chances` (`Prediction.chances`: drafts by log q that the trainer predicts), and `learnt`
        (as `report` returns it). `learnt` is ignored if it is of another cost or of other candidates. A new field must
        be added to `_KEYS`.

        Raises ValueError; TypeError or KeyError for a `roofline` or an `acceptance` with unknown or missing fields.
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
            rule.selection.add_predicted(counts_of(data["chances"]))
        if data.get("learnt") is not None:
            rule._restore(data["learnt"])
        return rule

    def _restore(self, learnt: Mapping[str, Any]) -> None:
        """Set what `_learnt` returned, unless cost or candidates differ. Raises ValueError for missing parts."""
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


# Fields of `from_json`. "sharpness" of `Learning.rule` is not among them: engines take it out before.
_KEYS = {"candidates", "acceptance", "chances", "forecast", "learnt", "ragged", "roofline"}
