"""A ranker with several tasks through every stage: evaluated, scored and served by task and by one expression."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

import recmill
from recmill.cli import main
from recmill.errors import BadRequest
from recmill.recipe.load import recipe_from_dict
from recmill.recipe.write import toml_of
from recmill.stages.serve import inference
from recmill.stages.serve.messages import Rank, Recommend
from recmill.stages.serve.proto import convert
from recmill.stages.serve.recommender import Recommender

pytestmark = pytest.mark.stages

ITEMS = list(range(1, 11))
RECIPE: dict[str, Any] = {
    "name": "tasks",
    "log": {
        "files": ["events.tsv"],
        "user": "user",
        "item": "item",
        "time": "time",
        "columns": [{"name": name, "type": "int"} for name in ("user", "item", "time", "liked", "replied")],
    },
    "split": {"by": "tail", "held_out": 0.2},
    "labels": [{"name": "like", "columns": "liked"}, {"name": "reply", "columns": "replied"}],
    "features": [{"columns": "user", "steps": ["vocabulary"]}, {"columns": "item", "steps": ["vocabulary"]}],
    "table": {"keep": ["user", "item"]},
    "ranking": {
        "model": "mmoe",
        "embedding_dim": 8,
        "top": [16],
        "interaction": "cat",
        "tasks": {"labels": ["like", "reply"], "tower": [8], "serve_score": "0.3 * like + reply"},
        "train": {
            "batch_size": 128,
            "epochs": 6,
            "target": "reply.auc >= 0.99",
            "dense": {"name": "adam", "learning_rate": 0.01},
            "sparse": {"name": "adagrad", "learning_rate": 0.1},
        },
    },
}


@pytest.fixture(scope="module")
def into(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Even users like even items and reply to odd ones."""
    into = tmp_path_factory.mktemp("tasks")
    random = np.random.default_rng(0)
    lines = []
    for time in range(4000):
        user, item = (int(drawn) for drawn in random.integers(1, 11, 2))
        liked, replied = (int(random.random() < (0.8 if (user + item) % 2 == odd else 0.1)) for odd in (0, 1))
        lines.append(f"{user}\t{item}\t{time}\t{liked}\t{replied}\n")
    (into / "log").mkdir()
    (into / "log" / "events.tsv").write_text("".join(lines))
    recipe = into / "tasks.toml"
    recipe.write_text(toml_of(recipe_from_dict(RECIPE)))
    gate = "like.auc>=0.8,reply.rce>=constant,auc>=0.8"
    for arguments in (
        ["prepare", recipe, "--data", into / "log", "--into", into / "table"],
        ["train", recipe, "--table", into / "table", "--into", into / "checkpoint", "--threads", 1],
        ["evaluate", recipe, "--table", into / "table", "--checkpoint", into / "checkpoint", "--gate", gate],
        ["export", "--checkpoint", into / "checkpoint", "--into", into / "bundles"],
    ):
        assert main([*map(str, arguments), "--quiet"]) == 0
    return into


@pytest.fixture(scope="module")
def served(into: Path) -> Recommender:
    return recmill.open_bundle(into / "bundles")


def test_evaluation_has_metrics_of_each_task_and_their_means(into: Path) -> None:
    found = json.loads((into / "checkpoint" / "evaluation.json").read_text())["models"]["ranking"]
    metrics = found["metrics"]
    assert metrics["auc"] == pytest.approx((metrics["like.auc"] + metrics["reply.auc"]) / 2)
    for name in ("auc", "log_loss", "pr_auc", "rce"):
        assert np.isfinite([metrics[f"{task}.{name}"] for task in ("like", "reply")]).all()
    assert "reply.normalised_entropy <= constant" in [one["condition"] for one in found["gate"]]
    assert {"like: constant", "reply: constant"} <= set(found["baselines"])


def test_the_bundle_gives_what_training_gives(served: Recommender) -> None:
    checked = served.bundle.manifest["check"]
    assert set(checked) == {"rank", "rank_split"}
    assert all(numbers["max"] < 1e-5 for numbers in checked.values())


