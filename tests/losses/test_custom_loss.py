"""examples/custom_loss: functions of the user's as policy loss, advantage and drafter's loss."""

import math
from pathlib import Path

import forked
import numpy as np
import pytest
import torch
from short_run import words

from megatron_rlspec import cli, custom
from megatron_rlspec.config import AlgorithmConfig, ConfigError
from megatron_rlspec.losses import grpo
from megatron_rlspec.records.recorder import read_records
from megatron_rlspec.types import Prompt, Sample

EXAMPLE = Path(__file__).parents[2] / "examples/custom_loss"
OWN = {
    "algorithm__loss": "my_losses:reinforce",
    "algorithm__advantage": "my_losses:ranks",
    "drafter__loss": "my_losses:mixed",
}


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


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("no_such_module:f", "algorithm.loss=no_such_module:f: cannot be imported: ModuleNotFoundError"),
        ("math:no_such_function", "cannot be imported: AttributeError"),
        ("math:pi", "is not a callable object; expected a function of one argument"),
        ("shutil:copyfile", "missing a required argument: 'dst'; expected a function of one argument"),
    ],
)
def test_a_function_that_cannot_be_used_is_refused_in_one_line(text, expected):
    with pytest.raises(ConfigError) as error:
        custom.load("algorithm.loss", text)
    assert expected in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (1.0, "returned 1.0, a float; expected a tensor [4] of floating point on cpu"),
        (torch.zeros(3), "returned a tensor [3] of float32 on cpu; expected a tensor [4]"),
        (torch.zeros(4, dtype=torch.int64), "returned a tensor [4] of int64 on cpu"),
        (torch.zeros(4), "returned a tensor without gradient"),
        (torch.tensor([0, 1, math.nan, 0], requires_grad=True), "returned nan at [2]; expected finite numbers"),
    ],
)
def test_a_wrong_result_is_refused_in_one_line(result, expected):
    with pytest.raises(ConfigError) as error:
        custom.checked("drafter.loss", result, torch.zeros(4, requires_grad=True))
    assert str(error.value).startswith("drafter.loss: the function ") and "\n" not in str(error.value)
    assert expected in str(error.value)


@pytest.mark.parametrize("result", [{"a": 1.0}, [0.0, math.inf], [1.0]], ids=["dict", "infinite", "one"])
def test_wrong_advantages_are_refused_in_one_line(result):
    samples = [Sample(f"s{i}", Prompt(0, np.array([1])), np.array([1, 2]), np.ones(2), np.ones(2)) for i in range(2)]
    with pytest.raises(ConfigError, match="algorithm.advantage=m:f: the function returned .*; expected 2 finite") as e:
        grpo.own_advantages(lambda group: result, samples, [0.0, 1.0], [True, True], AlgorithmConfig(advantage="m:f"))
    assert "\n" not in str(e.value)


def test_only_what_counts_must_be_finite():
    like = torch.zeros(3, requires_grad=True)
    result = like / torch.tensor([1.0, 0.0, 1.0])
    assert custom.checked("algorithm.loss", result, like, torch.tensor([True, False, True])).tolist() == [0, 0, 0]
    with pytest.raises(ConfigError, match=r"returned nan at \[1\]"):
        custom.checked("algorithm.loss", result, like, torch.ones(3, dtype=torch.bool))
    broken = torch.tensor([math.nan, 0.0, 0.0], requires_grad=True)  # the policy's own failure: the step is skipped
    assert custom.checked("algorithm.loss", broken * 1, broken).isnan().any()


def test_a_wrong_result_names_option_function_file_and_line(tmp_path, monkeypatch):
    (tmp_path / "returning.py").write_text("\n\ndef own(group):\n    return {}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    own = custom.load("algorithm.advantage", "returning:own")
    with pytest.raises(
        ConfigError, match=r"algorithm.advantage=returning:own \(.*returning.py:3\): the function returned \{\}"
    ):
        grpo.own_advantages(own, [], [], [], AlgorithmConfig(advantage="returning:own"))


@pytest.mark.parametrize("when", ["import", "call"])
def test_a_function_cannot_end_the_process_by_sys_exit(tmp_path, when):
    """A script that goes on after exit code 0 would take the run for a finished one."""
    body = "def own(rows):\n    sys.exit(0)\n" if when == "call" else "sys.exit(0)\ndef own(rows): pass\n"
    (tmp_path / "ending.py").write_text(f"import sys\n{body}")
    program = "from megatron_rlspec import cli, custom\nimport sys\n"
    program += "sys.exit(cli.run(lambda: custom.load('algorithm.loss', 'ending:own')(None)))"
    (tmp_path / "program_that_loads.py").write_text(program)
    ended = forked.run_module("program_that_loads", [], folder=tmp_path)
    assert ended.returncode == 2 and len(ended.stderr.splitlines()) == 1
    assert "algorithm.loss=ending:own: " in ended.stderr and "would end the process with exit code 0" in ended.stderr


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
