"""Charts as numbers in a picture's own coordinates. The template draws them as SVG; nothing here knows HTML."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

WIDTH, HEIGHT = 480, 250
LEFT, RIGHT, TOP, BOTTOM = 58, 12, 12, 34  # margins around the plotted area
MOST_POINTS = 400  # of a line; longer ones are drawn as means of neighbours
MOST_BARS = 60
SMOOTH_FROM = 16  # points; a shorter line is drawn as it is
WINDOWS = 15  # a line is smoothed over a window of one part in so many
DRAWN_MOST = 1e30  # larger values and NaN are left out
Points = list[tuple[float, float]]


@dataclass
class Series:
    """A line of a chart, or one part of its bars.

    key     of the records, for the hint; "" where there is none
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
    label: str


@dataclass
class Drawing:
    """What the template draws, in SVG coordinates. `classes` choose colours; `hover` is what a pointer shows."""

    title: str
    note: str
    height: float = HEIGHT
    width: float = WIDTH
    x_label: str = "step"
    unit: str = ""
    x_ticks: list[tuple[float, str]] = field(default_factory=list)
    y_ticks: list[tuple[float, str]] = field(default_factory=list)
    paths: list[tuple[str, str]] = field(default_factory=list)  # (classes, path)
    rects: list[tuple[str, float, float, float, float]] = field(default_factory=list)  # class, x, y, w, h
    marks: list[tuple[float, float, float, float, str]] = field(default_factory=list)  # x, y, y low, y high, hint
    legend: list[tuple[str, str, str]] = field(default_factory=list)  # classes, label, key
    hover: dict[str, Any] = field(default_factory=dict)
    left: float = LEFT
    right: float = WIDTH - RIGHT
    top: float = TOP
    bottom: float = HEIGHT - BOTTOM


def lines(
    title: str, series: Sequence[Series], *, note: str = "", unit: str = "", marks: Sequence[Mark] = ()
) -> Drawing:
    """Draw lines over steps: the mean over a window, the 95 % interval of that mean, and single steps as dots."""
    drawing = Drawing(title, note, unit=unit)
    thinned = [thin(one.points) for one in series]
    smoothed = [smooth(points) for points in thinned]
    xs = [x for points in thinned for x, _ in points] + [mark.x for mark in marks]
    ys = [y for points in thinned for _, y in points] + [v for mark in marks for v in (mark.low, mark.high)]
    across, up = _axes(drawing, xs, ys)
    for one, points, means in zip(series, thinned, smoothed, strict=True):
        colour = _colour(one)
        if means is None:
            drawing.paths.append((f"line {colour}", _path((across(x), up(y)) for x, y in points)))
            if not one.dashed:
                drawing.paths.append((f"dots {colour}", _dots((across(x), up(y)) for x, y in points)))
        else:
            lower = [(across(x), min(up(low), drawing.bottom)) for x, _, low, _ in means]
            upper = [(across(x), max(up(high), drawing.top)) for x, _, _, high in means]
            drawing.paths.append((f"band {colour}", _path([*lower, *reversed(upper)]) + "Z"))
            drawing.paths.append((f"dots {colour}", _dots((across(x), up(y)) for x, y in points)))
            drawing.paths.append((f"line {colour}", _path((across(x), up(y)) for x, y, _, _ in means)))
        if one.listed:
            drawing.legend.append((colour, one.label, one.key))
    for mark in marks:
        hint = f"{mark.label}: {short(mark.value)} [{short(mark.low)}, {short(mark.high)}]"
        drawing.marks.append((across(mark.x), up(mark.value), up(mark.low), up(mark.high), hint))
    drawing.hover = _hover(series, thinned, smoothed, across)
    return drawing


def bars(title: str, series: Sequence[Series], *, note: str = "", unit: str = "") -> Drawing:
    """Draw stacked bars over steps. Many steps share a bar, which then is their mean."""
    drawing = Drawing(title, note, unit=unit)
    steps = sorted({x for one in series for x, _ in one.points})
    size = math.ceil(len(steps) / MOST_BARS) or 1
    groups = [steps[i : i + size] for i in range(0, len(steps), size)]
    heights = []
    for one in series:
        values = dict(one.points)
        heights.append([sum(values.get(x, 0.0) for x in group) / len(group) for group in groups])
    tallest = max(map(sum, zip(*heights, strict=True)))
    across, up = _axes(drawing, [steps[0] - size / 2, steps[-1] + size / 2], [0.0, tallest], room=0.0)
    for i, group in enumerate(groups):
        left = across(group[0] - 0.5)
        width = max(across(group[-1] + 0.5) - left - 0.6, 0.4)
        begin = 0.0
        for one, height in zip(series, heights, strict=True):
            end = begin + height[i]
            if end > begin:
                drawing.rects.append((_colour(one), left, up(end), width, abs(up(begin) - up(end))))
            begin = end
    drawing.legend = [(_colour(one), one.label, one.key) for one in series]
    middles = [sum(group) / len(group) for group in groups]
    shown = [list(zip(middles, values, strict=True)) for values in heights]
    drawing.hover = _hover(series, shown, [None] * len(series), across)
    return drawing


