"""Small tables for people: plain text for a terminal, HTML for a notebook."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

Rows = Sequence[Sequence[str]]


def text_table(header: Sequence[str], rows: Rows) -> str:
    """Columns as wide as their longest cell."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = (
        "   ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))
        for row in (header, *rows)
    )
    return "\n".join(line.rstrip() for line in lines)


def html_table(header: Sequence[str], rows: Rows) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    body = "".join(line(row, "td") for row in rows)
    return f"<table><thead>{line(header, 'th')}</thead><tbody>{body}</tbody></table>"
