"""What all doors ask: the version that serves, the one before it, a canary and a shadow; versions come and go live."""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl

from recmill.artifact import MANIFEST
from recmill.batches import Array
from recmill.bundle import Bundle, current_of, previous_of, set_current, versions_of
from recmill.bundle.delta import Delta, deltas_folder
from recmill.errors import ArtifactError, NotFound, RecmillError
from recmill.serve import messages as m
from recmill.serve.changes import Catalogue, Change, Journal
from recmill.serve.coordinate import Coordinator, Stages
from recmill.serve.recommender import Recommender
from recmill.serve.request_log import RequestLog
from recmill.serve.telemetry import Telemetry
from recmill.store import DEFAULT_PREFIX, RedisStore

if TYPE_CHECKING:
    from recmill.serve.server import Settings

_NOT_SHOWN = ("files", "recipe", "checkpoint", "log_sizes")  # large, or paths of the machine that made it
_OTHERS = 2  # versions that are opened beside those that serve, to compare with
_SHADOW_QUEUE = 64
_LOOK_EVERY = 0.5  # seconds between looks for new versions and deltas
_logger = logging.getLogger("recmill.serve")


@dataclass(frozen=True)
class Options:
    """What serves beside the current version, and from where features come.

    `canary` is a version and the share of users that it answers; `shadow` a version that is asked too, and compared.
    """

    features: str | None = None  # URL of a store
    prefix: str | None = None  # of its keys
    role: str = "all"
    stages: Stages | None = None  # of other processes, for the recommend role
    request_log: RequestLog | None = None
    watch_seconds: float | None = None  # how often to look for versions and deltas; None: never
    canary: tuple[str, float] | None = None
    shadow: str | None = None
    trust_code: tuple[str, ...] = ()  # modules and packages of functions that bundles may call


