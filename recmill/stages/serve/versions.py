"""The versions that a server has open: the one that serves, the one before, canary, shadow, those asked for by name.

Every change reaches all of them, and a version that is opened later begins with what was changed before.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from recmill.errors import RecmillError
from recmill.stages.serve.changes import Change, LiveChanges
from recmill.stages.serve.recommender import Recommender

_OTHERS = 2  # versions that stay open beside those that serve, to compare with
_logger = logging.getLogger("recmill.serve")


class Versions:
    """Safe to call from any thread. A version that is dropped is closed when its last request has ended."""

    def __init__(self, current: Recommender, open_version: Callable[[str], Recommender]) -> None:
        self.current = current
        self.previous: Recommender | None = None
        self.canary: Recommender | None = None
        self.shadow: Recommender | None = None
        self._open_version = open_version
        self._others: dict[str, Recommender] = {}
        self._catalogue = LiveChanges()
        self._opening = threading.Lock()
        self._changing = (
            threading.Lock()
        )  # a change finds a version among the open ones, or comes before it is

    def all(self) -> list[Recommender]:
        """Those that are open, each once, the current one first."""
        serving = (self.current, self.previous, self.canary, self.shadow)
        found = [one for one in (*serving, *self._others.copy().values()) if one is not None]
        return list(dict.fromkeys(found))

    def find(self, version: str) -> Recommender | None:
        """A version by its folder's name, if it is open."""
        return next((one for one in self.all() if one.bundle.path.name == version), None)

    def named(self, version: str) -> Recommender:
        """A version, opened if need be; of those that were opened so, the latest stay open."""
        found = self.find(version)
        if found is not None:
            return found
        with self._opening:
            found = self.find(version)
            return found if found is not None else self._open_other(version)

    def _open_other(self, version: str) -> Recommender:
        fresh = self._open_version(version)
        with self._changing:
            self._catalogue.give_to(fresh)
            others = [*self._others.values(), fresh][-_OTHERS:]
            self._others = {one.bundle.path.name: one for one in others}
        return fresh

    def serve(self, version: str, prepare: Callable[[Recommender], None]) -> None:
        """Let a version be the current one, once it is prepared; until then the old one answers."""
        with self._opening:
            known = self.find(version)
            fresh = known if known is not None else self._open_version(version)
            prepare(fresh)
            if fresh is self.current:
                return
            with self._changing:
                if known is None:
                    self._catalogue.give_to(fresh)
                self.previous, self.current = self.current, fresh
                self._others.pop(version, None)

    def change(self, change: Change, in_store: bool) -> int:
        """How many things changed in the current version; `in_store` says whether a store of features changes too.

        What the current version refuses reaches none; what another one refuses is logged.
        """
        with self._changing:
            change = self._catalogue.still_new(change)
            number = change.apply(self.current, in_store)
            self._catalogue.note(change)
            for other in self.all()[1:]:
                self._change_other(change, other)
        return number

    def _change_other(self, change: Change, other: Recommender) -> None:
        try:
            change.apply(other, in_store=False)
        except RecmillError as error:
            _logger.warning("version %s does not take a change: %s", other.version, error)

    def close(self) -> None:
        for recommender in self.all():
            recommender.close()
