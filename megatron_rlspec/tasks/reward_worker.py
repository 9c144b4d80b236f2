"""The rewards, and the process that computes them: `python -m megatron_rlspec.tasks.reward_worker KIND SOCKET`.

KIND is the option `reward.kind`, SOCKET a file descriptor. In the trainer, `_Worker` of `rewards.py` starts the process
and is the other side of its messages. The kind `exact` needs no process: the trainer calls the function.

tasks          JSON lines on standard input: {"id", "prompt", "response", "label", "metadata"}, and those of `EXTRAS`
               that the reward wants
first message  on the socket, with the id `STARTED`: {"id", "wants"} once the reward is imported, with the `EXTRAS` that
               it wants; or {"id", "error"}
answers        on the socket, one for each task: {"id", "reward", "parts"} or {"id", "error"}

The socket is a Unix socket that keeps message boundaries; its messages are JSON. Nothing is pickled. The module imports
little beside the standard library, so that a worker starts fast.

The worker leads a process group. When the trainer closes standard input, also by dying, the worker kills the group. The
trainer kills the group when a reward takes too long.

User code, the reward, cannot answer for a sample by accident: programs that it starts do not inherit standard input and
the socket; a child that it forks ends where the reward returns; and the trainer drops a message whose id is not that of
the current task.
"""

from __future__ import annotations

import inspect
import json
import logging
import math
import numbers
import os
import queue
import re
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from megatron_rlspec.functions import imported
from megatron_rlspec.texts import one_line, shown

# A function that takes prompt, response, label and metadata by name, and those of EXTRAS that its signature names.
# `Scorer._judge` in `rewards.py` makes the arguments. It returns what `parts_of` takes.
Reward = Callable[..., Any]
EXTRAS = ("response_tokens", "truncated")
# The names that a part of a reward may have. The part NAME is recorded as the metric reward_NAME (`run/summaries.py`).
# Two names are refused, because reward_std and reward_seconds_waited are metrics of ours.
PART = re.compile(r"(?!(?:std|seconds_waited)$)[A-Za-z_]\w{0,39}", re.ASCII)
MOST_PARTS = 32  # of one reward, `reward` itself included
SIGNATURE = "(prompt: str, response: str, label: str, metadata: dict) -> float"
# The trainer computes in float32, in which values from 2¹²⁸ on are infinite.
LARGEST = 2.0**127
STARTED = "started"  # id of the message that says whether the reward could be imported


def final_answer(text: str) -> str:
    """Return the text after the last run of `#` (GSM8K's `#### 72`), else the whole text, stripped of white space."""
    return re.split(r"#+", text)[-1].strip()


def exact(prompt: str, response: str, label: str, metadata: Mapping[str, Any]) -> float:
    """Return 1 if response and label, or the final answers of both, are equal character by character; else 0.

    A response that ends in `#` has no final answer. With the label "true" or "false", but not with a list of them, the
    response's case is ignored. A label can accept several texts (`accepted`).
    """
    if label in ("true", "false"):
        response = response.lower()
    answer = final_answer(response)
    # The label as a whole is compared, too: it may be a JSON list, and the response the same list.
    for right in (label, *accepted(label)):
        if response.strip() == right.strip() or (answer and answer == final_answer(right)):
            return 1.0
    return 0.0


def accepted(label: str) -> list[str]:
    """Return the texts that a label accepts: each of a JSON list of texts, else the label itself.

    `columns.label` writes such lists; they begin with `["`.
    """
    if label.startswith('["'):
        with suppress(ValueError):  # no JSON: an ordinary label
            texts = json.loads(label)
            if all(isinstance(text, str) for text in texts):
                return list(texts)
    return [label]


def math_reward(prompt: str, response: str, label: str, metadata: Mapping[str, Any]) -> float:
    """Return 1 if math-verify finds the last expressions equal (1/2, \\frac{1}{2} and 0.5 are), else 0."""
    return max(_equal(response, right) for right in accepted(label))


def _equal(response: str, label: str) -> float:
    """Return 1 or 0 of `math_reward` for one accepted label. Raises ValueError for a label that is no expression."""
    # Imported here: the other rewards do not need it.
    from math_verify import parse, verify

    # Without dollar signs math-verify looks for a number in the label: it would find 2 in (1, 2). math-verify's time
    # limits use SIGALRM. They are switched off (None), because the trainer limits the time.
    stated = final_answer(label)
    if "$" not in stated and "\\boxed" not in stated:
        stated = f"${stated}$"
    gold = parse(stated, parsing_timeout=None)
    if not gold:
        raise ValueError(f"label {label!r} is no mathematical expression")
    answer = parse(final_answer(response) if "####" in response else response, parsing_timeout=None)
    return float(verify(gold, answer, timeout_seconds=None))


def named_function(name: str) -> Reward:
    """Import `module:function` or `FILE.py:function`. It must take the four keyword arguments of `SIGNATURE`.

    Raises TypeError if it does not, and any error that the import of its module raises.
    """
    function = name.rpartition(":")[2]
    reward = imported(name)
    if not callable(reward):
        raise TypeError(f"{name} is not a function; expected {function}{SIGNATURE}")
    if inspect.iscoroutinefunction(reward):
        raise TypeError(f"{name} is async; expected a plain function {function}{SIGNATURE}")
    try:
        signature = inspect.signature(reward)
    except (TypeError, ValueError):  # some built-in callables have none
        return reward
    extras = dict.fromkeys(wanted(reward))
    try:
        # Checks the names of the arguments without a call.
        signature.bind(prompt="", response="", label="", metadata={}, **extras)
    except TypeError as error:
        raise TypeError(f"{function}{signature}: {error}; expected {function}{SIGNATURE}") from None
    return reward