class Service:
    """Answers by the version that a folder of bundles says, and by others on request. Safe to call from any thread."""

    def __init__(self, path: Path, options: Options = Options(), telemetry: Telemetry | None = None) -> None:  # noqa: B008, frozen
        self.path = path
        self.options = options
        self.telemetry = telemetry
        self.ready = False
        self.started_at = time.time()
        self._lock = threading.Lock()  # of the versions below
        self._others: dict[str, Recommender] = {}
        self._catalogue = Catalogue()
        folder = telemetry.folder if telemetry is not None else None  # of several processes on one port
        self._journal = Journal(folder / "changes.jsonl") if folder is not None else None
        looks = options.watch_seconds is not None or self._journal is not None
        self._watcher = Watcher(self, options.watch_seconds, telemetry) if looks else None
        self._coordinator = Coordinator(options.stages) if options.stages is not None else None
        self._shadow_pool = ThreadPoolExecutor(1, "shadow") if options.shadow else None
        self._shadowing = threading.BoundedSemaphore(_SHADOW_QUEUE)
        self.folder = path if current_of(path) is not None else path.parent
        self.current = self._open(Bundle.open(path, options.trust_code))
        self.previous: Recommender | None = None
        self._canary: Recommender | None = None
        self._shadow: Recommender | None = None
        self._canary = self._named(options.canary[0]) if options.canary else None
        self._shadow = self._named(options.shadow) if options.shadow else None

    def _open(self, bundle: Bundle) -> Recommender:
        url, prefix = self.options.features, self.options.prefix or DEFAULT_PREFIX
        store = RedisStore(url, bundle, prefix) if url else None
        recommender = Recommender(bundle, store)
        if self.telemetry is not None:
            recommender.lookup.store_failed = self.telemetry.store_failed
            recommender.lookup.rows_lacking = self.telemetry.rows_lacking
        return recommender

    def warm_up(self) -> None:
        """Be as quick from the first answer on; then say so."""
        for recommender in (self.current, self._canary, self._shadow):
            if recommender is not None:
                recommender.warm_up()
        if self._watcher is not None:
            self._watcher.look()
            self._watcher.start()
        self.ready = True

    def close(self) -> None:
        self.ready = False
        if self._watcher is not None:
            self._watcher.close()
        if self._shadow_pool is not None:
            self._shadow_pool.shutdown(cancel_futures=True)
        if self.options.request_log is not None:
            self.options.request_log.close()
        if self.options.stages is not None:
            self.options.stages.close()
        for recommender in (self.current, self.previous, self._canary, self._shadow, *self._others.values()):
            if recommender is not None:
                recommender.close()

    # questions

    @property
    def bundle(self) -> Bundle:
        return self.current.bundle

    @property
    def num_deltas(self) -> int:
        """Of the current version, that were applied."""
        return self.current.num_deltas

    def recommend(self, query: m.Recommend) -> m.Answer:
        began = time.perf_counter()
        answer = self._for(query.user, query.version).recommend(query)
        if self.options.request_log is not None:
            self.options.request_log.add(query, answer, time.perf_counter() - began, answer.stages)
        self._compare(lambda shadow: _differences(answer, shadow.recommend(query)))
        return answer

    def recall(self, query: m.Recall) -> m.Answer:
        return self._for(query.user, query.version).recall(query)

    def rank(self, query: m.Rank) -> m.Ranked:
        ranked = self._for(query.user, query.version).rank(query)
        self._compare(lambda shadow: _largest(ranked.scores, shadow.rank(query).scores))
        return ranked

    def features(self, query: m.Features) -> m.KnownFeatures:
        return self.current.features(query)

    def score(self, rows: pl.DataFrame) -> Array:
        return self.current.score(rows)

    def lookup_rows(self, query: m.Rank) -> tuple[bytes, list[bytes], list[str]]:
        return self.current.lookup_rows(query)

    def rank_rows(self, user: bytes, items: Sequence[bytes], context: m.Values) -> m.Ranked:
        return self.current.rank_rows(user, items, context)

    def user_ids(self, prefix: str, limit: int) -> list[m.Id]:
        users = self.bundle.users
        return [] if users is None else users.ids_with_prefix(prefix, limit)

    def _for(self, user: m.Id | None, version: str | None) -> Recommender | Coordinator:
        """The version that was asked for; else the canary for its share of users, always the same ones."""
        if self._coordinator is not None:
            return self._coordinator
        if version is not None:
            return self._named(version)
        if (
            self._canary is not None
            and self.options.canary is not None
            and share_of(user) < self.options.canary[1]
        ):
            return self._canary
        return self.current

    def _named(self, version: str) -> Recommender:
        serving = {one.version: one for one in (self.current, self.previous) if one is not None}
        if version in serving:
            return serving[version]
        with self._lock:
            if version not in self._others:
                known = versions_of(self.folder)
                if version not in known:
                    raise NotFound(f'No version "{version}"; there are: {", ".join(known)}.')
                for old in list(self._others)[: len(self._others) - _OTHERS + 1]:
                    if self._others[old] not in (self._canary, self._shadow):
                        self._others.pop(old).close()
                self._others[version] = self._open(
                    Bundle.open(self.folder / version, self.options.trust_code)
                )
            return self._others[version]

    def _compare(self, compare: Callable[[Recommender], tuple[bool, float]]) -> None:
        """Ask the shadow too, behind the answer's back; when it falls behind, some are left out."""
        shadow, pool = self._shadow, self._shadow_pool
        if shadow is None or pool is None or not self._shadowing.acquire(blocking=False):
            return

        def work() -> None:
            try:
                differs, difference = compare(shadow)
                if self.telemetry is not None:
                    self.telemetry.shadow(differs, difference)
            except RecmillError:
                if self.telemetry is not None:
                    self.telemetry.shadow(True, 1.0)
            finally:
                self._shadowing.release()

        pool.submit(work)

    # changes by request

    def add_events(self, events: Sequence[m.Event]) -> int:
        return self._change(Change(by=os.getpid(), events=list(events)))

    def add_items(self, items: Sequence[m.NewItem]) -> int:
        return self._change(Change(by=os.getpid(), items=list(items)))

    def remove_items(self, items: Sequence[m.Id]) -> int:
        return self._change(Change(by=os.getpid(), removed=list(items)))

    def _change(self, change: Change) -> int:
        number = change.apply(self.current)
        self._catalogue.note(change)
        if self._journal is not None:
            self._journal.write(change)
        return number

    def take_changes(self) -> None:
        """Apply what other processes of this server were asked to change; they have changed a store already."""
        for change in self._journal.others() if self._journal is not None else ():
            change.apply(self.current, in_store=False)
            self._catalogue.note(change)

    def rollback(self, version: str | None = None) -> m.Status:
        """Serve an earlier version again, here and by every server of this folder."""
        version = version or (self.previous.version if self.previous else previous_of(self.folder))
        if version is None:
            raise NotFound(f"There is no version before {self.current.version} to go back to.")
        if version not in versions_of(self.folder):
            raise NotFound(f'No version "{version}"; there are: {", ".join(versions_of(self.folder))}.')
        self.swap(self.folder / version)
        set_current(self.folder, version)
        return self.status()

    # changes from the folder

    def swap(self, path: Path) -> None:
        """Serve another version, once it is whole, checked and warm; until then the old one answers."""
        bundle = Bundle.open(path, self.options.trust_code)
        expected, found = (one.manifest.get("recipe_digest") for one in (self.bundle, bundle))
        if found != expected:
            raise ArtifactError(
                f"Bundle {path} is of another recipe than {self.current.version}; it is refused."
            )
        bundle.verify()
        with self._lock:
            known = self._others.pop(bundle.version, None)
        if self.previous is not None and self.previous.version == bundle.version:
            known = self.previous
        fresh = known or self._open(bundle)
        fresh.warm_up()
        self._catalogue.give_to(fresh)
        with self._lock:
            dropped, self.previous, self.current = self.previous, self.current, fresh
        if dropped is not None and dropped not in (self.current, self._canary, self._shadow):
            dropped.close()

    def apply(self, path: Path) -> None:
        """Take a delta of the current version; one that is damaged, not the next, or of another recipe is refused."""
        delta = Delta.open(path)
        if delta.manifest["recipe_digest"] != self.bundle.manifest["recipe_digest"]:
            raise ArtifactError(
                f"Delta {path} is of another recipe than {self.current.version}; it is refused."
            )
        if (delta.version, delta.number) != (self.current.version, self.num_deltas + 1):
            raise ArtifactError(
                f"Delta {path} is number {delta.number} of {delta.version}; expected {self.num_deltas + 1} of "
                f"{self.current.version}. It is refused."
            )
        self.current.apply(delta.changes())
        self.current.num_deltas = delta.number
        self.current.log_end = delta.manifest.get("log_end", self.current.log_end)

    def status(self) -> m.Status:
        bundle = self.bundle
        recaller = self.current.recaller
        canary = self.options.canary
        manifest = {name: value for name, value in bundle.manifest.items() if name not in _NOT_SHOWN}
        return m.Status(
            version=bundle.version,
            previous=self.previous.version if self.previous else previous_of(self.folder),
            canary=f"{canary[0]}={canary[1]:.4g}" if canary else None,
            versions=versions_of(self.folder),
            recipe=bundle.recipe.name,
            role=self.options.role,
            models=list(bundle.models),
            channels=recaller.channels if recaller is not None else [],
            num_items=len(bundle.items) if bundle.items is not None else 0,
            num_users=len(bundle.users) if bundle.users is not None else 0,
            deltas=self.num_deltas,
            started_at=self.started_at,
            freshness_seconds=time.time() - self.current.log_end if self.current.log_end else None,
            ready=self.ready,
            store=self.current.lookup.store.problem,
            manifest={
                **manifest,
                "steps": bundle.manifest["checkpoint"]["steps"],
                "num_bytes": bundle.num_bytes,
                "context_columns": self._context_columns(),
            },
        )

    def _context_columns(self) -> list[str]:
        lookup = self.current.lookup
        return sorted({column for name in lookup.context_features for column in lookup.columns_of(name)})


