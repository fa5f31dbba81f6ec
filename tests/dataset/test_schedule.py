"""Batches and cursors by arithmetic are those that the readers give."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recmill.dataset.schedule import BatchSchedule, Cursor, UnitSlice, cuts_of
from recmill.errors import ArtifactError


def test_a_batch_runs_across_units_and_the_cursor_never_stands_at_the_end_of_one() -> None:
    course = BatchSchedule([5, 3, 4], 4, Cursor(2))
    assert [course.size(batch) for batch in range(course.num_batches)] == [4, 4, 4]
    assert [course.cursor_after(batch) for batch in range(3)] == [Cursor(2, 0, 4), Cursor(2, 2), Cursor(3)]
    assert course.parts(0) == [UnitSlice(0, 0, 0, 4), UnitSlice(1, 0, 4, 1)]
    assert course.parts(1) == [UnitSlice(1, 1, 0, 3)]


def test_a_course_from_the_middle_begins_with_the_next_row() -> None:
    course = BatchSchedule([5, 3, 4], 4, Cursor(0, 1, 2))
    assert course.parts(1) == [UnitSlice(0, 0, 2, 1)]
    assert course.parts(2) == [UnitSlice(0, 1, 0, 3), UnitSlice(1, 0, 3, 1)]
    assert course.cursor_after(1) == Cursor(1)


def test_a_cursor_beyond_the_rows_is_an_error() -> None:
    with pytest.raises(ArtifactError, match="row 5 of unit 0"):
        BatchSchedule([5, 3], 4, Cursor(0, 0, 5))


def test_rows_go_to_ranks_by_their_shares() -> None:
    assert cuts_of([1, 1], 64) == [0, 32, 64]
    assert cuts_of([3, 1], 10) == [0, 8, 10]
    assert cuts_of([1, 1, 1], 2) == [0, 1, 1, 2]


@given(
    st.lists(st.integers(1, 20), min_size=1, max_size=8),
    st.integers(1, 25),
    st.lists(st.floats(0.1, 4), min_size=1, max_size=4),
    st.data(),
)
def test_every_row_that_is_left_goes_to_one_rank_of_one_batch(unit_rows, batch_size, shares, data) -> None:
    unit = data.draw(st.integers(0, len(unit_rows) - 1))
    cursor = Cursor(0, unit, data.draw(st.integers(0, unit_rows[unit] - 1)))
    course = BatchSchedule(unit_rows, batch_size, cursor)
    dealt = []
    sizes = dict.fromkeys(range(course.num_batches), 0)
    for place in range(unit, len(unit_rows)):
        for part in course.parts(place):
            cuts = cuts_of(shares, course.size(part.batch))
            spans = [part.of_rank(cuts, rank) for rank in range(len(shares))]
            dealt += [(place, row) for begin, end in spans for row in range(begin, end)]
            sizes[part.batch] += sum(end - begin for begin, end in spans)
    left = [(place, row) for place in range(len(unit_rows)) for row in range(unit_rows[place])]
    assert dealt == [row for row in left if row >= (cursor.unit, cursor.row)]
    assert list(sizes.values()) == [course.size(batch) for batch in range(course.num_batches)]
