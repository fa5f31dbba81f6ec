"""Line charts as SVG."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

from recmill.reporting.html.content import LineChart, Series
from recmill.reporting.html.frame import (
    HEIGHT,
    NUM_COLOURS,
    SQUARE_HEIGHT,
    ChartFrame,
    Hovers,
    figure,
    legend,
    picture,
)
from recmill.reporting.html.markup import Markup, joined, tag
from recmill.reporting.html.numbers import short, written
from recmill.reporting.html.scale import AxisScale

_MOST_POINTS = 400  # of one line; more than there are pixels
Point = tuple[float, float, str]


def line_figure(chart: LineChart, number: int) -> Markup:
    points = [thinned(points_of(series)) for series in chart.series]
    frame = ChartFrame(
        AxisScale.fitted(chart.x, [x for line in points for x, _, _ in line], is_tight=True),
        AxisScale.fitted(chart.y, [y for line in points for _, y, _ in line], is_tight=False),
        SQUARE_HEIGHT if chart.square else HEIGHT,
    )
    hovers = Hovers()
    lines = [
        _line(frame, line, index, series, hovers)
        for index, (line, series) in enumerate(zip(points, chart.series, strict=True))
    ]
    axes = joined(frame.clip(f"chart{number}-clip"), frame.y_axis(), frame.x_axis())
    diagonal = _diagonal(frame) if chart.diagonal else joined()
    svg = picture(number, chart.title, described(chart), frame.height, hovers, axes, diagonal, *lines)
    shapes = ["line" if series.line else "dot" for series in chart.series]
    return figure(chart.title, legend([one.name for one in chart.series], shapes, chart.diagonal), svg)


def points_of(series: Series) -> list[Point]:
    assert len(series.x) == len(series.y), "a point has an x and a y"
    assert len(series.notes) in (0, len(series.x)), "each point has a note, or none has"
    return list(zip(series.x, series.y, series.notes or ("",) * len(series.x), strict=True))


def thinned(points: list[Point]) -> list[Point]:
    """Reduce the points to draw; the highest, the lowest and a gap of every stretch stay, so no spike is lost."""
    if len(points) <= _MOST_POINTS:
        return points
    edges = [len(points) * part // (_MOST_POINTS // 3) for part in range(_MOST_POINTS // 3 + 1)]
    return [points[index] for start, end in pairwise(edges) for index in sorted(_telling(points, start, end))]


def _telling(points: list[Point], start: int, end: int) -> set[int]:
    """The lowest and the highest point of a stretch, and the first that cannot be shown."""
    shown = [index for index in range(start, end) if math.isfinite(points[index][1])]
    gaps = [index for index in range(start, end) if not math.isfinite(points[index][1])]
    ordered = sorted(shown, key=lambda index: points[index][1])
    return {*ordered[:1], *ordered[-1:], *gaps[:1]}


def described(chart: LineChart) -> str:
    """A description of the chart: for each line, the number of points, its range, and its extremes."""
    return " ".join([f"{chart.y.label} over {chart.x.label}.", *map(_described, chart.series)])


def _described(series: Series) -> str:
    shown = [(x, y) for x, y in zip(series.x, series.y, strict=True) if math.isfinite(y)]
    if not shown:
        return f"{series.name}: no data."
    (first_x, first_y), (last_x, last_y) = shown[0], shown[-1]
    lowest, highest = min(y for _, y in shown), max(y for _, y in shown)
    return (
        f"{series.name}: {len(shown)} points from {written(first_y)} at {short(first_x)} to {written(last_y)} at"
        f" {short(last_x)}, lowest {written(lowest)}, highest {written(highest)}."
    )


def _line(frame: ChartFrame, points: list[Point], index: int, series: Series, hovers: Hovers) -> Markup:
    pieces = list(_pieces(frame, points))
    colour = f"s{index % NUM_COLOURS}"
    path = "".join(_path(piece) for piece in pieces if len(piece) > 1 and series.line)
    alone = [piece[0] for piece in pieces if len(piece) == 1]
    dots = [place for piece in pieces for place in piece] if series.dots or not series.line else alone
    for x, y, note in points:
        place = frame.at(x, y)
        if place is not None:
            text = f"{series.name}: {written(float(y))}{', ' if note else ''}{note}"
            hovers.add(place, f"{frame.x.axis.label} {_exact(x)}", index, text)
    drawn = [tag("circle", class_=f"dot {colour}", cx=x, cy=y, r=3) for x, y in dots]
    return joined(tag("path", class_=f"line {colour}", d=path) if path else "", *drawn)


def _pieces(frame: ChartFrame, points: list[Point]) -> Iterator[list[tuple[float, float]]]:
    """Stretches of visible points, without the gaps between them."""
    piece: list[tuple[float, float]] = []
    for x, y, _ in points:
        place = frame.at(x, y)
        if place is not None:
            piece.append(place)
        elif piece:
            yield piece
            piece = []
    if piece:
        yield piece


def _path(places: list[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)


def _diagonal(frame: ChartFrame) -> Markup:
    low, high = max(frame.x.low, frame.y.low), min(frame.x.high, frame.y.high)
    ends = [place for value in (low, high) if (place := frame.at(value, value)) is not None]
    return tag("path", class_="diagonal", d=_path(ends)) if len(ends) == 2 else joined()


def _exact(x: float) -> str:
    return f"{x:,.0f}" if float(x).is_integer() else written(float(x))
