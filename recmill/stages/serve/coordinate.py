"""The recommend role: stages that run in other processes, put together here. It needs no bundle of its own."""

from __future__ import annotations

from collections import Counter
from typing import Protocol

from recmill.errors import RecmillError, ServingError, TooLate
from recmill.stages.serve import messages as m
from recmill.stages.serve.recall import reciprocal_ranks
from recmill.stages.serve.recommender import Clock, check_sizes


class Stages(Protocol):
    """Where the stages are. Deadlines are on the monotonic clock."""

    def recall(self, request: m.Recall, deadline: float | None) -> m.Answer: ...

    def lookup(self, request: m.Rank, deadline: float | None) -> tuple[bytes, list[bytes], list[str]]: ...

    def rank_rows(
        self, user: bytes, items: list[bytes], context: m.Values, deadline: float | None
    ) -> m.RankAnswer: ...

    def close(self) -> None: ...


class Coordinator:
    """Recall, features and ranking by others. A stage that fails is done without, and the answer says so."""

    def __init__(self, stages: Stages) -> None:
        self.stages = stages

    def recommend(self, query: m.Recommend) -> m.Answer:
        """The k best of what recall finds; without recall there is nothing to answer with."""
        clock = Clock(query.deadline_ms)
        check_sizes(query.k, query.candidates)
        with clock.stage("recall"):
            recalled = self.stages.recall(_recall(query), clock.deadline)
        degraded = list(recalled.degraded)
        items = recalled.items
        if items:
            try:
                scores = self._scores(query, [item.id for item in items], clock, degraded)
                ranked = sorted(zip(scores, items, strict=True), key=lambda pair: -pair[0])
                items = [
                    m.Item(id=item.id, score=score, channel=item.channel, recall_score=item.score)
                    for score, item in ranked
                ]
            except ServingError as error:
                if not isinstance(error, TooLate) and error.http_status < 429:
                    raise
                items = _by_recall(items, error, degraded)
            except RecmillError as error:
                items = _by_recall(items, error, degraded)
        trace = m.Trace(stages=clock.stages, counts={"candidates": len(items)}) if query.trace else None
        return m.Answer(
            items=items[: query.k],
            degraded=degraded,
            version=recalled.version,
            stages=clock.stages,
            trace=trace,
        )

    def rank(self, query: m.Rank) -> m.RankAnswer:
        clock = Clock(query.deadline_ms)
        check_sizes(1, len(query.items))
        degraded: list[str] = []
        scores = self._scores(query, query.items, clock, degraded) if query.items else []
        return m.RankAnswer(scores=scores, degraded=degraded)

    def recall(self, query: m.Recall) -> m.Answer:
        return self.stages.recall(query, Clock(query.deadline_ms).deadline)

    def _scores(
        self, query: m.Recommend | m.Rank, items: list[m.Id], clock: Clock, degraded: list[str]
    ) -> list[float]:
        """Chances by the rank role, from rows that the features role gives; without them, from unknown users' rows."""
        wanted = m.Rank(user=query.user, items=items, features=query.features, recent=query.recent)
        with clock.stage("features"):
            try:
                user, rows, problems = self.stages.lookup(wanted, clock.deadline)
                degraded += problems
            except RecmillError as error:
                user, rows = b"", [b""] * len(items)
                degraded.append(f"features: {error} Default features were used")
        with clock.stage("rank"):
            ranked = self.stages.rank_rows(user, rows, query.context, clock.deadline)
        degraded += ranked.degraded
        return ranked.scores


def _by_recall(items: list[m.Item], error: Exception, degraded: list[str]) -> list[m.Item]:
    """Items by their rank within their channels; that several channels found one, the recall stage does not tell."""
    degraded.append(f"rank: {error} Items are in the order of recall")
    gains, counts = reciprocal_ranks(len(items)).tolist(), Counter[str]()
    found = []
    for item in items:
        score = gains[counts[item.channel]]
        counts[item.channel] += 1
        found.append(m.Item(id=item.id, score=score, channel=item.channel, recall_score=item.score))
    return sorted(found, key=lambda item: -item.score)


def _recall(query: m.Recommend) -> m.Recall:
    """The recall stage of a question; its time is the call's own."""
    fields = {name: getattr(query, name) for name in m.Recall.__struct_fields__}
    return m.Recall(**{**fields, "k": max(query.candidates, query.k), "deadline_ms": None})
