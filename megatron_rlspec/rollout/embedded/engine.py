"""The embedded engine: a `RolloutEngine` in plain torch that runs inside the calling process, on CPU or GPU.

A step admits waiting requests, prefills at most `prefill_chunk` prompt tokens, and runs one round over all samples
whose prompt is prefilled. In a round, the drafter runs on the tokens committed since its last run and drafts a chain or
a tree; the target verifies it in one masked pass; the verifier commits at least one token per sample.

The threads that call `generate` run the steps. Several threads may call; their requests share rounds. Under tensor
parallelism every rank must make the same calls.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, get_args

import numpy as np
import torch

from megatron_rlspec.engine import EngineDescription, EngineError
from megatron_rlspec.rollout.embedded.cache import Cache
from megatron_rlspec.rollout.embedded.model import Architecture, Decoder, is_drafter
from megatron_rlspec.rollout.embedded.parallel import Solo, TensorParallel
from megatron_rlspec.rollout.embedded.requests import ActiveRequest, Landing
from megatron_rlspec.rollout.embedded.rounds import Budget, RoundRunner, scratch
from megatron_rlspec.speculation.acceptance import histogram_of
from megatron_rlspec.speculation.learnt_cost import LearntCost
from megatron_rlspec.speculation.rule import SpecRule
from megatron_rlspec.sync.fingerprint import fingerprints
from megatron_rlspec.types import (
    OFF,
    Drafts,
    Held,
    Load,
    Partial,
    Request,
    RoundStats,
    Sample,
    Sampling,
    Scope,
    SpecConfig,
    SpecSchedule,
    Status,
    Verifier,
    ended,
)

CANDIDATES = (OFF, SpecConfig(1), SpecConfig(2), SpecConfig(3), SpecConfig(5))  # of a rule without candidates
RECENT = 4096  # rounds that `recent_rounds` keeps
_CLOSED = "closed"


class EmbeddedEngine:
    """See `RolloutEngine`.

    hf_config             config.json; it may hold an EAGLE-3 drafter's (checkpoint/drafter_files.py), which then drafts
    tensors               the first weights, all of them, under Hugging Face names
    draft_words           the token ids that an EAGLE-3 drafter drafts from, ascending
    drafts                coupled: under position_keyed, drafts take the verifier's noise; argmax: the likeliest token
    max_total_tokens      slots of the KV cache. When they run out, the youngest sample goes back into the queue and its
                          KV cache is recomputed later
    max_running_requests  samples that run at once
    max_length            tokens of a sample
    max_draft_tokens      nodes of a round
    budget                chooses among drafted nodes; refused under rejection, which it would make lossy, because it
                          chooses by the drafter's probabilities
    group                 the tensor-parallel group

    Raises ValueError for arguments that contradict each other.
    """

    bucket_memory = None

    def __init__(
        self,
        hf_config: Mapping[str, Any],
        tensors: Iterable[tuple[str, torch.Tensor]],
        *,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        verifier: Verifier = "position_keyed",
        drafts: Drafts = "coupled",
        schedule: SpecSchedule | None = None,
        candidates: Sequence[SpecConfig] = CANDIDATES,
        budget: Budget | None = None,
        max_running_requests: int = 256,
        max_total_tokens: int = 65536,
        max_length: int = 4096,
        max_draft_tokens: int = 64,
        prefill_chunk: int = 2048,
        share_prefix: bool = True,
        group: torch.distributed.ProcessGroup | None = None,
        version: int = 0,
        draft_words: torch.Tensor | None = None,
    ) -> None:
        if max_total_tokens < max_length + max_draft_tokens:
            raise ValueError(
                f"max_total_tokens={max_total_tokens} does not hold one sample of max_length={max_length} "
                f"and its {max_draft_tokens} drafts"
            )
        if budget is not None and verifier == "rejection":
            raise ValueError("a tree budget is not lossless with verifier=rejection; take position_keyed")
        if verifier not in get_args(Verifier):
            raise ValueError(f"verifier={verifier!r}; known: {', '.join(get_args(Verifier))}")
        comm = TensorParallel(group) if group is not None else Solo()
        self.arch = Architecture.from_hf(hf_config)
        self.model = Decoder(self.arch, dtype, device, comm, max_length + max_draft_tokens)
        if self.arch.taps:
            if draft_words is None or len(draft_words) != self.arch.draft_words:
                raise ValueError(f"an EAGLE-3 drafter needs draft_words, {self.arch.draft_words} token ids")
            self.model.draft_ids = draft_words.to(device)
        columns = max_length + max_draft_tokens
        self.cache = Cache(self.model, max_running_requests, columns, max_total_tokens, share_prefix)
        self.rounds = RoundRunner(self.cache, verifier, drafts, budget, prefill_chunk)
        self.max_length = max_length
        self.max_draft_tokens = max_draft_tokens
        self.max_running_requests = max_running_requests
        self.running: list[ActiveRequest] = []
        self.waiting: list[ActiveRequest] = []
        self.reserved: dict[str, int] = {}  # rows of samples that another engine hands over, by id
        self._stats: dict[tuple[SpecConfig, int], list[Any]] = {}
        self._recent: deque[tuple[SpecConfig, int, int, float | None]] = deque(maxlen=RECENT)
        self._lock = threading.Condition()
        self._active = 0  # running calls of `generate`
        self._pausing = False
        self._paused = False
        self._rule: SpecRule | None = None  # the last rule set; a schedule may have replaced it since
        self._broken = "no weights"  # why the engine cannot generate; empty if it can
        self._doubtful = set(self.model.tensors)  # tensors that no update has delivered completely
        self.candidates = tuple(candidates)
        self._held = ""
        self._schedule: SpecSchedule | SpecRule
        self.set_schedule(schedule or SpecSchedule.fixed(OFF))
        self.update_weights(version, tensors)

    # -- RolloutEngine ------------------------------------------------------------------------------------------------

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, on_sample: Callable[[Sample], None] | None = None
    ) -> list[Sample]:
        with self._lock:
            runs = self.submit([(request, sampling) for request in requests])
            self._active += 1
        try:
            open_runs = runs
            while True:
                done = [run for run in open_runs if run.sample is not None]
                open_runs = [run for run in open_runs if run.sample is None]
                if on_sample is not None:
                    for sample in [run.sample for run in done if run.sample is not None]:
                        on_sample(sample)
                if not open_runs:
                    break
                with self._lock:
                    if all(run.sample is None for run in open_runs):  # no other caller's step has ended one
                        self._serve()
                time.sleep(0)  # locks are not fair: let another thread take this one between two rounds
        except EngineError as error:
            with self._lock:
                for run in runs:
                    self._remove(run)
            error.begun = {run.request.id: Partial.of(run.so_far("aborted")) for run in open_runs if run.response}
            raise
        finally:
            with self._lock:
                self._active -= 1
                for run in runs:
                    self._remove(run)
                if not self.running and not self.waiting and not self._broken:
                    self.cache.audit()
                self._lock.notify_all()
        return [run.sample for run in runs if run.sample is not None]

    def update_weights(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]], scope: Scope = "all") -> None:
        """See `RolloutEngine`. An update may hold a part of the scope's tensors.

        Raises EngineError for an unexpected tensor or a wrong shape. Raises it also if a tensor is missing that no
        earlier update delivered completely. Running samples go back into the queue; their KV cache is recomputed under
        the new weights.
        """
        mine = {n for n in self.model.tensors if scope == "all" or (scope == "drafter") == is_drafter(n)}
        with self._lock:
            self._retract()
            self._broken = f"the update to version {version} did not finish"
            doubtful = self._doubtful
            self._doubtful = doubtful | mine
            for name, tensor in tensors:
                if name == "lm_head.weight" and self.arch.tied and scope != "drafter":
                    continue
                if name not in mine:
                    raise EngineError(f"embedded engine: update of {scope}: unexpected tensor {name}")
                try:
                    self.model.write(name, tensor)
                except ValueError as error:
                    raise EngineError(f"embedded engine: update of {scope}: {error}") from None
                doubtful.discard(name)
            self._doubtful = doubtful
            if doubtful:
                raise EngineError(
                    f"embedded engine: update of {scope}: {len(doubtful)} of {len(self.model.tensors)} tensors never "
                    f"arrived or failed before, and are missing now; among them {min(doubtful)}"
                )
            self.model.renew_draft_head()
            self.cache.clear()
            self.version = version
            self._broken = ""

    def set_schedule(self, schedule: SpecSchedule) -> None:
        self._check_configs(config for row in schedule.configs for config in row)
        self._schedule = schedule

    def set_spec_rule(self, rule: Mapping[str, Any]) -> None:
        """Choose the configuration of every round by `SpecRule.from_json(rule)`.

        Without `candidates` in `rule`, the engine's own are used. The new rule takes over the probe budget of the rule
        before it, and the time of its next probe.
        """
        own = [[c.num_steps, c.topk, c.num_draft_tokens] for c in self.candidates]
        made = SpecRule.from_json({"candidates": own} | dict(rule))
        self._check_configs(made.candidates)
        with self._lock:
            if self._rule is not None:
                made.inherit(self._rule)
            self._schedule = self._rule = made

    def set_draft_vocabulary(self, words: np.ndarray) -> None:
        with self._lock:
            if isinstance(self._schedule, SpecSchedule):
                self._check_configs((config for row in self._schedule.configs for config in row), len(words))
            try:
                self.model.set_draft_vocabulary(torch.as_tensor(words))
            except ValueError as error:
                raise EngineError(f"embedded engine: {error}") from None

    @property
    def schedule(self) -> SpecSchedule | SpecRule:
        """Return the schedule or rule that chooses the next round's configuration."""
        return SpecSchedule.fixed(OFF) if self._held else self._schedule

    def spec_rule_report(self) -> dict[str, Any]:
        """Return `SpecRule.report` since the last call; empty under a schedule."""
        with self._lock:
            return self._schedule.report() if isinstance(self._schedule, SpecRule) else {}

    def hold(self, reason: str) -> None:
        with self._lock:
            self._held = reason or "held"

    def release(self) -> None:
        with self._lock:
            self._held = ""

    def describe(self) -> EngineDescription:
        return {
            "verifier": self.rounds.verifier,
            "drafts": "coupled" if self.rounds.coupled else "argmax",
            "configs": [[c.num_steps, c.topk, c.num_draft_tokens] for c in self.candidates],
            "speculative": self.arch.drafter,
            "tensor_parallel": self.model.comm.size,
            "max_total_tokens": self.cache.total,
            "max_running_requests": self.max_running_requests,
            "draft_vocabulary": 0 if self.model.draft_ids is None else int((self.model.draft_ids >= 0).sum()),
            "held": self._held,
            "unnamed": "",
        }

    @property
    def alive(self) -> bool:
        return self._broken != _CLOSED

    def pause(self) -> None:
        with self._lock:
            self._pausing = True
            while self._pausing and self._active and not self._paused:
                self._lock.wait()
            if self._pausing and not self._paused:  # no `generate` is running that could begin the pause
                self._retract()
                self._paused = True

    def resume(self) -> None:
        with self._lock:
            self._pausing = self._paused = False
            self._lock.notify_all()

    def sleep(self) -> None:
        """Do nothing: the engine shares the trainer's process."""

    def wake(self) -> None:
        """Do nothing."""

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        with self._lock:
            for run in (*self.running, *self.waiting):
                run.abort |= request_ids is None or run.request.id in request_ids
            self._lock.notify_all()

    def not_begun(self) -> list[str]:
        with self._lock:
            return [run.request.id for run in self.waiting if not run.seats]

    def stats(self) -> list[RoundStats]:
        with self._lock:
            drained = self._stats
            self._stats = {}
        found = []
        for (config, batch), (rounds, ms, context, accepted) in drained.items():
            found.append(RoundStats(config, batch, context // max(rounds, 1), rounds, ms, tuple(accepted)))
        return found

    def recent_rounds(self) -> list[tuple[SpecConfig, int, int, float | None]]:
        """Drain the newest decode rounds, in order: (config, batch, context tokens, ms)."""
        with self._lock:
            drained = list(self._recent)
            self._recent.clear()
        return drained

    def fingerprints(self) -> dict[str, int]:
        with self._lock:
            marks = fingerprints(tensor for _, tensor in self.model.full_tensors())
            return dict(zip(self.model.tensors, marks, strict=True))

    def close(self) -> None:
        with self._lock:
            self._broken = _CLOSED
            self._lock.notify_all()

    # -- step by step, for a fleet of engines -------------------------------------------------------------------------

    def submit(self, requests: Sequence[tuple[Request, Sampling]]) -> list[ActiveRequest]:
        """Queue requests; `step` draws them. Raises EngineError, and queues none, if one of them is wrong."""
        with self._lock:
            known = {run.request.id for run in (*self.running, *self.waiting)}
            runs = self.made(requests)
            for run in runs:
                self.check(run, known)
            self.waiting += [run for run in runs if run.sample is None]
            return runs

    def made(self, requests: Sequence[tuple[Request, Sampling]]) -> list[ActiveRequest]:
        """Return requests as this engine works on them."""
        ends = frozenset(self.arch.eos)
        runs = []
        for request, sampling in requests:
            stops = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else ends)
            runs.append(ActiveRequest(request, sampling, stops))
        return runs

    @property
    def unable(self) -> str:
        """Return why the engine cannot run rounds now; "" if it can."""
        return self._broken or ("it is paused" if self._paused else "")

    def step(self, landing: Landing | None = None) -> None:
        """Admit, prefill and run one round, in which the samples of `landing` take part. Raises EngineError."""
        with self._lock:
            self._serve(landing)

    def drop(self, ids: Sequence[str]) -> list[ActiveRequest]:
        """Take these samples out, without an end. Returns those that were here."""
        with self._lock:
            found = [run for run in (*self.running, *self.waiting) if run.request.id in ids]
            for run in found:
                self._remove(run)
            return found

    def seat(
        self, requests: Sequence[tuple[Request, Sampling]], rows: Mapping[str, int], rule: SpecRule | None
    ) -> list[ActiveRequest]:
        """Replace all requests by these: those that have a row of the cache already, by id, and others that wait.

        rule  replaces the engine's own, if given
        """
        with self._lock:
            runs = self.made(requests)
            self.running = []
            self.waiting = []
            for run in runs:
                run.row = rows.get(run.request.id, -1)
                if run.row >= 0:
                    self.rounds.seat(run.row, run.sampling, run.request.seed, run.draws)
                    run.seats += 1
                    self.running.append(run)
                else:
                    self.waiting.append(run)
            if rule is not None:
                self._schedule = self._rule = rule
            return runs

    def load(self, name: str) -> Load:
        """Describe what this engine has to do."""
        with self._lock:
            ready = [run for run in self.running if self.rounds.ready(run.row) and run.response]
            held = tuple(Held(*run.progress(), run.request.prompt.id) for run in ready)
            waiting = len(self.waiting) + len(self.running) - len(ready)
            return Load(name, held, waiting, self.cache.left, self.version)

    # -- between rounds -----------------------------------------------------------------------------------------------

    def _check_configs(self, configs: Iterable[SpecConfig], words: int = 0) -> None:
        """Raise EngineError for a configuration that cannot run. `words`: of the draft vocabulary, if it changes."""
        words = words or (self.arch.vocab if self.model.draft_ids is None else self.describe()["draft_vocabulary"])
        for config in configs:
            if config.topk > words:
                raise EngineError(f"embedded engine: {config} drafts {config.topk} words at once, from only {words}")
            nodes = scratch(config)
            if not config.off and not self.arch.drafter:
                raise EngineError(f"embedded engine: {config} needs a drafter, and the model has none")
            if config.topk > 1 and self.rounds.verifier == "rejection":
                raise EngineError(f"embedded engine: {config} is a tree; verifier=rejection takes chains only")
            if nodes > self.max_draft_tokens:
                raise EngineError(f"embedded engine: {config} needs max_draft_tokens >= {nodes}")

    def check(self, run: ActiveRequest, known: set[str]) -> None:
        """Refuse a wrong request. Ends a run whose partial sample has ended already."""
        request = run.request
        length = len(request.prompt.tokens)
        if not 0 < length < self.max_length:
            raise EngineError(f"request {request.id}: {length} prompt tokens; expected 1 to {self.max_length - 1}")
        if request.id in known:
            raise EngineError(f"request {request.id}: the id is already in use")
        known.add(request.id)
        if request.partial is not None:
            try:
                status = ended(run.response, run.stops, self._limit(run))
            except ValueError as error:
                raise EngineError(f"request {request.id}: {error}") from None
            if status is not None:
                run.finish(status)

    def _limit(self, run: ActiveRequest) -> int:
        """Return the longest response that a run may have."""
        return min(run.sampling.max_new_tokens, self.max_length - len(run.request.prompt.tokens))

    def _serve(self, landing: Landing | None = None) -> None:
        """Run one step, unless the engine is broken or paused. The caller holds the lock. Raises EngineError."""
        if self._broken:
            raise EngineError(f"embedded engine: {self._broken}")
        self._agree()
        aborted = [run for run in (*self.running, *self.waiting) if run.abort]
        for run in aborted:
            self._end(run, "aborted")
        if self._paused:
            if not aborted:
                self._lock.wait(timeout=1.0)
            return
        self._broken = "an earlier round failed"
        with torch.inference_mode():
            self._admit()
            self.rounds.prefill([run.row for run in self.running])
            self._round([run for run in self.running if self.rounds.ready(run.row)], landing)
        self._broken = ""

    def _admit(self) -> None:
        while self.waiting:
            if self.running and self.cache.left < self.cache.total // 16:
                return  # samples admitted into the last slots would go back into the queue at once
            run = self.waiting[0]
            prompt = np.asarray(run.request.prompt.tokens, np.int64)
            row = self.cache.open(np.concatenate([prompt, np.asarray(run.response, np.int64)]), len(prompt))
            if row is None:
                return
            if not self.cache.back(row, len(prompt) + len(run.response)):
                self.cache.close(row)
                return
            self.rounds.seat(row, run.sampling, run.request.seed, run.draws)
            run.row = row
            run.seats += 1
            self.running.append(self.waiting.pop(0))

    def _round(self, runs: list[ActiveRequest], landing: Landing | None) -> None:
        newcomers = landing.runs if landing is not None else []
        if not runs and not newcomers:
            return
        began = time.perf_counter()
        rows = np.array([run.row for run in (*runs, *newcomers)])
        context = int(self.cache.length[rows].sum())
        schedule = self.schedule
        if isinstance(schedule, SpecRule):
            missed = self.rounds.missed(rows)
            config = schedule.choose(len(rows), context, lambda n: missed, apart=False)
        else:
            config = schedule.choose(len(rows), context)
        if not self.rounds.can_draft(rows).any():
            config = OFF
        columns = self.rounds.columns(rows, config)
        room = all(self.cache.back(run.row, n) for run, n in zip(newcomers, columns[len(runs) :].tolist(), strict=True))
        ahead = self.rounds.draft_only(rows[len(runs) :], config) if newcomers and room and not config.off else None
        runs = self._back(runs, columns[: len(runs)])
        if landing is not None:
            landed = landing.land()
            self.running += landed
            runs += landed if room else []
            ahead = ahead if landed else None
        if not runs:
            return
        rows = np.array([run.row for run in runs])
        drafting = np.full(len(rows), True) if config.off else self.rounds.can_draft(rows)
        verified = self.rounds.verified
        committed = self.rounds.round(rows, config, ahead)
        took = (time.perf_counter() - began) * 1e3
        accepted = [new.accepted for new, drafted in zip(committed, drafting, strict=True) if drafted]
        if isinstance(schedule, SpecRule):
            schedule.observe(config, accepted, len(rows) - len(accepted))
            if isinstance(schedule.cost, LearntCost) and len(accepted) == len(rows) and landing is None:
                schedule.timed(config, len(rows), context, self._agreed(took))
        counts = histogram_of(config.num_steps, accepted)
        for run, new in zip(runs, committed, strict=True):
            status = run.commit(new, self.version, self._limit(run))
            if status is not None:
                self._end(run, status)
        if lone := len(rows) - len(accepted):
            self._note(OFF, lone, 0, 0.0, 0, [lone])
        ms = (time.perf_counter() - began) * 1e3
        if self.rounds.budget is not None and config.num_steps > 0:
            self.rounds.budget.timed(len(runs), context, self.rounds.verified - verified, ms)
        self._note(config, len(runs), 1, ms, context, counts)
        self._recent.append((config, len(runs), context, ms))

    def _agreed(self, ms: float) -> float:
        """Return the mean of all tensor-parallel ranks, so that they choose the same."""
        if self.model.comm.size == 1:
            return ms
        own = torch.tensor(ms, dtype=torch.float64, device=self.model.device)
        return float(self.model.comm.sum(own)) / self.model.comm.size

    def _note(
        self, config: SpecConfig, batch: int, rounds: int, ms: float, context: int, accepted: Sequence[int]
    ) -> None:
        """Add to the result of `stats`. Requests of a round that ran without drafts add 0 rounds of their own."""
        entry = self._stats.setdefault((config, batch), [0, 0.0, 0, [0] * len(accepted)])
        entry[0] += rounds
        entry[1] += ms
        entry[2] += context
        entry[3] = [a + b for a, b in zip(entry[3], accepted, strict=True)]

    def _back(self, runs: list[ActiveRequest], columns: np.ndarray) -> list[ActiveRequest]:
        """Get slots for `columns [B]` of every run. While slots lack, the youngest goes back. Returns the others."""
        for run, upto in zip(runs, columns.tolist(), strict=True):
            while run.row >= 0 and not self.cache.back(run.row, upto):
                youngest = self.running.pop()
                self._vacate(youngest)
                self.waiting.insert(0, youngest)
        return [run for run in runs if run.row >= 0]

    def _agree(self) -> None:
        """Begin a requested pause. All tensor-parallel ranks pause, and abort the same requests, at the same round."""
        runs = [*self.running, *self.waiting]
        pausing = self._pausing and not self._paused
        if self.model.comm.size > 1 and not self._paused:
            flags = torch.tensor([pausing, *(run.abort for run in runs)], dtype=torch.int32, device=self.model.device)
            votes = self.model.comm.sum(flags).tolist()
            pausing = votes[0] == self.model.comm.size  # a pause waits for every rank; one rank is enough for an abort
            for run, abort in zip(runs, votes[1:], strict=True):
                run.abort = abort > 0
        if pausing:
            self._retract()
            self._paused = True
            self._lock.notify_all()

    def _retract(self) -> None:
        """Put every running sample back to the head of the queue; its KV cache is recomputed later.

        Rows that are reserved for samples of other engines are given up: what has arrived may be of other weights.
        """
        for row in self.reserved.values():
            self.cache.close(row)
        self.reserved.clear()
        for run in self.running:
            self._vacate(run)
        self.waiting[:0] = self.running
        self.running = []

    def _vacate(self, run: ActiveRequest) -> None:
        run.draws = int(self.rounds.draws[run.row])
        self.cache.close(run.row)
        run.row = -1

    def _remove(self, run: ActiveRequest) -> None:
        """Take a run out of the engine. Repeatable."""
        if run.row >= 0:
            self._vacate(run)
            self.running.remove(run)
        elif run in self.waiting:
            self.waiting.remove(run)

    def _end(self, run: ActiveRequest, status: Status) -> None:
        self._remove(run)
        run.finish(status)
