"""follow: keep training a model on a log that is still written, and publish deltas for servers.

Every few seconds the new rows are trained on and a delta of the bundle is published: changed embedding rows, the
ranker's dense weights, and items and users that are new or have new events. The towers' dense weights stay fixed, so
that the vectors of all other items remain valid; a new export updates them.

The only state is what is published. A follower that was killed starts from the bundle again, repeats the training on
the rows since its export and continues with the next delta; each click is in exactly one delta. A delta is published
together with the record of its rows, so that each row counts once.
"""

from __future__ import annotations

import math
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from recmill.artifacts.bundle.bundle import Bundle, current_of
from recmill.artifacts.bundle.delta import Changes, TableChange, deltas_folder, deltas_of, write_delta
from recmill.artifacts.bundle.remote import BundleCopy, DeltaPublisher, deltas_written
from recmill.artifacts.checkpoint.checkpoint import Checkpoint
from recmill.artifacts.event_stream import is_stream
from recmill.artifacts.lock import lock_folder
from recmill.dataset.batch import Batch, Layout, between, collate, joined
from recmill.embeddings.table import EmbeddingTable
from recmill.errors import ArtifactError, FeatureError, LogError, StorageError, StoreError
from recmill.features.history import UserHistory, meets_condition
from recmill.learner.graphs.graphs import Graphs
from recmill.learner.graphs.layers import layers_of
from recmill.learner.ranking import Ranker
from recmill.learner.retrieval import Retriever
from recmill.learner.saved import open_learner
from recmill.logs.base import LogFile, open_source
from recmill.logs.rows import RowFunction, row_function
from recmill.logs.tally import Tally
from recmill.recipe import recipe as r
from recmill.recipe.kinds import parts_of_features
from recmill.recipe.recipe import POSITION
from recmill.recipe.trust import modules_of
from recmill.stages.train.config import FollowConfig
from recmill.stages.train.followed import FollowedStream, Items, open_followed
from recmill.storage.objects import is_url

Learners = Ranker | Retriever
_STORAGE_PAUSE = 5.0  # seconds between two attempts to reach the storage
_MEMORY = 2 << 30  # bound on side tables


@dataclass(frozen=True)
class PublishedDelta:
    """A published delta: its number, and what went into it."""

    path: Path
    number: int
    num_rows: int
    num_bad: int
    num_keys: int
    num_items: int
    num_users: int
    loss: dict[str, float]
    seconds: float


