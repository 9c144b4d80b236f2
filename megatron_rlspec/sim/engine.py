"""A simulated engine: it admits, prefills and decodes in virtual time, and asks the live policy before every round."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from megatron_rlspec.sim.samples import AcceptanceModel
from megatron_rlspec.speculation.cost_table import CostTable
from megatron_rlspec.speculation.roofline import Roofline
from megatron_rlspec.types import Held, Load, SpecConfig

OCTAVES = tuple(2**i for i in range(4, 18))  # mean contexts at which costs are tabulated


class Policy(Protocol):
    """What chooses the configuration of a round: a `SpecSchedule`, or a live `SpecRule`."""

    def choose(self, batch: int, context: int) -> SpecConfig: ...


@dataclass(eq=False)
class SimSample:
    """A sample to draw: `length` response tokens after a prompt of `prompt` tokens."""

    id: str
    prompt: int
    length: int
    group: int = -1
    share: float = 0.5  # of its rounds in the easy regime
    regime: int = 0
    drawn: int = 0
    rounds: int = 0
    ended_ms: float = -1.0
    places: list[tuple[str, float]] = field(default_factory=list)  # engine, and since when

    @property
    def context(self) -> int:
        return self.prompt + self.drawn


class Durations:
    """Durations of rounds, tabulated from a cost by batch and mean context. Counts the lookups that extrapolate."""

    def __init__(self, cost: CostTable | Roofline, configs: Sequence[SpecConfig]) -> None:
        self.cost = cost
        self.looked_up = 0
        self.extrapolated = 0
        self._configs = list(configs)
        self._index = {config: i for i, config in enumerate(self._configs)}
        self._rows: dict[int, list[list[float]]] = {}  # batch -> [contexts][configs]
        self._doubtful: dict[tuple[SpecConfig, int, int], bool] = {}

    def ms(self, config: SpecConfig, batch: int, context: int) -> float:
        """Return the duration of a round at a batch and its total context."""
        row = self._rows.get(batch)
        if row is None:
            lengths = np.array(OCTAVES, float)
            row = self._rows[batch] = self.cost.grid(self._configs, np.array(batch), batch * lengths).T.tolist()
        length = context / batch
        column = min(max(bisect_right(OCTAVES, length) - 1, 0), len(OCTAVES) - 2)
        self.looked_up += 1
        self.extrapolated += self._extrapolates(config, batch, column)
        i = self._index[config]
        low = row[column][i]
        high = row[column + 1][i]
        share = (length - OCTAVES[column]) / (OCTAVES[column + 1] - OCTAVES[column])
        ms: float = low + max(share, 0.0) * (high - low)
        return ms

    def _extrapolates(self, config: SpecConfig, batch: int, column: int) -> bool:
        key = (config, batch, column)
        if key not in self._doubtful:
            self._doubtful[key] = self.cost.extrapolates(config, batch, batch * OCTAVES[column])
        return self._doubtful[key]


class SimEngine:
    """One engine. `step` runs one round and returns its duration; times are virtual ms.

    durations       of rounds. The table that scores may differ from the one by which the policy decides
    prefill_ms      per prompt token
    policy          the live decision object; an engine of its own each
    max_running     samples that run at once; max_tokens: room in the KV cache
    """

    def __init__(
        self,
        name: str,
        durations: Durations,
        policy: Policy,
        acceptance: AcceptanceModel,
        rng: np.random.Generator,
        *,
        prefill_ms: float = 0.0,
        max_running: int = 256,
        max_tokens: int = 1 << 40,
        version: int = 0,
    ) -> None:
        self.name = name
        self.durations = durations
        self.policy = policy
        self.acceptance = acceptance
        self.rng = rng
        self.prefill_ms = prefill_ms
        self.max_running = max_running
        self.max_tokens = max_tokens
        self.version = version
        self.running: list[SimSample] = []
        self.waiting: deque[SimSample] = deque()
        self.now = 0.0
        self.busy_ms = 0.0
        self.tokens = 0
        self.rounds: dict[SpecConfig, int] = {}
        self._missed = 0  # tokens that the drafter has not read, of all running samples
        self._last: SpecConfig | None = None

    @property
    def idle(self) -> bool:
        return not self.running and not self.waiting

    def load(self) -> Load:
        """Return what the live planners read of a real engine."""
        held = tuple(
            Held(s.id, s.prompt, s.context, s.drawn / max(s.rounds, 1), s.group) for s in self.running if s.drawn
        )
        used = sum(s.context for s in self.running)
        return Load(self.name, held, len(self.waiting), max(self.max_tokens - used, 0), self.version)

    def give(self, samples: Sequence[SimSample]) -> None:
        """Add samples to the queue; those that have begun are computed again."""
        for sample in samples:
            sample.places.append((self.name, self.now))
            self.waiting.append(sample)

    def take(self, ids: Sequence[str]) -> list[SimSample]:
        """Remove running samples."""
        chosen = [s for s in self.running if s.id in ids]
        self.running = [s for s in self.running if s.id not in ids]
        return chosen

    def land(self, samples: Sequence[SimSample]) -> None:
        """Add samples whose KV cache is here."""
        for sample in samples:
            sample.places.append((self.name, self.now))
        self.running += samples

    def step(self) -> list[SimSample]:
        """Admit, prefill, and run one round. Returns the samples that have ended; `now` is then the round's end."""
        self._admit()
        if not self.running:
            return []
        batch = len(self.running)
        context = sum(s.context for s in self.running)
        config = self.policy.choose(batch, context)
        ms = self.durations.ms(config, batch, context) + self._change(config, batch)
        steps = config.num_steps
        regimes = np.array([s.regime for s in self.running])
        accepted = self.acceptance.accept(regimes, steps, self.rng) if steps else np.zeros(batch, np.int64)
        shares = np.array([s.share for s in self.running])
        following = self.acceptance.advance(regimes, shares, accepted + 1, self.rng).tolist()
        marks = accepted.tolist()
        observe = getattr(self.policy, "observe", None)
        if observe is not None:
            observe(config, marks)
        self.now += ms
        self.busy_ms += ms
        self.rounds[config] = self.rounds.get(config, 0) + 1
        if config.off:
            self._missed += batch
        ended = []
        for sample, count, regime in zip(self.running, marks, following, strict=True):
            new = min(count + 1, sample.length - sample.drawn)
            sample.drawn += new
            sample.rounds += 1
            sample.regime = regime
            self.tokens += new
            if sample.drawn >= sample.length:
                sample.ended_ms = self.now
                ended.append(sample)
        if ended:
            self.running = [s for s in self.running if s.drawn < s.length]
        return ended

    def _admit(self) -> None:
        used = sum(s.context for s in self.running)
        fresh = 0
        while self.waiting and len(self.running) < self.max_running:
            sample = self.waiting[0]
            if self.running and used + sample.context > self.max_tokens:
                break
            self.waiting.popleft()
            used += sample.context
            fresh += sample.context
            self.running.append(sample)
        ms = fresh * self.prefill_ms
        self.now += ms
        self.busy_ms += ms

    def _change(self, config: SpecConfig, batch: int) -> float:
        """Return the ms of a change of configuration, with the tokens that the drafter must read first."""
        before = self._last
        self._last = config
        if before is None or before == config:
            return 0.0
        ms = self.durations.cost.switch_ms
        if before.off and not config.off:
            ms += self._missed * self.durations.cost.catch_up_ms
            self._missed = 0
        return ms
