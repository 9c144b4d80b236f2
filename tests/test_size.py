"""Budgets of the package's size and density. A change that exceeds one deletes something first, or changes it here.

Tokens are those of Python, without comments and docstrings. Lines can be joined; tokens cannot.
"""

import ast
import io
import tokenize
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "megatron_rlspec"
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
# What stands, rounded up; a change that deletes lowers the number here.
MOST_TOKENS = {
    "": 248_000,  # the whole package
    "core": 232_500,  # all of it but extensions/
    "rollout/sglang": 42_000,
}
MOST_TOKENS_A_LINE = 8.5


def docstring_lines(tree: ast.AST) -> set[int]:
    """Return the numbers of all lines of docstrings."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
            docstring = node.body[0]
            lines.update(range(docstring.lineno, docstring.end_lineno + 1))
    return lines


def count(source: str) -> tuple[int, int]:
    """Return the tokens of a file, and the lines that hold them."""
    skipped = docstring_lines(ast.parse(source))
    lines: set[int] = set()
    tokens = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in LAYOUT and token.start[0] not in skipped:
            tokens += 1
            lines.add(token.start[0])
    return tokens, len(lines)


@cache
def sizes() -> tuple[Counter[str], int]:
    """Return the tokens of the whole, of the core and of each room, and the code lines of the whole."""
    tokens: Counter[str] = Counter()
    lines = 0
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).parts
        file_tokens, file_lines = count(path.read_text())
        lines += file_lines
        tokens[""] += file_tokens
        tokens["/".join(parts[:2])] += file_tokens
        if parts[0] != "extensions":
            tokens["core"] += file_tokens
    return tokens, lines


@pytest.mark.parametrize("part", MOST_TOKENS)
def test_no_part_exceeds_its_budget(part):
    tokens, _ = sizes()
    assert tokens[part] <= MOST_TOKENS[part]


def test_one_line_holds_about_one_idea():
    tokens, lines = sizes()
    assert tokens[""] / lines <= MOST_TOKENS_A_LINE
