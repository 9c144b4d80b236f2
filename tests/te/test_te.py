"""Run other tests of this suite in Transformer Engine's branch, with the stand-in on PYTHONPATH."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent
STAND_IN = TESTS / "te/stand_in"
ISOLATION = "test_policy_is_the_same_with_and_without_drafter"
SLOW = {
    "every layout of a converted checkpoint": ["models/test_layouts_of_ranks.py"],
    "names and logits": ["models/test_names.py", "models/test_families.py"],
    "one rank": ["train/test_model_parity.py", "train/test_loading.py", "train/test_attention.py"],
    "isolation": ["train/test_isolation.py", "te/inside"],
    "experts": ["train/test_experts.py", "train/test_expert_parallel.py"],
    "EAGLE-3": ["train/test_eagle3_training.py"],
    "layouts": ["train/test_parallel_equality.py::test_every_pair_of_settings"],
    "resume": ["train/test_resume.py"],
    "whole runs": [
        "run/test_run.py::test_a_run_leaves_the_files_that_the_readme_lists",
        "run/test_run.py::test_a_warm_start_on_two_ranks_is_evaluated_and_stops_early",
        "run/test_parallel_run.py::test_a_layout_learns_what_one_rank_does",
    ],
}


def through_the_stand_in(tests, marks):
    """Run tests, named from this folder's parent, in a process that finds the stand-in; all must pass."""
    path = os.pathsep.join([str(STAND_IN), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", "-W", "ignore", "-m", marks]
    where = "from megatron_rlspec.train import runtime; print(runtime.has_transformer_engine())"
    how = {"env": os.environ | {"PYTHONPATH": path}, "cwd": TESTS.parent, "capture_output": True, "text": True}
    taken = subprocess.run([sys.executable, "-W", "ignore", "-c", where], **how)
    assert taken.stdout.split()[-1:] == ["True"], f"this is not Transformer Engine's branch: {taken.stderr[-1000:]}"
    done = subprocess.run([*command, *(f"tests/{test}" for test in tests)], **how)
    assert done.returncode == 0, done.stdout[-4000:]
    return int(re.search(r"(\d+) passed", done.stdout)[1])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_layers_steps_and_isolation():
    quick = ["te/inside", f"train/test_isolation.py::{ISOLATION}"]
    assert through_the_stand_in(quick, "not slow") >= 6


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", SLOW)
def test_the_suite_through_the_stand_in(name):
    assert through_the_stand_in(SLOW[name], "not gpu and not slime")
