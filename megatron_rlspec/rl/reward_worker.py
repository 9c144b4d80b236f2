"""The rewards themselves, and the process that computes them: `python -m megatron_rlspec.rl.reward_worker KIND LIMIT`.

One JSON line in (prompt, response, label, metadata), one JSON line out (reward, or error). Standard library only, plus
what a kind needs, so that a worker starts fast; nothing is pickled.
"""

from __future__ import annotations

import importlib
import json
import logging
import math
import os
import re
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any

Reward = Callable[[str, str, str, Mapping[str, Any]], Any]


def final_answer(text: str) -> str:
    """What follows the last run of `#` (GSM8K's `#### 72`), or the whole text if there is none; stripped."""
    return re.split(r"#+", text)[-1].strip()


def exact(prompt: str, response: str, label: str, metadata: Mapping[str, Any]) -> float:
    """1 if the response, or its final answer, is the label or the label's final answer, character by character."""
    return float(response.strip() == label.strip() or final_answer(response) == final_answer(label))


def math_reward(prompt: str, response: str, label: str, metadata: Mapping[str, Any]) -> float:
    """1 if math-verify finds the response's last expression equal to the label's: 1/2 is \\frac{1}{2} and 0.5."""
    from math_verify import parse, verify

    # Without dollars the library would look for a number in the label, and find 2 in (1, 2). Its own time limits rest
    # on SIGALRM, which here guards the whole process.
    stated = final_answer(label)
    gold = parse(stated if "$" in stated or "\\boxed" in stated else f"${stated}$", parsing_timeout=None)
    if not gold:
        raise ValueError(f"label {label!r} is no mathematical expression")
    answer = parse(final_answer(response) if "####" in response else response, parsing_timeout=None)
    return float(verify(gold, answer, timeout_seconds=None))


def http_reward(url: str, limit: float) -> Reward:
    """POST the sample as JSON; the answer is a number, or an object with `reward`."""
    import requests

    session = requests.Session()

    def reward(prompt: str, response: str, label: str, metadata: Mapping[str, Any]) -> Any:
        body = {"prompt": prompt, "response": response, "label": label, "metadata": metadata}
        answer = session.post(url, json=body, timeout=limit)
        answer.raise_for_status()
        value = answer.json()
        return value["reward"] if isinstance(value, dict) else value

    return reward


def named_function(name: str) -> Reward:
    """`module:function`, importable from the working directory, called with four keyword arguments."""
    module, _, function = name.partition(":")
    found = getattr(importlib.import_module(module), function)
    if not callable(found):
        raise TypeError(f"{name} is not a function")

    def reward(prompt: str, response: str, label: str, metadata: Mapping[str, Any]) -> Any:
        return found(prompt=prompt, response=response, label=label, metadata=metadata)

    return reward


def build(kind: str, limit: float) -> Reward:
    """The reward of this name. Raises what a faulty `module:function` raises on import."""
    if kind == "exact":
        return exact
    if kind == "math":
        logging.getLogger("math_verify").setLevel(logging.ERROR)
        math_reward("", "1", "1", {})  # imports and builds its parsers, at nobody's expense
        return math_reward
    if kind.startswith(("http://", "https://")):
        return http_reward(kind, limit)
    return named_function(kind)


def number(value: Any) -> float:
    """A finite reward; anything else raises."""
    reward = float(value)
    if not math.isfinite(reward):
        raise ValueError(f"reward is {reward}, expected a finite number")
    return reward


def one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:300] if text else type(error).__name__


def main() -> None:
    kind, limit = sys.argv[1], float(sys.argv[2])
    # What a reward prints must not get into the answers, so it goes to stderr.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    sys.path.insert(0, os.getcwd())
    # Any exception of a user's code, on import or in a call, is an answer to the parent and no end of the worker.
    try:
        reward = build(kind, limit)
        answers.write(json.dumps({"ready": True}) + "\n")
    except Exception as error:
        answers.write(json.dumps({"error": one_line(error)}) + "\n")
        return
    for line in sys.stdin:
        # The parent kills a worker that takes too long; this ends one whose parent is gone.
        signal.setitimer(signal.ITIMER_REAL, 2 * limit + 1)
        try:
            answer: dict[str, Any] = {"reward": number(reward(**json.loads(line)))}
        except Exception as error:
            answer = {"error": one_line(error)}
        signal.setitimer(signal.ITIMER_REAL, 0)
        answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
