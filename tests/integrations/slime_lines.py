"""Record which lines of slime ran, in every process of a run, and print a table by function.

`python slime_lines.py SLIME FOLDER...` prints the table of docs/slime-functions.md from what runs of `slime_path.py
--lines` have left in FOLDER/lines.
"""

import ast
import atexit
import json
import os
import sys
import threading
import time
from pathlib import Path


def record(folder, root):
    """Record from now on, in this process. Lines are written at once, since Ray's workers are killed at the end."""
    seen = set()
    prefix = f"{root}/"
    path = Path(folder, f"{os.getpid()}.json")

    def line(frame, event, _):
        seen.add((frame.f_code.co_filename, frame.f_lineno))
        return line

    def call(frame, event, _):
        return line if frame.f_code.co_filename.startswith(prefix) else None

    def write():
        lines = sorted(seen.copy())
        if lines:
            partial = path.with_suffix(".partial")
            partial.write_text(json.dumps([[file.removeprefix(prefix), number] for file, number in lines]))
            os.replace(partial, path)

    def keep_writing():
        written = 0
        while True:
            time.sleep(0.5)
            if len(seen) != written:
                written = len(seen)
                write()

    threading.Thread(target=keep_writing, daemon=True).start()
    os.register_at_fork(after_in_child=lambda: sys.settrace(None))
    atexit.register(write)
    threading.settrace(call)
    sys.settrace(call)


def functions(path):
    """Yield (qualified name, lines of its statements) of every function in a file; nested functions separately."""

    def walk(node, prefix):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                name = f"{prefix}{child.name}"
                yield name, set(statements(child.body))
                yield from walk(child, f"{name}.")
            else:
                yield from walk(child, f"{prefix}{child.name}." if isinstance(child, ast.ClassDef) else prefix)

    def statements(body):
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Global | ast.Nonlocal):
                continue
            constant = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            if not constant:
                yield node.lineno
            for block in ("body", "orelse", "finalbody"):
                if not isinstance(node, ast.expr):
                    yield from statements(getattr(node, block, []))
            for handler in getattr(node, "handlers", []):
                yield from statements(handler.body)

    yield from walk(ast.parse(path.read_text()), "")


def outermost(missing, entered):
    """Return the outermost functions that did not run; the class instead, if none of its methods ran."""
    told = []
    for name in missing:
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            outer = ".".join(parts[:end])
            if not any(ran == outer or ran.startswith(f"{outer}.") for ran in entered):
                break
        if outer not in told:
            told.append(outer)
    return told


def table(root, folders):
    """Return Markdown: for each file of slime, the share of its functions that ran, and the names of the others."""
    ran = {}
    for file, number in (
        x for f in folders for path in Path(f, "lines").glob("*.json") for x in json.loads(path.read_text())
    ):
        ran.setdefault(file, set()).add(number)
    rows = []
    untouched = []
    total = [0, 0, 0, 0]
    for path in sorted([root / "train.py", root / "train_async.py", *(root / "slime").rglob("*.py")]):
        found = [(name, body) for name, body in functions(path) if body]
        if not found:
            continue
        lines = ran.get(str(path.relative_to(root)), set())
        entered = [name for name, body in found if body & lines]
        missing = [name for name, body in found if name not in entered]  # some have two bodies, of which one runs
        body = set().union(*(body for _, body in found))
        if not entered:
            untouched.append(str(path.relative_to(root)))
            continue
        total = [a + b for a, b in zip(total, (len(entered), len(found), len(body & lines), len(body)), strict=True)]
        names = ", ".join(f"`{name}`" for name in outermost(missing, entered))
        rows.append(
            f"| `{path.relative_to(root)}` | {len(entered)}/{len(found)} | {len(body & lines)}/{len(body)} | {names} |"
        )
    yield "| file | functions | statements | functions that did not run |"
    yield "|---|---|---|---|"
    yield from rows
    yield f"| together | {total[0]}/{total[1]} | {total[2]}/{total[3]} | |"
    yield ""
    folders = {}
    for name in untouched:
        folder, _, file = name.rpartition("/")
        folders.setdefault(folder, []).append(file)
    lists = (f"`{folder}/` {', '.join(files)}" for folder, files in folders.items())
    yield "Files of which no function ran: " + "; ".join(lists) + "."


if __name__ == "__main__":
    print("\n".join(table(Path(sys.argv[1]), sys.argv[2:])))
