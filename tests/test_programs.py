"""What slow tests and the programs that they start use of the package exists: fast tests see a name that has moved."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

TESTS = Path(__file__).parent
OTHERS = ("slime", "sglang", "sgl_kernel", "torchvision", "ray", "megatron.training")  # absent, or need stand-ins


def imported(module: str, name: str) -> object:
    """Return what `from module import name` gives. Raises AttributeError if that is nothing."""
    found = importlib.import_module(module)
    if hasattr(found, name):
        return getattr(found, name)
    try:
        return importlib.import_module(f"{module}.{name}")
    except ModuleNotFoundError as error:
        if error.name == f"{module}.{name}":
            raise AttributeError(f"{module} has no {name}") from None
        raise


def missing(tree: ast.AST) -> Iterator[str]:
    """Yield imports from our package that fail, and names that its modules do not have."""
    modules: dict[str, ModuleType] = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("megatron_rlspec"):
            continue
        for name in node.names:
            try:
                found = imported(node.module or "", name.name)
            except AttributeError as error:
                yield str(error)
            except ImportError as error:
                if not f"{error.name}.".startswith(tuple(f"{other}." for other in OTHERS)):
                    yield f"{node.module}.{name.name}: {error}"
            else:
                if isinstance(found, ModuleType):
                    modules[name.asname or name.name] = found
    bound = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    bound |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    modules = {name: module for name, module in modules.items() if name not in bound}  # a local name may hide one
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            module = modules[node.value.id]
            if not hasattr(module, node.attr) and not isinstance(node.ctx, ast.Store):
                yield f"{module.__name__} has no {node.attr}"


def test_what_tests_use_of_the_package_is_there() -> None:
    found = {}
    for path in TESTS.rglob("*.py"):
        found[path.relative_to(TESTS).as_posix()] = list(missing(ast.parse(path.read_text())))
    assert {name: lacks for name, lacks in found.items() if lacks} == {}
