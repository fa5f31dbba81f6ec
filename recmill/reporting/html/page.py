"""The page: one self-contained file for screens, phones and paper, with a dark mode."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator
from importlib import resources
from itertools import count
from pathlib import Path

from recmill.artifacts.manifest import write_whole
from recmill.reporting.html.bars import bar_figure, histogram_figure
from recmill.reporting.html.content import (
    Chart,
    Fact,
    HistogramChart,
    LineChart,
    Report,
    ReportTable,
    Section,
)
from recmill.reporting.html.lines import line_figure
from recmill.reporting.html.markup import Markup, joined, tag
from recmill.reporting.html.numbers import is_number, written, written_alike

_LEAST_SECTIONS_FOR_CONTENTS = 3


def write_report(path: Path, report: Report) -> None:
    """Write the page atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, page(report))


def page(report: Report) -> str:
    """The report as one HTML document, which loads nothing and runs no script but its own."""
    style, script = _own_file("page.css"), _own_file("page.js")
    numbers = count(1)
    body = tag(
        "main",
        tag("header", tag("h1", report.title), *_paragraphs(report.text), _facts(report.facts)),
        _contents(report.sections),
        *(_section(section, number, numbers) for number, section in enumerate(report.sections, 1)),
    )
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=_policy(script)),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", report.title),
        tag("style", Markup(style)),
    )
    whole = tag("html", head, tag("body", body, tag("script", Markup(script))), lang="en")
    return f"<!DOCTYPE html>\n{whole}\n"


def _own_file(name: str) -> str:
    return resources.files("recmill.reporting.html").joinpath(name).read_text(encoding="utf-8")


def _policy(script: str) -> str:
    """A policy that browsers enforce: whatever the page contains, nothing is fetched and only our script runs."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"


def _paragraphs(texts: tuple[str, ...]) -> Iterator[Markup]:
    return (tag("p", text) for text in texts)


def _facts(facts: tuple[Fact, ...]) -> Markup:
    if not facts:
        return joined()
    return tag("dl", *map(_fact, facts), class_="facts")


def _fact(fact: Fact) -> Markup:
    note = tag("small", fact.note) if fact.note else ""
    return tag("div", tag("dt", fact.name), tag("dd", written(fact.value), note))


def _contents(sections: tuple[Section, ...]) -> Markup:
    if len(sections) < _LEAST_SECTIONS_FOR_CONTENTS:
        return joined()
    links = [tag("a", section.title, href=f"#section{number}") for number, section in enumerate(sections, 1)]
    return tag("nav", *links, aria_label="Contents")


def _section(section: Section, number: int, numbers: Iterator[int]) -> Markup:
    charts = [_figure(chart, next(numbers)) for chart in section.charts]
    return tag(
        "section",
        tag("h2", section.title),
        *_paragraphs(section.text),
        _facts(section.facts),
        tag("div", *charts, class_="charts") if charts else "",
        *map(_table, section.tables),
        tag("pre", tag("code", section.code), tabindex=0) if section.code else "",
        id=f"section{number}",
    )


def _figure(chart: Chart, number: int) -> Markup:
    if isinstance(chart, LineChart):
        return line_figure(chart, number)
    return histogram_figure(chart, number) if isinstance(chart, HistogramChart) else bar_figure(chart, number)


def _table(table: ReportTable) -> Markup:
    for row in table.rows:
        assert len(row) == len(table.columns), "every row has a cell for every column"
    columns = [[row[column] for row in table.rows] for column in range(len(table.columns))]
    sides = ["number" if _is_numeric(cells) else None for cells in columns]
    heads = [
        tag("th", name, scope="col", class_=side) for name, side in zip(table.columns, sides, strict=True)
    ]
    texts = zip(*map(written_alike, columns), strict=True)
    rows = [
        tag("tr", *(tag("td", text, class_=side) for text, side in zip(row, sides, strict=True)))
        for row in texts
    ]
    caption = tag("caption", table.title) if table.title and not table.folded else ""
    drawn = tag("table", caption, tag("thead", tag("tr", *heads)), tag("tbody", *rows))
    scrolled = tag(
        "div", drawn, class_="scrolled", tabindex=0, role="region", aria_label=table.title or "Table"
    )
    return tag("details", tag("summary", table.title or "Numbers"), scrolled) if table.folded else scrolled


def _is_numeric(cells: list[str | int | float | None]) -> bool:
    return any(map(is_number, cells)) and all(cell is None or is_number(cell) for cell in cells)
