"""How large a recipe's models are for a log of some size: embedding tables, dense weights, bytes of rows.

How many values a column has is an estimate from Criteo's columns; users and items are known.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal

from recmill.recipe import recipe as r
from recmill.recipe import steps as s
from recmill.recipe.kinds import (
    element_of,
    is_list,
    kinds_along,
    kinds_of_columns,
    owners_of_columns,
    width_of,
)

_CRITEO_ROWS, _CRITEO_VALUES = 45_840_617, 1_300_000  # Kaggle: 33.8 million values in 26 columns
_GROWTH = 0.716  # from there to 883 million values in the 4.4 billion rows of the 1TB log
_HEADER, _INDEX = 20, 20  # bytes of a record beside its floats, and of its entry in the index
_STATES = {"sgd": 0, "adam": 2, "ftrl": 2}  # floats of state for each weight; others have one
_ENTITY_BYTES = 40  # of a user or item in a bundle, beside its columns: how it is found, its clicks
_SIMILAR_BYTES = 80  # 20 similar items
STORE_BYTES = 350  # of a row of a store, beside its features
_LIST_LENGTH = 5  # mean length of lists


@dataclass(frozen=True)
class Traffic:
    """What is expected: rows of the log, different items and users, requests/s."""

    rows: int = 1_000_000
    items: int = 100_000
    users: int = 1_000_000
    rate: float = 50.0


# Logs that recipes are made for. Criteo's has neither users nor items; its rows are those of the Kaggle log.
_KNOWN: Mapping[str, Traffic] = {
    "shop": Traffic(rows=100_000, items=1_000, users=2_000),
    "movielens": Traffic(rows=1_000_209, items=3_706, users=6_040),
    "criteo": Traffic(rows=45_840_617, items=1, users=1),
}


def traffic_of(recipe: r.Recipe) -> Traffic:
    """What is expected when nothing is given: the log that the recipe is made for."""
    return _KNOWN.get(recipe.generate or "", Traffic())


@dataclass(frozen=True)
class EmbeddedTable:
    """An embedding table of a model, as large as it is expected to get."""

    model: str
    name: str
    ids: int
    dim: int
    optimizer: str

    @property
    def floats(self) -> float:
        """Of a row and its optimizer's state."""
        if self.optimizer == "rowwise_adagrad":
            return self.dim + 1
        return self.dim * (1 + _STATES.get(self.optimizer, 1))

    @property
    def memory(self) -> float:
        return self.ids * (_HEADER + _INDEX + 4 * self.floats)

    @property
    def saved(self) -> float:
        return self.ids * (_HEADER + 4 * self.floats)

    @property
    def served(self) -> float:
        return self.ids * (8 + 4 * self.dim)


