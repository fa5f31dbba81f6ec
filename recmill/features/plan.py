"""The Plan: a recipe's fitted features. prepare applies it to millions of rows and serve to one.

A plan learns in passes. `pending` lists what the next pass over the training rows must measure, `extract` picks those
values out of a batch, `learn` takes the result; when nothing is pending, the plan applies.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from recmill.artifacts.manifest import with_checksum, without_checksum, write_whole
from recmill.errors import ArtifactError, FeatureError
from recmill.features import category
from recmill.features.base import (
    Need,
    NeedsCounts,
    NeedsGroups,
    NeedsMoments,
    Transform,
    ValueTable,
    as_category,
    elements_of,
    table_file,
)
from recmill.features.chain import Chain, ColumnInfo, check_finite, run_chains
from recmill.features.kernels import CountOptions, ExtractedValues, Measurements, checksum
from recmill.features.labels import check_binary, is_positive
from recmill.features.stored import StoredValueTable, SubsetValueTable, empty_subset
from recmill.recipe.check_inputs import binary_labels
from recmill.recipe.kinds import kinds_of_columns
from recmill.recipe.load import recipe_from_dict, recipe_to_dict
from recmill.recipe.recipe import COPY, POSITION, SPLIT, Recipe

Answers = Mapping[str, pl.DataFrame]
MapFunction = Callable[[pl.DataFrame], pl.DataFrame]
ValuesOf = Callable[[pl.DataFrame], Mapping[str, pl.Series]]
_REACHED = "__reached "


@dataclass(frozen=True)
class NextPass:
    """What the next pass over the training rows must measure."""

    moments: tuple[str, ...]
    counts: Mapping[str, CountOptions]
    groups: Mapping[str, NeedsGroups]

    def __bool__(self) -> bool:
        return bool(self.moments or self.counts or self.groups)


class Plan:
    """The features of a recipe with their learned state. Saved as JSON and Parquet; never as pickle."""

    def __init__(self, recipe: Recipe) -> None:
        kinds = kinds_of_columns(recipe)
        self.recipe = recipe
        self.features = [Chain(feature, kinds) for feature in recipe.features]
        self.labels = [Chain(label, kinds) for label in recipe.labels]
        self.tables: dict[str, ValueTable] = {}
        self.num_rows = 0

    # learning

    def pending(self) -> NextPass:
        """What must be measured next; empty when the plan is ready to apply."""
        moments: list[str] = []
        counts: dict[str, CountOptions] = {}
        groups: dict[str, NeedsGroups] = {}
        for _, transform, need in self._waiting():
            if isinstance(need, NeedsMoments):
                moments.append(transform.name)
            elif isinstance(need, NeedsCounts):
                counts[need.name] = need.options
            else:
                groups[transform.name] = need
        stuck = [chain.feature.name for chain in self.features if not chain.is_ready]
        if stuck and not (moments or counts or groups):
            raise FeatureError(
                f"Features {', '.join(stuck)} depend on each other's vocabularies; give them names of their own."
            )
        return NextPass(tuple(moments), counts, groups)

    def _waiting(self) -> list[tuple[Chain, Transform[Any], Need]]:
        """Steps that can learn now, and their requests. A shared vocabulary needs all columns that count into it."""
        stopped = [
            (chain, *found) for chain in self.features if (found := chain.advance(self.tables)) is not None
        ]
        later = {
            transform.vocabulary()
            for chain in self.features
            for transform in chain.transforms[chain.num_ready + 1 :]
            if isinstance(transform, category.VocabularyTransform)
        }
        return [
            waiting
            for waiting in stopped
            if not (isinstance(waiting[2], NeedsCounts) and waiting[2].name in later)
        ]

    def extract(self, frame: pl.DataFrame) -> ExtractedValues:
        """The values that the pending pass measures, for one batch of training rows."""
        waiting = [found for found in self._waiting() if not isinstance(found[2], NeedsGroups)]
        columns = _reached(frame, [chain for chain, _, _ in waiting])
        moments: dict[str, pl.Series] = {}
        counts: dict[str, list[tuple[pl.Series, pl.Series]]] = {}
        for (_, transform, need), column in zip(waiting, columns, strict=True):
            if isinstance(need, NeedsCounts):
                counted = _with_positions(transform.counted(column), frame[POSITION], need.options)
                counts.setdefault(need.name, []).append(counted)
            else:
                moments[transform.name] = column
        return ExtractedValues(frame.height, moments, counts)

    def extract_group(self, name: str, frame: pl.DataFrame) -> pl.DataFrame:
        """Columns key, value, fold and position for a pending group-by."""
        chain = next(chain for chain in self.features if any(t.name == name for t in chain.transforms))
        found = chain.advance(self.tables)
        assert found is not None
        need = found[1]
        assert isinstance(need, NeedsGroups)
        key = as_category(_reached(frame, [chain])[0]).alias("key")
        if need.label is not None:
            label = next(label for label in self.labels if label.feature.name == need.label)
            value = self._labels([label], frame)[0].cast(pl.Float64)
        else:
            value = frame[need.column or ""]
            value = value if value.dtype == pl.String else value.cast(pl.Float64)
        fold = category.fold_of(frame, need.folds, need.seed)
        return pl.DataFrame([key, value.alias("value"), fold, frame[POSITION]])

    def learn(self, measured: Measurements, groups: Mapping[str, pl.DataFrame]) -> None:
        """Take the results of a pass; the next `pending` builds on them."""
        self.num_rows = max(self.num_rows, measured.rows)
        for _, transform, need in self._waiting():
            if isinstance(need, NeedsMoments):
                transform.learn_moments(measured.moments[transform.name])
            elif isinstance(need, NeedsGroups):
                self.tables[transform.name] = transform.learn_groups(groups[transform.name])
            elif need.name not in self.tables:
                table = transform.learn_counts(measured.counts[need.name])
                if table is not None:
                    self.tables[need.name] = table

    # joins with tables that are not in memory

    @property
    def stored(self) -> dict[str, StoredValueTable]:
        """Tables that are too large for memory. Rows are joined with them before a step that reads one applies."""
        return {name: table for name, table in self.tables.items() if isinstance(table, StoredValueTable)}

    def joins(self) -> tuple[Callable[[Answers], ValuesOf], ...]:
        """Successive queries of stored tables; none when no next step reads one.

        Given the answers so far, each extracts the distinct values by table from a batch. There are several when the
        input of a stored table depends on another.
        """
        steps = [chain.stored_steps(stop) for chain, stop in self._next_steps()]
        return tuple(partial(self._question, number) for number in range(max(map(len, steps), default=0)))

    def _question(self, number: int, answers: Answers) -> ValuesOf:
        return partial(self.with_answers(answers).values_to_join, number)

    def _next_steps(self) -> list[tuple[Chain, int]]:
        """How far chains run next: up to a step that must learn, or to the end."""
        waiting = [(chain, chain.num_ready) for chain, _, _ in self._waiting()]
        return waiting or [(chain, len(chain.all_steps)) for chain in self.features]

    def values_to_join(self, number: int, frame: pl.DataFrame) -> dict[str, pl.Series]:
        """The distinct values, by table, that reach the `number`-th stored table of each chain."""
        stops = [(chain, chain.stored_steps(stop)) for chain, stop in self._next_steps()]
        jobs = [(chain, steps[number]) for chain, steps in stops if number < len(steps)]
        found: dict[str, list[pl.Series]] = {}
        for (chain, step), column in zip(jobs, run_chains(frame, jobs), strict=True):
            transform = chain.transforms[step]
            assert transform.table is not None
            values = transform.table.as_values(elements_of(column)).drop_nulls()
            found.setdefault(transform.table_name, []).append(values.alias("value"))
        return {name: pl.concat(values).unique() for name, values in found.items()}

    def with_answers(self, answers: Answers) -> Plan:
        """The plan for rows whose values were joined: for each stored table, columns value, id and count."""
        subsets = {
            name: SubsetValueTable(answers.get(name, empty_subset(table.is_text)), len(table))
            for name, table in self.stored.items()
        }
        plan = copy.copy(self)
        plan.features = [chain.with_subsets(subsets) for chain in self.features]
        plan.tables = {**self.tables, **subsets}
        return plan

    def for_recipe(self, recipe: Recipe) -> Plan:
        """The plan for the rows, the split and the kept columns of another recipe."""
        plan = copy.copy(self)
        plan.recipe = recipe
        return plan

    def joined(self, function: Callable[[Plan], MapFunction]) -> Callable[[Answers], MapFunction]:
        """Call `function` with the plan, once a part's answers are available."""
        return partial(_of_answers, self, function)

    def reach(self, frame: pl.DataFrame) -> pl.DataFrame:
        """The rows, with the inputs of steps that must learn after a stored table. `extract` continues from there."""
        jobs = [(chain, stop) for chain, stop in self._next_steps() if chain.stored_steps(stop)]
        columns = run_chains(frame, jobs)
        return frame.with_columns(column.alias(_REACHED + column.name) for column in columns)

    # applying

    def apply(
        self, frame: pl.DataFrame, labels: bool = True, only: Iterable[str] | None = None
    ) -> pl.DataFrame:
        """Features of raw rows; with `labels`, all columns of a Table. Columns added by prepare are passed through."""
        wanted = None if only is None else set(only)
        chains = [chain for chain in self.features if wanted is None or chain.feature.name in wanted]
        columns = run_chains(frame, [(chain, len(chain.all_steps)) for chain in chains])
        if labels:
            columns += self._labels(self.labels, frame)
            columns += [frame[name].alias(f"raw_{name}") for name in self.recipe.table.keep]
        check_finite(columns)
        columns += [frame[name] for name in (POSITION, SPLIT, COPY) if name in frame.columns]
        return pl.DataFrame(columns)

    def _labels(self, chains: Sequence[Chain], frame: pl.DataFrame) -> list[pl.Series]:
        columns = run_chains(frame, [(chain, len(chain.transforms)) for chain in chains])
        for chain, column in zip(chains, columns, strict=True):
            if column.null_count():
                raise FeatureError(
                    f'Label "{chain.feature.name}" is missing in {column.null_count():,} of {len(column):,} rows. '
                    "Set `required = true` on its column to set such rows aside, or add fill to its steps."
                )
        finished = run_chains(frame, [(chain, len(chain.all_steps)) for chain in chains])
        for chain, column in zip(chains, finished, strict=True):
            if column.name in binary_labels(self.recipe):
                check_binary(column.name, column.to_numpy(), chain.feature.columns[0])
        return finished

    def keep_positive(self, label: str, frame: pl.DataFrame) -> pl.DataFrame:
        """The raw rows with label 1."""
        if not frame.height:
            return frame
        chains = [chain for chain in self.labels if chain.feature.name == label]
        return frame.filter(pl.DataFrame(self._labels(chains, frame)).select(is_positive(label)).to_series())

    def columns(self) -> list[ColumnInfo]:
        return [chain.info() for chain in (*self.features, *self.labels)]

    def values_of(self, feature: str) -> pl.Series | None:
        """The values of a vocabulary's ids, from id 1; None for features without one."""
        for chain in self.features:
            table = chain.transforms[-1].table if chain.transforms else None
            if chain.info().name == feature and table is not None:
                return table.frame["value"]
        return None

    # storage

    def save(self, into: Path) -> None:
        """Write `plan.json` and one Parquet file for each vocabulary or code table."""
        (into / "tables").mkdir(parents=True, exist_ok=True)
        for name, table in self.tables.items():
            table.save(into / "tables" / table_file(name))
        content = with_checksum(self._to_json(into / "tables"))
        write_whole(into / "plan.json", json.dumps(content, indent=1) + "\n")

    def _to_json(self, tables: Path) -> dict[str, Any]:
        return {
            "format": 1,
            "num_rows": self.num_rows,
            "digest": self.digest(),
            "tables": {
                name: {
                    "file": table_file(name),
                    "rows": len(table),
                    "facts": table.facts,
                    "digest": table.digest(),
                    "checksum": _checksum(tables / table_file(name)),
                }
                for name, table in sorted(self.tables.items())
            },
            "states": {t.name: t.state for chain in self.features for t in chain.transforms if t.state},
            "columns": [vars(info) for info in self.columns()],
            "recipe": recipe_to_dict(self.recipe),
        }

    @classmethod
    def read(cls, path: Path, stored: Mapping[str, Path] | None = None) -> Plan:
        """Open a saved plan. Tables in a folder of `stored` stay on disk."""
        try:
            saved = without_checksum(json.loads((path / "plan.json").read_text(encoding="utf-8")))
            plan = cls(recipe_from_dict(saved["recipe"], str(path / "plan.json")))
            for name, entry in saved["tables"].items():
                table = (
                    StoredValueTable(stored[name])
                    if stored and name in stored
                    else _read_table(path / "tables" / entry["file"], entry)
                )
                if table.digest() != entry["digest"]:
                    raise ArtifactError(
                        f'Plan {path} is damaged: table "{name}" does not have the digest of its record.'
                    )
                plan.tables[name] = table
        except (OSError, ValueError, KeyError, TypeError, pl.exceptions.PolarsError) as error:
            raise ArtifactError(
                f"Plan {path} cannot be read: {error}. Run `recmill prepare` again."
            ) from None
        plan.num_rows = saved["num_rows"]
        for chain in plan.features:
            for transform in chain.transforms:
                transform.state = saved["states"].get(transform.name, {})
        if plan.pending():
            raise ArtifactError(f"Plan {path} is incomplete. Run `recmill prepare` again.")
        return plan

    def digest(self) -> str:
        """Equal for plans that give every row the same features."""
        states = {t.name: t.state for chain in self.features for t in chain.transforms if t.state}
        text = json.dumps([states, sorted((name, table.digest()) for name, table in self.tables.items())])
        return hashlib.sha256(text.encode()).hexdigest()[:32]


