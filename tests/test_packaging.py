"""What `pip install` installs, and the error of commands that need a package that it leaves out."""

import ast
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import tiny_mimo
from packaging.requirements import Requirement

from megatron_rlspec.rollout.sglang.scheduler import versions

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TRAIN = ("train", "--model.path", "{start}/model", "--data.path", "{start}/task/rl.jsonl", "--reward.kind", "math")
TRAIN += ("--model.max_length", "256", "--rollout.max_new_tokens", "24")
SERVE = ("serve", "--model", "{model}")
PLUGIN = "megatron_rlspec/rollout/sglang"
WITH_SGLANG = ("controller", "bodies", "routes", "update")  # need SGLang, which brings what it needs
HIDE = "import sys; sys.modules.update(dict.fromkeys({hidden!r})); from megatron_rlspec.cli import main; main({argv!r})"


def names(requirements) -> set[str]:
    return {Requirement(requirement).name for requirement in requirements}


# Imported only where another package brings them: SGLang fastapi, starlette and datasets, transformers the client of
# the Hub, torch Triton, slime Ray and itself, and SGLang the client of Prometheus where it serves metrics.
BROUGHT = {"fastapi", "starlette", "datasets", "huggingface_hub", "triton", "ray", "slime", "prometheus_client"}
# Needed without an import statement of ours: torch's writer of TensorBoard files, a bound on what matplotlib takes, and
# what `log.sinks` names.
NOT_IMPORTED = {"tensorboard", "contourpy", "wandb"}
DISTRIBUTIONS = {"megatron": "megatron-core", "yaml": "pyyaml"}


def test_the_package_declares_what_it_imports():
    modules = set()
    for path in (ROOT / "megatron_rlspec").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                modules |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                modules.add(node.module)
    imported = {module.partition(".")[0] for module in modules} - {*sys.stdlib_module_names, "megatron_rlspec"}
    imported = {DISTRIBUTIONS.get(name, name.replace("_", "-")) for name in imported - BROUGHT}
    extras = PROJECT["optional-dependencies"]
    optional = names(sum((extras[extra] for extra in extras if extra != "dev"), []))
    assert imported - optional == names(PROJECT["dependencies"])
    assert optional - NOT_IMPORTED <= imported


def test_an_engine_needs_nothing_that_only_training_needs(tmp_path):
    hidden = ["matplotlib", "contourpy", "tensorboard", "pyarrow", "math_verify", "megatron"]
    shape = tiny_mimo.config(hidden=64, layers=1, heads=2, kv_heads=1, ffn=128, vocab=160)
    model = tiny_mimo.write(tmp_path / "model", shape, tiny_mimo.weights(shape))
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in (ROOT / PLUGIN).rglob("*.py")]
    code = f"""
import importlib, sys
sys.modules.update(dict.fromkeys({hidden}))
for name in {[name for name in modules if not name.endswith(WITH_SGLANG)]}:
    importlib.import_module(name)
from megatron_rlspec.rollout.sglang.http import checks, serve
options = serve.parser().parse_args(["--model", {str(model)!r}])
checks.check(options, serve.parser().get_default)
options.dtype = "bfloat16"
print(serve.arguments_for(options, "cuda"))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=840)
    assert done.returncode == 0 and "--speculative-adaptive" in done.stdout, done.stderr[-2000:]


def test_the_extra_takes_the_versions_of_sglang_that_the_code_takes():
    (wanted,) = PROJECT["optional-dependencies"]["engine"]
    accepted = Requirement(wanted).specifier
    released = ["0.5.14", "0.5.20", "0.5.21", "0.5.22", "0.5.22.post1"]
    assert not [version for version in released if version in accepted]
    assert all(version in accepted for version in versions.KNOWN)


@pytest.mark.parametrize(
    "hidden, argv, expects",
    [
        (["torch"], ["convert", "a", "b"], ("needs torch", "megatron_rlspec[train]")),
        pytest.param(["megatron"], TRAIN, ("megatron-core is not installed", "[train]"), marks=pytest.mark.slow),
        pytest.param(["sglang"], SERVE, ("SGLang is not installed here", "pip install"), marks=pytest.mark.slow),
    ],
    ids=lambda value: " ".join(value)[:30],
)
def test_a_missing_package_is_named_in_one_line(hidden, argv, expects, tmp_path, start):
    (tmp_path / "config.json").write_text("{}")
    argv = [word.format(model=tmp_path, start=start) for word in argv]
    command = [sys.executable, "-c", HIDE.format(hidden=hidden, argv=argv)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=840)
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("rlspec") and all(word in line for word in expects), line
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def tracked() -> set[str]:
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines())


@pytest.mark.slow
def test_sdist_and_wheel_install_in_a_clean_environment_and_run(tmp_path):
    """Build an sdist from the tracked files and a wheel from the sdist; install it with pip, without extras."""
    source = tmp_path / "source"
    for name in tracked():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    build = "from setuptools import build_meta as b; b.build_sdist({0!r})"
    subprocess.run([sys.executable, "-c", build.format(str(tmp_path))], cwd=source, check=True, capture_output=True)
    (packed,) = tmp_path.glob("*.tar.gz")
    shutil.unpack_archive(packed, tmp_path / "unpacked", filter="data")
    (inside,) = (tmp_path / "unpacked").iterdir()
    there = {path.relative_to(inside).as_posix() for path in inside.rglob("*") if path.is_file()}
    assert tracked() - {".gitignore"} <= there
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    python = tmp_path / "venv/bin/python"
    pip = [python, "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, "setuptools>=77"], check=True)
    subprocess.run([*pip, "--no-build-isolation", packed], check=True)
    share = tmp_path / "venv/share/megatron_rlspec/examples"
    assert (share / "quickstart/make_task.py").is_file()
    for word in ("--version", "--help", "doctor"):
        done = subprocess.run([python.with_name("rlspec"), word], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0 and "Traceback" not in done.stderr, (word, done.stdout, done.stderr)
    assert "megatron-core: not installed; pip install 'megatron_rlspec[train]'" in done.stdout  # the doctor's
    missing = subprocess.run([python.with_name("rlspec"), "convert", "a", "b"], capture_output=True, text=True)
    assert missing.returncode == 2 and "megatron_rlspec[train]" in missing.stderr
