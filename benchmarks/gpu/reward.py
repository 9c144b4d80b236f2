"""The reward of session B: for any text of any model, and one that RL can move within a few steps."""

from __future__ import annotations

LENGTH = 3  # characters


def variety(*, prompt: str, response: str, label: str, metadata: dict) -> float:
    """Return how many different trigrams of characters a response has, over all of its trigrams."""
    trigrams = [response[i : i + LENGTH] for i in range(len(response) - LENGTH + 1)]
    return len(set(trigrams)) / max(1, len(trigrams))
