"""slime, Megatron and SGLang accept slime's own speculative recipes, and ours, on Hopper.

Arguments come from the scripts, which run with stubs (`recorded_recipes.py`). Validation is upstream's own, in one
process for each version of SGLang (`slime_recipes.py`). tools/setup_slime_tests.sh makes the environment.
"""

import json
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import recorded_recipes

from megatron_rlspec.config import ConfigError, DrafterConfig
from megatron_rlspec.integrations.slime import launch
from megatron_rlspec.integrations.slime.plan import FUNCTIONS, HOOKS, plan

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SLIME = os.environ.get("RLSPEC_SLIME")
MEGATRON = os.environ.get("RLSPEC_SLIME_MEGATRON")
OLD = os.environ.get("RLSPEC_SGLANG_OLD")
PYTHON = os.environ.get("RLSPEC_SLIME_PYTHON", sys.executable)
pytestmark = [
    pytest.mark.slime,
    pytest.mark.timeout(1200),  # a minute or two on a quiet machine
    pytest.mark.skipif(not (SLIME and MEGATRON), reason="see tools/setup_slime_tests.sh"),
]
OURS = sorted(set((ROOT / "examples/slime").glob("*.sh")) - {ROOT / "examples/slime/recipe.sh"})
THEIRS = (
    "examples/geo3k_vlm/run_geo3k_qwen35.sh",
    "scripts/run-deepseek-r1.sh",
    "scripts/run-glm4.7-30B-A3B.sh",
    "scripts/run-glm4.7-355B-A32B.sh",
    "scripts/run-glm5-744B-A40B.sh",
    "scripts/run-glm5.2-744B-A40B.sh",
    "scripts/run-mimo-7B-rl-eagle.sh",
    "scripts/run-qwen3-next-80B-A3B.sh",
    "scripts/run-qwen3.5-27B.sh",
)
# `rlspec slime` refuses these in one line.
REFUSED = {
    "run-glm5-744B-A40B": "--prefill-num-servers 1: engines that prefill and decode apart",
    "run-glm5.2-744B-A40B": "--sglang-config .*: engines that prefill and decode apart",
    "run_geo3k_qwen35": "--spec slime_plugins.models.qwen3_5_vl: the model holds no MTP layer itself",
}
# Recipes whose number of steps stays as it is, because of delta nets or attention data parallelism.
FIXED = {Path(name).stem for name in THEIRS if "mimo" not in name} | {"qwen3.5-4b"}
VERSIONS = ["installed", pytest.param("0.5.15.post1", marks=pytest.mark.skipif(not OLD, reason="RLSPEC_SGLANG_OLD"))]


def _stem(path: str | Path) -> str:
    return Path(path).stem


class Started(Exception):
    """The command that `rlspec slime` would have started, and its environment."""


def completed(arguments, environment, monkeypatch):
    """The job that `rlspec slime ARGUMENTS` starts from this environment."""

    def start(program, command, given):
        raise Started(command, given)

    with monkeypatch.context() as patch:
        patch.setattr(os, "execvpe", start)
        patch.setattr(os, "environ", environment)
        with pytest.raises(Started) as started:
            launch.main(arguments)
    return recorded_recipes.job(*started.value.args)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """Return jobs by name: slime's recipes unchanged (`alone/…`) and with `rlspec slime`, and ours."""
    folder = tmp_path_factory.mktemp("recipes")
    found = {}
    with pytest.MonkeyPatch.context() as monkeypatch:
        for name in THEIRS:
            script = Path(SLIME, name)
            box = folder / Path(name).stem
            command, seen = recorded_recipes.run(script, box, BASE_DIR=str(box), BASE_FOLDER=str(box))
            command = ["ray", *command]
            found[f"alone/{script.stem}"] = recorded_recipes.job(command, seen)
            if script.stem not in REFUSED:
                options = ["--folder", str(box / "rlspec"), "--", *command]
                found[script.stem] = completed(options, seen, monkeypatch)
        for script in OURS:
            box = folder / script.stem
            places = {"SLIME": SLIME, "MEGATRON": MEGATRON, "RUN": str(box / "run"), "DRAFTER": str(folder)}
            command, seen = recorded_recipes.run(script, box, MODEL="/m", LOAD="/l", DATA="/d", **places)
            found[script.stem] = completed(command[1:], seen, monkeypatch)
    made = {}
    for number, (name, job) in enumerate(found.items()):
        made[name] = recorded_recipes.with_model(job, name, folder / f"model-{number}")
    made["without the variable"] = made["mimo-7b-rl"]._replace(environment={})
    return made


