"""The online rule of speculation: it chooses the speculative configuration of the next decode round.

An engine calls `choose` before each round and `observe` after it. The rule uses a table of costs and the accepted
drafts. It reads no clock, so all tensor-parallel ranks, which see the same rounds, choose the same. It follows ReSpec,
section 5.2 (Solver and Scheduler), with three additions: it estimates acceptance during the rollout, it bounds the cost
of probes, and without a table it learns costs from durations that all ranks are told (`timed`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from megatron_rlspec.speculation.acceptance import Acceptance, histogram_of
from megatron_rlspec.speculation.cost_table import CostTable
from megatron_rlspec.speculation.learnt_cost import LearntCost, PlainRounds
from megatron_rlspec.speculation.own_rounds import OwnRounds, Place, TimingPlan, place
from megatron_rlspec.speculation.probing import MARGIN, PROBE_SHARE, CatchUp, ProbeBudget, Prober
from megatron_rlspec.speculation.roofline import Roofline
from megatron_rlspec.types import OFF, SpecConfig, SpecSchedule

PATIENCE = 8  # rounds after which a gain of exactly MARGIN leads to a switch
# share of the one-time catch-up cost that staying off must lose before drafting starts
CATCH_UP_WEIGHT = 0.1
# rounds of drafting that must repay catching up by a corrected table; else staying off must lose it all
REPAID = 1000
OCTAVES = tuple(2**i for i in range(17))  # mean contexts at which a roofline is tabulated
BEYOND = 1e6  # factor of the cost of a configuration at a batch that it must not run at

Cost = CostTable | Roofline | LearntCost


class _RoundCosts:
    """Costs of one round of every candidate, tabulated by batch size and mean context length."""

    def __init__(
        self, candidates: Sequence[SpecConfig], cost: Cost, most_batch: Mapping[SpecConfig, int]
    ) -> None:
        self.candidates = candidates
        self.cost = cost
        self.most = [most_batch.get(config) for config in candidates]
        measured = cost.lengths() if isinstance(cost, CostTable) else OCTAVES
        self.lengths = sorted({1, *measured, OCTAVES[-1]})
        self.rows: dict[int, list[list[float]]] = {}  # batch -> [mean contexts][candidates] ms
        # its costs change often: only batches that run are tabulated
        if not isinstance(cost, LearntCost):
            self._tabulate(range(1, 257))

    def at(self, batch: int, context_tokens: int) -> list[float]:
        """Return ms of a round of each candidate, interpolated between two mean context lengths."""
        if batch not in self.rows:
            self._tabulate([batch])
        row = self.rows[batch]
        lengths = self.lengths
        length = context_tokens / batch
        column = min(max(bisect_right(lengths, length) - 1, 0), len(lengths) - 2)
        share = max((length - lengths[column]) / (lengths[column + 1] - lengths[column]), 0.0)
        return [
            low + share * (high - low)
            for low, high in zip(row[column], row[column + 1], strict=True)
        ]

    def _tabulate(self, batches: Sequence[int]) -> None:
        batch = np.array(batches)[:, None]
        ms = self.cost.grid(self.candidates, batch, batch * np.array(self.lengths)[None, :])
        for row, most in zip(ms, self.most, strict=True):
            row[np.asarray(batches) > (most or np.inf)] *= BEYOND
        for i, b in enumerate(batches):
            self.rows[b] = ms[:, i, :].T.tolist()


def _round_costs(
    candidates: tuple[SpecConfig, ...], cost: Cost, most: Mapping[SpecConfig, int]
) -> _RoundCosts:
    """Return the tabulated costs. Rules in one process share those of a cost that does not change."""
    if isinstance(cost, LearntCost):
        return _RoundCosts(candidates, cost, most)
    return _shared_costs(candidates, cost, tuple(sorted(most.items())))


@lru_cache(maxsize=8)
def _shared_costs(
    candidates: tuple[SpecConfig, ...],
    cost: CostTable | Roofline,
    most: tuple[tuple[SpecConfig, int], ...],
) -> _RoundCosts:
    return _RoundCosts(candidates, cost, dict(most))


@dataclass
class _Tally:
    """Counts since the last `report`. All ms, and `tokens`, are the rule's own predictions."""

    rounds: dict[SpecConfig, int] = field(default_factory=dict)
    switches: int = 0
    probes: int = 0
    ms: float = 0.0
    tokens: float = 0.0
    lost_ms: float = 0.0  # compared with the best candidate
    probe_ms: float = 0.0
    catch_up_ms: float = 0.0

    def ran(self, config: SpecConfig) -> None:
        """Count one round of `config`."""
        self.rounds[config] = self.rounds.get(config, 0) + 1