class Follower:
    """Continues training from where a bundle's log ended."""

    def __init__(self, folder: Checkpoint, data: str, bundles: Path, options: FollowConfig) -> None:
        self.bundles, self.options = bundles, options
        self.bundle = Bundle.open(bundles, modules_of(folder.recipe))
        self.recipe = folder.recipe
        self._check(folder)
        steps = self.bundle.manifest["checkpoint"]["steps"]
        self.learners: dict[str, Learners] = {
            model: open_learner(folder, model, str(step), options.threads).learner
            for model, step in steps.items()
            if not (model == "retrieval" and _is_sequence_model(self.recipe))
        }
        for learner in self.learners.values():
            learner.trains_dense = isinstance(learner, Ranker)
        self.source = open_followed(data, self.recipe, self.bundle, bundles)
        self.tables = _side_tables(self.recipe, data, options)
        self.histories = Histories(self.recipe, self.bundle)
        self.number = len(deltas_of(bundles, self.bundle.version))
        ranker = self.learners.get("ranking")
        self._graphs = Graphs(ranker, parts_of_features(self.recipe)) if ranker is not None else None
        self._dense()  # traced now, so that the first delta does not wait for it
        self._functions: dict[int, tuple[tuple[LogFile, ...], RowFunction]] = {}
        self._recent: Batch | None = None  # earlier clicks, to distinguish new ones
        self._learn_published()

    def _check(self, folder: Checkpoint) -> None:
        if folder.recipe != self.bundle.recipe:
            raise ArtifactError(
                f"Bundle {self.bundle.path} was exported from another recipe than {folder.path} holds. "
                "Run `recmill export` again."
            )
        check_rows(self.recipe)

    def _learn_published(self) -> None:
        """Repeat what an earlier follower learned. Its items, users and clicks are published already."""
        if not self.number:
            return
        rows = self._with_operations(list(self.source.published()))
        if rows.height:
            self._learn_all(rows)

    def publish_once(self) -> PublishedDelta | None:
        """Train on the new rows and publish them; None when there are none."""
        started = time.monotonic()
        tally = Tally()
        frames = self.source.read(tally)
        rows = self._with_operations(frames)
        if not rows.height:
            return None
        loss = self._learn_all(rows)
        changes = replace(self._changes(rows), events=self.source.kept(frames))
        self.number += 1
        facts = {
            "created_at": time.time(),
            "log_end": self._log_end(rows),
            **self.source.facts(),
            "num_rows": rows.height,
        }
        digest = self.bundle.manifest["recipe_digest"]
        path = write_delta(self.bundles, self.bundle.version, self.number, digest, changes, facts)
        self._delta_published()
        return PublishedDelta(
            path,
            self.number,
            rows.height,
            tally.bad,
            sum(len(change.keys) for change in changes.tables.values()),
            0 if changes.items is None else changes.items.height,
            0 if changes.users is None else changes.users.height,
            loss,
            time.monotonic() - started,
        )

    def _delta_published(self) -> None:
        try:
            self.source.delta_published()
        except StoreError as error:  # the next delta publishes it
            self.options.warn(str(error))

    def close(self) -> None:
        self.source.close()

    @property
    def is_outdated(self) -> bool:
        """Whether another version has become the current one."""
        return current_of(self.bundles) != self.bundle.version

    def _learn_all(self, rows: pl.DataFrame) -> dict[str, float]:
        """Train every model on the rows; the loss of each."""
        applied = self.bundle.plan.apply(self.histories.keep_long(rows), labels=True)
        return {model: self._learn(learner, applied) for model, learner in self.learners.items()}

    def _with_operations(self, frames: Sequence[pl.DataFrame]) -> pl.DataFrame:
        """Rows of the log with all their columns, in log order."""
        if not frames:
            return pl.DataFrame()
        rows = pl.concat(frames)
        for number, operation in enumerate(self.recipe.rows):
            if isinstance(operation, r.History):
                rows = self.histories.add(operation, rows)
            else:
                rows = with_items(
                    self._function(number, operation)(rows), self.recipe.log.item, self.source.items
                )
        return rows

    def _function(self, number: int, operation: r.RowOperation) -> RowFunction:
        """The operation with its side table's current contents, or the previous ones while the file is written."""
        files: tuple[LogFile, ...] = ()
        if isinstance(operation, r.Join):
            files = open_source(self.recipe.tables[operation.table], self.tables).files
        known = self._functions.get(number)
        if known is not None and known[0] == files:
            return known[1]
        try:
            function = row_function(self.recipe, operation, self.tables, _MEMORY)
        except LogError as error:
            if known is None:
                raise
            self.options.warn(str(error))
            return known[1]
        assert function is not None
        self._functions[number] = files, function
        return function

    def _learn(self, learner: Learners, applied: pl.DataFrame) -> float:
        """One pass over the new rows; returns the mean loss."""
        layout = Layout.of(self.bundle.columns, learner.layout.features)
        batch = collate(applied, layout)
        losses = [learner.step(part, self.options.rate).loss for part in self._batches(learner, batch)]
        return float(np.mean(losses)) if losses else 0.0

    def _batches(self, learner: Learners, batch: Batch) -> Iterator[Batch]:
        size = learner.batch_size
        for start in range(0, batch.size, size):
            part = between(batch, start, min(start + size, batch.size))
            if isinstance(learner, Retriever) and part.size < size:
                part = self._with_recent(part, size)
            yield part

    def _with_recent(self, batch: Batch, size: int) -> Batch:
        """Fill the batch up with earlier rows: a softmax over few items teaches little."""
        past = self._recent
        together = (
            batch
            if past is None
            else joined([between(past, max(0, past.size + batch.size - size), past.size), batch])
        )
        self._recent = together
        return together

    # changes since the last delta

    def _changes(self, rows: pl.DataFrame) -> Changes:
        tables = {
            name: change
            for learner in self.learners.values()
            for name, table in learner.tables.items()
            if (change := _change_of(table)) is not None
        }
        return Changes(
            tables, self._dense(), self._layers(), self._items(rows), self._users(rows), self._clicks(rows)
        )

    def _dense(self) -> dict[str, bytes]:
        """The ranker's graphs with the current weights."""
        if self._graphs is None:
            return {}
        with tempfile.TemporaryDirectory() as folder:
            return {name: path.read_bytes() for name, path in self._graphs.write(Path(folder)).items()}

    def _layers(self) -> bytes | None:
        """The current weights for servers that use native matrix products."""
        ranker = self.learners.get("ranking")
        layers = layers_of(ranker) if isinstance(ranker, Ranker) else None
        return layers.to_bytes() if layers is not None else None

    def _items(self, rows: pl.DataFrame) -> pl.DataFrame | None:
        items = self.bundle.items
        return None if items is None else _last_of_each(rows, items.id_column, list(items.raw_schema))

    def _users(self, rows: pl.DataFrame) -> pl.DataFrame | None:
        users = self.bundle.users
        if users is None:
            return None
        known = [name for name in users.raw_schema if name in rows.columns]
        newest = _last_of_each(rows, users.id_column, known)
        return self.histories.put_into(newest)

    def _clicks(self, rows: pl.DataFrame) -> pl.DataFrame | None:
        log, label = self.recipe.log, self.recipe.click_label
        if log.user is None or log.item is None:
            return None
        clicks = rows if label is None else self.bundle.plan.keep_positive(label, rows)
        columns = [pl.col(log.user).alias("user"), pl.col(log.item).alias("item")]
        if isinstance(self.source, FollowedStream):
            columns.append(pl.col(POSITION).alias("entry"))
        return clicks.select(columns).drop_nulls()

    def _log_end(self, rows: pl.DataFrame) -> float | None:
        column = self.recipe.log.time
        latest = rows[column].max() if column is not None else None
        return float(latest) if isinstance(latest, (int, float)) else None


