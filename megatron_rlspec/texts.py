"""Texts of users, models and libraries: printed safely in one line, tokenised, and ended by stop strings.

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
    """Return a value of the user's in one line: whitespace collapsed, cut to 200 characters, then escaped.

    It is escaped as in `printable`, so the result may be longer. For paths there is `files.shown`, for values of
    options `config.base.shown`.

    by  makes the text: `repr` or `str`. It runs methods of the user's class, which may raise anything, SystemExit
        included; the line then says so
    """
    try:
        text = by(value)
        return printable(" ".join(text.split())[:200])
    except BaseException as error:
        return f"({type(value).__name__}, whose {by.__name__}() raised {type(error).__name__})"


def one_line(error: BaseException) -> str:
    """Format an error as "Type: message", in one line."""
    return f"{type(error).__name__}: {shown(error, str)}".removesuffix(": ")


def first_line(error: BaseException) -> str:
    """Return the first line of a library's error, at most 200 characters; the name of its type if it has no text.

    Control characters stay: escape it before it reaches a terminal, as `cli.py` does.
    """
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def tokenize_continuations(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Return the token ids of texts that follow another text. Special tokens in them are recognised, and none is added.

    Some tokenizers (SentencePiece) put a space before the first word of everything they are given. That is right for a
    prompt, and wrong for a text that follows one. With such a tokenizer each text is tokenised behind a line end, and
    the line end's tokens are cut off.
    """

    def ids(batch: Sequence[str]) -> list[list[int]]:
        token_ids: list[list[int]] = tokenizer(list(batch), add_special_tokens=False)["input_ids"]
        return token_ids

    alone = ids(texts)
    line_end, letter, both = ids(["\n", "a", "\na"])
    if both == line_end + letter:
        return alone  # this tokenizer adds no space
    behind = ids([f"\n{text}" for text in texts])
    # Where the line end and the text's first characters became one token, it cannot be cut off.
    return [
        tokens[len(line_end) :] if tokens[: len(line_end)] == line_end else alone[i]
        for i, tokens in enumerate(behind)
    ]


class StopStrings:
    """Finds where a stop string ends a response: at the first token after which its text contains one of the strings.

    Whether a response ends at a token follows from the last `window` tokens up to it, and from no later token. So a
    round that accepts many tokens ends the response where plain decoding ends it.

    Both kinds of engines use this class (`rollout/embedded/scheduler.py`, `rollout/sglang/scheduler/stop_strings.py`):
    SGLang's own search depends on how many tokens a round accepted.

    strings  at least one, none of them empty
    decode   returns the text of token ids, with special tokens
    window   number of tokens that are decoded and searched
    """

    def __init__(self, strings: Sequence[str], decode: Callable[[list[int]], str]) -> None:
        self._strings = tuple(strings)
        self._decode = decode
        # A stop string of n bytes lies in at most n tokens: every token has at least one byte of text. One token
        # more stands before them: some tokenizers drop the space that begins a text.
        self.window = 1 + max(len(string.encode()) for string in strings)

    def end(self, tokens: Sequence[int], first: int) -> tuple[int, str] | None:
        """Return the number of `tokens` up to the response's end, and the stop string; None if the response goes on.

        tokens  the response, or its last tokens: then at least `window` - 1 of them before index `first`
        first   index of the first token that was not checked yet
        """
        for count in range(first + 1, len(tokens) + 1):
            text = self._decode(list(tokens[max(0, count - self.window) : count]))
            contained = [string for string in self._strings if string in text]
            if contained:
                return count, min(contained, key=text.index)  # the one that begins first
        return None
