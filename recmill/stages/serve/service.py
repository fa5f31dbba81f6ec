"""Routes each request to a version: the current one, a canary, or one that the request names."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from recmill.artifacts.bundle.bundle import Bundle, versions_of
from recmill.errors import RecmillError
from recmill.recipe.titles import image_column, title_column
from recmill.stages.serve import messages as m
from recmill.stages.serve.changes import Change
from recmill.stages.serve.recommender import Recommender
from recmill.stages.serve.request_log import RequestLog
from recmill.stages.serve.telemetry import Telemetry
from recmill.stages.serve.versions import WATCH_SECONDS, Versions, Watcher

if TYPE_CHECKING:
    from recmill.stages.serve.config import ServeConfig
    from recmill.stages.serve.roles import RemoteRecommender

# facts of a bundle that are large, or hold paths of the machine that made it
_HIDDEN = ("files", "recipe", "checkpoint", "log_sizes")
_SHADOW_QUEUE = 64


class Service:
    """The calls of all transports. Thread-safe."""

    def __init__(
        self,
        config: ServeConfig,
        telemetry: Telemetry | None = None,
        watch_seconds: float = WATCH_SECONDS,
    ) -> None:
        self.config = config
        self.telemetry = telemetry or Telemetry()
        self.ready = False
        self.started_at = time.time()
        self.versions = Versions(config, self.telemetry)
        follows = config.watch or self.versions.journal is not None
        self._watcher = Watcher(self.versions, watch_seconds) if follows else None
        self._storage = self.versions.storage if config.watch else None
        self._remote: RemoteRecommender | None = _remote_recommender(config)
        log = config.request_log
        self._request_log = RequestLog(log, config.request_log_share, self.telemetry) if log else None
        self._shadow_pool = ThreadPoolExecutor(1, "shadow") if config.shadow else None
        self._shadow_room = threading.BoundedSemaphore(_SHADOW_QUEUE)

    def warm_up(self) -> None:
        """Make the first answers as fast as later ones, then report ready."""
        for recommender in self.versions.all():
            recommender.warm_up()
        if self._watcher is not None:
            self.versions.poll()
            self._watcher.start()
        if self.versions.stream is not None:
            self.versions.stream.start()
        if self._storage is not None:
            self._storage.start()
        self.ready = True

    def close(self) -> None:
        self.ready = False
        if self._storage is not None:
            self._storage.close()
        if self._watcher is not None:
            self._watcher.close()
        if self._shadow_pool is not None:
            self._shadow_pool.shutdown(cancel_futures=True)
        if self._request_log is not None:
            self._request_log.close()
        if self._remote is not None:
            self._remote.close()
        self.versions.close()

    @property
    def current(self) -> Recommender:
        return self.versions.current

    @property
    def bundle(self) -> Bundle:
        return self.current.bundle

    def recommender_for(self, query: m.Query) -> Recommender | RemoteRecommender:
        """The version that a query names; else the canary for its fraction of users, always the same users."""
        if self._remote is not None:
            return self._remote
        if query.version is not None:
            return self.versions.named(query.version)
        canary, setting = self.versions.canary, self.config.canary
        if canary is not None and setting is not None and user_fraction(query.user) < setting[1]:
            return canary
        return self.current

    def recommend(self, query: m.Recommend) -> m.Answer:
        began = time.perf_counter()
        answer = self.recommender_for(query).recommend(query)
        if self._request_log is not None:
            self._request_log.add(query, answer, time.perf_counter() - began)
        self._compare(lambda shadow: _differences(answer, shadow.recommend(query)))
        return answer

    def similar(self, query: m.Similar) -> m.Answer:
        return self._items_answered_by(query).similar(query)

    def trending(self, query: m.Trending) -> m.Answer:
        return self._items_answered_by(query).trending(query)

    def _items_answered_by(self, query: m.ItemQuery) -> Recommender | RemoteRecommender:
        if self._remote is not None:
            return self._remote
        return self.versions.named(query.version) if query.version else self.current

    def rank(self, query: m.Rank) -> m.RankAnswer:
        ranked = self.recommender_for(query).rank(query)
        self._compare(lambda shadow: _largest_difference(ranked.scores, shadow.rank(query).scores))
        return ranked

    def _compare(self, compare: Callable[[Recommender], tuple[bool, float]]) -> None:
        """Ask the shadow version in the background; when its queue is full, the request is skipped."""
        shadow, pool = self.versions.shadow, self._shadow_pool
        if shadow is None or pool is None or not self._shadow_room.acquire(blocking=False):
            return

        def work() -> None:
            try:
                self.telemetry.shadow(*compare(shadow))
            except RecmillError:
                self.telemetry.shadow(True, 1.0)
            finally:
                self._shadow_room.release()

        pool.submit(work)

    def change(self, change: Change) -> m.ChangeResult:
        """Add or remove items, or add events, on every open version and in every process of this server."""
        return m.ChangeResult(number=self.versions.change(change), version=self.current.version)

    def rollback(self, version: str | None = None) -> m.Status:
        self.versions.rollback(version)
        return self.status()

    def user_ids(self, request: m.UserPrefix) -> m.UserIds:
        users = self.bundle.users
        return m.UserIds(users=users.ids_with_prefix(request.prefix, request.limit) if users else [])

    def status(self) -> m.Status:
        current, canary = self.current, self.config.canary
        bundle, recaller = current.bundle, current.recaller
        manifest = {name: value for name, value in bundle.manifest.items() if name not in _HIDDEN}
        return m.Status(
            version=bundle.version,
            previous=self.versions.previous_name(),
            canary=f"{canary[0]}={canary[1]:.4g}" if canary else None,
            versions=versions_of(self.versions.folder),
            refused=self.versions.refused(),
            recipe=bundle.recipe.name,
            role=self.config.role,
            models=list(bundle.models),
            channels=recaller.channels if recaller is not None else [],
            num_items=len(bundle.items) if bundle.items is not None else 0,
            num_users=len(bundle.users) if bundle.users is not None else 0,
            deltas=current.num_deltas,
            started_at=self.started_at,
            freshness_seconds=time.time() - current.log_end if current.log_end else None,
            ready=self.ready,
            store=current.writer.problem if current.writer is not None else None,
            events=self.versions.stream.problem if self.versions.stream is not None else None,
            manifest={
                **manifest,
                "steps": bundle.manifest["checkpoint"]["steps"],
                "num_bytes": bundle.num_bytes,
                "context_columns": _context_columns(current),
                **_shown(current),
            },
        )


def _shown(recommender: Recommender) -> dict[str, Any]:
    """Display information for pages: columns of items, and users with long histories."""
    recipe, users, recaller = recommender.bundle.recipe, recommender.bundle.users, recommender.recaller
    if recaller is None:
        return {}
    busiest = recaller.seen.busiest if users is not None else {}
    ids = users.ids(np.array(list(busiest), np.int64)) if users is not None else []
    return {
        "item_id": recipe.log.item,
        "item_columns": [name for name in recaller.items.raw_schema if name != recipe.log.item],
        "title_column": title_column(recipe),
        "image_column": image_column(recipe),
        "busiest_users": [
            {"id": user, "items": items} for user, items in zip(ids, busiest.values(), strict=True)
        ],
    }


def _context_columns(recommender: Recommender) -> list[str]:
    lookup = recommender.lookup
    return sorted({column for name in lookup.context_features for column in lookup.columns_of(name)})


def _remote_recommender(config: ServeConfig) -> RemoteRecommender | None:
    """For the recommend role: clients of the other roles' servers."""
    if config.role != "recommend":
        return None
    from recmill.stages.serve.roles import RemoteRecommender, RoleCredentials

    has_tls = config.peer_ca is not None
    credentials = RoleCredentials(
        token=config.peer_token_file.read_text(encoding="utf-8").strip() if config.peer_token_file else None,
        ca=config.peer_ca.read_bytes() if config.peer_ca else None,
        key=config.tls_key.read_bytes() if config.tls_key and has_tls else None,
        certificate=config.tls_cert.read_bytes() if config.tls_cert and has_tls else None,
    )
    return RemoteRecommender(config.recall_at, config.features_at, config.rank_at, credentials)


def user_fraction(user: m.Id | None) -> float:
    """A number from 0 to 1, always the same for a user."""
    digest = hashlib.blake2b(str(user).encode("utf-8", "replace"), digest_size=8).digest()
    return int.from_bytes(digest) / 2**64


def _differences(one: m.Answer, other: m.Answer) -> tuple[bool, float]:
    """Whether two answers differ in items or order, and the largest score difference of common items."""
    scores = {item.id: item.score for item in other.items}
    common = [abs(item.score - scores[item.id]) for item in one.items if item.id in scores]
    differs = [item.id for item in one.items] != [item.id for item in other.items]
    return differs, max(common, default=0.0)


def _largest_difference(one: Sequence[float], other: Sequence[float]) -> tuple[bool, float]:
    difference = max((abs(left - right) for left, right in zip(one, other, strict=True)), default=0.0)
    return difference > 0, difference
