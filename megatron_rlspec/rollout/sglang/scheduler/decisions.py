"""Choose what each decode round in SGLang's scheduler process runs: how many drafts, or no drafter at all.

`Decider` holds the choice: speculation held off, SGLang's own rule, a fixed number of drafts, or our rule
(`speculation/rule.py`). `controller.py` asks it before every round and carries the decision out. `control.py` changes
it by commands, and reports what rounds accepted and how long they took.

Every tensor-parallel rank decides for itself, so a decision may depend only on what all ranks share: batch, context
lengths, tokens that drafters missed, accepted counts, the log q of ragged rounds (broadcast in `ragged.py`), and
durations of rounds by the first rank's clock (`shared_times.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from megatron_rlspec.rollout.sglang.settings import Settings
from megatron_rlspec.speculation.roofline import Roofline
from megatron_rlspec.speculation.rule import SpecRule
from megatron_rlspec.types import OFF, SpecConfig, checked_sharpness


@dataclass(frozen=True)
class DecodeRound:
    """What one decode round of B requests ran. `controller.py` makes it at launch; `control.py` reads it afterwards.

    `logq` and `verified` are still being copied to the host when a `DecodeRound` is made. Their values are complete
    once SGLang has processed the round's results. Do not read them earlier.

    context_tokens  of all requests together, prompts included
    drafting        indices of the requests whose drafter had caught up; None: all of them, or a round of `OFF`
    caught_up       seconds for which the launch of this round waited while drafters caught up (`DrafterGap.close`)
    logq            tensor [B, k] on the host: log q of the drafts; None if the round verified all of them
    verified        tensor [B] on the host: verified drafts of each request; None if the round verified all
    """

    config: SpecConfig
    context_tokens: int
    drafting: list[int] | None
    caught_up: float = 0.0
    logq: Any = None
    verified: Any = None

    def drafts(self, requests: np.ndarray) -> np.ndarray:
        """Return how many drafts of each of these requests were verified, [n]. Call it after the copies have ended.

        requests  [n] their indices in the batch
        """
        if self.verified is None:
            return np.full(len(requests), self.config.num_steps)
        of_requests: np.ndarray = self.verified.numpy()[requests]
        return of_requests

    def behind(self, batch: int) -> set[int]:
        """Return the indices of the requests whose drafter has not read this round's tokens.

        batch  how many requests the batch has
        """
        if self.config.off:
            return set(range(batch))
        if self.drafting is None:
            return set()
        return set(range(batch)) - set(self.drafting)


class RoundTime(NamedTuple):
    """The arguments of `SpecRule.timed`, in its order: a round, and its duration by one rank's clock.

    drafts  verified drafts of a request, on average; None: all were verified

    Its fields are passed by position, so they must stay in the order of those parameters.
    """

    config: SpecConfig
    batch: int
    context_tokens: int
    ms: float
    caught_up_ms: float
    drafts: float | None


class Decider:
    """What chooses each round's configuration, among those for which the engine holds runtime state.

    Of these, the first that is set decides: `why_held`, `stock`, `fixed`, `rule`. `controller.py` runs `OFF` all the
    same if a request has penalties and the engine has step count 0. `controller.py` calls `start` before all else, and
    `limit` once graphs are captured. An engine without adaptive speculation calls neither: it has no candidates and
    runs no rule.

    All calls come from the scheduler's thread. Every tensor-parallel rank makes the same calls with the same arguments,
    but for the durations given to `timed`.
    """

    def __init__(self, settings: Settings) -> None:
        self._num_steps = settings.num_steps
        self._off = settings.off
        self.can_hold = False  # whether the engine has step 0, in which `OFF` runs
        self.candidates: list[SpecConfig] = []
        # why speculation is held off; "" if it is not. `control._release` sets it to "".
        self.why_held = ""
        # why all requests verify the same number of drafts; "" if they need not. `controller.py` may set a reason once
        # the target has its attention
        self.why_even = "" if settings.ragged else "the engine was launched without --ragged"
        self.fixed: SpecConfig | None = None  # of every round; None: the rule decides
        # Our rule that was set last, also while another choice decides: the next rule inherits its measured times.
        self.rule: SpecRule | None = None
        self.stock: Any = None  # SGLang's own rule while that decides, else None
        # SGLang's own rule once it was made, also while it does not decide. When it decides again, it goes on with what
        # it has learnt.
        self._kept_stock: Any = None
        self.sharpness = settings.sharpness  # of coupled drafts
        self.ranks = 1  # tensor-parallel size
        # Timed rounds that the rule has not learnt yet; only used with several ranks. `shared_times.py` broadcasts the
        # first rank's list, and clears the list of every rank.
        self.unshared_times: list[RoundTime] = []
        # configuration -> the largest batch at which the rule may choose it; absent: at any batch
        self._largest_batch: dict[SpecConfig, int] = {}

    @property
    def name(self) -> str:
        """Return what decides when speculation is not held off, in words; "" in an engine that cannot switch."""
        if self.stock:
            return "SGLang's rule"
        if not self.candidates:
            return ""
        return "the adaptive rule" if self.fixed is None else "a fixed choice"

    def start(
        self, candidate_steps: Sequence[int], model: Mapping[str, Any], ranks: int = 1
    ) -> None:
        """Set the candidates. Then fix the number of drafts that the settings name, or begin with a rule. Call it once.

        SGLang's step count 0 gives two candidates: `OFF`, and `SpecConfig(0)`, in which the drafter reads along and
        drafts nothing. With `off` false in the settings, step count 0 gives no candidate, and serves `hold` only.

        candidate_steps  SGLang's step counts for which the engine builds runtime state
        model            config.json of the target, from which the rule's first costs follow
        ranks            tensor-parallel size
        """
        self.ranks = ranks
        self.can_hold = 0 in candidate_steps
        steps = [n for n in candidate_steps if n or self._off]
        self.candidates = [OFF] * (0 in steps) + [SpecConfig(n) for n in steps]
        if self._num_steps is None:
            self.replace({"roofline": Roofline.of_model(model).to_json()})
        else:
            self.set_config(SpecConfig.of(self._num_steps))

    def limit(self, captured: Mapping[int, Sequence[int] | None], start: int) -> None:
        """Keep the rule from choosing a step count above its largest captured batch, if others have larger graphs.

        The limits hold for later rules, too. A fixed choice and SGLang's rule have none.

        captured  the batch sizes with graphs, by step count; None: no graphs
        start     the step count that SGLang starts with, which it captures at every batch size
        """
        largest = {}
        for steps, sizes in captured.items():
            if sizes is not None:
                largest[steps] = max(sizes, default=0)
        # Step 0 is never limited: something must be possible at every batch.
        of_any = max(largest.values(), default=0)
        self._largest_batch = {}
        for steps, batch in largest.items():
            if steps not in (0, start) and batch < of_any:
                self._largest_batch[SpecConfig(steps)] = batch
        if self.rule is not None:
            self.rule.limit(self._largest_batch)

    def replace(self, data: Mapping[str, Any]) -> None:
        """Decide by `SpecRule.from_json(data)`, over all configurations of the engine if `data` names no `candidates`.

        `sharpness` in `data` is that of coupled drafts from now on; without this field the sharpness stays.
        `{"stock": true}` lets SGLang's own adaptive rule decide, for comparisons, and changes no sharpness. The trainer
        makes `data` by `Learning.rule` in `speculation/learning.py`. `data` itself is not changed.

        Raises ValueError; TypeError or KeyError as `SpecRule.from_json`. Then nothing has changed.
        """
        data = dict(data)
        sharpness = self._checked_sharpness(data.pop("sharpness", None))
        if data.get("stock"):
            self.stock = self._kept_stock = self._kept_stock or self._make_stock_rule()
            return
        # `OFF` gives the same tokens as step 0 and costs less, so step 0 is not offered.
        candidates = [c for c in self.candidates if c != SpecConfig(0)] or self.candidates
        data["ragged"] = not self.why_even and data.get("ragged", True)
        offered = [config.to_json() for config in candidates]
        rule = SpecRule.from_json({"candidates": offered, **data})
        self._check_runnable(rule.candidates)
        if self.rule is not None:
            rule.inherit(self.rule)
        rule.limit(self._largest_batch)  # after `inherit`, which takes the former rule's limits
        self.rule = rule
        self.fixed = self.stock = None
        self.sharpness = sharpness

    def hold(self, reason: str) -> None:
        """Run `OFF` until `why_held` is "" again. A rule that is set meanwhile decides afterwards.

        reason  not empty: "" would mean that speculation is not held off

        Raises ValueError in an engine that cannot run `OFF`.
        """
        if not self.candidates:
            raise ValueError(
                "speculation cannot be switched here: the engine runs no adaptive speculation"
            )
        if not self.can_hold:
            raise ValueError(
                "speculation cannot be held off here: the engine was launched without step count 0"
            )
        self.why_held = reason

    def choose(
        self, batch: int, context_tokens: int, missed: Callable[[int], int]
    ) -> tuple[SpecConfig, int]:
        """Return the next round's configuration, and how many requests' drafters have to catch up before it.

        Call it once for each round, because it changes the rule's state (`SpecRule.choose`). Drafters that missed
        nothing need not catch up, so the caller may ignore the second number then. For `OFF` it is 0.

        batch   number of requests
        missed  `DrafterGap.missed`: tokens that the n requests that are least behind have missed together
        """
        if self.why_held:
            return OFF, 0
        if self.stock:
            return SpecConfig(self.stock.get_steps_for_batch(batch)), batch
        if self.fixed is not None:
            return self.fixed, 0 if self.fixed.off else batch
        assert self.rule is not None, "`start` sets one of them"
        config = self.rule.choose(batch, context_tokens, missed)
        return config, self.rule.catch_up

    @property
    def deciding_rule(self) -> SpecRule | None:
        """Return our rule if it decides the next round, else None."""
        return None if self.why_held or self.stock or self.fixed is not None else self.rule

    @property
    def ragged_rule(self) -> SpecRule | None:
        """Return our rule if its `SpecRule.drafts` says how many drafts the round just chosen verifies.

        None: the round verifies all of them.
        """
        rule = self.deciding_rule
        return None if self.why_even or rule is None or rule.selection is None else rule

    def timed(self, ran: DecodeRound, batch: int, ms: float) -> None:
        """Note the duration of a round by this rank's clock. With one rank the rule learns it at once.

        With several ranks it learns the first rank's durations when `shared_times.py` has broadcast them: every rank
        must learn the same numbers, or ranks would decide differently. Call it in the order in which rounds ran, on all
        ranks for the same rounds.
        """
        drafts = None if ran.verified is None else float(ran.verified.numpy().mean())
        timed = RoundTime(ran.config, batch, ran.context_tokens, ms, 1000 * ran.caught_up, drafts)
        if self.ranks > 1:
            self.unshared_times.append(timed)
        else:
            self.learn(timed)

    def learn(self, timed: RoundTime) -> None:
        """Let the rule learn a duration that all ranks are told. It is dropped while our rule does not decide."""
        if self.deciding_rule is not None:
            self.deciding_rule.timed(*timed)

    def observe(
        self,
        ran: DecodeRound,
        accepted: np.ndarray,
        verified: np.ndarray,
        requests: np.ndarray,
    ) -> Sequence[float]:
        """Let the rule learn what some requests of a round accepted. Returns the round's part of `RoundStats.if_all`.

        While our rule does not decide, nothing is learnt and () is returned. Call it after SGLang has processed the
        round's results, on all ranks for the same rounds in the same order.

        accepted, verified  drafts of each of these requests, [n]
        requests            their indices in the batch, [n]
        """
        rule = self.deciding_rule
        if rule is None:
            return ()
        logq = None if ran.logq is None else ran.logq.numpy()[requests]
        return rule.observe(ran.config, accepted, verified, logq)

    def set_config(self, config: SpecConfig, sharpness: float | None = None) -> None:
        """Run `config` in every round until `replace` or the next `set_config`; a hold still comes first.

        sharpness  of coupled drafts; None: the present one stays

        Raises ValueError, and then nothing has changed.
        """
        self._check_runnable([config])
        self.sharpness = self._checked_sharpness(sharpness)
        self.fixed = config
        self.stock = None

    def _checked_sharpness(self, given: Any) -> float:
        """Return the sharpness given, or the present one if it is None.

        Raises ValueError for a wrong value now, because an error during a round would end the engine.
        """
        if given is None:
            return self.sharpness
        try:
            return checked_sharpness(given)
        except ValueError as error:
            raise ValueError(f"sharpness={error}") from None

    def _make_stock_rule(self) -> Any:
        """Make SGLang's own adaptive rule, with its built-in steps per batch size.

        Raises ValueError if the engine lacks a step count that this rule could choose.
        """
        from sglang.srt.speculative.adaptive_spec_params import AdaptiveSpeculativeParams

        rule = AdaptiveSpeculativeParams(
            initial_steps=max(c.num_steps for c in self.candidates or [OFF])
        )
        self._check_runnable({SpecConfig(steps) for steps in rule.candidate_steps})
        return rule

    def _check_runnable(self, wanted: Iterable[SpecConfig]) -> None:
        """Raise ValueError unless the engine can run all these. An engine without candidates can run `OFF` only."""
        allowed = self.candidates or [OFF]
        refused = sorted(set(wanted) - set(allowed))
        if refused:
            names = ", ".join(map(str, refused))
            launched = ", ".join(map(str, allowed))
            raise ValueError(f"this engine cannot run {names}; it was launched with {launched}")


# The one decider of this process. `http/plugin.py` replaces it before SGLang builds its controller. So other files must
# write `decisions.decider`: `from ... import decider` would keep this first one.
decider = Decider(Settings())
