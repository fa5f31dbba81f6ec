"""Where global batches lie in units of rows, and which rows of them each rank has. Arithmetic, without any row."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from recmill.dataset.batch import Cursor
from recmill.errors import ArtifactError


class BatchSchedule:
    """Where the global batches of what is left of an epoch lie in its units. Numbers of rows are all it needs."""

    def __init__(self, unit_rows: Sequence[int], batch_size: int, cursor: Cursor) -> None:
        self.batch_size = batch_size
        self.epoch = cursor.epoch
        self.first_unit = cursor.unit
        self.ends = list(itertools.accumulate(unit_rows))
        if cursor.unit >= len(unit_rows) or cursor.row >= unit_rows[cursor.unit]:
            raise ArtifactError(
                f"The run stopped at row {cursor.row:,} of unit {cursor.unit:,}, which its rows do not have now "
                f"({len(unit_rows):,} units). Resume with the rows that the run began with, or train anew."
            )
        self.start = self._begin_of(cursor.unit) + cursor.row

    @property
    def num_units(self) -> int:
        return len(self.ends)

    @property
    def num_batches(self) -> int:
        return -(-(self.ends[-1] - self.start) // self.batch_size)

    def size(self, batch: int) -> int:
        return min(self.batch_size, self.ends[-1] - self.start - batch * self.batch_size)

    def cursor_after(self, batch: int) -> Cursor:
        """The place of the next row, written in one way only: never as the end of a unit."""
        row = self.start + batch * self.batch_size + self.size(batch)
        if row == self.ends[-1]:
            return Cursor(self.epoch + 1)
        unit = bisect.bisect_right(self.ends, row)
        return Cursor(self.epoch, unit, row - self._begin_of(unit))

    def parts(self, unit: int) -> list[UnitSlice]:
        """A unit's rows that are still to come, batch by batch."""
        row, end = max(self.start, self._begin_of(unit)), self.ends[unit]
        found = []
        while row < end:
            batch, place = divmod(row - self.start, self.batch_size)
            rows = min(end - row, self.size(batch) - place)
            found.append(UnitSlice(batch, place, row - self._begin_of(unit), rows))
            row += rows
        return found

    def _begin_of(self, unit: int) -> int:
        return self.ends[unit - 1] if unit else 0


@dataclass(frozen=True)
class UnitSlice:
    """Rows of one unit that belong to one global batch: where they begin in the batch and in the unit."""

    batch: int
    place: int
    row: int
    rows: int

    def of_rank(self, cuts: Sequence[int], rank: int) -> tuple[int, int]:
        """Rows of the unit that a rank has, when `cuts` are the places in the batch at which the ranks' rows begin."""
        begin = min(max(cuts[rank] - self.place, 0), self.rows)
        end = min(max(cuts[rank + 1] - self.place, 0), self.rows)
        return self.row + begin, self.row + end


def cuts_of(shares: Sequence[float], size: int) -> list[int]:
    """Places at which the rows of each rank begin, and the end: whole rows, as near to the shares as can be."""
    total, so_far = sum(shares), itertools.accumulate(shares, initial=0.0)
    return [round(size * part / total) for part in so_far]
