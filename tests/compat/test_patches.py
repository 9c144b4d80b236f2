"""Which patches a project has; the shipped patches, and whether they fit."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from megatron_rlspec.compat import patches as module

SHIPPED = sorted((Path(__file__).parents[2] / "patches").glob("*/*/*.patch"))


@pytest.fixture
def tree(tmp_path):
    """Make a project with three files, and two patches by git; the second changes two files."""
    root = tmp_path / "project"
    folder = tmp_path / "patches"
    root.mkdir()
    folder.mkdir()
    git = ["git", "-c", "user.email=a@b", "-c", "user.name=a"]
    (root / "a.py").write_text("one\ntwo\nthree\n")
    (root / "b.py").write_text("alpha\nbeta\n")
    (root / "c.py").write_text("x\n")
    for arguments in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "base"]):
        subprocess.run([*git, *arguments], cwd=root, check=True)

    def record(name, **files):
        for file, text in files.items():
            (root / f"{file}.py").write_text(text)
        diff = subprocess.run([*git, "diff"], cwd=root, check=True, capture_output=True, text=True).stdout
        (folder / name).write_text(f"Base: test\nReason: test\n\n{diff}")
        subprocess.run([*git, "checkout", "-q", "."], cwd=root, check=True)

    record("0001.patch", c="x\ny\n")
    record("0002.patch", a="one\nTWO\nthree\n", b="alpha\nbeta\ngamma\n")
    shutil.rmtree(root / ".git")  # an installed checkout need not be a repository
    return root, sorted(folder.glob("*.patch"))


def apply(root, *patches):
    subprocess.run(["git", "apply", *map(str, patches)], cwd=root, check=True)


def test_the_state_of_importable_packages_is_reported(tree, tmp_path, monkeypatch):
    root, made = tree
    shipped = tmp_path / "shipped"
    folder = shipped / "slime/1"
    folder.mkdir(parents=True)
    for patch in made:
        shutil.copy(patch, folder)
    monkeypatch.setattr(module, "SHIPPED", shipped)
    monkeypatch.setattr(module, "PROJECTS", {"slime": ("a", 0)})
    names = [f"slime/1/{patch.stem}" for patch in made]
    assert module.found([str(root)]) == dict.fromkeys(names, "not applied")
    apply(root, *made)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)  # a repository around the project
    assert module.found([str(root)]) == dict.fromkeys(names, "applied")
    (root / "a.py").write_text("another")
    assert "not for this version" in module.found([str(root)]).values()
    monkeypatch.setattr(module, "PROJECTS", {"slime": ("no_such_module", 0)})
    assert module.found([str(root)]) == {}


@pytest.mark.slime
@pytest.mark.skipif(not os.environ.get("RLSPEC_SLIME"), reason="set RLSPEC_SLIME to a slime checkout")
def test_slimes_patches_fit(tmp_path):
    root = tmp_path / "slime"
    shutil.copytree(Path(os.environ["RLSPEC_SLIME"], "slime"), root / "slime")
    apply(root, *(patch for patch in SHIPPED if "slime" in patch.parts))
    text = (root / "slime/backends/megatron_utils/megatron_to_hf/qwen3_next.py").read_text()
    assert "second_half" not in text
