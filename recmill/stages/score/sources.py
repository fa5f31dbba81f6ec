"""What engines read when the rows are those of a Table, or the users and items of a bundle."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import polars as pl

from recmill.dataset.positions import file_of, offset_of, position
from recmill.dataset.shard import ShardFile
from recmill.dataset.table import Table
from recmill.recipe.recipe import POSITION

ROWS_AT_ONCE = 1 << 14
_ROWS_PER_UNIT = 1 << 18
_BYTES_PER_ENTITY = 256
_ENTITIES_AT_ONCE = 1 << 12


def file_and_offset(positions: pl.Series, files: Sequence[str]) -> list[pl.Series]:
    """Columns with the file of each row and its offset in the file."""
    names = pl.Series("file", list(files), dtype=pl.String)
    numbers = positions.to_numpy()
    return [names.gather(file_of(numbers)), pl.Series("offset", offset_of(numbers), dtype=pl.Int64)]


@dataclass(frozen=True)
class TableUnit:
    """Some row groups of a shard."""

    shard: int
    first_row: int
    groups: tuple[int, ...]
    num_rows: int
    num_bytes: int


@dataclass(frozen=True)
class TableRows:
    """Rows of a Table in order, some of its columns; a row's position is the shard's number and its own in it."""

    shards: tuple[ShardFile, ...]
    columns: tuple[str, ...]

    @classmethod
    def of(cls, table: Table, splits: Sequence[str], columns: Sequence[str]) -> TableRows:
        shards = [
            replace(shard, table=table.path.absolute()) for split in splits for shard in table.files(split)
        ]
        return cls(tuple(shards), tuple(dict.fromkeys(columns)))

    def units(self) -> list[TableUnit]:
        return [unit for number in range(len(self.shards)) for unit in self._cut(number)]

    def _cut(self, shard: int) -> Iterator[TableUnit]:
        metadata = self.shards[shard].metadata()
        first_row = num_rows = num_bytes = 0
        groups: list[int] = []
        for group in range(metadata.num_row_groups):
            groups.append(group)
            num_rows += metadata.row_group(group).num_rows
            num_bytes += metadata.row_group(group).total_byte_size
            if num_rows >= _ROWS_PER_UNIT or group == metadata.num_row_groups - 1:
                yield TableUnit(shard, first_row, tuple(groups), num_rows, num_bytes)
                first_row, num_rows, num_bytes, groups = first_row + num_rows, 0, 0, []

    def unit_bytes(self, unit: TableUnit) -> int:
        return unit.num_bytes

    def first_position(self, unit: TableUnit) -> int:
        return position(unit.shard, unit.first_row)

    def max_offset(self) -> int:
        return max((unit.first_row + unit.num_rows for unit in self.units()), default=0)

    def read(self, unit: TableUnit) -> Iterator[pl.DataFrame]:
        first = self.first_position(unit)
        for group in unit.groups:
            rows = self.shards[unit.shard].read(group, self.columns)
            for some in rows.iter_slices(ROWS_AT_ONCE):
                positions = pl.int_range(first, first + some.height, dtype=pl.Int64, eager=True)
                yield some.with_columns(positions.alias(POSITION))
                first += some.height


@dataclass(frozen=True)
class EntityRows:
    """The numbers from 0 to before `count`, as positions: users or items of a bundle."""

    count: int
    per_unit: int = ROWS_AT_ONCE

    def units(self) -> list[int]:
        return list(range(0, self.count, self.per_unit))

    def unit_bytes(self, unit: int) -> int:
        return _BYTES_PER_ENTITY * min(self.per_unit, self.count - unit)

    def first_position(self, unit: int) -> int:
        return unit

    def max_offset(self) -> int:
        return self.count

    def read(self, unit: int) -> Iterator[pl.DataFrame]:
        end = min(unit + self.per_unit, self.count)
        for first in range(unit, end, _ENTITIES_AT_ONCE):
            last = min(first + _ENTITIES_AT_ONCE, end)
            yield pl.DataFrame({POSITION: pl.int_range(first, last, dtype=pl.Int64, eager=True)})
