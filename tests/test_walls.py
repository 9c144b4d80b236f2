"""Check which files import which (docs/design.md, section 2), in the sources and in a new interpreter."""

import ast
import graphlib
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "megatron_rlspec"
FILES = sorted(PACKAGE.rglob("*.py"))
ALLOWED = {
    "sglang": ("rollout/sglang/",),
    "sgl_kernel": ("rollout/sglang/",),
    "megatron": ("train/", "cotrainer/", "integrations/"),
    "slime": ("integrations/",),
    "triton": ("kernels/",),
}
DECISIONS = ("speculation/", "extensions/migration/plans/")
BELOW = ("types", "files", "arguments")  # standard library only, for every room


@cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text())))


def imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add(node.module or "")
    return names


def forbidden(path: Path) -> list[str]:
    """Return the imports of a file that go through a wall."""
    room = path.relative_to(PACKAGE).as_posix()
    names = imports(path)
    inner = {name.removeprefix("megatron_rlspec.") for name in names if name.startswith("megatron_rlspec.")}
    wrong = []
    for package, rooms in ALLOWED.items():
        if not room.startswith(rooms):
            wrong += [name for name in names if name == package or name.startswith(package + ".")]
    if room.startswith(DECISIONS):  # the standard library, numpy, scipy (fits), `BELOW` and the decisions beside it
        known = set(sys.stdlib_module_names) | {"megatron_rlspec", "numpy", "scipy"}
        wrong += {name.split(".")[0] for name in names} - known
        decisions = tuple(folder.replace("/", ".") for folder in DECISIONS)
        wrong += [name for name in inner if name not in BELOW and not f"{name}.".startswith(decisions)]
    for below, above in (
        ("rollout/", "train"),
        ("push/", "train"),
        ("models/", "train"),
        ("conversion/", "train"),
        ("train/", "rollout"),
    ):
        if room.startswith(below):
            wrong += [name for name in inner if name.startswith(above)]
    if not room.startswith(("cli.py", "loop.py", "run/", "commands/", "integrations/", "extensions/")):
        wrong += [name for name in inner if f"{name}.".startswith(("loop.", "cli.", "run.", "commands."))]
    if not room.startswith(("extensions/", "commands/", "cli.py")):
        wrong += [name for name in inner if name.startswith("extensions")]
    return [f"{room} imports {name}" for name in wrong]


def test_imports_follow_the_allowed_arrows():
    assert not [line for path in FILES for line in forbidden(path)]


def arrows(node_of) -> dict[str, dict[str, str]]:
    """Map each node to the nodes that its files import, each with one such import; imports inside functions count."""
    known = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path for path in FILES}
    known |= {name.removesuffix(".__init__"): path for name, path in known.items() if name.endswith(".__init__")}
    found: dict[str, dict[str, str]] = {}
    for path in FILES:
        for node in nodes(path):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            if isinstance(node, ast.ImportFrom):
                names = [name if (name := f"{node.module}.{alias}") in known else str(node.module) for alias in names]
            for name in names:
                here = node_of(path)
                there = node_of(known.get(name, path))
                if here != there:
                    found.setdefault(here, {})[there] = f"{path.relative_to(PACKAGE)} imports {name}"
    return found


def file_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def folder_of(path: Path) -> str:
    """Return a file's folder; a file at the top of the package counts as a folder of its own."""
    inside = path.relative_to(PACKAGE)
    return inside.parent.as_posix() if len(inside.parts) > 1 else inside.as_posix()


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0]


@pytest.mark.parametrize("node_of", [file_of, folder_of, room_of])
def test_imports_have_no_cycle(node_of):
    found = arrows(node_of)
    try:
        graphlib.TopologicalSorter(found).prepare()
    except graphlib.CycleError as error:
        circle = error.args[1][::-1]
        steps = [found[a][b] for a, b in zip(circle, circle[1:], strict=False)]
        pytest.fail(f"a circle: {'; '.join(steps)}")


def test_functions_and_classes_stay_short():
    """No function has more than 110 lines and no class more than 400, docstrings included."""
    long = {}
    for path in FILES:
        for node in nodes(path):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                continue
            lines = node.end_lineno - node.lineno + 1
            if lines > (400 if isinstance(node, ast.ClassDef) else 110):
                long[f"{path.relative_to(PACKAGE)}:{node.lineno} {node.name}"] = lines
    assert not long


@pytest.mark.parametrize(
    "modules",
    [
        "megatron_rlspec.types, megatron_rlspec.config",
        "megatron_rlspec.speculation.rule, megatron_rlspec.speculation.learning",
    ],
)
def test_light_imports_stay_light(modules):
    code = f"import sys, {modules}; print(sorted({{'torch', 'megatron', 'sglang', 'slime'}} & set(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
