"""The recall stage: some hundred candidates from several channels, without those that must not be shown."""

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
CHANNEL_SHARES: Mapping[str, float] = {"two_tower": 0.7, "similar": 0.1, "co_clicks": 0.1, "popular": 0.1}
_MAX_SCANNED = 20_000  # up to so many allowed items are all scored
_MAX_FETCHED = 5_000
_MAX_RECENT = 20
_RANK_OFFSET = 60  # of reciprocal rank fusion, as Cormack, Clarke and Buettcher chose it


@dataclass(frozen=True)
class Candidates:
    """Items by index, best first within their channel, with the score that the channel gave and its name.

    Scores of two channels cannot be compared; `fused` can, for it is made of ranks alone.
    """

    indices: Array
    scores: Array
    channels: Array
    fused: Array

    def take(self, chosen: Array | slice) -> Candidates:
        return Candidates(
            self.indices[chosen], self.scores[chosen], self.channels[chosen], self.fused[chosen]
        )


_NO_SCORES = np.empty(0, np.float32)
NO_CANDIDATES = Candidates(np.empty(0, np.int64), _NO_SCORES, np.empty(0, np.int8), _NO_SCORES)
NAMES = tuple(CHANNEL_SHARES)


@dataclass(frozen=True)
class ItemFilter:
    """Which items may be shown: not `banned`, those of the mask `allowed` (None: all), and if given those of `only`."""

    banned: Array
    allowed: Array | None
    only: Array | None

    def keeps(self, indices: Array) -> Array:
        kept = indices >= 0
        if self.allowed is not None:
            kept &= self.allowed[indices]
        if len(self.banned):
            # Both are short, and `banned` is sorted: a search in it is quicker than np.isin.
            at = self.banned.searchsorted(indices)
            at[at == len(self.banned)] = 0
            kept &= self.banned[at] != indices
        return kept