class Watcher:
    """Looks at the folder every so often. What is refused is refused once, with the reason; the old keeps serving."""

    def __init__(self, service: Service, seconds: float | None, telemetry: Telemetry | None) -> None:
        """Without `seconds`, only changes of other processes are looked for."""
        self.service = service
        self.seconds = seconds
        self.telemetry = telemetry
        self._refused: set[tuple[str, int]] = set()  # path, and when it was changed last
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=10)

    def _run(self) -> None:
        while not self._stop.wait(_LOOK_EVERY if self.seconds is None else self.seconds):
            try:
                self.look()
            except Exception:
                _logger.exception("looking at %s failed", self.service.folder)

    def look(self) -> None:
        """Take the version that is current, then its deltas one after the other."""
        service = self.service
        service.take_changes()
        if self.seconds is None:
            return
        try:
            wanted = current_of(service.folder)
        except RecmillError as error:
            _logger.warning("%s", error)
            return
        if wanted is not None and wanted != service.current.version:
            taken = self._try(service.folder / wanted, service.swap)
            if self.telemetry is not None and taken is not None:
                self.telemetry.swap(taken)
        while (path := self._next_delta()) is not None:
            taken = self._try(path, service.apply)
            if self.telemetry is not None and taken is not None:
                self.telemetry.delta(taken)
            if not taken:
                return

    def _next_delta(self) -> Path | None:
        service = self.service
        path = deltas_folder(service.folder, service.current.version) / f"{service.num_deltas + 1:06d}"
        return path if path.is_dir() else None

    def _try(self, path: Path, take: Callable[[Path], None]) -> bool | None:
        """Whether it was taken; None when it was refused before and has not changed since."""
        try:
            mark = (str(path), (path / MANIFEST).stat().st_mtime_ns)
        except OSError:
            mark = (str(path), 0)
        if mark in self._refused:
            return None
        try:
            take(path)
        except (RecmillError, OSError, ValueError) as error:
            self._refused.add(mark)
            _logger.warning("%s", error)
            return False
        _logger.info("serving %s with %d deltas", self.service.current.version, self.service.num_deltas)
        return True


