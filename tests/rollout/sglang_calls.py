"""List the calls of our sources into SGLang, and record its signatures in both supported versions.

    python tests/rollout/sglang_calls.py 0.5.15.post1=DIR 0.5.23=DIR

reads each version from a directory that holds its `sglang` package (an unpacked wheel) and writes
`sglang_signatures.json`, which the tests bind every call against. Nothing of SGLang is imported. Names that a version
does not have are recorded as null, what is no function or class as "".
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

import contracts
import sglang_names
from megatron_calls import Call, calls_within, show

from megatron_rlspec.extensions.migration.sglang import kv_tree
from megatron_rlspec.rollout.sglang.scheduler import versions

RECORD = Path(__file__).with_name("sglang_signatures.json")
ROOM = Path(versions.__file__).parents[1]
MIGRATION = Path(kv_tree.__file__).parent
SOURCES = [file for room in (ROOM, MIGRATION) for file in sorted(room.rglob("*.py")) if file.name != "versions.py"]


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
    return sorted(named.union(sglang_names.contract(sglang_names.MIGRATION), *sglang_names.CONTRACTS.values()))


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
