"""Validation of labels: binary labels, where 1 is positive, such as a click, and numeric ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import polars as pl

from recmill.errors import FeatureError
from recmill.recipe.check_inputs import how_to_threshold

Labels = np.ndarray[Any, Any]

_SHOWN = 6  # values that an error lists


def is_positive(label: str) -> pl.Expr:
    """Whether a row's label is 1; the rows have their labels already."""
    return pl.col(label) == 1


def check_binary(label: str, values: Labels, column: str = "rating") -> None:
    """Raise FeatureError with the actual values unless all are 0 or 1; the remedy names `column`."""
    is_wrong = (values != 0) & (values != 1)
    if not is_wrong.any():
        return
    found, counts = np.unique(values, return_counts=True)
    listed = [f"{value:g} in {count:,}" for value, count in zip(found, counts, strict=True)][:_SHOWN]
    more = f" and {len(found) - _SHOWN} other values" if len(found) > _SHOWN else ""
    raise FeatureError(
        f'Label "{label}" is neither 0 nor 1 in {int(is_wrong.sum()):,} of {len(values):,} rows: '
        f"{', '.join(listed)}{more}; {how_to_threshold(column)}."
    )


def check_numbers_of(label: str, values: Labels, least: float | None = None) -> None:
    """Raise FeatureError unless all of a label's values are numbers of at least `least`."""
    is_wrong = ~np.isfinite(values) if least is None else ~(np.isfinite(values) & (values >= least))
    if is_wrong.any():
        expected = (
            "numbers" if least is None else f"numbers from {least:g}, as its loss takes logarithms of them"
        )
        raise FeatureError(
            f'Label "{label}" is {values[is_wrong][0]:g} in {int(is_wrong.sum()):,} of {len(values):,} rows; expected '
            f"{expected}. Add a fill, clip or filter and prepare again."
        )


def check_weights(label: str, values: Labels) -> None:
    """Raise FeatureError unless these are valid weights of rows."""
    is_wrong = ~(np.isfinite(values) & (values >= 0))
    if is_wrong.any():
        raise FeatureError(
            f'ranking.weight "{label}" is {values[is_wrong][0]:g} in {int(is_wrong.sum()):,} of {len(values):,} rows; '
            "weights of rows are numbers from 0. Clip it in the label's steps and prepare again."
        )


def check_follows(labels: Mapping[str, Labels]) -> None:
    """Raise FeatureError unless every row with a conversion, the second label, has a click too, the first."""
    (click, clicks), (conversion, conversions) = labels.items()
    number = int(((conversions == 1) & (clicks == 0)).sum())
    if number:
        raise FeatureError(
            f'Label "{conversion}" is 1 in {number:,} of {len(clicks):,} rows whose label "{click}" is 0; esmm learns '
            f'what follows a click. Make "{click}" 1 in these rows too, or use model = "mmoe".'
        )
