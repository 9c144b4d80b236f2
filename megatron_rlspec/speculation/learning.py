"""What a run learns of its engines' decode rounds, from rollout to rollout, and the rule that it sends to them.

A run holds one `Learning`: in our own loop, in `CoTrainer` and inside slime. `DraftRule` in
`cotrainer/speculation.py` holds it for all three and calls `rule` and `observe`. `run/engines.py`,
`cotrainer/cotrainer.py` and `integrations/slime/speculation.py` call `expect`:

    learning = Learning(candidate_steps, Roofline.of_model(config))
    learning.expect(prediction)          before a rollout: the trainer's prediction of its acceptance, or None
    learning.rule()                      the argument of the engines' `set_spec_rule`
    learning.observe(rounds, reports)    after the rollout: the rounds and the `spec_rule_report`s of all engines
    learning.state(), .restore(state)    for checkpoints

The order counts. `observe` compares the rollout with what `expect` took, and forgets that. `rule` has a forecast only
between `expect` (or `restore`) and `observe`. `expect` and `observe` return metrics, `spec/...` and
`predict/...`, whose names `records/metric_names.toml` explains.

The expected acceptance of the next rollout is the one that engines observed lately. In recorded runs nothing predicted
it better (docs/results.md). The trainer's prediction counts where nothing was observed: before the first drafts,
and while the engines do not draft. It then makes them try the drafter again.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from megatron_rlspec.speculation.acceptance import Acceptance, Prediction, accept_length, pooled
from megatron_rlspec.speculation.roofline import Roofline
from megatron_rlspec.speculation.round_times import RoundTimes
from megatron_rlspec.types import OFF, RoundStats, SpecConfig

# drafts of a depth that must be observed before its rate is used as an expectation
LEAST_DRAWS = 100
# drafts of a depth that earlier observations weigh at most when a rollout begins: its texts and weights are new
START_DRAWS = 50.0
# Standard deviation of log(time of plain decoding / time of a drafting round) up to which `saved` uses the ratio.
KNOWN = 0.15
# share of the drafting rounds' time for which that ratio must be known, or `saved` returns None
TIMED = 0.9


class Saved(NamedTuple):
    """Durations of a rollout's rounds in ms, summed over engines.

    ms           as they were
    plain_ms     as plain decoding would have taken for the same tokens, estimated
    drafting_ms  the part of `ms` that rounds with drafts took
    """

    ms: float
    plain_ms: float
    drafting_ms: float

    @property
    def gain(self) -> float:
        """Return plain decoding's time over the drafting rounds' time, for the same tokens; 1 without such rounds."""
        return 1 + (self.plain_ms - self.ms) / self.drafting_ms if self.drafting_ms else 1.0


class Learning:
    """Follows acceptance over rollouts, and makes the data of the engines' rule.

    candidate_steps  numbers of drafts that the engines' rule chooses from, at least one
    cost             of rounds, by the model's sizes; engines correct it by their own rounds. Times learnt under another
                     cost are ignored (`RoundTimes.restore`), so make it alike in every run of one checkpoint
    adaptive         whether engines choose by `rule()`; if not, neither a forecast nor its chances are sent
    ragged           whether a round verifies only the drafts of each request that pay (`ragged.py`)
    """

    def __init__(
        self,
        candidate_steps: Sequence[int],
        cost: Roofline,
        *,
        adaptive: bool = True,
        ragged: bool = False,
    ) -> None:
        self.cost = cost
        self.ragged = ragged
        self.adaptive = adaptive
        # as observed; of one depth at least, because `Acceptance` cannot have none
        self.acceptance = Acceptance(max(*candidate_steps, 1))
        self.prediction: Prediction | None = None  # of the next rollout
        self.sharpness: float | None = None  # of coupled drafts, as last predicted to be the best
        # what the engine with the most timings has learnt of rounds, as it reports it
        self.learnt: dict[str, Any] | None = None

    def start_without_acceptance(self) -> None:
        """Start with an acceptance of 0, for a drafter with random weights, until drafts or a prediction say more.

        It replaces all observations, so call it before the first rollout of a run that has no checkpoint.
        """
        self.acceptance.predict([0.0] * self.acceptance.depth, START_DRAWS)

    def saved(self, rounds: Sequence[RoundStats], delivered: float = math.nan) -> Saved | None:
        """Return what the rounds took, and what plain rounds would have taken.

        None if nothing drafted, or if too little is known of plain decoding's time at those batch sizes. A round in
        which a request got L tokens on average stands for L plain rounds of that batch. It counts as no shorter than
        one of them, so no gain exceeds L.

        delivered  tokens that a round delivered to a sample, on average over all rounds. `RoundStats.accepted` also
                   counts drafts past the end of a sample, which this number takes off. NaN: they are counted
        """
        times = self._times()
        if times is None:
            return None
        share = delivered_share(rounds, delivered)
        ms = plain_ms = drafting_ms = known_ms = 0.0
        for stats in rounds:
            ms += stats.ms
            plain = stats.ms
            requests = sum(stats.accepted)
            if stats.config.num_steps and requests:
                drafting_ms += stats.ms
                ratio = _plain_over(times, stats)
                if ratio is not None:
                    known_ms += stats.ms
                    plain *= max(share * _tokens(stats) / requests, 1.0) * ratio
            plain_ms += plain
        if not drafting_ms or known_ms < TIMED * drafting_ms:
            return None
        return Saved(ms, plain_ms, drafting_ms)

    def _times(self) -> RoundTimes | None:
        """Return the estimates of `learnt`; None if nothing was measured, or for another cost than this one."""
        if self.learnt is None:
            return None
        state = self.learnt["times"]
        candidates = [SpecConfig.from_json(value) for value in state["candidates"]]
        times = RoundTimes(self.cost, candidates)
        return times if times.restore(state) else None

    def expect(self, prediction: Prediction | None) -> dict[str, float]:
        """Take the trainer's prediction of the next rollout's acceptance, or None. Returns metrics; {} for None."""
        self.prediction = prediction
        if prediction is None:
            return {}
        values = {}
        for k, tokens in self._expected(prediction).items():
            values[f"predict/next_tokens_k{k}"] = tokens
        if prediction.sharpness is not None:
            self.sharpness = values["spec/sharpness"] = prediction.sharpness
        return values

    def observe(
        self,
        rounds: Sequence[RoundStats],
        reports: Sequence[Mapping[str, Any]],
        delivered: float = math.nan,
    ) -> dict[str, float]:
        """Learn from one rollout: the rounds and `spec_rule_report`s of all engines. Returns metrics.

        rounds     each round once: an engine's `stats` forgets what it has returned
        reports    `SpecRule.report` of each engine; {} of one without a rule
        delivered  as for `saved`
        """
        # First: the errors are of what was expected before this rollout's rounds are learnt.
        metrics = self._errors(rounds)
        self.prediction = None
        # Estimates of several engines cannot be joined, so those with the most timings are kept.
        learnt = [report["learnt"] for report in reports if report.get("learnt")]
        if learnt:
            self.learnt = max(learnt, key=lambda state: sum(state["times"]["timings"]))
        for stats in rounds:
            steps = stats.config.num_steps
            # A round without drafts shows nothing of acceptance; earlier observations fade.
            histogram = stats.histogram if steps else []
            self.acceptance.observe_histogram(steps, histogram, stats.rounds)
        return metrics | self._metrics(rounds, reports, delivered)

    def rule(self) -> dict[str, Any]:
        """Return the data of `SpecRule.from_json` without candidates; every engine adds its own.

        The field "sharpness" is for the engine's coupled drafts: it takes it out before (`rollout/embedded/choice.py`,
        `rollout/sglang/scheduler/decisions.py`).
        """
        rule: dict[str, Any] = {
            "roofline": self.cost.to_json(),
            "acceptance": self.acceptance.fresh(START_DRAWS).to_json(),
        }
        if self.ragged:
            rule["ragged"] = True
        if self.adaptive and self.prediction is not None:
            rule["forecast"] = self.prediction.rates()
            if self.prediction.chances is not None:
                rule["chances"] = self.prediction.chances.tolist()
        if self.learnt is not None:
            rule["learnt"] = self.learnt
        if self.sharpness is not None:
            rule["sharpness"] = self.sharpness
        return rule

    def accept_lengths(self) -> dict[SpecConfig, float]:
        """Return tokens per round, as observed lately, of each number of drafts with LEAST_DRAWS at every depth."""
        observed = [draws >= LEAST_DRAWS for draws in self.acceptance.draws]
        deepest = observed.index(False) if False in observed else len(observed)
        return {SpecConfig(k): self.acceptance.totals[k] for k in range(1, deepest + 1)}

    def accept_length(self, chain: SpecConfig) -> float | None:
        """Return tokens per round of `chain` in the next rollout: as observed lately, else as predicted, else None."""
        observed = self.accept_lengths()
        if chain not in observed and self.prediction is not None:
            return self._expected(self.prediction).get(chain.num_steps)
        return observed.get(chain)

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as JSON."""
        return {
            "acceptance": self.acceptance.to_json(),
            "prediction": self.prediction and self.prediction.sums(),
            "sharpness": self.sharpness,
            "learnt": self.learnt,
        }

    def restore(self, state: Mapping[str, Any]) -> str:
        """Restore what `state` returned. Returns a line for the user if acceptance was not restored, else "".

        Acceptance of a run that drafted fewer steps has too few depths, and engines would refuse it
        (`SpecRule.__init__`). Acceptance and prediction stay as they are if `state` has none; sharpness and learnt
        times are then dropped.
        """
        saved_depth = state["acceptance"]["depth"] if state.get("acceptance") else 0
        needed = self.acceptance.depth
        warning = ""
        if 0 < saved_depth < needed:
            warning = f"the checkpoint holds acceptance of {saved_depth} drafts, expected {needed}: it is learned again"
        elif saved_depth:
            self.acceptance = Acceptance.from_json(state["acceptance"])
        self.sharpness = state.get("sharpness")
        self.learnt = state.get("learnt")
        if state.get("prediction"):
            self.prediction = Prediction.of_sums(*state["prediction"])
        return warning

    def _expected(self, prediction: Prediction) -> dict[int, float]:
        """Return tokens per round of each predicted step count in the next rollout: as observed, else as predicted."""
        observed = self.accept_lengths()
        expected = {}
        for k in prediction.steps:
            expected[k] = observed.get(SpecConfig(k), prediction.tokens_per_round(k))
        return expected

    def _errors(self, rounds: Sequence[RoundStats]) -> dict[str, float]:
        """Compare what was expected of this rollout with its rounds. Returns `predict/…` metrics, or {}.

        Only rounds of predicted step counts are compared. Expected tokens are weighted by how often each was run.
        """
        if self.prediction is None:
            return {}
        requests: Counter[int] = Counter()  # by step count; one for every round of a request
        histograms = []
        for stats in rounds:
            if stats.config.num_steps in self.prediction.steps and any(stats.accepted):
                requests[stats.config.num_steps] += sum(stats.accepted)
                histograms.append(stats.histogram)
        if not histograms:
            return {}
        observed_tokens = accept_length(pooled(histograms))
        by_trainer = {k: self.prediction.tokens_per_round(k) for k in requests}
        expected = _mean(self._expected(self.prediction), requests)
        return {
            "predict/predicted_tokens": expected,
            "predict/trainer_tokens": _mean(by_trainer, requests),
            "predict/observed_tokens": observed_tokens,
            "predict/error": expected - observed_tokens,
        }

    def _metrics(
        self, rounds: Sequence[RoundStats], reports: Sequence[Mapping[str, Any]], delivered: float
    ) -> dict[str, float]:
        """Return `spec/…` metrics of one rollout."""
        counts: Counter[SpecConfig] = Counter()
        for stats in rounds:
            counts[stats.config] += stats.rounds
        total = sum(counts.values())
        values = {"spec/rounds": float(total), "spec/ms_per_round": math.nan}
        # SGLang's rounds right after a prefill are not timed, so `total` can be 0.
        if total:
            values["spec/ms_per_round"] = sum(stats.ms for stats in rounds) / total
            for config, n in sorted(counts.items()):
                values[f"spec/share_{config}"] = n / total
        for d, rate in enumerate(self.acceptance.rates, 1):
            values[f"spec/accept_{d}"] = rate
        drafting = pooled(stats.accepted for stats in rounds if stats.config.num_steps)
        # of drafting rounds only; `rollout/accept_length` counts the others, too, as 1
        if any(drafting):
            values["spec/verified_tokens"] = accept_length(drafting)
            values["spec/accepted_drafts"] = values["spec/verified_tokens"] - 1
        verified = sum(stats.verified for stats in rounds)
        if verified:
            values["spec/verified_drafts"] = verified / float(drafting.sum())
        if (saved := self.saved(rounds, delivered)) is not None:
            values["spec/saved_seconds"] = (saved.plain_ms - saved.ms) / 1e3
        decided = [report for report in reports if report.get("rounds")]
        if decided:
            values["spec/switches"] = float(sum(report["switches"] for report in decided))
            values["spec/probes"] = float(sum(report["probes"] for report in decided))
        return values


