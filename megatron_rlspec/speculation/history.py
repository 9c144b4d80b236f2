"""Old answers as drafts: which are kept, and how a new answer may begin (docs/history.md).

The run keeps the answers of each prompt's last step (`Answers`). An engine checks the beginning that they share
(`agreed`, `Request.draft`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

MOST_TOKENS = 1 << 22  # of all answers that a run keeps

Kept = tuple[int, int, list[np.ndarray]]  # prompt, step, tokens of each answer


class Answers:
    """The answers to each prompt in the last step that had it. Beyond `most` tokens the oldest prompts go."""

    def __init__(self, most: int = MOST_TOKENS) -> None:
        self.most = most
        self.tokens = 0
        # prompt -> (step, answers); the oldest first
        self._of: dict[int, tuple[int, list[np.ndarray]]] = {}

    def keep(self, prompt: int, step: int, answers: Iterable[np.ndarray]) -> None:
        """Keep the answers to a prompt, beside those of the same step and in place of those of an earlier one."""
        before, known = self._of.pop(prompt, (step, []))
        self.tokens -= _size(known)
        new = [np.asarray(tokens, np.int32) for tokens in answers]
        self._of[prompt] = step, [*known, *new] if before == step else new
        self.tokens += _size(self._of[prompt][1])
        while self.tokens > self.most:
            oldest = next(iter(self._of))
            self.tokens -= _size(self._of.pop(oldest)[1])

    def of(self, prompt: int) -> Sequence[np.ndarray]:
        """Return the answers to a prompt; () if none is known."""
        return self._of[prompt][1] if prompt in self._of else ()

    def clear(self) -> None:
        """Forget all answers: ids name other prompts now."""
        self._of.clear()
        self.tokens = 0

    def state(self) -> list[Kept]:
        """Return the state for `restore`."""
        return [(prompt, step, answers) for prompt, (step, answers) in self._of.items()]

    def restore(self, state: Iterable[Kept]) -> None:
        self.clear()
        for prompt, step, answers in state:
            self.keep(prompt, step, answers)


def _size(answers: Iterable[np.ndarray]) -> int:
    return sum(len(tokens) for tokens in answers)


def agreed(answers: Iterable[np.ndarray]) -> np.ndarray:
    """Return the beginning that most of the answers share, token by token, as long as two go on alike."""
    left = [answer for answer in answers if len(answer)]
    begun: list[int] = []
    while len(left) > 1:
        words, counts = np.unique([answer[len(begun)] for answer in left], return_counts=True)
        if counts.max() < 2:
            break
        word = int(words[counts.argmax()])
        begun.append(word)
        left = [
            answer for answer in left if answer[len(begun) - 1] == word and len(answer) > len(begun)
        ]
    return np.array(begun, np.int64)
