"""examples/reasoning_gym: questions of its tasks, and a reward that is the tasks' own."""

import json
from pathlib import Path

import pytest

from megatron_rlspec.tasks.reward_worker import named_function

SCRIPT = Path(__file__).parent.parent / "examples/reasoning_gym/questions.py"
pytest.importorskip("reasoning_gym")


@pytest.fixture(scope="module")
def score():
    return named_function(f"{SCRIPT}:score")


@pytest.fixture
def rows(score, tmp_path):
    """Return a function that writes questions and returns their rows."""

    def written(*words: str) -> list[dict]:
        score.__globals__["main"]([str(tmp_path / "questions.jsonl"), *words])
        return [json.loads(line) for line in (tmp_path / "questions.jsonl").read_text().splitlines()]

    return written


@pytest.mark.parametrize("task", ["chain_sum", "arc_agi"])
def test_the_reward_is_the_tasks_own(task, rows, score):
    """arc_agi keeps tuples in its questions, which JSON turns into lists that its score does not accept."""
    for row in rows(task, "size=3"):
        answer = row["label"]
        given = {"prompt": row["prompt"], "label": answer, "metadata": row["metadata"]}
        assert score(response=f"So <answer>{answer}</answer>.", **given) == 1.0
        assert score(response=f"\n{answer} ", **given) == 1.0
        assert score(response="<answer>no idea</answer>", **given) < 0.5
