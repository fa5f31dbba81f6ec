"""The recall stage: some hundred items of all there are, by several channels, without those that must not be shown."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from recmill.artifacts.bundle.arrays import GrowingArray, map_array
from recmill.artifacts.bundle.bundle import Bundle
from recmill.artifacts.bundle.models import TowerModel
from recmill.artifacts.vector_index import Index, open_index
from recmill.dataset.batch import Array
from recmill.errors import BadRequest
from recmill.stages.serve.lookup import UserRow
from recmill.stages.serve.masks import Masks
from recmill.stages.serve.messages import Recall

# Channel -> the share of candidates that is its own; what one cannot fill is filled by the others in this order.
SHARES: Mapping[str, float] = {"two_tower": 0.7, "similar": 0.1, "together": 0.1, "popular": 0.1}
_SCANNED = 20_000  # so few items are all compared
_MOST_FETCHED = 5_000
_RECENT = 20
_RANK_OFFSET = 60  # of reciprocal rank fusion, as Cormack, Clarke and Buettcher chose it


@dataclass(frozen=True)
class Candidates:
    """Items by place, best first within their channel, with the score that the channel gave and its name.

    Scores of two channels cannot be compared; `fused` can, for it is made of ranks alone.
    """

    places: Array
    scores: Array
    channels: Array
    fused: Array

    def some(self, chosen: Array | slice) -> Candidates:
        return Candidates(self.places[chosen], self.scores[chosen], self.channels[chosen], self.fused[chosen])


_NO_SCORES = np.empty(0, np.float32)
NOTHING = Candidates(np.empty(0, np.int64), _NO_SCORES, np.empty(0, np.int8), _NO_SCORES)
NAMES = tuple(SHARES)


@dataclass(frozen=True)
class ItemFilter:
    """Which items may be shown: not `banned`, all of `allowed` (None: any), and if it is given none but `only`."""

    banned: Array
    allowed: Array | None
    only: Array | None

    def keeps(self, places: Array) -> Array:
        kept = places >= 0
        if self.allowed is not None:
            kept &= self.allowed[places]
        if len(self.banned):
            # Both are short, and `banned` is sorted: a search in it is quicker than np.isin.
            at = self.banned.searchsorted(places)
            at[at == len(self.banned)] = 0
            kept &= self.banned[at] != places
        return kept


class Recaller:
    """All channels of a bundle over its items."""

    def __init__(self, bundle: Bundle) -> None:
        assert bundle.items is not None
        self.bundle, self.items = bundle, bundle.items
        folder = bundle.path / "items"
        self.tower: TowerModel | None = None
        self.index: Index | None = None
        if "retrieval" in bundle.manifest["models"]:
            self.tower = TowerModel(bundle, "user")
            self.vectors = GrowingArray(map_array(folder / "vectors.npy"))
            self.index = open_index(folder / "index", self.vectors.whole())
        self.popularity = GrowingArray(map_array(folder / "popularity.npy"))
        similar = folder / "similar.npy"
        self.neighbours = map_array(similar) if similar.is_file() else None
        self.seen = ClickedItems(bundle)
        self._is_gone = np.zeros(len(self.items), bool)
        self._by_popularity: Array | None = None
        self._masks = Masks(self.items)

    @property
    def channels(self) -> list[str]:
        has = {"two_tower": self.tower is not None, "similar": self.tower is not None}
        has |= {"together": self.neighbours is not None, "popular": True}
        return [name for name in SHARES if has[name]]

    def recall(
        self, person: UserRow, query: Recall, number: int, deadline: float | None = None
    ) -> Candidates:
        """About `number` candidates: fewer only when no more may be shown."""
        wanted = self.wanted(person, query, deadline)
        channels = self._chosen(query)
        few = self._few(wanted)
        if few is not None:
            return self._scan(few, person, number)
        find: dict[str, Callable[[UserRow, int, ItemFilter], tuple[Array, Array]]] = {
            "two_tower": self._two_tower,
            "similar": self._similar,
            "together": self._together,
            "popular": self._popular,
        }
        found = {
            name: find[name](
                person, number if name in ("two_tower", "popular") else self._own(name, number), wanted
            )
            for name in channels
        }
        return merged(found, number)

    @staticmethod
    def _own(name: str, number: int) -> int:
        return max(1, round(number * SHARES[name]))

    def _chosen(self, query: Recall) -> list[str]:
        if query.channels is None:
            return self.channels
        for name in query.channels:
            if name not in SHARES:
                raise BadRequest(f'No channel "{name}"; there are: {", ".join(self.channels)}.')
        return [name for name in self.channels if name in query.channels]

    # what may be shown

    def wanted(self, person: UserRow, query: Recall, deadline: float | None = None) -> ItemFilter:
        banned = [np.asarray(person.recent, np.int64), self.items.places(query.exclude)]
        if not query.show_seen:
            banned.append(self.seen.of(person.place, person.id))
        only = None if query.only is None else np.unique(self.items.places(query.only))
        allowed = self._masks.of(query.where, deadline) if query.where else None
        if self._is_gone.any():
            allowed = ~self._is_gone if allowed is None else allowed & ~self._is_gone
        together = np.concatenate(banned)
        return ItemFilter(
            np.unique(together[together >= 0]), allowed, None if only is None else only[only >= 0]
        )

    def _few(self, wanted: ItemFilter) -> Array | None:
        """All items that may be shown, when they are few enough to look at each."""
        if wanted.only is not None:
            return wanted.only[wanted.keeps(wanted.only)]
        if wanted.allowed is None:
            return None
        places = np.flatnonzero(wanted.allowed)
        return places[wanted.keeps(places)] if len(places) <= _SCANNED else None

    def _scan(self, places: Array, person: UserRow, number: int) -> Candidates:
        """The best of these items by the towers, or by popularity without them."""
        if self.tower is not None:
            scores = (
                self.vectors.take(places) @ self.tower.vectors(person.features.batch(self.tower.layout))[0]
            )
            channel = "two_tower"
        else:
            scores, channel = self.popularity.take(places), "popular"
        best = np.lexsort((places, -scores))[:number]
        channels = np.full(len(best), NAMES.index(channel), np.int8)
        return Candidates(
            places[best], scores[best].astype(np.float32), channels, reciprocal_ranks(len(best))
        )

    # channels

    def _two_tower(self, person: UserRow, number: int, wanted: ItemFilter) -> tuple[Array, Array]:
        assert self.tower is not None
        return self._near(self.tower.vectors(person.features.batch(self.tower.layout)), number, wanted)

    def _similar(self, person: UserRow, number: int, wanted: ItemFilter) -> tuple[Array, Array]:
        """Items near the last ones that the user clicked."""
        recent = self._recent(person)[-3:]
        if not len(recent):
            return NOTHING.places, NOTHING.scores
        middle = self.vectors.take(recent).mean(axis=0, keepdims=True)
        return self._near(middle / max(1e-9, float(np.linalg.norm(middle))), number, wanted)

    def _near(self, vectors: Array, number: int, wanted: ItemFilter) -> tuple[Array, Array]:
        assert self.index is not None
        share = 1.0 if wanted.allowed is None else max(1e-3, float(wanted.allowed.mean()))
        fetched = int(min(len(self.items), number / share + min(len(wanted.banned), 1_000), _MOST_FETCHED))
        places, scores = self.index.search(vectors, max(fetched, number))
        kept = wanted.keeps(places[0])
        return places[0][kept][:number], scores[0][kept][:number]

    def _together(self, person: UserRow, number: int, wanted: ItemFilter) -> tuple[Array, Array]:
        """Items that others clicked who clicked what this user did; later clicks count more."""
        assert self.neighbours is not None
        recent = self._recent(person)
        recent = recent[recent < len(self.neighbours)]  # newer items have no neighbours yet
        if not len(recent):
            return NOTHING.places, NOTHING.scores
        near = self.neighbours[recent].astype(np.int64)
        weights = np.broadcast_to(np.linspace(0.5, 1.0, len(recent), dtype=np.float32)[:, None], near.shape)
        places, inverse = np.unique(near.ravel(), return_inverse=True)
        scores = np.bincount(inverse, weights.ravel()).astype(np.float32)
        kept = wanted.keeps(places)
        places, scores = places[kept], scores[kept]
        best = np.lexsort((places, -scores))[:number]
        return places[best], scores[best]

    def _popular(self, person: UserRow, number: int, wanted: ItemFilter) -> tuple[Array, Array]:
        if self._by_popularity is None:
            counts = self.popularity.whole()
            self._by_popularity = np.lexsort((np.arange(len(counts)), -counts))
        order, size = self._by_popularity, 2 * number + len(wanted.banned)
        while True:
            places = order[:size]
            places = places[wanted.keeps(places)][:number]
            if len(places) == number or size >= len(order):
                return places, self.popularity.take(places)
            size *= 4

    def _recent(self, person: UserRow) -> Array:
        """Places of the last items that the user clicked, latest last."""
        seen = self.seen.of(person.place, person.id)
        return np.concatenate([seen, np.asarray(person.recent, np.int64)])[-_RECENT:]

    # changes

    def put_items(self, places: Array, vectors: Array | None) -> None:
        """Items that are new or have changed. Those that were removed stay so."""
        num_new = len(self.items) - len(self._is_gone)
        self.popularity.append(np.zeros(num_new, np.float32))
        self._is_gone = np.concatenate([self._is_gone, np.zeros(num_new, bool)])
        if vectors is not None and self.index is not None:
            self.vectors.append(np.zeros((num_new, vectors.shape[1]), np.float32))
            self.vectors.put(places, vectors)
            self.index.add(places, vectors)
            self.index.remove(places[self._is_gone[places]])
        self.items_changed()

    def show_items(self, places: Array) -> None:
        """Items that may have been removed can be recommended again."""
        self._is_gone[places[places >= 0]] = False

    def remove_items(self, places: Array) -> None:
        self._is_gone[places] = True
        if self.index is not None:
            self.index.remove(places)

    def count_clicks(self, places: Array) -> None:
        different, counts = np.unique(places, return_counts=True)
        self.popularity.put(different, self.popularity.take(different) + counts.astype(np.float32))
        self._by_popularity = None

    def items_changed(self) -> None:
        self._masks.clear()
        self._by_popularity = None


class ClickedItems:
    """The items that each user clicked, oldest first: as of the log's end, and since."""

    def __init__(self, bundle: Bundle) -> None:
        folder = bundle.path / "users"
        self._places: Array | None = None
        if (folder / "seen.npy").is_file():
            self._places = map_array(folder / "seen.npy")
            self._offsets = map_array(folder / "seen.offsets.npy")
        self._since: dict[str, list[int]] = {}

    def of(self, place: int, user: object) -> Array:
        """Of a user by place among the bundle's users, and by id for what came since."""
        known = NOTHING.places
        if self._places is not None and 0 <= place < len(self._offsets) - 1:
            known = np.asarray(self._places[self._offsets[place] : self._offsets[place + 1]], np.int64)
        since = self._since.get(str(user))
        return known if since is None else np.concatenate([known, np.asarray(since, np.int64)])

    def add(self, user: object, item: int) -> None:
        self._since.setdefault(str(user), []).append(item)


