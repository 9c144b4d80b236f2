"""A simulated engine: it admits, prefills and decodes in virtual time, and asks the live rule before every round."""

from __future__ import annotations

import random
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from megatron_rlspec.extensions.simulator.samples import AcceptanceModel, SimTree
from megatron_rlspec.extensions.trees.tree import TreeBudget
from megatron_rlspec.speculation.acceptance import histogram_of, top
from megatron_rlspec.speculation.cost_table import CostTable
from megatron_rlspec.speculation.roofline import Roofline
from megatron_rlspec.speculation.round_log import RoundLog
from megatron_rlspec.speculation.rule import SpecRule
from megatron_rlspec.types import Held, Load, RoundStats, SpecConfig, SpecSchedule

OCTAVES = tuple(2**i for i in range(4, 18))  # mean contexts at which costs are tabulated
CHUNK = 8192  # tokens of a prefill pass: SGLang's `chunked_prefill_size` on large GPUs


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
    missed: int = 0  # tokens that the drafter has not read
    unread: int = 0  # tokens that the target has not read
    ended_ms: float = -1.0
    # uniform in [0, 1): its own, so that policies are compared on equal draws
    noise: Callable[[], float] | None = None

    @property
    def context(self) -> int:
        return self.prompt + self.drawn


class Durations:
    """Durations of rounds, tabulated from a cost by batch and mean context. Engines may share one."""

    def __init__(self, cost: CostTable | Roofline, configs: Sequence[SpecConfig]) -> None:
        self.cost = cost
        self._configs = list(configs)
        self._index = {config: i for i, config in enumerate(self._configs)}
        self._rows: dict[int, list[list[float]]] = {}  # batch -> [contexts][configs]
        self._doubtful: dict[tuple[int, int, int], bool] = {}

    def ms(self, config: SpecConfig, batch: int, context: int) -> tuple[float, bool]:
        """Return the duration of a round at a batch and its total context, and whether no measurement is near."""
        row = self._rows.get(batch)
        if row is None:
            lengths = np.array(OCTAVES, float)
            row = self._rows[batch] = self.cost.grid(
                self._configs, np.array(batch), batch * lengths
            ).T.tolist()
        length = context / batch
        column = min(max(bisect_right(OCTAVES, length) - 1, 0), len(OCTAVES) - 2)
        i = self._index[config]
        key = (i, batch, column)
        doubtful = self._doubtful.get(key)
        if doubtful is None:
            doubtful = self._doubtful[key] = self.cost.extrapolates(
                config, batch, batch * OCTAVES[column]
            )
        low = row[column][i]
        high = row[column + 1][i]
        share = (length - OCTAVES[column]) / (OCTAVES[column + 1] - OCTAVES[column])
        return low + max(share, 0.0) * (high - low), doubtful

    def tree_ms(
        self, config: SpecConfig, batch: int, context: int, verified: int
    ) -> tuple[float, bool]:
        """Return `ms` for trees of which `verified` tokens are verified in all, linear between the known sizes."""
        shapes = sorted(
            c for c in self._configs if (c.num_steps, c.topk) == (config.num_steps, config.topk)
        )
        sizes = [c.num_draft_tokens for c in shapes]
        each = verified / batch
        above = min(bisect_left(sizes, each), len(sizes) - 1)
        below = above - 1 if each < sizes[above] and above else above
        low, high = (self.ms(shapes[i], batch, context) for i in (below, above))
        share = (each - sizes[below]) / (sizes[above] - sizes[below]) if above > below else 0.0
        outside = not sizes[0] <= each <= sizes[-1]
        return low[0] + share * (high[0] - low[0]), low[1] or high[1] or outside


class _Trees:
    """The trees of a round's B samples, of M candidates each.

    scores    [B, M] of the drafter
    keep      [B, M] whether a candidate is verified; `verified`: their number, with the last token of every sample
    on_path   [B, M] whether it was accepted
    """

    def __init__(
        self, grown: Sequence[SimTree], budget: TreeBudget | None, context: int, limit: int
    ) -> None:
        self._grown = grown
        self.scores = np.stack([tree.scores for tree in grown])
        depth = grown[0].depth
        self.keep = (
            budget.keep(self.scores, depth, context, limit)
            if budget is not None
            else top(self.scores, limit)
        )
        self.verified = len(grown) + int(self.keep.sum())
        self.on_path = np.zeros(self.keep.shape, bool)

    def accept(self, i: int, draw: float) -> int:
        path = self._grown[i].accept(self.keep[i], draw)
        self.on_path[i, path] = True
        return len(path)