def with_items(rows: pl.DataFrame, id_column: str | None, items: Items) -> pl.DataFrame:
    """Rows with the columns of items that servers received: side tables may not have them yet."""
    if id_column is None or not items or not rows.height:
        return rows
    ids = rows[id_column].unique().drop_nulls().to_list()
    known = [{**items[str(id)], id_column: id} for id in ids if str(id) in items]
    names = [name for name in rows.columns if name != id_column and any(name in item for item in known)]
    if not names:
        return rows
    schema = {name: rows.schema[name] for name in (id_column, *names)}
    values = pl.DataFrame(known, schema, strict=False)
    return rows.update(values, on=id_column, how="left")


def _side_tables(recipe: r.Recipe, data: str, options: FollowConfig) -> str:
    """The directory of the recipe's side tables."""
    joined = [operation.table for operation in recipe.rows if isinstance(operation, r.Join)]
    if joined and options.tables is None and is_stream(data):
        raise LogError(
            f'Recipe "{recipe.name}" joins side tables ({", ".join(joined)}), which are not in the stream. '
            "Add --tables DIR, the directory that holds them."
        )
    return str(options.tables) if options.tables is not None else data


def _is_sequence_model(recipe: r.Recipe) -> bool:
    """Whether training changes rows of items drawn from all, whose stored vectors no delta would update."""
    return recipe.retrieval is not None and recipe.retrieval.model == "sasrec"


