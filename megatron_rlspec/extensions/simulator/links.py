"""Links between engines: transfers that share one go slower."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron_rlspec.extensions.simulator.events import Clock


@dataclass(eq=False)
class _Transfer:
    source: str
    target: str
    left: float  # bytes
    arrived: Callable[[], None]
    rate: float = 0.0  # bytes per ms


class Links:
    """Every engine has one way out and one way in, of the same bandwidth. Transfers on a way have equal parts of it.

    gigabytes_per_second  0: transfers take no time
    """

    def __init__(self, clock: Clock, gigabytes_per_second: float) -> None:
        self.clock = clock
        self.full = gigabytes_per_second * 1e6
        self._under_way: list[_Transfer] = []
        self._since = 0.0  # when the rates were set
        self._setting = 0  # counts the settings, so that events of earlier ones are ignored

    def send(self, source: str, target: str, size: float, arrived: Callable[[], None]) -> None:
        """Send `size` bytes from now on, and call `arrived` when they are there."""
        if not self.full or size <= 0:
            self.clock.at(self.clock.now, arrived)
            return
        self._progress()
        self._under_way.append(_Transfer(source, target, float(size), arrived))
        self._share()

    def _progress(self) -> None:
        for transfer in self._under_way:
            transfer.left -= transfer.rate * (self.clock.now - self._since)
        self._since = self.clock.now

    def _share(self) -> None:
        outgoing: dict[str, int] = {}
        incoming: dict[str, int] = {}
        for transfer in self._under_way:
            outgoing[transfer.source] = outgoing.get(transfer.source, 0) + 1
            incoming[transfer.target] = incoming.get(transfer.target, 0) + 1
        for transfer in self._under_way:
            transfer.rate = self.full / max(outgoing[transfer.source], incoming[transfer.target])
        self._setting += 1
        setting = self._setting
        if self._under_way:
            first = min(transfer.left / transfer.rate for transfer in self._under_way)
            self.clock.at(self.clock.now + first, lambda: self._arrive(setting))

    def _arrive(self, setting: int) -> None:
        if setting != self._setting:
            return
        self._progress()
        there = [
            transfer for transfer in self._under_way if transfer.left <= 1e-6 * transfer.rate + 1e-3
        ]
        self._under_way = [transfer for transfer in self._under_way if transfer not in there]
        self._share()
        for transfer in there:
            transfer.arrived()
