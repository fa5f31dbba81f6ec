"""Steps that turn values into ids, keys, counts and codes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import polars as pl

from recmill.errors import FeatureError
from recmill.features.base import (
    Need,
    NeedsCounts,
    NeedsGroups,
    Transform,
    ValueTable,
    as_category,
    divided,
    each,
    elements_of,
    over_elements,
    table_file,
    to_lists,
)
from recmill.features.kernels import (
    Array,
    CountOptions,
    StoredCounts,
    ValueCounts,
    hash64,
    hash_positions,
    mask_of,
)
from recmill.features.numeric import bucket_ids
from recmill.features.stored import facts_of, learn_stored
from recmill.recipe import steps
from recmill.recipe.recipe import POSITION, SPLIT


class MapTransform(Transform[steps.Map]):
    def express(self, columns: Sequence[pl.Expr]) -> pl.Expr:
        return each(
            columns,
            self.takes_lists,
            lambda x: x.cast(pl.String).replace_strict(self.step.ids, default=0, return_dtype=pl.Int32),
        )

    def size(self) -> int:
        return max(self.step.ids.values()) + 1


class VocabularyTransform(Transform[steps.Vocabulary]):
    def vocabulary(self) -> str:
        return self.step.named or self.name.rpartition("/")[0]

    def need(self) -> Need | None:
        # Values of an earlier vocabulary keep their ids however rare they are now, so nothing may be dropped here.
        min_count = 1 if self.step.extend else self.step.min_count
        options = CountOptions(self.kind.endswith("text"), min_count, self.step.order == "first_seen")
        return NeedsCounts(self.vocabulary(), options)

    def learn_counts(self, counts: ValueCounts | StoredCounts) -> ValueTable:
        if isinstance(counts, StoredCounts) and not self.step.extend:
            return learn_stored(counts, self.vocabulary(), self.step.min_count, self.step.max_size)
        counts = counts.load(self.vocabulary())
        frame = pl.DataFrame([counts.values.alias("value"), counts.counts.alias("count")])
        if self.step.order == "count":
            frame = frame.sort("count", "value", descending=[True, False])
        else:
            assert counts.firsts is not None
            frame = frame.with_columns(counts.firsts.alias("first")).sort("first", "value").drop("first")
        kept = self._kept(frame) if self.step.extend else frame.clear()
        new = frame.filter(pl.col("count") >= self.step.min_count).join(
            kept, on="value", how="anti", maintain_order="left"
        )
        if self.step.max_size is not None:
            new = new.head(max(0, self.step.max_size - kept.height))
        frame = pl.concat([kept, new])
        return ValueTable(frame, facts_of(counts, int(frame["count"].sum())))

    def _kept(self, found: pl.DataFrame) -> pl.DataFrame:
        """The values of the earlier vocabulary in order, with their current counts."""
        old = read_vocabulary(str(self.step.extend), self.vocabulary())
        if old.frame["value"].dtype != found["value"].dtype:
            raise FeatureError(
                f'Feature "{self.name}": vocabulary {self.step.extend} holds {old.frame["value"].dtype}, '
                f"but the column is {found['value'].dtype}."
            )
        kept = old.frame.select("value").join(found, on="value", how="left", maintain_order="left")
        return kept.with_columns(pl.col("count").fill_null(0))

    def apply_one(self, series: pl.Series) -> pl.Series:
        assert self.table is not None
        if self.step.keep == "most_frequent":
            return most_frequent(series, self.table)
        return over_elements(series, self.table.ids)

    def size(self) -> int:
        return len(self.table) + 1 if self.table is not None else 1


def read_vocabulary(path: str, name: str) -> ValueTable:
    """A vocabulary of an earlier Table or Plan."""
    for plan in (Path(path) / "plan", Path(path)):
        file = plan / "tables" / table_file(name)
        if file.is_file():
            return ValueTable(pl.read_parquet(file))
    raise FeatureError(
        f'No vocabulary "{name}" in {path}. Give the directory of a Table whose recipe has that vocabulary.'
    )


def most_frequent(series: pl.Series, table: ValueTable) -> pl.Series:
    """For each list, the id of its most frequent token by the vocabulary's counts; ties go to the smaller id."""
    lengths = series.list.len().fill_null(0)
    row_numbers = table.row_numbers(elements_of(series))
    counts = pl.concat([pl.Series([-1], dtype=pl.Int64), table.frame["count"].cast(pl.Int64)])
    rows = (
        pl.int_range(len(series), eager=True)
        .filter(lengths > 0)
        .repeat_by(lengths.filter(lengths > 0))
        .explode()
    )
    best = (
        pl.DataFrame(
            {
                "row": rows.cast(pl.Int64),
                "id": table.ids_at(row_numbers),
                "count": counts.gather(row_numbers.cast(pl.UInt32)),
            }
        )
        .sort("row", "count", "id", descending=[False, True, False])
        .unique("row", keep="first", maintain_order=True)
    )
    result = np.zeros(len(series), dtype=np.int32)
    result[best["row"].to_numpy()] = best["id"].to_numpy()
    return pl.Series(series.name, result)


