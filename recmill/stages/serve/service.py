"""What every transport asks: answers by the current version, a canary or one by name. Versions come and go live."""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl

from recmill.artifacts.bundle.bundle import CURRENT, Bundle, named_by, previous_of, set_current, versions_of
from recmill.artifacts.bundle.delta import Delta, deltas_folder
from recmill.artifacts.feature_store import DEFAULT_PREFIX, RedisStore
from recmill.dataset.batch import Array
from recmill.errors import ArtifactError, NotFound, RecmillError
from recmill.stages.serve import messages as m
from recmill.stages.serve.agreement import Agreement
from recmill.stages.serve.changes import Change, Journal
from recmill.stages.serve.coordinate import Coordinator, Stages
from recmill.stages.serve.recommender import Recommender
from recmill.stages.serve.request_log import RequestLog
from recmill.stages.serve.telemetry import Telemetry
from recmill.stages.serve.versions import Versions
from recmill.stages.serve.watch import LOOK_EVERY, Watcher

if TYPE_CHECKING:
    from recmill.stages.serve.config import ServeConfig

_NOT_SHOWN = ("files", "recipe", "checkpoint", "log_sizes")  # large, or paths of the machine that made it
_SHADOW_QUEUE = 64
_logger = logging.getLogger("recmill.serve")


@dataclass(frozen=True)
class ServiceConfig:
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


_DEFAULTS = ServiceConfig()


