"""A bundle that answers: recall, filters, features, ranking, and why."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import polars as pl

from recmill.artifacts.bundle.bundle import Bundle, RowTable
from recmill.artifacts.bundle.delta import Changes
from recmill.artifacts.bundle.entities import Entities
from recmill.artifacts.bundle.features import FeatureRows
from recmill.artifacts.bundle.models import RankModel, TowerModel
from recmill.artifacts.bundle.sessions import Graph
from recmill.artifacts.feature_store import Side, Store
from recmill.artifacts.feature_store.codec import RowCodec
from recmill.artifacts.feature_store.mapped import entities_of
from recmill.dataset.batch import Array
from recmill.errors import BadRequest, NotFound, RecmillError, TooLate
from recmill.stages.serve import messages as m
from recmill.stages.serve.config import MAX_CANDIDATES, MAX_K
from recmill.stages.serve.lookup import FeatureLookup, UserRow
from recmill.stages.serve.recall import NAMES, Candidates, Recaller
from recmill.stages.serve.rwlock import RWLock
from recmill.stages.serve.store_writes import SideRows, StoreWriter

_SMOOTHING = 0.1  # of the time that ranking one candidate takes
_ROWS_AT_ONCE = 4_096


class Clock:
    """Milliseconds of each stage, and the time that is left."""

    def __init__(self, deadline_ms: float | None) -> None:
        self.started = time.monotonic()
        self.deadline = None if deadline_ms is None else self.started + deadline_ms / 1000
        self.stages: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.stages[name] = self.stages.get(name, 0.0) + (time.perf_counter() - begin) * 1000

    @property
    def left(self) -> float:
        """Seconds."""
        return float("inf") if self.deadline is None else self.deadline - time.monotonic()

    def check(self) -> None:
        if self.left <= 0:
            raise TooLate("The deadline passed before there was anything to answer with.")


class Recommender:
    """Answers from one bundle. Safe to call from many threads; changes wait for the answers under way."""

    def __init__(self, bundle: Bundle, store: Store | None = None) -> None:
        self.bundle = bundle
        bundle.plan  # noqa: B018, read now: what is damaged or not trusted is refused before anything answers
        for side in (bundle.users, bundle.items):
            if side is not None:
                side.unknown_row  # noqa: B018, made now: until then it keeps a dropped version's files open
        self.lookup = FeatureLookup(bundle, store)
        self.writer = StoreWriter(self.lookup) if store is not None else None
        self.gate = RWLock()
        self.catching_up = threading.Lock()  # with the deltas of this version
        if store is not None:
            weakref.finalize(self, store.close)  # not before the last request that uses it has ended
        models = bundle.manifest["models"]
        self.ranker = RankModel(bundle) if "ranking" in models else None
        self.recaller = Recaller(bundle) if bundle.items is not None else None
        self.num_deltas = 0  # that were applied to the bundle
        self.log_end: float | None = bundle.manifest.get(
            "log_end"
        )  # time of the newest row that answers know
        self._seconds_each = 1e-5  # to rank one candidate; learned as we go

    @property
    def version(self) -> str:
        return self.bundle.version

    # questions

    def recommend(
        self, user: m.Recommend | m.Id | None = None, **fields: Unpack[m.RecommendFields]
    ) -> m.Answer:
        """The k best items of a user. Unknown users and unknown items have answers too.

        Ask by a user's id and keyword arguments, `recommend("u1", k=10, where="price < 30")`, or with a Recommend.
        """
        query = m.query_of(m.Recommend, user, fields)
        clock = Clock(query.deadline_ms)
        check_sizes(query.k, query.candidates)
        recaller = self._recaller()
        with self.gate.reading():
            with clock.stage("user"):
                person = self.lookup.person(query, clock.deadline)
            degraded = list(person.degraded)
            clock.check()
            with clock.stage("recall"):
                candidates = recaller.recall(person, query, max(query.candidates, query.k), clock.deadline)
            if self.ranker is not None and len(candidates.places):
                chosen, scores = self._ranked(person, candidates, query.k, clock, degraded)
            else:
                chosen, scores = candidates, candidates.fused
            best = np.lexsort((chosen.places, -scores))[: query.k]
            chosen, scores = chosen.some(best), scores[best]
            trace = self._trace(person, chosen, candidates, clock) if query.trace else None
            return self._answer(chosen, scores, degraded, clock.stages, trace)

    def _ranked(
        self, person: UserRow, candidates: Candidates, k: int, clock: Clock, degraded: list[str]
    ) -> tuple[Candidates, Array]:
        """Chances of as many candidates as there is time for; recall's own order when there is none."""
        assert self.ranker is not None
        chosen = candidates
        affordable = clock.left / self._seconds_each
        if affordable < len(candidates.places):
            if affordable < k:
                degraded.append("rank: no time was left, items are in the order of recall")
                return candidates, candidates.fused
            chosen = candidates.some(slice(0, int(affordable)))
            degraded.append(
                f"rank: there was time for {len(chosen.places)} of {len(candidates.places)} candidates"
            )
        began = time.perf_counter()
        with clock.stage("features"):
            items, problems = self.lookup.items(chosen.places, person, clock.deadline)
        degraded += problems
        with clock.stage("rank"):
            scores = self.ranker.rank(person.features, items)
        each = (time.perf_counter() - began) / len(chosen.places)
        self._seconds_each += _SMOOTHING * (each - self._seconds_each)
        return chosen, scores

    def recall(self, user: m.Recall | m.Id | None = None, **fields: Unpack[m.RecallFields]) -> m.Answer:
        """Candidates alone, by their recall score within each channel."""
        query = m.query_of(m.Recall, user, fields)
        clock = Clock(query.deadline_ms)
        check_sizes(1, query.k)
        recaller = self._recaller()
        with self.gate.reading():
            with clock.stage("user"):
                person = self.lookup.person(query, clock.deadline)
            clock.check()
            with clock.stage("recall"):
                candidates = recaller.recall(person, query, query.k, clock.deadline)
            return self._answer(candidates, candidates.scores, list(person.degraded), clock.stages)

    def rank(
        self, user: m.Rank | m.Id | None, items: Sequence[m.Id] = (), **fields: Unpack[m.QueryFields]
    ) -> m.RankAnswer:
        """Probabilities of a click on these items; an unknown item is ranked by what its id alone tells."""
        query = m.query_of(m.Rank, user, {"items": np.asarray(items, object).tolist(), **fields})
        clock = Clock(query.deadline_ms)
        check_sizes(1, len(query.items))
        ranker = self._ranker()
        with self.gate.reading():
            person = self.lookup.person(query, clock.deadline)
            clock.check()
            rows, degraded = self._any_items(query.items, person, clock.deadline)
            scores = ranker.rank(person.features, rows)
        return m.RankAnswer(
            scores=scores.tolist(), degraded=[*person.degraded, *degraded], version=self.version
        )

    def features(self, query: m.Features) -> m.FeaturesAnswer:
        """What is stored of a user and of items."""
        check_sizes(1, len(query.items))
        with self.gate.reading():
            degraded: list[str] = []
            user = None
            if query.user is not None:
                person = self.lookup.person(m.Rank(user=query.user, items=[]))
                degraded += person.degraded
                user = m.EntityFeatures(
                    id=query.user,
                    found=person.found,
                    values=self.lookup.raw_user(query.user) if person.found else person.given,
                    features=person.features.row(0),
                )
            items: list[m.EntityFeatures] = []
            if query.items:
                nobody = self.lookup.person(m.Rank(items=[]))
                rows, problems = self._any_items(query.items, nobody, None)
                degraded += problems
                known = self._places(query.items) >= 0
                items = [
                    m.EntityFeatures(id=item, found=bool(found), values=values, features=rows.row(number))
                    for number, (item, found, values) in enumerate(
                        zip(query.items, known, self.lookup.raw_items(query.items), strict=True)
                    )
                ]
        return m.FeaturesAnswer(user=user, items=items, degraded=degraded, version=self.version)

    def score(self, rows: pl.DataFrame) -> Array:
        """Chances for raw rows of the log, as evaluation would give them. Columns that are not there are missing."""
        ranker = self._ranker()
        read = {name for feature in ranker.features for name in self.lookup.columns_of(feature)}
        typed = self.lookup.raw_columns
        unknown = [name for name in rows.columns if name not in typed.kinds]
        if unknown:
            raise BadRequest(
                f'The log has no column "{unknown[0]}"; the model reads: {", ".join(sorted(read))}.'
            )
        try:
            frame = typed.cast(rows, sorted(read))
            with self.gate.reading():
                found = [
                    ranker.score(self.lookup.batch(part, ranker.layout))
                    for part in frame.iter_slices(_ROWS_AT_ONCE)
                ]
        except (pl.exceptions.PolarsError, RecmillError) as error:
            raise BadRequest(f"The rows cannot be scored: {error}") from None
        return np.concatenate(found) if found else np.empty(0, np.float32)

    # stages for other roles

    def lookup_rows(self, query: m.Rank) -> tuple[bytes, list[bytes], list[str]]:
        """Stored features of a user and of items, packed as stores keep them: with the request's own, no context."""
        users, items = self._sides()
        with self.gate.reading():
            person = self.lookup.person(query)
            rows, degraded = self._any_items(query.items, person, None)
            user = self._codecs["user"].encode(person.features.batch(users.layout))[0]
            packed = self._codecs["item"].encode(rows.batch(items.layout))
        return user, packed, [*person.degraded, *degraded]

    def rank_rows(self, user: bytes, items: Sequence[bytes], context: m.Values) -> m.RankAnswer:
        """Chances from packed rows; a row that is damaged or of another bundle counts as unknown."""
        ranker, (users, items_of_bundle) = self._ranker(), self._sides()
        check_sizes(1, len(items))
        degraded = []
        with self.gate.reading():
            of_context = self.lookup.context(context)
            row = self._codecs["user"].decode([user])
            if row.unreadable[0]:
                degraded.append("features of the user: damaged or of another bundle, defaults are used")
            rows = self._codecs["item"].decode(items)
            if any(items) and not rows.found.all():
                degraded.append(
                    f"features of items: {int((~rows.found).sum())} of {len(items)} are missing, damaged or of "
                    "another bundle, defaults are used"
                )
            scores = ranker.rank(
                FeatureRows.of(row.batch, users.layout) | of_context,
                FeatureRows.of(rows.batch, items_of_bundle.layout),
            )
        return m.RankAnswer(scores=scores.tolist(), degraded=degraded, version=self.version)

    def _sides(self) -> tuple[Entities, Entities]:
        """Users and items of a bundle whose stages can run apart."""
        users, items = self.bundle.users, self.bundle.items
        if users is None or items is None:
            raise NotFound(f"Bundle {self.version} has no users and items; it only scores rows.")
        if self.lookup.crossed_features:
            raise NotFound(
                f'Feature "{self.lookup.crossed_features[0]}" looks at users and items together, so features and '
                "ranking cannot run apart. Serve this bundle with --role all."
            )
        return users, items

    # changes

    def add_items(self, items: Sequence[m.NewItem], in_store: bool = True) -> int:
        """Items that can be recommended from now on; known ones are replaced. `in_store` as for events."""
        entities, columns = self._recaller().items, self.lookup.raw_columns
        allowed = set(columns.of("item"))
        rows = [
            columns.typed({**item.values, entities.id_column: item.id}, allowed, f"Item {item.id}")
            for item in items
        ]
        raw = columns.frame(rows, list(entities.raw_schema))
        features = self.lookup.features_of("item", raw)
        with self.gate.writing():
            self._recaller().show_items(self._places([item.id for item in items]))
            self._put_items(raw, features)
        if in_store and self.writer is not None:
            self.writer.put("item", raw, features)
        return len(rows)

    def _put_items(self, raw: pl.DataFrame, features: pl.DataFrame) -> None:
        recaller, vectors = self._recaller(), None
        places = recaller.items.put(raw, features)
        if recaller.tower is not None:
            rows = FeatureRows.of(recaller.items.features(places), recaller.items.layout)
            vectors = self._item_tower.vectors(rows.batch(self._item_tower.layout))
        recaller.put_items(places, vectors)

    @cached_property
    def _item_tower(self) -> TowerModel:
        return TowerModel(self.bundle, "item")

    def remove_items(self, items: Sequence[m.Id]) -> int:
        """Items that are never recommended from now on; how many were known."""
        recaller = self._recaller()
        with self.gate.writing():
            places = self._places(items)
            known = np.unique(places[places >= 0])
            recaller.remove_items(known)
        return len(known)

    def add_events(self, events: Sequence[m.Event], in_store: bool = True) -> int:
        """What users just did joins their histories; the next answer knows of it. All of them count, or none.

        `in_store`: also in a store that is shared with others, who may have put them there already.
        """
        self._recaller()
        all_values = [self._event_values(event) for event in events]
        for event, values in zip(events, all_values, strict=True):
            self._add_event(event, values, in_store)
        return len(events)

    def _event_values(self, event: m.Event) -> dict[str, Any]:
        """The other columns of an event; BadRequest for one that the log could not hold."""
        log, columns = self.bundle.recipe.log, self.lookup.raw_columns
        ids = {log.user: event.user, log.item: event.item}
        columns.typed({name: id for name, id in ids.items() if name is not None}, columns.kinds, "The event")
        values = columns.typed(event.values, columns.kinds, "The event")
        return {name: value for name, value in values.items() if name not in ids}

    def _add_event(self, event: m.Event, values: Mapping[str, Any], in_store: bool) -> None:
        lookup, columns = self.lookup, self.lookup.raw_columns
        with self.gate.reading():
            own = lookup.raw_user(event.user, in_store=False)
            item = lookup.raw_items([event.item])[0]

        def after(raw: m.Values) -> pl.DataFrame:
            raw = raw | {name: value for name, value in values.items() if columns.owners.get(name) == "user"}
            raw |= lookup.after_event(raw, {**item, **values})
            return columns.frame([raw], lookup.columns_of_side("user"))

        user = None
        if in_store and self.writer is not None:
            user = self.writer.change_user(event.user, own, after)
        raw = after(own) if user is None else user
        features = lookup.features_of("user", raw)
        with self.gate.writing():
            lookup.own_store.put("user", raw, features)
            self._add_clicks([(event.user, event.item)])

    def _add_clicks(self, clicks: Sequence[tuple[m.Id, m.Id]]) -> None:
        recaller = self._recaller()
        places = recaller.items.places([item for _, item in clicks])
        for (user, _), place in zip(clicks, places.tolist(), strict=True):
            if place >= 0:
                recaller.seen.add(user, place)
        recaller.count_clicks(places[places >= 0])

    def apply(self, changes: Changes, in_store: bool = True) -> None:
        """Take a delta: rows and dense weights, items, users, clicks; all of it, or an error and nothing.

        Answers under way end before it, others wait.
        """
        graphs = {
            name: Graph(graph) for name, graph in changes.graphs.items() if name in ("rank", "rank_split")
        }
        tables = {name: self._table(name) for name in changes.tables}
        for name, change in changes.tables.items():
            tables[name].check(change.keys, change.rows, change.shared)
        rows = self._side_rows(changes)
        clicks = [] if changes.clicks is None else list(changes.clicks.select("user", "item").iter_rows())
        with self.gate.writing():
            for name, change in changes.tables.items():
                tables[name].update(change.keys, change.rows)
                tables[name].remove(change.removed)
                if change.shared is not None:
                    tables[name].update_shared(change.shared)
            if self.ranker is not None:
                self.ranker.swap(graphs)
            for side, raw, features in rows:
                if side == "item":
                    self._put_items(raw, features)
                else:
                    self.lookup.own_store.put(side, raw, features)
            if clicks:
                self._add_clicks(clicks)
        if in_store and self.writer is not None:
            self.writer.put_delta(self.version, self.num_deltas + 1, rows)

    def _table(self, name: str) -> RowTable:
        collection, _, table = name.partition("/")
        return self.bundle.collection(collection).rows[table]

    def _side_rows(self, changes: Changes) -> list[SideRows]:
        """Items and users of a delta with their features; an error when they do not fit."""
        rows: list[SideRows] = []
        sides: dict[Side, pl.DataFrame | None] = {"item": changes.items, "user": changes.users}
        for side, raw in sides.items():
            if raw is not None and raw.height:
                features = self.lookup.features_of(side, raw)
                entities_of(self.bundle, side).fitted(raw, features)
                rows.append((side, raw, features))
        return rows

    def store_delta(self, number: int, changes: Changes) -> None:
        """Give the store the rows of a delta that was applied without it."""
        if self.writer is not None:
            self.writer.put_delta(self.version, number, self._side_rows(changes))

    def close(self) -> None:
        """Let go of a store of its own; answers from then on come from the bundle."""
        if self.lookup.store is not self.lookup.own_store:
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

    def _places(self, items: Sequence[m.Id]) -> Array:
        return self._recaller().items.places(items)

    @cached_property
    def _codecs(self) -> dict[str, RowCodec]:
        sides = {"user": self.bundle.users, "item": self.bundle.items}
        digest = self.bundle.plan.digest()
        return {
            name: RowCodec(side.layout, side.unknown_row, digest)
            for name, side in sides.items()
            if side is not None
        }

    def _any_items(
        self, items: Sequence[m.Id], person: UserRow, deadline: float | None
    ) -> tuple[FeatureRows, list[str]]:
        """Features of items in their order; those of unknown ones by the Plan, from the id alone."""
        places = self._places(items)
        rows, degraded = self.lookup.items(places, person, deadline)
        unknown_items = np.flatnonzero(places < 0)
        if len(unknown_items):
            raw = self.lookup.raw_items([items[number] for number in unknown_items.tolist()])
            rows = rows.replaced(unknown_items, self.lookup.unknown_items(raw, person))
        return rows, degraded

    def _answer(
        self,
        chosen: Candidates,
        scores: Array,
        degraded: list[str],
        stages: Mapping[str, float],
        trace: m.Trace | None = None,
    ) -> m.Answer:
        ids = self._recaller().items.ids(chosen.places)
        items = [
            m.Item(id=id, score=score, channel=NAMES[channel], recall_score=recall_score)
            for id, score, channel, recall_score in zip(
                ids, scores.tolist(), chosen.channels.tolist(), chosen.scores.tolist(), strict=True
            )
        ]
        stages = {name: round(ms, 3) for name, ms in stages.items()}
        return m.Answer(items=items, degraded=degraded, version=self.version, stages=stages, trace=trace)

    def _trace(self, person: UserRow, chosen: Candidates, candidates: Candidates, clock: Clock) -> m.Trace:
        names, counts = np.unique(candidates.channels, return_counts=True)
        entities = self._recaller().items
        raw = person.given
        if person.found and person.id is not None:
            raw = {**self.lookup.raw_user(person.id), **raw}
        rows = FeatureRows.of(entities.features(chosen.places), entities.layout)
        return m.Trace(
            stages={name: round(ms, 3) for name, ms in clock.stages.items()},
            counts={
                **{NAMES[name]: int(count) for name, count in zip(names, counts, strict=True)},
                "candidates": len(candidates.places),
                "answered": len(chosen.places),
            },
            user=raw,
            items=entities.raw(chosen.places).to_dicts(),
            user_features=person.features.row(0),
            item_features=[rows.row(number) for number in range(rows.size)],
        )

    def warm_up(self) -> None:
        """Touch what answers need, so that the first one is as quick as the next."""
        users = self.bundle.users
        if self.recaller is not None:
            known = users.ids(np.arange(min(8, len(users)))) if users is not None else []
            for user in (None, *known):
                self.recommend(m.Recommend(user=user))
        if self.ranker is not None:
            columns = self.lookup.columns_of(self.ranker.features[0])
            self.score(pl.DataFrame({name: [None] * 100 for name in columns}))


def open_bundle(
    path: str | Path, features: str | None = None, trust_code: Collection[str] = ()
) -> Recommender:
    """A recommender from what `recmill export` wrote; `features` is the URL of a store, such as redis://host:6379.

    Functions that its features call are imported only from modules and packages in `trust_code`.
    """
    from recmill.artifacts.feature_store import RedisStore

    bundle = Bundle.open(path, trust_code)
    return Recommender(bundle, RedisStore(features, bundle) if features else None)


def check_sizes(k: int, candidates: int) -> None:
    if not 1 <= k <= MAX_K:
        raise BadRequest(f"k must be from 1 to {MAX_K:,}, got {k}.")
    if not 0 <= candidates <= MAX_CANDIDATES:
        raise BadRequest(f"At most {MAX_CANDIDATES:,} candidates or items at once, got {candidates:,}.")
