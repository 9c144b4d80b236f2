"""The reward of examples/smollm2.sh."""

from __future__ import annotations


def one_question(*, prompt: str, response: str, label: str, metadata: dict) -> float:
    """Return 1 if the response is one question about the thing: it names it, and its only question mark ends it."""
    text = response.strip()
    return float(text.endswith("?") and text.count("?") == 1 and label in text.lower())
