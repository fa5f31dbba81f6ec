"""Lists that models read unpooled are served as they were trained: histories with target attention and in order."""

from __future__ import annotations

from typing import Any

import httpx
import numpy as np
import polars as pl
import pytest
import tritonclient.grpc
import tritonclient.http
from servers import Start

import recmill
from recmill.cli import main
from recmill.recipe.load import recipe_from_dict
from recmill.recipe.write import toml_of
from recmill.stages.serve.messages import Event, Recommend
from recmill.stages.serve.recommender import Recommender

pytestmark = pytest.mark.stages

TRAIN = {"batch_size": 64, "max_steps": 8, "dense": {"name": "adam", "learning_rate": 0.01}}
RETRIEVAL = {
    "model": "sasrec",
    "label": "clicked",
    "user": ["before"],
    "item": ["item"],
    "blocks": 1,
    "negatives": 10,
    "train": TRAIN,
}
RANKING = {"model": "din", "label": "clicked", "sequences": ["before"], "hidden": [8], "train": TRAIN}
RECIPE: dict[str, Any] = {
    "name": "histories",
    "log": {
        "files": ["events.tsv"],
        "user": "user",
        "item": "item",
        "time": "time",
        "columns": [{"name": name, "type": "int"} for name in ("user", "item", "time", "click")],
    },
    "rows": [{"history": {"columns": ["item"], "by": "user", "order": "time", "max_length": 8}}],
    "split": {"by": "last", "column": "user", "order": "time"},
    "labels": [{"name": "clicked", "columns": "click"}],
    "features": [
        {"columns": "user", "steps": ["vocabulary"]},
        {"columns": "item", "steps": [{"vocabulary": {"named": "item"}}]},
        {"name": "before", "columns": "item_history", "steps": [{"lookup": "item"}]},
    ],
    "table": {"order": "shuffle", "keep": ["user", "item"]},
    "retrieval": RETRIEVAL,
    "ranking": RANKING,
}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Recommender:
    into = tmp_path_factory.mktemp("sequences")
    random = np.random.default_rng(0)
    rows = [(user, random.integers(30), time) for user in range(20) for time in range(15)]
    lines = [f"{user}\t{item}\t{time}\t{int(time < 13 or time % 2)}\n" for user, item, time in rows]
    (into / "log").mkdir()
    (into / "log" / "events.tsv").write_text("".join(lines))
    recipe = into / "histories.toml"
    recipe.write_text(toml_of(recipe_from_dict(RECIPE)))
    for arguments in (
        ["prepare", recipe, "--data", into / "log", "--into", into / "table"],
        ["train", recipe, "--table", into / "table", "--into", into / "checkpoint", "--threads", 1],
        ["export", "--checkpoint", into / "checkpoint", "--into", into / "bundles"],
    ):
        assert main([*map(str, arguments), "--quiet"]) == 0
    return recmill.open_bundle(into / "bundles")


def test_an_event_changes_what_the_next_request_finds(served: Recommender) -> None:
    def found(user: int) -> list[Any]:
        return [item.id for item in served.recommend(Recommend(user=user, k=10)).items]

    before, other = found(3), found(4)
    served.add_events([Event(user=3, item=found(3)[-1])])
    assert found(3) != before
    assert found(4) == other


ROWS = pl.DataFrame(
    {"user": [3, 4, 99], "item": [1, 2, 3], "item_history": [[5, 6, 7], [8], []]},
    schema_overrides={"item_history": pl.List(pl.Int64)},
)
LENGTHS = [3, 1, 0]
FILLED_UP = np.array([[5, 6, 7], [8, 0, 0], [0, 0, 0]])


@pytest.mark.services
@pytest.mark.parametrize("transport", ["http", "grpc"])
def test_histories_are_sent_by_the_open_inference_protocol(
    served: Recommender, start: Start, transport: str
) -> None:
    server = start(bundle=served.bundle.path)
    module: Any = {"http": tritonclient.http, "grpc": tritonclient.grpc}[transport]
    client = module.InferenceServerClient(getattr(server, transport).removeprefix("http://"))
    columns = {
        "user": np.array([3, 4, 99]),
        "item": np.array([1, 2, 3]),
        "item_history": FILLED_UP,
        "item_history.lengths": np.array(LENGTHS),
    }
    expected = served.score(ROWS)
    assert not np.allclose(expected, served.score(ROWS.drop("item_history")), atol=1e-4)
    for as_bytes in (True, False) if transport == "http" else (True,):
        tensors = [module.InferInput(name, values.shape, "INT64") for name, values in columns.items()]
        for tensor, values in zip(tensors, columns.values(), strict=True):
            tensor.set_data_from_numpy(values, **({"binary_data": as_bytes} if transport == "http" else {}))
        found = client.infer("ranking", tensors).as_numpy("probability")
        np.testing.assert_allclose(found, expected, atol=1e-6)
    metadata = client.get_model_metadata("ranking", **({"as_json": True} if transport == "grpc" else {}))
    shapes = {one["name"]: [int(size) for size in one["shape"]] for one in metadata["inputs"]}
    assert shapes == {"user": [-1], "item": [-1], "item_history": [-1, -1], "item_history.lengths": [-1]}
    client.close()


@pytest.mark.services
def test_histories_are_sent_by_tensorflow_servings_rest_and_by_values_of_length_1(
    served: Recommender, start: Start
) -> None:
    server = start(bundle=served.bundle.path)
    predict = f"{server.http}/v1/models/ranking:predict"
    answer = httpx.post(predict, json={"instances": ROWS.to_dicts()})
    found = [row["logistic"][0] for row in answer.json()["predictions"]]
    np.testing.assert_allclose(found, served.score(ROWS), atol=1e-6)
    answer = httpx.post(predict, json={"instances": [{"user": 3, "item": 1, "item_history": 8}]})
    one = pl.DataFrame({"user": [3], "item": [1], "item_history": [[8]]})
    assert answer.json()["predictions"][0]["logistic"] == pytest.approx(served.score(one).tolist(), abs=1e-6)
