"""The request log against the log of events: what was shown, and then clicked."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import polars as pl
import pytest
from shop import Shop

from recmill.artifacts.checkpoint.checkpoint import Checkpoint
from recmill.errors import ArtifactError
from recmill.stages.evaluate.requests import evaluate_requests
from recmill.stages.serve.messages import Answer, Item, Recommend
from recmill.stages.serve.request_log import RequestLog


def item(id: str, score: float, channel: str) -> Item:
    return Item(id=id, score=score, channel=channel)


@pytest.fixture
def requests(tmp_path: Path) -> Path:
    """Two requests of one version and one of another."""
    log = RequestLog(tmp_path / "requests", 1.0)
    first = [item("i1", 0.9, "two_tower"), item("i2", 0.1, "popular")]
    log.add(Recommend(user="u1"), Answer(items=first, version="a"), 0.01)
    log.add(Recommend(user="u2"), Answer(items=first, version="a"), 0.01)
    log.add(Recommend(user="u1"), Answer(items=[item("i3", 0.5, "popular")], version="b"), 0.01)
    log.close()
    return tmp_path / "requests"


def clicked(shop: Shop, into: Path, *rows: str) -> str:
    """The shop's log with more rows."""
    log = Path(shutil.copytree(shop.log, into / "log"))
    with open(log / "events.csv", "a") as file:
        file.write("\n".join(rows) + "\n")
    return str(log)


def test_clicks_after_a_request_count_for_what_it_showed(shop: Shop, requests: Path, tmp_path: Path) -> None:
    now = int(time.time()) + 5
    data = clicked(
        shop,
        tmp_path,
        f"{now},u1,i1,phone,1,9.5,1",
        f"{now},u1,i2,phone,1,9.5,0",  # seen, not clicked
        f"{now + 10_000},u2,i2,phone,1,9.5,1",  # too late
        f"{now},u3,i3,phone,1,9.5,1",  # somebody else
    )
    found = evaluate_requests(Checkpoint.open(shop.checkpoint), requests, data, 3600)
    numbers = {(one.version, one.channel): (one.requests, one.items, one.clicks) for one in found}
    assert numbers == {
        ("a", None): (2, 4, 1),
        ("a", "popular"): (2, 2, 0),
        ("a", "two_tower"): (2, 2, 1),
        ("b", None): (1, 1, 0),
        ("b", "popular"): (1, 1, 0),
    }
    whole = found[0]
    assert (whole.find_rate, whole.click_rate) == (0.5, 0.25)
    assert whole.auc is not None
    assert whole.auc == pytest.approx(5 / 6)  # above both of 0.1, level with the other 0.9


def test_clicks_before_a_request_do_not_count(shop: Shop, requests: Path, tmp_path: Path) -> None:
    data = clicked(shop, tmp_path, f"{int(time.time()) - 1000},u1,i1,phone,1,9.5,1")
    found = evaluate_requests(Checkpoint.open(shop.checkpoint), requests, data, 3600)
    assert sum(one.clicks for one in found) == 0
    assert found[0].auc is None


def test_the_command_says_so(shop: Shop, requests: Path, tmp_path: Path, recmill) -> None:  # type: ignore[no-untyped-def]
    data = clicked(shop, tmp_path, f"{int(time.time()) + 5},u1,i1,phone,1,9.5,1")
    where = ["--checkpoint", shop.checkpoint, "--requests", requests]
    code, out, _ = recmill("evaluate", "quickstart", *where, "--data", data)
    assert code == 0
    assert out.splitlines()[0].startswith(
        "a                    2 requests   4 items   1 clicks   finds 0.5000"
    )
    code, _, err = recmill("evaluate", "quickstart", *where)
    assert (code, "--requests and --data go together" in err) == (2, True)
    code, _, err = recmill("evaluate", "quickstart", *where, "--data", data, "--gate", "auc>=0.5")
    assert (code, "--gate is for --table" in err) == (2, True)


def test_an_empty_folder_says_how_to_fill_it(shop: Shop, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="--request-log"):
        evaluate_requests(Checkpoint.open(shop.checkpoint), tmp_path, str(shop.log), 60)


def test_the_schema_is_what_is_read(requests: Path) -> None:
    columns = pl.read_parquet(next(requests.glob("*.parquet"))).columns
    assert {"time", "user", "items", "scores", "channels", "version"} <= set(columns)
