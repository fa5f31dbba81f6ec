"""Live changes through an event stream: every replica and the trainer apply the same changes in the same order.

The events and items of a request are appended to the stream, and every process applies the entries of the stream,
including its own. Nothing else is applied, so replicas differ only in how far they are.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import polars as pl

from recmill.artifacts.event_stream import ITEM, REMOVED, Entry, EventStream, written_at
from recmill.errors import ArtifactError, RecmillError, StoreError
from recmill.logs.entries import after_export
from recmill.recipe.recipe import POSITION
from recmill.stages.serve import messages as m
from recmill.stages.serve.changes import Change
from recmill.stages.serve.followed import events_of, parse_events
from recmill.stages.serve.log_rows import log_row
from recmill.stages.serve.recommender import Recommender

if TYPE_CHECKING:
    from recmill.stages.serve.versions import Versions

_ENTRIES_AT_ONCE = 1_000
_WAIT_SECONDS = 0.5  # seconds to wait for new entries, in one call
_RETRY_SECONDS = 0.25
_APPLIED_SECONDS = 1.0  # seconds that a request waits until its own changes are applied here
_START_SECONDS = 10.0  # seconds that startup, or a new version, waits to catch up
_logger = logging.getLogger("recmill.serve")


class LiveStream:
    """Appends changes to a stream and applies its entries to every open version, in a thread of its own."""

    def __init__(self, url: str, versions: Versions) -> None:
        self._stream, self._versions = EventStream(url), versions
        self._items_until = -1  # item changes up to this entry are applied; -1: earlier ones are still unread
        self._applied = threading.Condition()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="events", daemon=True)
        self.problem: str | None = None  # why the stream cannot be read; None while it can

    @property
    def key(self) -> str:
        return self._stream.key

    def start(self) -> None:
        """Follow the stream; returns when its end is reached, or after some seconds."""
        ends_at = time.monotonic() + _START_SECONDS
        self._thread.start()
        with self._applied:
            while self._items_until < 0 and self.problem is None and (left := ends_at - time.monotonic()) > 0:
                self._applied.wait(left)
        self.catch_up(self._versions.current)

    def close(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5)
        self._stream.close()

    # changes of requests

    def publish(self, change: Change) -> int:
        """Append a change; returns how many of its things are new. Raises StoreError when Redis refuses it."""
        current, number, last = self._versions.current, 0, 0
        current.check_items(change.items)
        rows = {event.id or secrets.token_hex(12): log_row(current, event) for event in change.events}
        changes = [(ITEM, str(item.id), msgspec.json.encode(item).decode()) for item in change.items]
        changes += [(REMOVED, str(id), msgspec.json.encode(id).decode()) for id in change.removed]
        if changes:
            number += len(change.items) + current.num_known(change.removed)
            last = self._stream.change_items(changes)
        if rows:
            added = self._stream.add_events(rows)
            number += sum(is_new for _, is_new in added)
            last = max(last, *(entry for entry, _ in added))
        self._wait_until_applied(last)
        return number

    def _wait_until_applied(self, entry: int) -> None:
        """Wait, so that the next answer reflects the change, unless this process is far behind."""
        with self._applied:
            self._applied.wait_for(
                lambda: min(self._items_until, self._versions.current.followed.position) >= entry,
                _APPLIED_SECONDS,
            )

    # following

    def catch_up(self, version: Recommender) -> None:
        """Apply the stream to one version, as far as time and Redis allow."""
        ends_at = time.monotonic() + _START_SECONDS
        try:
            while time.monotonic() < ends_at and (
                entries := self._stream.read(version.followed.position, _ENTRIES_AT_ONCE)
            ):
                self._apply_events(entries, [version])
        except StoreError as error:
            _logger.warning("version %s lacks the newest events: %s", version.version, error)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._advance()
                self._report(None)
            except StoreError as error:
                self._report(str(error))
                self._stop.wait(_RETRY_SECONDS)
            except Exception:
                _logger.exception("following %s failed", self._stream)
                self._stop.wait(_RETRY_SECONDS)

    def _report(self, problem: str | None) -> None:
        if problem is not None and self.problem is None:
            _logger.warning("events wait: %s", problem)
        with self._applied:
            self.problem = problem
            self._applied.notify_all()

    def _advance(self) -> None:
        """Apply the next entries, to each version those that it lacks."""
        if self._items_until < 0:
            self._read_earlier_items()
        versions = self._versions.all()
        after = min(self._items_until, *(version.followed.position for version in versions))
        entries = self._stream.read(after, _ENTRIES_AT_ONCE, _WAIT_SECONDS)
        for is_item, run in itertools.groupby(entries, lambda entry: entry.item_change is not None):
            if is_item:
                self._change_items(list(run))
            else:
                self._apply_events(list(run), versions)
        if entries:
            self._reach(entries[-1].number, versions)

    def _read_earlier_items(self) -> None:
        """Read the items that were changed before this process began."""
        entries, until = self._stream.items()
        self._versions.apply_items(change for entry in entries if (change := _change_of(entry)) is not None)
        self._items_until = until

    def _change_items(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            change = _change_of(entry)
            if entry.number <= self._items_until or change is None:
                continue
            try:
                self._versions.apply(change)
            except RecmillError as error:
                _logger.warning("a change of an item is left out: %s", error)

    def _apply_events(self, entries: Sequence[Entry], versions: Sequence[Recommender]) -> None:
        """Apply the log rows among the entries to versions that lack them."""
        recipe = self._versions.current.bundle.recipe
        rows = parse_events(recipe, [entry for entry in entries if entry.item_change is None])
        for version in versions:
            with version.catching_up:
                bundle, position = version.bundle, version.followed.position
                try:
                    new = rows.filter(pl.col(POSITION) > position)
                    new = after_export(new, str(recipe.log.time), bundle.manifest)
                    version.follow_events(events_of(recipe, bundle.plan, new))
                except Exception:  # for example another recipe's version: the others continue
                    _logger.exception("version %s does not take %d events", version.version, rows.height)
                version.followed.position = max(position, entries[-1].number)

    def _reach(self, entry: int, versions: Sequence[Recommender]) -> None:
        for version in versions:
            with version.catching_up:
                version.followed.position = max(version.followed.position, entry)
        with self._applied:
            self._items_until = max(self._items_until, entry)
            self._applied.notify_all()


def check_followable(recommender: Recommender) -> None:
    """Raise ArtifactError for a bundle whose rows are not events of users and items in time."""
    log = recommender.bundle.recipe.log
    missing = [name for name in ("user", "item", "time") if getattr(log, name) is None]
    if missing:
        raise ArtifactError(
            f"--events: recipe {recommender.bundle.recipe.name} has no log.{missing[0]}. Events are rows with a user, "
            "an item and a time; remove --events, or add it to the recipe and export again."
        )


def _change_of(entry: Entry) -> Change | None:
    """The item change of an entry; None, with a warning, when the entry is not ours."""
    content, at = entry.item_change or b"", written_at(entry.number)
    try:
        if ITEM in entry.fields:
            return Change(at=at, items=[msgspec.json.decode(content, type=m.NewItem)])
        return Change(at=at, removed=[msgspec.json.decode(content, type=m.Id)])
    except msgspec.MsgspecError as error:
        _logger.warning("a change of an item is left out: %s", error)
        return None
