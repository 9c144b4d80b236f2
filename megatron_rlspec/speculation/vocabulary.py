"""The draft vocabulary: the tokens that drafts are chosen from (FR-Spec, arXiv 2502.14856), the most frequent ones.

An MTP drafter's head is a part of the target's output layer, and nothing is trained in it. So the choice may change at
every push. It never changes the text's distribution: the target verifies over the whole vocabulary. An EAGLE-3 drafter
has a head of its own, so its choice is made once, with the drafter (`conversion/drafter_files.py`).

`run/drafter_training.py` calls `observe` and `ids` in every step. `conversion/drafter_files.py` and
`rollout/sglang/http/serve.py` call `ids` without a rollout before: they get `always` and the lowest other ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

KEEP = 0.9  # weight of earlier rollouts in the counts, per rollout


class DraftVocabulary:
    """Counts the tokens of rollouts, and chooses `size` of the `total` token ids.

    always  ids below `total` that are always among them, such as the end of a text

    Raises ValueError for a size of 0, below the number of different ids in `always`, or not below `total`.
    """

    def __init__(self, size: int, total: int, always: Sequence[int] = ()) -> None:
        least = max(len(set(always)), 1)
        if not least <= size < total:
            raise ValueError(
                f"a draft vocabulary of {size} words: expected at least {least}, and fewer than the model's {total}"
            )
        self.size = size
        self.always = tuple(sorted(set(always)))
        self.counts = np.zeros(total)

    def observe(self, texts: Iterable[np.ndarray]) -> None:
        """Count the tokens of one rollout's texts, each an array of ids below `total`.

        Earlier rollouts lose weight with each call, so call it once for each rollout.
        """
        self.counts *= KEEP
        for text in texts:
            np.add.at(self.counts, text, 1.0)

    def ids(self) -> np.ndarray:
        """Return the chosen ids, ascending, `[size] int64`. Of equally frequent ids the lower ones are chosen.

        BPE merged these first. The choice depends on the texts only, so all ranks that observed the same agree.
        """
        weight = self.counts.copy()
        weight[list(self.always)] = np.inf
        heaviest = np.argsort(-weight, kind="stable")
        return np.sort(heaviest[: self.size])

    def state(self) -> dict[str, Any]:
        """Return the counts for a checkpoint, as JSON."""
        seen = np.flatnonzero(self.counts)
        return {"ids": seen.tolist(), "counts": self.counts[seen].tolist()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Set what `state` returned. `total` must be the same, or larger."""
        self.counts[:] = 0.0
        self.counts[np.array(state["ids"], np.int64)] = state["counts"]
