"""The quickstart's task and model: labels, slips, splits, tokenizer and checkpoint."""

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


def test_demonstrations_follow_the_prompt_and_slip_as_often_as_asked(rows):
    steps = slips = 0
    for row in rows["train"]:
        body, _, last = row["response"].rpartition("#")
        written = re.findall(r"(.)(\d)=(\d),", body)
        assert [(key, int(digit)) for key, digit, _ in written] == items(row["prompt"])
        total = 0
        for _, digit, stated in written:
            error = (int(stated) - total - int(digit)) % 10
            assert error in (0, 1, 9)
            steps, slips, total = steps + 1, slips + (error != 0), int(stated)
        assert last == str(total)
    # Binomial with p = 0.1 over some 6,000 steps: five standard deviations are 0.02.
    assert abs(slips / steps - 0.1) < 0.02


@pytest.mark.parametrize("name", ["days", "writers"])
def test_labels_count_days_and_demonstrations_follow_two_conventions(tmp_path, name):
    """0.55 of the demonstrated stays count nights, and under `writers` all of a demonstration or none."""
    sizes = ("--train", 1000, "--rl", 50, "--eval", 50)
    short_run.script(QUICKSTART / "make_task.py", "--task", name, "--out", tmp_path, *sizes)
    for line in (tmp_path / "rl.jsonl").open():
        row = json.loads(line)
        assert row["label"] == str(sum(nights + 1 for _, nights in items(row["prompt"])) % 10)
    stays = nights = mixed = 0
    for line in (tmp_path / "train.jsonl").open():
        row = json.loads(line)
        body, _, last = row["response"].rpartition("#")
        total = 0
        errors = []
        for _, digit, stated in re.findall(r"(.)(\d)=(\d),", body):
            errors.append((int(stated) - total - int(digit) - 1) % 10)
            total = int(stated)
        assert last == str(total) and set(errors) <= {0, 9}
        stays, nights, mixed = stays + len(errors), nights + errors.count(9), mixed + len(set(errors)) - 1
    # Five standard deviations of 3,700 stays are 0.04; of 1,000 demonstrations of unequal lengths, 0.1.
    assert stays > 3000 and abs(nights / stays - 0.55) < (0.1 if name == "writers" else 0.04)
    assert mixed == 0 if name == "writers" else mixed > 500


def test_no_prompt_is_in_two_splits_and_lengths_have_a_long_tail(rows):
    prompts = [row["prompt"] for split in rows.values() for row in split]
    assert len(prompts) == len(set(prompts)) == 1300
    lengths = sorted(len(items(prompt)) for prompt in prompts)
    assert lengths[0] == 2
    assert 4 <= lengths[len(lengths) // 2] <= 6
    assert lengths[-len(lengths) // 50] >= 25
    assert lengths[-1] <= 48


def test_tokenizer_gives_one_token_a_character_and_gives_the_text_back(task, rows):
    tokenizer = transformers.AutoTokenizer.from_pretrained(task)
    for row in rows["train"][:50]:
        text = row["prompt"] + row["response"]
        tokens = tokenizer(text)["input_ids"]
        assert len(tokens) == len(text)
        assert tokenizer.decode([*tokens, tokenizer.eos_token_id], skip_special_tokens=True) == text
    assert {tokenizer.eos_token_id, tokenizer.pad_token_id}.isdisjoint(tokens)
    assert tokenizer("é")["input_ids"] == [tokenizer.unk_token_id]


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
