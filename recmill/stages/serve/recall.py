"""The recall stage: some hundred candidates from several channels, without items that must not be shown."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from recmill import _native
from recmill.artifacts.bundle.arrays import GrowingArray, map_array
from recmill.artifacts.bundle.bundle import Bundle
from recmill.artifacts.bundle.models import TowerModel
from recmill.artifacts.vector_index import Index, open_index
from recmill.dataset.batch import Array
from recmill.errors import BadRequest
from recmill.recall.fusion import Fusion
from recmill.recall.neighbours import MAX_PROFILE, NEIGHBOUR_CHANNELS, ItemNeighbours
from recmill.recall.parameters import RANKING, UNFITTED, RecallParameters
from recmill.stages.serve.lookup import UserRow
from recmill.stages.serve.masks import Masks
from recmill.stages.serve.messages import RankingPart, Recall

TRENDING = "trending"
CHANNELS = ("two_tower", "similar", *NEIGHBOUR_CHANNELS, "popular", TRENDING)
_NUMBERS = {name: number for number, name in enumerate(CHANNELS)}
_NUM_BUSIEST = 12  # users that pages suggest
_MAX_SCANNED = 20_000  # up to this many allowed items are all scored
_NUM_SIMILAR_TO = 3  # latest clicked items whose neighbours are candidates
_MAX_DOUBLINGS = 60  # of the weight of a click, after which popularity is scaled down

ChannelList = tuple[Array, Array]  # indices of items, best first, and the channel's scores


@dataclass(frozen=True)
class Candidates:
    """Items by index, best first: their fused score, and score and name of the channel that contributed most.

    Scores of two channels are not comparable; `fused` is, because it depends on ranks alone.
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


