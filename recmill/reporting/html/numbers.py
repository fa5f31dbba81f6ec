"""Formats numbers for people."""

from __future__ import annotations

import math
from collections.abc import Sequence

from recmill.reporting.html.content import Cell

NOTHING = "–"
_UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def is_number(cell: Cell) -> bool:
    return isinstance(cell, int | float) and not isinstance(cell, bool)


def written(cell: Cell) -> str:
    """Format a single value."""
    return written_alike([cell])[0]


def written_alike(cells: Sequence[Cell]) -> list[str]:
    """Format the values of a column: fractions with as many decimals as the largest needs for about four digits."""
    fractions = [abs(cell) for cell in cells if isinstance(cell, float) and math.isfinite(cell)]
    decimals = _decimals(max(fractions, default=0.0))
    return [_written(cell, decimals) for cell in cells]


def _decimals(largest: float) -> int | None:
    """Digits after the point; None when only powers of ten can show the number."""
    if largest == 0:
        return 1
    if largest < 1e-2:
        return None
    return 4 if largest < 10 else 2 if largest < 100 else 1 if largest < 1000 else 0


def _written(cell: Cell, decimals: int | None) -> str:
    if cell is None:
        return NOTHING
    if isinstance(cell, str | bool):
        return str(cell)
    if not math.isfinite(cell):
        return NOTHING
    if isinstance(cell, int):
        return f"{cell:,}"
    return f"{cell:.3g}" if decimals is None else f"{cell:,.{decimals}f}"


def short(value: float) -> str:
    """A few characters, as on an axis: 0.25, 1.5k, 2M."""
    for size, unit in _UNITS:
        if abs(value) >= size:
            return f"{value / size:.4g}{unit}"
    return f"{value:.6g}" if abs(value) >= 1e-4 or value == 0 else f"{value:.3g}"