def check_rows(recipe: r.Recipe) -> None:
    """Raise FeatureError for row operations that cannot be followed."""
    for operation in recipe.rows:
        if not isinstance(operation, (r.Filter, r.Sample, r.Join, r.History)):
            raise FeatureError(
                f'[[rows]] of recipe "{recipe.name}" has {operation.operation_name()}, which reads later '
                "rows, so this log cannot be followed. Export at intervals instead."
            )
        if isinstance(operation, r.History) and operation.by != recipe.log.user:
            raise FeatureError(
                f'[[rows]] of recipe "{recipe.name}" has a history by "{operation.by}", but a bundle holds '
                f'histories by log.user alone ("{recipe.log.user}"). Export at intervals instead.'
            )


def follow(
    folder: Checkpoint,
    data: str,
    address: str | Path,
    options: FollowConfig,
    stop: threading.Event,
    report: Callable[[PublishedDelta], None] = lambda published: None,
) -> int:
    """Publish deltas until stopped; returns how many. Switches to a new export when it becomes current."""
    seconds = math.inf if options.max_seconds is None else options.max_seconds
    count, ends_at = 0, math.inf
    while not stop.is_set() and time.monotonic() < ends_at:
        with _only_follower(address, options, stop) as (bundles, publications):
            follower = Follower(folder, data, bundles, options)
            ends_at = min(ends_at, time.monotonic() + seconds)
            try:
                if follower.bundle.version == publications.version:
                    count += _follow_version(follower, publications, stop, ends_at, report)
            finally:
                follower.close()
    return count


class Publications:
    """Publication of one version's deltas in a local folder: writing them there publishes them."""

    def __init__(self, version: str) -> None:
        self.version = version

    def refresh(self) -> None:
        """Update the folder, so that it shows which version is current."""

    def publish(self, delta: PublishedDelta) -> bool:
        """Publish a delta in the folder; False when the follower was stopped first."""
        return True


class StoredPublications(Publications):
    """Publication in object storage. While it is unreachable, the follower waits: a delta builds on the one before."""

    def __init__(self, publisher: DeltaPublisher, options: FollowConfig, stop: threading.Event) -> None:
        super().__init__(publisher.version)
        self.publisher, self.options, self.stop = publisher, options, stop

    def refresh(self) -> None:
        self._until_it_answers(self.publisher.copy.refresh)

    def publish(self, delta: PublishedDelta) -> bool:
        return self._until_it_answers(lambda: self.publisher.publish(delta.number))

    def _until_it_answers(self, call: Callable[[], None]) -> bool:
        while not self.stop.is_set():
            try:
                call()
            except StorageError as error:
                self.options.warn(f"{error} Trying again in {_STORAGE_PAUSE:g} s.")
                self.stop.wait(_STORAGE_PAUSE)
            else:
                return True
        return False


@contextmanager
def _only_follower(
    address: str | Path, options: FollowConfig, stop: threading.Event
) -> Iterator[tuple[Path, Publications]]:
    """The local folder of bundles and the publication of deltas of its current version, for one follower at a time."""
    if not is_url(address):
        bundles = Path(address)
        version = Bundle.open(bundles).version
        with lock_folder(deltas_folder(bundles, version)):
            yield bundles, Publications(version)
        return
    copy = BundleCopy(str(address), part="followed")
    copy.refresh()
    with deltas_written(copy, str(current_of(copy.folder))) as publisher:
        yield copy.folder, StoredPublications(publisher, options, stop)


