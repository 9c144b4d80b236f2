"""mypy accepts the package; so all engines satisfy the protocol `RolloutEngine`."""

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rlspec.engine import RolloutEngine
from megatron_rlspec.extensions.migration.embedded.fleet import Fleet
from megatron_rlspec.rollout.embedded.engine import EmbeddedEngine
from megatron_rlspec.rollout.sglang.client.engine import SGLangEngine

ENGINES: tuple[type[RolloutEngine], ...] = (SGLangEngine, EmbeddedEngine, Fleet)  # checked by mypy, not by running it


@pytest.mark.slow
def test_mypy_accepts_the_package() -> None:
    pytest.importorskip("mypy")
    root = Path(__file__).parent.parent
    found = subprocess.run([sys.executable, "-m", "mypy"], cwd=root, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr
