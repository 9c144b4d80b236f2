"""List the calls of our sources into megatron-core, and record its signatures in the versions below.

    python tests/train/megatron_calls.py MEGATRON_CHECKOUT

reads the commits below from a clone of Megatron-LM and the other releases from PyPI's wheels. It writes
`megatron_signatures.json`, which the tests bind every call against. Names that a version does not have are recorded as
null.
"""

from __future__ import annotations

import ast
import inspect
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import contracts

import megatron_rlspec

PYPI = "PyPI"
VERSIONS = {  # where each is read: a commit of Megatron-LM, or the release's wheel
    "0.16.1": "55ac7082517c3878ae653c07c09c534b8aed49f6",
    "0.17.1": PYPI,
    "0.18.2": PYPI,
    "0.19.2": PYPI,
    "slime's pin": "1dcf0dafa884ad52ffb243625717a3471643e087",
    "main": "d98e8a64ddf34856e74b24714e3bedb2f5a39553",
}
RECORD = Path(__file__).with_name("megatron_signatures.json")
PACKAGE = Path(megatron_rlspec.__file__).parent
SOURCES = sorted((PACKAGE / "train").glob("*.py"))


class Call(NamedTuple):
    """`partial` where arguments are unpacked, so that only those seen can be checked."""

    dotted: str
    positional: int
    keywords: tuple[str, ...]
    partial: bool
    where: str


def calls() -> list[Call]:
    """Yield every call of a megatron name in our sources. A subclass's constructor counts as that of its base."""
    return [call for source in SOURCES for call in _calls(source)]


def recorded_names() -> list[str]:
    return sorted({call.dotted for call in calls()} | set(contracts.MEGATRON))


def _calls(source: Path) -> Iterator[Call]:
    return calls_within(ast.parse(source.read_text()), source, "megatron.")


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
            if first in known and "(" not in "".join(rest):  # methods of results stand in contracts.MEGATRON
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


def _at(checkout: str, commit: str) -> contracts.Read:
    def content(file: str) -> str | None:
        shown = subprocess.run(["git", "-C", checkout, "show", f"{commit}:{file}"], capture_output=True, text=True)
        return None if shown.returncode else shown.stdout

    return _reader(content)


def _released(version: str) -> contracts.Read:
    with tempfile.TemporaryDirectory() as folder:
        # Releases after 0.16 need Python 3.12; their sources are only read here.
        options = ["--no-deps", "--only-binary=:all:", "--python-version=3.12", "--quiet", "--dest", folder]
        subprocess.run([sys.executable, "-m", "pip", "download", *options, f"megatron-core=={version}"], check=True)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            sources = {n: archive.read(n).decode() for n in archive.namelist() if n.endswith(".py")}
    return _reader(sources.get)


def _reader(content: Callable[[str], str | None]) -> contracts.Read:
    """Make a reader of modules from a reader of files."""

    @cache
    def read(module: str) -> str | None:
        path = module.replace(".", "/")
        found = (content(file) for file in (f"{path}.py", f"{path}/__init__.py"))
        return next((text for text in found if text is not None), None)

    return read


def record(checkout: str) -> dict:
    out = {}
    for version, source in VERSIONS.items():
        read = _released(version) if source == PYPI else _at(checkout, source)
        signatures = {}
        for name in recorded_names():
            try:
                found = contracts.signature(name, read)
            except LookupError:
                signatures[name] = None
            else:
                signatures[name] = show(found) if found else ""
        out[version] = {"source": source, "signatures": signatures}
    return out


if __name__ == "__main__":
    RECORD.write_text(json.dumps(record(sys.argv[1]), indent=1) + "\n")
