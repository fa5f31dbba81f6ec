"""Axes: round marks, ends that never meet, and values that cannot be shown."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recmill.reporting.html.content import Axis
from recmill.reporting.html.numbers import short, written, written_alike
from recmill.reporting.html.scale import AxisScale, _round_step

SCALES = ("linear", "log", "logit")


def labels(values, scale="linear", tight=False, **ends):
    return [tick.label for tick in AxisScale.fitted(Axis("", scale, **ends), values, tight).ticks()]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0, 1], ["0", "0.2", "0.4", "0.6", "0.8", "1"]),
        ([0.452, 0.691], ["0.45", "0.5", "0.55", "0.6", "0.65", "0.7"]),
        ([0, 41_234], ["0", "10k", "20k", "30k", "40k", "50k"]),
        ([-3, 3], ["-3", "-2", "-1", "0", "1", "2", "3"]),
        ([5], ["4.4", "4.6", "4.8", "5", "5.2", "5.4", "5.6"]),
        ([], ["0", "0.2", "0.4", "0.6", "0.8", "1"]),
    ],
)
def test_linear_marks_are_round(values, expected):
    assert labels(values) == expected


def test_a_tight_axis_ends_with_the_data():
    scale = AxisScale.fitted(Axis(""), [16, 4883], is_tight=True)
    assert (scale.low, scale.high) == (16, 4883)
    assert [tick.label for tick in scale.ticks()] == ["1k", "2k", "3k", "4k"]


def test_log_marks_are_powers_of_ten():
    assert labels([1e-4, 1e2], "log") == ["0.0001", "0.001", "0.01", "0.1", "1", "10", "100"]
    assert labels([1, 50], "log") == ["1", "2", "5", "10", "20", "50"]
    assert labels([0.62, 0.678], "log") == ["0.62", "0.63", "0.64", "0.65", "0.66", "0.67"]


def test_logit_marks_are_chances():
    assert labels([0.0005, 0.95], "logit") == ["0.001", "0.01", "0.1", "0.5", "0.9"]


def test_given_ends_are_kept():
    scale = AxisScale.fitted(Axis("", low=0, high=1), [-5, 0.3, 7], is_tight=False)
    assert (scale.low, scale.high) == (0, 1)


@pytest.mark.parametrize(
    ("scale", "value"),
    [("linear", math.nan), ("linear", -math.inf), ("log", 0.0), ("log", -1.0), ("logit", 1.5)],
)
def test_a_value_that_cannot_be_shown_has_no_place(scale, value):
    assert AxisScale.fitted(Axis("", scale), [0.25, 0.5, value], True).place(value) is None


@given(st.sampled_from(SCALES), st.lists(st.floats()), st.booleans())
def test_every_value_that_is_shown_is_between_the_ends(name, values, tight):
    scale = AxisScale.fitted(Axis("", name), values, tight)
    places = [place for value in values if (place := scale.place(value)) is not None]
    assert all(-1e-6 <= place <= 1 + 1e-6 for place in places)
    assert len(scale.ticks()) <= 30


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.80251, "0.8025"),
        (41_234.5, "41,234"),
        (12, "12"),
        (1_000_000, "1,000,000"),
        (0.0, "0.0"),
        (5.5e-7, "5.5e-07"),
        (math.nan, "–"),
        (math.inf, "–"),
        (None, "–"),
        ("text", "text"),
        (True, "True"),
    ],
)
def test_numbers_are_written_for_people(value, text):
    assert written(value) == text


def test_numbers_of_one_column_have_the_same_decimals():
    assert written_alike([0.5, 12.345, None, 0.001]) == ["0.50", "12.35", "–", "0.00"]


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (0.25, "0.25"), (1500, "1.5k"), (2e6, "2M"), (-3e9, "-3G"), (1e-7, "1e-07")]
)
def test_marks_are_short(value, text):
    assert short(value) == text


def test_a_length_that_is_a_hair_below_four_steps_has_a_step():
    """The logarithm of such a length rounds up to the next power of ten."""
    assert _round_step(4 * math.nextafter(1e-4, 0)) == pytest.approx(1e-4)
