"""Changes that requests ask for: kept for versions to come, and told to the other processes of one server."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import msgspec

from recmill.stages.serve import messages as m
from recmill.stages.serve.recommender import Recommender

_MOST_EVENTS = 10_000  # that are kept for versions to come


class Change(m.Message, frozen=True, kw_only=True):
    """Some items, ids or events, the process that was asked, and when."""

    by: int
    at: float = msgspec.field(default_factory=time.time)
    items: list[m.NewItem] = msgspec.field(default_factory=list)
    removed: list[m.Id] = msgspec.field(default_factory=list)
    events: list[m.Event] = msgspec.field(default_factory=list)

    def apply(self, recommender: Recommender, in_store: bool = True) -> int:
        """How many things changed; `in_store` says whether a store of features changes too."""
        number = 0
        if self.items:
            number += recommender.add_items(self.items, in_store)
        if self.removed:
            number += recommender.remove_items(self.removed)
        if self.events:
            number += recommender.add_events(self.events, in_store)
        return number


class LiveChanges:
    """Items that requests added or removed, and the latest events. A version that is opened later takes them over."""

    def __init__(self) -> None:
        self._added: dict[str, m.NewItem] = {}
        self._removed: dict[str, m.Id] = {}
        self._changed_at: dict[str, float] = {}  # items
        self._events: deque[tuple[float, m.Event]] = deque(maxlen=_MOST_EVENTS)

    def still_new(self, change: Change) -> Change:
        """The change without items that a later one has changed: processes hear of changes in different orders."""
        return msgspec.structs.replace(
            change,
            items=[item for item in change.items if self._is_latest(item.id, change.at)],
            removed=[id for id in change.removed if self._is_latest(id, change.at)],
        )

    def _is_latest(self, id: m.Id, at: float) -> bool:
        return self._changed_at.get(str(id), at) <= at

    def note(self, change: Change) -> None:
        for item in change.items:
            self._added[str(item.id)] = item
            self._removed.pop(str(item.id), None)
        for id in change.removed:
            self._removed[str(id)] = id
            self._added.pop(str(id), None)
        for id in (*(item.id for item in change.items), *change.removed):
            self._changed_at[str(id)] = change.at
        self._events.extend((change.at, event) for event in change.events)

    def give_to(self, recommender: Recommender) -> None:
        """Items that the version does not have or knew before, what must not be shown, and events since its log."""
        if recommender.recaller is None:
            return
        added = list(self._added.values())
        places = recommender.recaller.items.places([item.id for item in added]).tolist()
        known_until = recommender.log_end or recommender.bundle.manifest.get("created_at", 0.0)
        new = [
            item
            for item, place in zip(added, places, strict=True)
            if place < 0 or self._changed_at[str(item.id)] > known_until
        ]
        events = [event for at, event in self._events if at > known_until]
        change = Change(by=0, items=new, removed=list(self._removed.values()), events=events)
        change.apply(recommender, in_store=False)


class Journal:
    """A file that the processes of one server write their changes into, and read those of the others from."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read = 0

    def write(self, change: Change) -> None:
        line = msgspec.json.encode(change) + b"\n"
        with open(self.path, "ab", buffering=0) as file:
            file.write(line)

    def others(self) -> Sequence[Change]:
        """What other processes wrote since the last time."""
        if not self.path.exists():
            return []
        with open(self.path, "rb") as file:
            file.seek(self._read)
            whole = file.read().rpartition(b"\n")[0]
        if not whole:
            return []
        self._read += len(whole) + 1
        changes = [msgspec.json.decode(line, type=Change) for line in whole.split(b"\n")]
        return [change for change in changes if change.by != os.getpid()]
