"""The schedule of global batches over units of rows, and of each rank's slices. Pure arithmetic on row counts."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from recmill.errors import ArtifactError


@dataclass(frozen=True)
class Cursor:
    """Reading progress: the next row to read. Part of every checkpoint."""

    epoch: int = 0
    unit: int = 0
    row: int = 0


class UnitRows:
    """Row counts of the units of an epoch, in reading order: converts cursors to rows and back.

    While a Table grows, the `total` is known before all units are.
    """

    def __init__(self, unit_rows: Iterable[int] = (), total: int | None = None) -> None:
        self.ends = list(itertools.accumulate(unit_rows))
        self._total = total

    def add(self, num_rows: int) -> None:
        """Append a unit."""
        self.ends.append(self.begin(len(self.ends)) + num_rows)

    @property
    def total(self) -> int:
        return self._total if self._total is not None else self.begin(len(self.ends))

    def begin(self, unit: int) -> int:
        """Number of rows before a unit."""
        return self.ends[unit - 1] if unit else 0

    def row_of(self, cursor: Cursor) -> int:
        """Number of rows before the cursor, which must be inside a unit."""
        if cursor.unit >= len(self.ends) or self.begin(cursor.unit) + cursor.row >= self.ends[cursor.unit]:
            raise ArtifactError(
                f"The run stopped at row {cursor.row:,} of unit {cursor.unit:,}, which its rows do not have now "
                f"({len(self.ends):,} units). Resume with the rows that the run began with, or train anew."
            )
        return self.begin(cursor.unit) + cursor.row

    def cursor(self, epoch: int, row: int) -> Cursor:
        """The cursor at a row, in canonical form: never at the end of a unit."""
        if row == self.total:
            return Cursor(epoch + 1)
        unit = bisect.bisect_right(self.ends, row)
        return Cursor(epoch, unit, row - self.begin(unit))


class BatchSchedule:
    """The schedule of global batches over the rest of an epoch's units. It needs only row counts."""

    def __init__(self, unit_rows: Sequence[int], batch_size: int, cursor: Cursor) -> None:
        self.batch_size = batch_size
        self.epoch = cursor.epoch
        self.first_unit = cursor.unit
        self.units = UnitRows(unit_rows)
        self.start = self.units.row_of(cursor)

    @property
    def num_units(self) -> int:
        return len(self.units.ends)

    @property
    def num_batches(self) -> int:
        return -(-(self.units.total - self.start) // self.batch_size)

    def size(self, batch: int) -> int:
        return min(self.batch_size, self.units.total - self.start - batch * self.batch_size)

    def cursor_after(self, batch: int) -> Cursor:
        return self.units.cursor(self.epoch, self.start + batch * self.batch_size + self.size(batch))

    def parts(self, unit: int) -> list[UnitSlice]:
        """The remaining rows of a unit, batch by batch."""
        first, end = self.units.begin(unit), self.units.ends[unit]
        row = max(self.start, first)
        slices = []
        while row < end:
            batch, offset = divmod(row - self.start, self.batch_size)
            rows = min(end - row, self.size(batch) - offset)
            slices.append(UnitSlice(batch, offset, row - first, rows))
            row += rows
        return slices


@dataclass(frozen=True)
class UnitSlice:
    """Rows of one unit in one global batch: their offsets in the batch and in the unit."""

    batch: int
    offset: int
    row: int
    rows: int

    def of_rank(self, cuts: Sequence[int], rank: int) -> tuple[int, int]:
        """The rows of the unit that a rank takes; `cuts` are the offsets of the ranks' slices in the batch."""
        begin = min(max(cuts[rank] - self.offset, 0), self.rows)
        end = min(max(cuts[rank + 1] - self.offset, 0), self.rows)
        return self.row + begin, self.row + end


def cuts_of(shares: Sequence[float], size: int) -> list[int]:
    """Offsets at which the ranks' slices begin, and the end: whole rows, as close to the given sizes as possible."""
    total, so_far = sum(shares), itertools.accumulate(shares, initial=0.0)
    return [round(size * part / total) for part in so_far]
