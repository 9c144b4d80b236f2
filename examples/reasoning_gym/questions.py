"""Questions of the package reasoning_gym as prompts, and their score as a reward.

    python examples/reasoning_gym/questions.py questions.jsonl chain_sum size=2000 max_terms=3
    rlspec train ... --data.path questions.jsonl --reward.kind examples/reasoning_gym/questions.py:score

What follows the name of the task are its own options, and `size` and `seed`. Question i depends on seed + i alone: give
training and evaluation seeds that are far apart.

The metadata of a prompt names its question. The reward makes the question again from these and calls the task's own
`score_answer`, because some tasks keep objects in a question that JSON cannot hold.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import reasoning_gym
from reasoning_gym.utils import extract_answer


def score(prompt: str, response: str, label: str, metadata: Mapping[str, Any]) -> float:
    """Return the task's own score of a response, from 0 to 1.

    The answer is what stands between the last <answer> and </answer>; without them it is the whole response.
    """
    dataset = made(metadata["task"], json.dumps(metadata["options"]))
    answer = extract_answer(response)
    return float(dataset.score_answer(response.strip() if answer is None else answer, dataset[metadata["index"]]))


@functools.cache
def made(task: str, options: str) -> Any:
    return reasoning_gym.create_dataset(task, **json.loads(options))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="FILE.jsonl")
    parser.add_argument("task", help="such as chain_sum")
    parser.add_argument("options", nargs="*", metavar="NAME=VALUE", help="size, seed (default 0), the task's own")
    args = parser.parse_args(argv)
    options: dict[str, Any] = {"seed": 0}
    for option in args.options:
        name, _, value = option.partition("=")
        try:
            options[name] = json.loads(value)
        except ValueError:
            options[name] = value
    try:
        dataset = made(args.task, json.dumps(options))
    except (AssertionError, TypeError, ValueError) as error:
        parser.error(f"{args.task}: {error}")
    lines = []
    for index, question in enumerate(dataset):
        metadata = {"task": args.task, "options": options, "index": index}
        answer = question["answer"]
        if answer is None or score("", f"<answer>{answer}</answer>", "", metadata) != 1:
            parser.error(f"{args.task}: its score does not accept the answer {answer} of its question {index}")
        row = {"prompt": question["question"], "label": str(answer), "metadata": metadata}
        lines.append(json.dumps(row) + "\n")
    args.out.write_text("".join(lines))


if __name__ == "__main__":
    main()