def test_rank_gives_each_task_and_the_recipes_order_of_them(served: Recommender) -> None:
    ranked = served.rank(Rank(user=2, items=ITEMS))
    like, reply = np.array(ranked.tasks["like"]), np.array(ranked.tasks["reply"])
    np.testing.assert_allclose(ranked.scores, 0.3 * like + reply, atol=1e-6)
    assert like[1::2].min() > 0.5 > like[::2].max()
    assert reply[::2].min() > 0.5 > reply[1::2].max()


def test_a_request_may_bring_another_order(served: Recommender) -> None:
    def best(serve_score: str | None) -> set[Any]:
        found = served.recommend(
            Recommend(user=2, k=5, candidates=10, serve_score=serve_score, show_seen=True)
        )
        return {item.id for item in found.items}

    assert best(None) == {1, 3, 5, 7, 9}
    assert best("like") == {2, 4, 6, 8, 10}


@pytest.mark.parametrize(
    ("serve_score", "reason"),
    [
        ("share + like", "there is no column share; known: like, reply"),
        ("case when like > 0.5 then 'a' end", "expected a number for each row"),
        ("0.5", "expected a number made of tasks"),
        ("__import__('os')", "at character 1"),
    ],
)
def test_an_order_that_cannot_be_read_is_refused(served: Recommender, serve_score: str, reason: str) -> None:
    for ask in (
        lambda: served.rank(Rank(user=2, items=ITEMS, serve_score=serve_score)),
        lambda: served.recommend(Recommend(user=2, serve_score=serve_score)),
    ):
        with pytest.raises(BadRequest, match=r"^serve_score at character") as raised:
            ask()
        assert reason in str(raised.value)


def test_grpc_carries_the_order_and_the_tasks(served: Recommender) -> None:
    request = convert.pb.RankRequest(
        items=[convert.to_id(item) for item in ITEMS], serve_score="reply - like"
    )
    request.query.user.CopyFrom(convert.to_id(2))
    ranked = served.rank(convert.rank_of(request))
    reply = convert.ranked_of(convert.to_ranked(ranked))
    np.testing.assert_allclose(
        reply.scores, np.subtract(reply.tasks["reply"], reply.tasks["like"]), atol=1e-6
    )


def test_the_inference_protocol_has_an_output_for_each_task(served: Recommender) -> None:
    assert inference.outputs_of(served.bundle) == ["score", "like", "reply"]
    rows = inference.ScoringRows(pl.DataFrame({"user": [2, 2], "item": [1, 2]}), "", in_bytes=True)
    found = served.score(rows.frame)
    ranked = served.rank(Rank(user=2, items=[1, 2]))
    np.testing.assert_allclose(found[:, 0], ranked.tasks["like"], atol=1e-6)
    outputs = {"like": found[:, 0], "reply": found[:, 1]}
    content, headers = inference.http_answer("1", rows, outputs)
    length = int(headers["inference-header-content-length"])
    np.testing.assert_array_equal(np.frombuffer(content[length:], "<f4"), found.T.flatten())


@pytest.mark.parametrize("source", ["checkpoint", "bundle"])
def test_scores_of_a_log_have_a_column_for_each_task(into: Path, source: str, tmp_path: Path) -> None:
    model = into / ("checkpoint" if source == "checkpoint" else "bundles")
    arguments = [
        "score",
        f"--{source}",
        model,
        "--data",
        into / "log",
        "--into",
        tmp_path / "scores",
        "--quiet",
    ]
    assert main([*map(str, arguments)]) == 0
    rows = pl.concat([pl.read_parquet(file) for file in (tmp_path / "scores").glob("**/*.parquet")])
    expected = 0.3 * rows["score_like"] + rows["score_reply"]
    np.testing.assert_allclose(rows["score"], expected, atol=1e-6)
    assert {"label_like", "label_reply"} <= set(rows.columns)
