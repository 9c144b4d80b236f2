"""The engines of a rollout over time: where each sample was, its moves, changes of size, and what goes on later."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from megatron_rlspec.commands.report.charts import Drawing, Scale, short, ticks
from megatron_rlspec.commands.report.records import TailRow

WIDTH = 960
LEFT, RIGHT, TOP, BOTTOM = 92, 12, 26, 34
STAYS_SHOWN = 500  # the ones that end last
Stay = tuple[str, str, float, float]


def draw(row: TailRow, rollouts: Sequence[TailRow]) -> Drawing:
    """Draw one rollout. Samples that another of `rollouts` has, too, were continued from it or go on in it."""
    earlier = {id for other in rollouts if other.step < row.step for id, *_ in other.stays}
    later = {id for other in rollouts if other.step > row.step for id, *_ in other.stays}
    kept = sorted(row.stays, key=lambda stay: -stay[3])[:STAYS_SHOWN]
    engines = sorted({engine for _, engine, _, _ in kept})
    order = sorted(kept, key=lambda stay: (engines.index(stay[1]), stay[2], stay[3]))
    thick = max(2.0, min(9.0, 300 / max(len(order), 1)))
    gap = 10.0
    places = {}
    for i, stay in enumerate(order):
        places[stay[:3]] = TOP + i * thick + engines.index(stay[1]) * gap
    bottom = TOP + len(order) * thick + len(engines) * gap
    note = "" if len(kept) == len(row.stays) else f"The {len(kept)} of {len(row.stays)} samples that ended last. "
    evaluation = ", evaluation" if all(id.startswith("e-") for id, *_ in row.stays) else ""
    drawing = Drawing(f"step {row.step + 1}{evaluation}", note, height=bottom + BOTTOM, width=WIDTH, x_label="seconds")
    drawing.left, drawing.right, drawing.top, drawing.bottom = LEFT, WIDTH - RIGHT, TOP, bottom
    ends = [stay[3] for stay in kept] + [move.began for move in row.moves]
    ends += [change.began for change in row.sizes if change.began is not None]
    high = max(ends, default=0.0) or 1.0
    across = Scale(0.0, high, LEFT, WIDTH - RIGHT)
    drawing.x_ticks = [(across(x), short(x)) for x in ticks(0.0, high, 10)]
    for id, engine, began, ended in order:
        shape = f"c{engines.index(engine) % 8}"
        hint = f"{id} on {engine}: {began:.2f} to {ended:.2f} s"
        if id in earlier:
            shape += " old"
            hint += "; continued from an earlier step"
        if id in later:
            shape += " goes-on"
            hint += "; goes on in a later step"
        width = max(across(ended) - across(began), 1.0)
        drawing.rects.append((shape, across(began), places[id, engine, began], width, thick * 0.8, hint))
    for engine in engines:
        own = [places[stay[:3]] for stay in order if stay[1] == engine]
        drawing.y_ticks.append((sum(own) / len(own) + thick / 2, f"rank {engine}" if engine.isdigit() else engine))
    _add_moves(drawing, row, places, across, thick)
    for change in row.sizes:
        if change.began is not None:
            x = across(change.began)
            hint = f"size {change.source} to {change.target}: {change.samples} samples, {change.ms:.0f} ms"
            drawing.lines.append((x, TOP - 4, x, bottom, "size", hint))
    return drawing


def _add_moves(
    drawing: Drawing, row: TailRow, places: dict[tuple[str, str, float], float], across: Scale, thick: float
) -> None:
    """Add an arrow from a sample's place on one engine to its next one."""
    by_sample: dict[str, list[Stay]] = {}
    for stay in sorted(row.stays, key=lambda stay: stay[2]):
        by_sample.setdefault(stay[0], []).append(stay)
    told = {(id, move.source, move.target): move for move in row.moves for id in move.ids}
    for id, stays in by_sample.items():
        for left, reached in itertools.pairwise(stays):
            if left[1] == reached[1] or left[:3] not in places or reached[:3] not in places:
                continue
            move = told.get((id, left[1], reached[1]))
            how = "" if move is None else f", {move.how}, {move.ms:.0f} ms: {move.why}"
            y1, y2 = places[left[:3]] + thick / 2, places[reached[:3]] + thick / 2
            hint = f"{id}: {left[1]} to {reached[1]}{how}"
            drawing.lines.append((across(left[3]), y1, across(reached[2]), y2, "move", hint))
