"""Steps that turn values into ids, keys, counts and codes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import polars as pl

from recmill.errors import FeatureError
from recmill.features.base import (
    Keyed,
    Need,
    NeedsCounts,
    NeedsGroups,
    Transform,
    as_category,
    each,
    over_elements,
    to_lists,
)
from recmill.kernels import Array, CountOptions, Counts, hash64, hash_positions, mask_of
from recmill.spec import steps
from recmill.spec.recipe import POSITION, SPLIT


class Map(Transform[steps.Map]):
    def express(self, columns: Sequence[pl.Expr]) -> pl.Expr:
        return each(
            columns,
            self.takes_lists,
            lambda x: x.cast(pl.String).replace_strict(self.step.ids, default=0, return_dtype=pl.Int32),
        )

    def size(self) -> int:
        return max(self.step.ids.values()) + 1


class Vocabulary(Transform[steps.Vocabulary]):
    def vocabulary(self) -> str:
        return self.step.named or self.name.rpartition("/")[0]

    def need(self) -> Need | None:
        # What an earlier vocabulary knows keeps its id however rare it is now, so nothing may be dropped here.
        min_count = 1 if self.step.extend else self.step.min_count
        options = CountOptions(self.kind.endswith("text"), min_count, self.step.order == "first_seen")
        return NeedsCounts(self.vocabulary(), options)

    def learn_counts(self, counts: Counts) -> Keyed:
        frame = pl.DataFrame([counts.values.alias("value"), counts.counts.alias("count")])
        if self.step.order == "count":
            frame = frame.sort("count", "value", descending=[True, False])
        else:
            assert counts.firsts is not None
            frame = frame.with_columns(counts.firsts.alias("first")).sort("first", "value").drop("first")
        frame = self._extended(frame) if self.step.extend else frame
        frame = frame.head(self.step.max_size) if self.step.max_size else frame
        return Keyed(frame, facts_of(counts, frame))

    def _extended(self, found: pl.DataFrame) -> pl.DataFrame:
        old = read_vocabulary(str(self.step.extend), self.vocabulary())
        if old.frame["value"].dtype != found["value"].dtype:
            raise FeatureError(
                f'Feature "{self.name}": vocabulary {self.step.extend} holds {old.frame["value"].dtype}, '
                f"but the column is {found['value'].dtype}."
            )
        kept = old.frame.select("value").join(found, on="value", how="left", maintain_order="left")
        new = found.filter(pl.col("count") >= self.step.min_count).join(old.frame, on="value", how="anti", maintain_order="left")
        return pl.concat([kept.with_columns(pl.col("count").fill_null(0)), new])

    def apply_one(self, series: pl.Series) -> pl.Series:
        assert self.keyed is not None
        if self.step.keep == "most_frequent":
            return most_frequent(series, self.keyed)
        return over_elements(series, self.keyed.ids)

    def size(self) -> int:
        return len(self.keyed) + 1 if self.keyed is not None else 1


def facts_of(counts: Counts, frame: pl.DataFrame) -> dict[str, int]:
    """What `--explain` shows: how many values there were, and how many of them got an id."""
    return {
        "values": counts.num_values,
        "missing": counts.num_missing,
        "distinct": counts.num_distinct,
        "known": int(frame["count"].sum()),
    }


def read_vocabulary(path: str, name: str) -> Keyed:
    """A vocabulary of an earlier Table or Plan."""
    from recmill.features.plan import table_file

    for plan in (Path(path) / "plan", Path(path)):
        file = plan / "tables" / table_file(name)
        if file.is_file():
            return Keyed(pl.read_parquet(file))
    raise FeatureError(f'No vocabulary "{name}" in {path}. Give the directory of a Table whose recipe has that vocabulary.')


def most_frequent(series: pl.Series, keyed: Keyed) -> pl.Series:
    """Of each list, the id of the token that the vocabulary counted most often; ties go to the smaller id."""
    lengths = series.list.len().fill_null(0)
    elements = series.filter(series.list.len() > 0).explode()
    ids = keyed.ids(elements)
    counts = pl.concat([pl.Series([-1], dtype=pl.Int64), keyed.frame["count"].cast(pl.Int64)])
    rows = pl.int_range(len(series), eager=True).filter(lengths > 0).repeat_by(lengths.filter(lengths > 0)).explode()
    best = (
        pl.DataFrame({"row": rows.cast(pl.Int64), "id": ids, "count": counts.gather(ids.cast(pl.UInt32))})
        .sort("row", "count", "id", descending=[False, True, False])
        .unique("row", keep="first", maintain_order=True)
    )
    result = np.zeros(len(series), dtype=np.int32)
    result[best["row"].to_numpy()] = best["id"].to_numpy()
    return pl.Series(series.name, result)


class Lookup(Transform[steps.Lookup]):
    def vocabulary(self) -> str:
        return self.step.named

    def apply_one(self, series: pl.Series) -> pl.Series:
        assert self.keyed is not None
        return over_elements(series, self.keyed.ids)

    def size(self) -> int:
        return len(self.keyed) + 1 if self.keyed is not None else 1


class Hash(Transform[steps.Hash]):
    def apply_one(self, series: pl.Series) -> pl.Series:
        return over_elements(series, self._hash)

    def _hash(self, series: pl.Series) -> pl.Series:
        ids = (hash64(as_category(series), self.step.seed) % np.uint64(self.step.buckets)).astype(np.int32) + 1
        return pl.Series(series.name, _zero_where_missing(ids, series))

    def size(self) -> int:
        return self.step.buckets + 1


class Key(Transform[steps.Key]):
    def vocabulary(self) -> str:
        return self.step.named or self.name.rpartition("/")[0]

    def apply_one(self, series: pl.Series) -> pl.Series:
        return over_elements(series, self._key)

    def _key(self, series: pl.Series) -> pl.Series:
        keys = hash64(as_category(series), self.step.seed).view(np.int64)
        # 0 stands for a missing value, so the one value that hashes to it moves aside.
        keys = np.where(keys == 0, 1, keys)
        return pl.Series(series.name, _zero_where_missing(keys, series))


def _zero_where_missing(ids: Array, series: pl.Series) -> Array:
    mask = mask_of(series)
    return ids if mask is None else np.where(mask, ids, 0).astype(ids.dtype)


class Cross(Transform[steps.Cross]):
    def express(self, columns: Sequence[pl.Expr]) -> pl.Expr:
        return pl.concat_str([column.cast(pl.String).fill_null("") for column in columns], separator=self.step.separator)


class Count(Transform[steps.Count]):
    def need(self) -> Need | None:
        return NeedsCounts(self.name, CountOptions(self.kind.endswith("text")))

    def learn_counts(self, counts: Counts) -> Keyed:
        frame = pl.DataFrame([counts.values.alias("value"), counts.counts.alias("count")])
        self.state = {"rows": counts.num_values + counts.num_missing}
        return Keyed(frame.sort("count", "value", descending=[True, False]), facts_of(counts, frame))

    def apply_one(self, series: pl.Series) -> pl.Series:
        assert self.keyed is not None
        return self.keyed.column("count", self.keyed.ids(series), 0.0).alias(series.name)


class Frequency(Count):
    def apply_one(self, series: pl.Series) -> pl.Series:
        return super().apply_one(series) / max(1, self.state["rows"])


def sum_by_fold(folds: int, frame: pl.DataFrame) -> pl.DataFrame:
    """For each key, the sum and number of labels in all and in each fold."""
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


class Target(Transform[steps.Target]):
    def need(self) -> Need | None:
        return NeedsGroups(
            partial(sum_by_fold, self.step.folds),
            label=self.step.label,
            folds=self.step.folds,
            seed=self.step.seed,
        )

    def learn_groups(self, groups: pl.DataFrame) -> Keyed:
        frame = groups.rename({"key": "value"}).sort("value", nulls_last=True)
        folds = range(self.step.folds)
        sums = [float(frame[f"sum_{fold}"].sum()) for fold in folds]
        counts = [int(frame[f"count_{fold}"].sum()) for fold in folds]
        self.state = {
            "mean": sum(sums) / max(1, sum(counts)),
            "means_without_fold": [(sum(sums) - sums[f]) / max(1, sum(counts) - counts[f]) for f in folds],
        }
        frame = frame.filter(pl.col("value").is_not_null()).with_columns(
            pl.sum_horizontal(f"sum_{fold}" for fold in folds).alias("sum"),
            pl.sum_horizontal(f"count_{fold}" for fold in folds).alias("count"),
        )
        return Keyed(frame)

    def apply(self, columns: Sequence[pl.Series], frame: pl.DataFrame) -> pl.Series:
        assert self.keyed is not None
        ids = self.keyed.ids(columns[0])
        code = self._code(ids, None, pl.Series([self.state["mean"]]).new_from_index(0, len(ids)))
        if SPLIT not in frame.columns:
            return code.alias(columns[0].name)
        fold = self.fold_of(frame)
        prior = pl.Series(self.state["means_without_fold"]).gather(fold.cast(pl.UInt32))
        held_out = self._code(ids, fold, prior)
        return code.zip_with(frame[SPLIT] != 0, held_out).alias(columns[0].name)

    def fold_of(self, frame: pl.DataFrame) -> pl.Series:
        return fold_of(frame, self.step.folds, self.step.seed)

    def _code(self, ids: pl.Series, fold: pl.Series | None, prior: pl.Series) -> pl.Series:
        assert self.keyed is not None
        total = self.keyed.column("sum", ids, 0.0)
        count = self.keyed.column("count", ids, 0.0)
        if fold is not None:
            for number in range(self.step.folds):
                own = (fold == number).cast(pl.Float64)
                total = total - self.keyed.column(f"sum_{number}", ids, 0.0) * own
                count = count - self.keyed.column(f"count_{number}", ids, 0.0) * own
        return (total + prior * self.step.smooth) / (count + self.step.smooth)


def fold_of(frame: pl.DataFrame, folds: int, seed: int) -> pl.Series:
    """Each row's fold, from its place in the log."""
    return pl.Series("fold", (hash_positions(frame[POSITION], seed) % np.uint64(folds)).astype(np.int64))


