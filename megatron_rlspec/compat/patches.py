"""Apply, reverse and check the patches in `patches/<project>/<version>/`, all of a version or none.

A patch's `index` lines name the blobs that it was made from. A file that is neither that blob nor the patched one
belongs to another version, and is refused even if the hunks would apply.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from megatron_rlspec.compat.installed import locate

State = Literal["clean", "applied"]
SHIPPED = Path(__file__).parent.parent.parent / "patches"  # in a checkout of this repository
# Project -> one of its modules, and how many folders above that module the project's root is.
PROJECTS = {"slime": ("slime.__init__", 1), "megatron-lm": ("megatron.core.__init__", 2)}
_FILE = re.compile(r"^diff --git a/(\S+) b/\S+\nindex ([0-9a-f]+)\.\.([0-9a-f]+)", re.M)


class PatchError(RuntimeError):
    """A tree that a patch does not fit. One line: which file, what was found, what was expected."""


def state(root: Path, patch: Path) -> State:
    """Say whether `patch` can be applied to the tree at `root`, or has been. Raises PatchError if neither."""
    states: set[State] = set()
    for name, before, after in _FILE.findall(patch.read_text()):
        if not (root / name).is_file():
            raise PatchError(f"{patch.name}: {root} has no {name}; is that the project's root?")
        now = _git(root, "hash-object", "--no-filters", name).strip()
        if now.startswith(before):
            states.add("clean")
        elif now.startswith(after):
            states.add("applied")
        else:
            raise PatchError(
                f"{patch.name}: {name} is blob {now[:9]}, expected {before[:9]}, or {after[:9]} if applied"
            )
    if len(states) != 1:
        raise PatchError(f"{patch.name}: {'names no file' if not states else 'applied to some of its files only'}")
    return states.pop()


def found(path: Sequence[str] = ()) -> dict[str, str]:
    """Say of each patch here whether it is applied to the project that Python finds (in `path` first)."""
    out = {}
    for patch in sorted(SHIPPED.glob("*/*/*.patch")):
        module, above = PROJECTS[patch.parent.parent.name]
        file = locate(module, path)
        if file is None:
            continue
        try:
            now = "applied" if state(file.parents[above], patch) == "applied" else "not applied"
        except PatchError:
            now = "not for this version"
        out[str(patch.relative_to(SHIPPED).with_suffix(""))] = now
    return out


def change(root: Path, patches: Sequence[Path], reverse: bool = False) -> list[Path]:
    """Apply or reverse the patches that need it, all or none, and return them. Raises PatchError."""
    wanted: State = "applied" if reverse else "clean"
    todo = [patch for patch in patches if state(root, patch) == wanted]
    if todo:
        _git(root, "apply", *(["--reverse"] if reverse else []), *map(str, todo))
    return todo


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True)
    if done.returncode:
        raise PatchError(f"git {arguments[0]}: {(done.stderr.strip().splitlines() or ['failed'])[0]}")
    return done.stdout
