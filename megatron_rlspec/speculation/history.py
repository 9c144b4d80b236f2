"""Old answers as drafts: which are kept, what follows a text in them, and whether that replaces the drafter's drafts.

Pure decisions (docs/history.md). The run keeps the answers of each prompt's last step (`Answers`); a request brings
those of its prompt. The answer under the request's own seed is checked whole, or else the beginning that old answers
share (`agreed`, `Request.draft`). Behind the first difference an engine looks for the end of the text in all of them
(`Texts`), and drafts what followed there, or lets the drafter draft: what was accepted more often at such a match
(`Sources`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

LONGEST = 8  # tokens of a match that are compared
TRIES = 4  # rounds in which each source is tried at each length of a match before the better one is taken
MOST_TOKENS = 1 << 22  # of all answers that a run keeps
START, END = -1, -2  # in `Texts`, around each answer

Kept = tuple[int, int, list[tuple[int, np.ndarray]]]  # prompt, step, (seed, tokens) of each answer


class Answers:
    """The answers to each prompt in the last step that had it, by seed. Beyond `most` tokens the oldest prompts go."""

    def __init__(self, most: int = MOST_TOKENS) -> None:
        self.most = most
        self.tokens = 0
        self._of: dict[int, tuple[int, dict[int, np.ndarray]]] = {}  # prompt -> (step, answers); the oldest first

    def keep(self, prompt: int, step: int, answers: Mapping[int, np.ndarray]) -> None:
        """Keep the answers to a prompt, beside those of the same step and in place of those of an earlier one."""
        before, known = self._of.pop(prompt, (step, {}))
        self.tokens -= _size(known)
        if before == step:
            answers = known | dict(answers)
        self._of[prompt] = step, {seed: np.asarray(tokens, np.int32) for seed, tokens in answers.items()}
        self.tokens += _size(self._of[prompt][1])
        while self.tokens > self.most:
            oldest = next(iter(self._of))
            self.tokens -= _size(self._of.pop(oldest)[1])

    def of(self, prompt: int) -> Mapping[int, np.ndarray]:
        """Return the answers to a prompt by seed; {} if none is known."""
        return self._of[prompt][1] if prompt in self._of else {}

    def clear(self) -> None:
        """Forget all answers: ids name other prompts now."""
        self._of.clear()
        self.tokens = 0

    def state(self) -> list[Kept]:
        """Return the state for `restore`."""
        return [(prompt, step, list(answers.items())) for prompt, (step, answers) in self._of.items()]

    def restore(self, state: Iterable[Kept]) -> None:
        self.clear()
        for prompt, step, answers in state:
            self.keep(prompt, step, dict(answers))


def _size(answers: Mapping[int, np.ndarray]) -> int:
    return sum(len(tokens) for tokens in answers.values())


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
        left = [answer for answer in left if answer[len(begun) - 1] == word and len(answer) > len(begun)]
    return np.array(begun, np.int64)


class Texts:
    """Answers to one prompt, in which what follows the end of a text is looked up."""

    def __init__(self, answers: Iterable[np.ndarray]) -> None:
        self._tokens = np.concatenate([np.zeros(0, np.int64), *map(_marked, answers)])

    def add(self, answer: np.ndarray | Sequence[int]) -> None:
        self._tokens = np.concatenate([self._tokens, _marked(answer)])

    def follow(self, end: np.ndarray, most: int) -> tuple[int, np.ndarray]:
        """Return how many tokens at the end of a text match, and at most `most` tokens that followed: (0, []) if none.

        end  the last `LONGEST` tokens of the text, after START where it is shorter; a match can begin with START

        Of several places with the longest match, the token that followed most often counts, and its newest place.
        """
        text = self._tokens
        places = np.flatnonzero(text[:-1] == end[-1])
        places = places[text[places + 1] >= 0]
        match = int(len(places) > 0)
        while match and match < len(end):
            longer = places[places >= match]
            longer = longer[text[longer - match] == end[-1 - match]]
            if not len(longer):
                break
            places, match = longer, match + 1
        if not match:
            return 0, np.zeros(0, np.int64)
        words, counts = np.unique(text[places + 1], return_counts=True)
        first = int(places[text[places + 1] == words[counts.argmax()]][-1]) + 1
        drafts = text[first : first + most]
        stop = np.flatnonzero(drafts < 0)
        return match, drafts[: stop[0]] if len(stop) else drafts


def _marked(answer: np.ndarray | Sequence[int]) -> np.ndarray:
    return np.concatenate([[START], np.asarray(answer, np.int64), [END]])


class Sources:
    """Chooses between history and the drafter by the drafts of each that were accepted, at each length of a match.

    The choice depends on nothing but the rounds since the start, so all ranks of an engine make the same.
    """

    def __init__(self) -> None:
        self._asked = np.zeros((2, LONGEST + 2), np.int64)  # [drafter or history, match]: rounds
        self._rounds = np.zeros((2, LONGEST + 2))  # those that were observed
        self._accepted = np.zeros((2, LONGEST + 2))

    def history(self, match: int) -> bool:
        """Return whether a request whose text matches so many tokens drafts from history in this round."""
        asked = self._asked[:, match]
        if asked.min() < TRIES:
            chosen = asked[1] <= asked[0]
        else:
            drafter, history = self._accepted[:, match] / np.maximum(self._rounds[:, match], 1)
            chosen = history >= drafter
        asked[int(chosen)] += 1
        return bool(chosen)

    def observe(self, match: int, history: bool, accepted: int) -> None:
        """Learn the drafts that a request accepted in a round."""
        self._rounds[int(history), match] += 1
        self._accepted[int(history), match] += accepted