_STATISTICS = {
    "mean": pl.col("value").mean(),
    "sum": pl.col("value").sum(),
    "min": pl.col("value").min(),
    "max": pl.col("value").max(),
    "count": pl.col("value").count(),
    "std": pl.col("value").std(ddof=0),
    "first": pl.col("value").first(),
    "last": pl.col("value").last(),
    "distinct": pl.col("value").n_unique(),
}


def aggregate_by_key(statistic: str, frame: pl.DataFrame) -> pl.DataFrame:
    present = frame.filter(pl.col("key").is_not_null() & pl.col("value").is_not_null())
    code = _STATISTICS[statistic].cast(pl.Float64).alias("code")
    return present.group_by("key", maintain_order=True).agg(code)


class Aggregate(Transform[steps.Aggregate]):
    def need(self) -> Need | None:
        return NeedsGroups(partial(aggregate_by_key, self.step.statistic), column=self.step.column)

    def learn_groups(self, groups: pl.DataFrame) -> Keyed:
        return Keyed(groups.rename({"key": "value"}).sort("value"))

    def apply_one(self, series: pl.Series) -> pl.Series:
        assert self.keyed is not None
        return self.keyed.column("code", self.keyed.ids(series), None).alias(series.name)


class OneHot(Transform[steps.OneHot]):
    def apply_one(self, series: pl.Series) -> pl.Series:
        ids = series.cast(pl.Int64).fill_null(0).to_numpy()
        if len(ids) and (ids.min() < 0 or ids.max() >= self.step.size):
            found = int(ids.min() if ids.min() < 0 else ids.max())
            raise FeatureError(
                f'Feature "{self.name}": one_hot has size {self.step.size}, but an id is {found}. Raise size, or clip before it.'
            )
        rows = np.zeros((len(ids), self.step.size), dtype=np.float32)
        rows[np.arange(len(ids)), ids] = 1.0
        lengths = pl.repeat(self.step.size, len(ids), dtype=pl.Int64, eager=True)
        return to_lists(series.name, pl.Series(rows.reshape(-1)), lengths)
