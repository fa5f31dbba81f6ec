"""Decisions about a log before its recipe is written: split, features, models and their sizes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import polars as pl

from recmill.features.expressions import columns_read, matches
from recmill.recipe.kinds import kind_of
from recmill.recipe.recipe import Column, Holdout
from recmill.stages.init.columns import ColumnProfile, ColumnType, FileProfile
from recmill.stages.init.names import CONTEXTS
from recmill.stages.init.positives import Positives
from recmill.stages.init.roles import TimeColumn, seconds_of
from recmill.stages.init.sides import Role, SideFile, is_category

_ENOUGH_USERS = 200  # users known before a cut by time who must come back after it
_MAX_CONTEXT = 20
_TRAINED_ROWS = 2_000_000  # positive rows per training run: about a minute
_SMALL_LOG = 50_000
_STEPS_IN_EPOCH = 50
_MANY_IDS, _RARE = 50_000, 0.3


@dataclass(frozen=True)
class ModelSizes:
    """The sizes of the towers, and how long they train."""

    embedding_dim: int
    batch_size: int
    epochs: int
    reason: str


@dataclass(frozen=True)
class Decisions:
    """A log, its columns' roles, and the decisions that follow."""

    events: FileProfile
    user: ColumnProfile
    item: ColumnProfile
    time: TimeColumn | None
    positives: Positives
    sides: tuple[SideFile, ...]
    file_names: tuple[str, ...]  # of the events and of each side, below the data directory

    @property
    def is_by_position(self) -> bool:
        return not self.events.has_names

    @property
    def summary(self) -> str:
        what = "interactions" if self.positives.sql is None else f"positive where {self.positives.sql}"
        return f"{self.events.num_rows:,} events of {self.file_names[0]}: {what}."

    @cached_property
    def label_columns(self) -> list[ColumnProfile]:
        if self.positives.sql is None:
            return []
        read = columns_read(self.positives.sql, self._kinds)
        return [column for column in self.events.columns if column.name in read]

    @property
    def _kinds(self) -> dict[str, str]:
        return {column.name: kind_of(Column(column.name, column.type)) for column in self.events.columns}

    @cached_property
    def is_positive(self) -> pl.Series:
        if self.positives.sql is None:
            return pl.Series([True]).new_from_index(0, self.events.num_rows)
        return matches(self.positives.sql, pl.DataFrame([c.values.alias(c.name) for c in self.label_columns]))

    # columns

    def min_count(self, key: ColumnProfile) -> int:
        """2 for ids of which many occur once: one row cannot train a vector, and they would be most of the work."""
        if key.num_unique < _MANY_IDS:
            return 1
        once = int((key.present.value_counts(name="rows")["rows"] == 1).sum())
        return 2 if once >= _RARE * key.num_unique else 1

    def missing(self, column: ColumnProfile) -> float:
        """The fraction of rows without a value in it."""
        return 1 - len(column.present) / max(1, len(column.values))

    @property
    def context(self) -> list[ColumnProfile]:
        """Columns of the events that are known at request time; only a ranker uses them."""
        if not self.positives.has_impressions:
            return []
        roles = {self.user.name, self.item.name, *(column.name for column in self.label_columns)}
        roles |= {self.time.name} if self.time is not None else set()
        left = [
            c for c in self.events.columns if c.name not in roles and c.num_unique > 1 and c.type != "time"
        ]
        left = [c for c in left if any(word in c.plain for word in CONTEXTS)]
        useful = [c for c in left if is_category(c, self.events.num_rows) or c.type == "float"]
        return [] if self.is_by_position else useful[:_MAX_CONTEXT]

    @property
    def used_columns(self) -> list[ColumnProfile]:
        time = [self.time.column] if self.time is not None else []
        return [self.user, self.item, *time, *self.label_columns, *self.context]

    @property
    def unused_columns(self) -> list[str]:
        used = {column.name for column in self.used_columns}
        return [column.name for column in self.events.columns if column.name not in used]

    def columns_of(self, side: SideFile) -> list[ColumnProfile]:
        """The columns of a side table that the rows do not have already; all, for a file without a header."""
        if not side.file.has_names:
            return list(side.file.columns)
        taken = {column.name for column in self.used_columns} - {side.key.name}
        for earlier in self.sides[: self.sides.index(side)]:
            taken |= {column.name for column in earlier.others}
        return [column for column in side.file.columns if column.name not in taken]

    def categories_of(self, role: Role) -> list[str]:
        return [
            column.name
            for side in self.sides
            if side.role == role
            for column in side.categories
            if column in self.columns_of(side)
        ]

    @property
    def categories(self) -> list[ColumnProfile]:
        of_sides = [c for side in self.sides for c in side.categories if c in self.columns_of(side)]
        return [*of_sides, *(column for column in self.context if column.type != "float")]

    @property
    def numbers(self) -> list[ColumnProfile]:
        """Numeric features of the ranker."""
        if not self.positives.has_impressions:
            return []
        of_sides = [c for s in self.sides for c in s.others if c.type == "float" and c in self.columns_of(s)]
        return [*of_sides, *(column for column in self.context if column.type == "float")]

    def type_of(self, column: ColumnProfile) -> ColumnType:
        """The type in the recipe. Numeric ids may be text in rows outside the sample."""
        if self.time is not None and column.name == self.time.name:
            return "time" if self.time.is_time else column.type
        for key, role in ((self.user, "user"), (self.item, "item")):
            if column.name == key.name:
                others = [side.key.type for side in self.sides if side.role == role]
                is_int = key.type == "int" and all(other == "int" for other in others)
                is_certain = self.events.is_whole or self.events.form.format != "delimited"
                return "int" if is_int and is_certain else "text"
        return column.type

    def time_format(self, column: ColumnProfile) -> str:
        if self.time is None or column.name != self.time.name or not self.time.column.time_formats:
            return ""
        return self.time.column.time_formats[0]

    # split

    @property
    def has_history(self) -> bool:
        return self.time is not None

    @cached_property
    def split(self) -> Holdout:
        if self.time is None:
            return Holdout(by="random", column=self.user.name, held_out=0.2, halve=True)
        # A user's last impression is rarely a positive row, so impressions are always cut by time.
        if self.time.is_time and (self.positives.has_impressions or self._users_come_back):
            return Holdout(by="time", column=self.time.name, held_out=0.2, halve=True)
        return Holdout(by="last", column=self.user.name, order=self.time.name)

    @property
    def split_reason(self) -> str:
        if self.split.by == "random":
            return "A tenth of each user's rows for eval and for test, at random: nothing tells their order."
        if self.split.by == "time":
            return "The last tenth of the rows by time is test, the tenth before it eval."
        why = (
            "order"
            if not (self.time and self.time.is_time)
            else "time, for few users come back after a cut by time"
        )
        return f"Each user's last row is test, the one before it eval: by {why}."

    @cached_property
    def _users_come_back(self) -> bool:
        """Whether enough users after a cut by time have history before it."""
        assert self.time is not None
        rows = pl.DataFrame([self.user.values.alias("user"), seconds_of(self.time).alias("time")])
        rows = rows.filter(self.is_positive).drop_nulls()
        if not rows.height:
            return False
        cuts = [rows["time"].quantile(share, "nearest") for share in (0.8, 0.9)]
        first, second = rows.filter(pl.col("time") < cuts[0]), rows.filter(pl.col("time") < cuts[1])
        middle = rows.filter((pl.col("time") >= cuts[0]) & (pl.col("time") < cuts[1]))
        last = rows.filter(pl.col("time") >= cuts[1])
        wanted = min(_ENOUGH_USERS, 0.5 * rows["user"].n_unique())
        return all(
            later.join(before, on="user", how="semi")["user"].n_unique() >= wanted
            for before, later in ((first, middle), (second, last))
        )

    # models

    @cached_property
    def sizes(self) -> ModelSizes:
        num_positive = int(self.is_positive.sum() or 0)
        is_small = num_positive < _SMALL_LOG
        most_epochs = 20 if is_small else 10
        epochs = min(most_epochs, max(1, round(_TRAINED_ROWS / max(1, num_positive))))
        reads = (
            "over the user's recent items"
            if self.has_history
            else "over ids, for nothing tells the order of events"
        )
        is_sparse = self.min_count(self.item) > 1
        return ModelSizes(
            32 if is_small or is_sparse else 64,
            _batch_size(num_positive),
            epochs,
            f"Two towers {reads}: {num_positive:,} positive rows.",
        )


def _batch_size(num_positive: int) -> int:
    """The power of two nearest to the size that gives about fifty steps per epoch, from 64 to 1024."""
    nearest = 1 << round(math.log2(max(1.0, num_positive / _STEPS_IN_EPOCH)))
    return min(max(nearest, 64), 1024)
