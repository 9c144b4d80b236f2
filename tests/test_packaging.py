"""What `pip install` installs, and the error of commands that need a package that it leaves out."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LEFT_ALONE = ("torch", "megatron-core", "transformers", "sglang")
TRAIN = ("train", "--model.path", "{start}/model", "--data.path", "{start}/task/rl.jsonl", "--reward.kind", "math")
TRAIN += ("--model.max_length", "256", "--rollout.max_new_tokens", "24")
HIDE = "import sys; sys.modules.update(dict.fromkeys({hidden!r})); from megatron_rlspec.cli import main; main({argv!r})"


def names(requirements) -> set[str]:
    return {requirement.partition(">")[0].partition("[")[0].partition("=")[0] for requirement in requirements}


def test_a_bare_install_replaces_no_engine_and_no_trainer():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert not names(project["dependencies"]) & set(LEFT_ALONE)
    for extra in project["optional-dependencies"].values():
        assert "apex" not in names(extra)  # PyPI's is another project than NVIDIA's
    assert set(LEFT_ALONE) <= names(project["optional-dependencies"]["gpu"])


@pytest.mark.parametrize(
    "hidden, argv, expects",
    [
        (["torch"], ["convert", "a", "b"], ("needs torch", "megatron_rlspec[train]")),
        (["torch"], ["profile", "t.json", "--model", "m"], ("needs torch", "megatron_rlspec[train]")),
        (["matplotlib"], ["profile", "t.json", "--plot-only", "p.png"], ("needs matplotlib", "megatron_rlspec[plot]")),
        (["megatron"], [*TRAIN], ("megatron-core is not installed", "megatron_rlspec[train]")),
        (["sglang"], [*TRAIN], ("sglang is not installed", "megatron_rlspec[sglang]")),
        (["sglang"], ["serve", "--model", "{model}"], ("SGLang is not installed here", "pip install")),
    ],
    ids=lambda value: " ".join(value)[:30],
)
def test_a_missing_package_is_named_in_one_line(hidden, argv, expects, tmp_path, start):
    (tmp_path / "config.json").write_text("{}")
    argv = [word.format(model=tmp_path, start=start) for word in argv]
    command = [sys.executable, "-c", HIDE.format(hidden=hidden, argv=argv)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("rlspec") and all(word in line for word in expects), line
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_megatron_s_fallback_is_warned_of_on_machines_with_a_gpu_only(tmp_path):
    """Megatron warns once, at its import. Here its warnings are repeated under the filters of both machines."""
    code = (
        "import sys, warnings\n"
        "from megatron_rlspec import cli\n"
        "with warnings.catch_warnings(record=True) as given:\n"
        "    warnings.simplefilter('always')\n"
        "    import megatron.core.optimizer\n"
        "def again():\n"
        "    for one in given:\n"
        "        warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)\n"
        "cli.imports = lambda argv: again()\n"
        "cli.COMMANDS['imports'] = ('megatron_rlspec.cli:imports', '')\n"
        "for device in sys.argv[1:]:\n"
        "    cli.GPU_DEVICE = device\n"
        "    with warnings.catch_warnings():\n"
        "        try:\n"
        "            cli.main(['imports'])\n"
        "        except SystemExit as ended:\n"
        "            assert not ended.code\n"
        "    print('--', file=sys.stderr)\n"
    )
    device = tmp_path / "nvidiactl"
    device.touch()
    command = [sys.executable, "-c", code, str(device), str(tmp_path / "none")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    with_gpu, without, _ = done.stderr.split("--\n")
    assert "Apex are not installed" in with_gpu and not without.strip(), done.stderr
