"""Live changes: items and events from requests, applied to open versions and kept for versions opened later."""

from __future__ import annotations

import os
import time
from collections import deque
from typing import TYPE_CHECKING

import msgspec

from recmill.stages.serve import messages as m

if TYPE_CHECKING:
    from recmill.stages.serve.recommender import Recommender

_MAX_EVENTS = 10_000  # changes kept for versions opened later


class Change(m.Message, frozen=True, kw_only=True):
    """Items to add or replace, items to remove, and events; which process took them, and when."""

    process: int = msgspec.field(default_factory=os.getpid)
    at: float = msgspec.field(default_factory=time.time)
    items: list[m.NewItem] = msgspec.field(default_factory=list)
    removed: list[m.Id] = msgspec.field(default_factory=list)
    events: list[m.Event] = msgspec.field(default_factory=list)

    def apply(self, recommender: Recommender, in_store: bool = True) -> int:
        """Apply the change and return how many things changed. `in_store`: also change the feature store."""
        number = 0
        if self.items:
            number += recommender.add_items(self.items, in_store)
        if self.removed:
            number += recommender.remove_items(self.removed)
        if self.events:
            number += recommender.add_events(self.events, in_store)
        return number


class LiveChanges:
    """Added and removed items and the latest events, for versions that are opened later."""

    def __init__(self) -> None:
        self._added: dict[str, m.NewItem] = {}
        self._removed: dict[str, m.Id] = {}
        self._changed_at: dict[str, float] = {}  # items
        self._events: deque[tuple[float, m.Event]] = deque(maxlen=_MAX_EVENTS)

    def without_outdated(self, change: Change) -> Change:
        """The change without items that a later change has touched: processes receive changes in different orders."""
        return msgspec.structs.replace(
            change,
            items=[item for item in change.items if self._is_latest(item.id, change.at)],
            removed=[id for id in change.removed if self._is_latest(id, change.at)],
        )

    def _is_latest(self, id: m.Id, at: float) -> bool:
        return self._changed_at.get(str(id), at) <= at

    def add(self, change: Change) -> None:
        for item in change.items:
            self._added[str(item.id)] = item
            self._removed.pop(str(item.id), None)
        for id in change.removed:
            self._removed[str(id)] = id
            self._added.pop(str(id), None)
        for id in (*(item.id for item in change.items), *change.removed):
            self._changed_at[str(id)] = change.at
        self._events.extend((change.at, event) for event in change.events)

    def apply_to(self, recommender: Recommender) -> None:
        """Apply all removals, and the items and events that are newer than the version's log."""
        if recommender.recaller is None:
            return
        added = list(self._added.values())
        indices = recommender.recaller.items.indices([item.id for item in added]).tolist()
        known_until = recommender.log_end or recommender.bundle.manifest.get("created_at", 0.0)
        new = [
            item
            for item, index in zip(added, indices, strict=True)
            if index < 0 or self._changed_at[str(item.id)] > known_until
        ]
        events = [event for at, event in self._events if at > known_until]
        change = Change(items=new, removed=list(self._removed.values()), events=events)
        change.apply(recommender, in_store=False)
