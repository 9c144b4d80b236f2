"""Rewards of many samples at once, each under a time limit, none able to stop the run.

`exact` is computed on the spot. Everything else runs in worker processes (`reward_worker.py`), since only a process
can be stopped when a reward hangs: it is killed, its sample is marked, and another one takes its place.
"""

from __future__ import annotations

import json
import os
import queue
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from megatron_rlspec.config import ConfigError, RewardConfig
from megatron_rlspec.rl.reward_worker import exact
from megatron_rlspec.types import Sample

START_SECONDS = 120.0  # a reward's module may import heavy libraries


class Scorer:
    """`score` fills in rewards; `close`, or leaving the `with` block, ends the workers.

    `options.kind` is one of
    exact            1 if `Sample.text`, or what follows its last `#`, equals the label, or what follows the label's
    math             1 if math-verify finds both equal
    module:function  called with prompt, response, label, metadata by keyword; the module is found from the working
                     directory; returns a number
    http(s)://...    receives the same four as a JSON object by POST; answers a number or {"reward": number}

    Raises ConfigError for a kind that is none of these or a function that cannot be imported.
    """

    def __init__(self, options: RewardConfig) -> None:
        kind = options.kind
        if kind not in ("exact", "math") and ":" not in kind:
            raise ConfigError(f"reward.kind={kind}, but known are exact, math, module:function and http(s) addresses")
        self.options = options
        self._workers: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._threads = ThreadPoolExecutor(options.workers)
        if kind != "exact":
            workers = [_Worker(options) for _ in range(options.workers)]
            for worker in workers:
                self._workers.put(worker)
            try:
                for worker in workers:
                    worker.await_start()
            except _Failed as error:
                self.close()
                raise ConfigError(f"reward.kind={kind}: {error}") from None

    def score(self, samples: Sequence[Sample]) -> list[str]:
        """Set `reward` of every sample, and return one line per failure.

        A reward that raises, takes too long, kills its process or is no finite number leaves 0 and the reason in
        `metadata["reward_error"]`.
        """
        failures = []
        for sample, (reward, error) in zip(samples, self._threads.map(self._judge, samples), strict=True):
            sample.reward = reward
            sample.metadata.pop("reward_error", None)
            if error is not None:
                sample.metadata["reward_error"] = error
                failures.append(f"{sample.request_id}: {error}")
        return failures

    def close(self) -> None:
        self._threads.shutdown()
        while not self._workers.empty():
            self._workers.get().stop()

    def __enter__(self) -> Scorer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _judge(self, sample: Sample) -> tuple[float, str | None]:
        """(reward, None), or (0, reason)."""
        task = {
            "prompt": sample.prompt.text,
            "response": sample.text,
            "label": sample.prompt.label,
            "metadata": dict(sample.prompt.metadata),
        }
        if self.options.kind == "exact":
            return exact(**task), None
        worker = self._workers.get()
        try:
            return worker.ask(task), None
        except _Failed as error:
            return 0.0, str(error)
        finally:
            self._workers.put(worker)


def failed(sample: Sample) -> bool:
    """Whether the last `score` could not judge this sample."""
    return "reward_error" in sample.metadata


class _Failed(Exception):
    """A worker's sample has no reward; the message says why, in one line."""


class _Worker:
    """One reward process; a new one is started when it has ended or had to be killed."""

    def __init__(self, options: RewardConfig) -> None:
        self.options = options
        self._start()

    def await_start(self) -> None:
        """Wait until the reward is imported. Raises _Failed."""
        if not self._ready:
            self._answer(START_SECONDS)
            self._ready = True

    def ask(self, task: dict[str, Any]) -> float:
        """The reward. Raises _Failed."""
        if self._process.poll() is not None:
            self.stop()
            self._start()
        self.await_start()
        try:
            # The worker is reading by now, so this blocks no longer than the copy takes.
            self._process.stdin.write(json.dumps(task, default=str).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise _Failed(self._ending()) from None
        return self._answer(self.options.timeout_seconds)["reward"]

    def stop(self) -> None:
        """End the process at once. Safe to repeat."""
        self._process.kill()
        self._process.wait()
        with suppress(BrokenPipeError):  # what it never read
            self._process.stdin.close()
        self._process.stdout.close()

    def _start(self) -> None:
        command = [sys.executable, "-m", "megatron_rlspec.rl.reward_worker"]
        self._process = subprocess.Popen(
            [*command, self.options.kind, str(self.options.timeout_seconds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is the parent's; a worker ends when its stdin does
        )
        self._ready = False

    def _answer(self, seconds: float) -> dict[str, Any]:
        """The next line of the worker, if it comes in time and is no error."""
        deadline, line = time.monotonic() + seconds, b""
        while not line.endswith(b"\n"):
            readable, _, _ = select.select([self._process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            if not readable:
                self._process.kill()
                self._process.wait()
                raise _Failed(f"no answer within {seconds:g} s")
            chunk = os.read(self._process.stdout.fileno(), 65536)
            if not chunk:
                raise _Failed(self._ending())
            line += chunk
        answer = json.loads(line)
        if "error" in answer:
            raise _Failed(answer["error"])
        return answer

    def _ending(self) -> str:
        return f"the reward's process ended with exit code {self._process.wait()}"