class Service:
    """Answers by the version that a folder of bundles says, and by others on request. Safe to call from any thread."""

    def __init__(
        self, path: Path, options: ServiceConfig = _DEFAULTS, telemetry: Telemetry | None = None
    ) -> None:
        self.path = path
        self.options = options
        self.telemetry = telemetry
        self.ready = False
        self.started_at = time.time()
        folder = telemetry.folder if telemetry is not None else None  # of several processes on one port
        self._journal = Journal(folder / "changes.jsonl") if folder is not None else None
        self.agreement = Agreement(folder)
        looks = options.watch_seconds is not None or self._journal is not None
        self._watcher = Watcher(self, options.watch_seconds, telemetry) if looks else None
        self._coordinator = Coordinator(options.stages) if options.stages is not None else None
        self._shadow_pool = ThreadPoolExecutor(1, "shadow") if options.shadow else None
        self._shadowing = threading.BoundedSemaphore(_SHADOW_QUEUE)
        self.folder = path if (path / CURRENT).is_file() else path.parent
        self.is_pinned = self.folder != path  # to the version that was named, whichever is current
        self.versions = Versions(self._open_first(), self._open_version)
        if options.canary:
            self.versions.canary = self.versions.named(options.canary[0])
        if options.shadow:
            self.versions.shadow = self.versions.named(options.shadow)

    def _open_first(self) -> Recommender:
        """The version that is agreed on, or the first whole one of those that the folder names."""
        reasons: list[str] = []
        for version in self._first_versions():
            path = self.folder / version
            try:
                if self.agreement.refuses(path):
                    continue
                recommender = self._open(path)
            except ArtifactError as error:
                self.agreement.refuse(path, str(error))
                _logger.error("%s", error)
                if self.telemetry is not None:
                    self.telemetry.swap(False)
                reasons.append(str(error))
                continue
            self.agreement.serve(version)
            return recommender
        raise ArtifactError(" ".join(reasons) or f"{self.folder}: every version was refused.")

    def _first_versions(self) -> Iterator[str]:
        """Versions to begin with, best first. Of processes that start together, the first one proposes."""
        agreed = self.agreement.version
        if agreed is not None:
            yield agreed
        names = [self.path.name] if self.is_pinned else named_by(self.folder)
        yield from dict.fromkeys([self.agreement.propose(names[0]), *names])

    def _open_version(self, version: str) -> Recommender:
        known = versions_of(self.folder)
        if version not in known:
            raise NotFound(f'No version "{version}"; there are: {", ".join(known)}.')
        recommender = self._open(self.folder / version)
        if self._watcher is not None:
            self._watcher.catch_up(recommender)
        return recommender

    def _open(self, path: Path) -> Recommender:
        """A version that answers; whatever is wrong with it is an ArtifactError."""
        bundle = Bundle.open(path, self.options.trust_code)
        url, prefix = self.options.features, self.options.prefix or DEFAULT_PREFIX
        store = RedisStore(url, bundle, prefix) if url else None
        try:
            recommender = Recommender(bundle, store)
        except RecmillError:
            raise
        except Exception as error:  # whole, but not written by this recmill
            raise ArtifactError(f"Bundle {path} cannot be served: {error!r}.") from error
        if self.telemetry is not None:
            recommender.lookup.store_failed = self.telemetry.store_failed
            recommender.lookup.rows_lacking = self.telemetry.rows_lacking
        return recommender

    def warm_up(self) -> None:
        """Be as quick from the first answer on; then say so."""
        for recommender in self.versions.all():
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
        self.versions.close()

    # questions

    @property
    def current(self) -> Recommender:
        return self.versions.current

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

    def rank(self, query: m.Rank) -> m.RankAnswer:
        ranked = self._for(query.user, query.version).rank(query)
        self._compare(lambda shadow: _largest(ranked.scores, shadow.rank(query).scores))
        return ranked

    def features(self, query: m.Features) -> m.FeaturesAnswer:
        return self.current.features(query)

    def score(self, rows: pl.DataFrame) -> tuple[str, Array]:
        """The version that answers, and its scores."""
        current = self.current
        return current.version, current.score(rows)

    def lookup_rows(self, query: m.Rank) -> tuple[bytes, list[bytes], list[str], str]:
        """As the recommender has them, and the version that answers."""
        current = self.current
        return *current.lookup_rows(query), current.version

    def rank_rows(self, user: bytes, items: Sequence[bytes], context: m.Values) -> m.RankAnswer:
        return self.current.rank_rows(user, items, context)

    def user_ids(self, prefix: str, limit: int) -> list[m.Id]:
        users = self.bundle.users
        return [] if users is None else users.ids_with_prefix(prefix, limit)

    def _for(self, user: m.Id | None, version: str | None) -> Recommender | Coordinator:
        """The version that was asked for; else the canary for its share of users, always the same ones."""
        if self._coordinator is not None:
            return self._coordinator
        if version is not None:
            return self.versions.named(version)
        canary, share = self.versions.canary, self.options.canary
        if canary is not None and share is not None and share_of(user) < share[1]:
            return canary
        return self.current

    def _compare(self, compare: Callable[[Recommender], tuple[bool, float]]) -> None:
        """Ask the shadow too, behind the answer's back; when it falls behind, some are left out."""
        shadow, pool = self.versions.shadow, self._shadow_pool
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
        number = self.versions.change(change, in_store=True)
        if self._journal is not None:
            self._journal.write(change)
        return number

    def take_changes(self) -> None:
        """Apply what other processes of this server were asked to change; they have changed a store already."""
        for change in self._journal.others() if self._journal is not None else ():
            try:
                self.versions.change(change, in_store=False)
            except RecmillError as error:
                _logger.warning("a change of process %d is left out: %s", change.by, error)

    def rollback(self, version: str | None = None) -> m.Status:
        """Serve an earlier version again, here and by every server of this folder."""
        previous = self.versions.previous
        version = version or (previous.version if previous else previous_of(self.folder))
        if version is None:
            raise NotFound(f"There is no version before {self.current.version} to go back to.")
        if version not in versions_of(self.folder):
            raise NotFound(f'No version "{version}"; there are: {", ".join(versions_of(self.folder))}.')
        self._check_recipe(self.versions.named(version).bundle)
        try:
            set_current(self.folder, version)
        except OSError as error:
            raise ArtifactError(
                f"{CURRENT} cannot be written ({error.strerror}), so {self.current.version} goes on to serve. "
                "Run `recmill rollback` where the folder of versions can be written."
            ) from None
        self.swap(self.folder / version)
        return self.status()

    # changes from the folder

    def swap(self, path: Path) -> None:
        """Serve another version, once it is whole and warm; until then the old one answers."""
        self._check_recipe(Bundle.open(path, self.options.trust_code))
        self.versions.serve(path.name, Recommender.warm_up)
        self.agreement.serve(path.name)
        self._store_deltas(self.current)

    def _check_recipe(self, bundle: Bundle) -> None:
        if bundle.manifest.get("recipe_digest") != self.bundle.manifest.get("recipe_digest"):
            raise ArtifactError(
                f"Bundle {bundle.path} is of another recipe than {self.current.version}; it is refused."
            )

    def _store_deltas(self, recommender: Recommender) -> None:
        """Give the store what a version took before it was current, unless another server has written it."""
        store = recommender.lookup.store
        if recommender.writer is None:
            return
        folder = deltas_folder(self.folder, recommender.version)
        with recommender.catching_up:
            try:
                for number in range(store.num_deltas(recommender.version) + 1, recommender.num_deltas + 1):
                    recommender.store_delta(number, Delta.open(folder / f"{number:06d}").changes())
            except RecmillError as error:
                _logger.warning("the store lacks deltas of %s: %s", recommender.version, error)

    def apply(self, path: Path, recommender: Recommender) -> None:
        """Give a version its next delta; one that is damaged, not the next, or of another recipe is refused."""
        delta, version = Delta.open(path), recommender.version
        if delta.manifest["recipe_digest"] != recommender.bundle.manifest["recipe_digest"]:
            raise ArtifactError(f"Delta {path} is of another recipe than {version}; it is refused.")
        if (delta.version, delta.number) != (version, recommender.num_deltas + 1):
            raise ArtifactError(
                f"Delta {path} is number {delta.number} of {delta.version}; expected "
                f"{recommender.num_deltas + 1} of {version}. It is refused."
            )
        recommender.apply(delta.changes(), in_store=recommender is self.current)
        recommender.num_deltas = delta.number
        recommender.log_end = delta.manifest.get("log_end", recommender.log_end)

    def status(self) -> m.Status:
        current, previous, canary = self.current, self.versions.previous, self.options.canary
        bundle, recaller = current.bundle, current.recaller
        manifest = {name: value for name, value in bundle.manifest.items() if name not in _NOT_SHOWN}
        return m.Status(
            version=bundle.version,
            previous=previous.version if previous else self._previous_of_folder(),
            canary=f"{canary[0]}={canary[1]:.4g}" if canary else None,
            versions=versions_of(self.folder),
            refused=self._refused(),
            recipe=bundle.recipe.name,
            role=self.options.role,
            models=list(bundle.models),
            channels=recaller.channels if recaller is not None else [],
            num_items=len(bundle.items) if bundle.items is not None else 0,
            num_users=len(bundle.users) if bundle.users is not None else 0,
            deltas=current.num_deltas,
            started_at=self.started_at,
            freshness_seconds=time.time() - current.log_end if current.log_end else None,
            ready=self.ready,
            store=current.lookup.store.problem,
            manifest={
                **manifest,
                "steps": bundle.manifest["checkpoint"]["steps"],
                "num_bytes": bundle.num_bytes,
                "context_columns": _context_columns(current),
            },
        )

    def _refused(self) -> dict[str, str]:
        """Versions and deltas by name, without the paths of this machine."""
        here = f"{self.folder}/"
        refused = self.agreement.refused()
        if self._watcher is not None and self._watcher.problem:
            refused[CURRENT] = self._watcher.problem
        return {path.removeprefix(here): reason.replace(here, "") for path, reason in refused.items()}

    def _previous_of_folder(self) -> str | None:
        try:
            return previous_of(self.folder)
        except ArtifactError:
            return None