def merged(found: Mapping[str, tuple[Array, Array]], number: int) -> Candidates:
    """Each channel's share first, then what is left of each in turn; an item counts where it came first.

    Ranks are fused: an item's reciprocal ranks in all channels that found it are added up.
    """
    heads: list[Candidates] = []
    tails: list[Candidates] = []
    for name, (places, scores) in found.items():
        own = max(1, round(number * SHARES[name]))
        channel = np.full(len(places), NAMES.index(name), np.int8)
        candidates = Candidates(places, scores, channel, reciprocal_ranks(len(places)))
        heads.append(candidates.some(slice(0, own)))
        tails.append(candidates.some(slice(own, None)))
    together = joined([*heads, *tails])
    _, first, inverse = np.unique(together.places, return_index=True, return_inverse=True)
    fused = np.bincount(inverse, together.fused, minlength=len(first)).astype(np.float32)
    together = replace(together, fused=fused[inverse])
    return together.some(np.sort(first)[:number])


def reciprocal_ranks(number: int) -> Array:
    """What the best of a channel, its second and so on add to an item's fused score."""
    return (1 / (_RANK_OFFSET + np.arange(1, number + 1))).astype(np.float32)


def joined(parts: Sequence[Candidates]) -> Candidates:
    if not parts:
        return NOTHING
    return Candidates(
        np.concatenate([part.places for part in parts]),
        np.concatenate([part.scores for part in parts]).astype(np.float32),
        np.concatenate([part.channels for part in parts]),
        np.concatenate([part.fused for part in parts]),
    )
