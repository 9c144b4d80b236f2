"""Each slime recipe, ours and slime's own, gives a complete command or one line of refusal. slime knows all our flags.

A recipe runs with stubs: it finds the harmless programs of `TOOLS`, and the other ones only note what they would do.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rlspec.config import ConfigError
from megatron_rlspec.integrations.slime import launch
from megatron_rlspec.integrations.slime.flags import read_flags
from megatron_rlspec.integrations.slime.plan import ADAPTIVE

ROOT = Path(__file__).parents[2]
RECIPES = sorted(set((ROOT / "examples/slime").glob("*.sh")) - {ROOT / "examples/slime/recipe.sh"})
SLIME = os.environ.get("RLSPEC_SLIME")
MEGATRON = os.environ.get("RLSPEC_SLIME_MEGATRON")
PYTHON = os.environ.get("RLSPEC_SLIME_PYTHON", sys.executable)
TOOLS = ("awk", "basename", "bash", "cat", "dirname", "grep", "seq", "tr", "wc")
SILENT = ("hf", "mkdir", "nvidia-smi", "pip", "pkill", "sleep", "ssh")
NOTE = '#!/bin/sh\nprintf "%s\\0" "$@" > "$CALL"\n'
# slime's recipes with speculation -> the line by which `rlspec slime` refuses one; "": it does not
THEIRS = {
    "examples/geo3k_vlm/run_geo3k_qwen35.sh": "--spec .*qwen3_5_vl: the model holds no MTP layer itself",
    "scripts/run-deepseek-r1.sh": "",
    "scripts/run-glm4.7-30B-A3B.sh": "",
    "scripts/run-glm4.7-355B-A32B.sh": "",
    "scripts/run-glm5-744B-A40B.sh": "--prefill-num-servers 1: engines that prefill and decode apart",
    "scripts/run-glm5.2-744B-A40B.sh": "--allgather-cp: the drafter learns from sequences",
    "scripts/run-mimo-7B-rl-eagle.sh": "",
    "scripts/run-qwen3-next-80B-A3B.sh": "",
    "scripts/run-qwen3.5-27B.sh": "",
}
with_slime = [
    pytest.mark.slime,
    pytest.mark.skipif(not (SLIME and MEGATRON), reason="set RLSPEC_SLIME and RLSPEC_SLIME_MEGATRON to checkouts"),
]


def run(recipe, folder, **environment):
    """Return the arguments of the last `ray` or `rlspec` that the recipe calls."""
    programs = folder / "bin"
    programs.mkdir(parents=True)
    for name in TOOLS:
        (programs / name).symlink_to(shutil.which(name))
    stubs = dict.fromkeys(SILENT, "#!/bin/sh\n") | {"mktemp": f"#!/bin/sh\necho {folder}/made\n"}
    for name, text in (stubs | {"ray": NOTE, "rlspec": NOTE}).items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    env = {"PATH": str(programs), "HOME": str(folder), "MASTER_ADDR": "127.0.0.1", "CALL": str(folder / "call")}
    command = [shutil.which("bash"), str(recipe)]
    done = subprocess.run(command, env=env | environment, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return (folder / "call").read_text().split("\0")[:-1]


def completed(arguments, capsys):
    """Return the words of the command that `rlspec slime` would start."""
    assert launch.main(arguments) == 0
    return shlex.split(capsys.readouterr().out.splitlines()[-1])


def ours(recipe, folder, checkout, capsys):
    places = {"SLIME": str(checkout), "MEGATRON": "/megatron", "RUN": str(folder / "run"), "DRAFTER": str(folder)}
    name, *arguments = run(recipe, folder, MODEL="/m", LOAD="/l", DATA="/d", DRY_RUN="1", **places)
    assert name == "slime"
    return completed(arguments, capsys)


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
    words = ours(recipe, tmp_path, checkout, capsys)
    given = read_flags(words)
    assert given["--custom-megatron-init-path"] and Path(given["--custom-config-path"]).is_file()
    assert given["--sglang-speculative-algorithm"] == ("EAGLE3" if "eagle3" in recipe.stem else "EAGLE")
    assert len([w for w in words if w.startswith("--")]) == len(given), "no flag twice"


class TestSlime:
    pytestmark = with_slime

    def test_every_speculative_recipe_of_slime_is_tested(self):
        found = [*Path(SLIME, "scripts").glob("run-*.sh"), *Path(SLIME, "examples").rglob("*.sh")]
        speculating = {str(p.relative_to(SLIME)) for p in found if "--sglang-speculative-algorithm" in p.read_text()}
        assert speculating == THEIRS.keys()

    @pytest.mark.parametrize(("recipe", "refusal"), THEIRS.items())
    def test_slimes_recipe_is_completed_or_refused(self, recipe, refusal, tmp_path, capsys):
        submit = run(Path(SLIME, recipe), tmp_path, BASE_DIR=str(tmp_path), BASE_FOLDER=str(tmp_path))
        arguments = ["--folder", str(tmp_path / "rlspec"), "--dry-run", "--", "ray", *submit]
        if refusal:
            with pytest.raises(ConfigError, match=refusal) as refused:
                launch.main(arguments)
            assert "\n" not in str(refused.value)
            return
        given = read_flags(completed(arguments, capsys))
        assert given["--sglang-speculative-algorithm"] == "EAGLE"
        # The others have delta nets or attention data parallelism, so their number of drafts is fixed.
        assert (ADAPTIVE in given) == ("mimo" in recipe)

    def test_a_recipe_of_engines_that_prefill_apart_is_refused(self, tmp_path):
        recipe = Path(SLIME, "scripts/run-glm5.2-744B-A40B.sh")
        submit = run(recipe, tmp_path, BASE_DIR=str(tmp_path), BASE_FOLDER=str(tmp_path))
        submit.remove("--allgather-cp")
        with pytest.raises(ConfigError, match="--sglang-config .*: engines that prefill and decode apart"):
            launch.main(["--folder", str(tmp_path / "rlspec"), "--dry-run", "--", "ray", *submit])

    def test_slime_knows_every_flag_of_our_recipes(self, tmp_path, capsys):
        flags = {"--no-such-flag"}
        for recipe in RECIPES:
            flags |= read_flags(ours(recipe, tmp_path / recipe.stem, SLIME, capsys)).keys()
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([MEGATRON, SLIME, str(ROOT)]), "SGLANG_USE_CPU_ENGINE": "1"}
        command = [PYTHON, "-W", "ignore", str(Path(__file__).parent / "slime_flags.py"), json.dumps(sorted(flags))]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stderr[-2000:]
        assert json.loads(done.stdout.splitlines()[-1]) == ["--no-such-flag"]
