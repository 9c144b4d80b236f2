"""Tasks of the package reasoning_gym as prompts and as a reward.

A source is named `reasoning_gym:TASK`, with options of the task behind a question mark: `?size=2000&max_terms=3`. Three
options belong to every task:

    size   number of questions (reasoning_gym's default is 500)
    seed   0 unless given; question i depends on seed + i, so two sources with seeds far apart share no draws
    level  of the task's curriculum, from 0: sets all its attributes; the hardest one where a task has fewer levels

The metadata of a prompt names its question (task, options, index). The reward makes the question again from these and
calls the task's own `score_answer`, because some tasks keep objects in a question that JSON cannot hold.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import parse_qsl

from megatron_rlspec.files import FileError
from megatron_rlspec.texts import first_line

PREFIX = "reasoning_gym:"
KEY = "reasoning_gym"  # in a prompt's metadata


def is_source(path: str) -> bool:
    """Whether a data path names a task instead of a file."""
    return path.startswith(PREFIX)


def rows(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (place, row) of every question: prompt, label and metadata.

    Raises FileError for an unknown task or option, for a task whose questions cannot be made again from their
    index, and if the package is not installed.
    """
    task, options = _parse(path)
    dataset = _dataset(path, task, options)
    for index in range(len(dataset)):
        where = f"{path}: question {index}"
        try:
            entry = dataset[index]
            reward = dataset.score_answer(entry["answer"], dataset[index]) if index == 0 else 1.0
        except Exception as error:  # a task's own code can raise any error
            raise FileError(f"{where}: {type(error).__name__}: {first_line(error)}") from None
        if entry["answer"] is None or reward != 1.0:
            raise FileError(
                f"{where}: the task has no answer of its own that its score accepts (reward {reward:g}); "
                "expected a task whose own answers score 1"
            )
        yield (
            where,
            {
                "prompt": entry["question"],
                "label": str(entry["answer"]),
                "metadata": {KEY: {"task": task, "options": options, "index": index}},
            },
        )


def score(prompt: str, response: str, label: str, metadata: Mapping[str, Any]) -> float:
    """Return the task's own score of a response, from 0 to 1.

    The answer is what stands between the last <answer> and </answer>; without them it is the whole response.
    Raises ValueError for a prompt that comes from no task.
    """
    from reasoning_gym.utils import extract_answer

    question = metadata.get(KEY)
    if question is None:
        raise ValueError(
            f"the prompt's metadata has no {KEY!r}; expected prompts of data.path={PREFIX}TASK"
        )
    dataset, entry = _question(question["task"], json.dumps(question["options"]), question["index"])
    answer = extract_answer(response)
    return float(dataset.score_answer(response.strip() if answer is None else answer, entry))


@functools.lru_cache(maxsize=256)  # all samples of a prompt come one after the other
def _question(task: str, options: str, index: int) -> tuple[Any, dict[str, Any]]:
    dataset = _made(task, options)
    return dataset, dataset[index]


@functools.lru_cache(maxsize=16)
def _made(task: str, options: str) -> Any:
    return _dataset(PREFIX + task, task, json.loads(options))


def _parse(path: str) -> tuple[str, dict[str, Any]]:
    """Return the task and its options; a value that is no JSON is text."""
    task, _, query = path.removeprefix(PREFIX).partition("?")
    options: dict[str, Any] = {"seed": 0}
    try:
        given = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
    except ValueError:
        raise FileError(f"{path}: expected options as ?NAME=VALUE&NAME=VALUE") from None
    for name, value in given:
        try:
            options[name] = json.loads(value)
        except ValueError:
            options[name] = value
    for name, least in (("size", 1), ("seed", 0), ("level", 0)):
        value = options.get(name, least)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise FileError(f"{path}: {name}={value}, expected an integer from {least} on")
    return task, options


def _dataset(path: str, task: str, options: Mapping[str, Any]) -> Any:
    """Return the task's dataset. Raises FileError."""
    datasets = _registered(path)[0]
    if task not in datasets:
        raise FileError(
            f"{path}: reasoning_gym has no task {task!r}; it has {', '.join(sorted(datasets))}"
        )
    made, config = datasets[task]
    given = {name: value for name, value in options.items() if name != "level"}
    try:
        if "level" not in options:
            settings = config(**given)
        else:
            curriculum = _curriculum(path, task)
            curriculum.set_global_level(options["level"])
            settings = curriculum.generate_configuration(given)
        settings.validate()
        return made(config=settings)
    except FileError:
        raise
    except (TypeError, ValueError, AssertionError) as error:
        known = ", ".join(["level", *config.__dataclass_fields__])
        raise FileError(f"{path}: {first_line(error)}; the options of {task} are {known}") from None


def _curriculum(path: str, task: str) -> Any:
    curricula = _registered(path)[1]
    if task not in curricula:
        raise FileError(f"{path}: {task!r} has no curriculum, so it has no levels")
    return curricula[task]()


def _registered(path: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the package's tables of tasks and of curricula."""
    try:
        from reasoning_gym.factory import CURRICULA, DATASETS

        import reasoning_gym  # noqa: F401  the import fills the tables
    except ModuleNotFoundError as error:
        raise FileError(
            f"{path}: the package {error.name} is not installed here: pip install 'megatron_rlspec[tasks]'"
        ) from None
    return DATASETS, CURRICULA
