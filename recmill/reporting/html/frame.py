"""Common to all charts: the size of the picture, its axes, its legend, and the values shown on hover."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from recmill.reporting.html.markup import Markup, joined, tag
from recmill.reporting.html.scale import AxisScale

WIDTH = 400
HEIGHT = 250
SQUARE_HEIGHT = 360
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 10, 44
NUM_COLOURS = 6


@dataclass
class Hovers:
    """Hover texts: for positions along x, a heading and a line for each series."""

    lines: dict[float, dict[int, tuple[float, str]]] = field(default_factory=dict)
    headings: dict[float, str] = field(default_factory=dict)

    def add(self, place: tuple[float, float], heading: str, series: int, text: str) -> None:
        x = round(place[0], 1)
        self.headings[x] = heading
        self.lines.setdefault(x, {})[series] = (round(place[1], 1), text)

    def json(self) -> str:
        """[[x, heading, [[y, colour, text], ...]], ...] from left to right."""
        found = [
            [x, self.headings[x], [[y, series % NUM_COLOURS, text] for series, (y, text) in lines.items()]]
            for x, lines in sorted(self.lines.items())
        ]
        return json.dumps(found, separators=(",", ":"))


@dataclass(frozen=True)
class ChartFrame:
    """The area that a chart draws in."""

    x: AxisScale
    y: AxisScale
    height: int = HEIGHT

    def across(self, share: float) -> float:
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def up(self, share: float) -> float:
        return self.height - BOTTOM - share * (self.height - TOP - BOTTOM)

    def at(self, x: float, y: float) -> tuple[float, float] | None:
        """The coordinates of a point; None outside of an axis."""
        across, up = self.x.place(x), self.y.place(y)
        return None if across is None or up is None else (self.across(across), self.up(up))

    def y_axis(self) -> Markup:
        marks = [
            joined(
                tag(
                    "line", class_="grid", x1=LEFT, x2=WIDTH - RIGHT, y1=self.up(t.place), y2=self.up(t.place)
                ),
                tag("text", t.label, x=LEFT - 6, y=self.up(t.place) + 4, text_anchor="end"),
            )
            for t in self.y.ticks()
        ]
        middle = (TOP + self.height - BOTTOM) / 2
        label = tag(
            "text",
            self.y.axis.label,
            x=0,
            y=0,
            transform=f"translate(12 {middle:g}) rotate(-90)",
            text_anchor="middle",
        )
        return joined(*marks, label)

    def x_axis(self) -> Markup:
        bottom = self.up(0)
        marks = [
            joined(
                tag(
                    "line", class_="grid", x1=self.across(t.place), x2=self.across(t.place), y1=TOP, y2=bottom
                ),
                tag("text", t.label, x=self.across(t.place), y=bottom + 16, text_anchor="middle"),
            )
            for t in self.x.ticks()
        ]
        return joined(*marks, self.base_line(), self.x_label(self.x.axis.label))

    def base_line(self) -> Markup:
        return tag("line", class_="axis", x1=LEFT, x2=WIDTH - RIGHT, y1=self.up(0), y2=self.up(0))

    def x_label(self, label: str) -> Markup:
        return tag("text", label, x=(LEFT + WIDTH - RIGHT) / 2, y=self.height - 8, text_anchor="middle")

    def clip(self, name: str) -> Markup:
        """Keeps what is drawn inside the axes."""
        area = tag(
            "rect",
            x=LEFT - 4,
            y=TOP - 4,
            width=WIDTH - LEFT - RIGHT + 8,
            height=self.height - TOP - BOTTOM + 8,
        )
        return tag("clipPath", area, id=name)


def picture(
    number: int, title: str, description: str, height: int, hovers: Hovers, axes: Markup, *shapes: Markup
) -> Markup:
    """The SVG of one chart. Screen readers get the title and the description."""
    body = shapes if hovers.lines else (_nothing(height),)
    return tag(
        "svg",
        tag("title", title, id=f"chart{number}-title"),
        tag("desc", description, id=f"chart{number}-text"),
        axes,
        tag("g", *body, clip_path=f"url(#chart{number}-clip)"),
        tag("line", class_="pointer", x1=0, x2=0, y1=TOP, y2=height - BOTTOM),
        viewBox=f"0 0 {WIDTH} {height}",
        role="img",
        aria_labelledby=f"chart{number}-title chart{number}-text",
        tabindex=0,
        data_hover=hovers.json(),
    )


def figure(title: str, legend: Markup, svg: Markup) -> Markup:
    return tag("figure", tag("figcaption", title), legend, svg, tag("div", class_="tip", hidden="hidden"))


def legend(names: list[str], shapes: list[str], diagonal: str = "") -> Markup:
    """Names with their shapes (bar, line or dot) and colours; nothing when there is only one."""
    entries = [
        _entry(f"{shape} s{number % NUM_COLOURS}", name)
        for number, (name, shape) in enumerate(zip(names, shapes, strict=True))
    ]
    entries += [_entry("diagonal", diagonal)] if diagonal else []
    return tag("ul", *entries, class_="legend") if len(entries) > 1 else joined()


def _entry(class_: str, name: str) -> Markup:
    if class_.startswith("bar"):
        sample = tag("rect", class_=class_, x=4, y=0, width=14, height=10)
    elif class_.startswith("dot"):
        sample = tag("circle", class_=class_, cx=11, cy=5, r=4)
    else:
        sample = tag("path", class_=class_, d="M0 5H22")
    return tag("li", tag("svg", sample, viewBox="0 0 22 10", width=22, height=10, aria_hidden="true"), name)


def _nothing(height: int) -> Markup:
    middle = (LEFT + WIDTH - RIGHT) / 2
    return tag("text", "no data", x=middle, y=(TOP + height - BOTTOM) / 2, text_anchor="middle")
