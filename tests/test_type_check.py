"""mypy accepts the package; so all engines satisfy `RolloutEngine`. Programs beside it call what exists."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rlspec.engine import RolloutEngine
from megatron_rlspec.extensions.migration.embedded.fleet import Fleet
from megatron_rlspec.rollout.embedded.engine import EmbeddedEngine
from megatron_rlspec.rollout.sglang.client.engine import SGLangEngine

ENGINES: tuple[type[RolloutEngine], ...] = (SGLangEngine, EmbeddedEngine, Fleet)  # checked by mypy, not by running it
ROOT = Path(__file__).parent.parent
MISSING = ("[attr-defined]", "[call-arg]", "[name-defined]", "[import-not-found]")  # no such name, or other parameters


def mypy(*files: Path) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("mypy")
    environment = os.environ | {"MYPYPATH": str(ROOT / "benchmarks")}
    command = [sys.executable, "-m", "mypy", *map(str, files)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)


@pytest.mark.slow
def test_mypy_accepts_the_package() -> None:
    found = mypy()
    assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["benchmarks", "tools", "examples/*"])
def test_programs_call_what_exists(folder: str) -> None:
    """No test runs all of them, so a function that was renamed would be missed in the rest."""
    for place in sorted(ROOT.glob(folder)):
        if files := sorted(place.glob("*.py")):
            said = mypy(*files).stdout
            assert said.splitlines()[-1].startswith(("Success", "Found")), said
            errors = [line for line in said.splitlines() if ": error:" in line]
            assert [line for line in errors if line.endswith(MISSING)] == []
