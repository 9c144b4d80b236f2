"""Run other tests of this suite in Transformer Engine's branch, with the stand-in on PYTHONPATH."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent
STAND_IN = TESTS / "te/stand_in"
# Steps in other layouts: te/inside/test_branches.py.
SUITE = {
    "layers, steps, isolation": ["te/inside", "train/test_isolation.py"],
    "names": ["models/test_layouts_of_ranks.py", "models/test_families.py"],
    "policy and drafters": ["train/test_model_parity.py", "train/test_eagle3_training.py"],
    "experts": ["train/test_experts.py", "train/test_expert_parallel.py"],
    "resume": ["train/test_resume.py"],
    "whole run": ["run/test_run.py::test_a_warm_start_on_two_ranks_is_evaluated_and_stops_early"],
}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", SUITE)
def test_the_suite_through_the_stand_in(name):
    """Run tests, named from this folder's parent, in a process that finds the stand-in; all must pass."""
    path = os.pathsep.join([str(STAND_IN), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", "-W", "ignore"]
    where = "from megatron_rlspec.train import runtime; print(runtime.has_transformer_engine())"
    how = {"env": os.environ | {"PYTHONPATH": path}, "cwd": TESTS.parent, "capture_output": True, "text": True}
    taken = subprocess.run([sys.executable, "-W", "ignore", "-c", where], **how)
    assert taken.stdout.split()[-1:] == ["True"], f"this is not Transformer Engine's branch: {taken.stderr[-1000:]}"
    tests = [f"tests/{test}" for test in SUITE[name]]
    done = subprocess.run([*command, "-m", "not gpu and not slime", *tests], **how)
    assert done.returncode == 0, done.stdout[-4000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 0
