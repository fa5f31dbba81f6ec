"""Histograms and bar charts as SVG."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

from recmill.reporting.html.content import Axis, BarChart, Heights, HistogramChart
from recmill.reporting.html.frame import (
    HEIGHT,
    LEFT,
    NUM_COLOURS,
    RIGHT,
    WIDTH,
    ChartFrame,
    Hovers,
    figure,
    legend,
    picture,
)
from recmill.reporting.html.markup import Markup, joined, tag
from recmill.reporting.html.numbers import written
from recmill.reporting.html.scale import AxisScale

_LETTER_WIDTH = 6.5  # approximate width of a letter in the labels


def histogram_figure(chart: HistogramChart, number: int) -> Markup:
    for series in chart.series:
        assert len(series.values) == len(chart.edges) - 1, "there is one edge more than there are bins"
    heights = [value for series in chart.series for value in series.values]
    frame = ChartFrame(
        AxisScale.fitted(chart.x, chart.edges, True), AxisScale.fitted(_from_zero(chart.y), heights, False)
    )
    hovers = Hovers()
    shapes = [_steps(frame, chart, index, hovers) for index in range(len(chart.series))]
    axes = joined(frame.clip(f"chart{number}-clip"), frame.y_axis(), frame.x_axis())
    text = f"{chart.y.label} over {chart.x.label}. " + " ".join(
        _described(series, [f"from {written(low)} to {written(high)}" for low, high in pairwise(chart.edges)])
        for series in chart.series
    )
    svg = picture(number, chart.title, text, HEIGHT, hovers, axes, *shapes)
    return figure(
        chart.title, legend([series.name for series in chart.series], ["bar"] * len(chart.series)), svg
    )


def bar_figure(chart: BarChart, number: int) -> Markup:
    for series in chart.series:
        assert len(series.values) == len(chart.labels), "every label has a bar"
    ends = [end for series in chart.series for end in _ends(series)]
    across = AxisScale.fitted(Axis("", low=0, high=max(1, len(chart.labels))), (), True)
    frame = ChartFrame(across, AxisScale.fitted(_from_zero(chart.y, min(ends, default=0.0)), ends, False))
    hovers = Hovers()
    shapes = list(_bars(frame, chart, hovers))
    clip = frame.clip(f"chart{number}-clip")
    axes = joined(clip, frame.y_axis(), frame.base_line(), _labels(frame, chart.labels))
    text = f"{chart.y.label}. " + " ".join(_described(series, list(chart.labels)) for series in chart.series)
    svg = picture(number, chart.title, text, HEIGHT, hovers, axes, *shapes)
    return figure(
        chart.title, legend([series.name for series in chart.series], ["bar"] * len(chart.series)), svg
    )


def _from_zero(axis: Axis, lowest: float = 0.0) -> Axis:
    """Bars start at zero, so the axis includes it."""
    return Axis(axis.label, axis.scale, 0.0, axis.high) if axis.low is None and lowest >= 0 else axis


def _described(series: Heights, places: list[str]) -> str:
    shown = [
        (value, place) for value, place in zip(series.values, places, strict=True) if math.isfinite(value)
    ]
    if not shown:
        return f"{series.name}: no data."
    value, place = max(shown, key=lambda pair: pair[0])
    return f"{series.name}: highest, {written(float(value))}, {place}."


def _steps(frame: ChartFrame, chart: HistogramChart, index: int, hovers: Hovers) -> Markup:
    """The outline of one histogram, filled."""
    series = chart.series[index]
    base, outline = frame.up(0), ""
    for (low, high), value in zip(pairwise(chart.edges), series.values, strict=True):
        left, right = frame.at(low, value), frame.at(high, value)
        if left is None or right is None:
            continue
        outline = outline or f"M{left[0]:.1f} {base:.1f}"
        outline += f"L{left[0]:.1f} {left[1]:.1f}H{right[0]:.1f}"
        heading = f"{chart.x.label} {written(float(low))} to {written(float(high))}"
        hovers.add(
            ((left[0] + right[0]) / 2, left[1]), heading, index, f"{series.name}: {written(float(value))}"
        )
    if not outline:
        return joined()
    return tag("path", class_=f"bar see-through s{index % NUM_COLOURS}", d=f"{outline}V{base:.1f}Z")


def _bars(frame: ChartFrame, chart: BarChart, hovers: Hovers) -> Iterator[Markup]:
    zero = frame.up(frame.y.place(max(0.0, frame.y.low)) or 0.0)
    width = 0.8 / max(1, len(chart.series))
    for index, series in enumerate(chart.series):
        for group, (value, margin) in enumerate(_with_margins(series)):
            left = frame.at(group + 0.1 + index * width, value)
            right = frame.at(group + 0.1 + (index + 1) * width, value)
            if left is None or right is None:
                continue
            (start, top), end = left, right[0]
            text = f"{series.name}: {written(float(value))}{f' ± {written(float(margin))}' if margin else ''}"
            middle = frame.across(frame.x.place(group + 0.5) or 0.0)
            hovers.add((middle, top), chart.labels[group], index, text)
            yield tag(
                "rect",
                class_=f"bar s{index % NUM_COLOURS}",
                x=start + 0.5,
                y=min(top, zero),
                width=max(0.5, end - start - 1),
                height=abs(zero - top),
            )
            yield _error_bar(frame, (start + end) / 2, value, margin)


def _error_bar(frame: ChartFrame, x: float, value: float, margin: float) -> Markup:
    low, high = frame.y.place(value - margin), frame.y.place(value + margin)
    if not margin or low is None or high is None:
        return joined()
    top, bottom = frame.up(high), frame.up(low)
    return tag("path", class_="error", d=f"M{x - 3:.1f} {top:.1f}h6M{x:.1f} {top:.1f}V{bottom:.1f}m-3 0h6")


def _labels(frame: ChartFrame, labels: tuple[str, ...]) -> Markup:
    """Names under the bars, truncated to their width; when there are many, only every n-th."""
    room = (WIDTH - LEFT - RIGHT) / max(1, len(labels))
    every = max(1, math.ceil(_LETTER_WIDTH * 7 / room))
    letters = max(2, int(room * every / _LETTER_WIDTH))
    return joined(
        *(
            tag(
                "text",
                _cut(label, letters),
                x=LEFT + (group + 0.5) * room,
                y=frame.up(0) + 16,
                text_anchor="middle",
            )
            for group, label in enumerate(labels)
            if group % every == 0
        )
    )


def _cut(label: str, letters: int) -> str:
    return label if len(label) <= letters else label[: letters - 1] + "…"


def _ends(series: Heights) -> list[float]:
    """The values that the axis must cover."""
    bars = [(value, margin) for value, margin in _with_margins(series) if math.isfinite(value)]
    return [end for value, margin in bars for end in (value, value + margin)]


def _with_margins(series: Heights) -> list[tuple[float, float]]:
    margins = series.margins or (0.0,) * len(series.values)
    return list(
        zip(series.values, [margin if math.isfinite(margin) else 0.0 for margin in margins], strict=True)
    )