def wanted(reward: Reward) -> list[str]:
    """Return which of `EXTRAS` the reward's signature names; [] for a callable without a signature."""
    try:
        parameters = inspect.signature(reward).parameters
    except (TypeError, ValueError):
        return []
    return [name for name in EXTRAS if name in parameters]


def build(kind: str) -> Reward:
    """Return the reward that `kind` names: "math", or a function as `named_function` takes it, with its errors.

    "exact" is no kind here, because it needs no worker.
    """
    if kind == "math":
        logging.getLogger("math_verify").setLevel(logging.ERROR)
        # imports the library and builds its parsers before the first sample
        math_reward("", "1", "1", {})
        return math_reward
    return named_function(kind)


def number(value: Any) -> float:
    """Return `value` as a finite float, at most LARGEST in size. Raises ValueError.

    An array or tensor of one element counts as that element.
    """
    try:
        plain = value.item() if hasattr(value, "item") else value
        reward = float(plain) if isinstance(plain, numbers.Real) else math.nan
    except BaseException as error:  # the value's own methods can raise anything
        raise ValueError(
            f"a reward of type {type(value).__name__} is no number ({one_line(error)})"
        ) from None
    if not abs(reward) <= LARGEST:  # in this form true for NaN, too
        raise ValueError(f"reward is {shown(value)}, expected one finite number")
    return reward


def parts_of(value: Any) -> dict[str, Any]:
    """Return {"reward", "parts"} of what a reward returned: a number, or a mapping with `reward` and other numbers.

    "parts" is a dict of the other numbers. Raises ValueError.
    """
    if not isinstance(value, Mapping):
        return {"reward": number(value), "parts": {}}
    if "reward" not in value:
        raise ValueError(f"{shown(value)}: expected a number, or a mapping with `reward`")
    if len(value) > MOST_PARTS:
        raise ValueError(f"{len(value)} parts of a reward; expected at most {MOST_PARTS}")
    parts = {}
    for name, part in value.items():
        if not PART.fullmatch(str(name)):
            raise ValueError(f"a part of the reward is named {shown(name)}; expected another name")
        parts[str(name)] = number(part)
    return {"reward": parts.pop("reward"), "parts": parts}


class _Channel:
    """Receives tasks and sends answers. A forked child that calls `answer` ends at once.

    tasks    the file descriptor from which tasks are read; the channel closes it
    answers  the socket for the answers, one message for each task
    """

    def __init__(self, tasks: int, answers: socket.socket) -> None:
        self._answers = answers
        self._process = os.getpid()
        self._waiting: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        threading.Thread(target=self._read, args=(tasks,), daemon=True).start()

    def task(self) -> dict[str, Any]:
        """Wait for the next task."""
        return self._waiting.get()

    def answer(self, task: str, **content: Any) -> None:
        """Send the answer to the task with this id. Raises OSError if the trainer has closed the socket.

        The trainer reads at most 64 KiB of a message (`rewards._Worker._receive`), so `content` must stay far below.
        """
        self.leave_if_forked()
        self._answers.send(json.dumps({"id": task, **content}).encode())

    def leave_if_forked(self) -> None:
        """End this process if it is a child that the reward forked."""
        if os.getpid() != self._process:
            # `_exit` leaves out Python's cleanup, which would touch what the child shares with the worker.
            os._exit(0)

    def _read(self, tasks: int) -> None:
        """Queue tasks until standard input ends; then kill the process group, this worker included.

        It runs in a thread, so that the end of the trainer is seen while a reward runs.
        """
        with os.fdopen(tasks, "rb") as lines:
            for line in lines:
                # A line without an end is cut: the trainer died while it wrote.
                if line.endswith(b"\n"):
                    self._waiting.put(json.loads(line))
        os.killpg(0, signal.SIGKILL)


def _work(kind: str, channel: _Channel) -> None:
    """Answer tasks until the process is killed; return if the reward cannot be imported."""
    try:
        reward = build(kind)
    except (Exception, KeyboardInterrupt) as error:
        channel.answer(STARTED, error=one_line(error))
        return
    channel.answer(STARTED, wants=wanted(reward))
    while True:
        task = channel.task()
        name = task.pop("id")
        try:
            content = parts_of(reward(**task))
        except SystemExit:
            # The reward called sys.exit(): the worker ends, and the trainer reports the exit code.
            raise
        except BaseException as error:
            # A reward may raise anything, and the next task must be answered.
            content = {"error": one_line(error)}
        finally:
            # In `finally`, so that a forked child that calls sys.exit() ends here, too.
            channel.leave_if_forked()
        channel.answer(name, **content)


def main() -> None:
    """Run the worker. `rewards._Worker._start` gives the reward's kind and the socket's descriptor as arguments."""
    kind = sys.argv[1]
    answers = socket.socket(fileno=int(sys.argv[2]))
    answers.set_inheritable(False)
    tasks = os.dup(0)  # programs that the reward starts do not inherit the copy
    with open(os.devnull, "rb") as nothing:
        # So the reward, and programs that it starts, read nothing from standard input.
        os.dup2(nothing.fileno(), 0)
    try:
        _work(kind, _Channel(tasks, answers))
    except OSError:  # the reward closed the worker's channels, or the trainer has ended
        os._exit(1)


if __name__ == "__main__":
    main()
