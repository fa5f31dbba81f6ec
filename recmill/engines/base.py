"""What an engine offers: the few ways in which prepare moves rows. What happens to them is written once, elsewhere.

Functions given to an engine take and return Polars frames and treat them as values; each may run in another
thread, process or machine. Rows carry their place in the log (`POSITION`), so no result depends on how the log
was cut or in which order the pieces ran.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import polars as pl

from recmill.features.kernels import CountOptions, ExtractedValues, Measurements
from recmill.recipe.recipe import SPLITS

MapFunction = Callable[[pl.DataFrame], pl.DataFrame]
Order = Literal["log", "shuffle", "interleave"]
Format = Literal["parquet", "int32"]


class RowSource(Protocol):
    """Rows that can be read in pieces, in any order, more than once."""

    def units(self) -> Sequence[Any]: ...
    def unit_bytes(self, unit: Any) -> int:
        """About how much a unit's rows take as text."""

    def first_position(self, unit: Any) -> int: ...
    def max_offset(self) -> int:
        """About the largest offset that a position holds."""

    def read(self, unit: Any) -> Iterator[pl.DataFrame]: ...


@dataclass(frozen=True)
class ShardRecord:
    """One Parquet file of a Table."""

    split: str
    file: str
    rows: int
    num_bytes: int
    digest: str
    checksums: tuple[str, ...] = ()  # of the bytes, where they are Parquet


class Engine(Protocol):
    """Where prepare runs. `Frame` is the engine's own lazy view of rows."""

    def read(self, source: RowSource) -> Any:
        """A frame of a source's rows."""

    def map(self, frame: Any, function: MapFunction) -> Any:
        """A frame whose every row depends on one row of the input (or on none, when it is dropped)."""

    def measure(
        self,
        frame: Any,
        extract: Callable[[pl.DataFrame], ExtractedValues],
        counts: Mapping[str, CountOptions],
        title: str,
    ) -> Measurements:
        """Moments and counts of extracted columns, in one pass. Counting is a shuffle: it may exceed memory."""

    def group(self, frame: Any, by: Sequence[str], function: MapFunction, title: str) -> Any:
        """A frame made by calling `function` with all rows of each group, in log order; several groups a call."""

    def collect(self, frame: Any) -> pl.DataFrame:
        """All rows, which must be few."""

    def write(
        self,
        frame: Any,
        into: Path,
        order: Order,
        seed: int,
        format: Format = "parquet",
        folders: Sequence[str] = SPLITS,
    ) -> list[ShardRecord]:
        """Write `<into>/<folder>/shard-*`, a folder for each value of SPLIT.

        Resumes: shards that an earlier call finished are kept.
        """

    @property
    def tasks_at_once(self) -> int:
        """How many pieces are worked through at the same time."""

    def close(self) -> None: ...
