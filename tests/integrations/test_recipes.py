"""Every slime recipe gives a complete command; if slime is available, it knows each of the flags."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rlspec.integrations.slime import launch
from megatron_rlspec.integrations.slime.flags import read_flags

ROOT = Path(__file__).parents[2]
RECIPES = sorted(set((ROOT / "examples/slime").glob("*.sh")) - {ROOT / "examples/slime/recipe.sh"})
SLIME = os.environ.get("RLSPEC_SLIME")
MEGATRON = os.environ.get("RLSPEC_SLIME_MEGATRON")
PYTHON = os.environ.get("RLSPEC_SLIME_PYTHON", sys.executable)


def command(recipe, folder, checkout, capsys, **environment):
    """Return what `rlspec slime` prints for the recipe: a stand-in notes its arguments, and it runs in this process."""
    rlspec = folder / "bin/rlspec"
    rlspec.parent.mkdir()
    rlspec.write_text('#!/bin/sh\nprintf "%s\\0" "$@"\n')
    rlspec.chmod(0o755)
    env = {
        **os.environ,
        "PATH": f"{rlspec.parent}{os.pathsep}{os.environ['PATH']}",
        "SLIME": str(checkout),
        "MEGATRON": "/megatron",
        "MODEL": "/model",
        "LOAD": "/load",
        "DATA": "/data.jsonl",
        "RUN": str(folder / "run"),
        "DRAFTER": str(folder),
        "DRY_RUN": "1",
        **environment,
    }
    done = subprocess.run(["bash", str(recipe)], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    name, *arguments, _ = done.stdout.split("\0")
    assert name == "slime" and launch.main(arguments) == 0
    return capsys.readouterr().out


@pytest.fixture
def checkout(tmp_path):
    """Make a slime checkout with only the files that recipes read."""
    models = tmp_path / "slime/scripts/models"
    models.mkdir(parents=True)
    for recipe in RECIPES:
        sourced = next(line for line in recipe.read_text().splitlines() if line.startswith('source "$SLIME'))
        (models / sourced.split("/")[-1].rstrip('"')).write_text("MODEL_ARGS=(--num-layers 2)\n")
    return tmp_path / "slime"


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda p: p.stem)
def test_recipe_completes(recipe, checkout, tmp_path, capsys):
    words = shlex.split(command(recipe, tmp_path, checkout, capsys).splitlines()[-1])
    given = read_flags(words)
    assert given["--custom-megatron-init-path"] and Path(given["--custom-config-path"]).is_file()
    assert given["--sglang-speculative-algorithm"] == ("EAGLE3" if "eagle3" in recipe.stem else "EAGLE")
    assert len([w for w in words if w.startswith("--")]) == len(given), "no flag twice"


def test_no_recipe_kills_other_peoples_processes():
    for recipe in [*RECIPES, ROOT / "examples/slime/recipe.sh"]:
        assert "kill" not in recipe.read_text(), recipe


@pytest.mark.slime
@pytest.mark.skipif(not (SLIME and MEGATRON), reason="set RLSPEC_SLIME and RLSPEC_SLIME_MEGATRON to checkouts")
def test_slime_knows_every_flag_of_every_recipe(tmp_path, capsys):
    flags = set()
    for recipe in RECIPES:
        folder = tmp_path / recipe.stem
        folder.mkdir()
        words = shlex.split(command(recipe, folder, SLIME, capsys).splitlines()[-1])
        flags |= set(read_flags(words))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([MEGATRON, SLIME, str(ROOT)]), "SGLANG_USE_CPU_ENGINE": "1"}
    script = str(Path(__file__).parent / "slime_flags.py")
    asked = json.dumps(sorted(flags | {"--no-such-flag"}))
    done = subprocess.run([PYTHON, "-W", "ignore", script, asked], env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == ["--no-such-flag"]