class ModelSize:
    """How large a recipe's models are with this traffic."""

    def __init__(self, recipe: r.Recipe, traffic: Traffic) -> None:
        self.recipe, self.traffic = recipe, traffic
        self.kinds = kinds_of_columns(recipe)
        self.owners = owners_of_columns(recipe)
        self.features = {feature.name: feature for feature in recipe.features}

    # values and ids

    def values(self, column: str) -> float:
        """Different values that a column is expected to have."""
        name = column.removesuffix("_negatives").removesuffix("_history")
        log = self.recipe.log
        if name in (log.user, log.item):
            return self.traffic.users if name == log.user else self.traffic.items
        known = {one.name: one for table in (log, *self.recipe.tables.values()) for one in table.columns}
        if name in known and (known[name].allowed or known[name].type == "bool"):
            return len(known[name].allowed or (0, 1))
        owner = self.owners.get(name, "context")
        # Beside users and items that are known, a row has little more: the device, the position on the page.
        context = max(self.traffic.users, self.traffic.items) if log.user and log.item else self.traffic.rows
        return different_values(
            {"user": self.traffic.users, "item": self.traffic.items, "context": context}[owner]
        )

    def ids(self, feature: r.Feature) -> int | None:
        """Rows of the table of a feature; None for one that is a number."""
        kind = kinds_along(feature, self.kinds)[-1]
        if element_of(kind) not in ("id", "key"):
            return None
        values = min(math.prod(self.values(column) for column in feature.columns), 1e15)
        if len(feature.columns) > 1:
            values = min(values, different_values(self.traffic.rows) * len(feature.columns))
        # Ids of users and items are known; other values are thinned out when they must be seen several times.
        known = set(feature.columns) <= {self.recipe.log.user, self.recipe.log.item}
        for step in feature.steps:
            values = _after(step, values, known)
        return max(2, round(values))

    # models

    @cached_property
    def tables(self) -> list[EmbeddedTable]:
        tables: dict[tuple[str, str], EmbeddedTable] = {}
        for model, names, dim, optimizer in self._collections():
            for name in names:
                feature = self.features[name]
                ids = self.ids(feature)
                if ids is None:
                    continue
                table = EmbeddedTable(model, _table_name(feature), ids, feature.dim or dim, optimizer)
                known = tables.get((model, table.name))
                if known is None or known.ids < ids:
                    tables[model, table.name] = table
        return list(tables.values())

    def _collections(self) -> Iterator[tuple[str, Sequence[str], int, str]]:
        ranking, retrieval = self.recipe.ranking, self.recipe.retrieval
        if ranking is not None:
            sparse = ranking.train.sparse.name
            yield "ranking", ranking.features_among(self.features), ranking.table_dim, sparse
            if ranking.wide:
                wide = ranking.wide_optimizer.name if ranking.wide_optimizer else "ftrl"
                yield "ranking, wide", ranking.wide, 1, wide
        if retrieval is not None:
            for side, names in (("user", retrieval.user), ("item", retrieval.item)):
                yield f"retrieval, {side}", names, retrieval.embedding_dim, retrieval.train.sparse.name

    def _features_of(self, model: str) -> list[str]:
        return [
            name for owner, names, _, _ in self._collections() if owner.startswith(model) for name in names
        ]

    def _split(self, names: Sequence[str]) -> tuple[int, int]:
        """How many numbers the features have, and how many of them are embedded."""
        is_embedded = {name: self.ids(self.features[name]) is not None for name in names}
        numbers = sum(width_of(self.features[name]) or 1 for name in names if not is_embedded[name])
        return numbers, sum(is_embedded.values())

    @cached_property
    def ranking_weights(self) -> int:
        spec = self.recipe.ranking
        return 0 if spec is None else spec.average * self._weights_of(spec)

    def _weights_of(self, spec: r.Ranking) -> int:
        """Dense weights of a ranker; one of the user's own is taken as a tower of its hidden layers."""
        if spec.model == r.TREES:
            return 0
        numbers, embedded = self._split(spec.features_among(self.features))
        if spec.model not in r.OVER_DLRM:
            return _ranker_weights(spec, numbers + embedded * spec.embedding_dim)
        below = spec.bottom[-1] if spec.bottom and numbers else numbers
        vectors = embedded + bool(numbers)
        wide = below + embedded * spec.embedding_dim
        width = below + vectors * (vectors - 1) // 2 if spec.interaction == "dot" else wide
        rank = spec.cross_rank or r.DLRM_CROSS_RANK
        cross = 2 * wide * rank * spec.cross_layers if spec.interaction == "cross" else 0
        return _weights([numbers, *spec.bottom]) + cross + _weights([width, *spec.top, 1])

    @cached_property
    def retrieval_weights(self) -> int:
        spec = self.recipe.retrieval
        if spec is None:
            return 0
        if (
            spec.model == "sasrec"
        ):  # of a block: queries, keys, values and output of attention, and two layers
            return spec.blocks * 6 * spec.embedding_dim**2
        total = 0
        for names in (spec.user, spec.item):
            numbers, embedded = self._split(names)
            total += _weights([numbers + embedded * spec.embedding_dim, *spec.hidden])
        return total

    @cached_property
    def models(self) -> list[tuple[str, r.Training, int]]:
        """Name, training and dense weights of each model."""
        ranking, retrieval = self.recipe.ranking, self.recipe.retrieval
        models = [("ranking", ranking.train, self.ranking_weights)] if ranking else []
        return [*models, *([("retrieval", retrieval.train, self.retrieval_weights)] if retrieval else [])]

    def ids_per_row(self, model: str) -> float:
        """Ids that a model reads in one row."""
        names = self._features_of(model)
        return sum(self._length(self.features[name]) for name in names if self.ids(self.features[name]))

    def floats_per_row(self, model: str) -> int:
        """Floats that pass through a model for one row: what it reads and what its layers give."""
        spec = self.recipe.ranking if model == "ranking" else self.recipe.retrieval
        assert spec is not None
        names = self._features_of(model)
        read = sum(spec.embedding_dim if self.ids(self.features[name]) else 1 for name in names)
        if isinstance(spec, r.Retrieval) and spec.model == "sasrec":
            return round(self.ids_per_row(model) * spec.embedding_dim * spec.blocks * 6)
        layers = [*spec.hidden, *(spec.bottom + spec.top if isinstance(spec, r.Ranking) else spec.hidden)]
        return (read + sum(layers)) * (spec.average if isinstance(spec, r.Ranking) else 1)

    def _length(self, feature: r.Feature) -> float:
        return _LIST_LENGTH if is_list(kinds_along(feature, self.kinds)[-1]) else 1

    @property
    def entities(self) -> list[tuple[Literal["user", "item"], int]]:
        """Users and items of a bundle; none for a recipe that scores rows alone."""
        if not (self.recipe.log.user and self.recipe.log.item):
            return []
        return [("item", self.traffic.items), ("user", self.traffic.users)]

    def entity_bytes(self, side: Literal["user", "item"]) -> float:
        """Of a user or item in a bundle: raw columns, features, and an item's vector and similar items."""
        raw = sum(
            10 * (_LIST_LENGTH if is_list(self.kinds.get(name, "int")) else 1)
            for name, of in self.owners.items()
            if of == side
        )
        features = sum(8 * self._length(feature) for feature in self.recipe.features if feature.of == side)
        if side == "user":
            return _ENTITY_BYTES + raw + features
        retrieval = self.recipe.retrieval
        width = 0 if retrieval is None else retrieval.vector_size
        return _ENTITY_BYTES + raw + features + _SIMILAR_BYTES + 6 * width

    @property
    def store_bytes(self) -> float:
        """Of all users and items in a store such as Redis."""
        total = 0.0
        for side, many in self.entities:
            features = sum(self._length(feature) for feature in self.recipe.features if feature.of == side)
            total += many * (STORE_BYTES + 8 * features)
        return total

    @cached_property
    def row_bytes(self) -> float:
        """Of a row of the Table: four bytes a number or id, eight a key."""
        total = 4.0 * len(self.recipe.labels)
        for feature in self.recipe.features:
            wide = element_of(kinds_along(feature, self.kinds)[-1]) == "key"
            total += (8 if wide else 4) * self._length(feature)
        return total


