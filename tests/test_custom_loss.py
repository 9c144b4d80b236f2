"""examples/custom_loss: functions of the user's as policy loss, advantage and drafter's loss."""

import importlib.util
import math
from pathlib import Path

import forked
import numpy as np
import pytest
from short_run import words

from megatron_rlspec import cli, custom
from megatron_rlspec.config import AlgorithmConfig, ConfigError
from megatron_rlspec.metrics import read_records
from megatron_rlspec.types import Prompt, Sample

EXAMPLE = Path(__file__).parent.parent / "examples/custom_loss"
OWN = {
    "algorithm__loss": "my_losses:reinforce",
    "algorithm__advantage": "my_losses:ranks",
    "drafter__loss": "my_losses:mixed",
}


@pytest.fixture
def example():
    specification = importlib.util.spec_from_file_location("my_losses", EXAMPLE / "my_losses.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_two_steps_of_a_run(start, tmp_path):
    options = {"rollout__engine": "embedded", "spec__mode": "fixed", "train__steps": 2, "reward__kind": "exact", **OWN}
    ended = forked.run_module("megatron_rlspec.cli", words(start, tmp_path, "train", options), folder=EXAMPLE)
    assert ended.returncode == 0, (ended.stdout + ended.stderr)[-3000:]
    records = read_records(tmp_path / "metrics.jsonl")
    assert [record["step"] for record in records] == [0, 1]
    for record in records:
        # Half the cross-entropy, and half a divergence, which is not negative.
        assert record["drafter/loss_1"] > 0.5 * record["drafter/ce_1"] > 0
        assert math.isfinite(record["policy/loss"]) and record["drafter/skipped"] == record["policy/skipped"] == 0


def test_advantages_by_rank(example):
    samples = [Sample(f"s{i}", Prompt(0, np.array([1])), np.array([1, 2]), np.ones(2), np.ones(2)) for i in range(4)]
    group = custom.RewardedGroup(
        samples, np.array([0.5, 9.0, 0.5, 0.0]), np.array([True, True, True, False]), AlgorithmConfig()
    )
    np.testing.assert_allclose(example.ranks(group), [-0.5, 1.0, -0.5, 0.0])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("no_such_module:f", "algorithm.loss=no_such_module:f: cannot be imported: ModuleNotFoundError"),
        ("math:no_such_function", "cannot be imported: AttributeError"),
        ("math:pi", "expected a function of one argument, found float"),
        ("os.path:split_nothing", "AttributeError"),
        ("shutil:copyfile", "missing a required argument: 'dst'; expected a function of one argument"),
    ],
)
def test_a_function_that_cannot_be_used_is_refused_in_one_line(text, expected):
    with pytest.raises(ConfigError) as error:
        custom.load("algorithm.loss", text)
    assert expected in str(error.value) and "\n" not in str(error.value)


def test_a_wrong_result_is_refused_in_one_line():
    with pytest.raises(ConfigError, match=r"drafter.loss: the function returned float \[\]; expected a tensor \[4\]"):
        custom.checked("drafter.loss", 1.0, 4)


def test_an_exception_in_the_function_is_reported_in_one_line_with_its_place(tmp_path, monkeypatch, capsys):
    (tmp_path / "broken_losses.py").write_text("def own(rows):\n    return {}['no such\\nkey']\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("RANK", "1")  # data can differ between ranks, so rank 0 may not meet the exception
    own = custom.load("algorithm.loss", "broken_losses:own")
    assert cli.run(lambda: own(None)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("rlspec: rank 1: algorithm.loss=broken_losses:own: KeyError: ")
    assert line.endswith("broken_losses.py:2, in own)")
