"""A run's records: a record of each step, lines on the terminal, events and texts. Rank 0 writes them.

`records/recorder.py` writes the files; what is written, and when, is decided here. `session.py` calls it on every rank.
`records/metric_names.toml` lists the metrics, docs/runs.md the files.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from megatron_rlspec import files
from megatron_rlspec.config import Config
from megatron_rlspec.records.clock import Clock
from megatron_rlspec.records.live import line, saved_line
from megatron_rlspec.records.recorder import Decode, Recorder, read_records
from megatron_rlspec.records.sinks import open_sinks
from megatron_rlspec.run.logprob_gap import GAP, LogprobGap
from megatron_rlspec.run.summaries import without_advantage
from megatron_rlspec.tasks import rewards
from megatron_rlspec.types import Sample

SHOWN_TEXTS = 4  # texts of a step that samples.jsonl gets
SHOWN_EVERY = 10  # without rollouts, a line is printed every so many steps
RECENT_STEPS = 8  # steps from whose seconds the remaining time is estimated
TOKENS_SO_FAR = "rollout/tokens_so_far"
WITHOUT_ADVANTAGE = "rollout/groups_without_advantage"
USELESS_STEPS = 10  # after so many steps in a row without any advantage an event says so


class Records:
    """A run's records. Every rank holds one, because every rank counts bad steps; ranks above 0 write nothing.

    clock        measures the seconds of the parts of a step; `write` drains it
    recorder     writes the files; None on ranks above 0
    recorded     steps that have a record
    bad_steps    how many of the newest steps, in a row, skipped all updates of the policy or of the drafter
    why_bad      why the newest step skipped updates; "" if it skipped none
    about        figures for the model card (`model_card.FIGURES`): `steps`, and the newest record and evaluation. On
                 ranks above 0 `steps` only, and not kept up to date
    logprob_gap  the limit on the difference of log-probs between engines and trainer; equal on all ranks
    """

    def __init__(self, config: Config, clock: Clock, done: int, is_rank0: bool) -> None:
        """Open the files. Raises OSError and FileError.

        done      steps that the run has, from its checkpoint
        is_rank0  whether this is rank 0
        """
        self.clock = clock
        self.recorder: Recorder | None = None
        self.recorded = done
        self.bad_steps = 0
        self.why_bad = ""
        self.about: dict[str, float] = {"steps": float(done)}
        older_samples = config.rollout.max_lag > 0
        self.logprob_gap = LogprobGap(config.health.logprob_gap, config.model.dtype, older_samples)
        self._config = config
        self._first = done
        # share of the newest step's groups that have no advantage; None: no groups yet
        self._without_advantage: float | None = None
        self._useless_steps = 0  # in a row, in which no group had an advantage
        self._tokens = 0.0  # of all responses so far
        self._seconds: deque[float] = deque(maxlen=RECENT_STEPS)  # of the newest steps
        self._began = time.perf_counter()  # of the step that runs
        if not is_rank0:
            return
        run_dir = Path(config.train.run_dir)
        dropped = []
        if config.train.resume and done == 0:
            # Read the old records before `Recorder` removes those of step `done` and later: here, all of them.
            dropped = read_records(run_dir / "metrics.jsonl")
        options = config.model_dump(mode="json")
        sinks = partial(open_sinks, config.log, options, run_dir, done)
        self.recorder = Recorder(run_dir, done, sinks)
        self.recorder.started(done)
        past = read_records(run_dir / "metrics.jsonl")
        if past:
            self._tokens = past[-1].get(TOKENS_SO_FAR, 0.0)
            self.about |= past[-1]
        if dropped:
            lost = f"the records of {len(dropped)} steps are dropped"
            self.event("resume", f"no checkpoint in {run_dir}: the run begins anew, and {lost}")
        if done:
            total = config.train.steps if config.data.path else config.sft.steps
            self.event("resume", f"resumed at step {done} of {total}")
        files.write(run_dir / "config.json", config.model_dump_json(indent=1))

    def close(self) -> None:
        if self.recorder is not None:
            self.recorder.close()

    def event(self, kind: str, message: str, **fields: Any) -> None:
        """Write an event, on rank 0."""
        if self.recorder is not None:
            self.recorder.event(kind, message, **fields)

    def evaluated(self, done: int, which: str, result: Mapping[str, float]) -> None:
        """Send the result of an evaluation after `done` steps to the sinks, as `eval/NAME` or `eval/SET/NAME`.

        which   name of the set; "" is data.eval_path
        result  what `Generation.evaluate` returned for it. It has written the event
        """
        if self.recorder is not None:
            prefix = f"eval/{which}/" if which else "eval/"
            values = {f"{prefix}{name}": value for name, value in result.items()}
            self.about |= values
            self.recorder.to_sinks(done, values)

    def observe_advantages(
        self, done: int, samples: Sequence[Sample], values: Sequence[Sequence[float]]
    ) -> None:
        """Take the advantages `values` of a rollout, by group, after `done` steps.

        Call it once in a step, before `write`, which records the share of groups without any.

        Writes an event if all are 0 in the run's first step, and after USELESS_STEPS such steps in a row.
        """
        without = [not any(of_group) for of_group in values]
        self._without_advantage = sum(without) / max(len(without), 1)
        if not all(without):
            self._useless_steps = 0
            return
        self._useless_steps += 1
        if done and self._useless_steps != USELESS_STEPS:  # so only once in a row of such steps
            return
        # If all rewards failed, `Generation._record_failures` has written an event.
        if rewards.known_rewards(samples):
            self.event("reward", f"step {done + 1}: {without_advantage(samples)}")

    def steps(self, total: int) -> Iterator[int]:
        """Yield the numbers of the remaining steps, from 0, and start to measure the first one.

        Iterate once. `write` needs `total` and the start of the first step from here.
        """
        self._total = total
        self._began = time.perf_counter()
        yield from range(self._first, total)

    def write(
        self,
        step: int,
        values: Mapping[str, float],
        samples: Sequence[Sample] = (),
        decode: Decode | None = None,
    ) -> None:
        """Write the record of a step, a line on the terminal, and a few texts. Counts bad steps in a row.

        All ranks call it once in a step, with equal `values` of skipped updates and log-probs, so that all count alike.

        samples  of the step's rollout; none without a rollout
        decode   returns the text of tokens; None without a rollout
        """
        self.recorded = step + 1
        skipped = [side for side in ("policy", "drafter") if values.get(f"{side}/skipped")]
        # The metric `SIDE/skipped` is a share of the step's updates, because a rollout may have several.
        share = max((values[f"{side}/skipped"] for side in skipped), default=0.0)
        self.bad_steps = self.bad_steps + 1 if share == 1 else 0
        self.why_bad = ""
        if skipped:
            self.why_bad = self._why_skipped(skipped, values)
        else:
            # Not of a skipped step: its gap would raise the limit that it has exceeded.
            self.logprob_gap.observe(values)
        if self.recorder is None:
            return
        if skipped:
            what = "step skipped" if share == 1 else f"{share:.0%} of the step's updates skipped"
            self.recorder.event("loss", f"step {step + 1}: {self.why_bad}; {what}")
        now = time.perf_counter()
        record = dict(values) | self.clock.drain() | {"seconds_step": now - self._began}
        self._seconds.append(now - self._began)
        self._began = now
        if "rollout/response_tokens" in record:
            self._tokens += record["rollout/response_tokens"]
            record[TOKENS_SO_FAR] = self._tokens
            if self._without_advantage is not None:
                record[WITHOUT_ADVANTAGE] = self._without_advantage
        if samples and decode is not None:
            distance = max(1, len(samples) // SHOWN_TEXTS)
            self.recorder.samples(step, samples[::distance][:SHOWN_TEXTS], decode)
        self.recorder.write(step, record)
        self.about |= record | {"steps": step + 1.0}
        left = self._total - step - 1
        if samples or step == 0 or left % SHOWN_EVERY == 0:
            seconds = left * sum(self._seconds) / len(self._seconds)
            files.tell(line(step, self._total, record, seconds), sys.stdout)

    def summarise(self) -> None:
        """Write an event, at the end of a run, about what speculation saved in all its steps, on rank 0."""
        if self.recorder is None:
            return
        records = read_records(Path(self._config.train.run_dir) / "metrics.jsonl")
        if told := saved_line(records):
            self.recorder.event("saved", told)

    def _why_skipped(self, skipped: Sequence[str], values: Mapping[str, float]) -> str:
        """Return why a step skipped updates of `skipped`: "policy", "drafter" or both."""
        gap = values.get(GAP, 0.0)
        limit = self.logprob_gap.limit
        if gap > limit:
            return (
                f"log-probs of engines and trainer differ by {gap:.3g} nats per token, of at most {limit:.3g}: "
                "different weights?"
            )
        return f"loss or gradient norm of {' and '.join(skipped)} not finite"
