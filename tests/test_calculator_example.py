"""examples/calculator: a rollout with a tool, in a whole run."""

import importlib.util
from pathlib import Path

import forked
import pytest
from short_run import words

from megatron_rlspec.records.recorder import read_records

EXAMPLE = Path(__file__).parent.parent / "examples/calculator"


@pytest.fixture(scope="module")
def calculator():
    specification = importlib.util.spec_from_file_location("calculator", EXAMPLE / "calculator.py")
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
    ended = forked.run_module("megatron_rlspec.cli", words(start, tmp_path, "train", options), folder=EXAMPLE)
    assert ended.returncode == 0, (ended.stdout + ended.stderr)[-3000:]
    records = read_records(tmp_path / "metrics.jsonl")
    assert [record["step"] for record in records] == [0, 1]
    for record in records:
        assert record["policy/train_rollout_logprob_abs_diff"] < 1e-3
        assert record["rollout/accept_length"] >= 1 and record["rollout/response_tokens"] > 16