class LookupTransform(Transform[steps.Lookup]):
    def vocabulary(self) -> str:
        return self.step.named

    def apply_one(self, series: pl.Series) -> pl.Series:
        assert self.table is not None
        return over_elements(series, self.table.ids)

    def size(self) -> int:
        return len(self.table) + 1 if self.table is not None else 1


class HashTransform(Transform[steps.Hash]):
    def apply_one(self, series: pl.Series) -> pl.Series:
        return over_elements(series, self._hash)

    def _hash(self, series: pl.Series) -> pl.Series:
        ids = (hash64(as_category(series), self.step.seed) % np.uint64(self.step.buckets)).astype(
            np.int32
        ) + 1
        return pl.Series(series.name, _zero_where_missing(ids, series))

    def size(self) -> int:
        return self.step.buckets + 1


class KeyTransform(Transform[steps.Key]):
    def vocabulary(self) -> str:
        return self.step.named or self.name.rpartition("/")[0]

    def apply_one(self, series: pl.Series) -> pl.Series:
        return over_elements(series, self._key)

    def _key(self, series: pl.Series) -> pl.Series:
        keys = hash64(as_category(series), self.step.seed).view(np.int64)
        # 0 means missing, so the one value that hashes to it gets another key.
        keys = np.where(keys == 0, 1, keys)
        return pl.Series(series.name, _zero_where_missing(keys, series))


def _zero_where_missing(ids: Array, series: pl.Series) -> Array:
    mask = mask_of(series)
    return ids if mask is None else np.where(mask, ids, 0).astype(ids.dtype)


class CrossTransform(Transform[steps.Cross]):
    def express(self, columns: Sequence[pl.Expr]) -> pl.Expr | None:
        return self._joined(columns) if self.step.edges is None else None

    def apply(self, columns: Sequence[pl.Series], frame: pl.DataFrame) -> pl.Series:
        assert self.step.edges is not None
        values = [
            bucket_ids(column, np.asarray(edges)) if edges else column
            for column, edges in zip(columns, self.step.edges, strict=True)
        ]
        return pl.select(self._joined([pl.lit(one) for one in values])).to_series().alias(columns[0].name)

    def _joined(self, columns: Sequence[pl.Expr]) -> pl.Expr:
        return pl.concat_str(
            [column.cast(pl.String).fill_null("") for column in columns], separator=self.step.separator
        )


class CountTransform(Transform[steps.Count]):
    def need(self) -> Need | None:
        return NeedsCounts(self.name, CountOptions(self.kind.endswith("text")))

    def learn_counts(self, counts: ValueCounts | StoredCounts) -> ValueTable:
        self.state = {"rows": counts.num_values + counts.num_missing}
        if isinstance(counts, StoredCounts):
            return learn_stored(counts, self.name)
        frame = pl.DataFrame([counts.values.alias("value"), counts.counts.alias("count")])
        facts = facts_of(counts, int(frame["count"].sum()))
        return ValueTable(frame.sort("count", "value", descending=[True, False]), facts)

    def apply_one(self, series: pl.Series) -> pl.Series:
        assert self.table is not None
        return self.table.column("count", self.table.row_numbers(series), 0.0).alias(series.name)


class FrequencyTransform(CountTransform):
    def apply_one(self, series: pl.Series) -> pl.Series:
        return divided(super().apply_one(series), max(1, int(self.state["rows"])))


def sum_by_fold(folds: int, frame: pl.DataFrame) -> pl.DataFrame:
    """For each key, the sum and number of labels in total and in each fold."""
    present = frame.filter(pl.col("value").is_not_null())
    in_fold = [
        expression
        for fold in range(folds)
        for expression in (
            pl.col("value").filter(pl.col("fold") == fold).sum().alias(f"sum_{fold}"),
            pl.col("fold").filter(pl.col("fold") == fold).len().cast(pl.Int64).alias(f"count_{fold}"),
        )
    ]
    return present.group_by("key", maintain_order=True).agg(*in_fold)


