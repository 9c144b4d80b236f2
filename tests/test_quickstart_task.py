"""The quickstart's task and model: labels, splits and checkpoint."""

import json
import re
from pathlib import Path

import pytest
import short_run
import torch
import transformers

from megatron_rlspec.models.directory import check_model

QUICKSTART = Path(__file__).parent.parent / "examples" / "quickstart"
SIZES = ("--task", "slips", "--train", 800, "--rl", 400, "--eval", 100, "--slip", 0.1)


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("quickstart") / "task"
    short_run.script(QUICKSTART / "make_task.py", "--out", out, *SIZES)
    return out


@pytest.fixture(scope="module")
def rows(task) -> dict[str, list[dict]]:
    return {split: [json.loads(line) for line in (task / f"{split}.jsonl").open()] for split in ("train", "rl", "eval")}


def items(prompt: str) -> list[tuple[str, int]]:
    assert re.fullmatch(r"([a-zA-V]\d)+=", prompt)
    return [(prompt[i], int(prompt[i + 1])) for i in range(0, len(prompt) - 1, 2)]


def test_labels_are_the_sums_of_the_digits(rows):
    for row in rows["rl"] + rows["eval"]:
        pairs = items(row["prompt"])
        assert row["label"] == str(sum(digit for _, digit in pairs) % 10)
        assert row["metadata"] == {"items": len(pairs)}
        assert len({key for key, _ in pairs}) == len(pairs), "a key that occurs twice cannot be looked up"


def test_no_prompt_is_in_two_splits_and_lengths_have_a_long_tail(rows):
    prompts = [row["prompt"] for split in rows.values() for row in split]
    assert len(prompts) == len(set(prompts)) == 1300
    lengths = sorted(len(items(prompt)) for prompt in prompts)
    assert lengths[0] == 2
    assert 4 <= lengths[len(lengths) // 2] <= 6
    assert lengths[-len(lengths) // 50] >= 25
    assert lengths[-1] <= 48


def test_model_is_a_whole_mimo_that_transformers_reads(task, tmp_path, capsys):
    options = ("--task", task, "--out", tmp_path / "model", "--layers", 3, "--hidden", 64)
    short_run.script(QUICKSTART / "make_model.py", *options)
    told = capsys.readouterr().out
    check_model(tmp_path / "model", "train")
    decoder = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    parameters = sum(p.numel() for p in decoder.parameters())
    assert f"{parameters:,} parameters" in told
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    with torch.no_grad():
        logits = decoder(torch.tensor([tokenizer("a3b4c5=")["input_ids"]])).logits
    # A fresh model is close to knowing nothing: cross-entropy near that of the uniform distribution.
    assert logits.shape[-1] == len(tokenizer)
    assert 0.05 < float(logits.std()) < 1
