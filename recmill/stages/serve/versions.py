"""The open versions of a server, and how they follow the folder of bundles: new versions, deltas, rollback.

The current version answers. The previous one, a canary, a shadow, and versions that requests name stay open beside
it. Live changes reach all of them; a version that is opened later receives the earlier changes.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from recmill.artifacts.bundle.bundle import CURRENT, Bundle, named_by, previous_of, set_current, versions_of
from recmill.artifacts.bundle.delta import Delta, deltas_folder
from recmill.artifacts.feature_store.redis import DEFAULT_PREFIX, RedisStore
from recmill.errors import ArtifactError, NotFound, RecmillError, StoreError
from recmill.stages.serve.changes import Change, LiveChanges
from recmill.stages.serve.followed import end_of_delta
from recmill.stages.serve.live_stream import LiveStream, check_followable
from recmill.stages.serve.recommender import Recommender
from recmill.stages.serve.shared_state import ChangeJournal, VersionState
from recmill.stages.serve.storage import StorageFollower
from recmill.stages.serve.telemetry import Telemetry

if TYPE_CHECKING:
    from recmill.stages.serve.config import ServeConfig

WATCH_SECONDS = 0.5  # seconds between two looks at the folder
_MAX_OTHERS = 2  # versions that stay open because requests named them
_logger = logging.getLogger("recmill.serve")


class Versions:
    """Open versions by role. Thread-safe. A version that is dropped is closed when its last request has ended."""

    def __init__(self, config: ServeConfig, telemetry: Telemetry) -> None:
        path = config.bundle
        self.config = config
        self.telemetry = telemetry
        self.folder = path if (path / CURRENT).is_file() else path.parent
        self.pinned = None if self.folder == path else path.name  # the only version to serve, if configured
        self.state = VersionState(telemetry.folder)
        self.journal = ChangeJournal(telemetry.folder) if telemetry.folder is not None else None
        self.storage = StorageFollower(config.bundle_url) if config.bundle_url else None
        self.folder_problem = ""  # why the current version cannot be determined
        self.stream: LiveStream | None = None
        self._others: dict[str, Recommender] = {}
        self._live_changes = LiveChanges()
        self._opening = threading.Lock()
        # A change reaches a version through `all`, or through `_live_changes` when the version is opened.
        self._changing = threading.Lock()
        self.previous: Recommender | None = None
        self.canary: Recommender | None = None
        self.shadow: Recommender | None = None
        self.current = self._open_first()
        if config.events is not None:
            check_followable(self.current)
        self.stream = LiveStream(config.events, self) if config.events is not None else None
        self.canary = self.named(config.canary[0]) if config.canary else None
        self.shadow = self.named(config.shadow) if config.shadow else None

    def all(self) -> list[Recommender]:
        """All open versions, the current one first."""
        serving = (self.current, self.previous, self.canary, self.shadow)
        versions = [one for one in (*serving, *self._others.copy().values()) if one is not None]
        return list(dict.fromkeys(versions))

    def named(self, version: str) -> Recommender:
        """A version by name, opened on demand. The latest of those stay open."""
        recommender = self._find(version)
        if recommender is not None:
            return recommender
        with self._opening:
            recommender = self._find(version)
            return recommender if recommender is not None else self._open_other(version)

    def close(self) -> None:
        if self.stream is not None:
            self.stream.close()
        for recommender in self.all():
            recommender.close()

    def _find(self, version: str) -> Recommender | None:
        return next((one for one in self.all() if one.bundle.path.name == version), None)

    # opening

    def _open_first(self) -> Recommender:
        """Open the version that other processes of this server serve, or the first valid one that the folder names."""
        reasons: list[str] = []
        for version in self._first_versions():
            path = self.folder / version
            try:
                if self.state.refuses(path):
                    continue
                recommender = self._open(path)
            except ArtifactError as error:
                self.state.refuse(path, str(error))
                _logger.error("%s", error)
                self.telemetry.swap(False)
                reasons.append(str(error))
                continue
            self.state.serve(version)
            return recommender
        raise ArtifactError(" ".join(reasons) or f"{self.folder}: every version was refused.")

    def _first_versions(self) -> Iterator[str]:
        """Candidate versions for startup, best first. Of processes that start together, the first one proposes."""
        served = self.state.version
        if served is not None:
            yield served
        names = [self.pinned] if self.pinned else named_by(self.folder)
        yield from dict.fromkeys([self.state.propose(names[0]), *names])

    def _open_other(self, version: str) -> Recommender:
        recommender = self._open_version(version)
        with self._changing:
            self._apply_live_changes(recommender)
            others = [*self._others.values(), recommender][-_MAX_OTHERS:]
            self._others = {one.bundle.path.name: one for one in others}
        return recommender

    def _open_version(self, version: str) -> Recommender:
        self._check_exists(version)
        recommender = self._open(self.folder / version)
        self.catch_up(recommender)
        return recommender

    def _open(self, path: Path) -> Recommender:
        """Open a version; any failure is an ArtifactError."""
        config = self.config
        bundle = Bundle.open(path, config.trust_code)
        prefix = config.prefix or DEFAULT_PREFIX
        store = RedisStore(config.features, bundle, prefix) if config.features else None
        try:
            recommender = Recommender(bundle, store)
        except RecmillError:
            raise
        except Exception as error:  # files intact, but not written by this recmill
            raise ArtifactError(f"Bundle {path} cannot be served: {error!r}.") from error
        recommender.lookup.store_failed = self.telemetry.store_failed
        recommender.lookup.missing_rows = self.telemetry.missing_rows
        return recommender

    def _check_exists(self, version: str) -> None:
        if self.storage is not None and self.storage.copy.fetch_version(version):
            return
        known = versions_of(self.folder)
        if version not in known:
            raise NotFound(f'No version "{version}"; there are: {", ".join(known)}.')

    # swapping

    def swap(self, path: Path) -> None:
        """Serve another version once it is open and warm; until then the old one answers."""
        self._check_recipe(Bundle.open(path, self.config.trust_code))
        self._make_current(path.name)
        self.state.serve(path.name)
        self._store_deltas(self.current)

    def _make_current(self, version: str) -> None:
        with self._opening:
            known = self._find(version)
            recommender = known if known is not None else self._open_version(version)
            recommender.warm_up()
            if recommender is self.current:
                return
            with self._changing:
                if known is None:
                    self._apply_live_changes(recommender)
                self.previous, self.current = self.current, recommender
                self._others.pop(version, None)

    def rollback(self, version: str | None) -> None:
        """Serve an earlier version again, here and on every server of this folder."""
        if self.storage is not None:
            raise ArtifactError(
                f"The versions are those of {self.config.bundle_url}, to which servers do not write. Run `recmill "
                f"rollback --bundle {self.config.bundle_url}`: every server follows."
            )
        version = version or (self.previous.version if self.previous else previous_of(self.folder))
        if version is None:
            raise NotFound(f"There is no version before {self.current.version} to go back to.")
        self._check_exists(version)
        self._check_recipe(self.named(version).bundle)
        try:
            set_current(self.folder, version)
        except OSError as error:
            raise ArtifactError(
                f"{CURRENT} cannot be written ({error.strerror}), so {self.current.version} is still served. "
                "Run `recmill rollback` where the folder of versions can be written."
            ) from None
        self.swap(self.folder / version)

    def _check_recipe(self, bundle: Bundle) -> None:
        if bundle.manifest.get("recipe_digest") != self.current.bundle.manifest.get("recipe_digest"):
            raise ArtifactError(
                f"Bundle {bundle.path} is of another recipe than {self.current.version}; it is refused."
            )

    # following the folder

    def poll(self) -> None:
        """Apply changes of other processes, switch to the version to serve, then apply new deltas."""
        self._apply_changes_of_others()
        for version in self._wanted():
            path = self.folder / version
            if path == self.current.bundle.path and not self.state.refuses(path):
                break
            swapped = self._apply_once(path, self.swap)
            if swapped is not None:
                self.telemetry.swap(swapped)
            if swapped:
                _logger.info("serving %s", version)
                break
        for recommender in self.all():
            self.catch_up(recommender)

    def _wanted(self) -> list[str]:
        """Versions to serve, best first: those of the folder, else the one that this server's processes serve."""
        if not self.config.watch or self.pinned:
            served = self.state.version
            return [served] if served is not None else []
        try:
            versions, problem = named_by(self.folder), ""
        except RecmillError as error:
            versions, problem = [], str(error)
        if problem and problem != self.folder_problem:
            _logger.warning("%s", problem)
        self.folder_problem = problem
        return versions

    def _apply_once(self, path: Path, apply: Callable[[Path], None]) -> bool | None:
        """Apply something from the folder; None if it was refused before and is unchanged, or waits for a store."""
        if self.state.refuses(path):
            return None
        try:
            apply(path)
        except StoreError as error:
            _logger.warning("%s waits: %s", path, error)
            return None
        except Exception as error:  # no file may stop the server
            self.state.refuse(path, str(error) if isinstance(error, RecmillError) else f"{path}: {error!r}")
            _logger.warning("%s", error, exc_info=not isinstance(error, (RecmillError, OSError, ValueError)))
            return False
        return True

    # deltas

    def catch_up(self, recommender: Recommender) -> None:
        """Apply the deltas of a version in order, up to the first that is refused."""
        if not self.config.watch:
            return
        with recommender.catching_up:
            while (path := self._delta_path(recommender, recommender.num_deltas + 1)).is_dir():
                applied = self._apply_once(path, lambda path: self._apply_delta(path, recommender))
                if applied is not None:
                    self.telemetry.delta(applied)
                if not applied:
                    return
                _logger.info("version %s has %d deltas", recommender.version, recommender.num_deltas)

    def _apply_delta(self, path: Path, recommender: Recommender) -> None:
        """Apply a delta; refuses one that is damaged, out of order, or of another recipe."""
        delta, version = Delta.open(path), recommender.version
        if delta.manifest["recipe_digest"] != recommender.bundle.manifest["recipe_digest"]:
            raise ArtifactError(f"Delta {path} is of another recipe than {version}; it is refused.")
        if (delta.version, delta.number) != (version, recommender.num_deltas + 1):
            raise ArtifactError(
                f"Delta {path} is number {delta.number} of {delta.version}; expected "
                f"{recommender.num_deltas + 1} of {version}. It is refused."
            )
        changes = delta.changes()
        end = end_of_delta(delta.manifest, self.stream.key if self.stream is not None else None)
        if end is not None:
            changes = recommender.without_followed(changes, end)
        recommender.apply(changes, in_store=recommender is self.current)
        if end is not None:
            recommender.followed.delta_applied(end)
        recommender.num_deltas = delta.number
        recommender.log_end = delta.manifest.get("log_end", recommender.log_end)

    def _store_deltas(self, recommender: Recommender) -> None:
        """Write to the store what a version applied before it was current, unless another server has."""
        store = recommender.lookup.store
        if store is None:
            return
        with recommender.catching_up:
            try:
                for number in range(store.num_deltas(recommender.version) + 1, recommender.num_deltas + 1):
                    changes = Delta.open(self._delta_path(recommender, number)).changes()
                    recommender.store_delta(number, changes)
            except RecmillError as error:
                _logger.warning("the store lacks deltas of %s: %s", recommender.version, error)

    def _delta_path(self, recommender: Recommender, number: int) -> Path:
        return deltas_folder(self.folder, recommender.version) / f"{number:06d}"

    # live changes

    def _apply_live_changes(self, recommender: Recommender) -> None:
        """Apply live changes to a version that was just opened: items first, because events may be about new ones."""
        self._live_changes.apply_to(recommender)
        if self.stream is not None:
            self.stream.catch_up(recommender)

    def change(self, change: Change) -> int:
        """Apply a change to all versions and pass it to the other processes; returns how many things it changed.

        With a stream, the change goes through the stream, to other servers too.
        """
        if self.stream is not None:
            return self.stream.publish(change)
        number = self._change(change, in_store=True)
        if self.journal is not None:
            self.journal.write(change)
        return number

    def apply(self, change: Change) -> int:
        """Apply a change of items from the stream, unless a later one was applied already."""
        return self._change(change, in_store=False)

    def apply_items(self, changes: Iterable[Change]) -> None:
        """Apply item changes from before the start to all versions, and keep them for later ones."""
        with self._changing:
            for change in changes:
                self._live_changes.add(change)
            for recommender in self.all():
                self._live_changes.apply_to(recommender)

    def _apply_changes_of_others(self) -> None:
        """Apply changes of other processes of this server; those processes have changed the store already."""
        for change in self.journal.read_others() if self.journal is not None else ():
            try:
                self._change(change, in_store=False)
            except RecmillError as error:
                _logger.warning("a change of process %d is left out: %s", change.process, error)

    def _change(self, change: Change, in_store: bool) -> int:
        """If the current version refuses a change, no version gets it; a refusal by another version is logged."""
        with self._changing:
            change = self._live_changes.without_outdated(change)
            number = change.apply(self.current, in_store)
            self._live_changes.add(change)
            for other in self.all()[1:]:
                try:
                    change.apply(other, in_store=False)
                except RecmillError as error:
                    _logger.warning("version %s does not take a change: %s", other.version, error)
        return number

    # what is wrong

    def refused(self) -> dict[str, str]:
        """Refused versions and deltas by name -> reason, without local paths."""
        prefix = f"{self.folder}/"
        refused = self.state.refused()
        if self.folder_problem:
            refused[CURRENT] = self.folder_problem
        if self.storage is not None and self.storage.problem:
            refused["storage"] = self.storage.problem
        return {path.removeprefix(prefix): reason.replace(prefix, "") for path, reason in refused.items()}

    def previous_name(self) -> str | None:
        if self.previous is not None:
            return self.previous.version
        try:
            return previous_of(self.folder)
        except ArtifactError:
            return None


class Watcher:
    """A thread that follows the bundle folder and the changes of the server's other processes."""

    def __init__(self, versions: Versions, seconds: float) -> None:
        self._versions = versions
        self._seconds = seconds
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=10)

    def _run(self) -> None:
        while not self._stop.wait(self._seconds):
            try:
                self._versions.poll()
            except Exception:
                _logger.exception("looking at %s failed", self._versions.folder)
