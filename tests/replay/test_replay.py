"""The served list, measured before anybody is served: as of the held-out rows, beside baselines."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from shop import Shop

from recmill.artifacts.bundle.bundle import Bundle
from recmill.artifacts.checkpoint.checkpoint import Checkpoint
from recmill.cli import main
from recmill.errors import ArtifactError
from recmill.recall.parameters import UNFITTED, RecallParameters
from recmill.stages.evaluate.gate import GateError
from recmill.stages.export.export import export
from recmill.stages.replay import fit
from recmill.stages.replay.config import ReplayConfig
from recmill.stages.replay.replay import NothingToMeasure, ServedResult, replay
from recmill.stages.replay.write import served_json
from recmill.stages.serve.recommender import Recommender


@pytest.fixture(scope="module")
def served(shop: Shop, tmp_path_factory) -> tuple[ServedResult, Path]:
    kept = tmp_path_factory.mktemp("served") / "bundle"
    return replay(shop.folder, str(shop.log), ReplayConfig(served_bundle=kept, threads=1)), kept


def events(shop: Shop) -> pl.DataFrame:
    return pl.read_csv(shop.log / "events.csv").sort("time", maintain_order=True)


def test_what_is_measured_is_what_a_server_of_that_bundle_answers(served: tuple[ServedResult, Path]) -> None:
    result, kept = served
    assert result.lists is not None
    recommender = Recommender(Bundle.open(kept))
    assert recommender.recaller is not None
    for user, measured in list(zip(result.users, result.lists, strict=True))[:40]:
        answer = [item.id for item in recommender.recommend(user, k=10).items]
        assert answer == recommender.recaller.items.ids(measured[:10])


def test_the_bundle_that_is_measured_ends_before_the_held_out_rows(
    shop: Shop, served: tuple[ServedResult, Path]
) -> None:
    bundle = Bundle.open(served[1])
    rows = events(shop)
    before = rows.filter(pl.col("time") <= bundle.manifest["log_end"])
    assert rows.height * 0.94 < before.height < rows.height * 0.96
    clicked = before.filter(pl.col("clicked") == 1).unique(["user_id", "item_id"])
    seen = bundle.array("users/seen.npy")
    assert seen is not None
    assert len(seen) == clicked.height


def test_baselines_and_groups_are_of_the_same_users(served: tuple[ServedResult, Path]) -> None:
    result, _ = served
    assert result.split == "test"
    assert {"popular", "item-kNN", "EASE"} <= set(result.baselines)
    assert {sums.users for sums in result.baselines.values()} == {result.sums.users} == {len(result.users)}
    assert sum(sums.users for sums in result.segments.values()) == result.sums.users
    stages = list(result.losses.values())
    assert stages == sorted(stages, reverse=True)
    assert result.metrics["recall@10"] == pytest.approx(result.sums.sums["recall@10"] / result.sums.users)


def test_most_popular_is_counted_by_hand(shop: Shop, served: tuple[ServedResult, Path]) -> None:
    result, kept = served
    end = Bundle.open(kept).manifest["log_end"]
    clicks = events(shop).filter(pl.col("clicked") == 1)
    before, after = clicks.filter(pl.col("time") <= end), clicks.filter(pl.col("time") > end)
    order = (
        before.group_by("item_id").len().sort("len", "item_id", descending=[True, False])["item_id"].to_list()
    )
    recalls = []
    for user, rows in after.group_by("user_id", maintain_order=True):
        seen = set(before.filter(pl.col("user_id") == user[0])["item_id"])
        new = set(rows["item_id"]) - seen
        if new:
            best = [item for item in order if item not in seen][:10]
            recalls.append(len(new & set(best)) / len(new))
    assert len(recalls) == result.sums.users
    assert result.baselines["popular"].means()["recall@10"] == pytest.approx(np.mean(recalls))


def test_conditions_on_the_served_list_are_judged(served: tuple[ServedResult, Path]) -> None:
    result, _ = served
    assert not result.judged("served.recall@10>=1.1").passed
    assert [str(verdict)[:4] for verdict in result.judged("served.hit@10>=0,auc>=0.9").verdicts] == ["pass"]
    with pytest.raises(GateError, match="no metric"):
        result.judged("served.auc>=0.5")
    with pytest.raises(GateError, match="popular is a bound of served lists"):
        result.judged("auc>=popular")


@pytest.fixture
def own_checkpoint(shop: Shop, tmp_path: Path) -> Path:
    return Path(shutil.copytree(shop.checkpoint, tmp_path / "checkpoint"))


def test_few_users_change_no_weights_and_the_ranker_goes_on_deciding(
    served: tuple[ServedResult, Path],
) -> None:
    """The small shop has a dozen eval users: too few to drop a channel or the ranker by."""
    result, kept = served
    assert result.fit.known_users is None
    assert not result.fit.parameters.is_fitted
    assert dict(result.fit.parameters.fusion.weights) == dict(UNFITTED.fusion.weights)
    stages = Recommender(Bundle.open(kept)).recommend("u1", k=3).stages
    assert "rank" in stages


def test_a_log_without_new_held_out_clicks_is_not_measured(shop: Shop, tmp_path: Path) -> None:
    log = Path(shutil.copytree(shop.log, tmp_path / "log"))
    rows = events(shop)
    held_out = rows["time"] >= rows["time"].quantile(0.85)
    none = rows.with_columns(pl.when(held_out).then(0).otherwise("clicked").alias("clicked"))
    none.write_csv(log / "events.csv")
    with pytest.raises(NothingToMeasure, match="nothing to measure lists by"):
        replay(shop.folder, str(log), ReplayConfig(threads=1))


def test_a_bundle_recalls_as_the_served_evaluation_fitted_it(
    shop: Shop, own_checkpoint: Path, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fit, "_FEWEST_QUERIES", 2)
    command = ["evaluate", "quickstart", "--checkpoint", str(own_checkpoint), "--table", str(shop.table)]
    assert main([*command, "--served", "--served-users", "10", "--threads", "1"]) == 0
    printed = capsys.readouterr().out
    assert "served recall@10 0." in printed
    assert "best baseline" in printed
    assert "10 users of test" in printed
    fitted = json.loads((own_checkpoint / "recall.json").read_text())["parameters"]
    bundle = export(Checkpoint.open(own_checkpoint), str(shop.log), tmp_path / "bundles").bundle
    assert bundle.manifest["recall"] == fitted
    assert RecallParameters.from_dict(fitted).is_fitted
    channels = set(fitted["fusion"]["weights"])
    assert {item.channel for item in Recommender(bundle).recommend("u1", k=10).items} <= channels
    assert "Served list" in (own_checkpoint / "report.html").read_text()


def test_a_list_that_failed_its_gate_is_not_published(
    shop: Shop, own_checkpoint: Path, tmp_path: Path, served: tuple[ServedResult, Path]
) -> None:
    path = own_checkpoint / "evaluation.json"
    content = json.loads(path.read_text())
    content["served"] = served_json(served[0].judged("served.recall@10>=1.1"))
    path.write_text(json.dumps(content))
    with pytest.raises(ArtifactError, match="would serve did not meet its gate"):
        export(Checkpoint.open(own_checkpoint), str(shop.log), tmp_path / "bundles")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--served-users", "5"], "--served-users is for --served"),
        (["--gate", "served.recall@10>=popular"], "need --served"),
        (["--data", "d"], "--data is for --requests and for --served"),
    ],
)
def test_flags_of_the_served_evaluation_need_it(shop: Shop, flags: list[str], words: str, capsys) -> None:
    command = ["evaluate", "quickstart", "--checkpoint", str(shop.checkpoint), "--table", str(shop.table)]
    assert main([*command, *flags]) == 2
    assert words in capsys.readouterr().err
