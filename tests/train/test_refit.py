"""refit = true: models that learned from the eval rows too are what test measures and servers get."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from shop import Shop

from recmill.artifacts.checkpoint.checkpoint import REFIT, Checkpoint
from recmill.artifacts.checkpoint.files import remove_folder
from recmill.cli import main
from recmill.dataset.table import Table
from recmill.errors import ArtifactError, RecipeError, RecmillError
from recmill.learner.saved import open_learner
from recmill.recipe.load import load_recipe
from recmill.stages.export.export import export
from recmill.stages.replay import replay as replaying
from recmill.stages.train.config import TrainConfig
from recmill.stages.train.source import LogData, TableData
from recmill.stages.train.train import train

pytestmark = pytest.mark.stages

CHANGES = ["refit=true", "split.held_out=0.4", "ranking="] + [
    f"retrieval.train.{key}" for key in ("epochs=4", "evaluations=4", "batch_size=256")
]
ONE_THREAD = TrainConfig(threads=1)


@pytest.fixture(scope="module")
def table(shop: Shop, tmp_path_factory: pytest.TempPathFactory) -> Table:
    into = tmp_path_factory.mktemp("refit") / "table"
    flags = [part for change in CHANGES for part in ("--set", change)]
    assert (
        main(["prepare", "quickstart", "--data", str(shop.log), "--into", str(into), "--quiet", *flags]) == 0
    )
    return Table.open(into)


@pytest.fixture(scope="module")
def folder(table: Table, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    into = tmp_path_factory.mktemp("trained") / "checkpoint"
    train(load_recipe("quickstart", CHANGES), TableData(table), into, ONE_THREAD)
    return Checkpoint.open(into)


@pytest.fixture
def own(folder: Checkpoint, tmp_path: Path) -> Checkpoint:
    return Checkpoint.open(shutil.copytree(folder.path, tmp_path / "checkpoint"))


def test_a_refit_learns_from_train_and_eval_rows_up_to_the_part_of_the_run_that_was_best(
    folder: Checkpoint, table: Table
) -> None:
    run, refit = folder.of("retrieval"), folder.to_serve().of("retrieval").find("last")
    rows = [table.scan(split).select("click").collect().sum().item() for split in ("train", "eval")]
    all_steps, steps_of_refit = (4 * -(-number // 256) for number in (rows[0], sum(rows)))
    assert run.find("last").step == all_steps
    assert refit.step == round(steps_of_refit * run.find("best").step / all_steps)
    assert refit.metrics == {}
    if refit.step == steps_of_refit:
        assert refit.state["samples"] == 4 * sum(rows)


def test_steps_and_last_are_of_the_run_that_eval_chose_from(folder: Checkpoint) -> None:
    assert folder.to_serve("last").path == folder.path
    assert folder.to_serve().path == folder.path / REFIT
    assert folder.to_serve().to_serve().path == folder.path / REFIT
    assert folder.to_serve().selection().path == folder.path


def test_the_served_list_is_fitted_without_the_refit_and_measured_with_it(
    own: Checkpoint, shop: Shop, table: Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    opened = {}
    recommender = replaying._BundleMaker.recommender

    def noted(maker, models, snapshot, recall, name):
        opened[name] = models.folder.path
        return recommender(maker, models, snapshot, recall, name)

    monkeypatch.setattr(replaying._BundleMaker, "recommender", noted)
    flags = ["--table", str(table.path), "--served", "--data", str(shop.log), "--threads", "1", "--quiet"]
    assert main(["evaluate", "quickstart", "--checkpoint", str(own.path), *flags]) in (0, 1)
    assert opened == {"fit": own.path, "measure": own.path / REFIT}
    written = json.loads((own.path / REFIT / "evaluation.json").read_text())
    step = own.to_serve().of("retrieval").find("last").step
    assert written["served"]["steps"] == {"retrieval": step}
    assert not (own.path / "evaluation.json").exists()
    assert "learned from the eval rows too (refit)" in capsys.readouterr().out
    bundle = export(own.to_serve(), str(shop.log), tmp_path / "bundles").bundle
    assert bundle.manifest["checkpoint"]["steps"] == {"retrieval": step}
    assert bundle.manifest["checkpoint"]["path"] == str(own.path / REFIT)


def test_a_refit_knows_the_eval_rows_better_than_the_run_before(folder: Checkpoint, table: Table) -> None:
    before, after = (open_learner(one, "retrieval").learner for one in (folder, folder.to_serve()))
    assert (
        after.evaluate(table, "eval").means()["ndcg@10"] > before.evaluate(table, "eval").means()["ndcg@10"]
    )


def test_a_killed_refit_is_not_served_and_resuming_trains_it_alone(own: Checkpoint, table: Table) -> None:
    expected = own.to_serve().of("retrieval").find("last").arrays()
    best = own.of("retrieval").find("best").path
    began = best.stat().st_mtime_ns
    remove_folder(own.path / REFIT / "retrieval")
    with pytest.raises(ArtifactError, match="not trained to the end with the eval rows"):
        own.to_serve()
    results = train(
        load_recipe("quickstart", CHANGES), TableData(table), own.path, TrainConfig(threads=1, resume=True)
    )
    assert [(one.is_refit, one.was_complete) for one in results] == [(False, True), (True, False)]
    assert best.stat().st_mtime_ns == began
    again = own.to_serve().of("retrieval").find("last").arrays()
    assert all(np.array_equal(array, again[name]) for name, array in expected.items())


def test_a_run_that_goes_on_is_refitted_anew(own: Checkpoint, table: Table) -> None:
    longer = load_recipe("quickstart", [*CHANGES, "retrieval.train.epochs=5"])
    results = train(longer, TableData(table), own.path, TrainConfig(threads=1, resume=True))
    assert [(one.is_refit, one.resumed_from is not None) for one in results] == [(False, True), (True, False)]


def test_a_refit_needs_the_rows_of_a_table(shop: Shop, tmp_path: Path) -> None:
    recipe = load_recipe("quickstart", ["refit=true"])
    rows = LogData(recipe, str(shop.log), shop.table)
    with pytest.raises(RecmillError, match="refit = true learns from the eval rows of a Table"):
        train(recipe, rows, tmp_path / "checkpoint", TrainConfig(threads=1, only="ranking"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["split.halve="], "only test rows can measure it"),
        (["ranking=", "retrieval="], "refit needs a model"),
        (['ranking.trees={ features = ["price"] }'], "cannot be combined with ranking.trees"),
    ],
)
def test_a_refit_that_nothing_could_measure_is_refused(changes: list[str], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        load_recipe("quickstart", ["refit=true", "split.halve=true", *changes])
