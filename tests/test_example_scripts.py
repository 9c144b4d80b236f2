"""examples/quickstart.sh and smollm2.sh: where they write, and what they repeat. Python is a stand-in."""

import shutil
import subprocess
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture
def commands(tmp_path):
    """Return a function that runs a script in `tmp_path`/here, and returns the command lines of Python."""
    for name in ("here", "checkout/examples", "checkout/tools", "checkout/.venv/bin"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "checkout/tools/setup_cpu.sh").touch()
    python = tmp_path / "checkout/.venv/bin/python"
    python.write_text(f'#!/bin/bash\necho "$*" >> {tmp_path}/log\n')
    python.chmod(0o755)

    def run(script: str, *arguments: str, **variables: str) -> list[str]:
        shutil.copy(EXAMPLES / script, tmp_path / "checkout/examples")
        (tmp_path / "log").write_text("")
        given = ["bash", str(tmp_path / "checkout/examples" / script), *arguments]
        environment = {"PATH": "/usr/bin:/bin", **variables}
        subprocess.run(given, cwd=tmp_path / "here", env=environment, check=True, capture_output=True)
        return (tmp_path / "log").read_text().splitlines()

    return run


def test_a_relative_directory_is_one_of_the_callers_place(commands, tmp_path):
    mine = tmp_path / "here/mine"
    mine.mkdir()
    (mine / "smollm2.gguf").touch()
    for words in (["quickstart.sh", "mine"], ["smollm2.sh", "--quick", "mine"]):
        ran = commands(*words)
        assert ran and all(f" {mine}" in line for line in ran), ran


@pytest.mark.parametrize("script", ["quickstart.sh", "smollm2.sh"])
def test_an_interrupted_part_goes_on(commands, tmp_path, script):
    (tmp_path / "here/smollm2.gguf").touch()
    ran = [line.split() for line in commands(script, ".")]
    parts = [words for words in ran if words[1] == "megatron_rlspec.cli" and words[2] in ("sft", "train", "replay")]
    assert len(parts) >= 3 and all("--train.resume true" in " ".join(words) for words in parts), ran


def test_each_seed_has_a_directory_and_a_task_is_there_once_its_last_file_is(commands, tmp_path):
    assert any("runs/quickstart/task" in line for line in commands("quickstart.sh"))
    assert any("runs/quickstart-seed-2/task" in line for line in commands("quickstart.sh", SEED="2"))
    task = tmp_path / "here/task"
    task.mkdir()
    for name, made in (("eval.jsonl", True), ("tokenizer.json", True), ("tokenizer_config.json", False)):
        (task / name).write_text("{}")
        assert any("make_task.py" in line for line in commands("quickstart.sh", ".")) == made
