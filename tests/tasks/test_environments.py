"""Tasks of reasoning_gym as prompts, curriculum and reward."""

import json

import numpy as np
import pytest

from megatron_rlspec import cli
from megatron_rlspec import reasoning_gym as environments
from megatron_rlspec.config import Config, RewardConfig
from megatron_rlspec.tasks import data
from megatron_rlspec.tasks.reward_worker import build
from megatron_rlspec.tasks.rewards import Scorer, failed
from megatron_rlspec.types import Prompt, Sample


def rows(path, level=None):
    return [row for _, row in environments.rows(path, level)]


def test_questions_depend_on_the_seed_and_their_index_alone():
    few = [row["prompt"] for row in rows("reasoning_gym:chain_sum?size=4&seed=7")]
    assert few == [row["prompt"] for row in rows("reasoning_gym:chain_sum?size=9&seed=7")][:4]
    assert few != [row["prompt"] for row in rows("reasoning_gym:chain_sum?size=4&seed=70")]


@pytest.mark.parametrize("task", ["chain_sum", "arc_agi", "word_sorting", "countdown"])
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
    later = rows("reasoning_gym:chain_sum?size=30&level=0", 4)
    length = [sum(len(row["prompt"]) for row in of_level) for of_level in (first, later)]
    assert length[1] > length[0] + 30 * 10
    assert environments.hardest("reasoning_gym:chain_sum") == 10
    hardest = rows("reasoning_gym:chain_sum?size=5&level=10")
    above = rows("reasoning_gym:chain_sum?size=5&level=99")
    assert [row["prompt"] for row in above] == [row["prompt"] for row in hardest]


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("reasoning_gym:no_such", "has no task 'no_such'; it has ab, acre"),
        ("reasoning_gym:chain_sum?terms=3", "unexpected keyword argument 'terms'; the options of chain_sum are level,"),
        ("reasoning_gym:chain_sum?min_terms=9", "max_terms must be >= min_terms"),
        ("reasoning_gym:chain_sum?size=0", "size=0, expected an integer from 1 on"),
        ("reasoning_gym:chain_sum?size=many", "size=many, expected an integer"),
        ("reasoning_gym:chain_sum?size", "expected options as ?NAME=VALUE"),
        ("reasoning_gym:composite?level=1", "has no curriculum, so it has no levels"),
        ("reasoning_gym:rush_hour", "no answer of its own that its score accepts"),
    ],
)
def test_a_source_that_cannot_be_used_is_refused_in_one_line(path, expected):
    with pytest.raises(data.DataError) as error:
        list(data.read_rows(path))
    assert expected in str(error.value) and "\n" not in str(error.value)


def test_a_prompt_from_a_file_has_no_task_to_score_it():
    sample = Sample("s", Prompt(0, [1]), np.array([1]), [0.0], [0.0])
    with Scorer(RewardConfig(kind="reasoning_gym", workers=1)) as scorer:
        (failure,) = scorer.score([sample])
    assert failure.startswith("s: TaskError: the prompt's metadata has no 'reasoning_gym'")
    assert failed(sample)


class Letters:
    """A tokenizer of one token for each character."""

    name_or_path = "letters"
    chat_template = None
    bos_token_id = None

    def get_vocab(self):
        return {chr(i): i for i in range(128)}

    def __call__(self, texts, add_special_tokens=False):
        return {"input_ids": [[ord(c) for c in text] for text in texts]}


def test_a_curriculum_rises_and_resumes():
    config = Config.model_validate(
        {
            "model": {"path": "m", "max_length": 512},
            "rollout": {"max_new_tokens": 32},
            "data": {"path": "reasoning_gym:chain_sum?size=20", "raise_level_at": 0.8},
        }
    )
    prompts = data.Prompts(config.data.path, Letters(), config)
    assert not prompts.raise_level(0.79) and prompts.level == 0
    assert prompts.raise_level(0.8) and prompts.level == 1
    prompts.take(7)
    state = json.loads(json.dumps(prompts.state()))
    following = [prompt.text for prompt in prompts.take(5)]
    again = data.Prompts(config.data.path, Letters(), config)
    again.restore(state)
    assert again.level == 1 and [prompt.text for prompt in again.take(5)] == following
    assert any(len(text.split()) > 12 for text in following)  # three terms, which level 0 does not have
    with pytest.raises(data.DataError, match=r"level=None, expected 0 to 10"):
        again.restore({name: value for name, value in state.items() if name != "level"})


def test_a_curriculum_of_a_file_is_refused(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", "--model.path", "m", "--data.path", "x.jsonl", "--data.raise_level_at", "0.5"])
    assert ended.value.code == 2
    assert "raise_level_at=0.5, but path=x.jsonl has no levels" in capsys.readouterr().err
