"""The content of a report, as plain values. `page` and the chart modules render it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Cell = str | int | float | None


@dataclass(frozen=True)
class Fact:
    """A key figure: a name, its value, and perhaps a few words about it."""

    name: str
    value: Cell
    note: str = ""


@dataclass(frozen=True)
class ReportTable:
    """Rows of cells. A column of numbers is right-aligned; missing and infinite numbers show as a dash."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    title: str = ""
    folded: bool = False  # collapsed by default


@dataclass(frozen=True)
class Axis:
    """An axis of a chart; missing ends follow the data. `logit` is for probabilities."""

    label: str
    scale: Literal["linear", "log", "logit"] = "linear"
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Series:
    """A named line through points, in the given order, or only the points; values that are not finite leave a gap."""

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    notes: tuple[str, ...] = ()  # texts of the points: none, or one for each
    dots: bool = False
    line: bool = True


@dataclass(frozen=True)
class LineChart:
    """Lines over a common x. `diagonal` names a line of equal x and y, such as chance or perfect calibration."""

    title: str
    x: Axis
    y: Axis
    series: tuple[Series, ...]
    diagonal: str = ""
    square: bool = False


@dataclass(frozen=True)
class Heights:
    """One named set of bars; `margins` are half the lengths of their error bars."""

    name: str
    values: tuple[float, ...]
    margins: tuple[float, ...] = ()


@dataclass(frozen=True)
class HistogramChart:
    """Overlaid histograms over common bins; there is one edge more than there are values."""

    title: str
    x: Axis
    y: Axis
    edges: tuple[float, ...]
    series: tuple[Heights, ...]


@dataclass(frozen=True)
class BarChart:
    """Groups of bars, one group for each label."""

    title: str
    y: Axis
    labels: tuple[str, ...]
    series: tuple[Heights, ...]


Chart = LineChart | HistogramChart | BarChart


@dataclass(frozen=True)
class Section:
    """A section of a report; its parts appear in this order."""

    title: str
    text: tuple[str, ...] = ()
    facts: tuple[Fact, ...] = ()
    charts: tuple[Chart, ...] = ()
    tables: tuple[ReportTable, ...] = ()
    code: str = ""


@dataclass(frozen=True)
class Report:
    """A whole page: key figures on top, then the sections."""

    title: str
    facts: tuple[Fact, ...] = ()
    sections: tuple[Section, ...] = ()
    text: tuple[str, ...] = ()