class Recaller:
    """All channels of a bundle over its items."""

    def __init__(self, bundle: Bundle) -> None:
        assert bundle.items is not None
        self.bundle, self.items = bundle, bundle.items
        folder = bundle.path / "items"
        self.tower: TowerModel | None = None
        self.vector_index: Index | None = None
        if "retrieval" in bundle.manifest["models"]:
            self.tower = TowerModel(bundle, "user")
            self.vectors = GrowingArray(map_array(folder / "vectors.npy"))
            self.vector_index = open_index(folder / "index", self.vectors.whole())
        self.popularity = GrowingArray(map_array(folder / "popularity.npy"))
        similar = folder / "similar.npy"
        self.neighbours = map_array(similar) if similar.is_file() else None
        self.seen = ClickedItems(bundle)
        self._is_removed = np.zeros(len(self.items), bool)
        self._by_popularity: Array | None = None
        self._masks = Masks(self.items)

    @property
    def channels(self) -> list[str]:
        has = {"two_tower": self.tower is not None, "similar": self.tower is not None}
        has |= {"co_clicks": self.neighbours is not None, "popular": True}
        return [name for name in CHANNEL_SHARES if has[name]]

    def recall(
        self, user_row: UserRow, query: Recall, number: int, deadline: float | None = None
    ) -> Candidates:
        """About `number` candidates: fewer only when no more may be shown."""
        item_filter = self._item_filter(user_row, query, deadline)
        channels = self._channels_of(query)
        few = self._few(item_filter)
        if few is not None:
            return self._scan(few, user_row, number)
        find: dict[str, Callable[[UserRow, int, ItemFilter], tuple[Array, Array]]] = {
            "two_tower": self._two_tower,
            "similar": self._similar,
            "co_clicks": self._co_clicks,
            "popular": self._popular,
        }
        found = {
            name: find[name](
                user_row,
                number if name in ("two_tower", "popular") else self._quota(name, number),
                item_filter,
            )
            for name in channels
        }
        return merge_channels(found, number)

    @staticmethod
    def _quota(name: str, number: int) -> int:
        return max(1, round(number * CHANNEL_SHARES[name]))

    def _channels_of(self, query: Recall) -> list[str]:
        if query.channels is None:
            return self.channels
        for name in query.channels:
            if name not in CHANNEL_SHARES:
                raise BadRequest(f'No channel "{name}"; there are: {", ".join(self.channels)}.')
        return [name for name in self.channels if name in query.channels]

    # what may be shown

    def _item_filter(self, user_row: UserRow, query: Recall, deadline: float | None = None) -> ItemFilter:
        banned = [np.asarray(user_row.recent, np.int64), self.items.indices(query.exclude)]
        if not query.show_seen:
            banned.append(self.seen.of(user_row.index, user_row.id))
        only = None if query.only is None else np.unique(self.items.indices(query.only))
        allowed = self._masks.of(query.where, deadline) if query.where else None
        if self._is_removed.any():
            allowed = ~self._is_removed if allowed is None else allowed & ~self._is_removed
        together = np.concatenate(banned)
        return ItemFilter(
            np.unique(together[together >= 0]), allowed, None if only is None else only[only >= 0]
        )

    def _few(self, item_filter: ItemFilter) -> Array | None:
        """All items that may be shown, if they are few enough to score each."""
        if item_filter.only is not None:
            return item_filter.only[item_filter.keeps(item_filter.only)]
        if item_filter.allowed is None:
            return None
        indices = np.flatnonzero(item_filter.allowed)
        return indices[item_filter.keeps(indices)] if len(indices) <= _MAX_SCANNED else None

    def _scan(self, indices: Array, user_row: UserRow, number: int) -> Candidates:
        """The best of these items by the towers, or by popularity without them."""
        if self.tower is not None:
            scores = (
                self.vectors.take(indices) @ self.tower.vectors(user_row.features.batch(self.tower.layout))[0]
            )
            channel = "two_tower"
        else:
            scores, channel = self.popularity.take(indices), "popular"
        best = np.lexsort((indices, -scores))[:number]
        channels = np.full(len(best), NAMES.index(channel), np.int8)
        return Candidates(
            indices[best], scores[best].astype(np.float32), channels, reciprocal_ranks(len(best))
        )

    # channels

    def _two_tower(self, user_row: UserRow, number: int, item_filter: ItemFilter) -> tuple[Array, Array]:
        assert self.tower is not None
        return self._near(self.tower.vectors(user_row.features.batch(self.tower.layout)), number, item_filter)

    def _similar(self, user_row: UserRow, number: int, item_filter: ItemFilter) -> tuple[Array, Array]:
        """Items near the last ones that the user clicked."""
        recent = self._recent(user_row)[-3:]
        if not len(recent):
            return NO_CANDIDATES.indices, NO_CANDIDATES.scores
        middle = self.vectors.take(recent).mean(axis=0, keepdims=True)
        return self._near(middle / max(1e-9, float(np.linalg.norm(middle))), number, item_filter)

    def _near(self, vectors: Array, number: int, item_filter: ItemFilter) -> tuple[Array, Array]:
        assert self.vector_index is not None
        share = 1.0 if item_filter.allowed is None else max(1e-3, float(item_filter.allowed.mean()))
        fetched = int(
            min(len(self.items), number / share + min(len(item_filter.banned), 1_000), _MAX_FETCHED)
        )
        indices, scores = self.vector_index.search(vectors, max(fetched, number))
        kept = item_filter.keeps(indices[0])
        return indices[0][kept][:number], scores[0][kept][:number]

    def _co_clicks(self, user_row: UserRow, number: int, item_filter: ItemFilter) -> tuple[Array, Array]:
        """Items that others clicked who clicked what this user did; later clicks count more."""
        assert self.neighbours is not None
        recent = self._recent(user_row)
        recent = recent[recent < len(self.neighbours)]  # newer items have no neighbours yet
        if not len(recent):
            return NO_CANDIDATES.indices, NO_CANDIDATES.scores
        near = self.neighbours[recent].astype(np.int64)
        weights = np.broadcast_to(np.linspace(0.5, 1.0, len(recent), dtype=np.float32)[:, None], near.shape)
        indices, inverse = np.unique(near.ravel(), return_inverse=True)
        scores = np.bincount(inverse, weights.ravel()).astype(np.float32)
        kept = item_filter.keeps(indices)
        indices, scores = indices[kept], scores[kept]
        best = np.lexsort((indices, -scores))[:number]
        return indices[best], scores[best]

    def _popular(self, user_row: UserRow, number: int, item_filter: ItemFilter) -> tuple[Array, Array]:
        if self._by_popularity is None:
            counts = self.popularity.whole()
            self._by_popularity = np.lexsort((np.arange(len(counts)), -counts))
        order, size = self._by_popularity, 2 * number + len(item_filter.banned)
        while True:
            indices = order[:size]
            indices = indices[item_filter.keeps(indices)][:number]
            if len(indices) == number or size >= len(order):
                return indices, self.popularity.take(indices)
            size *= 4

    def _recent(self, user_row: UserRow) -> Array:
        """Places of the last items that the user clicked, latest last."""
        seen = self.seen.of(user_row.index, user_row.id)
        return np.concatenate([seen, np.asarray(user_row.recent, np.int64)])[-_MAX_RECENT:]

    # changes

    def put_items(self, indices: Array, vectors: Array | None) -> None:
        """Items that are new or have changed. Those that were removed stay so."""
        num_new = len(self.items) - len(self._is_removed)
        self.popularity.append(np.zeros(num_new, np.float32))
        self._is_removed = np.concatenate([self._is_removed, np.zeros(num_new, bool)])
        if vectors is not None and self.vector_index is not None:
            self.vectors.append(np.zeros((num_new, vectors.shape[1]), np.float32))
            self.vectors.put(indices, vectors)
            self.vector_index.add(indices, vectors)
            self.vector_index.remove(indices[self._is_removed[indices]])
        self.items_changed()

    def show_items(self, indices: Array) -> None:
        """Items that may have been removed can be recommended again."""
        self._is_removed[indices[indices >= 0]] = False

    def remove_items(self, indices: Array) -> None:
        self._is_removed[indices] = True
        if self.vector_index is not None:
            self.vector_index.remove(indices)

    def count_clicks(self, indices: Array) -> None:
        different, counts = np.unique(indices, return_counts=True)
        self.popularity.put(different, self.popularity.take(different) + counts.astype(np.float32))
        self._by_popularity = None

    def items_changed(self) -> None:
        self._masks.clear()
        self._by_popularity = None


