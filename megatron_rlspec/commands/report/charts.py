"""Charts over steps, which matplotlib draws as SVG."""

from __future__ import annotations

import functools
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
from scipy import stats

SIZE = (4.8, 2.7)  # inches, which a browser stretches
MOST_POINTS = 400  # of a line; longer ones are drawn as means of neighbours
MOST_BARS = 60
SMOOTH_FROM = 16  # points; a shorter line is drawn as it is
WINDOWS = 15  # a line is smoothed over a window of one part in so many
DRAWN_MOST = 1e30  # larger values and NaN are left out
GREY = "0.55"
INK = "#010203"  # becomes the colour of the page's text, which follows the browser's scheme
STYLE: dict[Any, Any] = {
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": 9,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "text.color": INK,
    "text.parse_math": False,  # a name of the user's may hold dollar signs
    "xtick.color": INK,
    "ytick.color": INK,
}
Points = list[tuple[float, float]]


@dataclass
class Series:
    """A line of a chart, or one part of its bars.

    key     of the records, for the glossary; "" where there is none
    colour  number of the colour; -1: grey
    dashed  for a prediction, beside what was seen
    listed  whether the legend names it
    """

    label: str
    points: Points
    key: str = ""
    colour: int = 0
    dashed: bool = False
    listed: bool = True


@dataclass
class Mark:
    """A measured value with its interval, such as an evaluation."""

    x: float
    value: float
    low: float
    high: float


@dataclass
class Drawing:
    """A chart: its texts, what it shows, and its SVG element."""

    title: str
    note: str
    unit: str
    series: Sequence[Series]
    svg: str


def lines(
    title: str,
    series: Sequence[Series],
    *,
    note: str = "",
    unit: str = "",
    marks: Sequence[Mark] = (),
) -> Drawing:
    """Draw lines over steps: the mean over a window, the 95 % interval of that mean, and single steps as dots."""
    with matplotlib.rc_context(STYLE):
        figure, axes = _empty()
        for one in series:
            colour = _colour(one)
            style: dict[str, Any] = {"color": colour, "ls": "--" if one.dashed else "-"}
            style["label"] = one.label if one.listed else None
            points = thin(one.points)
            x, y = zip(*points, strict=True)
            if (means := smooth(points)) is None:
                axes.plot(x, y, marker="" if one.dashed else ".", **style)
                continue
            _, mean, low, high = zip(*means, strict=True)
            axes.plot(x, y, ".", color=colour, alpha=0.4, markersize=3)
            axes.fill_between(x, low, high, color=colour, alpha=0.16, lw=0)
            axes.plot(x, mean, **style)
        for mark in marks:
            error = [[mark.value - mark.low], [mark.high - mark.value]]
            axes.errorbar(mark.x, mark.value, yerr=error, color=INK, marker="D", markersize=4)
        return Drawing(title, note, unit, series, _svg(figure, legend=len(series) > 1))


def bars(title: str, series: Sequence[Series], *, note: str = "", unit: str = "") -> Drawing:
    """Draw stacked bars over steps. Many steps share a bar, which then is their mean."""
    steps = sorted({x for one in series for x, _ in one.points})
    groups = np.array_split(steps, min(len(steps), MOST_BARS))
    edges = [*(group[0] - 0.5 for group in groups), steps[-1] + 0.5]
    begin = np.zeros(len(groups))
    with matplotlib.rc_context(STYLE):
        figure, axes = _empty()
        for one in series:
            values = dict(one.points)
            end = begin + [sum(values.get(x, 0.0) for x in group) / len(group) for group in groups]
            axes.stairs(end, edges, baseline=begin, fill=True, color=_colour(one), label=one.label)
            begin = end
        return Drawing(title, note, unit, series, _svg(figure, legend=True))


def thin(points: Points, most: int = MOST_POINTS) -> Points:
    """Return the drawable points, or means of neighbours if there are more than `most`."""
    known = [(x, y) for x, y in points if abs(y) <= DRAWN_MOST]
    size = math.ceil(len(known) / most) or 1
    if size == 1:
        return known
    parts = [known[i : i + size] for i in range(0, len(known), size)]
    return [
        (sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)) for part in parts
    ]


def smooth(points: Points) -> list[tuple[float, float, float, float]] | None:
    """Return (x, mean over a window around it, low, high), the 95 % interval of the mean; None for few points.

    The interval takes the points of a window for independent draws around one value.
    """
    if len(points) < SMOOTH_FROM:
        return None
    half = max(2, len(points) // WINDOWS // 2)
    found = []
    for i, (x, _) in enumerate(points):
        # windows at the ends are as long as the others
        first = min(max(0, i - half), len(points) - 2 * half - 1)
        mean, error = interval([y for _, y in points[first : first + 2 * half + 1]])
        found.append((x, mean, mean - error, mean + error))
    return found


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean of independent draws and half of its 95 % interval; NaN for fewer than three draws."""
    if len(values) < 3:
        return sum(values) / len(values), math.nan
    error = _quantile(len(values) - 1) * np.std(values, ddof=1) / math.sqrt(len(values))
    return float(np.mean(values)), float(error)


@functools.cache
def _quantile(freedom: int) -> float:
    return float(stats.t.ppf(0.975, freedom))


def short(value: float) -> str:
    """Return a number as a label of three digits; k, M, G."""
    for size, sign in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size <= abs(value) < 1e12:
            return f"{value / (1e3 if sign == 'k' else size):.3g}{sign}"
    return f"{value:.4g}" if abs(value) >= 1000 else f"{value:.3g}"


def _empty() -> tuple[Figure, Axes]:
    figure = Figure(SIZE, layout="constrained")
    axes = figure.subplots()
    axes.set_xlabel("step", loc="right")
    axes.grid(axis="y", color=GREY, alpha=0.3)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    return figure, axes


def _colour(one: Series) -> str:
    return GREY if one.colour < 0 else f"C{one.colour}"


def _svg(figure: Figure, legend: bool) -> str:
    """Return the figure as an element of an HTML page."""
    if legend:
        figure.legend(loc="outside upper left", ncols=3, fontsize="small")
    file = io.StringIO()
    about = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(file, format="svg", transparent=True, metadata=about)
    text = file.getvalue()
    # HTML knows both
    text = re.sub(r' xmlns(:xlink)?="[^"]*"', "", text[text.index("<svg") :], count=2)
    return text.replace(INK, "currentColor")
