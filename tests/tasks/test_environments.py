"""Tasks of reasoning_gym as prompts and reward."""

import json

import numpy as np
import pytest

from megatron_rlspec import reasoning_gym as environments
from megatron_rlspec.config import RewardConfig
from megatron_rlspec.files import FileError
from megatron_rlspec.tasks import data
from megatron_rlspec.tasks.reward_worker import build
from megatron_rlspec.tasks.rewards import Scorer, failed
from megatron_rlspec.types import Prompt, Sample


def rows(path):
    return [row for _, row in environments.rows(path)]


def test_questions_depend_on_the_seed_and_their_index_alone():
    few = [row["prompt"] for row in rows("reasoning_gym:chain_sum?size=4&seed=7")]
    assert few == [row["prompt"] for row in rows("reasoning_gym:chain_sum?size=9&seed=7")][:4]
    assert few != [row["prompt"] for row in rows("reasoning_gym:chain_sum?size=4&seed=70")]


@pytest.mark.parametrize("task", ["chain_sum", "arc_agi"])
def test_the_reward_is_the_tasks_own(task):
    """arc_agi keeps tuples in its questions, which JSON turns into lists that its score does not accept."""
    score = build("reasoning_gym", 10.0)
    for row in rows(f"reasoning_gym:{task}?size=3"):
        metadata = json.loads(json.dumps(row["metadata"]))
        answer = row["label"]
        assert score(prompt="", response=f"So <answer>{answer}</answer>.", label="", metadata=metadata) == 1.0
        assert score(prompt="", response=f"\n{answer} ", label="", metadata=metadata) == 1.0
        assert score(prompt="", response="<answer>no idea</answer>", label="", metadata=metadata) < 0.5


def test_levels_make_questions_harder():
    first = rows("reasoning_gym:chain_sum?size=30&level=0")
    later = rows("reasoning_gym:chain_sum?size=30&level=4")
    length = [sum(len(row["prompt"]) for row in of_level) for of_level in (first, later)]
    assert length[1] > length[0] + 30 * 10
    hardest = rows("reasoning_gym:chain_sum?size=5&level=10")
    above = rows("reasoning_gym:chain_sum?size=5&level=99")
    assert [row["prompt"] for row in above] == [row["prompt"] for row in hardest]


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("reasoning_gym:chain_sum?terms=3", "unexpected keyword argument 'terms'; the options of chain_sum are level,"),
        ("reasoning_gym:chain_sum?size=many", "size=many, expected an integer"),
        ("reasoning_gym:composite?level=1", "has no curriculum, so it has no levels"),
    ],
)
def test_a_source_that_cannot_be_used_is_refused_in_one_line(path, expected):
    with pytest.raises(FileError) as error:
        list(data.read_rows(path))
    assert expected in str(error.value) and "\n" not in str(error.value)


def test_a_prompt_from_a_file_has_no_task_to_score_it():
    sample = Sample("s", Prompt(0, [1]), np.array([1]), [0.0], [0.0])
    with Scorer(RewardConfig(kind="reasoning_gym", workers=1)) as scorer:
        (failure,) = scorer.score([sample])
    assert failure.startswith("s: ValueError: the prompt's metadata has no 'reasoning_gym'")
    assert failed(sample)
