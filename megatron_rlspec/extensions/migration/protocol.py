"""What a migration of running samples asks of an engine: its samples leave with their KV cache, and others arrive.

A migration of samples from one engine to another is

    reserve   `offer` at the target
    copy      `export` at the source, `accept` at the target, while the samples go on
    switch    `detach` at the source, `accept` at the target, `generate` of the rest at the target

Every step may fail or be refused. Then the target computes the columns itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from megatron_rlspec.engine import EngineError, RolloutEngine
from megatron_rlspec.types import Load

if TYPE_CHECKING:
    import numpy as np


class RouteError(EngineError):
    """Both engines work, but the columns of a KV cache do not get from one to the other."""


@dataclass(frozen=True)
class TransferRequest:
    """Announces a sample to the engine that will receive it.

    tokens  those known of it, at least its prompt
    upto    columns of the KV cache that it will have at most when it comes
    """

    id: str
    tokens: np.ndarray
    upto: int


@dataclass(frozen=True)
class Reservation:
    """Slots of the target for one sample: columns below `first` are there already; `refused` says why it has none."""

    id: str
    first: int = 0
    refused: str = ""


@dataclass(frozen=True)
class TransferSource:
    """The engine that wrote columns: its `node`, where and with which key its server answers, and its ranks."""

    node: str
    url: str
    key: str = field(repr=False)
    ranks: int = 1


@dataclass(frozen=True)
class KVTransfer:
    """KV-cache columns of a sample in transfer. `refused` says why there are none.

    cut  the way between the engines is the reason
    """

    id: str
    path: str = ""
    last: int = 0
    bytes: int = 0
    refused: str = ""
    origin: TransferSource | None = None
    cut: bool = False


class MigratableEngine(RolloutEngine, Protocol):
    """An engine whose running samples can leave, and that takes samples with their KV cache."""

    @property
    def node(self) -> str:
        """Return a name of the memory in which engines leave files. Engines with one name read each other's files."""

    def progress(self) -> Load:
        """Return what the engine decodes now, and its free room."""

    def offer(self, version: int, notes: Sequence[TransferRequest]) -> list[Reservation]:
        """Reserve room for samples of this version's weights, until they arrive or `withdraw`."""

    def export(self, grants: Sequence[Reservation]) -> list[KVTransfer]:
        """Write the columns that are final, from `Reservation.first` on, while the samples go on."""

    def detach(self, grants: Sequence[Reservation], columns: bool = True) -> list[KVTransfer]:
        """End samples after their next round, as `abort` does, and write their columns from `Reservation.first` on.

        columns  False: write none, for samples that are recomputed

        Their `generate` returns what they have. A sample that ends in that round is returned as ended.
        """

    def accept(self, cargo: Sequence[KVTransfer]) -> list[KVTransfer]:
        """Take the columns in, all or none of each sample. Raises RouteError if they do not reach this engine."""

    def withdraw(self, request_ids: Sequence[str] | None = None) -> None:
        """Give up what is kept for these samples, or for all, that have not arrived."""
