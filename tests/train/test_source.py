"""Sources of rows answer in any order, and read from the log or Table what the learner needs."""

from __future__ import annotations

import threading

import pytest

from recmill.errors import RecmillError
from recmill.learner.ranking import Ranker
from recmill.learner.retrieval import Retriever
from recmill.recipe.load import load_recipe
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


def test_two_towers_are_sent_from_a_log_to_a_table(folder):
    recipe = load_recipe("quickstart")
    table = prepare(recipe, str(folder / "shop"), folder / "table").table
    retriever = Retriever(recipe, table.columns)
    log = LogData(recipe, str(folder / "shop"), folder / "table")
    for ask in (log.batches, log.evaluation):
        with pytest.raises(RecmillError, match="trains from a Table"):
            ask(retriever)


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