@dataclass(eq=False)
class SimEngine:
    """One engine. `step` runs one pass and sets `now` to its end; times are virtual ms.

    durations    of rounds. The cost that scores may differ from the one by which the policy decides
    rng          of samples that bring no noise of their own
    policy       the live decision object: a `SpecRule`, an engine of its own each, or a `SpecSchedule`
    prefill      tokens of a pass -> ms
    chunk        most tokens of a prefill pass
    max_running  samples that run at once; max_tokens: room in the KV cache
    ranks        GPUs of the engine: its tensor-parallel size
    budget       the live object that says which drafts of a tree are verified; None: those with the best scores, as
                 many as the configuration says
    embedded     False: as SGLang, which prefills before it decodes on; the prefill draws the first token, and the
                 drafter reads the prompt in it. True: as the embedded engine, which runs a chunk and a round in one
                 step; the first round draws the first token, the drafter reads a prompt when it first drafts, and it
                 catches up on all samples or none
    """

    name: str
    durations: Durations
    policy: SpecRule | SpecSchedule
    acceptance: AcceptanceModel
    rng: np.random.Generator
    prefill: Callable[[int], float] = lambda tokens: 0.0
    chunk: int = CHUNK
    max_running: int = 256
    max_tokens: int = 1 << 40
    ranks: int = 1
    budget: TreeBudget | None = None
    embedded: bool = False

    def __post_init__(self) -> None:
        self.prefill = cache(self.prefill)
        self.running: list[SimSample] = []
        self.filling: list[SimSample] = []  # admitted, and not read to the end
        self.waiting: deque[SimSample] = deque()
        self.now = 0.0
        self.busy_ms = 0.0
        self.tokens = 0
        self.retracted = 0
        self.looked_up = 0
        self.extrapolated = 0
        self.rounds: dict[SpecConfig, int] = {}  # by configuration
        self._log = RoundLog(recent=0)
        self._prompts: dict[int, int] = {}  # group whose prompt is in the cache -> its samples here
        self._used = 0  # tokens in the cache
        self._full = False  # since a retraction: nothing is admitted before a sample has ended
        self._last: SpecConfig | None = None

    @property
    def idle(self) -> bool:
        return not (self.running or self.filling or self.waiting)

    def stats(self) -> list[RoundStats]:
        """Return what the live learning reads of a real engine, and forget it."""
        return self._log.take()

    def load(self) -> Load:
        """Return what the live planners read of a real engine."""
        held = [
            Held(s.id, s.prompt, s.context, s.drawn / max(s.rounds, 1), s.group)
            for s in self.running
            if s.drawn
        ]
        waiting = len(self.waiting) + len(self.filling) + len(self.running) - len(held)
        return Load(self.name, tuple(held), waiting, self.free, 0, self.ranks)

    @property
    def free(self) -> int:
        """Return the tokens for which the KV cache has room."""
        return max(self.max_tokens - self._used, 0)

    def give(self, samples: Sequence[SimSample]) -> None:
        """Add samples to the queue; those that have begun are computed again."""
        for sample in samples:
            self._welcome(sample)
            self.waiting.append(sample)

    def take(self, ids: Collection[str]) -> list[SimSample]:
        """Remove running samples, with their place in the cache."""
        chosen = [s for s in self.running if s.id in ids]
        self.running = [s for s in self.running if s.id not in ids]
        self._used -= sum(s.context for s in chosen)
        for sample in chosen:
            self._forget(sample)
        return chosen

    def land(self, samples: Sequence[SimSample]) -> None:
        """Add samples whose KV cache is here."""
        for sample in samples:
            self._welcome(sample)
            self._remember(sample)
            self._used += sample.context
        self.running += samples

    def occupy(self, ms: float) -> None:
        """Spend time on something else than decoding."""
        self.now += ms
        self.busy_ms += ms

    def _welcome(self, sample: SimSample) -> None:
        if sample.noise is None:
            sample.noise = random.Random(int(self.rng.integers(1 << 62))).random

    def sleep(self) -> list[SimSample]:
        """Give the memory back. Returns the samples that had not ended; their caches are gone."""
        left = [*self.running, *self.filling, *self.waiting]
        self.running, self.filling = [], []
        self.waiting.clear()
        self._prompts.clear()
        self._used = 0
        return left

    def step(self) -> list[SimSample]:
        """Run one pass: a chunk of prefill, or else a decode round; an embedded engine runs both.

        Returns the samples that have ended; `now` is then the end of the pass.
        """
        self._admit()
        ended = self._prefill() if self.filling else []
        if self.running and (self.embedded or not self.filling):
            ended += self._round()
        return ended

    def _admit(self) -> None:
        while (
            self.waiting
            and not self._full
            and len(self.running) + len(self.filling) < self.max_running
        ):
            sample = self.waiting[0]
            if (self.running or self.filling) and sample.context > self.free:
                break
            self.waiting.popleft()
            known = sample.group >= 0 and sample.group in self._prompts
            sample.unread = sample.drawn + (0 if known else sample.prompt)
            sample.missed = sample.unread if self.embedded else 0
            self._remember(sample)
            self._used += sample.context
            self.filling.append(sample)

    def _prefill(self) -> list[SimSample]:
        """Read a chunk, of the earliest samples first. Returns those that ended with their first token."""
        left = self.chunk
        ended = []
        for sample in self.filling:
            read = min(sample.unread, left)
            sample.unread -= read
            left -= read
            if sample.unread:
                break
        ms = self.prefill(self.chunk - left) if left < self.chunk else 0.0
        self.now += ms
        self.busy_ms += ms
        done = [sample for sample in self.filling if not sample.unread]
        self.filling = [sample for sample in self.filling if sample.unread]
        for sample in done:
            if not self.embedded:
                self._draw(sample, 1)
            if sample.drawn < sample.length:
                self.running.append(sample)
            else:
                ended.append(sample)
        return ended

    def _round(self) -> list[SimSample]:
        self._retract()
        running = self.running
        batch = len(running)
        context = sum([s.prompt + s.drawn for s in running])
        config = self._choose(batch, context)
        trees = self._trees(config, context) if config.topk > 1 else None
        if trees is None:
            ms, doubtful = self.durations.ms(config, batch, context)
        else:
            ms, doubtful = self.durations.tree_ms(config, batch, context, trees.verified)
        self.looked_up += 1
        self.extrapolated += doubtful
        steps = config.num_steps
        drafting = self._drafting(config, batch)
        ms += self._change(config) + self._catch_up(config, drafting)
        self.now += ms
        self.busy_ms += ms
        marks = []
        ended = []
        for i, sample in enumerate(running):
            assert sample.noise is not None
            first, second = sample.noise(), sample.noise()
            accepted = 0
            if steps and i < drafting:
                if trees is None:
                    accepted = self.acceptance.accept(sample.regime, steps, first)
                else:
                    accepted = trees.accept(i, first)
                marks.append(accepted)
            sample.regime = self.acceptance.advance(
                sample.regime, sample.share, accepted + 1, second
            )
            sample.rounds += 1
            self._draw(sample, accepted + 1)
            if sample.drawn >= sample.length:
                ended.append(sample)
        self._log.add(config, batch, context, ms, histogram_of(steps, marks))
        self.rounds[config] = self.rounds.get(config, 0) + 1
        if isinstance(self.policy, SpecRule):
            self.policy.observe(config, marks, batch - len(marks))
        if trees is not None and self.budget is not None:
            self.budget.observe(trees.scores[trees.keep], trees.on_path[trees.keep])
            self.budget.timed(batch, context, trees.verified, ms)
        if ended:
            self._full = False
            self.running = [s for s in running if s.drawn < s.length]
        return ended

    def _trees(self, config: SpecConfig, context: int) -> _Trees:
        grown = [
            self.acceptance.tree(s.regime, config.num_steps, config.topk) for s in self.running
        ]
        return _Trees(grown, self.budget, context, config.num_draft_tokens - 1)

    def _draw(self, sample: SimSample, tokens: int) -> None:
        new = min(tokens, sample.length - sample.drawn)
        sample.drawn += new
        self.tokens += new
        self._used += new
        if sample.drawn >= sample.length:
            sample.ended_ms = self.now
            self._used -= sample.context
            self._forget(sample)

    def _remember(self, sample: SimSample) -> None:
        self._prompts[sample.group] = self._prompts.get(sample.group, 0) + 1

    def _forget(self, sample: SimSample) -> None:
        """Note that a sample has left. The embedded engine frees a prompt with its last sample; SGLang keeps it."""
        self._prompts[sample.group] -= 1
        if self.embedded and not self._prompts[sample.group]:
            del self._prompts[sample.group]

    def _retract(self) -> None:
        """Put samples back into the queue until a round has room: as SGLang, those with the fewest tokens first."""
        if self._used + len(self.running) <= self.max_tokens:
            return
        order = sorted(self.running, key=lambda s: (s.drawn, -s.prompt))
        while len(self.running) > 1 and self._used + len(self.running) > self.max_tokens:
            self.waiting.extendleft(self.take([order.pop(0).id]))
            self.retracted += 1
            self._full = True

    def _choose(self, batch: int, context: int) -> SpecConfig:
        if isinstance(self.policy, SpecRule):
            return self.policy.choose(batch, context, self._missed, apart=not self.embedded)
        return self.policy.choose(batch, context)

    def _missed(self, count: int) -> int:
        """Return the tokens that the drafter has not read, of the `count` samples that missed least."""
        return sum(sorted([s.missed for s in self.running])[:count])

    def _drafting(self, config: SpecConfig, batch: int) -> int:
        """Return how many samples draft: the first ones of `running`, which is sorted for it if not all do."""
        if config.off:
            return 0
        count = self.policy.catch_up if isinstance(self.policy, SpecRule) else batch
        if count < batch:
            self.running.sort(key=lambda s: s.missed)
        return min(count, batch)

    def _catch_up(self, config: SpecConfig, drafting: int) -> float:
        """Return the ms in which the drafter reads what the drafting samples missed; the others miss one token more."""
        read = 0
        for i, sample in enumerate(self.running):
            if i < drafting:
                read += sample.missed
                sample.missed = 0
            else:
                sample.missed += 1
        return read * self.durations.cost.catch_up_ms

    def _change(self, config: SpecConfig) -> float:
        before = self._last
        self._last = config
        return 0.0 if before is None or before == config else self.durations.cost.switch_ms
