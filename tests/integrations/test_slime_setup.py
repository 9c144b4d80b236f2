"""The set-up of slime's tests: its locks fit together, its pins are the documented ones, a bad source is one line."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tools/setup_slime_tests.sh"


def locked(name):
    lines = (ROOT / "requirements" / name).read_text().splitlines()
    return dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))


def test_locks_name_each_package_once_and_the_pinned_sglang():
    assert not locked("cpu.txt").keys() & locked("slime-tests.txt").keys()
    assert locked("sglang-0.5.15.txt")["sglang"] == "0.5.15.post1" != locked("cpu.txt")["sglang"]


def test_commits_are_those_that_the_documents_name():
    slime, megatron = re.findall(r"_commit=([0-9a-f]{40})", SCRIPT.read_text())
    assert (ROOT / "patches/slime" / slime[:9]).is_dir()
    assert f"slime {slime[:9]}, Megatron-LM {megatron[:9]}" in (ROOT / "docs/slime-conformance.md").read_text()


def test_a_source_without_the_commit_is_reported_in_one_line(tmp_path):
    subprocess.run(["git", "init", "-q", str(tmp_path / "empty")], check=True)
    env = os.environ | {"RLSPEC_SLIME": str(tmp_path / "empty"), "PYTHON": sys.executable}
    done = subprocess.run(["bash", str(SCRIPT), str(tmp_path / "made")], env=env, capture_output=True, text=True)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith(f"setup: no commit 624b824a8 from {tmp_path}/empty: ")
    assert not (tmp_path / "made/slime").exists()
