"""An extension of griffe: docstrings keep the lines of their aligned lists, which Markdown would join."""

from __future__ import annotations

import re
import textwrap
from typing import Any

from griffe import Extension, Object

ENTRY = re.compile(r"^ *\S+( \S+)*  +\S", re.MULTILINE)  # `name    what it is`


class AlignedLists(Extension):
    """Shows paragraphs with aligned columns, and formulas that are indented, as they stand in the source."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Indent such paragraphs of the object's docstring."""
        if obj.docstring is None:
            return
        parts = obj.docstring.value.split("\n\n")
        obj.docstring.value = "\n\n".join(_literal(part) if ENTRY.search(part) else part for part in parts)


def _literal(paragraph: str) -> str:
    """Return the paragraph with its list in a fence; a sentence before the list stays a sentence."""
    lines = paragraph.split("\n")
    first = next(i for i, line in enumerate(lines) if ENTRY.match(line))
    entries = textwrap.dedent("\n".join(lines[first:])).replace("`", "")
    return "\n".join([*lines[:first], "", "```text", entries, "```"])