_DATE_PARTS = {
    "hour": 24,
    "weekday": 7,
    "day": 31,
    "month": 12,
    "year": 20,
    "minute": 60,
    "week": 53,
    "day_of_year": 366,
}


def _after(step: s.Step, values: float, known: bool) -> float:
    """How many values or ids a step makes of so many values."""
    if isinstance(step, s.DatePart):
        return _DATE_PARTS.get(step.part, 60)
    if isinstance(step, s.Hash):
        return step.buckets + 1
    if isinstance(step, s.Buckets):
        return len(step.edges) + 2
    if isinstance(step, s.Quantiles):
        return step.buckets + 1
    if isinstance(step, s.Map):
        return max(step.ids.values(), default=0) + 1
    if isinstance(step, s.Vocabulary):
        kept = values if known else values * seen_at_least(step.min_count)
        return min(kept, step.max_size or math.inf) + 1
    return values


def different_values(rows: float) -> float:
    """Values of a column with as many rows, by Criteo's columns at 46 million and at 4.4 billion rows."""
    return float(min(rows, _CRITEO_VALUES * (rows / _CRITEO_ROWS) ** _GROWTH))


def seen_at_least(count: int) -> float:
    """The fraction of values that are seen so often, when values grow by that power of rows."""
    return math.prod((number - _GROWTH) / number for number in range(1, min(count, 1000)))


def _table_name(feature: r.Feature) -> str:
    for step in reversed(feature.steps):
        if isinstance(step, s.Vocabulary | s.Lookup | s.Key) and step.named:
            return step.named
    return feature.name


def _ranker_weights(spec: r.Ranking, width: int) -> int:
    """Dense weights of a ranker that is not DLRM; `width` numbers go into it for each row."""
    deep = _weights([width, *spec.hidden, 1])
    if spec.model == "dcn":
        rank = spec.cross_rank
        return deep + spec.cross_layers * (2 * width * rank if rank else width * width)
    if spec.model == "masknet":
        blocks = spec.mask_blocks * 3 * width * spec.mask_width
        return blocks + _weights([spec.mask_blocks * spec.mask_width, *spec.hidden, 1])
    return deep


def _weights(widths: Sequence[int]) -> int:
    return sum((before + 1) * after for before, after in pairwise(widths))