@dataclass(frozen=True)
class ItemFilter:
    """Items that may be shown: not `banned`, in the mask `allowed` (None: all), and in `few` if given."""

    banned: Array
    allowed: Array | None
    few: Array | None = None  # all items that may be shown, when there are few enough to score each

    def mask(self, num_items: int) -> Array | None:
        """Which of all items may be shown, banned ones aside; None: all."""
        if self.few is None:
            return None if self.allowed is None else self.allowed.view(np.uint8)
        mask = np.zeros(num_items, np.uint8)
        mask[self.few] = 1
        return mask

    def keeps(self, indices: Array) -> Array:
        kept = indices >= 0
        if self.allowed is not None:
            kept &= self.allowed[indices]
        if len(self.banned):
            # Both are short, and `banned` is sorted: a binary search is faster than np.isin.
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
        content = bundle.manifest.get("recall")
        self.parameters = RecallParameters.from_dict(content) if content is not None else UNFITTED
        self.tower: TowerModel | None = None
        self.vector_index: Index | None = None
        if "retrieval" in bundle.manifest["models"]:
            self.tower = TowerModel(bundle, "user")
            self.vectors = GrowingArray(map_array(folder / "vectors.npy"))
            self.vector_index = open_index(folder / "index", self.vectors.whole())
        self.popularity = Popularity(map_array(folder / "popularity.npy"), self.parameters.popular_half_life)
        self.trending = self._trending()
        self.neighbours = {
            name: _open_neighbours(bundle, name)
            for name in self.parameters.neighbours
            if (folder / f"{name}.indices.npy").is_file()
        }
        self.seen = ClickedItems(bundle)
        self._is_removed = np.zeros(len(self.items), bool)
        self._has_removed = False  # whether any item is banned: checking all would cost each request a scan
        self._masks = Masks(self.items)

    def _trending(self) -> Popularity:
        """Popularity with a short half-life; overall popularity in a bundle that has none."""
        path = self.bundle.path / "items" / "trending.npy"
        if not path.is_file():
            return self.popularity
        scores = map_array(path)
        # Interactions that count half after every half-life add up to half-life / ln 2.
        return Popularity(scores, float(scores.sum()) * math.log(2) or None)

    @property
    def channels(self) -> list[str]:
        """The channels that take part in recommendations."""
        has = {"two_tower": self.tower is not None, "similar": self.tower is not None, "popular": True}
        return [name for name in CHANNELS if has.get(name, name in self.neighbours)]

    def lists(
        self, user_row: UserRow, query: Recall, number: int, deadline: float | None = None
    ) -> dict[str, ChannelList]:
        """Lists of the channels that take part: together `number` items for a user, unless fewer may be shown."""
        item_filter = self._item_filter(user_row, query, deadline)
        channels = self._channels_of(user_row, query)
        wanted = {name: self._search(name, user_row, number, item_filter) for name in channels}
        searches = [one for one in wanted.values() if isinstance(one, _native.Search)]
        mask = item_filter.mask(len(self.items))
        found = iter(_native.run_searches(searches, number, item_filter.banned, mask))
        lists = {
            name: next(found) if isinstance(one, _native.Search) else one for name, one in wanted.items()
        }
        is_short = max((len(indices) for indices, _ in lists.values()), default=0) < number
        if is_short and query.channels is None and "popular" not in lists:
            # Without any co-interactions, the answer must not be empty.
            lists["popular"] = self.popularity.best(number, item_filter)
        return lists

    def fused(self, lists: Mapping[str, ChannelList], user_row: UserRow, number: int) -> Candidates:
        """The best candidates of all lists together."""
        return fuse(lists, self.fusion_of(user_row), number)

    def fusion_of(self, user_row: UserRow) -> Fusion:
        """The fusion of lists: users without clicks have one of their own."""
        has_clicks = user_row.recent or self.seen.has_any(user_row.index, user_row.id)
        return self.parameters.fusion if has_clicks else self.parameters.new_users

    def ranking_part(self, user_row: UserRow) -> RankingPart:
        """The ranker's weight in an item's score: 1 when nothing was fitted."""
        if not self.parameters.is_fitted:
            return RankingPart()
        fusion = self.fusion_of(user_row)
        return RankingPart(share=fusion.share(RANKING), offset=fusion.offset)

    def _channels_of(self, user_row: UserRow, query: Recall) -> list[str]:
        known = self.channels
        if query.channels is None:
            weights = self.fusion_of(user_row).weights
            return [name for name in known if weights.get(name)]
        for name in query.channels:
            if name not in CHANNELS:
                raise BadRequest(f'No channel "{name}"; there are: {", ".join(known)}.')
        return [name for name in (*known, TRENDING) if name in query.channels]

    # what may be shown

    def matches(self, where: str, deadline: float | None) -> Array:
        """Whether each item meets a condition."""
        return self._masks.of(where, deadline)

    def _item_filter(self, user_row: UserRow, query: Recall, deadline: float | None = None) -> ItemFilter:
        banned = [self.seen.of(user_row.index, user_row.id)] if not query.show_seen else []
        if user_row.recent or query.exclude:
            banned += [np.asarray(user_row.recent, np.int64), self.items.indices(query.exclude)]
        allowed = self._masks.of(query.where, deadline) if query.where else None
        if self._has_removed:
            allowed = ~self._is_removed if allowed is None else allowed & ~self._is_removed
        item_filter = ItemFilter(_native.unique_items(banned), allowed)
        few = self._few(item_filter, query)
        return item_filter if few is None else replace(item_filter, few=few)

    def _few(self, item_filter: ItemFilter, query: Recall) -> Array | None:
        """All items that may be shown, if there are few enough to score each."""
        if query.only is not None:
            indices = np.unique(self.items.indices(query.only))
        elif item_filter.allowed is not None and np.count_nonzero(item_filter.allowed) <= _MAX_SCANNED:
            indices = np.flatnonzero(item_filter.allowed)
        else:
            return None
        return indices[item_filter.keeps(indices)]

    # channels

    def _search(
        self, name: str, user_row: UserRow, number: int, item_filter: ItemFilter
    ) -> _native.Search | ChannelList:
        """What a channel looks for in native code, or its list, if that takes no search."""
        if name == "two_tower":
            return self._two_tower(user_row, number, item_filter)
        if name == "similar":
            return self._similar(user_row, number, item_filter)
        if name in ("popular", TRENDING):
            popularity = self.popularity if name == "popular" else self.trending
            return popularity.best(number, item_filter)
        return self._related(name, user_row, number, item_filter)

    def _two_tower(
        self, user_row: UserRow, number: int, item_filter: ItemFilter
    ) -> _native.Search | ChannelList:
        assert self.tower is not None
        vectors = self.tower.vectors(user_row.features.batch(self.tower.layout))
        return self._near(vectors[0], number, item_filter)

    def _similar(
        self, user_row: UserRow, number: int, item_filter: ItemFilter
    ) -> _native.Search | ChannelList:
        """Items near the last ones that the user clicked."""
        recent = self.profile(user_row)[-_NUM_SIMILAR_TO:]
        if not len(recent):
            return NO_CANDIDATES.indices, NO_CANDIDATES.scores
        middle = self.vectors.take(recent).mean(axis=0)
        return self._near(middle / max(1e-9, math.sqrt(middle.dot(middle))), number, item_filter)

    def _near(self, vector: Array, number: int, item_filter: ItemFilter) -> _native.Search | ChannelList:
        assert self.vector_index is not None
        if item_filter.few is not None:
            return best_of(item_filter.few, self.vectors.take(item_filter.few) @ vector, number)
        return self.vector_index.native_search(vector, number, len(item_filter.banned), item_filter.allowed)

    def _related(
        self, name: str, user_row: UserRow, number: int, item_filter: ItemFilter
    ) -> _native.Search | ChannelList:
        """Items that an item-item model relates to what the user clicked; later clicks count more."""
        profile = self.profile(user_row)
        if not len(profile):
            return NO_CANDIDATES.indices, NO_CANDIDATES.scores
        return self.neighbours[name].search(profile, self.parameters.neighbours[name].half_life)

    def profile(self, user_row: UserRow) -> Array:
        """Indices of the user's latest clicked items, latest last."""
        seen = self.seen.of(user_row.index, user_row.id)
        if user_row.recent:
            seen = np.concatenate([seen, np.asarray(user_row.recent, np.int64)])
        return seen[-MAX_PROFILE:]

    # changes

    @property
    def popularities(self) -> list[Popularity]:
        """The popularities, which count each click once."""
        return [self.popularity] if self.trending is self.popularity else [self.popularity, self.trending]

    def put_items(self, indices: Array, vectors: Array | None) -> None:
        """Add or replace items. Removed items stay removed."""
        num_new = len(self.items) - len(self._is_removed)
        for popularity in self.popularities:
            popularity.add_items(num_new)
        self._is_removed = np.concatenate([self._is_removed, np.zeros(num_new, bool)])
        if vectors is not None and self.vector_index is not None:
            self.vectors.append(np.zeros((num_new, vectors.shape[1]), np.float32))
            self.vectors.put(indices, vectors)
            self.vector_index.add(indices, vectors)
            self.vector_index.remove(indices[self._is_removed[indices]])
        self._masks.clear()

    def show_items(self, indices: Array) -> None:
        """Make removed items recommendable again."""
        self._is_removed[indices[indices >= 0]] = False
        self._has_removed = bool(self._is_removed.any())

    def remove_items(self, indices: Array) -> None:
        self._is_removed[indices] = True
        self._has_removed = bool(self._is_removed.any())
        if self.vector_index is not None:
            self.vector_index.remove(indices)


