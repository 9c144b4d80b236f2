"""A tokenizer whose tokens are all short strings of a few letters, so that a text has many ways to be sampled."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

LETTERS = "abcde"
PIECES = ["".join(word) for length in (1, 2, 3) for word in itertools.product(LETTERS, repeat=length)]


class Pieces:
    """Token i is the i-th of these strings; the last ones are the first letters again."""

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = False) -> str:
        return "".join(PIECES[token % len(PIECES)] for token in tokens)


def write(model: Path, vocabulary: int) -> None:
    """Write a tokenizer to a model's directory that decodes as `Pieces` does. Tokens beyond PIECES are digits."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    words = [*PIECES, *map(str, range(vocabulary - len(PIECES)))][:vocabulary]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    made.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=made).save_pretrained(str(model))


def first_end(tokens: Sequence[int], strings: Sequence[str]) -> int:
    """Return how many tokens there are up to the first after which the whole text holds a string; all, if none."""
    decode = Pieces().decode
    for count in range(1, len(tokens) + 1):
        if any(string in decode(tokens[:count]) for string in strings):
            return count
    return len(tokens)
