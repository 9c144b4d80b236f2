"""Compute the rewards of many samples at once; a reward that fails marks its sample.

`run/loading.py` makes one `Scorer` for a run. `run/generation.py` makes a `Scoring` for each rollout or evaluation: the
computation of a reward may begin when its sample ends, while engines still generate the others.

The kind `exact` is computed in this process, without a time limit. Every other kind runs in worker processes
(`reward_worker.py`), because only a process can be stopped when a reward hangs. A worker over the time limit is killed
with its process group, and a new worker replaces it.

Threads: a `Scorer` has as many threads as workers. At any time a worker is either in the queue `_workers` or used by
one thread.
"""

from __future__ import annotations

import json
import os
import queue
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from megatron_rlspec.config import ConfigError, RewardConfig
from megatron_rlspec.tasks.reward_worker import STARTED, exact
from megatron_rlspec.types import Sample

# The longest that a worker may take to import its reward, which may need heavy libraries.
START_SECONDS = 120.0
STOP_SECONDS = 5.0  # how long a worker that has closed its channel may take to end by itself


class Scorer:
    """Compute rewards with `options.workers` workers. `close`, or leaving the `with` block, ends them.

    The constructor waits until every worker has imported the reward, up to `START_SECONDS` each.

    `options.kind` is one of
    exact            1 if text and label, or their final answers (after the last `#`), are equal; else 0. A label can be
                     a list of texts, and the label true or false ignores case: `reward_worker.exact`
    math             1 if math-verify finds text and label, or one of the label's list of texts, equal; else 0
    module:function  called as function(prompt=..., response=..., label=..., metadata=...), and with response_tokens (a
                     list of ids) and truncated (bool) if its signature names them. Imported from the working directory;
                     `FILE.py:function` names one, too.
                     It returns a number, or {"reward": number, NAME: number, ...}, whose other parts are recorded

    Raises ConfigError for a function that cannot be imported or takes other arguments.
    """

    def __init__(self, options: RewardConfig) -> None:
        self.options = options
        self._interrupted = threading.Event()
        self._workers: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._threads = ThreadPoolExecutor(options.workers)
        if options.kind == "exact":
            return
        # All processes start before the first one is waited for, so that they import at the same time.
        workers = [_Worker(options, self._interrupted) for _ in range(options.workers)]
        for worker in workers:
            self._workers.put(worker)
        try:
            for worker in workers:
                worker.await_start()
        except RewardError as error:
            self.close()
            raise ConfigError(f"reward.kind={options.kind}: {error}") from None

    def score(self, samples: Sequence[Sample]) -> list[str]:
        """Set `reward` of every sample, and return one line per failure.

        A reward that raises, takes too long, ends its process or is no finite number counts as failed: the sample gets
        reward 0 and the reason in `metadata["reward_error"]`.
        """
        return Scoring(self).finish(samples)

    def interrupt(self) -> None:
        """Make a `score` in another thread return soon; samples whose reward is not yet computed count as failed.

        It cannot be undone: all later rewards fail, too. The kind `exact` is not interrupted.
        """
        self._interrupted.set()

    def close(self) -> None:
        """Wait for the rewards that were added and not cancelled, then end the workers. Safe to repeat."""
        self._threads.shutdown()  # waits for the threads, which put their workers back into the queue
        while not self._workers.empty():
            self._workers.get().stop()

    def __enter__(self) -> Scorer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _judge(self, sample: Sample) -> dict[str, Any]:
        """Return {"reward", "parts"}, or {"error"} with the reason. Runs in a thread of the pool."""
        task: dict[str, Any] = {
            "prompt": sample.prompt.text,
            "response": sample.text,
            "label": sample.prompt.label,
            "metadata": dict(sample.prompt.metadata),
        }
        if self.options.kind == "exact":
            return {"reward": exact(**task)}
        extras = {  # `reward_worker.EXTRAS`
            "response_tokens": sample.response.tolist(),
            "truncated": sample.status == "truncated",
        }
        worker = self._workers.get()  # never waits: there are as many workers as threads
        try:
            return worker.ask(task, extras)
        except RewardError as error:
            return {"error": str(error)}
        finally:
            self._workers.put(worker)


class Scoring:
    """The rewards of one rollout: `add` begins with a sample's, `finish` waits for all.

    Threads may call `add`, but not for the same sample twice: the reward would be computed twice, and the later result
    would stay.

    waited  seconds that the last `finish` took, 0.0 before
    """

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer
        # By id(sample). Callers must hold an added sample until `finish`: otherwise a new one could get the same id.
        self._results: dict[int, Future[str | None]] = {}
        self.waited = 0.0

    def add(self, sample: Sample) -> Future[str | None]:
        """Begin to compute the reward of a sample that has ended. Any thread may call this.

        The sample is changed in another thread: read its reward after `finish`, or after the future's result. The
        result is the reason as a text if the reward failed, else None.
        """
        future = self._results[id(sample)] = self._scorer._threads.submit(self._set_reward, sample)
        return future

    def finish(self, samples: Sequence[Sample]) -> list[str]:
        """Set the rewards of these samples and return the failures, as `Scorer.score` does.

        Rewards of samples that were not added begin now. Raises CancelledError for one that `cancel` dropped.
        """
        began = time.perf_counter()
        for sample in samples:
            if id(sample) not in self._results:
                self.add(sample)
        errors = [(sample.request_id, self._results[id(sample)].result()) for sample in samples]
        failures = [f"{name}: {error}" for name, error in errors if error is not None]
        self.waited = time.perf_counter() - began
        return failures

    def cancel(self) -> None:
        """Drop rewards that have not begun; `finish` is not called for them. Rewards that have begun run on."""
        for future in list(self._results.values()):
            future.cancel()

    def _set_reward(self, sample: Sample) -> str | None:
        """Set the reward of a sample, 0 if it failed; then return the reason. Runs in a thread of the pool."""
        answer = self._scorer._judge(sample)
        sample.reward = answer.get("reward", 0.0)
        # `failed` and `records/recorder.py` read this key; a sample that is scored again must not keep an old one.
        sample.metadata.pop("reward_error", None)
        error: str | None = answer.get("error")
        if error is not None:
            sample.metadata["reward_error"] = error
        if answer.get("parts"):
            sample.metadata["reward_parts"] = answer["parts"]
        return error


