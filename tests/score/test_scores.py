"""Every good row has one score, the one that its model gives it, wherever it runs and however often it is killed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from forked import ForkedCommand
from shop import Shop
from small_criteo import Criteo, read, write_log

from recmill.artifacts.checkpoint.checkpoint import Checkpoint
from recmill.artifacts.manifest import read_manifest, write_manifest
from recmill.artifacts.work import read_record
from recmill.dataset.batch import collate
from recmill.dataset.table import Table
from recmill.learner.ranking import Ranker
from recmill.learner.saved import open_learner
from recmill.logs.base import open_source
from recmill.recipe.recipe import POSITION
from recmill.stages.evaluate.evaluate import EvaluateConfig, evaluate
from recmill.stages.score.models import checkpoint_ref, open_models
from recmill.stages.score.score import ScoreResult

pytestmark = pytest.mark.stages


def ranker_of(checkpoint: Path) -> Ranker:
    learner = open_learner(Checkpoint.open(checkpoint), "ranking").learner
    assert isinstance(learner, Ranker)
    return learner


def raw_rows(criteo: Criteo, folder: Path | None = None) -> pl.DataFrame:
    """Good rows of a log, read by other means than scoring does."""
    source = open_source(Checkpoint.open(criteo.checkpoint).recipe.log, str(folder or criteo.log))
    return pl.concat([batch.frame for unit in source.units() for batch in source.read(unit)])


def predicted(criteo: Criteo, rows: pl.DataFrame) -> np.ndarray:
    ranker, plan = ranker_of(criteo.checkpoint), Checkpoint.open(criteo.checkpoint).plan
    features = plan.apply(rows, labels=False, only=ranker.layout.features)
    return ranker.predict(collate(features, ranker.layout, with_labels=False))


# Tables


def test_scores_of_a_table_are_those_of_the_learner_bit_for_bit(recmill, shop: Shop, tmp_path: Path) -> None:
    args = [
        "--checkpoint",
        shop.checkpoint,
        "--table",
        shop.table,
        "--split",
        "train",
        "--into",
        tmp_path / "s",
    ]
    assert recmill("score", *args, "--quiet")[0] == 0
    found, ranker, table = read(tmp_path / "s"), ranker_of(shop.checkpoint), Table.open(shop.table)
    rows = table.scan("train").collect()
    assert found["score"].to_numpy().tobytes() == ranker.predict(collate(rows, ranker.layout)).tobytes()
    assert found["label"].to_list() == rows["click"].to_list()
    assert found["offset"].to_list() == list(range(4500))
    assert found["file"].unique().to_list() == ["train/shard-00000-000.parquet"]


def test_raw_ids_of_a_vocabulary_stand_beside_the_scores(recmill, shop: Shop, tmp_path: Path) -> None:
    args = ["--checkpoint", shop.checkpoint, "--table", shop.table, "--into", tmp_path / "s"]
    assert recmill("score", *args, "--quiet", "--keep", "item_id,device")[0] == 0
    found, table = read(tmp_path / "s"), Table.open(shop.table)
    assert found.columns == ["file", "offset", "item_id", "device", "score", "label"]
    names = table.plan.values_of("item_id")
    ids = table.scan("test").collect()["item_id"].to_list()
    assert found["item_id"].to_list() == [names[number - 1] if number else None for number in ids]


def test_metrics_are_those_of_evaluate(recmill, shop: Shop, tmp_path: Path) -> None:
    args = [
        "--checkpoint",
        shop.checkpoint,
        "--table",
        shop.table,
        "--split",
        "eval",
        "--into",
        tmp_path / "s",
    ]
    code, out, _ = recmill("score", *args, "--quiet")
    options = EvaluateConfig(split="eval", only="ranking")
    (expected,) = evaluate(shop.folder, Table.open(shop.table), options)
    found = ScoreResult.open(tmp_path / "s").metrics
    assert code == 0
    assert found is not None
    assert found == pytest.approx(expected.metrics, abs=1e-6)
    assert f"AUC {expected.metrics['auc']:.4f}" in out


def test_a_bundle_gives_the_scores_of_its_checkpoint(recmill, shop: Shop, tmp_path: Path) -> None:
    for name, model in (("c", ["--checkpoint", shop.checkpoint]), ("b", ["--bundle", shop.bundles])):
        assert recmill("score", *model, "--table", shop.table, "--into", tmp_path / name, "--quiet")[0] == 0
    checkpoint, bundle = read(tmp_path / "c"), read(tmp_path / "b")
    assert np.abs(checkpoint["score"].to_numpy() - bundle["score"].to_numpy()).max() < 1e-5
    assert checkpoint.drop("score").equals(bundle.drop("score"))


def test_a_table_of_another_plan_is_refused(recmill, shop: Shop, criteo: Criteo, tmp_path: Path) -> None:
    args = ["--checkpoint", criteo.checkpoint, "--table", shop.table, "--into", tmp_path / "s"]
    code, _, error = recmill("score", *args)
    assert code == 1
    assert "prepared with another Plan" in error
    assert not (tmp_path / "s").exists()


# logs


@pytest.mark.parametrize("model", ["checkpoint", "bundle"])
def test_each_row_of_a_log_has_one_score_in_its_order(
    recmill, criteo: Criteo, tmp_path: Path, model: str
) -> None:
    path = criteo.checkpoint if model == "checkpoint" else criteo.bundles
    args = [
        f"--{model}",
        path,
        "--data",
        criteo.log,
        "--into",
        tmp_path / "s",
        "--partitions",
        5,
        "--keep",
        "i1,c3",
    ]
    assert recmill("score", *args, "--quiet")[0] == 0
    found, rows = read(tmp_path / "s"), raw_rows(criteo)
    assert len(ScoreResult.open(tmp_path / "s").files("scores")) == 5
    assert found["offset"].to_list() == rows[POSITION].to_list()
    assert found["file"].unique().to_list() == ["train.txt"]
    assert found.select("i1", "c3").equals(rows.select("i1", "c3"))
    assert found["label"].to_list() == rows["label"].to_list()
    assert np.abs(found["score"].to_numpy() - predicted(criteo, rows)).max() < 1e-5
    assert not (tmp_path / "s" / "rejected").exists()
    assert not (tmp_path / "s" / "_work").exists()


def test_scores_of_a_log_are_those_of_the_learner_bit_for_bit(
    recmill, criteo: Criteo, tmp_path: Path
) -> None:
    args = [
        "--checkpoint",
        criteo.checkpoint,
        "--data",
        criteo.log,
        "--into",
        tmp_path / "s",
        "--partitions",
        1,
    ]
    assert recmill("score", *args, "--quiet")[0] == 0
    expected = predicted(criteo, raw_rows(criteo))
    assert read(tmp_path / "s")["score"].to_numpy().tobytes() == expected.tobytes()


def test_bad_rows_are_set_aside_and_all_others_are_scored(recmill, criteo: Criteo, tmp_path: Path) -> None:
    lines = criteo.lines[:500]
    lines[3], lines[400] = "nonsense\n", lines[400].replace("\t", "\tx", 1)
    log = write_log(tmp_path / "log", lines)
    args = ["--checkpoint", criteo.checkpoint, "--data", log, "--into", tmp_path / "s", "--quiet"]
    code, _, error = recmill("score", *args)
    assert code == 1
    assert "more than --max-bad" in error
    code, out, _ = recmill("score", *args, "--max-bad", "1%")
    assert code == 0
    assert "bad    2 rows set aside" in out
    assert len(read(tmp_path / "s")) == 498
    texts = [file.read_text() for file in (tmp_path / "s" / "rejected").iterdir()]
    rejected = [json.loads(line) for text in texts for line in text.splitlines()]
    assert sorted(row["offset"] for row in rejected) == [sum(map(len, lines[:3])), sum(map(len, lines[:400]))]


def test_a_row_without_a_label_is_scored_and_not_measured(recmill, criteo: Criteo, tmp_path: Path) -> None:
    lines = criteo.lines[:400]
    lines[:300] = ["\t" + line.partition("\t")[2] for line in lines[:300]]
    args = [
        "--checkpoint",
        criteo.checkpoint,
        "--data",
        write_log(tmp_path / "log", lines),
        "--into",
        tmp_path / "s",
    ]
    assert recmill("score", *args, "--quiet")[0] == 0
    found, metrics = read(tmp_path / "s"), ScoreResult.open(tmp_path / "s").metrics
    assert metrics is not None
    assert metrics["rows"] == 100
    assert found["label"].null_count() == 300
    assert found["score"].null_count() == 0


def test_a_log_without_labels_gets_the_same_scores_and_no_metrics(
    recmill, criteo: Criteo, tmp_path: Path
) -> None:
    log = write_log(tmp_path / "log", [line.partition("\t")[2] for line in criteo.lines])
    args = ["--bundle", criteo.bundles, "--into", tmp_path / "s", "--quiet"]
    code, out, _ = recmill("score", *args, "--data", log, "--without-labels")
    assert code == 0
    assert "AUC" not in out
    assert recmill("score", *args[:3], tmp_path / "with", "--data", criteo.log, "--quiet")[0] == 0
    found = read(tmp_path / "s")
    assert "label" not in found.columns
    assert found["score"].equals(read(tmp_path / "with")["score"])


def test_rows_that_the_recipe_drops_are_counted(recmill, criteo: Criteo, tmp_path: Path) -> None:
    checkpoint = Path(shutil.copytree(criteo.checkpoint, tmp_path / "c"))
    manifest = read_manifest(checkpoint, "checkpoint")
    manifest["recipe"]["rows"] = [{"filter": "i1 > 2"}]
    write_manifest(checkpoint, "checkpoint", manifest)
    args = ["--checkpoint", checkpoint, "--data", criteo.log, "--into", tmp_path / "s", "--quiet"]
    code, out, _ = recmill("score", *args, "--keep", "i1")
    assert code == 0
    found, rows = read(tmp_path / "s"), raw_rows(criteo)
    kept = rows.filter(pl.col("i1") > 2)
    assert found["offset"].to_list() == kept[POSITION].to_list()
    assert f"left   {rows.height - kept.height:,} rows that [[rows]] of the recipe drops" in out


def test_labels_of_one_class_say_so(recmill, criteo: Criteo, tmp_path: Path) -> None:
    log = write_log(tmp_path / "log", [line for line in criteo.lines if line.startswith("0")])
    args = ["--bundle", criteo.bundles, "--data", log, "--into", tmp_path / "s", "--quiet"]
    code, out, _ = recmill("score", *args)
    assert code == 0
    assert "labels are the same" in out
    assert "inf" not in (tmp_path / "s" / "manifest.json").read_text().lower()


# again


def test_what_is_finished_says_so_and_is_not_written_over(recmill, criteo: Criteo, tmp_path: Path) -> None:
    args = ["--checkpoint", criteo.checkpoint, "--table", criteo.table, "--into", tmp_path / "s", "--quiet"]
    _, first, _ = recmill("score", *args, "--json")
    code, again, _ = recmill("score", *args)
    assert code == 0
    assert "nothing to do" in again
    said = json.loads(first)
    assert (said["rows_read"], said["was_complete"]) == (said["outputs"]["scores"]["rows"], False)
    code, _, error = recmill("score", *args, "--split", "eval")
    assert code == 1
    assert "already holds scores of another model, other rows or other options" in error


@pytest.mark.processes
def test_killed_and_run_again_each_row_is_there_once(recmill, criteo: Criteo, tmp_path: Path) -> None:
    log = write_log(tmp_path / "log", criteo.lines * 10)
    into = tmp_path / "s"
    args = [
        "--checkpoint",
        criteo.checkpoint,
        "--data",
        log,
        "--into",
        into,
        "--partitions",
        40,
        "--workers",
        1,
    ]
    done = _killed_after(["score", *args, "--quiet"], into, num_done=5)
    kept = {file: file.stat().st_ino for file in done}
    code, out, _ = recmill("score", *args, "--quiet")
    assert code == 0
    assert "went on with unfinished work" in out
    assert {file: file.stat().st_ino for file in done} == kept
    found, rows = read(into), raw_rows(criteo, log)
    assert found["offset"].to_list() == rows[POSITION].to_list()
    assert np.abs(found["score"].to_numpy() - predicted(criteo, rows)).max() < 1e-6
    assert not list(into.rglob("*.partial"))


def _killed_after(command: list[object], into: Path, num_done: int) -> list[Path]:
    """Files of the parts that were done when kill -9 came."""
    process = ForkedCommand(*command)
    records = into / "_work" / "scores" / "done"
    try:
        deadline = time.monotonic() + 60
        while len(found := sorted(records.glob("*.json"))) < num_done:
            assert process.poll() is None, "finished before it could be killed"
            assert time.monotonic() < deadline
            time.sleep(0.002)
    finally:
        process.kill()
        process.communicate()
    with pytest.raises(Exception, match="incomplete"):
        ScoreResult.open(into)
    return [into / shard["file"] for record in found for shard in read_record(record)]


# models


def test_a_process_opens_a_model_once(criteo: Criteo) -> None:
    ref = checkpoint_ref(criteo.checkpoint, "best", ["ranking"])
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: open_models(ref).ranking(), range(8)))
    assert len({id(ranking) for ranking in found}) == 1


@pytest.mark.processes
def test_a_bundle_is_scored_without_torch(criteo: Criteo, tmp_path: Path) -> None:
    command = ["score", "--bundle", criteo.bundles, "--data", criteo.log, "--into", tmp_path / "s", "--quiet"]
    code = f"""
import sys
for name in ("torch", "safetensors"):
    sys.modules[name] = None
from recmill.cli import main
assert main({[str(part) for part in command]}) == 0
assert main({["score", "--checkpoint", *map(str, [criteo.checkpoint, *command[3:]])]}) == 1
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert 'Scoring with a checkpoint needs torch. Install it: pip install "recmill[train]"' in done.stderr
    assert len(read(tmp_path / "s")) == 3000
