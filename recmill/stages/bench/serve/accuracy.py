"""Accuracy of a server's answers on labelled pairs of user and item."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import polars as pl

from recmill.errors import RecmillError
from recmill.metrics import exact_auc
from recmill.stages.bench.contest import Result
from recmill.stages.bench.serve.requests import Id, RequestCodec, RequestShape
from recmill.stages.bench.serve.transports import Transport, ask, precise_loop

T = TypeVar("T")
S = TypeVar("S")
_CONCURRENCY = 4
_MAX_ITEMS = 500  # of one Rank call
_DEADLINE_SECONDS = 10.0
_TRIES, _SECONDS_BETWEEN_TRIES = 10, 0.3


def read_labels(path: Path, max_users: int) -> pl.DataFrame:
    """Columns user, item and label of the first `max_users` users."""
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
    users = frame["user"].unique(maintain_order=True).head(max_users)
    return frame.filter(pl.col("user").is_in(users.implode())).select(
        "user", "item", pl.col("label").cast(pl.Float64)
    )


def measure_accuracy(codec: RequestCodec, labels: pl.DataFrame, shape: RequestShape) -> Result:
    """AUC of the probabilities from Rank, and recall@k of Recommend, averaged over users.

    Recommend leaves out items that a user has seen, so positives should be newer than the bundle.
    """
    with asyncio.Runner(loop_factory=precise_loop) as runner:
        return runner.run(_measure(codec, labels, shape))


async def _measure(codec: RequestCodec, labels: pl.DataFrame, shape: RequestShape) -> Result:
    groups = [
        (key[0], group["item"].to_list(), group["label"].to_numpy())
        for key, group in labels.group_by("user", maintain_order=True)
    ]
    rank, recommend = (
        codec.transport("Rank", _DEADLINE_SECONDS),
        codec.transport("Recommend", _DEADLINE_SECONDS),
    )
    await rank.open()
    await recommend.open()
    try:
        scores = await _each(lambda group: _scores(rank, codec, group[0], group[1]), groups)
        positives = [
            (user, {item for item, label in zip(items, labels, strict=True) if label > 0.5})
            for user, items, labels in groups
        ]
        recalls = await _each(
            lambda pair: _recall(recommend, codec, *pair, shape), [pair for pair in positives if pair[1]]
        )
    finally:
        rank.close()
        recommend.close()
        await asyncio.sleep(0)
    known = np.concatenate([group[2] for group in groups]) if groups else np.zeros(0)
    return {
        "pairs": len(known),
        "auc": round(exact_auc(known, np.array([score for found in scores for score in found])), 5),
        "users": len(recalls),
        f"recall@{shape.k}": round(float(np.mean(recalls)), 5) if recalls else None,
    }


async def _scores(transport: Transport, codec: RequestCodec, user: Id, items: Sequence[Id]) -> list[float]:
    scores: list[float] = []
    for start in range(0, len(items), _MAX_ITEMS):
        request = codec.rank(user, items[start : start + _MAX_ITEMS], {})
        scores += codec.scores(await _answer(transport, request, "Rank"))
    return scores


async def _recall(
    transport: Transport, codec: RequestCodec, user: Id, positives: set[Id], shape: RequestShape
) -> float:
    answers = codec.answers(await _answer(transport, codec.recommend([user], shape), "Recommend"))
    shown = {item["id"] for item in answers[0]["items"]}
    return len(shown & positives) / len(positives)


async def _answer(transport: Transport, request: bytes, name: str) -> bytes:
    for _ in range(_TRIES):
        problem, body = await ask(transport, request)
        if not problem:
            return body
        await asyncio.sleep(_SECONDS_BETWEEN_TRIES)  # speed does not matter here
    raise RecmillError(f"{name} was not answered while accuracy was measured: {problem}.")


async def _each(act: Callable[[S], Awaitable[T]], things: Sequence[S]) -> list[T]:
    """Results in order, a few at a time."""
    semaphore = asyncio.Semaphore(_CONCURRENCY)

    async def one(thing: S) -> T:
        async with semaphore:
            return await act(thing)

    return await asyncio.gather(*(one(thing) for thing in things))
