"""The features stage: stored features of user and items; columns of the request go through the same Plan."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import polars as pl

from recmill.artifacts.bundle.bundle import Bundle, used_features
from recmill.artifacts.bundle.entities import EntityRows, Side
from recmill.artifacts.bundle.features import FeatureRows
from recmill.artifacts.feature_store.redis import RedisStore
from recmill.dataset.batch import Array, Batch, Keys, Layout, collate
from recmill.errors import StoreError
from recmill.features.expressions import columns_read
from recmill.features.history import UserHistory, may_meet_condition, meets_condition
from recmill.recipe.kinds import parts_of_features
from recmill.recipe.recipe import History
from recmill.stages.serve.messages import Id, Query, Values
from recmill.stages.serve.raw import RawColumns

_MAX_CACHED = 20_000  # cached values of one feature
_MAX_STORE_SECONDS = 0.25  # default timeout of a store; at most half of the time left until a deadline


@dataclass(frozen=True)
class UserRow:
    """The user of a request: raw columns, features, items just clicked."""

    id: Id | None
    index: int  # index among the bundle's users; -1 for others
    given: Values
    features: FeatureRows
    found: bool
    recent: list[int] = field(default_factory=list)  # indices of the request's recent items
    degraded: list[str] = field(default_factory=list)


class FeatureLookup:
    """Features of users and items. If a store fails, rows come from the bundle, and the answer is degraded."""

    def __init__(self, bundle: Bundle, store: RedisStore | None = None) -> None:
        self.bundle = bundle
        self.raw_columns = RawColumns(bundle.recipe)
        self.parts = parts_of_features(bundle.recipe)
        self.store = store  # None: the bundle holds all rows
        self.store_failed: Callable[[], None] = lambda: None  # called for each failure, for metrics
        self.missing_rows: Callable[[Side, str, int], None] = lambda side, reason, number: None  # likewise
        self.histories = [operation for operation in bundle.recipe.rows if isinstance(operation, History)]
        self._columns_of = {feature.name: feature.columns for feature in bundle.recipe.features}
        self._given_columns = set(self.raw_columns.of("user", "context"))
        self._user_columns = self.raw_columns.of("user")
        self._cache: dict[str, dict[Any, Any]] = {}
        self._layout = Layout.of(bundle.columns)
        self._readers: dict[str, set[str]] = {}  # column -> names of the features that read it
        for name, read in self._columns_of.items():
            for column in read:
                self._readers.setdefault(column, set()).add(name)
        used = used_features(bundle.columns, bundle.models)
        self.context_features = [name for name in used if self.parts[name] == "context"]
        self.crossed_features = [name for name in used if self.parts[name] == "crossed"]
        self.user_features = list(bundle.users.layout.features) if bundle.users is not None else []
        self.user_features += [
            name for name in used if self.parts[name] == "user" and name not in self.user_features
        ]

    def columns_of(self, feature: str) -> tuple[str, ...]:
        """The raw columns that a feature reads."""
        return self._columns_of[feature]

    # users

    def user_row(self, query: Query, deadline: float | None = None) -> UserRow:
        """Stored features of the user, overridden by the request's own columns."""
        given = self._given(query)
        recent = self._known_indices(query.recent)
        index = self._user_index(query.user)
        degraded: list[str] = []
        stored, is_known = self._stored_user(query.user, index, deadline, degraded)
        changed = self._changed(given, query.recent)
        raw = dict(given)
        if not is_known or not changed.isdisjoint(self.user_features):
            raw = {**self._stored_raw(query.user, is_known, deadline, degraded), **given}
            raw |= self._histories(raw, query.recent, given)
        names = list(self.context_features)
        names += [name for name in self.user_features if not is_known or name in changed]
        features = self._row(raw, names)
        return UserRow(
            query.user, index, raw, stored | features if stored else features, is_known, recent, degraded
        )

    def _given(self, query: Query) -> Values:
        where = "The request"
        return {
            **self.raw_columns.typed(query.features, self._given_columns, where),
            **self.raw_columns.typed(query.context, self._given_columns, where),
        }

    def _user_index(self, user: Id | None) -> int:
        if user is None or self.bundle.users is None:
            return -1
        return int(self.bundle.users.indices([user])[0])

    def _stored_user(
        self, user: Id | None, index: int, deadline: float | None, degraded: list[str]
    ) -> tuple[FeatureRows | None, bool]:
        users = self.bundle.users
        if user is None or users is None:
            return None, False
        if self.store is None:
            return self._bundle_user(index)
        try:
            rows = self.store.get("user", [user], store_timeout(deadline))
        except StoreError:
            self.store_failed()
            degraded.append("features of the user: the store does not answer, the bundle's own are used")
            return self._bundle_user(index)
        if rows.found[0]:
            return FeatureRows.of(rows.batch, users.layout), True
        self._count_missing_user(index, bool(rows.unreadable[0]), deadline, degraded)
        return self._bundle_user(index)

    def _bundle_user(self, index: int) -> tuple[FeatureRows | None, bool]:
        if index < 0:
            return None, False
        return self.bundle.entities("user").rows(np.array([index])), True

    def _count_missing_user(
        self, index: int, is_unreadable: bool, deadline: float | None, degraded: list[str]
    ) -> None:
        """Count a row that the store lacks. An unknown user has no row, unless nothing was ever loaded."""
        if is_unreadable or index >= 0:
            reason = "unreadable" if is_unreadable else "missing"
            self.missing_rows("user", reason, 1)
            instead = "the bundle's own are used" if index >= 0 else "defaults are used"
            degraded.append(f"features of the user: the row in the store is {reason}, {instead}")
        elif not self._store_is_loaded(deadline):
            degraded.append("features of the user: the store holds no rows; run `recmill load`")

    def _store_is_loaded(self, deadline: float | None) -> bool:
        assert self.store is not None
        try:
            return self.store.is_loaded(store_timeout(deadline))
        except StoreError:
            self.store_failed()
            return False

    def _changed(self, given: Values, recent: Sequence[Id]) -> set[str]:
        """Features that read a column of the request."""
        columns = set(given)
        if recent:
            columns |= {column for history in self.histories for column in history.list_columns.values()}
        return {name for column in columns for name in self._readers.get(column, ())}

    def _stored_raw(
        self, user: Id | None, found: bool, deadline: float | None, degraded: list[str]
    ) -> Values:
        """Raw columns of the user: stored ones, or only the id of an unknown user."""
        column = self.bundle.recipe.log.user
        if user is None or column is None:
            return {}
        own = {column: self.raw_columns.typed({column: user}, [column], "The request")[column]}
        if not found:
            return own
        if self.store is not None:
            try:
                stored = self.store.raw("user", user, store_timeout(deadline))
                if stored is not None:
                    return stored
                problem = "the row in the store is missing or unreadable"
            except StoreError:
                self.store_failed()
                problem = "the store does not answer"
            degraded.append(f"columns of the user: {problem}, the bundle's own are used")
        return self.bundle.entities("user").raw_row(user) or own

    def _histories(self, raw: Values, recent: Sequence[Id], given: Values) -> Values:
        """History columns with the recent items appended; those that the request sends are not changed."""
        if not recent or not self.histories:
            return {}
        events = self.raw_items(recent)
        lists: Values = {}
        for history in self.histories:
            lists |= self._after(history, raw, events)
        return {column: values for column, values in lists.items() if column not in given}

    def raw_user(self, user: Id, in_store: bool = True) -> Values:
        """All raw columns of a user, from the store or from the bundle; only the id of an unknown user."""
        if in_store:
            return self._stored_raw(user, True, None, [])
        return self.bundle.entities("user").raw_row(user) or self._stored_raw(user, False, None, [])

    def after_event(self, raw: Values, event: Values) -> Values:
        """Stored histories of a user after one more event."""
        lists: Values = {}
        for history in self.histories:
            # Stored histories are those by user; others are not kept.
            if history.by == self.bundle.recipe.log.user:
                lists |= self._after(history, raw, [event])
        return lists

    def _after(self, history: History, raw: Values, events: Sequence[Values]) -> Values:
        """The list columns after these events; only events that meet the history's condition are appended."""
        own = {name: raw[name] for name in self._user_columns if name in raw}
        rows = [{**own, **event} for event in events]
        result = UserHistory(history, raw)
        for row, is_event in zip(rows, self._meet_condition(history, rows), strict=True):
            if is_event:
                result.push(row)
        return result.latest()

    def _meet_condition(self, history: History, rows: Sequence[Values]) -> list[bool]:
        """Which events meet the history's condition. A missing column counts as met: clients send clicks."""
        if history.where is None:
            return [True] * len(rows)
        names = columns_read(history.where, self.raw_columns.kinds)
        frame = self.raw_columns.frame(rows, names)
        is_met, may_be_met = meets_condition(history, frame), may_meet_condition(history, frame)
        is_complete = pl.Series([all(name in row for name in names) for row in rows])
        return (is_met | (~is_complete & may_be_met)).to_list()

    def columns_of_side(self, side: Side) -> list[str]:
        """The raw columns stored for users or items, the id first."""
        return list(self.bundle.entities(side).raw_schema)

    def features_of(self, side: Side, raw: pl.DataFrame) -> pl.DataFrame:
        """Features of raw rows of users or items by the Plan."""
        features = self.bundle.entities(side).layout.features
        return self.bundle.plan.apply(raw, labels=False, only=features)

    def raw_items(self, items: Sequence[Id]) -> list[Values]:
        """Raw columns of items; of an unknown item, only the id."""
        entities, column = self.bundle.items, self.bundle.recipe.log.item
        if column is None:
            return [{} for _ in items]
        indices = entities.indices(items) if entities is not None else np.full(len(items), -1)
        known = entities.raw(indices[indices >= 0]).to_dicts() if entities is not None else []
        rows = iter(known)
        return [
            next(rows)
            if index >= 0
            else {column: self.raw_columns.typed({column: item}, [column], "The request")[column]}
            for item, index in zip(items, indices.tolist(), strict=True)
        ]

    def _known_indices(self, items: Sequence[Id]) -> list[int]:
        if not items or self.bundle.items is None:
            return []
        return [index for index in self.bundle.items.indices(items).tolist() if index >= 0]

    # items

    def candidates(
        self, indices: Array, user_row: UserRow, deadline: float | None = None
    ) -> tuple[FeatureRows | EntityRows, list[str]]:
        """Features of known items, like `items`, but those of the bundle are left to the caller."""
        if self.store is None and not self.crossed_features:
            return EntityRows(self.bundle.entities("item"), indices), []
        return self.items(indices, user_row, deadline)

    def items(
        self, indices: Array, user_row: UserRow, deadline: float | None = None
    ) -> tuple[FeatureRows, list[str]]:
        """Features of items, with the crossed features, which read the user, the context and the item."""
        entities = self.bundle.items
        assert entities is not None
        degraded: list[str] = []
        rows = (
            self._own_items(indices)
            if self.store is None
            else self._stored_items(indices, deadline, degraded)
        )
        if self.crossed_features:
            rows |= self.crossed(user_row, entities.raw(indices))
        return rows, degraded

    def _own_items(self, indices: Array) -> FeatureRows:
        return self.bundle.entities("item").rows(indices)

    def _stored_items(self, indices: Array, deadline: float | None, degraded: list[str]) -> FeatureRows:
        """Features of items from the store; from the bundle where the store has none."""
        entities = self.bundle.entities("item")
        known = np.flatnonzero(indices >= 0)
        try:
            assert self.store is not None
            stored = self.store.get("item", entities.ids(indices[known]), store_timeout(deadline))
        except StoreError:
            self.store_failed()
            degraded.append("features of items: the store does not answer, the bundle's own are used")
            return self._own_items(indices)
        rows = FeatureRows.of(stored.batch, entities.layout)
        if len(known) < len(indices):
            rows = self._own_items(indices).replaced(known, rows)
        missing = known[~stored.found]
        if len(missing):
            self._note_missing_items(len(missing), int(stored.unreadable.sum()), len(known), degraded)
            rows = rows.replaced(missing, self._own_items(indices[missing]))
        return rows

    def _note_missing_items(
        self, num_missing: int, num_unreadable: int, num_items: int, degraded: list[str]
    ) -> None:
        self.missing_rows("item", "unreadable", num_unreadable)
        self.missing_rows("item", "missing", num_missing - num_unreadable)
        problem = {0: "missing", num_missing: "unreadable"}.get(num_unreadable, "missing or unreadable")
        degraded.append(
            f"features of items: {num_missing} of {num_items} are {problem} in the store, "
            "the bundle's own are used"
        )

    def crossed(self, user_row: UserRow, items: pl.DataFrame) -> FeatureRows:
        """Features that read columns of the user or the context together with the item's."""
        columns = sorted({c for name in self.crossed_features for c in self._columns_of[name]})
        own = dict(user_row.given)
        lacks_columns = not all(column in own or column in items.columns for column in columns)
        if user_row.found and user_row.id is not None and lacks_columns:
            own = {**(self.bundle.entities("user").raw_row(user_row.id) or {}), **own}
        frame = self.raw_columns.frame([own], columns)
        rows = pl.concat([frame] * items.height) if items.height else frame.clear()
        rows = rows.with_columns(items[name] for name in columns if name in items.columns)
        return self.transform(rows, self.crossed_features)

    def unknown_items(self, raw: Sequence[Values], user_row: UserRow) -> FeatureRows:
        """Features of items that the bundle does not have, from the columns that are known."""
        assert self.bundle.items is not None
        frame = self.raw_columns.frame(raw, list(self.bundle.items.raw_schema))
        rows = self.transform(frame, self.bundle.items.layout.features)
        return rows | self.crossed(user_row, frame) if self.crossed_features else rows

    # the Plan

    def context(self, values: Values) -> FeatureRows:
        """Features of the request's context columns."""
        return self._row(
            self.raw_columns.typed(values, self._given_columns, "The context"), self.context_features
        )

    def batch(self, frame: pl.DataFrame, layout: Layout) -> Batch:
        """Features of raw rows as a Batch."""
        rows = self.bundle.plan.apply(frame, labels=False, only=layout.features)
        return collate(rows, layout, with_labels=False)

    def transform(self, frame: pl.DataFrame, names: Sequence[str]) -> FeatureRows:
        """Features of raw rows."""
        features = self.bundle.plan.apply(frame, labels=False, only=names)
        return FeatureRows.of_frame(features, self._layout)

    def _row(self, raw: Values, names: Sequence[str]) -> FeatureRows:
        """Features of one row, cached by the values they read: most values recur."""
        numbers: dict[str, Array] = {}
        keys: dict[str, Keys] = {}
        wanted: list[tuple[str, Any]] = []
        for name in names:
            key = tuple(_hashable(raw.get(column)) for column in self._columns_of[name])
            known = self._cache.setdefault(name, {}).get(key)
            if known is None:
                wanted.append((name, key))
            else:
                _put(name, known, numbers, keys)
        if wanted:
            new = [name for name, _ in wanted]
            columns = sorted({column for name in new for column in self._columns_of[name]})
            rows = self.transform(self.raw_columns.frame([raw], columns), new)
            for name, key in wanted:
                value = rows.numbers[name] if name in rows.numbers else rows.keys[name]
                cache = self._cache[name]
                if len(cache) >= _MAX_CACHED:
                    cache.clear()
                cache[key] = value
                _put(name, value, numbers, keys)
        return FeatureRows(1, numbers, keys)


def _put(name: str, value: Any, numbers: dict[str, Array], keys: dict[str, Keys]) -> None:
    if isinstance(value, Keys):
        keys[name] = value
    else:
        numbers[name] = value


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def store_timeout(deadline: float | None) -> float:
    """Seconds to wait for a store: at most half of the time left, so that an answer without it is still in time."""
    return (
        _MAX_STORE_SECONDS
        if deadline is None
        else min(_MAX_STORE_SECONDS, max(0.001, (deadline - time.monotonic()) / 2))
    )
