"""Which steps train the drafter: `extensions/drafter_schedules` and `integrations/slime/drafter.py` follow it."""

from __future__ import annotations

from collections.abc import Mapping


class EverySteps:
    """Updates in the first step that can, and then every `every` steps.

    Rules that watch acceptance, or the time that an update saves, ended behind this one (docs/staleness.md).
    """

    def __init__(self, every: int) -> None:
        self.every = every
        self.since = 0  # steps since the last update
        self.updates = 0

    @property
    def due(self) -> bool:
        """Return whether the next step updates the drafter. Without `observe` the answer stays."""
        return not self.updates or self.since + 1 >= self.every

    def observe(self, updated: bool) -> None:
        """Count a step."""
        self.since = 0 if updated else self.since + 1
        self.updates += updated

    def state(self) -> dict[str, int]:
        """Return the state for a checkpoint, as JSON."""
        return {"since": self.since, "updates": self.updates}

    def restore(self, state: Mapping[str, int]) -> None:
        """Restore what `state` returned."""
        self.since, self.updates = int(state["since"]), int(state["updates"])