class ClickedItems:
    """The items that each user clicked, oldest first: as of the log's end, and since."""

    def __init__(self, bundle: Bundle) -> None:
        folder = bundle.path / "users"
        self._indices: Array | None = None
        if (folder / "seen.npy").is_file():
            self._indices = map_array(folder / "seen.npy")
            self._offsets = map_array(folder / "seen.offsets.npy")
        self._since: dict[str, list[int]] = {}

    def of(self, index: int, user: object) -> Array:
        """Of a user by index among the bundle's users, and by id for what came since."""
        known = NO_CANDIDATES.indices
        if self._indices is not None and 0 <= index < len(self._offsets) - 1:
            known = np.asarray(self._indices[self._offsets[index] : self._offsets[index + 1]], np.int64)
        since = self._since.get(str(user))
        return known if since is None else np.concatenate([known, np.asarray(since, np.int64)])

    def add(self, user: object, item: int) -> None:
        self._since.setdefault(str(user), []).append(item)


def merge_channels(found: Mapping[str, tuple[Array, Array]], number: int) -> Candidates:
    """Each channel's share first, then what is left of each in turn; an item counts where it came first.

    Ranks are fused: an item's reciprocal ranks in all channels that found it are added up.
    """
    heads: list[Candidates] = []
    tails: list[Candidates] = []
    for name, (indices, scores) in found.items():
        own = max(1, round(number * CHANNEL_SHARES[name]))
        channel = np.full(len(indices), NAMES.index(name), np.int8)
        candidates = Candidates(indices, scores, channel, reciprocal_ranks(len(indices)))
        heads.append(candidates.take(slice(0, own)))
        tails.append(candidates.take(slice(own, None)))
    together = concat([*heads, *tails])
    _, first, inverse = np.unique(together.indices, return_index=True, return_inverse=True)
    fused = np.bincount(inverse, together.fused, minlength=len(first)).astype(np.float32)
    together = replace(together, fused=fused[inverse])
    return together.take(np.sort(first)[:number])


def reciprocal_ranks(number: int) -> Array:
    """What the best of a channel, its second and so on add to an item's fused score."""
    return (1 / (_RANK_OFFSET + np.arange(1, number + 1))).astype(np.float32)


def concat(parts: Sequence[Candidates]) -> Candidates:
    if not parts:
        return NO_CANDIDATES
    return Candidates(
        np.concatenate([part.indices for part in parts]),
        np.concatenate([part.scores for part in parts]).astype(np.float32),
        np.concatenate([part.channels for part in parts]),
        np.concatenate([part.fused for part in parts]),
    )