@pytest.fixture(scope="module")
def answers(jobs, tmp_path_factory):
    """Return upstream's answer to each job, by the version of SGLang."""

    @cache
    def ask(version):
        folder = tmp_path_factory.mktemp("answers")
        (folder / "jobs.json").write_text(json.dumps({name: list(job) for name, job in jobs.items()}))
        checkout = folder / "slime"
        shutil.copytree(SLIME, checkout, ignore=shutil.ignore_patterns(".git", "tests", "docs", "imgs"))
        if version == "installed":
            patch = ROOT / "patches/slime/624b824a8/0003-server-args-as-struct.patch"
            subprocess.run(["git", "apply", str(patch)], cwd=checkout, check=True)
        path = [*([OLD] if version != "installed" else []), MEGATRON, str(checkout), str(ROOT)]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "HF_HOME": str(folder)}
        command = [PYTHON, "-W", "ignore", str(HERE / "slime_recipes.py"), str(folder / "jobs.json")]
        done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])

    return ask


def test_every_speculative_recipe_of_slime_is_tested():
    found = [*Path(SLIME, "scripts").glob("run-*.sh"), *Path(SLIME, "examples").rglob("*.sh")]
    speculating = {str(p.relative_to(SLIME)) for p in found if "--sglang-speculative-algorithm" in p.read_text()}
    assert speculating == set(THEIRS)


@pytest.mark.parametrize(("name", "message"), REFUSED.items())
def test_a_recipe_that_the_drafter_does_not_fit_is_refused(name, message, jobs):
    arguments, _ = jobs[f"alone/{name}"]
    with pytest.raises(ConfigError, match=message) as refused:
        plan(arguments, DrafterConfig())
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", sorted({*map(_stem, THEIRS), *map(_stem, OURS)} - REFUSED.keys()))
def test_recipe_is_accepted_or_refused_as_sglang_refuses_it(name, version, answers):
    """A recipe for another SGLang fails in this one's parser with the same words, with and without `rlspec slime`."""
    answer = answers(version)[name]
    alone = answers(version).get(f"alone/{name}", {})
    if "error" in alone:
        assert answer == alone and "ambiguous option: --sglang-" in alone["error"]
        assert version == "installed", "slime's own recipes fit the SGLang that slime pins"
        return
    assert "error" not in answer, answer
    eagle3 = "eagle3" in name  # a model of its own: slime's has no MTP layer then
    assert answer["mtp"] == (None if eagle3 else 1)
    assert answer["hooks"] == [FUNCTIONS["--custom-megatron-init-path"], f"{HOOKS}.model_provider"]
    for engine in answer["engines"]:
        assert engine["algorithm"] == ("EAGLE3" if eagle3 else "EAGLE")
        assert engine["adaptive"] == (name not in FIXED)
        assert engine["steps"] == (alone["engines"][0]["steps"] if alone else engine["steps"])


@pytest.mark.parametrize("version", VERSIONS)
def test_ranks_and_engines_agree_on_nccl_and_megatron_finds_its_variable(version, answers):
    """slime's and SGLang's own code sets these, from the environment that `rlspec slime` gives to the job."""
    for name, answer in answers(version).items():
        if "error" in answer or name.startswith("alone/"):
            continue
        assert answer["ranks"] == {"NCCL_CUMEM_ENABLE": "0", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}, name
        for engine in answer["engines"]:
            assert engine["environment"]["NCCL_CUMEM_ENABLE"] == answer["ranks"]["NCCL_CUMEM_ENABLE"]


def test_our_recipes_need_the_variable_that_rlspec_sets(jobs, answers):
    """Without the variable, Megatron's own check ends each recipe. Workers also find Megatron."""
    for recipe in OURS:
        environment = jobs[recipe.stem].environment
        assert environment["CUDA_DEVICE_MAX_CONNECTIONS"] == "1" and environment["PYTHONPATH"] == MEGATRON
    assert "CUDA_DEVICE_MAX_CONNECTIONS" in answers("installed")["without the variable"]["error"]
