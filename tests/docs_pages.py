"""Blocks of code in the pages of docs/, for the tests that run them."""

import re
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"


def blocks(page: str, language: str) -> list[str]:
    """Return the fenced blocks of a language in docs/`page`, in their order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)
