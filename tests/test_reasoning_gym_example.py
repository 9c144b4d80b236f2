"""examples/reasoning_gym: questions of its tasks, and a reward that is the tasks' own."""

import json
from pathlib import Path

import numpy as np
import pytest

from megatron_rlspec.config import RewardConfig
from megatron_rlspec.tasks.reward_worker import named_function
from megatron_rlspec.tasks.rewards import Scorer
from megatron_rlspec.types import Prompt, Sample

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


def test_questions_depend_on_the_seed_and_their_index_alone(rows):
    few = [row["prompt"] for row in rows("chain_sum", "size=4", "seed=7")]
    assert few == [row["prompt"] for row in rows("chain_sum", "size=9", "seed=7")][:4]
    assert few != [row["prompt"] for row in rows("chain_sum", "size=4", "seed=70")]


@pytest.mark.parametrize("task", ["chain_sum", "arc_agi"])
def test_the_reward_is_the_tasks_own(task, rows, score):
    """arc_agi keeps tuples in its questions, which JSON turns into lists that its score does not accept."""
    for row in rows(task, "size=3"):
        answer = row["label"]
        given = {"prompt": row["prompt"], "label": answer, "metadata": row["metadata"]}
        assert score(response=f"So <answer>{answer}</answer>.", **given) == 1.0
        assert score(response=f"\n{answer} ", **given) == 1.0
        assert score(response="<answer>no idea</answer>", **given) < 0.5


def test_the_reward_runs_in_its_own_process(rows):
    (row,) = rows("chain_sum", "size=1")
    prompt = Prompt(0, [1], text=row["prompt"], label=row["label"], metadata=row["metadata"])
    sample = Sample("s", prompt, np.array([1]), [0.0], [0.0], text=row["label"])
    with Scorer(RewardConfig(kind=f"{SCRIPT}:score", workers=1)) as scorer:
        assert scorer.score([sample]) == []
    assert sample.reward == 1.0
