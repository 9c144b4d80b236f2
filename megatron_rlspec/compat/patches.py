"""Apply, reverse and check the patches in `patches/<project>/<version>/`, all of a version or none.

A patch's `index` lines name the blobs that it was made from. A file that is neither that blob nor the patched one
belongs to another version, and is refused even if the hunks would apply.
"""

from __future__ import annotations

import argparse
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


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Exit status: 0 for success; 1 if --check finds one not applied; 2 for another version."""
    parser = argparse.ArgumentParser(prog="apply_patches.py", description=__doc__)
    parser.add_argument("patches", type=Path, help="a folder such as patches/slime/624b824a8")
    parser.add_argument("root", type=Path, help="the project's checkout")
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--check", action="store_true", help="say which are applied")
    action.add_argument("--apply", action="store_true")
    action.add_argument("--reverse", action="store_true")
    options = parser.parse_args(argv)
    patches = [patch.absolute() for patch in sorted(options.patches.glob("*.patch"))]
    if not patches:
        parser.error(f"no *.patch in {options.patches}")
    try:
        if options.check:
            states = {patch.name: state(options.root, patch) for patch in patches}
            print("\n".join(f"{name}: {'applied' if s == 'applied' else 'not applied'}" for name, s in states.items()))
            return int("clean" in states.values())
        done = change(options.root, patches, reverse=options.reverse)
    except PatchError as error:
        print(f"apply_patches: {error}")
        return 2
    print(
        "\n".join(f"{'reversed' if options.reverse else 'applied'} {patch.name}" for patch in done) or "nothing to do"
    )
    return 0
