"""Draw the charts of `rlspec report` as SVG elements, by matplotlib; and shorten numbers for its page.

`figures.py` chooses charts and values. `page.html.j2` inserts the SVG unescaped (`| safe`): matplotlib escapes the
texts in it, so change none of them after `savefig`.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

# Inches. The page stretches the SVG (`page.css`): a larger size makes the texts in it smaller.
SIZE = (4.8, 2.7)
MOST_POINTS = 400  # of a line; of a longer one some are left out (`lines`)
MOST_MARKERS = 60  # points of a line up to which each has a dot
MOST_BARS = 60  # of a chart; of more steps several share a bar (`bars`)
GREY = "0.55"
INK = "#010203"  # a colour that nothing else uses: `_svg` replaces it by `currentColor`, the colour of the page's text
STYLE: dict[Any, Any] = {
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": 9,
    "legend.frameon": False,
    "svg.fonttype": "none",  # texts stay texts, in place of outlines of their letters
    "text.color": INK,
    "text.parse_math": False,  # a name of the user's may hold dollar signs
    "xtick.color": INK,
    "ytick.color": INK,
}
Points = list[tuple[float, float]]  # (step from 1, value)


@dataclass
class Series:
    """A line of a chart, or one part of its bars.

    label   for the legend
    points  at least one, with steps rising and each step once
    key     of the records in metrics.jsonl; `__init__.py` finds the glossary's entry by it
    colour  a matplotlib colour
    """

    label: str
    points: Points
    key: str
    colour: str


@dataclass
class Mark:
    """A measured value with its interval, such as an evaluation: a diamond. `x` is the number of steps done."""

    x: float
    value: float
    low: float
    high: float


@dataclass
class DrawnChart:
    """A chart of the page, which `figures.py` makes. `svg` is what `lines` or `bars` returned.

    `title`, `note` and `unit` are texts, which the page escapes; `note` and `unit` may be "".
    """

    title: str
    note: str
    unit: str
    series: Sequence[Series]
    svg: str


def lines(series: Sequence[Series], marks: Sequence[Mark] = ()) -> str:
    """Draw lines over steps. Of many steps every n-th is drawn, the newest among them.

    series  at least one; each has at least one point, in the order of steps
    """
    with matplotlib.rc_context(STYLE):
        figure, axes = _empty()
        for line in series:
            every = math.ceil(len(line.points) / MOST_POINTS)
            # backwards, so that the newest point is among those that are drawn
            x, y = zip(*line.points[::-every], strict=True)
            marker = "." if len(x) <= MOST_MARKERS else ""
            axes.plot(x, y, lw=1, marker=marker, color=line.colour, label=line.label)
        for mark in marks:
            error = [[mark.value - mark.low], [mark.high - mark.value]]
            axes.errorbar(mark.x, mark.value, yerr=error, color=INK, marker="D", markersize=4)
        return _svg(figure, legend=len(series) > 1)


def bars(series: Sequence[Series]) -> str:
    """Draw stacked bars over steps. Many steps share a bar, which then is their mean.

    series  from the bottom to the top, with at least one point in all; a step that one of them lacks counts as 0 there
    """
    steps = sorted({x for part in series for x, _ in part.points})
    groups = np.array_split(steps, min(len(steps), MOST_BARS))
    # A bar begins 0.5 before its first step and reaches to the next bar; the last one ends 0.5 behind its last step.
    edges = [group[0] - 0.5 for group in groups]
    edges.append(steps[-1] + 0.5)
    bottom = np.zeros(len(groups))
    with matplotlib.rc_context(STYLE):
        figure, axes = _empty()
        for part in series:
            values = dict(part.points)
            heights = []
            for group in groups:
                heights.append(sum(values.get(x, 0.0) for x in group) / len(group))
            top = bottom + heights
            axes.stairs(top, edges, baseline=bottom, fill=True, color=part.colour, label=part.label)
            bottom = top
        return _svg(figure, legend=True)


def short(value: float) -> str:
    """Return a number as a short label: three digits, four from 1,000 on, and k (from 10,000), M or G behind three."""
    # The limits are where the digits round up: 999,999 is 1M, not 1000k.
    for size, start, sign in ((1e9, 999.5e6, "G"), (1e6, 999.5e3, "M"), (1e3, 9999.5, "k")):
        if abs(value) >= start:
            return f"{value / size:.3g}{sign}"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _empty() -> tuple[Figure, Axes]:
    figure = Figure(SIZE, layout="constrained")
    axes = figure.subplots()
    axes.set_xlabel("step", loc="right")
    axes.grid(axis="y", color=GREY, alpha=0.3)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    return figure, axes


def _svg(figure: Figure, legend: bool) -> str:
    """Return the figure as an element of an HTML page. It draws the legend, so call it last."""
    if legend:
        figure.legend(loc="outside upper left", ncols=3, fontsize="small")
    file = io.StringIO()
    no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(file, format="svg", transparent=True, metadata=no_metadata)
    text = file.getvalue()
    element = text[text.index("<svg") :]
    # HTML knows the two namespaces, which look like addresses in a network.
    element = re.sub(r' xmlns(:xlink)?="[^"]*"', "", element, count=2)
    return element.replace(INK, "currentColor")
