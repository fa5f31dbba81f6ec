"""A bundle in a running server: its parts, and how items, events and deltas change them while it serves."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import polars as pl

from recmill.artifacts.bundle.bundle import Bundle
from recmill.artifacts.bundle.delta import Changes
from recmill.artifacts.bundle.entities import Side
from recmill.artifacts.bundle.models import RankModel, TowerModel
from recmill.artifacts.bundle.rows import RowTable
from recmill.artifacts.feature_store.redis import RedisStore
from recmill.dataset.batch import Array
from recmill.errors import NotFound
from recmill.features.task_scores import TaskScores
from recmill.stages.serve import messages as m
from recmill.stages.serve.followed import FollowedEvents, StreamEvent
from recmill.stages.serve.lookup import FeatureLookup
from recmill.stages.serve.recall import Recaller
from recmill.stages.serve.store_writes import SideRows, StoreWriter


class LiveBundle:
    """The parts of a bundle that answers need. A readers-writer lock separates answers from changes."""

    def __init__(self, bundle: Bundle, store: RedisStore | None = None) -> None:
        self.bundle = bundle
        bundle.plan  # # noqa: B018, read now: a damaged or untrusted plan is refused before anything is served
        for side in (bundle.users, bundle.items):
            if side is not None:
                side.unknown_row  # # noqa: B018, made now: later it would keep the files of a dropped version open
        self.lookup = FeatureLookup(bundle, store)
        self.writer = StoreWriter(store, self.lookup) if store is not None else None
        self.lock = RWLock()
        self.catching_up = threading.Lock()  # with the deltas of this version
        if store is not None:
            weakref.finalize(self, store.close)  # waits for the last request that uses it
        models = bundle.manifest["models"]
        self.ranker = RankModel(bundle) if "ranking" in models else None
        self.recaller = Recaller(bundle) if bundle.items is not None else None
        self.num_deltas = 0  # that were applied to the bundle
        self.followed = FollowedEvents()
        self.log_end: float | None = bundle.manifest.get("log_end")  # time of the newest training row

    @property
    def version(self) -> str:
        return self.bundle.version

    # changes

    def add_items(self, items: Sequence[m.NewItem], in_store: bool = True) -> int:
        """Make items recommendable from now on; known ones are replaced. `in_store` as for events."""
        rows = self.check_items(items)
        raw = self.lookup.raw_columns.frame(rows, list(self._recaller().items.raw_schema))
        features = self.lookup.features_of("item", raw)
        with self.lock.writing():
            self._recaller().show_items(self._indices([item.id for item in items]))
            self._put_items(raw, features)
        if in_store and self.writer is not None:
            self.writer.put("item", raw, features)
        return len(rows)

    def check_items(self, items: Sequence[m.NewItem]) -> list[m.Values]:
        """Check the raw columns of items; raises BadRequest for columns that an item cannot have."""
        id_column, columns = self._recaller().items.id_column, self.lookup.raw_columns
        allowed = set(columns.of("item"))
        return [
            columns.typed({**item.values, id_column: item.id}, allowed, f"Item {item.id}") for item in items
        ]

    def _put_items(self, raw: pl.DataFrame, features: pl.DataFrame) -> None:
        recaller, vectors = self._recaller(), None
        indices = recaller.items.put(raw, features)
        if recaller.tower is not None:
            rows = recaller.items.rows(indices)
            vectors = self._item_tower.vectors(rows.batch(self._item_tower.layout))
        recaller.put_items(indices, vectors)

    @cached_property
    def _item_tower(self) -> TowerModel:
        return TowerModel(self.bundle, "item")

    def remove_items(self, items: Sequence[m.Id]) -> int:
        """Stop recommending these items; returns how many were known."""
        recaller = self._recaller()
        with self.lock.writing():
            indices = self._indices(items)
            known = np.unique(indices[indices >= 0])
            recaller.remove_items(known)
        return len(known)

    def num_known(self, items: Sequence[m.Id]) -> int:
        """How many of these items are known."""
        indices = self._indices(items)
        return len(np.unique(indices[indices >= 0]))

    def add_events(self, events: Sequence[m.Event], in_store: bool = True) -> int:
        """Append events to the histories of users, for the next answers. All of them, or none.

        `in_store`: also in the store, which other processes share; one of them may have written them already.
        """
        self._recaller()
        all_values = [self.event_values(event) for event in events]
        for event, values in zip(events, all_values, strict=True):
            self._add_event(event, values, in_store)
        return len(events)

    def event_values(self, event: m.Event) -> dict[str, Any]:
        """The other columns of an event; raises BadRequest for values that the log could not hold."""
        log, columns = self.bundle.recipe.log, self.lookup.raw_columns
        ids = {log.user: event.user, log.item: event.item}
        columns.typed({name: id for name, id in ids.items() if name is not None}, columns.kinds, "The event")
        values = columns.typed(event.values, columns.kinds, "The event")
        return {name: value for name, value in values.items() if name not in ids}

    def _add_event(self, event: m.Event, values: Mapping[str, Any], in_store: bool) -> None:
        lookup, columns = self.lookup, self.lookup.raw_columns
        with self.lock.reading():
            own = lookup.raw_user(event.user, in_store=False)
            item = lookup.raw_items([event.item])[0]

        def after(raw: m.Values) -> pl.DataFrame:
            return columns.frame([self._after(raw, item, values)], lookup.columns_of_side("user"))

        user = None
        if in_store and self.writer is not None:
            user = self.writer.change_user(event.user, own, after)
        raw = after(own) if user is None else user
        features = lookup.features_of("user", raw)
        with self.lock.writing():
            self.bundle.entities("user").put(raw, features)
            self._add_clicks([(event.user, event.item)])

    def _after(self, raw: m.Values, item: m.Values, values: Mapping[str, Any]) -> m.Values:
        """Raw columns of a user after an event: the user columns of the event, and the new histories."""
        owners = self.lookup.raw_columns.owners
        raw = raw | {name: value for name, value in values.items() if owners.get(name) == "user"}
        return raw | self.lookup.after_event(raw, {**item, **values})

    # events of a stream

    def follow_events(self, events: Sequence[StreamEvent]) -> None:
        """Apply events of the stream, in order; a delta will deliver them too."""
        if not events:
            return
        lookup, raw = self.lookup, dict[m.Id, m.Values]()
        for event in events:  # not the answers' lock: changes of a version are serialised by `catching_up`
            if event.user not in raw:
                raw[event.user] = lookup.raw_user(event.user, in_store=False)
            raw[event.user] = self._after_stream_event(raw[event.user], event)
        users = lookup.raw_columns.frame(list(raw.values()), lookup.columns_of_side("user"))
        features = lookup.features_of("user", users)
        with self.lock.writing():
            self.bundle.entities("user").put(users, features)
            self._add_clicks([(event.user, event.item) for event in events if event.is_click])
        known = self._indices([event.item for event in events]) >= 0
        # The delta that adds an unknown item also brings its clicks.
        counted = {event.entry for event, is_known in zip(events, known.tolist(), strict=True) if is_known}
        self.followed.add(events, counted)

    def _after_stream_event(self, raw: m.Values, event: StreamEvent) -> m.Values:
        item = self.lookup.raw_items([event.item])[0]
        item = {name: value for name, value in item.items() if event.values.get(name) is None}
        owners = self.lookup.raw_columns.owners
        # A row without the user's country does not make the country unknown.
        values = {
            name: value
            for name, value in event.values.items()
            if value is not None or owners.get(name) != "user"
        }
        return self._after(raw, {}, {**values, **item})

    def without_followed(self, changes: Changes, end: int) -> Changes:
        """A delta that reaches up to this entry, without what the stream has delivered already.

        Its user rows are older than events that were applied since: those are applied again after it.
        """
        clicks, users = changes.clicks, changes.users
        if clicks is not None and "entry" in clicks.columns:
            clicks = clicks.filter(~self.followed.is_counted(clicks["entry"]))
        if users is not None:
            users = self._with_later_events(users, end)
        return replace(changes, clicks=clicks, users=users)

    def _with_later_events(self, users: pl.DataFrame, end: int) -> pl.DataFrame:
        id_column = self.bundle.entities("user").id_column
        rows = {row[id_column]: row for row in users.iter_rows(named=True)}
        for event in self.followed.after(end):
            if event.user in rows:
                rows[event.user] = self._after_stream_event(rows[event.user], event)
        return self.lookup.raw_columns.frame(list(rows.values()), users.columns)

    def _add_clicks(self, clicks: Sequence[tuple[m.Id, m.Id]]) -> None:
        recaller = self._recaller()
        indices = recaller.items.indices([item for _, item in clicks])
        for (user, _), index in zip(clicks, indices.tolist(), strict=True):
            if index >= 0:
                recaller.seen.add(user, index)
        for popularity in recaller.popularities:
            popularity.add_clicks(indices[indices >= 0])

    def apply(self, changes: Changes, in_store: bool = True) -> None:
        """Apply a delta: embedding rows, dense weights, items, users, clicks; all of it, or an error and nothing.

        Answers in progress finish first, later ones wait.
        """
        dense = None
        if self.ranker is not None and changes.graphs:
            dense = self.ranker.opened(changes.graphs, changes.layers)
        tables = {name: self._table(name) for name in changes.tables}
        for name, change in changes.tables.items():
            tables[name].check(change.keys, change.rows, change.shared)
        rows = self._side_rows(changes)
        clicks = [] if changes.clicks is None else list(changes.clicks.select("user", "item").iter_rows())
        with self.lock.writing():
            for name, change in changes.tables.items():
                tables[name].update(change.keys, change.rows)
                tables[name].remove(change.removed)
                if change.shared is not None:
                    tables[name].update_shared(change.shared)
            if self.ranker is not None and dense is not None:
                self.ranker.swap(dense)
            for side, raw, features in rows:
                if side == "item":
                    self._put_items(raw, features)
                else:
                    self.bundle.entities(side).put(raw, features)
            if clicks:
                self._add_clicks(clicks)
        if in_store and self.writer is not None:
            self.writer.put_delta(self.version, self.num_deltas + 1, rows)

    def _table(self, name: str) -> RowTable:
        collection, _, table = name.partition("/")
        return self.bundle.collection(collection).rows[table]

    def _side_rows(self, changes: Changes) -> list[SideRows]:
        """Items and users of a delta with their features; an error when they do not match."""
        rows: list[SideRows] = []
        sides: dict[Side, pl.DataFrame | None] = {"item": changes.items, "user": changes.users}
        for side, raw in sides.items():
            if raw is not None and raw.height:
                features = self.lookup.features_of(side, raw)
                self.bundle.entities(side).fitted(raw, features)
                rows.append((side, raw, features))
        return rows

    def store_delta(self, number: int, changes: Changes) -> None:
        """Write the rows of a delta to the store, if it was applied without one."""
        if self.writer is not None:
            self.writer.put_delta(self.version, number, self._side_rows(changes))

    def close(self) -> None:
        """Close the store, if there is one."""
        if self.lookup.store is not None:
            self.lookup.store.close()

    # parts

    def _recaller(self) -> Recaller:
        if self.recaller is None:
            raise NotFound(
                f"Bundle {self.version} has no items: its recipe names no log.item. It only scores rows."
            )
        return self.recaller

    def _ranker(self) -> RankModel:
        if self.ranker is None:
            raise NotFound(f"Bundle {self.version} has no ranking model; it only recalls.")
        return self.ranker

    @property
    def tasks(self) -> TaskScores:
        """How task probabilities of the ranker become scores."""
        return self._ranker().tasks

    def _indices(self, items: Sequence[m.Id]) -> Array:
        return self._recaller().items.indices(items)


class RWLock:
    """Many readers or one writer. A waiting writer goes before readers that arrive later."""

    def __init__(self) -> None:
        self._condition = threading.Condition(threading.Lock())
        self._readers = 0
        self._writers = 0  # writers, waiting or active
        self._is_writing = False

    @contextmanager
    def reading(self) -> Iterator[None]:
        with self._condition:
            while self._writers:
                self._condition.wait()
            self._readers += 1
        try:
            yield
        finally:
            with self._condition:
                self._readers -= 1
                if not self._readers:
                    self._condition.notify_all()

    @contextmanager
    def writing(self) -> Iterator[None]:
        with self._condition:
            self._writers += 1
            while self._readers or self._is_writing:
                self._condition.wait()
            self._is_writing = True
        try:
            yield
        finally:
            with self._condition:
                self._writers -= 1
                self._is_writing = False
                self._condition.notify_all()
