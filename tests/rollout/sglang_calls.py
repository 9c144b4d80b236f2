"""List the calls of our sources into SGLang, and record its signatures in both supported versions.

    python tests/rollout/sglang_calls.py 0.5.15.post1=DIR 0.5.23=DIR

reads each version from a directory that holds its `sglang` package (an unpacked wheel) and writes
`sglang_signatures.json`, which the tests bind every call against. Nothing of SGLang is imported. Names that a version
does not have are recorded as null, what is no function or class as "".
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import contracts
import sglang_names

from megatron_rlspec.rollout.sglang.scheduler import versions

RECORD = Path(__file__).with_name("sglang_signatures.json")
ROOM = Path(versions.__file__).parents[1]
SOURCES = [file for file in sorted(ROOM.rglob("*.py")) if file.name != "versions.py"]


class Call(NamedTuple):
    """`partial` where arguments are unpacked, so that only those seen can be checked."""

    dotted: str
    positional: int
    keywords: tuple[str, ...]
    partial: bool
    where: str


def calls(version: str) -> list[Call]:
    """Return the calls common to all versions, and those of this version's adapter, inherited ones included."""
    found = [call for file in SOURCES for call in calls_within(ast.parse(file.read_text()), file, "sglang.")]
    here = ROOM / "scheduler" / "versions.py"
    classes = {node.name: node for node in ast.parse(here.read_text()).body if isinstance(node, ast.ClassDef)}
    methods: dict[str, ast.AST] = {}
    for base in reversed(versions.KNOWN[version].__mro__[:-1]):
        methods |= {node.name: node for node in classes[base.__name__].body if isinstance(node, ast.FunctionDef)}
        methods |= {node.name: node for node in classes[base.__name__].body if isinstance(node, ast.AsyncFunctionDef)}
    return found + [call for method in methods.values() for call in calls_within(method, here, "sglang.")]


def recorded_names() -> list[str]:
    named = {call.dotted for version in versions.KNOWN for call in calls(version)}
    return sorted(named.union(*sglang_names.CONTRACTS.values()))


def calls_within(tree: ast.AST, source: Path, package: str) -> Iterator[Call]:
    """Yield the calls of names that the tree imports from `package`, such as "sglang."."""
    known: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(package):
            known |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    added: dict[str, set[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and any(isinstance(b, ast.Name) and b.id in known for b in node.bases):
            base = next(known[b.id] for b in node.bases if isinstance(b, ast.Name) and b.id in known)
            for inner in ast.walk(node):
                if isinstance(inner, ast.Call) and ast.unparse(inner.func) == "super().__init__":
                    yield _call(base, inner, source, set())
            if not any(isinstance(s, ast.FunctionDef) and s.name == "__init__" for s in node.body):
                known[node.name] = base
                added[node.name] = {s.target.id for s in node.body if isinstance(s, ast.AnnAssign)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            first, *rest = ast.unparse(node.func).split(".")
            if first in known and "(" not in "".join(rest):  # methods of results stand in sglang_names
                yield _call(".".join([known[first], *rest]), node, source, added.get(first, set()))


def _call(dotted: str, node: ast.Call, source: Path, ours: set[str]) -> Call:
    unpacked = any(isinstance(a, ast.Starred) for a in node.args) or any(k.arg is None for k in node.keywords)
    positional = sum(not isinstance(a, ast.Starred) for a in node.args)
    keywords = tuple(k.arg for k in node.keywords if k.arg and k.arg not in ours)
    return Call(dotted, positional, keywords, unpacked, f"{source.name}:{node.lineno}")


def binds(call: Call, found: inspect.Signature) -> str | None:
    """Return why the call does not fit; None if it does."""
    try:
        (found.bind_partial if call.partial else found.bind)(*[...] * call.positional, **dict.fromkeys(call.keywords))
    except TypeError as error:
        return f"{call.where}: {call.dotted}: {error}"
    return None


def parse(text: str) -> inspect.Signature:
    """Parse a recorded signature."""
    (function,) = ast.parse(f"def f{text}: ...").body
    return contracts.signature("m.f", {"m": ast.unparse(function)}.get)


def show(found: inspect.Signature) -> str:
    return str(found).replace("Ellipsis", "...")


def record(folders: dict[str, str]) -> dict[str, dict[str, str | None]]:
    out: dict[str, dict[str, str | None]] = {}
    for version, folder in folders.items():
        read = contracts.installed([folder])
        out[version] = {}
        for name in recorded_names():
            try:
                found = contracts.signature(name, read)
            except LookupError:
                out[version][name] = None
            else:
                out[version][name] = show(found) if found else ""
    return out


if __name__ == "__main__":
    RECORD.write_text(json.dumps(record(dict(given.split("=") for given in sys.argv[1:])), indent=1) + "\n")
