"""`recmill.fit`: frames in, recommendations with titles out."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import recmill

NUM_ITEMS = 24
# Even users like even items, in order: each goes on with the item two later.
EVENTS = pl.DataFrame(
    [(u, (u + 2 * n) % NUM_ITEMS, 1_600_000_000 + 100 * n + u) for u in range(60) for n in range(8)],
    schema=["who", "film", "at"],
    orient="row",
)
FILMS = pl.DataFrame(
    {"film": range(NUM_ITEMS), "title": [f"Film {n}" for n in range(NUM_ITEMS)], "kind": ["odd", "even"] * 12}
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> recmill.FittedRecommender:
    into = tmp_path_factory.mktemp("fit") / "run"
    return recmill.fit(EVENTS, user="who", item="film", time="at", items=FILMS, into=into, quiet=True)


@pytest.mark.stages
class TestFitted:
    """All of one model, which is trained once."""

    def test_a_user_is_recommended_what_they_like_with_titles(self, model: recmill.FittedRecommender) -> None:
        found = model.recommend(4, k=3)
        assert len(found) == 3
        assert all(item.id % 2 == 0 for item in found)
        assert [item.title for item in found] == [f"Film {item.id}" for item in found]
        assert "title" in repr(found).splitlines()[0]
        assert found.to_polars()["id"].to_list() == found.ids
        assert f"<td>Film {found.ids[0]}</td>" in found._repr_html_()

    def test_similar_items_are_of_the_same_kind(self, model: recmill.FittedRecommender) -> None:
        found = model.similar(6, k=4)
        assert 6 not in found.ids
        assert all(one % 2 == 0 for one in found.ids[:2])
        with pytest.raises(recmill.RecmillError, match="999 is no item of the log"):
            model.similar(999)

    def test_an_explanation_names_what_led_there(self, model: recmill.FittedRecommender) -> None:
        item = model.recommend(4, k=1)[0]
        explained = model.explain(4, item.id)
        assert explained.rank == 1
        seen = {(4 + 2 * n) % NUM_ITEMS for n in range(8)}
        assert explained.because
        assert {reason.id for reason in explained.because} <= seen
        assert f"because of Film {explained.because[0].id}" in str(explained)

    def test_the_served_list_is_measured(self, model: recmill.FittedRecommender) -> None:
        report = model.evaluate()
        assert report.served is not None
        assert report.served.metrics["recall@10"] > report.served.baselines["popular"].means()["recall@10"]

    def test_what_is_saved_can_be_opened(self, model: recmill.FittedRecommender, tmp_path: Path) -> None:
        saved = model.save(tmp_path / "bundle")
        answer = recmill.open_bundle(saved).recommend(4, k=3)
        assert [item.id for item in answer.items] == model.recommend(4, k=3).ids
        with pytest.raises(recmill.ArtifactError, match="exists already"):
            model.save(saved)

    @pytest.mark.processes
    def test_it_answers_over_http(self, model: recmill.FittedRecommender) -> None:
        with model.serve(http_port=0, grpc_port=0) as server:
            body = json.dumps({"user": 4, "k": 3}).encode()
            request = urllib.request.Request(
                f"{server.http}/v1/recommend", body, {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=30) as answer:
                ids = [item["id"] for item in json.load(answer)["items"]]
        assert ids == model.recommend(4, k=3).ids


@pytest.mark.parametrize("kind", ["polars", "lazy", "pandas", "arrow"])
def test_what_is_unclear_names_the_argument(kind: str) -> None:
    events = EVENTS.rename({"who": "a", "film": "b"})
    frames: dict[str, Any] = {"polars": events, "lazy": events.lazy(), "arrow": events.to_arrow()}
    frame = pytest.importorskip("pandas") and events.to_pandas() if kind == "pandas" else frames[kind]
    with pytest.raises(
        recmill.RecmillError, match="which one is the user? Give user=, one of: a, b, at".replace("?", r"\?")
    ):
        recmill.fit(frame)


def test_a_column_that_is_not_there_is_an_error() -> None:
    with pytest.raises(recmill.RecmillError, match="has no such column; it has: who, film, at"):
        recmill.fit(EVENTS, user="user", item="film")
