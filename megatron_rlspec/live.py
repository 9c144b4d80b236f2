"""A run as the terminal shows it: one live panel on a terminal, one line a step anywhere else."""

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
BAR = 20  # columns of the bar of seconds
NAMES, VALUES = 17, 8  # columns of the panel's names and numbers
GAP = 2
EDGES = 4  # columns of the panel's border and padding
Numbers = Mapping[str, float]
# Key of a record -> the name shown for it, and its format.
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
    """A context manager around the steps of a run, with `update` after each. It reads `events` and never writes it."""

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
        shown = panel(step, self.total, left, self.history, self.events, self.console.width)
        self.live.update(shown, refresh=True)


def line(step: int, total: int, values: Numbers) -> str:
    """One step in plain text."""
    told = [f"{name} {style.format(values[key])}" for key, (name, style) in SHOWN.items() if key in values]
    parts = [f"step {step + 1}/{total}", *told, configs(values), split(values).plain]
    return "  ".join(part for part in parts if part)


def panel(
    step: int, total: int, left: timedelta, history: Sequence[Numbers], events: Sequence[str], width: int = 100
) -> Panel:
    """Numbers with their curves, chosen configurations, where the time went and the latest events, `width` columns."""
    now = history[-1]
    room = max(width - EDGES - NAMES - GAP, 1)  # columns beside the names
    curves = min(HISTORY, max(room - VALUES - GAP, 1))
    numbers = _grid(NAMES, VALUES, curves)
    for key, (name, style) in SHOWN.items():
        if key in now:
            values = [row.get(key, math.nan) for row in list(history)[-curves:]]
            numbers.add_row(name, style.format(now[key]), Text(curve(values), "green"))
    texts = _grid(NAMES, room)
    texts.add_row("configurations", configs(now) or "plain")
    texts.add_row("seconds", split(now, room))
    for event in events:
        texts.add_row("event", Text(event, "yellow"))
    bar = Table.grid(expand=True)  # in a table of its own, since a bar ends without a newline
    bar.add_row(ProgressBar(total, step + 1))
    title = f"step {step + 1} of {total}, {left} left"
    return Panel(Group(bar, numbers, texts), title=title, width=width)


def _grid(*widths: int) -> Table:
    """A table without lines, of columns of these widths. Nothing wraps: what is too long ends in an ellipsis."""
    grid = Table.grid(padding=(0, GAP, 0, 0))
    for width in widths:
        grid.add_column(min_width=width, max_width=width, no_wrap=True, overflow="ellipsis")
    return grid


def configs(values: Numbers) -> str:
    """Shares of decode rounds, the largest first: "k3 84 %, off 16 %"."""
    shares = {key.removeprefix("spec/share_"): share for key, share in values.items() if key.startswith("spec/share_")}
    return ", ".join(f"{name} {share:.0%}" for name, share in sorted(shares.items(), key=lambda x: -x[1]) if share > 0)


def split(values: Numbers, width: int = 100) -> Text:
    """Seconds of a step's parts in at most `width` columns, behind a bar of their shares if there is room."""
    seconds = {part: values[f"seconds_{part}"] for part in PARTS if f"seconds_{part}" in values}
    longest = ", ".join(f"{part} {value:.2f} s" for part, value in seconds.items())
    shorter = ", ".join(f"{part} {value:.0f} s" for part, value in seconds.items())
    told = longest if len(longest) <= width else shorter
    cells = min(BAR, width - len(told) - 1)
    if cells < len(seconds):
        return Text(told)
    whole = sum(seconds.values()) or 1.0
    bar = []
    drawn = 0
    total = 0.0
    for part, value in seconds.items():
        total += value
        end = round(cells * total / whole)  # of running sums, so that the parts fill the bar exactly
        bar.append(("█" * (end - drawn), PARTS[part]))
        drawn = end
    return Text.assemble(*bar, " ", told)


def curve(values: Sequence[float]) -> str:
    """Draw values as a line of blocks, the lowest for the least; a space for a value that is not finite."""
    known = [value for value in values if math.isfinite(value)]
    low = min(known, default=0.0)
    span = max(known, default=0.0) - low
    if not math.isfinite(span) or span == 0.0:
        span = 1.0
    height = len(BLOCKS) - 1
    drawn = ""
    for value in values:
        level = min(round(height * (value - low) / span), height) if math.isfinite(value) else None
        drawn += " " if level is None else BLOCKS[level]
    return drawn