def thin(points: Points, most: int = MOST_POINTS) -> Points:
    """Return the drawable points, or means of neighbours if there are more than `most`."""
    known = [(x, y) for x, y in points if abs(y) <= DRAWN_MOST]
    size = math.ceil(len(known) / most) or 1
    if size == 1:
        return known
    parts = [known[i : i + size] for i in range(0, len(known), size)]
    return [(sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)) for part in parts]


def smooth(points: Points) -> list[tuple[float, float, float, float]] | None:
    """Return (x, mean over a window around it, low, high), the 95 % interval of the mean; None for few points.

    The interval takes the points of a window for independent draws around one value.
    """
    if len(points) < SMOOTH_FROM:
        return None
    half = max(2, len(points) // WINDOWS // 2)
    found = []
    for i, (x, _) in enumerate(points):
        first = min(max(0, i - half), len(points) - 2 * half - 1)  # windows at the ends are as long as the others
        mean, error = interval([y for _, y in points[first : first + 2 * half + 1]])
        found.append((x, mean, mean - error, mean + error))
    return found


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean of independent draws and half of its 95 % interval; NaN for fewer than three draws.

    The quantile of Student's t is Cornish and Fisher's expansion (Abramowitz and Stegun 26.7.5).
    """
    mean = sum(values) / len(values)
    freedom = len(values) - 1
    if freedom < 2:
        return mean, math.nan
    spread = math.sqrt(sum((value - mean) ** 2 for value in values) / freedom)
    quantile = 1.96 + 2.372 / freedom + 2.823 / freedom**2 + 2.556 / freedom**3
    return mean, quantile * spread / math.sqrt(len(values))


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Return round numbers from `low` to `high`, at most `most` of them."""
    span = high - low
    power = 10.0 ** math.floor(math.log10(span / most))
    step = next(power * factor for factor in (1, 2, 5, 10, 20) if span / (power * factor) < most)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(i * step, 12 - math.floor(math.log10(step))) for i in range(first, last + 1)]


def short(value: float, step: float = 0.0) -> str:
    """Return a number as a label: three digits, or as many as tell it from its neighbour at `step`; k, M, G."""
    digits = 3
    if step and value:
        digits = max(3, math.floor(math.log10(abs(value))) - math.floor(math.log10(step)) + 1)
    for size, sign in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size <= abs(value) < 1e12:
            return f"{value / (1e3 if sign == 'k' else size):.{digits}g}{sign}"
    return f"{value:.{max(4, digits)}g}" if abs(value) >= 1000 else f"{value:.{digits}g}"


class Scale:
    """Maps a value to a coordinate."""

    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        self.low, self.start = low, start
        self.factor = (end - start) / (high - low)

    def __call__(self, value: float) -> float:
        return round(self.start + (value - self.low) * self.factor, 1)


def _axes(drawing: Drawing, xs: Sequence[float], ys: Sequence[float], room: float = 0.06) -> tuple[Scale, Scale]:
    """Choose the axes' ranges, add their ticks to `drawing`, and return the scales."""
    x_low, x_high = _range(xs, 0.0, whole=True)
    y_low, y_high = _range(ys, room)
    across = Scale(x_low, x_high, drawing.left, drawing.right)
    up = Scale(y_low, y_high, drawing.bottom, drawing.top)
    drawing.x_ticks = [(across(x), short(x, 1.0)) for x in ticks(x_low, x_high) if x == int(x)]
    levels = ticks(y_low, y_high)
    step = levels[1] - levels[0] if len(levels) > 1 else 0.0
    drawing.y_ticks = [(up(y), short(y, step)) for y in levels]
    return across, up


def _range(values: Sequence[float], room: float, whole: bool = False) -> tuple[float, float]:
    """Return a range around the values with room beside them, that begins at 0 rather than below."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    least = 0.0 if low >= 0 else -math.inf
    margin = room * (high - low)
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        margin = 1.0 if whole else abs(low) * 0.1 or 1.0
    return max(low - margin, least), high + margin


def _colour(one: Series) -> str:
    return ("grey" if one.colour < 0 else f"c{one.colour % 8}") + (" dashed" if one.dashed else "")


def _path(points: Iterator[tuple[float, float]] | Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:g} {y:g}" for x, y in points)


def _dots(points: Iterator[tuple[float, float]]) -> str:
    return "".join(f"M{x:g} {y:g}h0" for x, y in points)


def _hover(
    series: Sequence[Series],
    points: Sequence[Points],
    smoothed: Sequence[list[tuple[float, float, float, float]] | None],
    across: Scale,
) -> dict[str, Any]:
    """Return, for each step, its coordinate and each line's value, beside its mean where the line is smoothed."""
    rows: dict[float, list[str]] = {}
    for one, values, means in zip(series, points, smoothed, strict=True):
        for i, (x, y) in enumerate(values):
            mean = "" if means is None else f" (mean {short(means[i][1])})"
            rows.setdefault(x, []).append(f"{one.label}: {short(y)}{mean}")
    return {"rows": [[across(x), f"step {x:g}", *rows[x]] for x in sorted(rows)]}
