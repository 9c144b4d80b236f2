"""Show a run's progress: a live panel on a terminal, one line per step when the output is a file or a pipe."""

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

from megatron_rlspec.texts import printable

PARTS = {"generate": "cyan", "train": "magenta", "push": "yellow"}
HISTORY = 120  # steps in a curve
LEAST_CURVE = 4  # columns; a narrower panel has no curves
LEAST_PANEL = 32  # columns; a narrower terminal gets a line each step
BLOCKS = "▁▂▃▄▅▆▇█"
BAR = 20  # columns of the bar of seconds
NAMES = 17  # columns of the panel's names
VALUES = 8  # columns of the panel's numbers
GAP = 2
MOST_LEFT = 86_400 * 36_500  # seconds that are shown as left
EDGES = 4  # columns of the panel's border and padding
Numbers = Mapping[str, float]
# Key of a record -> the name shown for it, and its format.
SHOWN = {
    "rollout/reward": ("reward", "{:.3f}"),
    "rollout/failed_rewards": ("failed rewards", "{:.0f}"),
    "rollout/accept_length": ("accept length", "{:.2f}"),
    "spec/accept_length": ("when drafting", "{:.2f}"),
    "rollout/tokens_per_second": ("tokens/s", "{:.0f}"),
    "rollout/response_length": ("response length", "{:.0f}"),
    "rollout/truncated": ("truncated", "{:.0%}"),
    "rollout/size_changes": ("size changes", "{:.0f}"),
    "drafter/match_1": ("drafter agreement", "{:.2f}"),
    "policy/loss": ("loss", "{:.3f}"),
    "drafter/loss_1": ("loss of draft 1", "{:.3f}"),
}


class View:
    """Context manager around the steps of a run. Call `update` after each step.

    total   steps of the whole run
    done    steps that are already done when the view starts
    events  the latest events; the caller appends to them, the view only reads them
    """

    def __init__(self, total: int, done: int, events: Sequence[str], console: Console | None = None) -> None:
        self.total = total
        self.first = done
        self.events = events
        self.console = console or Console()
        self.history: deque[Numbers] = deque(maxlen=HISTORY)
        self.began = time.monotonic()
        drawn = self.console.is_terminal and not self.console.is_dumb_terminal and self.console.width >= LEAST_PANEL
        self.live = Live(console=self.console, auto_refresh=False) if drawn else None

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
            self.console.print(line(step, self.total, values), soft_wrap=True, highlight=False, markup=False)
            return
        seconds = (time.monotonic() - self.began) / (step + 1 - self.first)
        self.show(step, seconds * (self.total - step - 1))

    def show(self, step: int, left: float, note: str = "") -> None:
        """Draw the panel, with the seconds that are left. Does nothing where the view prints lines."""
        if self.live is not None:
            known = timedelta(seconds=min(round(left), MOST_LEFT))
            shown = panel(step, self.total, known, self.history, self.events, self.console.width, note)
            self.live.update(shown, refresh=True)


def line(step: int, total: int, values: Numbers) -> str:
    """Return one step as a line of text."""
    numbers = [f"{name} {style.format(values[key])}" for key, (name, style) in SHOWN.items() if key in values]
    parts = [f"step {step + 1}/{total}", *numbers, configs(values), split(values).plain]
    return "  ".join(part for part in parts if part)


def panel(
    step: int,
    total: int,
    left: timedelta,
    history: Sequence[Numbers],
    events: Sequence[str],
    width: int = 100,
    note: str = "",
) -> Panel:
    """Build a panel of `width` columns: progress, numbers with curves, configurations, seconds, events and a note."""
    now = history[-1]
    beside_names = max(width - EDGES - NAMES - GAP, 1)  # columns
    curves = min(HISTORY, beside_names - VALUES - GAP)
    numbers = _grid(NAMES, VALUES, curves) if curves >= LEAST_CURVE else _grid(NAMES, VALUES)
    for key, (name, style) in SHOWN.items():
        if key in now:
            values = [row.get(key, math.nan) for row in list(history)[-max(curves, 1) :]]
            drawn = [Text(curve(values), "green")] if curves >= LEAST_CURVE else []
            numbers.add_row(name, style.format(now[key]), *drawn)
    texts = _grid(NAMES, beside_names)
    texts.add_row("configurations", Text(configs(now) or "plain"))
    texts.add_row("seconds", split(now, beside_names))
    for event in events:
        texts.add_row("event", Text(printable(event), "yellow"))
    bar = Table.grid(expand=True)  # a bar ends without a newline, a table of its own adds one
    bar.add_row(ProgressBar(total, step + 1))
    title = f"step {step + 1} of {total}, {left} left"
    return Panel(Group(bar, numbers, texts), title=title, subtitle=note or None, width=width)


def _grid(*widths: int) -> Table:
    """Make a table without lines, with columns of these widths. Text that is too long ends in an ellipsis."""
    grid = Table.grid(padding=(0, GAP, 0, 0))
    for width in widths:
        grid.add_column(min_width=width, max_width=width, no_wrap=True, overflow="ellipsis")
    return grid


def configs(values: Numbers) -> str:
    """Return each configuration's share of the decode rounds, the largest first: "k3 84%, off 16%"."""
    shares = {key.removeprefix("spec/share_"): share for key, share in values.items() if key.startswith("spec/share_")}
    largest_first = sorted(shares.items(), key=lambda item: -item[1])
    return printable(", ".join(f"{name} {share:.0%}" for name, share in largest_first if share > 0))


def split(values: Numbers, width: int = 100) -> Text:
    """Return the seconds of a step's parts in at most `width` columns, after a bar of their shares if it fits."""
    seconds = {part: values[f"seconds_{part}"] for part in PARTS if f"seconds_{part}" in values}
    text = ", ".join(f"{part} {value:.2f} s" for part, value in seconds.items())
    if len(text) > width:
        text = ", ".join(f"{part} {value:.0f} s" for part, value in seconds.items())
    cells = min(BAR, width - len(text) - 1)
    if cells < len(seconds):
        return Text(text)
    whole = sum(seconds.values()) or 1.0
    bar = []
    drawn = 0
    total = 0.0
    for part, value in seconds.items():
        total += value
        end = round(cells * total / whole)  # rounding running sums makes the parts fill the bar exactly
        bar.append(("█" * (end - drawn), PARTS[part]))
        drawn = end
    return Text.assemble(*bar, " ", text)


def curve(values: Sequence[float]) -> str:
    """Draw values as a line of blocks. The least value is the lowest block; a value that is not finite is a space."""
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
