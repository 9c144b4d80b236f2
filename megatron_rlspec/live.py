"""What a person at the terminal sees of a run: one live panel on a terminal, one line a step anywhere else."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import timedelta

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

PARTS = {"generate": "cyan", "train": "magenta", "push": "yellow"}
HISTORY = 40  # steps in a curve
BLOCKS = "▁▂▃▄▅▆▇█"
Numbers = Mapping[str, float]
# Name of a record's value -> what it is called here, and how it is written.
SHOWN = {
    "rollout/reward": ("reward", "{:.3f}"),
    "rollout/failed_rewards": ("failed rewards", "{:.0f}"),
    "rollout/accept_length": ("accept length", "{:.2f}"),
    "rollout/tokens_per_second": ("tokens/s", "{:.0f}"),
    "rollout/response_length": ("response length", "{:.0f}"),
    "drafter/match_1": ("drafter agreement", "{:.2f}"),
    "policy/loss": ("loss", "{:.3f}"),
    "drafter/objective": ("drafter loss", "{:.3f}"),
}


class View:
    """A context manager around the steps; `update` after each of them. `events` is looked at, never written to."""

    def __init__(self, total: int, done: int, events: Sequence[str], console: Console | None = None) -> None:
        self.total, self.first, self.events = total, done, events
        self.console = console or Console()
        self.history: deque[Numbers] = deque(maxlen=HISTORY)
        self.began = time.monotonic()
        self.live = Live(console=self.console, auto_refresh=False) if self.console.is_terminal else None

    def __enter__(self) -> View:
        if self.live is not None:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.live is not None:
            self.live.stop()

    def update(self, step: int, values: Numbers) -> None:
        self.history.append(values)
        if self.live is None:
            self.console.print(line(step, self.total, values), soft_wrap=True, highlight=False)
            return
        seconds = (time.monotonic() - self.began) / (step + 1 - self.first)
        left = timedelta(seconds=round(seconds * (self.total - step - 1)))
        self.live.update(panel(step, self.total, left, self.history, self.events), refresh=True)


def line(step: int, total: int, values: Numbers) -> str:
    """One step in plain text."""
    told = [f"{name} {style.format(values[key])}" for key, (name, style) in SHOWN.items() if key in values]
    parts = [f"step {step + 1}/{total}", *told, configs(values), split(values).plain]
    return "  ".join(part for part in parts if part)


def panel(step: int, total: int, left: timedelta, history: Sequence[Numbers], events: Sequence[str]) -> Panel:
    """Everything at once: numbers with their curves, chosen configurations, where the time went, latest events."""
    now = history[-1]
    table = Table.grid(padding=(0, 2))
    for key, (name, style) in SHOWN.items():
        if key in now:
            table.add_row(
                name, style.format(now[key]), Text(curve([row.get(key, math.nan) for row in history]), "green")
            )
    table.add_row("configurations", configs(now) or "plain", "")
    table.add_row("seconds", "", split(now))
    for event in events:
        table.add_row("event", "", Text(event, "yellow", overflow="ellipsis", no_wrap=True))
    return Panel(Group(ProgressBar(total, step + 1), table), title=f"step {step + 1} of {total}, {left} left")


def configs(values: Numbers) -> str:
    """Shares of decode rounds, the largest first: "k3 84 %, off 16 %"."""
    shares = {key.removeprefix("spec/share_"): share for key, share in values.items() if key.startswith("spec/share_")}
    return ", ".join(f"{name} {share:.0%}" for name, share in sorted(shares.items(), key=lambda x: -x[1]) if share > 0)


def split(values: Numbers) -> Text:
    """Seconds of a step's parts, behind a bar of their shares."""
    seconds = {part: values[f"seconds_{part}"] for part in PARTS if f"seconds_{part}" in values}
    whole = sum(seconds.values()) or 1.0
    bar = [("█" * round(20 * value / whole), PARTS[part]) for part, value in seconds.items()]
    return Text.assemble(*bar, " ", ", ".join(f"{part} {value:.2f} s" for part, value in seconds.items()))


def curve(values: Sequence[float]) -> str:
    """A line of blocks from the least to the greatest value; a space where there is none."""
    known = [value for value in values if math.isfinite(value)]
    low, span = min(known, default=0.0), (max(known, default=0.0) - min(known, default=0.0)) or 1.0
    height = len(BLOCKS) - 1
    return "".join(BLOCKS[round(height * (v - low) / span)] if math.isfinite(v) else " " for v in values)