def _mean(tokens: Mapping[int, float], requests: Mapping[int, int]) -> float:
    """Return the mean of `tokens` by step count, weighted by `requests` by step count; not for no requests."""
    return sum(tokens[k] * n for k, n in requests.items()) / sum(requests.values())


def _plain_over(times: RoundTimes, stats: RoundStats) -> float | None:
    """Return the time of a plain round over that of `stats`' drafting rounds, at most 1; None if not known well."""
    if OFF not in times.candidates or stats.config not in times.candidates:
        return None
    off = times.candidates.index(OFF)
    drafting = times.candidates.index(stats.config)
    # `context_tokens` is 0 if no round was timed; a request has at least one token
    context = stats.context_tokens or stats.batch
    ms = times.ms(stats.batch, context)
    if times.errors(drafting)[off] > KNOWN:
        return None
    took = ms[drafting]
    if stats.if_all:  # ragged rounds: they verified fewer drafts than `times.ms` counts
        drafts = np.array([stats.verified / sum(stats.accepted)])
        of_ragged = times.ragged_ms(drafting, stats.batch, context, drafts)
        # at least a plain round's time, as in `RoundTimes.ms`; `ragged_ms` has no such bound
        took = max(float(of_ragged[0]), ms[off])
    return ms[off] / took


def delivered_share(rounds: Sequence[RoundStats], delivered: float) -> float:
    """Return which share of the drafting rounds' tokens was delivered to samples, at most 1.

    The others were drafts past the end of a sample. Rounds without drafts deliver all of their tokens.

    delivered  tokens that a round delivered to a sample, on average over all rounds; NaN: not known, so 1
    """
    drafted = sum(_tokens(stats) for stats in rounds if stats.config.num_steps)
    if not drafted or math.isnan(delivered):
        return 1.0
    plain = sum(sum(stats.accepted) for stats in rounds if not stats.config.num_steps)
    requests = sum(sum(stats.accepted) for stats in rounds)
    return min(max(delivered * requests - plain, 0.0) / drafted, 1.0)


def _tokens(stats: RoundStats) -> int:
    """Return the tokens of all requests in these rounds: accepted drafts and the target's own, past the end, too."""
    return sum((1 + drafts) * count for drafts, count in enumerate(stats.accepted))