class Popularity:
    """Popularity of each item; later clicks may weigh more than earlier ones."""

    def __init__(self, scores: Array, half_life: float | None) -> None:
        self._scores = GrowingArray(scores)
        self._half_life = half_life
        self._doublings = 0.0  # weight of a click, relative to the last time that scores were scaled
        self._order: Array | None = None

    def of(self, indices: Array) -> Array:
        return self._scores.take(indices)

    def best(self, number: int, item_filter: ItemFilter) -> ChannelList:
        if item_filter.few is not None:
            return best_of(item_filter.few, self.of(item_filter.few), number)
        if self._order is None:
            scores = self._scores.whole()
            self._order = np.lexsort((np.arange(len(scores)), -scores))
        mask = None if item_filter.allowed is None else item_filter.allowed.view(np.uint8)
        indices = _native.first_shown(self._order, item_filter.banned, mask, number)
        return indices, self.of(indices)

    def add_items(self, number: int) -> None:
        self._scores.append(np.zeros(number, np.float32))
        self._order = None

    def add_clicks(self, indices: Array) -> None:
        different, counts = np.unique(indices, return_counts=True)
        # Each click weighs more than the one before: equivalent to decaying all earlier ones.
        if self._half_life is not None:
            self._doublings += len(indices) / self._half_life
            if self._doublings > _MAX_DOUBLINGS:
                everything = np.arange(len(self._scores.whole()))
                self._scores.put(everything, self._scores.whole() * np.float32(0.5**self._doublings))
                self._doublings = 0.0
        weight = 2.0**self._doublings
        added = (counts * weight).astype(np.float32)
        self._scores.put(different, self._scores.take(different) + added)
        self._order = None


