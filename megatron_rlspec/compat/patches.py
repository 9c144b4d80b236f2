"""Say which patches of `patches/<project>/<version>/` the installed projects have. `git apply` applies them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from megatron_rlspec.compat.installed import locate

SHIPPED = Path(__file__).parent.parent.parent / "patches"  # in a checkout of this repository
# Project -> one of its modules, and how many folders above that module the project's root is.
PROJECTS = {"slime": ("slime.__init__", 1), "megatron-lm": ("megatron.core.__init__", 2)}


def found(path: Sequence[str] = ()) -> dict[str, str]:
    """Say of each patch here whether it is applied to the project that Python finds (in `path` first)."""
    out = {}
    for patch in sorted(SHIPPED.glob("*/*/*.patch")):
        module, above = PROJECTS[patch.parent.parent.name]
        file = locate(module, path)
        if file is None:
            continue
        root = file.resolve().parents[above]
        now = "not for this version"
        if _fits(root, patch, "--reverse"):
            now = "applied"
        elif _fits(root, patch):
            now = "not applied"
        out[str(patch.relative_to(SHIPPED).with_suffix(""))] = now
    return out


def _fits(root: Path, patch: Path, *options: str) -> bool:
    # In a repository around the project, git would look for the patch's files at the repository's root.
    alone = os.environ | {"GIT_CEILING_DIRECTORIES": str(root.parent)}
    command = ["git", "apply", "--check", *options, str(patch)]
    return subprocess.run(command, cwd=root, env=alone, capture_output=True).returncode == 0