def _follow_version(
    follower: Follower,
    publications: Publications,
    stop: threading.Event,
    ends_at: float,
    report: Callable[[PublishedDelta], None],
) -> int:
    """Publish deltas of one version while it is current; returns how many."""
    count, is_behind = 0, False
    while not stop.is_set() and not follower.is_outdated:
        began, published = time.monotonic(), None
        try:
            published = follower.publish_once()
            is_behind = False
        except StoreError as error:
            if not is_behind:
                follower.options.warn(f"{error} Nothing is learned until it does.")
            is_behind = True
        if published is not None and publications.publish(published):
            count += 1
            report(published)
        publications.refresh()
        if time.monotonic() >= ends_at:
            break
        stop.wait(max(0.0, follower.options.every_seconds - (time.monotonic() - began)))
    return count


class Histories:
    """The histories of all users: from the bundle, then updated with new rows."""

    def __init__(self, recipe: r.Recipe, bundle: Bundle) -> None:
        self.operations = [operation for operation in recipe.rows if isinstance(operation, r.History)]
        self.users = bundle.users
        self._of_user: dict[tuple[r.History, Any], UserHistory] = {}

    def add(self, history: r.History, rows: pl.DataFrame) -> pl.DataFrame:
        """Append new rows; returns them with the histories that prepare would give them."""
        ordered = rows.with_row_index("__row").sort(history.by, history.order, "__row", nulls_last=False)
        is_event = meets_condition(history, ordered).to_list()
        events = ordered.select(history.columns).iter_rows(named=True)
        lists: list[dict[str, list[Any]]] = [{}] * rows.height
        keys = ordered.select("__row", history.by, history.order).iter_rows()
        for (row, user, at), counts, event in zip(keys, is_event, events, strict=True):
            known = self._history(history, user)
            lists[row] = known.before(at)
            if counts and user is not None:
                known.push(event, at)
        added = [
            pl.Series(column, [one[column] for one in lists], pl.List(rows.schema[name]))
            for name, column in history.list_columns.items()
        ]
        return rows.with_columns(added)

    def keep_long(self, rows: pl.DataFrame) -> pl.DataFrame:
        """The rows that models train on, by `min_length`; the others still count as events."""
        for history in self.operations:
            column = next(iter(history.list_columns.values()))
            # A stored history does not record how long it was before it was cut.
            min_length = min(history.min_length, history.max_length)
            rows = rows.filter(pl.col(column).list.len() >= min_length)
        return rows

    def put_into(self, users: pl.DataFrame) -> pl.DataFrame:
        """Users with their current histories."""
        for history in self.operations:
            lists = [self._history(history, user).latest() for user in users[history.by]]
            for column in history.list_columns.values():
                values = [one[column] for one in lists]
                users = users.with_columns(pl.Series(column, values, users.schema.get(column)))
        return users

    def _history(self, history: r.History, user: Any) -> UserHistory:
        if user is None:
            return UserHistory(history)
        known = self._of_user.get((history, user))
        if known is None:
            known = self._of_user[history, user] = UserHistory(history, self._stored(user))
        return known

    def _stored(self, user: Any) -> dict[str, Any]:
        return (self.users.raw_row(user) or {}) if self.users is not None else {}


def _last_of_each(rows: pl.DataFrame, by: str, columns: list[str]) -> pl.DataFrame:
    known = [name for name in columns if name in rows.columns]
    return rows.select(known).drop_nulls(by).unique(by, keep="last", maintain_order=True)


def _change_of(table: EmbeddingTable) -> TableChange | None:
    """Rows that changed since the last snapshot; None when there are none."""
    with table.begin_snapshot(delta=True) as snapshot:
        chunks = list(snapshot)
        shared = snapshot.waiting.shared_rows if table.spec.shared_rows else None
        removed = snapshot.removed
    if not any(len(chunk.keys) for chunk in chunks) and not len(removed):
        return None
    keys = np.concatenate([chunk.keys for chunk in chunks]) if chunks else np.empty(0, np.int64)
    rows = (
        np.concatenate([chunk.rows for chunk in chunks])
        if chunks
        else np.empty((0, table.spec.dim), np.float32)
    )
    return TableChange(keys, rows, removed, shared)