def open_service(settings: Settings, telemetry: Telemetry) -> Service:
    """The service that `recmill serve` was told to be."""
    log = settings.request_log
    options = Options(
        features=settings.features,
        prefix=settings.prefix,
        role=settings.role,
        stages=settings.stages(),
        request_log=RequestLog(log, settings.request_log_share, telemetry) if log is not None else None,
        watch_seconds=_LOOK_EVERY if settings.watch else None,
        canary=settings.canary,
        shadow=settings.shadow,
        trust_code=settings.trust_code,
    )
    return Service(settings.bundle, options, telemetry)


def share_of(user: m.Id | None) -> float:
    """From 0 to 1, always the same for a user."""
    digest = hashlib.blake2b(str(user).encode("utf-8", "replace"), digest_size=8).digest()
    return int.from_bytes(digest) / 2**64


def _differences(one: m.Answer, other: m.Answer) -> tuple[bool, float]:
    scores = {item.id: item.score for item in other.items}
    common = [abs(item.score - scores[item.id]) for item in one.items if item.id in scores]
    differs = [item.id for item in one.items] != [item.id for item in other.items]
    return differs, max(common, default=0.0)


def _largest(one: Sequence[float], other: Sequence[float]) -> tuple[bool, float]:
    difference = max((abs(left - right) for left, right in zip(one, other, strict=True)), default=0.0)
    return difference > 0, difference
