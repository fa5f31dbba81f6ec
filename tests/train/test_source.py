"""Sources of rows answer in any order, and read from the log or Table what the learner needs."""

from __future__ import annotations

import threading
import tomllib
from importlib.resources import files

import numpy as np
import pytest

from recmill.artifacts.checkpoint.checkpoint import Checkpoint
from recmill.errors import RecmillError, StopTraining
from recmill.learner.ranking import Ranker
from recmill.learner.retrieval import Retriever
from recmill.learner.saved import open_learner
from recmill.learner.sequences import SequenceRetriever
from recmill.logs import counted
from recmill.recipe.load import load_recipe, recipe_from_dict
from recmill.stages.prepare.prepare import prepare
from recmill.stages.train.config import TrainConfig
from recmill.stages.train.source import LogData, TableData
from recmill.stages.train.train import TrainContext, train
from recmill.synthetic.generate import generate

SMALL = ["ranking.bottom=[32, 16]", "ranking.top=[32]", "ranking.train.batch_size=100"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    into = tmp_path_factory.mktemp("logs")
    generate("criteo", 2000, 0, into / "criteo")
    generate("shop", 2000, 0, into / "shop")
    return into


@pytest.fixture
def log(folder):
    return LogData(load_recipe("criteo-deeprec", SMALL), str(folder / "criteo"))


def ranker_of(source: LogData) -> Ranker:
    return Ranker(source.recipe.ranking, source.columns)


def test_a_log_is_measured_before_anybody_asked_for_its_batches(log):
    ranker = ranker_of(log)
    measured = log.evaluation(ranker)()
    assert measured["rows"] == log.num_rows("eval") > 0


def test_a_log_counts_its_rows_before_anybody_asked_for_its_batches(log):
    ranker = ranker_of(log)
    num_rows = log.num_rows("train")
    assert num_rows == sum(batch.size for batch, _ in log.batches(ranker).read()) > 0


def two_towers(**changes):
    """The shop's two towers without histories, which a log alone does not have, in log order."""
    tree = tomllib.loads((files("recmill") / "recipe/shipped/quickstart.toml").read_text())
    tree = {name: part for name, part in tree.items() if name not in ("ranking", "tune")}
    tree["rows"] = [operation for operation in tree["rows"] if "join" in operation]
    tree["features"] = [feature for feature in tree["features"] if "lookup" not in str(feature["steps"])]
    run = {**tree["retrieval"]["train"], "batch_size": 64, "epochs": 2, "max_steps": 24, "evaluations": 3}
    towers = {**tree["retrieval"], "user": "user_id, country, age_band", "train": run, **changes}
    keep = towers.pop("keep", [])
    return recipe_from_dict({**tree, "retrieval": towers, "table": {"order": "log", "keep": keep}})


def retrieved(recipe, source, into, resume=False, stop_at=None):
    """The losses, metrics and arrays of a run of the two towers."""
    losses, metrics = [], []

    def watch(model, progress):
        losses.append(progress.loss)
        if progress.step == stop_at:
            raise StopTraining

    context = TrainContext(
        on_step=watch, on_evaluation=lambda model, progress: metrics.append(progress.metrics)
    )
    config = TrainConfig(threads=1, only="retrieval", resume=resume)
    train(recipe, source, into, config, context=context)
    return losses, metrics, open_learner(Checkpoint.open(into), "retrieval", "last").learner.arrays()


@pytest.fixture(params=["with raw ids", "without raw ids", "in pairs with labels"])
def changes(request):
    """Changes of the recipe."""
    return {
        "with raw ids": {"keep": ["user_id", "item_id"]},
        "without raw ids": {},
        "in pairs with labels": {"loss": "bce"},
    }[request.param]


def test_two_towers_learn_the_same_from_a_log_as_from_a_table_in_its_order(
    folder, tmp_path, monkeypatch, changes
):
    monkeypatch.setattr(counted, "PIECE_BYTES", 10_000)  # many units
    recipe = two_towers(**changes)
    table = prepare(recipe, str(folder / "shop"), tmp_path / "table").table
    log = LogData(recipe, str(folder / "shop"), tmp_path / "table")
    assert len(log._opened().units) > 5
    expected = retrieved(recipe, TableData(table), tmp_path / "a")
    losses, metrics, arrays = retrieved(recipe, log, tmp_path / "b")
    assert losses == expected[0]
    assert metrics == expected[1]
    assert len(metrics) == 3
    assert arrays.keys() == expected[2].keys()
    assert all(np.array_equal(arrays[name], expected[2][name]) for name in arrays)


def test_two_towers_resume_from_a_log_to_the_same_bits(folder, tmp_path):
    recipe = two_towers()
    prepare(recipe, str(folder / "shop"), tmp_path / "table")

    def log():
        return LogData(recipe, str(folder / "shop"), tmp_path / "table")

    expected = retrieved(recipe, log(), tmp_path / "a")
    first = retrieved(recipe, log(), tmp_path / "b", stop_at=7)
    rest = retrieved(recipe, log(), tmp_path / "b", resume=True)
    assert first[0] + rest[0] == expected[0]
    assert all(np.array_equal(rest[2][name], expected[2][name]) for name in expected[2])


LISTS = {
    "name": "lists",
    "log": {
        "files": ["events.csv"],
        "user": "user",
        "item": "item",
        "columns": [
            *({"name": name, "type": "text"} for name in ("user", "item", "recent")),
            {"name": "click", "type": "int"},
        ],
    },
    "labels": [{"name": "click", "columns": "click"}],
    "features": [
        {"columns": "user", "steps": ["vocabulary"]},
        {"columns": "item", "steps": [{"vocabulary": {"named": "item"}}]},
        {"columns": "recent", "steps": [{"split": " "}, {"lookup": "item"}]},
    ],
    "retrieval": {
        "model": "sasrec",
        "label": "click",
        "user": "recent",
        "item": "item",
        "embedding_dim": 4,
        "blocks": 1,
        "negatives": 2,
    },
}


def test_what_trains_on_histories_is_sent_from_a_log_to_a_table(tmp_path):
    recipe = recipe_from_dict(LISTS)
    (tmp_path / "events.csv").write_text("user,item,recent,click\nu,a,b c,1\nu,b,a,1\nv,c,a b,1\n")
    table = prepare(recipe, str(tmp_path), tmp_path / "table").table
    log = LogData(table.recipe, str(tmp_path), tmp_path / "table")
    retriever = SequenceRetriever(log.recipe, log.columns)
    with pytest.raises(RecmillError, match=r'"sasrec" trains on whole histories.*--table'):
        log.batches(retriever)


def test_a_softmax_over_items_is_given_clicks_alone(folder):
    recipe = load_recipe("quickstart")
    table = prepare(recipe, str(folder / "shop"), folder / "table").table
    source, label = TableData(table), recipe.retrieval.label
    for learner, rows in (
        (Ranker(recipe.ranking, table.columns), table.num_rows("train")),
        (Retriever(recipe, table.columns), int(table.scan("train").collect()[label].sum())),
    ):
        assert sum(batch.size for batch, _ in source.batches(learner).read()) == rows


def test_nothing_is_written_any_more_when_a_run_has_failed(log, tmp_path):
    def fail(model, progress):
        if progress.step == 3:
            raise RecmillError("stop")

    saving = "ranking.train.saving={ every_steps = 1, full_every = 2, keep = 2 }"
    recipe = load_recipe("criteo-deeprec", [*SMALL, saving])
    with pytest.raises(RecmillError, match="stop"):
        train(recipe, log, tmp_path / "c", TrainConfig(threads=1), context=TrainContext(on_step=fail))
    assert not [thread for thread in threading.enumerate() if thread.name == "checkpoint"]
    assert not list((tmp_path / "c").rglob("*.partial"))
