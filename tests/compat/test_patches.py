"""The shipped patches fit the versions that they are for."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SHIPPED = sorted((Path(__file__).parents[2] / "patches").glob("*/*/*.patch"))


@pytest.mark.slime
@pytest.mark.skipif(not os.environ.get("RLSPEC_SLIME"), reason="set RLSPEC_SLIME to a slime checkout")
def test_slimes_patches_fit(tmp_path):
    root = tmp_path / "slime"
    shutil.copytree(Path(os.environ["RLSPEC_SLIME"], "slime"), root / "slime")
    ours = [patch for patch in SHIPPED if patch.parts[-3] == "slime"]
    subprocess.run(["git", "apply", *map(str, ours)], cwd=root, check=True)
    text = (root / "slime/backends/megatron_utils/megatron_to_hf/qwen3_next.py").read_text()
    assert "second_half" not in text
