"""How well a server answers, against pairs of user and item whose label is known."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import polars as pl

from recmill.errors import RecmillError
from recmill.metrics import exact_auc
from recmill.stages.bench.serve.requests import Id, RequestShape, Words
from recmill.stages.bench.serve.transports import Transport, ask, precise_loop

Result = dict[str, Any]
T = TypeVar("T")
S = TypeVar("S")
_AT_ONCE = 4
_MOST_ITEMS = 500  # of one Rank call
_DEADLINE_SECONDS = 10.0
_TRIES, _SECONDS_BETWEEN_TRIES = 10, 0.3


def read_labels(path: Path, most_users: int) -> pl.DataFrame:
    """Columns user, item and label of the first so many users, a row for each pair."""
    try:
        frame = pl.read_parquet(path)
    except (OSError, pl.exceptions.PolarsError) as error:
        raise RecmillError(f"{path} cannot be read as Parquet: {error}") from None
    missing = [name for name in ("user", "item", "label") if name not in frame.columns]
    if missing:
        raise RecmillError(
            f"{path} has no column {', '.join(missing)}; labels are columns user, item and label. "
            f"It has: {', '.join(frame.columns)}."
        )
    users = frame["user"].unique(maintain_order=True).head(most_users)
    return frame.filter(pl.col("user").is_in(users.implode())).select(
        "user", "item", pl.col("label").cast(pl.Float64)
    )


def measure_accuracy(words: Words, labels: pl.DataFrame, question: RequestShape) -> Result:
    """AUC of the chances that Rank gives, and how many of each user's positives Recommend shows among its k.

    Every user counts once in recall; what a user has seen already is not recommended, so positives should be new ones.
    """
    with asyncio.Runner(loop_factory=precise_loop) as runner:
        return runner.run(_measure(words, labels, question))


async def _measure(words: Words, labels: pl.DataFrame, question: RequestShape) -> Result:
    groups = [
        (key[0], group["item"].to_list(), group["label"].to_numpy())
        for key, group in labels.group_by("user", maintain_order=True)
    ]
    rank, recommend = (
        words.transport("Rank", _DEADLINE_SECONDS),
        words.transport("Recommend", _DEADLINE_SECONDS),
    )
    await rank.open()
    await recommend.open()
    try:
        scores = await _each(lambda group: _scores(rank, words, group[0], group[1]), groups)
        wanted = [
            (user, {item for item, label in zip(items, labels, strict=True) if label > 0.5})
            for user, items, labels in groups
        ]
        shares = await _each(
            lambda pair: _found(recommend, words, *pair, question), [pair for pair in wanted if pair[1]]
        )
    finally:
        rank.close()
        recommend.close()
        await asyncio.sleep(0)
    known = np.concatenate([group[2] for group in groups]) if groups else np.zeros(0)
    return {
        "pairs": len(known),
        "auc": round(exact_auc(known, np.array([score for found in scores for score in found])), 5),
        "users": len(shares),
        f"recall@{question.k}": round(float(np.mean(shares)), 5) if shares else None,
    }


async def _scores(transport: Transport, words: Words, user: Id, items: Sequence[Id]) -> list[float]:
    found: list[float] = []
    for start in range(0, len(items), _MOST_ITEMS):
        request = words.rank(user, items[start : start + _MOST_ITEMS], {})
        found += words.scores(await _answer(transport, request, "Rank"))
    return found


async def _found(
    transport: Transport, words: Words, user: Id, positives: set[Id], question: RequestShape
) -> float:
    answers = words.answers(await _answer(transport, words.recommend([user], question), "Recommend"))
    shown = {item["id"] for item in answers[0]["items"]}
    return len(shown & positives) / len(positives)


async def _answer(transport: Transport, request: bytes, name: str) -> bytes:
    for _ in range(_TRIES):
        problem, body = await ask(transport, request)
        if not problem:
            return body
        await asyncio.sleep(_SECONDS_BETWEEN_TRIES)  # how fast it answers is not the question here
    raise RecmillError(f"{name} was not answered while accuracy was measured: {problem}.")


async def _each(act: Callable[[S], Awaitable[T]], things: Sequence[S]) -> list[T]:
    """Results in order, a few asked at once."""
    gate = asyncio.Semaphore(_AT_ONCE)

    async def one(thing: S) -> T:
        async with gate:
            return await act(thing)

    return await asyncio.gather(*(one(thing) for thing in things))
