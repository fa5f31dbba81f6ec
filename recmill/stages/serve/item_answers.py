"""Answers about items: similar items, trending items, and the fields that are returned with each item."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Unpack

import msgspec

from recmill.artifacts.bundle.features import FeatureRows
from recmill.dataset.batch import Array
from recmill.errors import BadRequest
from recmill.recall.fusion import Fusion
from recmill.stages.serve import messages as m
from recmill.stages.serve.clock import Clock
from recmill.stages.serve.limits import check_sizes
from recmill.stages.serve.live_bundle import LiveBundle
from recmill.stages.serve.lookup import UserRow
from recmill.stages.serve.reasons import reasons, relations, sentence
from recmill.stages.serve.recall import CHANNELS, TRENDING, Candidates, fuse

_SIMILAR = ("co_clicks", "similar", "content")  # channels of similar items: co-interactions, and vectors
_ELSE_SIMILAR = ("ease", "transitions")
_ITEM_OFFSET = 10.0  # offset of reciprocal ranks: the first of a channel counts clearly more than its tenth
_FETCHED = 5  # candidates from each channel, as a multiple of k
_NOBODY = UserRow(None, -1, {}, FeatureRows(1, {}, {}), False)


class ItemAnswers(LiveBundle):
    """A bundle that answers about its items."""

    def similar(self, item: m.Similar | m.Id, **fields: Unpack[m.ItemQueryFields]) -> m.Answer:
        """The k items that are most similar to an item; none for an unknown item."""
        query = m.query_of(m.Similar, item, fields, "item")
        recaller = self._recaller()
        with self.lock.reading():
            index = int(self._indices([query.item])[0])
            available = set(recaller.channels)
            channels = [name for name in _SIMILAR if name in available]
            channels = channels or [name for name in _ELSE_SIMILAR if name in available]
            if index < 0 or not channels:
                self._check_fields(query.fields)
                return m.Answer(items=[], known=index >= 0, version=self.version)
            like_item = replace(_NOBODY, recent=[index])
            return self._item_answer(query, like_item, channels)

    def trending(self, query: m.Trending | None = None, **fields: Unpack[m.ItemQueryFields]) -> m.Answer:
        """The k items that are most popular lately."""
        query = m.query_of(m.Trending, query, fields, None)
        with self.lock.reading():
            return self._item_answer(query, _NOBODY, [TRENDING])

    def _item_answer(self, query: m.ItemQuery, user_row: UserRow, channels: Sequence[str]) -> m.Answer:
        """Fuse lists of channels with equal weights."""
        clock = Clock(query.deadline_ms)
        check_sizes(query.k, 0)
        clock.check()
        self._check_fields(query.fields)
        wanted = m.Recall(exclude=query.exclude, where=query.where, channels=list(channels))
        number = min(_FETCHED * query.k, len(self._recaller().items)) if len(channels) > 1 else query.k
        with clock.stage("recall"):
            lists = self._recaller().lists(user_row, wanted, number, clock.deadline)
            fusion = Fusion(dict.fromkeys(channels, 1.0), _ITEM_OFFSET)
            chosen = fuse(lists, fusion, query.k)
        answer = self._answer(chosen, chosen.fused, [], clock.stages)
        return self._described(answer, chosen.indices, query.fields, None)

    def describe(self, query: m.Describe) -> m.Answer:
        """The items of a query with the requested columns and reasons."""
        recaller, profile = self._recaller(), None
        with self.lock.reading():
            if query.explain:
                profile = recaller.profile(self.lookup.user_row(query))
            self._check_fields(query.fields)
            indices = self._indices([item.id for item in query.items])
            items = m.Answer(items=query.items, version=self.version)
            return self._described(items, indices, query.fields, profile)

    def _described(
        self, answer: m.Answer, indices: Array, fields: Sequence[str], profile: Array | None
    ) -> m.Answer:
        """The answer with raw columns of its items, and reasons if there is a profile to explain them by."""
        items = answer.items
        if fields and items:
            rows = self._recaller().items.raw(indices, list(dict.fromkeys(fields))).to_dicts()
            items = [msgspec.structs.replace(item, fields=row) for item, row in zip(items, rows, strict=True)]
        if profile is not None:
            items = self._explained(items, indices, profile)
        return answer if items is answer.items else msgspec.structs.replace(answer, items=items)

    def _explained(self, items: Sequence[m.Item], indices: Array, profile: Array) -> list[m.Item]:
        recaller, recipe = self._recaller(), self.bundle.recipe
        because = reasons(recaller.items, recipe, relations(recaller, profile, indices))
        return [
            msgspec.structs.replace(item, because=found, why=sentence(recipe, found, item.channel))
            for item, found in zip(items, because, strict=True)
        ]

    def _check_fields(self, fields: Sequence[str]) -> None:
        known = self._recaller().items.raw_schema if fields else ()
        for name in fields:
            if name not in known:
                raise BadRequest(f'Items have no column "{name}"; fields can be: {", ".join(known)}.')

    def _answer(
        self,
        chosen: Candidates,
        scores: Array,
        degraded: list[str],
        stages: Mapping[str, float],
        known: bool = True,
        trace: m.Trace | None = None,
    ) -> m.Answer:
        ids = self._recaller().items.ids(chosen.indices)
        channels = [CHANNELS[channel] for channel in chosen.channels.tolist()]
        items = list(map(m.Item, ids, scores.tolist(), channels, chosen.scores.tolist()))
        stages = {name: round(ms, 3) for name, ms in stages.items()}
        return m.Answer(
            items=items, known=known, degraded=degraded, version=self.version, stages=stages, trace=trace
        )