def failed(sample: Sample) -> bool:
    """Return whether this sample's reward failed when it was last computed."""
    return "reward_error" in sample.metadata


def known_rewards(samples: Sequence[Sample]) -> list[float]:
    """Return the rewards of those samples whose reward did not fail."""
    return [sample.reward for sample in samples if not failed(sample)]


class RewardError(RuntimeError):
    """A reward failed, or too many steps in a row had failed rewards only. The message is one line.

    `_Worker` raises it for one reward: `Scorer._judge` makes it {"error"}, and `Scorer` a ConfigError. `FailedSteps`
    (`run/failed_steps.py`) raises it to end the run; `run/rank0.py` catches it.
    """


class _Worker:
    """One reward process. `ask` starts a new process if the old one ended or was killed. For one thread at a time.

    The messages are described in `reward_worker.py`.
    """

    def __init__(self, options: RewardConfig, interrupted: threading.Event) -> None:
        self.options = options
        self._interrupted = interrupted
        self._ready = False  # whether the reward is imported
        self._wants: list[str] = []  # of `reward_worker.EXTRAS`
        self._start()

    def await_start(self) -> None:
        """Wait until the reward is imported. Raises RewardError."""
        if not self._ready:
            self._wants = self._receive(STARTED, START_SECONDS)["wants"]
            self._ready = True

    def ask(self, task: dict[str, Any], extras: dict[str, Any]) -> dict[str, Any]:
        """Return {"reward", "parts"} of the task. Of `extras` the reward gets those it wants. Raises RewardError."""
        if self._process.poll() is not None:  # the process ended since the last task
            self.stop()  # kills what is left of its process group
            self._start()
        self.await_start()
        # User code cannot guess this id, and a late answer to an earlier task has another one.
        task_id = secrets.token_hex(8)
        wanted = {key: extras[key] for key in self._wants}
        line = json.dumps({"id": task_id, **task, **wanted}, default=str).encode() + b"\n"
        assert self._process.stdin is not None
        try:
            while line:  # the pipe is unbuffered (`bufsize=0`), so one write can take a part of the line only
                line = line[self._process.stdin.write(line) :]
        except BrokenPipeError:
            raise RewardError(self._reason_of_end()) from None
        return self._receive(task_id, self.options.timeout_seconds)

    def stop(self) -> None:
        """Kill the worker and its process group. Safe to repeat."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._answers.close()

    def _start(self) -> None:
        # SOCK_SEQPACKET keeps the boundaries of messages.
        self._answers, worker_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "megatron_rlspec.tasks.reward_worker", self.options.kind]
        # `with` closes this process's copy of the worker's end. Only then `recv` returns when the worker ends.
        with worker_end:
            self._process = subprocess.Popen(
                [*command, str(worker_end.fileno())],
                stdin=subprocess.PIPE,
                stdout=2,  # a reward's output goes to stderr
                bufsize=0,
                pass_fds=[worker_end.fileno()],
                # A process group of its own, which `stop` can kill. Ctrl-C does not reach it.
                start_new_session=True,
            )
        self._ready = False

    def _receive(self, task_id: str, seconds: float) -> dict[str, Any]:
        """Return the answer to the task `task_id` within `seconds`, else kill the worker and raise RewardError.

        Messages with another id are dropped: they answer an earlier task, or come from user code.
        """
        deadline = time.monotonic() + seconds
        while True:
            self._stop_if_late(deadline)
            # At most 0.5 s, to notice an interruption. Above 0, because 0 makes the socket nonblocking.
            self._answers.settimeout(min(0.5, max(0.001, deadline - time.monotonic())))
            try:
                # One whole answer of `reward_worker.py`, which keeps answers far shorter than 64 KiB.
                message = self._answers.recv(1 << 16)
            except TimeoutError:
                continue
            if not message:  # the worker's end is closed
                raise RewardError(self._reason_of_end())
            answer = _read(message)
            if answer.get("id") != task_id:
                continue
            if "error" in answer:
                raise RewardError(answer["error"])
            return answer

    def _stop_if_late(self, deadline: float) -> None:
        """Raise RewardError after an interruption, or past `deadline`. In the second case the worker is killed."""
        if self._interrupted.is_set():
            # The worker lives on until `Scorer.close`. Its late answer is not read: the event stays set, so every later
            # call of `_receive` ends here.
            raise RewardError("the run was interrupted")
        if time.monotonic() >= deadline:
            self.stop()
            limit = self.options.timeout_seconds if self._ready else START_SECONDS
            raise RewardError(f"no answer within {limit:g} s")

    def _reason_of_end(self) -> str:
        """Wait until a worker that closed its channel ends, kill it otherwise, and return the reason as a text."""
        # The worker may have closed its channel, and live on.
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_SECONDS)
        self.stop()
        return f"the reward's process ended with exit code {self._process.returncode}"


def _read(message: bytes) -> dict[str, Any]:
    """Return a message's object; {} for anything else, which user code may have sent."""
    try:
        answer = json.loads(message)
    except ValueError:
        return {}
    return answer if isinstance(answer, dict) else {}