class SpecRule:
    """Chooses by a cost (a `CostTable`, a `Roofline` or a `LearntCost`), or by a given `SpecSchedule`.

    Switching. For every other candidate the rule keeps the loss of not running it, in rounds. Each round adds the share
    of the round that the current candidate loses to it, or subtracts the share that it gains. The rule switches to the
    best candidate when the loss exceeds PATIENCE * MARGIN rounds plus the table's `switch_ms`. It therefore takes a
    clear gain within three rounds, and a small gain after some time. Under a load that alternates it stays with the
    candidate that is better on average.

    Probing. A probe is a round of a deeper configuration, run to observe its acceptance (`probing.Prober`).

    Catching up. While `OFF` runs, the drafter does not run on new tokens. It must run on them before it drafts again.
    For a switch it runs on the missed tokens of all requests. For a probe it runs on those of a few requests, if the
    engine supports that (`missed` in `choose`). Where `OFF` is best and the drafter would have to run on the prompts of
    new requests, the rule switches to `OFF` at once.

    Learning costs. With a `LearntCost` the engine passes durations of rounds to `timed`. So that the cost of plain
    decoding is known, the rule runs a few `OFF` rounds at the start, near every new batch size, and from time to time.
    With a table and `correct` the durations correct the table (`own_rounds`).
    """

    def __init__(
        self,
        candidates: Sequence[SpecConfig],
        cost: Cost | None = None,
        schedule: SpecSchedule | None = None,
        *,
        start: SpecConfig | None = None,
        acceptance: Acceptance | None = None,
        probe_share: float = PROBE_SHARE,
        forecast: Sequence[float] | None = None,
        correct: bool = False,
    ) -> None:
        self.candidates = tuple(sorted(set(candidates)))
        if forecast is not None and not (forecast and all(0 <= rate <= 1 for rate in forecast)):
            raise ValueError(f"forecast={list(forecast)}: expected rates in [0, 1], at least one")
        _check(self.candidates, start, probe_share)
        self.probe_budget = ProbeBudget(probe_share)
        deepest = max(c.num_steps for c in self.candidates)
        self.acceptance = acceptance or Acceptance(max(deepest, 1))
        if self.acceptance.depth < deepest:
            raise ValueError(
                f"acceptance holds {self.acceptance.depth} depths, but a candidate drafts {deepest}"
            )
        self._current = self.candidates.index(start) if start is not None else -1
        # rounds lost to each candidate since the last switch
        self._lost = [0.0] * len(self.candidates)
        self._unseen = 0  # rounds since acceptance was last observed
        # requests that catch up before the round just chosen; those that missed least
        self.catch_up = 0
        self._gap = 0  # rounds since the drafter last ran
        self._prober = Prober(self.candidates, self.acceptance, self.probe_budget, forecast)
        self._rounds = 0
        self._plain = PlainRounds()
        self._timings = 0
        self._next_fit = 2  # timings
        self._timed: SpecConfig | None = None  # the configuration of the last timing
        self._most_batch: Mapping[SpecConfig, int] = {}
        self.correct = correct  # a table, by the durations of own rounds
        self._own: OwnRounds | None = None
        self._chosen = OFF  # in the last round
        # what the last change to it took: switching and catching up
        self._change_ms: dict[SpecConfig, float] = {}
        self._at: Place = (0, 0)  # `place` of the present round
        self._plan = TimingPlan()
        self.cost: Cost | None = None
        self.schedule: SpecSchedule | None = None
        self._tally = _Tally()
        self.update(cost=cost, schedule=schedule)

    def update(self, *, cost: Cost | None = None, schedule: SpecSchedule | None = None) -> None:
        """Set a new cost or a schedule, between two rounds. Raises ValueError unless there is one of both.

        A schedule chooses every round until the next cost is set.
        """
        if (cost is None) == (schedule is None):
            raise ValueError("speculation rule: expected either a cost or a schedule")
        if cost is not None:
            self.cost = cost
            self.schedule = None
            self.probe_budget.set_unit("ms" if isinstance(cost, CostTable) else "passes")
            self._costs = _round_costs(self.candidates, cost, self._most_batch)
            self._plain = PlainRounds.of(cost, self._rounds)
            self._own = (
                OwnRounds(cost, self.candidates)
                if self.correct and isinstance(cost, CostTable)
                else None
            )
        else:
            self.cost = None
            self.schedule = schedule
        self._tokens = _expected(self.acceptance, self.candidates)
        self.probe_budget.refresh()
        self._prober.stop()
        self._prober.timed = self._own.tried if self._own is not None else ()

    def limit(self, most_batch: Mapping[SpecConfig, int]) -> None:
        """Do not run these configurations above these batches, as by their captured graphs. Schedules ignore it."""
        self._most_batch = most_batch
        if self.cost is not None:
            self._costs = _round_costs(self.candidates, self.cost, most_batch)

    def inherit(self, former: SpecRule) -> None:
        """Take over the limits and the probe budget of `former`, the time of its next probe, and known durations.

        Acceptance is not taken over.
        """
        self.limit(former._most_batch)
        self.probe_budget.take_up(former.probe_budget, foretold=self._prober.forecast is not None)
        if (
            self._own is not None
            and former._own is not None
            and self.candidates == former.candidates
        ):
            self._own.take_up(former._own, former._costs.at, self._costs.at)
            self._plan = former._plan
        if (
            isinstance(self.cost, LearntCost)
            and isinstance(former.cost, LearntCost)
            and former._timings
        ):
            self.cost.take_up(former.cost)
            self._plain = former._plain
            self._rounds = former._rounds
            self._timings = former._timings
            self._next_fit = former._next_fit
            self._costs = _round_costs(self.candidates, self.cost, self._most_batch)

    @property
    def times(self) -> bool:
        """Return whether `timed` has an effect."""
        return self._own is not None or isinstance(self.cost, LearntCost)

    def timed(
        self,
        config: SpecConfig,
        batch: int,
        context_tokens: int,
        ms: float,
        caught_up_ms: float | None = None,
    ) -> None:
        """Learn the duration of a round, if `times`. All tensor-parallel ranks must pass the same.

        With a `LearntCost` the first drafting round after `OFF` counts only if no other is known: the drafter catches
        up in it. With a table such a round counts without what switching and catching up takes by the table.
        `caught_up_ms`: how long it caught up, where that was measured. Then this time counts in neither.
        """
        change_ms = self._change_ms.get(config, 0.0)
        if caught_up_ms is not None:
            ms -= caught_up_ms
            change_ms = self.cost.switch_ms if self.cost is not None else 0.0
        known = config in self.candidates  # an engine that cannot draft runs `OFF` in any case
        if self._own is not None and known and batch <= self._most_batch.get(config, batch):
            told = self._costs.at(batch, context_tokens)
            self._own.timed(config, place(batch, context_tokens), ms, told, change_ms)
        if not isinstance(self.cost, LearntCost):
            return
        former = self._timed
        self._timed = config
        first = self.cost.timings(config, batch) == 0
        if former is None or (former.off and not config.off and not first):
            return
        self.cost.add(config, batch, context_tokens, ms)
        self._timings += 1
        if first or self._timings >= self._next_fit:
            self._next_fit = self._timings + min(max(self._timings // 4, 2), 64)
            self.cost.fit()
            self._costs = _round_costs(self.candidates, self.cost, self._most_batch)

    def choose(
        self,
        batch: int,
        context_tokens: int,
        missed: Callable[[int], int] | None = None,
        *,
        apart: bool = True,
    ) -> SpecConfig:
        """Return the configuration of the next round, of `batch` requests with `context_tokens` tokens together.

        `missed(n)` returns the number of tokens on which the drafter has not run, summed over the n requests that
        missed least. An engine that passes it must run the drafter on the missed tokens of `self.catch_up` requests
        before the round. An engine that does not pass it, or that passes `apart` = False, runs the drafter on all
        missed tokens when it drafts. Raises ValueError for batch < 1.
        """
        if batch < 1:
            raise ValueError(f"batch={batch}, expected at least one running request")
        self._unseen += 1
        self._rounds += 1
        if self.schedule is not None:
            config = self.schedule.choose(batch, context_tokens)
            self._tally.ran(config)
            self.catch_up = 0 if config.off else batch
            return config
        assert self.cost is not None
        ms_per_token, gap = self.cost.catch_up_ms, self._gap

        def catch_up_ms(n: int) -> float:
            return ms_per_token * (n * gap if missed is None else missed(n))

        ms = self._costs.at(batch, context_tokens)
        if self._own is not None:
            self._at = place(batch, context_tokens)
            factors = self._own.doubt(self._at).factors
            ms = [x * factor for x, factor in zip(ms, factors, strict=True)]
            # A slower machine catches up more slowly, too.
            ms_per_token *= max([1.0, *(factors[i] for i in self._own.tried)])
        return self._decide(batch, ms, catch_up_ms, apart and missed is not None)

    def _decide(self, batch: int, ms: list[float], catch_up_ms: CatchUp, apart: bool) -> SpecConfig:
        """Choose by costs. `apart`: the engine can let a part of the requests catch up."""
        rates = [tokens / t for tokens, t in zip(self._tokens, ms, strict=True)]
        best = rates.index(max(rates))
        if self._current < 0:
            self._current = best
        self._follow(rates, ms, best, batch, catch_up_ms)
        self.probe_budget.earn(ms[self._current])
        tally = self._tally
        chosen = self._to_time(batch, rates, ms, catch_up_ms, apart)
        requests = self._plan.requests
        if chosen < 0:
            chosen, charged = self._prober.next(
                self._current, batch, rates[self._current], ms, catch_up_ms, apart
            )
            requests = self._prober.requests
            tally.probe_ms += charged
            tally.probes += chosen != self._current
        config = self.candidates[chosen]
        probes_after_off = chosen != self._current and self.candidates[self._current].off
        drafting = min(requests, batch) if probes_after_off else batch
        catching_up = 0.0 if config.off else catch_up_ms(drafting)
        if config != self._chosen and self.cost is not None:
            self._chosen = config
            self._change_ms[config] = self.cost.switch_ms + catching_up
        tally.catch_up_ms += catching_up
        self._gap, self.catch_up = (self._gap + 1, 0) if config.off else (0, drafting)
        tokens = batch + drafting * (self._tokens[chosen] - 1.0)
        tally.ran(config)
        tally.ms += ms[chosen]
        tally.lost_ms += ms[chosen] - tokens / (batch * rates[best])
        tally.tokens += tokens
        return config

    def observe(self, config: SpecConfig, accepted: Sequence[int], others: int = 0) -> None:
        """Learn from a round under `config`: the accepted drafts of each request. The call may come some rounds late.

        `others` counts the requests of the round for which the drafter had not caught up. They had no drafts.
        """
        if config.num_steps == 0 or not accepted:
            return
        histogram = histogram_of(config.num_steps, accepted)
        drafts = sum(i * n for i, n in enumerate(histogram))
        self.acceptance.observe_histogram(config.num_steps, histogram, max(self._unseen, 1))
        self._unseen = 0
        if self.schedule is None:
            self._tokens = _expected(self.acceptance, self.candidates)
            refund = self.probe_budget.refund(config, drafts / len(accepted), len(accepted), others)
            self._tally.probe_ms -= refund

    def report(self) -> dict[str, Any]:
        """Return the choices since the last report, as JSON. `estimated_regret` uses the rule's own predictions."""
        tally = self._tally
        self._tally = _Tally()
        found: dict[str, Any] = {
            "rounds": {str(config): n for config, n in sorted(tally.rounds.items())},
            "switches": tally.switches,
            "probes": tally.probes,
            "acceptance": [round(rate, 4) for rate in self.acceptance.rates],
            "probing": self.probe_budget.to_json(),
        }
        if self.schedule is None and tally.rounds:
            found |= {
                "predicted_tokens": tally.tokens,
                "predicted_ms": tally.ms,
                "estimated_regret": tally.lost_ms / tally.ms,
                "probe_share": tally.probe_ms / tally.ms,
                "catch_up_share": tally.catch_up_ms / tally.ms,
            }
        return found

    def to_json(self) -> dict[str, Any]:
        """Return settings and learned state, for `from_json`."""
        data: dict[str, Any] = {
            "candidates": [_triple(c) for c in self.candidates],
            "start": _triple(self.candidates[self._current]) if self._current >= 0 else None,
            "probe_share": self.probe_budget.share,
            "acceptance": self.acceptance.to_json(),
            "probing": self.probe_budget.to_json(),
            "forecast": self._prober.forecast,
            "correct": self.correct,
        }
        if self.schedule is not None:
            return data | {"schedule": self.schedule.to_json()}
        assert self.cost is not None
        kind = next(name for name, known in _COSTS.items() if isinstance(self.cost, known))
        return data | {kind: self.cost.to_json()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> SpecRule:
        """Make a rule from JSON. Raises ValueError, CostTableError.

        Required: `candidates`, a list of [num_steps, topk, num_draft_tokens], and one of `table`, `roofline`, `learnt`
        (a `LearntCost`) and `schedule`. `table` is a path or a table's own JSON; `tp` selects one TP of it. Optional:
        `start`, `probe_share`, `acceptance`, `forecast` (rates a_1.. of the next rollout),
        `probing` (as in `report`), `correct` (the table, by the durations of own rounds).
        """
        unknown = set(data) - _KEYS
        if unknown:
            raise ValueError(
                f"speculation rule: unknown field {min(unknown)!r}, expected among {sorted(_KEYS)}"
            )
        if "candidates" not in data:
            raise ValueError("speculation rule: no field 'candidates'")
        names = ("probe_share", "forecast", "correct")
        optional: dict[str, Any] = {name: data[name] for name in names if name in data}
        if data.get("start") is not None:
            optional["start"] = SpecConfig(*data["start"])
        if data.get("acceptance") is not None:
            optional["acceptance"] = Acceptance.from_json(data["acceptance"])
        rule = cls(
            [SpecConfig(*c) for c in data["candidates"]], **_cost_or_schedule(data), **optional
        )
        if data.get("probing") is not None:
            rule.probe_budget.restore(data["probing"])
        return rule

    def _follow(
        self, rates: list[float], ms: list[float], best: int, batch: int, catch_up_ms: CatchUp
    ) -> None:
        """Add this round's loss to each candidate, and switch to the best one if the loss to it is large enough."""
        assert self.cost is not None
        now = self._current
        lost = self._lost
        switch_cost = self.cost.switch_ms
        catch_up = catch_up_ms(batch) / ms[now] if best != now else 0.0
        if self.candidates[now].off:
            # what is known to gain before what may gain more
            tried = self._own.tried if self._own is not None else ()
            best = max(
                (i for i in tried if rates[i] > rates[now]), key=rates.__getitem__, default=best
            )
            known = self._own is None or (
                best in tried and catch_up <= REPAID * (rates[best] / rates[now] - 1.0)
            )
            switch_cost += (CATCH_UP_WEIGHT if known else 1.0) * catch_up * ms[now]
            catch_up = 0.0
        threshold = PATIENCE * MARGIN + switch_cost / ms[now]
        most = 0.5 * threshold  # the noise of a single round cannot cause a switch
        for i, rate in enumerate(rates):
            loss = min(max(1.0 - rates[now] / rate, -most), most)
            # New requests: the drafter would first run on their prompts, which `OFF` does not need.
            loss += catch_up if self.candidates[i].off else 0.0
            lost[i] = max(lost[i] + loss, 0.0)
        beyond = batch > self._most_batch.get(self.candidates[now], batch)
        if best != now and (lost[best] > threshold or beyond):
            self._current = best
            self._lost = [0.0] * len(lost)
            self._prober.stop()
            self.probe_budget.restart()
            self._tally.switches += 1

    def _to_time(
        self, batch: int, rates: Sequence[float], ms: list[float], catch_up_ms: CatchUp, apart: bool
    ) -> int:
        """Return the index of the candidate of which a round must be timed now; -1: none."""
        if self._own is not None and self.cost is not None and not self._prober.running:
            now = ms[self._current]
            reads = self.candidates[self._current].off
            behind = {
                n: reads * catch_up_ms(n) / now
                for n in ((1, batch) if apart and reads else (batch,))
            }
            switches = 2 * self.cost.switch_ms / now
            return self._plan.next(
                self._own, self._at, self._current, rates, self._tokens, switches, behind
            )
        if not isinstance(self.cost, LearntCost) or OFF not in self.candidates:
            return -1
        off = self.candidates.index(OFF)
        drafts = self._current != off
        due = self._plain.due(batch, self._rounds, drafts, 1.0 - rates[off] / rates[self._current])
        return off if due and drafts and not self._prober.running else -1


_KEYS = {
    "candidates", "start", "probe_share", "acceptance",
    "table", "tp", "roofline", "learnt", "schedule", "forecast", "probing", "correct",
}  # fmt: skip
_COSTS = {"table": CostTable, "roofline": Roofline, "learnt": LearntCost}


def _triple(config: SpecConfig) -> list[int]:
    return [config.num_steps, config.topk, config.num_draft_tokens]


def _cost_or_schedule(data: Mapping[str, Any]) -> dict[str, Any]:
    given = [name for name in (*_COSTS, "schedule") if data.get(name) is not None]
    if len(given) != 1:
        found = given or "none"
        raise ValueError(
            f"speculation rule: expected exactly one of {', '.join(_COSTS)} and schedule, got {found}"
        )
    value = data[given[0]]
    if given == ["schedule"]:
        return {"schedule": SpecSchedule.from_json(value)}
    if given == ["roofline"]:
        return {"cost": Roofline.from_json(value)}
    if given == ["learnt"]:
        return {"cost": LearntCost.from_json(value)}
    table = CostTable.load(value) if isinstance(value, str) else CostTable.from_json(value)
    return {"cost": table.at(data["tp"]) if data.get("tp") is not None else table}


def _expected(acceptance: Acceptance, candidates: Sequence[SpecConfig]) -> list[float]:
    """Return expected tokens per request and round of each candidate. Rates were observed under the same topk."""
    return [acceptance.totals[config.num_steps] for config in candidates]


def _check(
    candidates: tuple[SpecConfig, ...], start: SpecConfig | None, probe_share: float
) -> None:
    if not candidates:
        raise ValueError("candidates must not be empty")
    if len({c.topk for c in candidates if c.num_steps > 0}) > 1:
        raise ValueError(
            f"candidates {[str(c) for c in candidates]} mix topk, which no engine changes while running"
        )
    if start is not None and start not in candidates:
        raise ValueError(
            f"start={start} is not among the candidates {[str(c) for c in candidates]}"
        )
    if not 0 <= probe_share < 1:
        raise ValueError(f"probe_share={probe_share} must lie in [0, 1)")
