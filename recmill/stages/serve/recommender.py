"""Answers from one bundle: recall, filters, features, ranking, traces."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Unpack

import msgspec
import numpy as np
import polars as pl

from recmill.artifacts.bundle.bundle import Bundle
from recmill.artifacts.bundle.entities import Entities
from recmill.artifacts.bundle.features import FeatureRows
from recmill.artifacts.bundle.models import RankModel
from recmill.artifacts.feature_store.codec import RowCodec
from recmill.artifacts.feature_store.redis import RedisStore
from recmill.dataset.batch import Array
from recmill.errors import BadRequest, ExpressionError, NotFound, RecmillError
from recmill.recall.parameters import RANKING
from recmill.stages.serve import messages as m
from recmill.stages.serve.boosts import boosted, boosts_of, with_boosts
from recmill.stages.serve.clock import Clock
from recmill.stages.serve.item_answers import ItemAnswers
from recmill.stages.serve.limits import check_sizes
from recmill.stages.serve.lookup import UserRow
from recmill.stages.serve.recall import CHANNELS, NO_CANDIDATES, Candidates, ChannelList, top_items

_NUM_TRACED = 20  # latest items of the user in a trace
_SMOOTHING = 0.1  # weight of the latest ranking in the mean time per candidate
_ROWS_AT_ONCE = 4_096


@dataclass(frozen=True)
class _Recommendation:
    """The list for a query, and everything that it was made of."""

    user_row: UserRow
    lists: Mapping[str, ChannelList]
    candidates: Candidates
    chosen: Candidates
    scores: Array
    boosts: Array | None
    degraded: list[str]


class Recommender(ItemAnswers):
    """Answers from one bundle. Safe to call from many threads."""

    def __init__(self, bundle: Bundle, store: RedisStore | None = None) -> None:
        super().__init__(bundle, store)
        self._seconds_each = 1e-5  # seconds to rank one candidate; a running mean

    # answers

    def recommend(
        self, user: m.Recommend | m.Id | None = None, **fields: Unpack[m.RecommendFields]
    ) -> m.Answer:
        """The k best items of a user. Unknown users and items get an answer too.

        Call it with a user's id and keyword arguments, `recommend("u1", k=10, where="price < 30")`, or with a
        Recommend.
        """
        query = m.query_of(m.Recommend, user, fields)
        clock = Clock(query.deadline_ms)
        check_sizes(query.k, query.candidates)
        with self.lock.reading():
            self._check_fields(query.fields)
            recommendation = self._recommend(query, clock)
            trace = self._trace(recommendation, clock) if query.trace else None
            profile = self._recaller().profile(recommendation.user_row) if query.explain else None
            answer = self._answer(
                recommendation.chosen,
                recommendation.scores,
                recommendation.degraded,
                clock.stages,
                recommendation.user_row.found,
                trace,
            )
            answer = with_boosts(answer, recommendation.boosts)
            return self._described(answer, recommendation.chosen.indices, query.fields, profile)

    def _recommend(self, query: m.Recommend, clock: Clock) -> _Recommendation:
        recaller, number = self._recaller(), max(query.candidates, query.k)
        if query.serve_score is not None:  # an invalid one is refused even when there is no time to rank
            ranker = self._ranker()
            task_scores(ranker, ranker.no_rows(), query.serve_score)
        with clock.stage("user"):
            user_row = self.lookup.user_row(query, clock.deadline)
        degraded = list(user_row.degraded)
        clock.check()
        with clock.stage("recall"):
            lists = recaller.lists(user_row, query, number, clock.deadline)
            candidates = recaller.fused(lists, user_row, number)
        chosen, scores, ranking = candidates, candidates.fused, recaller.ranking_part(user_row)
        if self.ranker is not None and ranking.share and len(candidates.indices):
            chosen, probabilities = self._ranked(user_row, candidates, query, clock, degraded)
            scores = scores_with_ranking(chosen.fused, probabilities, ranking)
        boosts = None
        if query.boost:
            boosts = boosts_of(recaller, query.boost, chosen.indices, clock.deadline)
            scores = boosted(scores, boosts)
        best = top_items(chosen.indices, scores, query.k)
        chosen, scores = chosen.take(best), scores[best]
        boosts = boosts if boosts is None else boosts[best]
        return _Recommendation(user_row, lists, candidates, chosen, scores, boosts, degraded)

    def recommend_by_stage(self, query: m.Recommend) -> dict[str, Array]:
        """Item indices after each stage: recall, candidates, and the final list."""
        with self.lock.reading():
            recommendation = self._recommend(query, Clock(None))
        recalled = np.concatenate(
            [NO_CANDIDATES.indices, *(indices for indices, _ in recommendation.lists.values())]
        )
        return {
            "recall": np.unique(recalled),
            "candidates": recommendation.candidates.indices,
            "list": recommendation.chosen.indices,
        }

    def _ranked(
        self, user_row: UserRow, candidates: Candidates, query: m.Recommend, clock: Clock, degraded: list[str]
    ) -> tuple[Candidates, Array | None]:
        """The ranker's scores for as many candidates as time allows; None when it allows none."""
        assert self.ranker is not None
        chosen = candidates
        affordable = clock.left / self._seconds_each
        if affordable < len(candidates.indices):
            if affordable < query.k:
                degraded.append("rank: no time was left, items are in the order of recall")
                return candidates, None
            chosen = candidates.take(slice(0, int(affordable)))
            degraded.append(
                f"rank: there was time for {len(chosen.indices)} of {len(candidates.indices)} candidates"
            )
        began = time.perf_counter()
        with clock.stage("features"):
            items, problems = self.lookup.candidates(chosen.indices, user_row, clock.deadline)
        degraded += problems
        with clock.stage("rank"):
            scores = task_scores(self.ranker, self.ranker.rank(user_row.features, items), query.serve_score)
        each = (time.perf_counter() - began) / len(chosen.indices)
        self._seconds_each += _SMOOTHING * (each - self._seconds_each)
        return chosen, scores

    def recall(self, user: m.Recall | m.Id | None = None, **fields: Unpack[m.RecallFields]) -> m.Answer:
        """Candidates without ranking, by the fused ranks of their channels."""
        query = m.query_of(m.Recall, user, fields)
        clock = Clock(query.deadline_ms)
        check_sizes(1, query.k)
        recaller = self._recaller()
        with self.lock.reading():
            self._check_fields(query.fields)
            with clock.stage("user"):
                user_row = self.lookup.user_row(query, clock.deadline)
            clock.check()
            with clock.stage("recall"):
                lists = recaller.lists(user_row, query, query.k, clock.deadline)
                candidates = recaller.fused(lists, user_row, query.k)
            answer = self._answer(
                candidates, candidates.fused, list(user_row.degraded), clock.stages, user_row.found
            )
            if query.boost:
                answer = with_boosts(
                    answer, boosts_of(recaller, query.boost, candidates.indices, clock.deadline)
                )
            answer = self._described(answer, candidates.indices, query.fields, None)
            return msgspec.structs.replace(answer, ranking=recaller.ranking_part(user_row))

    def channel_lists(self, query: m.Recall) -> dict[str, Array]:
        """Item indices by every channel that there is, best first, and by the ranker's order of all of them."""
        recaller = self._recaller()
        with self.lock.reading():
            user_row = self.lookup.user_row(query)
            every = msgspec.structs.replace(query, channels=recaller.channels)
            lists = {name: found[0] for name, found in recaller.lists(user_row, every, query.k).items()}
            union = np.unique(np.concatenate(list(lists.values())))
            if self.ranker is not None and len(union):
                rows, _ = self.lookup.items(union, user_row, None)
                scores = task_scores(self.ranker, self.ranker.rank(user_row.features, rows))
                lists[RANKING] = union[np.argsort(-scores, kind="stable")]
        return lists

    def rank(
        self, user: m.Rank | m.Id | None, items: Sequence[m.Id] = (), **fields: Unpack[m.QueryFields]
    ) -> m.RankAnswer:
        """Click probabilities of these items; an unknown item is ranked by its id alone."""
        query = m.query_of(m.Rank, user, {"items": np.asarray(items, object).tolist(), **fields})
        clock = Clock(query.deadline_ms)
        check_sizes(1, len(query.items))
        ranker = self._ranker()
        with self.lock.reading():
            user_row = self.lookup.user_row(query, clock.deadline)
            clock.check()
            rows, degraded = self._item_rows(query.items, user_row, clock.deadline)
            probabilities = ranker.rank(user_row.features, rows)
            unknown_items = self._unknown(query.items)
        degraded = [*user_row.degraded, *degraded]
        return self._rank_answer(
            ranker, probabilities, query.serve_score, degraded, user_row.found, unknown_items
        )

    def _rank_answer(
        self,
        ranker: RankModel,
        probabilities: Array,
        serve_score: str | None,
        degraded: list[str],
        known: bool = True,
        unknown_items: Sequence[m.Id] = (),
    ) -> m.RankAnswer:
        return m.RankAnswer(
            scores=task_scores(ranker, probabilities, serve_score).tolist(),
            tasks={name: found.tolist() for name, found in ranker.tasks.by_task(probabilities).items()},
            known=known,
            unknown_items=list(unknown_items),
            degraded=degraded,
            version=self.version,
        )

    def features(self, query: m.Features) -> m.FeaturesAnswer:
        """Stored columns and features of a user and of items."""
        check_sizes(1, len(query.items))
        with self.lock.reading():
            degraded: list[str] = []
            user = None
            if query.user is not None:
                user_row = self.lookup.user_row(m.Rank(user=query.user, items=[]))
                degraded += user_row.degraded
                user = m.EntityFeatures(
                    id=query.user,
                    known=user_row.found,
                    values=self.lookup.raw_user(query.user) if user_row.found else user_row.given,
                    features=user_row.features.row(0),
                )
            items: list[m.EntityFeatures] = []
            if query.items:
                unknown_user = self.lookup.user_row(m.Rank(items=[]))
                rows, problems = self._item_rows(query.items, unknown_user, None)
                degraded += problems
                known = self._indices(query.items) >= 0
                items = [
                    m.EntityFeatures(id=item, known=bool(is_known), values=values, features=rows.row(number))
                    for number, (item, is_known, values) in enumerate(
                        zip(query.items, known, self.lookup.raw_items(query.items), strict=True)
                    )
                ]
        return m.FeaturesAnswer(user=user, items=items, degraded=degraded, version=self.version)

    def score(self, rows: pl.DataFrame) -> Array:
        """Probabilities for raw rows of the log, as in evaluation: [B] or, with several tasks, [B, K].

        Absent columns count as missing values.
        """
        ranker = self._ranker()
        read = {name for feature in ranker.features for name in self.lookup.columns_of(feature)}
        typed = self.lookup.raw_columns
        unknown = [name for name in rows.columns if name not in typed.kinds]
        if unknown:
            raise BadRequest(
                f'The log has no column "{unknown[0]}"; the model reads: {", ".join(sorted(read))}.'
            )
        try:
            frame = typed.cast(rows, sorted(read))
            with self.lock.reading():
                scores = [
                    ranker.score(self.lookup.batch(chunk, ranker.layout))
                    for chunk in frame.iter_slices(_ROWS_AT_ONCE)
                ]
        except (pl.exceptions.PolarsError, RecmillError) as error:
            raise BadRequest(f"The rows cannot be scored: {error}") from None
        return np.concatenate(scores) if scores else ranker.score(self.lookup.batch(frame, ranker.layout))

    # stages that run in other roles

    def packed_rows(self, query: m.Rank) -> m.PackedRows:
        """Packed stored features of a user and of items: with the request's columns, without its context."""
        users, items = self._sides()
        with self.lock.reading():
            user_row = self.lookup.user_row(query)
            rows, degraded = self._item_rows(query.items, user_row, None)
            user = self._codecs["user"].encode(user_row.features.batch(users.layout))[0]
            packed = self._codecs["item"].encode(rows.batch(items.layout))
            unknown_items = self._unknown(query.items)
        return m.PackedRows(
            user=user,
            items=packed,
            known=user_row.found,
            unknown_items=unknown_items,
            degraded=[*user_row.degraded, *degraded],
            version=self.version,
        )

    def rank_rows(self, rows: m.RankRows) -> m.RankAnswer:
        """Probabilities from packed rows; a row that is damaged or of another bundle counts as unknown."""
        ranker, (users, items) = self._ranker(), self._sides()
        check_sizes(1, len(rows.items))
        degraded = []
        with self.lock.reading():
            context = self.lookup.context(rows.context)
            user = self._codecs["user"].decode([rows.user])
            if user.unreadable[0]:
                degraded.append("features of the user: damaged or of another bundle, defaults are used")
            decoded = self._codecs["item"].decode(rows.items)
            if any(rows.items) and not decoded.found.all():
                degraded.append(
                    f"features of items: {int((~decoded.found).sum())} of {len(rows.items)} are missing, damaged or "
                    "of another bundle, defaults are used"
                )
            probabilities = ranker.rank(
                FeatureRows.of(user.batch, users.layout) | context,
                FeatureRows.of(decoded.batch, items.layout),
            )
        return self._rank_answer(ranker, probabilities, rows.serve_score, degraded)

    def _sides(self) -> tuple[Entities, Entities]:
        """Users and items of a bundle whose stages can run in separate processes."""
        users, items = self.bundle.users, self.bundle.items
        if users is None or items is None:
            raise NotFound(f"Bundle {self.version} has no users and items; it only scores rows.")
        if self.lookup.crossed_features:
            raise NotFound(
                f'Feature "{self.lookup.crossed_features[0]}" reads users and items together, so features and '
                "ranking cannot run apart. Serve this bundle with --role all."
            )
        return users, items

    # parts

    @cached_property
    def _codecs(self) -> dict[str, RowCodec]:
        sides = {"user": self.bundle.users, "item": self.bundle.items}
        digest = self.bundle.plan.digest()
        return {
            name: RowCodec(side.layout, side.unknown_row, digest)
            for name, side in sides.items()
            if side is not None
        }

    def _item_rows(
        self, items: Sequence[m.Id], user_row: UserRow, deadline: float | None
    ) -> tuple[FeatureRows, list[str]]:
        """Features of items, in order; those of unknown items come from the id alone."""
        indices = self._indices(items)
        rows, degraded = self.lookup.items(indices, user_row, deadline)
        unknown_items = np.flatnonzero(indices < 0)
        if len(unknown_items):
            raw = self.lookup.raw_items([items[number] for number in unknown_items.tolist()])
            rows = rows.replaced(unknown_items, self.lookup.unknown_items(raw, user_row))
        return rows, degraded

    def _unknown(self, items: Sequence[m.Id]) -> list[m.Id]:
        return [item for item, index in zip(items, self._indices(items).tolist(), strict=True) if index < 0]

    def _trace(self, found: _Recommendation, clock: Clock) -> m.Trace:
        user_row, chosen, candidates = found.user_row, found.chosen, found.candidates
        names, counts = np.unique(candidates.channels, return_counts=True)
        entities = self._recaller().items
        raw = user_row.given
        if user_row.found and user_row.id is not None:
            raw = {**self.lookup.raw_user(user_row.id), **raw}
        rows = entities.rows(chosen.indices)
        latest = self._recaller().profile(user_row)[: -_NUM_TRACED - 1 : -1]
        return m.Trace(
            stages={name: round(ms, 3) for name, ms in clock.stages.items()},
            counts={
                **{CHANNELS[name]: int(count) for name, count in zip(names, counts, strict=True)},
                "candidates": len(candidates.indices),
                "answered": len(chosen.indices),
                **({} if found.boosts is None else {"boosted": int(np.count_nonzero(found.boosts != 1))}),
            },
            ranker=self.ranker.runs if self.ranker is not None else "",
            user=raw,
            items=entities.raw(chosen.indices).to_dicts(),
            user_features=user_row.features.row(0),
            item_features=[rows.row(number) for number in range(rows.size)],
            history=entities.raw(latest).to_dicts(),
        )

    def warm_up(self) -> None:
        """Run every code path once, so that the first answer is as fast as later ones."""
        users = self.bundle.users
        if self.recaller is not None:
            known = users.ids(np.arange(min(8, len(users)))) if users is not None else []
            for user in (None, *known):
                self.recommend(m.Recommend(user=user))
        if self.ranker is not None:
            columns = self.lookup.columns_of(self.ranker.features[0])
            self.score(pl.DataFrame({name: [None] * 100 for name in columns}))


def task_scores(ranker: RankModel, probabilities: Array, serve_score: str | None = None) -> Array:
    """The scores that order items; a request's `serve_score` replaces the recipe's expression over tasks."""
    if serve_score is not None and not ranker.tasks.tasks:
        raise BadRequest(
            "serve_score is for rankers with several tasks, and this one has one label. Remove it."
        )
    try:
        return ranker.tasks.scores(probabilities, serve_score)
    except ExpressionError as error:
        raise BadRequest(f"serve_score {error}") from None


def scores_with_ranking(fused: Array, probabilities: Array | None, ranking: m.RankingPart) -> Array:
    """The scores that items are sorted by: the ranker's order is fused with the weight that was fitted on eval.

    Where the ranker alone decides, the score is the click probability.
    """
    if probabilities is None:
        return fused
    if ranking.share == 1.0:
        return probabilities
    ranks = np.empty(len(fused), np.int64)
    ranks[np.argsort(-probabilities, kind="stable")] = np.arange(len(fused))
    together: Array = fused + ranking.share * ranking.offset / (ranking.offset + ranks)
    return together.astype(np.float32)
