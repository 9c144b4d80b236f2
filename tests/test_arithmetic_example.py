"""The arithmetic example: its calculations are true, and its config reads and rewards GSM8K's format."""

import json
import re
import runpy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron_rlspec.config import RewardConfig, load
from megatron_rlspec.tasks.data import read_prompts
from megatron_rlspec.tasks.rewards import Scorer
from megatron_rlspec.types import Prompt, Sample

EXAMPLE = Path(__file__).parent.parent / "examples" / "arithmetic"
GSM8K = {  # a row as GSM8K has them, with its thousands comma
    "question": "A mill grinds 450 sacks a day and keeps 1000. How many sacks does it sell in 5 days?",
    "answer": "It grinds 450*5=<<450*5=2250>>2250 sacks.\nIt sells 2250-1000= <<2250-1000=1250>>1250.\n#### 1,250",
}


@pytest.fixture(scope="module")
def rows() -> list[dict]:
    return [json.loads(line) for line in (EXAMPLE / "sample.jsonl").open()] + [GSM8K]


def test_calculations_are_true_and_lead_to_the_answer(rows):
    for row in rows[:-1]:
        count = int(re.match(r"\w+ has (\d+)", row["question"])[1])
        for left, operator, right, result in re.findall(r"<<(\d+)([-+*/])(\d+)=(\d+)>>", row["answer"]):
            assert int(left) == count
            count = {"+": count + int(right), "-": count - int(right), "*": count * int(right)}.get(
                operator, count / int(right)
            )
            assert count == int(result) and right in row["question"]
        assert row["answer"].endswith(f"\n#### {int(count)}")


def test_the_sample_is_what_the_generator_writes(rows):
    make = runpy.run_path(str(EXAMPLE / "make_arithmetic.py"))
    rng = make["random"].Random(1)
    assert [make["problem"](rng) for _ in rows[:-1]] == rows[:-1]


class Characters:
    """A stand-in tokenizer. The rows do not depend on it, and no trained tokenizer is small enough to ship."""

    name_or_path = "characters"
    chat_template = "template"
    bos_token_id = None

    def __call__(self, texts, add_special_tokens=False):
        return {"input_ids": [[ord(c) for c in text] for text in texts]}

    def get_vocab(self):
        return {"a": 0}

    def apply_chat_template(self, messages, **options):
        return messages[-1]["content"]


@pytest.mark.parametrize("kind", ["math", "exact"])
def test_the_config_rewards_a_rows_own_answer_and_no_other(rows, tmp_path, kind):
    config = load(EXAMPLE.parent / "gsm8k/gsm8k.toml", {"data.eval_path": "test.jsonl"})
    (tmp_path / "gsm8k.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts, _ = read_prompts(tmp_path / "gsm8k.jsonl", config.data, Characters(), 10_000)
    assert [p.text for p in prompts] == [row["question"] for row in rows]

    def respond(prompt: Prompt, text: str) -> Sample:
        return Sample(f"r{prompt.id}", replace(prompt, tokens=np.arange(1)), np.arange(2), *np.zeros((2, 2)), text=text)

    right = [respond(p, row["answer"]) for p, row in zip(prompts, rows, strict=True)]
    wrong = [respond(p, row["answer"] + "\n#### 0") for p, row in zip(prompts, rows, strict=True)]
    with Scorer(RewardConfig(kind=kind, workers=1)) as scorer:
        assert not scorer.score(right + wrong)
    assert config.reward.kind == "math"
    assert [s.reward for s in right] == [1.0] * len(rows)
    assert [s.reward for s in wrong] == [0.0] * len(rows)
