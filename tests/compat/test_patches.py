"""Patching small trees: a patch is applied whole or not at all, on the right base only, and can be reverted."""

import os
import runpy
import shutil
import subprocess
from pathlib import Path

import pytest

from megatron_rlspec.compat import patches as module
from megatron_rlspec.compat.patches import PatchError, change, state

TOOL = Path(__file__).parents[2] / "tools/apply_patches.py"
SHIPPED = sorted((Path(__file__).parents[2] / "patches").glob("*/*/*.patch"))


@pytest.fixture
def tree(tmp_path):
    """Make a project with two files, and two patches by git; the second changes both files."""
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


def contents(root):
    return {path.name: path.read_text() for path in root.glob("*.py")}


def test_patches_are_applied_and_reverted(tree):
    root, patches = tree
    before = contents(root)
    assert [state(root, p) for p in patches] == ["clean", "clean"]
    assert change(root, patches) == patches
    assert [state(root, p) for p in patches] == ["applied", "applied"]
    assert contents(root)["b.py"] == "alpha\nbeta\ngamma\n"
    assert change(root, patches) == []
    assert change(root, patches, reverse=True) == patches
    assert contents(root) == before


def test_wrong_base_is_refused_though_the_hunk_fits(tree):
    root, patches = tree
    (root / "b.py").write_text("alpha\nbeta\n# moved on\n")
    before = contents(root)
    with pytest.raises(PatchError, match="b.py is blob .* expected"):
        change(root, patches)
    assert contents(root) == before, "the first patch would have applied"


def test_a_half_applied_patch_is_reported(tree):
    root, patches = tree
    (root / "a.py").write_text("one\nTWO\nthree\n")
    with pytest.raises(PatchError, match="some of its files only"):
        state(root, patches[1])


def test_command_line(tree, capsys):
    root, patches = tree
    folder = str(patches[0].parent)
    main = runpy.run_path(str(TOOL))["main"]
    assert main([folder, str(root), "--check"]) == 1
    assert main([folder, str(root), "--apply"]) == 0
    assert main([folder, str(root), "--check"]) == 0
    (root / "c.py").unlink()
    assert main([folder, str(root), "--reverse"]) == 2
    assert "has no c.py" in capsys.readouterr().out


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
    change(root, made)
    assert module.found([str(root)]) == dict.fromkeys(names, "applied")
    (root / "a.py").write_text("another")
    assert "not for this version" in module.found([str(root)]).values()
    monkeypatch.setattr(module, "PROJECTS", {"slime": ("no_such_module", 0)})
    assert module.found([str(root)]) == {}


@pytest.mark.parametrize("patch", SHIPPED, ids=lambda p: "/".join(p.parts[-3:]))
def test_shipped_patches_state_their_purpose(patch):
    text = patch.read_text()
    head = text.partition("diff --git")[0]
    for word in ("Base: ", "Reason: ", "Test: ", "Deleted: "):
        assert word in head, f"{patch.name} lacks {word}"
    assert patch.parent.name in head


@pytest.mark.slime
@pytest.mark.skipif(not os.environ.get("RLSPEC_SLIME"), reason="set RLSPEC_SLIME to a slime checkout")
def test_slimes_patches_fit(tmp_path):
    root = tmp_path / "slime"
    shutil.copytree(Path(os.environ["RLSPEC_SLIME"], "slime"), root / "slime")
    patches = [patch for patch in SHIPPED if "slime" in patch.parts]
    assert change(root, patches) == patches
    text = (root / "slime/backends/megatron_utils/megatron_to_hf/qwen3_next.py").read_text()
    assert "second_half" not in text
    assert change(root, patches, reverse=True) == patches
