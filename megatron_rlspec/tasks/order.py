"""The order in which rows of data are drawn, epoch after epoch, which a resumed run continues exactly."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np


class DataError(ValueError):
    """A row, file or tokenizer cannot be used. The message is one line: where, what is wrong, what was expected."""

    exit_code = 2


@dataclass
class Order:
    """The order in which `size` rows are drawn, epoch after epoch. With `shuffle` it depends on (seed, epoch).

    No step has a row twice unless it takes more rows than there are. At the end of an epoch a row that the step has
    already is put off: it is `late`, and comes first in the next step. `restore(state)` continues exactly at the place
    of `state()`, also within an epoch. There is at least one row.
    """

    size: int
    seed: int
    shuffle: bool = True
    epoch: int = 0
    position: int = 0
    late: list[int] = field(default_factory=list)
    _permutation: tuple[int, list[int]] = (-1, [])  # an epoch, and its order

    def take(self, count: int, beside: Iterable[int] = ()) -> list[int]:
        """Return the next `count` indices of a step that has the rows `beside` already."""
        taken: list[int] = []
        held = set(beside)
        while len(taken) < count:
            if len(held) == self.size:  # every row is in the step
                held = set()
            taken.append(self._next(held))
            held.add(taken[-1])
        return taken

    def _next(self, held: Collection[int]) -> int:
        """Return the next row that is not held. At least one must not be."""
        for place, row in enumerate(self.late):
            if row not in held:
                return self.late.pop(place)
        while True:
            row = self._of_epoch()[self.position]
            self.position += 1
            if self.position == self.size:
                self.epoch += 1
                self.position = 0
            if row not in held:
                return row
            self.late.append(row)

    def state(self) -> dict[str, Any]:
        """Return the state for `restore`."""
        place = {"epoch": self.epoch, "position": self.position, "late": list(self.late)}
        return place | {"seed": self.seed, "size": self.size}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue at the place of `state`. Raises DataError for another seed or dataset size."""
        for name, now in (("size", self.size), ("seed", self.seed)):
            if (was := state[name]) != now:
                raise DataError(f"cannot resume the data order: {name} was {was}, but is {now} now")
        self.epoch = state["epoch"]
        self.position = state["position"]
        self.late = list(state["late"])

    def _of_epoch(self) -> list[int]:
        """Return the order of the present epoch."""
        if self._permutation[0] != self.epoch:
            rows = np.arange(self.size)
            if self.shuffle:
                rows = np.random.default_rng((self.seed, self.epoch)).permutation(self.size)
            self._permutation = self.epoch, rows.tolist()
        return self._permutation[1]
