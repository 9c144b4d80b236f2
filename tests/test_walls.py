"""Check which files import which (docs/design.md, section 2), in the sources and in a new interpreter."""

import ast
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "megatron_rlspec"
FILES = sorted(PACKAGE.rglob("*.py"))
ALLOWED = {
    "sglang": ("rollout/sglang/",),
    "sgl_kernel": ("rollout/sglang/",),
    "megatron": ("train/", "integrations/"),
    "slime": ("integrations/",),
}
DECISIONS = ("speculation/", "tail/", "sim/")
BELOW = ("types", "files", "arguments")  # standard library only, for every room


def imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add(node.module or "")
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_follow_the_allowed_arrows(path):
    room = path.relative_to(PACKAGE).as_posix()
    found = imports(path)
    for package, rooms in ALLOWED.items():
        if any(name == package or name.startswith(package + ".") for name in found):
            assert room.startswith(rooms), f"{room} imports {package}"
    inner = {name.removeprefix("megatron_rlspec.") for name in found if name.startswith("megatron_rlspec.")}
    if room.startswith(DECISIONS):
        outer = {name.split(".")[0] for name in found} - set(sys.stdlib_module_names) - {"megatron_rlspec", "numpy"}
        assert not outer, f"{room} must run on the standard library and numpy, not {outer}"
        below = {name for name in inner if name not in BELOW and not f"{name}/".replace(".", "/").startswith(DECISIONS)}
        assert not below, f"{room} may use {BELOW} and the decisions beside it, not {below}"
    if room.startswith("rollout/"):
        assert not any(name.startswith("train") for name in inner), f"{room} imports train"
    if room.startswith("weights/"):
        assert not any(name.startswith("train") for name in inner), f"{room} imports train"
    if room.startswith("train/"):
        assert not any(name.startswith("rollout") for name in inner), f"{room} imports rollout"
    above = {"loop", "cli", "training", "completion", "session", "rollouts"}
    if room.removesuffix(".py") not in above and not room.startswith("integrations/"):
        assert not inner & above, f"{room} imports the loop above it"


def arrows(node_of) -> dict[str, dict[str, str]]:
    """Map each node to the nodes that its files import, each with one such import; imports inside functions count."""
    known = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path for path in FILES}
    known |= {name.removesuffix(".__init__"): path for name, path in known.items() if name.endswith(".__init__")}
    found: dict[str, dict[str, str]] = {}
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
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


def test_functions_stay_short():
    """No function has more than 90 lines, docstring included."""
    long = {}
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno - node.lineno >= 90:
                long[f"{path.relative_to(PACKAGE)}:{node.lineno} {node.name}"] = node.end_lineno - node.lineno + 1
    assert not long


@pytest.mark.parametrize(
    "modules",
    [
        "megatron_rlspec.types, megatron_rlspec.config",
        "megatron_rlspec.speculation.rule, megatron_rlspec.speculation.solver, megatron_rlspec.speculation.learning",
    ],
)
def test_light_imports_stay_light(modules):
    code = f"import sys, {modules}; print(sorted({{'torch', 'megatron', 'sglang', 'slime'}} & set(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
