"""Examples: the quickstart's task and model, the arithmetic of GSM8K's format, and a calculator."""

import importlib.util
import json
import re
import runpy
from pathlib import Path

import forked
import pytest
import short_run
import torch
import transformers
from short_run import words

from megatron_rlspec.models.directory import check_model
from megatron_rlspec.records.recorder import read_records

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


ARITHMETIC = Path(__file__).parent.parent / "examples" / "arithmetic"


@pytest.fixture(scope="module")
def calculations() -> list[dict]:
    return [json.loads(line) for line in (ARITHMETIC / "sample.jsonl").open()]


def test_calculations_are_true_and_lead_to_the_answer(calculations):
    for row in calculations:
        count = int(re.match(r"\w+ has (\d+)", row["question"])[1])
        for left, operator, right, result in re.findall(r"<<(\d+)([-+*/])(\d+)=(\d+)>>", row["answer"]):
            assert int(left) == count
            count = {"+": count + int(right), "-": count - int(right), "*": count * int(right)}.get(
                operator, count / int(right)
            )
            assert count == int(result) and right in row["question"]
        assert row["answer"].endswith(f"\n#### {int(count)}")


def test_the_sample_is_what_the_generator_writes(calculations):
    make = runpy.run_path(str(ARITHMETIC / "make_arithmetic.py"))
    rng = make["random"].Random(1)
    assert [make["problem"](rng) for _ in calculations] == calculations


CALCULATOR = Path(__file__).parent.parent / "examples/calculator"


@pytest.fixture(scope="module")
def calculator():
    specification = importlib.util.spec_from_file_location("calculator", CALCULATOR / "calculator.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("so 3 + 4", "7"),
        ("(2 - 5) * -2", "6"),
        ("1 / 8", "0.125"),
        ("1/0", ""),
        ("that is", ""),
        ("3 +", ""),
        ("x 12", "12"),
        ("2 ** 9999999", ""),
        ("__import__('os')", ""),
    ],
)
def test_the_calculator(calculator, text, result):
    assert calculator.calculate(text) == result


def test_a_run_of_several_turns(start, tmp_path):
    """Trainer and engine agree on the log-probs of trained tokens, so masks and positions are right over turns."""
    options = {
        "rollout__engine": "embedded",
        "rollout__function": "calculator:solve",
        "spec__mode": "fixed",
        "train__steps": 2,
        "reward__kind": "exact",
    }
    ended = forked.run_module("megatron_rlspec.cli", words(start, tmp_path, "train", options), folder=CALCULATOR)
    assert ended.returncode == 0, (ended.stdout + ended.stderr)[-3000:]
    records = read_records(tmp_path / "metrics.jsonl")
    assert [record["step"] for record in records] == [0, 1]
    for record in records:
        assert record["policy/train_rollout_logprob_abs_diff"] < 1e-3
        assert record["rollout/accept_length"] >= 1 and record["rollout/response_tokens"] > 16