class TargetTransform(Transform[steps.Target]):
    def need(self) -> Need | None:
        return NeedsGroups(
            partial(sum_by_fold, self.step.folds),
            label=self.step.label,
            folds=self.step.folds,
            seed=self.step.seed,
        )

    def learn_groups(self, groups: pl.DataFrame) -> ValueTable:
        """The code of each value, and its code for the rows of each fold, from all other folds."""
        sums = groups.rename({"key": "value"}).sort("value").rechunk()
        known = sums.filter(pl.col("value").is_not_null())
        folds = range(self.step.folds)
        others = [[other for other in folds if other != fold] for fold in folds]
        mean, *means = [mean_over(sums, seen) for seen in (folds, *others)]
        self.state = {"mean": mean, "means_without_fold": means}
        codes = [self._codes(known, seen, prior) for seen, prior in zip(others, means, strict=True)]
        return ValueTable(
            known.select(
                "value", pl.sum_horizontal(f"count_{fold}" for fold in folds).alias("count")
            ).with_columns(
                self._codes(known, folds, mean).alias("code"),
                *(code.alias(f"code_{fold}") for fold, code in enumerate(codes)),
            )
        )

    def _codes(self, sums: pl.DataFrame, folds: Sequence[int], prior: float) -> pl.Series:
        """Smoothed means over some folds; a value that occurs in none of them gets the code of an unknown one."""
        total = sums.select(pl.sum_horizontal(f"sum_{fold}" for fold in folds)).to_series().to_numpy()
        count = sums.select(pl.sum_horizontal(f"count_{fold}" for fold in folds)).to_series().to_numpy()
        code = (total + prior * self.step.smooth) / np.maximum(1, count + self.step.smooth)
        return pl.Series(np.where(count > 0, code, prior))

    def apply(self, columns: Sequence[pl.Series], frame: pl.DataFrame) -> pl.Series:
        assert self.table is not None
        row_numbers = self.table.row_numbers(columns[0])
        code = self.table.column("code", row_numbers, self.state["mean"])
        if SPLIT in frame.columns:
            fold = fold_of(frame, self.step.folds, self.step.seed)
            for number, prior in enumerate(self.state["means_without_fold"]):
                of_others = self.table.column(f"code_{number}", row_numbers, prior)
                code = of_others.zip_with((fold == number) & (frame[SPLIT] == 0), code)
        return code.alias(columns[0].name)


def mean_over(sums: pl.DataFrame, folds: Sequence[int]) -> float:
    """Mean label of the rows in these folds."""
    total = sum(float(sums[f"sum_{fold}"].sum()) for fold in folds)
    return total / max(1, sum(int(sums[f"count_{fold}"].sum()) for fold in folds))


def fold_of(frame: pl.DataFrame, folds: int, seed: int) -> pl.Series:
    """The fold of each row, from its position in the log."""
    return pl.Series("fold", (hash_positions(frame[POSITION], seed) % np.uint64(folds)).astype(np.int64))


_PRESENT = pl.col("value").drop_nulls()
_STATISTICS = {
    "mean": _PRESENT.mean(),
    "sum": _PRESENT.sum(),
    "min": _PRESENT.min(),
    "max": _PRESENT.max(),
    "count": _PRESENT.count(),
    "std": _PRESENT.std(ddof=0),
    "first": _PRESENT.first(),
    "last": _PRESENT.last(),
    "distinct": _PRESENT.n_unique(),
}


def aggregate_by_key(statistic: str, frame: pl.DataFrame) -> pl.DataFrame:
    """The statistic of each key, missing where all of its values are."""
    code = pl.when(pl.col("value").count() > 0).then(_STATISTICS[statistic].cast(pl.Float64))
    return frame.group_by("key", maintain_order=True).agg(code.alias("code"))


class AggregateTransform(Transform[steps.Aggregate]):
    def need(self) -> Need | None:
        return NeedsGroups(partial(aggregate_by_key, self.step.statistic), column=self.step.column)

    def learn_groups(self, groups: pl.DataFrame) -> ValueTable:
        return ValueTable(groups.rename({"key": "value"}).drop_nulls().sort("value"))

    def apply_one(self, series: pl.Series) -> pl.Series:
        assert self.table is not None
        return self.table.column("code", self.table.row_numbers(series), None).alias(series.name)


class OneHotTransform(Transform[steps.OneHot]):
    def apply_one(self, series: pl.Series) -> pl.Series:
        ids = series.cast(pl.Int64).fill_null(0).to_numpy()
        if len(ids) and (ids.min() < 0 or ids.max() >= self.step.size):
            found = int(ids.min() if ids.min() < 0 else ids.max())
            raise FeatureError(
                f'Feature "{self.name}": one_hot has size {self.step.size}, but an id is {found}. '
                "Raise size, or clip before it."
            )
        rows = np.zeros((len(ids), self.step.size), dtype=np.float32)
        rows[np.arange(len(ids)), ids] = 1.0
        lengths = pl.repeat(self.step.size, len(ids), dtype=pl.Int64, eager=True)
        return to_lists(series.name, pl.Series(rows.reshape(-1)), lengths)
