"""The order in which rows of data are drawn, epoch after epoch, which a resumed run continues exactly.

`data.Source` draws its rows by an `Order`. This module knows indices only, no rows. `DataError` is here because all
modules that raise it can import this one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np


class DataError(ValueError):
    """A row, file or tokenizer cannot be used. The message is one line: where, what is wrong, what was expected."""

    exit_code = 2  # of the command (`cli.py`)


@dataclass
class Order:
    """The order in which `size` rows are drawn, epoch after epoch. With `shuffle` it depends on (seed, epoch).

    No step has a row twice unless it takes more rows than there are. A step that reaches the next epoch can meet a row
    that it has already. That row is put off: it is in `late`, and comes first in the next step. `restore(state)`
    continues exactly at the place of `state()`, also within an epoch.

    size      number of rows, at least one; indices are from 0
    shuffle   False: every epoch has the rows in ascending order
    epoch     number of the present epoch, from 0
    position  place within the epoch, from 0, of the row that is drawn next once `late` is used up
    late      indices of the rows that were put off, oldest first
    """

    size: int
    seed: int
    shuffle: bool = True
    epoch: int = 0
    position: int = 0
    late: list[int] = field(default_factory=list)
    # A cache: the number of an epoch, and its rows in order. Both follow from seed and epoch, so `state` omits them.
    _permutation: tuple[int, list[int]] = (-1, [])

    def take(self, count: int, beside: Iterable[int] = ()) -> list[int]:
        """Return the next `count` indices of a step that has the rows `beside` already.

        A step can call this several times. Give all rows of its earlier calls as `beside`, or some may come again.
        """
        taken: list[int] = []
        in_step = set(beside)
        while len(taken) < count:
            if len(in_step) == self.size:  # the step has every row; from here on it repeats rows
                in_step = set()
            taken.append(self._next(in_step))
            in_step.add(taken[-1])
        return taken

    def _next(self, in_step: Collection[int]) -> int:
        """Return the next row that is not in the step. There must be one, or this does not end.

        Rows of the step that it meets are put off.
        """
        for place, row in enumerate(self.late):
            if row not in in_step:
                return self.late.pop(place)
        while True:
            row = self._of_epoch()[self.position]
            self.position += 1
            if self.position == self.size:
                self.epoch += 1
                self.position = 0
            if row not in in_step:
                return row
            self.late.append(row)

    def state(self) -> dict[str, Any]:
        """Return the state for `restore`, as JSON. It is a part of checkpoints, so its keys must stay."""
        place = {"epoch": self.epoch, "position": self.position, "late": list(self.late)}
        return place | {"seed": self.seed, "size": self.size}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue at the place of `state`. Raises DataError for another seed or dataset size.

        Another `shuffle` is not noticed: the place is then one in the other order.
        """
        for name, now in (("size", self.size), ("seed", self.seed)):
            if (was := state[name]) != now:
                raise DataError(f"cannot resume the data order: {name} was {was}, but is {now} now")
        self.epoch = state["epoch"]
        self.position = state["position"]
        self.late = list(state["late"])

    def _of_epoch(self) -> list[int]:
        """Return the rows in the order of the present epoch."""
        if self._permutation[0] != self.epoch:
            rows = np.arange(self.size)
            if self.shuffle:
                # Changing this generator changes the order of every run, also of one that is resumed.
                rows = np.random.default_rng((self.seed, self.epoch)).permutation(self.size)
            self._permutation = self.epoch, rows.tolist()
        return self._permutation[1]