def _context_columns(recommender: Recommender) -> list[str]:
    lookup = recommender.lookup
    return sorted({column for name in lookup.context_features for column in lookup.columns_of(name)})


def _remote_stages(settings: ServeConfig) -> Stages | None:
    """The stages of other processes, when this one has the role that puts them together."""
    if settings.role != "recommend":
        return None
    from recmill.stages.serve.roles import RemoteStages, RoleCredentials

    has_own = settings.peer_ca is not None
    peers = RoleCredentials(
        token=settings.peer_token_file.read_text(encoding="utf-8").strip()
        if settings.peer_token_file
        else None,
        ca=settings.peer_ca.read_bytes() if settings.peer_ca else None,
        key=settings.tls_key.read_bytes() if settings.tls_key and has_own else None,
        certificate=settings.tls_cert.read_bytes() if settings.tls_cert and has_own else None,
    )
    return RemoteStages(settings.recall_at, settings.features_at, settings.rank_at, peers)


def open_service(settings: ServeConfig, telemetry: Telemetry) -> Service:
    """The service that `recmill serve` was told to be."""
    log = settings.request_log
    options = ServiceConfig(
        features=settings.features,
        prefix=settings.prefix,
        role=settings.role,
        stages=_remote_stages(settings),
        request_log=RequestLog(log, settings.request_log_share, telemetry) if log is not None else None,
        watch_seconds=LOOK_EVERY if settings.watch else None,
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
