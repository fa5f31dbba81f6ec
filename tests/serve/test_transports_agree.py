"""Rows of a log have the same scores through every transport as the trainer gives them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import polars as pl
import pytest
import tritonclient.grpc
import tritonclient.http
from redis_servers import running
from servers import Start
from shop import Shop

import recmill
from recmill.artifacts.checkpoint.checkpoint import Checkpoint
from recmill.cli import main
from recmill.dataset.batch import collate
from recmill.learner.ranking import Ranker
from recmill.learner.saved import open_learner
from recmill.stages.serve.messages import Rank
from recmill.stages.serve.proto import recmill_pb2 as pb
from recmill.stages.serve.recommender import Recommender

NUM_ROWS = 250
CONTEXT = ["device", "position", "price_shown", "time"]
LOG_COLUMNS = ["user_id", "item_id", *CONTEXT]

pytestmark = pytest.mark.services


@dataclass(frozen=True)
class Rows:
    """Rows of the log, with users and items as the bundle knows them."""

    shop: Shop

    @cached_property
    def recommender(self) -> Recommender:
        return recmill.open_bundle(self.shop.bundles)

    @cached_property
    def drawn(self) -> list[dict[str, Any]]:
        log = pl.read_csv(self.shop.log / "events.csv")
        return log.sample(NUM_ROWS, seed=1).select(LOG_COLUMNS).to_dicts()

    @cached_property
    def whole(self) -> pl.DataFrame:
        """All raw columns that the ranker reads, histories as of the log's end."""
        users, items = self.recommender.bundle.users, self.recommender.bundle.items
        assert users is not None
        assert items is not None
        of_users = users.raw(users.indices([row["user_id"] for row in self.drawn])).to_dicts()
        of_items = items.raw(items.indices([row["item_id"] for row in self.drawn])).to_dicts()
        rows = [{**u, **i, **row} for u, i, row in zip(of_users, of_items, self.drawn, strict=True)]
        raw_columns = self.recommender.lookup.raw_columns
        return raw_columns.frame(rows, list(raw_columns.kinds))

    @cached_property
    def flat(self) -> pl.DataFrame:
        """The columns that are not lists, which is what tensors can carry."""
        return self.whole.select(
            [name for name, dtype in self.whole.schema.items() if not isinstance(dtype, pl.List)]
        ).drop("clicked")

    def trained(self, rows: pl.DataFrame) -> np.ndarray:
        """Scores by the trainer's own model."""
        folder = Checkpoint.open(self.shop.checkpoint)
        ranker = open_learner(folder, "ranking").learner
        assert isinstance(ranker, Ranker)
        rows = self.recommender.lookup.raw_columns.cast(rows, list(self.recommender.lookup.raw_columns.kinds))
        applied = folder.plan.apply(rows, labels=False, only=ranker.layout.features)
        return ranker.predict(collate(applied, ranker.layout, with_labels=False))

    def questions(self) -> list[dict[str, Any]]:
        return [
            {
                "user": row["user_id"],
                "items": [row["item_id"]],
                "context": {name: row[name] for name in CONTEXT},
            }
            for row in self.drawn
        ]


@pytest.fixture(scope="module")
def rows(shop: Shop) -> Rows:
    return Rows(shop)


@pytest.fixture(scope="module")
def expected(rows: Rows) -> np.ndarray:
    found = rows.trained(rows.whole)
    assert len(np.unique(found)) > NUM_ROWS / 4  # rows that tell right from wrong
    return found


def same(found: Any, expected: np.ndarray) -> None:
    np.testing.assert_allclose(np.asarray(found, np.float64), expected, atol=1e-5)


def by_http(address: str, rows: Rows) -> list[float]:
    with httpx.Client(base_url=address) as client:
        answers = [client.post("/v1/rank", json=question).json() for question in rows.questions()]
    assert not any(answer.get("degraded") for answer in answers)
    return [answer["scores"][0] for answer in answers]


def by_grpc(address: str, rows: Rows) -> list[float]:
    with grpc.insecure_channel(address) as channel:
        rank = channel.unary_unary("/recmill.v1.Recommender/Rank")
        answers = [pb.RankReply.FromString(rank(_message(question))) for question in rows.questions()]
    assert not any(answer.degraded for answer in answers)
    return [answer.scores[0] for answer in answers]


def _message(question: dict[str, Any]) -> bytes:
    kinds = {str: "text", int: "number", float: "real"}
    given = {name: value for name, value in question["context"].items() if value is not None}
    context = {name: pb.Value(**{kinds[type(value)]: value}) for name, value in given.items()}
    query = pb.Query(user=pb.Id(text=question["user"]), context=context)
    return pb.RankRequest(
        query=query, items=[pb.Id(text=item) for item in question["items"]]
    ).SerializeToString()


def test_in_process(rows: Rows, expected: np.ndarray) -> None:
    same(rows.recommender.score(rows.whole.drop("clicked")), expected)
    ranked = [rows.recommender.rank(Rank(**question)).scores[0] for question in rows.questions()]
    same(ranked, expected)


def test_http_and_grpc(rows: Rows, expected: np.ndarray, shop: Shop, start: Start) -> None:
    server = start(bundle=shop.bundles)
    same(by_http(server.http, rows), expected)
    same(by_grpc(server.grpc, rows), expected)


def test_split_roles(rows: Rows, expected: np.ndarray, shop: Shop, start: Start) -> None:
    stages = {
        f"{role}_at": (start(bundle=shop.bundles, role=role).grpc,) for role in ("recall", "features", "rank")
    }
    server = start(bundle=shop.bundles, role="recommend", **stages)
    same(by_grpc(server.grpc, rows), expected)


def test_features_from_redis(
    rows: Rows, expected: np.ndarray, shop: Shop, start: Start, tmp_path: Path
) -> None:
    with running(tmp_path) as redis:
        where = ["--features", redis.url, "--prefix", "shop"]
        assert main(["load", "--bundle", str(shop.bundles), *where, "--json"]) == 0
        server = start(bundle=shop.bundles, features=redis.url, prefix="shop")
        same(by_grpc(server.grpc, rows), expected)
        assert redis.client().info()["keyspace_hits"] >= 2 * NUM_ROWS
        server.stop()


@pytest.mark.parametrize("transport", ["http", "grpc"])
def test_open_inference_protocol(rows: Rows, shop: Shop, start: Start, transport: str) -> None:
    server = start(bundle=shop.bundles)
    module: Any = {"http": tritonclient.http, "grpc": tritonclient.grpc}[transport]
    client = module.InferenceServerClient(getattr(server, transport).removeprefix("http://"))
    tensors = [_tensor(module, column) for column in rows.flat]
    found = client.infer("ranking", tensors).as_numpy("probability")
    same(found, rows.trained(rows.flat))


def _tensor(module: Any, column: pl.Series) -> Any:
    if column.dtype == pl.String:
        kind, values = "BYTES", np.array([(text or "").encode() for text in column], object)
    elif column.dtype == pl.Int64:
        kind, values = "INT64", column.to_numpy()
    else:
        kind, values = "FP64", column.cast(pl.Float64).fill_null(float("nan")).to_numpy()
    tensor = module.InferInput(column.name, [len(values)], kind)
    tensor.set_data_from_numpy(values)
    return tensor