class ClickedItems:
    """The clicked items of each user, latest last: up to the log's end, and since."""

    def __init__(self, bundle: Bundle) -> None:
        folder = bundle.path / "users"
        self._indices: Array | None = None
        if (folder / "seen.npy").is_file():
            self._indices = map_array(folder / "seen.npy")
            self._offsets = map_array(folder / "seen.offsets.npy")
        self._since: dict[str, list[int]] = {}

    def of(self, index: int, user: object) -> Array:
        """Items of a user, by index for the bundle's users and by id for later clicks."""
        known = NO_CANDIDATES.indices
        if self._indices is not None and 0 <= index < len(self._offsets) - 1:
            known = np.asarray(self._indices[self._offsets[index] : self._offsets[index + 1]], np.int64)
        since = self._since.get(str(user)) if self._since else None
        return known if since is None else np.concatenate([known, np.asarray(since, np.int64)])

    def has_any(self, index: int, user: object) -> bool:
        """Whether `of` gives any."""
        if self._indices is not None and 0 <= index < len(self._offsets) - 1:
            return bool(self._offsets[index] < self._offsets[index + 1]) or str(user) in self._since
        return str(user) in self._since

    @cached_property
    def busiest(self) -> dict[int, int]:
        """A few users with the longest histories in the log, and the lengths of those."""
        if self._indices is None:
            return {}
        lengths = np.diff(self._offsets)
        longest = np.argsort(-lengths, kind="stable")[:_NUM_BUSIEST]
        return dict(zip(longest.tolist(), lengths[longest].tolist(), strict=True))

    def add(self, user: object, item: int) -> None:
        self._since.setdefault(str(user), []).append(item)


def _open_neighbours(bundle: Bundle, name: str) -> ItemNeighbours:
    folder = bundle.path / "items"
    indices, weights = (map_array(folder / f"{name}.{part}.npy") for part in ("indices", "weights"))
    items = bundle.array(f"items/{name}.items.npy")
    return ItemNeighbours(map_array(folder / f"{name}.offsets.npy"), indices, weights, items)


def top_items(indices: Array, scores: Array, number: int) -> Array:
    """Offsets of the best items, best first; of equal scores the smaller index."""
    if scores.dtype == np.float32:
        return _native.best_of(np.ascontiguousarray(scores), indices, number)
    return np.lexsort((indices, -scores))[:number]


def best_of(indices: Array, scores: Array, number: int) -> ChannelList:
    best = top_items(indices, scores, number)
    return indices[best], scores[best].astype(np.float32)


def fuse(lists: Mapping[str, ChannelList], fusion: Fusion, number: int) -> Candidates:
    """Fuse lists: the best items of all channels by fused score, each with the channel that contributed most.

    Items of equal score, such as those of a channel with weight 0, keep their channel's order.
    """
    if not lists:
        return NO_CANDIDATES
    by_weight = sorted(lists, key=lambda name: -fusion.weights.get(name, 0.0))
    given = [(*lists[name], fusion.gains(name, len(lists[name][0])), _NUMBERS[name]) for name in by_weight]
    return Candidates(*_native.fuse_lists(given, number))
