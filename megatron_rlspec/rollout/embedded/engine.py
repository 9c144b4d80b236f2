"""The embedded engine: a `RolloutEngine` in plain torch that runs inside the calling process, on CPU or GPU.

A step admits waiting requests, prefills at most `prefill_chunk` tokens of prompts and of samples that have begun, and
runs one round over all samples that are prefilled. In a round, the drafter runs on the tokens committed since its last
run and drafts a chain; the target verifies it in one masked pass; the verifier commits at least one token per sample.

The threads that call `generate` run the steps. Several threads may call; their requests share rounds. Under tensor
parallelism every rank must make the same calls between the same rounds, because forward passes, `fingerprints` and the
times that a rule learns from are collectives. `extensions/migration/embedded/engine.py` extends this engine.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_rlspec.config.spec import MOST_DRAFTS
from megatron_rlspec.engine import EngineDescription, EngineError
from megatron_rlspec.models.config import sharpness_of
from megatron_rlspec.push.bucket import Bucket
from megatron_rlspec.push.fingerprint import fingerprints
from megatron_rlspec.push.update import update_weights
from megatron_rlspec.rollout.embedded.cache import Cache
from megatron_rlspec.rollout.embedded.choice import ConfigChoice
from megatron_rlspec.rollout.embedded.model import Architecture, Decoder, is_drafter
from megatron_rlspec.rollout.embedded.parallel import Solo, TensorParallel
from megatron_rlspec.rollout.embedded.requests import ActiveRequest
from megatron_rlspec.rollout.embedded.rounds import RoundRunner
from megatron_rlspec.rollout.embedded.scheduler import Scheduler
from megatron_rlspec.rollout.embedded.verify import Committed
from megatron_rlspec.speculation.acceptance import histogram_of
from megatron_rlspec.speculation.round_log import Round, RoundLog
from megatron_rlspec.types import (
    OFF,
    Drafts,
    Partial,
    Request,
    RoundStats,
    Sample,
    Sampling,
    Scope,
    SpecConfig,
    Verifier,
    checked_sharpness,
)

# what a rule chooses among if neither it nor the engine's caller names candidates
CANDIDATES = (OFF, SpecConfig(1), SpecConfig(2), SpecConfig(3), SpecConfig(5))
_CLOSED = "closed"


@dataclass
class _Update:
    """An open update.

    version   of the weights once the update has ended
    names     the tensors of its scope, which `send` takes
    doubtful  tensors whose content was unknown when the update began. `send` removes those that arrive; what is left at
              the end makes the update fail
    """

    version: int
    scope: Scope
    names: set[str]
    doubtful: set[str]


class EmbeddedEngine:
    """See `RolloutEngine`.

    hf_config             config.json; it may hold an EAGLE-3 drafter's (conversion/drafter_files.py), which then drafts
    tensors               the first weights, all of them, under Hugging Face names
    draft_words           [S] int64, ascending: the token ids that an EAGLE-3 drafter drafts from; None without one
    config                how many drafts a round makes until `set_config` or `set_spec_rule`
    candidates            what a rule chooses among if it names none
    drafts                coupled: under position_keyed, drafts take the verifier's noise; argmax: the likeliest token
    max_total_tokens      slots of the KV cache. When they run out, the youngest sample goes back into the queue and its
                          KV cache is recomputed later
    max_running_requests  samples that run at once
    max_length            tokens of a sample, the prompt included
    prefill_chunk         most tokens of one prefill, between two rounds
    group                 the tensor-parallel group; None: one rank. All ranks must pass equal arguments
    version               of the first weights, and later of the present ones
    tokenizer             a function that loads the model's tokenizer, called at the first request with stop strings.
                          None: such requests are refused
    ends                  token ids that end a text, beside those of config.json

    Raises ValueError for arguments that contradict each other, and for a model that the engine does not run.
    """

    bucket_memory = None  # buckets have the tensors themselves

    def __init__(
        self,
        hf_config: Mapping[str, Any],
        tensors: Iterable[tuple[str, Tensor]],
        *,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        verifier: Verifier = "position_keyed",
        drafts: Drafts = "coupled",
        config: SpecConfig = OFF,
        candidates: Sequence[SpecConfig] = CANDIDATES,
        max_running_requests: int = 256,
        max_total_tokens: int = 65536,
        max_length: int = 4096,
        prefill_chunk: int = 2048,
        group: torch.distributed.ProcessGroup | None = None,
        version: int = 0,
        draft_words: Tensor | None = None,
        tokenizer: Callable[[], Any] | None = None,
        ends: Iterable[int] = (),
    ) -> None:
        # columns of a row of the cache: a sample, and drafts behind its last token
        columns = max_length + MOST_DRAFTS
        if max_total_tokens < columns:
            raise ValueError(
                f"max_total_tokens={max_total_tokens} does not hold one sample of max_length={max_length} "
                f"and its {MOST_DRAFTS} drafts"
            )
        self.arch = Architecture.from_hf(hf_config)
        comm = TensorParallel(group) if group is not None else Solo()
        self.model = Decoder(self.arch, dtype, device, comm, columns)
        if self.arch.eagle3:
            assert draft_words is not None
            self.model.draft_ids = draft_words.to(device)
        self.cache = Cache(self.model, max_running_requests, columns, max_total_tokens)
        self.rounds = RoundRunner(
            self.cache, verifier, drafts, prefill_chunk, sharpness_of(hf_config)
        )
        all_ends = {*self.arch.eos, *ends}
        self.scheduler = Scheduler(self.cache, self.rounds, max_length, all_ends, tokenizer)
        self.choice = ConfigChoice(self.model, candidates)
        self.max_running_requests = max_running_requests
        self._log = RoundLog()
        # A step holds it, and so do all calls that change requests, weights or the choice of drafts.
        self._lock = threading.RLock()
        self._update_ended = threading.Condition(self._lock)
        self._update: _Update | None = None
        self._broken = "no weights"  # why the engine cannot generate; empty if it can
        # Tensors whose content is unknown, because no finished update brought them.
        self._doubtful = set(self.model.tensors)
        self.set_config(config)
        update_weights(self, version, tensors)

    @property
    def running(self) -> list[ActiveRequest]:
        """Return the scheduler's own list of runs with a row; change it only under the lock."""
        return self.scheduler.running

    @property
    def waiting(self) -> list[ActiveRequest]:
        """Return the scheduler's own list of runs without a row."""
        return self.scheduler.waiting

    # -- RolloutEngine ------------------------------------------------------------------------------------------------

    def generate(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        on_sample: Callable[[Sample], None] | None = None,
    ) -> list[Sample]:
        with self._lock:
            runs = self.scheduler.submit([(request, sampling) for request in requests])
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
                    self._update_ended.wait_for(lambda: self._update is None)
                    # If another caller's step has ended samples of this call meanwhile, deliver these first.
                    if all(run.sample is None for run in open_runs):
                        self._serve()
                # locks are not fair: let another thread take this one between two rounds
                time.sleep(0)
        except EngineError as error:
            # before `so_far`: `remove` stores how many draws a running sample has used
            with self._lock:
                for run in runs:
                    self.scheduler.remove(run)
            begun = {}
            for run in open_runs:
                if run.response:
                    begun[run.request.id] = Partial.of(run.so_far("aborted"))
            error.begun = begun
            raise
        finally:
            # Leave nothing in the engine after any other error either, such as one of `on_sample`.
            with self._lock:
                for run in runs:
                    self.scheduler.remove(run)
        return [run.sample for run in runs if run.sample is not None]

    def begin_update(self, version: int, scope: Scope = "all") -> None:
        """See `RolloutEngine`. An update may bring a part of the scope's tensors; the others keep their content.

        Running samples go back into the queue; their KV cache is recomputed under the new weights. Calls of `generate`
        wait until `end_update`. One update at a time: a second one replaces an open one, whose tensors it must bring.
        """
        names = set()
        for name in self.model.tensors:
            if scope == "all" or (scope == "drafter") == is_drafter(name):
                names.add(name)
        with self._lock:
            self.scheduler.retract()
            self._broken = f"the update to version {version} did not finish"
            # `send` shrinks the update's set only. The engine's set has the whole scope until the update has finished.
            self._update = _Update(version, scope, names, self._doubtful)
            self._doubtful = self._doubtful | names

    def send(self, bucket: Bucket, *others: Any) -> None:
        """See `RolloutEngine`. Raises EngineError for an unexpected tensor or a wrong shape.

        others  always empty here: this engine's `bucket_memory` is None
        """
        with self._lock:
            update = self._update
            assert update is not None, "no update is open"
            for name, tensor in bucket.tensors:
                # A tied head is a view of the embedding, so a tensor of its own is not needed.
                if name == "lm_head.weight" and self.arch.tied and update.scope != "drafter":
                    continue
                if name not in update.names:
                    raise _refusal(update, f"unexpected tensor {name}")
                try:
                    self.model.write(name, tensor)
                except ValueError as error:
                    raise _refusal(update, str(error)) from None
                update.doubtful.discard(name)

    def end_update(self, error: str = "") -> None:
        """See `RolloutEngine`. Raises EngineError if the content of a tensor is still unknown.

        After that EngineError the update stays open: `push/update.py` then calls this again with an `error`, which ends
        the update. Without an open update the call counts as a failed one, and the engine serves nothing.
        """
        with self._lock:
            update = self._update
            if error or update is None:
                self._broken = self._broken or f"an update did not finish: {error}"
            else:
                self._finish(update)
            self._update = None
            self._update_ended.notify_all()

    def _finish(self, update: _Update) -> None:
        """Take the new weights into use. Raises EngineError if the content of a tensor is unknown."""
        doubtful = update.doubtful
        self._doubtful = doubtful
        if doubtful:
            raise _refusal(
                update,
                f"{len(doubtful)} of {len(self.model.tensors)} tensors never arrived or failed before, "
                f"and are missing now; among them {min(doubtful)}",
            )
        self.model.renew_draft_head()
        self.cache.clear()  # `begin_update` has taken all rows, and nothing is admitted during an update
        self.version = update.version
        self._broken = ""

    update_weights = update_weights  # the function of `push/update.py`, as a method

    def set_config(self, config: SpecConfig, sharpness: float | None = None) -> None:
        with self._lock:
            # Both may raise, so they come first: a refused call changes nothing.
            sharpness = self._sharpness(sharpness)
            self.choice.set_config(config)
            self.rounds.selection = None  # a fixed configuration verifies all drafts
            self.rounds.sharpness = sharpness

    def set_spec_rule(self, rule: Mapping[str, Any]) -> None:
        """See `RolloutEngine`. Raises EngineError, and ValueError as `SpecRule.from_json`; then nothing changes."""
        with self._lock:
            sharpness = self._sharpness(rule.get("sharpness"))
            self.choice.set_rule(rule)
            self.rounds.sharpness = sharpness

    def _sharpness(self, given: Any) -> float:
        """Return the sharpness given; the present one for None. Raises EngineError for a value out of range."""
        if given is None:
            return self.rounds.sharpness
        try:
            return checked_sharpness(given)
        except ValueError as error:
            raise EngineError(f"embedded engine: sharpness={error}") from None

    def set_draft_vocabulary(self, words: np.ndarray) -> None:
        with self._lock:
            try:
                self.model.set_draft_vocabulary(torch.as_tensor(words))
            except ValueError as error:
                raise EngineError(f"embedded engine: {error}") from None

    def spec_rule_report(self) -> dict[str, Any]:
        with self._lock:
            return self.choice.report()

    def hold(self, reason: str) -> None:
        with self._lock:
            self.choice.held = reason

    def release(self) -> None:
        with self._lock:
            self.choice.held = ""

    def describe(self) -> EngineDescription:
        return {
            "verifier": self.rounds.verifier,
            "drafts": "coupled" if self.rounds.coupled else "argmax",
            "sharpness": self.rounds.sharpness,
            "configs": [config.to_json() for config in self.choice.candidates],
            "speculative": bool(self.arch.draft_layers),
            "tensor_parallel": self.model.comm.size,
            "max_total_tokens": self.cache.total,
            "max_running_requests": self.max_running_requests,
            "draft_vocabulary": self.model.draft_vocabulary,
            "held": self.choice.held,
            "unnamed": "",
        }

    @property
    def alive(self) -> bool:
        return self._broken != _CLOSED

    def sleep(self) -> None:
        """Do nothing: the engine shares the trainer's process."""

    def wake(self) -> None:
        """Do nothing."""

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        with self._lock:
            for run in self.scheduler.every:
                run.abort |= request_ids is None or run.request.id in request_ids

    def stats(self) -> list[RoundStats]:
        with self._lock:
            return self._log.take()

    def recent_rounds(self) -> list[Round]:
        """Return and forget the newest decode rounds, in order. For benchmarks; not a part of `RolloutEngine`.

        `stats` is not affected.
        """
        with self._lock:
            return self._log.take_recent()

    def fingerprints(self) -> dict[str, int]:
        """See `RolloutEngine`. Collective under tensor parallelism: every rank must call it."""
        with self._lock:
            marks = fingerprints(tensor for _, tensor in self.model.full_tensors())
            # `full_tensors` iterates over `tensors`, so both have one order
            return dict(zip(self.model.tensors, marks, strict=True))

    def close(self) -> None:
        with self._lock:
            self._broken = _CLOSED

    # -- between rounds -----------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        """Run one step: admit, prefill, one round. The caller holds the lock.

        Raises EngineError if the engine cannot generate, as within an update.
        """
        if self._broken:
            raise EngineError(f"embedded engine: {self._broken}")
        for run in [run for run in self.scheduler.every if run.abort]:
            self.scheduler.end(run, "aborted")
        # An error below leaves this reason behind: rows of the cache may then be half written.
        self._broken = "an earlier round failed"
        with torch.inference_mode():
            self.scheduler.admit()
            self.rounds.prefill([run.row for run in self.running])
            ready = [run for run in self.running if self.rounds.ready(run.row)]
            # Samples of one token cannot be drafted. They get a plain round of their own first.
            single_token: list[ActiveRequest] = []
            if self.choice.present != OFF:
                single_token = [run for run in ready if not self.rounds.can_draft(run.row)]
            self._round(single_token, may_draft=False)
            # That round may have taken rows from runs of `ready`, to make room for its own samples.
            self._round([run for run in ready if run.row >= 0 and run not in single_token])
        self._broken = ""

    def _round(self, runs: list[ActiveRequest], may_draft: bool = True) -> None:
        """Run one round of these samples, or of those that the cache has room for, and let the rule learn from it.

        may_draft  whether `ConfigChoice` chooses a configuration. If not, the round is a plain one, and no rule learns
                   its duration: the rule did not choose it
        """
        if not runs:
            return
        began = time.perf_counter()
        rows = np.array([run.row for run in runs])
        context = int(self.cache.length[rows].sum())
        config = OFF
        if may_draft:
            config = self.choice.choose(len(rows), context, lambda: self.rounds.missed(rows))
        runs = self.scheduler.make_room(runs, self.rounds.columns(rows, config))
        if not runs:
            return
        rows = np.array([run.row for run in runs])  # again: some may have gone back into the queue
        rule = self.choice.deciding_rule
        if rule is not None:
            self.rounds.selection = rule if rule.selection is not None else None
        committed = self.rounds.round(rows, config)
        round_ms = (time.perf_counter() - began) * 1e3
        accepted = committed.accepted
        verified = committed.verified
        if_all: Sequence[float] = ()
        if rule is not None:
            if_all = rule.observe(config, accepted, verified, committed.logq)
            if may_draft:
                # Collective. All ranks must learn one duration: with their own, they would choose different rounds.
                mean_ms = self.model.comm.mean(round_ms, self.model.device)
                rule.timed(config, len(rows), context, mean_ms, drafts=float(verified.mean()))
        self._append(runs, committed)
        # The log has the whole round. A rule learns `round_ms`, which is known before the samples are extended.
        ms = (time.perf_counter() - began) * 1e3
        counts = histogram_of(config.num_steps, accepted)
        drafts_verified = int(verified.sum())
        self._log.add(config, len(runs), context, ms, counts, drafts_verified, if_all)

    def _append(self, runs: Sequence[ActiveRequest], committed: Committed) -> None:
        """Append what a round committed to its samples, and end those that it ends."""
        tokens = committed.tokens.tolist()
        logprobs = committed.logprobs.tolist()
        counts = (committed.accepted + 1).tolist()  # accepted drafts, and the target's own token
        for i, run in enumerate(runs):
            count = counts[i]
            status = run.commit(tokens[i][:count], logprobs[i][:count], self.version)
            if status is not None:
                self.scheduler.end(run, status)


def _refusal(update: _Update, problem: str) -> EngineError:
    """Return the error of an update, to be raised."""
    return EngineError(f"embedded engine: update of {update.scope}: {problem}")
