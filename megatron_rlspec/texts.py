"""Texts that others wrote, in one line that a terminal may print; their tokens, and where stop strings end one.

Standard library only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


def printable(text: str) -> str:
    """Escape what could drive a terminal, such as escape codes and line ends: ESC becomes `\\x1b`."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


def shown(value: Any, by: Callable[[Any], str] = repr) -> str:
    """Return a value of the user's in one line of at most 200 characters. Its own methods may fail."""
    try:
        text = by(value)
        return printable(" ".join(text.split())[:200])
    except BaseException as error:
        return f"({type(value).__name__}, whose {by.__name__}() raised {type(error).__name__})"


def one_line(error: BaseException) -> str:
    """Format an error as "Type: message", in one line."""
    return f"{type(error).__name__}: {shown(error, str)}".removesuffix(": ")


def first_line(error: BaseException) -> str:
    """Return the first line of a library's error, at most 200 characters; the name of its type if it has no text."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def following(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Return the token ids of texts that follow another text. Special tokens in them are recognised, and none is added.

    SentencePiece puts a space before the first word of a text: before that of a prompt, but of nothing behind it.
    """

    def ids(batch: Sequence[str]) -> list[list[int]]:
        found: list[list[int]] = tokenizer(list(batch), add_special_tokens=False)["input_ids"]
        return found

    alone = ids(texts)
    before, letter, both = ids(["\n", "a", "\na"])
    if both == before + letter:
        return alone
    behind = ids([f"\n{text}" for text in texts])
    return [
        tokens[len(before) :] if tokens[: len(before)] == before else alone[i]
        for i, tokens in enumerate(behind)
    ]


class StopStrings:
    """Finds where a stop string ends a response: at the first token after which its text contains one of the strings.

    What is decided at a token depends on the last tokens up to it and on no later one, so a round that accepts many
    tokens ends where plain decoding ends.

    decode  returns the text of token ids, with special tokens
    window  how many tokens decide, the last of them included
    """

    def __init__(self, strings: Sequence[str], decode: Callable[[list[int]], str]) -> None:
        self._strings = tuple(strings)
        self._decode = decode
        # Every token has at least one byte of text. One more: some tokenizers drop the space before a text.
        self.window = 1 + max(len(string.encode()) for string in strings)

    def end(self, tokens: Sequence[int], first: int) -> tuple[int, str] | None:
        """Return how many of `tokens` there are up to the end, and the string; None if the response goes on.

        tokens  the response, or the last of it: `window` tokens less one before `first`
        first   index of the first token that is not known to be before the end
        """
        for count in range(first + 1, len(tokens) + 1):
            text = self._decode(list(tokens[max(0, count - self.window) : count]))
            found = [string for string in self._strings if string in text]
            if found:
                return count, min(found, key=text.index)
        return None