def _read_table(path: Path, entry: Mapping[str, Any]) -> ValueTable:
    """Verify bytes before parsing: a Parquet reader may do anything with damaged ones."""
    if entry.get("checksum", "") not in ("", _checksum(path)):
        raise ValueError(f"{path.name} does not have the checksum of its record")
    return ValueTable(pl.read_parquet(path), entry["facts"])


def _checksum(path: Path) -> str:
    return checksum(path.read_bytes())


def _of_answers(plan: Plan, function: Callable[[Plan], MapFunction], answers: Answers) -> MapFunction:
    return function(plan.with_answers(answers))


def _reached(frame: pl.DataFrame, chains: Sequence[Chain]) -> list[pl.Series]:
    """The input of the step that each chain has reached: from `Plan.reach`, or computed here."""
    names = {chain.feature.name: _REACHED + chain.feature.name for chain in chains}
    jobs = [(chain, chain.num_ready) for chain in chains if names[chain.feature.name] not in frame.columns]
    ran = {column.name: column for column in run_chains(frame, jobs)}
    return [ran[name] if name in ran else frame[reached].alias(name) for name, reached in names.items()]


def _with_positions(
    series: pl.Series, positions: pl.Series, options: CountOptions
) -> tuple[pl.Series, pl.Series]:
    """Elements of lists, or values, with the positions of their rows."""
    if not isinstance(series.dtype, pl.List):
        return series, positions
    lengths = series.list.len().fill_null(0)
    elements = elements_of(series)
    if not options.track_first:
        return elements, positions
    repeated = np.repeat(positions.to_numpy(), lengths.to_numpy())
    return elements, pl.Series(POSITION, repeated)
