"""Bad input stops a run with an error that names it, and never reaches a weight."""

from __future__ import annotations

import dataclasses
import shutil

import numpy as np
import pytest
import torch

from recmill.artifacts.checkpoint.checkpoint import Checkpoint
from recmill.dataset.batch import Batch, Keys
from recmill.dataset.loader import Batches
from recmill.dataset.table import Table
from recmill.errors import ArtifactError, FeatureError, RecmillError, TrainingError
from recmill.learner.ranking import Ranker
from recmill.recipe.load import load_recipe
from recmill.recipe.recipe import Optimizer
from recmill.stages.prepare.prepare import prepare
from recmill.stages.train.source import TableData
from recmill.stages.train.train import TrainConfig, train
from recmill.synthetic.generate import generate

pytestmark = pytest.mark.stages

SMALL = [
    "ranking.embedding_dim=8",
    "ranking.bottom=[16, 8]",
    "ranking.top=[16]",
    "ranking.train.batch_size=256",
]


def recipe(*changes: str):
    return load_recipe("criteo-dlrm", ["ranking.train.target=", *SMALL, *changes])


@pytest.fixture(scope="module")
def table(tmp_path_factory) -> Table:
    folder = tmp_path_factory.mktemp("garbage")
    generate("criteo", 4_000, 1, folder / "log")
    return prepare(recipe(), str(folder / "log"), folder / "table").table


@pytest.fixture
def batch(table) -> Batch:
    return next(iter(Batches(table, 256).read()))[0]


def all_weights(ranker: Ranker) -> list[np.ndarray]:
    found = list(ranker.arrays().values())
    for table in ranker.tables.values():
        with table.begin_snapshot() as snapshot:
            for piece in snapshot:
                order = np.argsort(piece.keys)
                found += [piece.rows[order], piece.states[order]]
    return found


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_number_that_is_not_finite_is_named_and_changes_nothing(table, batch, value):
    ranker = Ranker(recipe().ranking, table.columns)
    ranker.step(batch)
    before = all_weights(ranker)
    numbers = batch.numbers.copy()
    numbers[3, 4] = value
    with pytest.raises(FeatureError, match=r'Feature "i5" is .*(nan|inf) in row 3 .*Add a fill or clip step'):
        ranker.step(dataclasses.replace(batch, numbers=numbers))
    with pytest.raises(FeatureError, match='Feature "i5"'):
        ranker.predict(dataclasses.replace(batch, numbers=numbers))
    for old, new in zip(before, all_weights(ranker), strict=True):
        np.testing.assert_array_equal(old, new)


@pytest.mark.parametrize("value", [2.0, -1.0, 0.5, np.nan])
def test_a_label_that_is_neither_0_nor_1_is_named(table, batch, value):
    labels = batch.labels["click"].copy()
    labels[7] = value
    with pytest.raises(FeatureError, match=r'Label "click" is neither 0 nor 1 in 1 of .* rows: '):
        Ranker(recipe().ranking, table.columns).step(dataclasses.replace(batch, labels={"click": labels}))


def test_a_loss_that_explodes_is_an_error_and_nothing_bad_is_saved(table, tmp_path):
    wild = recipe(
        "ranking.train.saving={ every_steps = 1 }",
        'ranking.train.dense={ name = "sgd", learning_rate = 1e6 }',
    )
    with pytest.raises(TrainingError, match=r"Step \d+: .*nothing was updated. Lower the learning rates"):
        train(wild, TableData(table), tmp_path, TrainConfig(threads=1))
    for checkpoint in Checkpoint.open(tmp_path).of("ranking").all():
        checkpoint.verify()
        assert all(np.isfinite(value).all() for value in checkpoint.arrays().values())
        for name in checkpoint.manifest["tables"]:
            assert all(np.isfinite(piece.rows).all() for piece in checkpoint.records(name))


def test_ids_that_are_all_unknown_train_and_predict(table, batch):
    ranker = Ranker(recipe().ranking, table.columns)
    unknown = {name: Keys(np.zeros(batch.size, np.int64)) for name in batch.keys}
    blank = dataclasses.replace(batch, keys=unknown)
    losses = [ranker.step(blank).loss for _ in range(3)]
    assert np.isfinite(losses).all()
    assert ((ranker.predict(blank) > 0) & (ranker.predict(blank) < 1)).all()


def test_a_batch_of_one_row_trains_on_many_threads(table, batch):
    one = next(iter(Batches(table, 1).read()))[0]
    assert np.isfinite(Ranker(recipe().ranking, table.columns, num_threads=3).step(one).loss)


def test_a_split_without_rows_is_an_error(table):
    with pytest.raises(ArtifactError, match="has no nothing rows to make batches of"):
        Batches(table, 10, split="nothing")


class OneLogitForAll(torch.nn.Module):
    def __init__(self, spec, num_numbers: int, num_embedded: int) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(num_numbers, 2)

    def forward(self, numbers, pooled):
        return self.layer(numbers) + pooled.sum()


class Mine(OneLogitForAll):
    def __init__(self, spec, num_numbers: int, num_embedded: int) -> None:
        super().__init__(spec, num_numbers, num_embedded)
        self.layer = torch.nn.Linear(num_numbers + num_embedded * spec.embedding_dim, 1)

    def forward(self, numbers, pooled):
        return self.layer(torch.cat([numbers, pooled.flatten(1)], 1)).squeeze(1)


def own(name: str, **changes):
    spec = dataclasses.replace(recipe().ranking, model=f"{__name__}:{name}", bottom=(), top=(), wide=())
    return dataclasses.replace(spec, **changes)


def test_a_model_of_ones_own_trains(table, batch):
    ranker = Ranker(own("Mine"), table.columns)
    losses = [ranker.step(batch).loss for _ in range(5)]
    assert losses[-1] < losses[0]


def test_a_model_that_gives_the_wrong_shape_is_an_error(table, batch):
    with pytest.raises(TrainingError, match=r"gave \(256, 2\) for 256 rows; expected one logit for each row"):
        Ranker(own("OneLogitForAll"), table.columns).step(batch)


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        ("no.such.module:Mine", "cannot be imported: No module named 'no'"),
        (f"{__name__}:Missing", "module .* has no Missing"),
        (f"{__name__}:recipe", "is not a torch.nn.Module class"),
    ],
)
def test_a_model_that_is_not_there_is_named(table, model, problem):
    with pytest.raises(FeatureError, match=problem):
        Ranker(dataclasses.replace(own("Mine"), model=model), table.columns)


def test_bfloat16_is_refused_where_the_cpu_has_none(table, monkeypatch):
    spec = recipe("ranking.train.precision=bfloat16").ranking
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    with pytest.raises(TrainingError, match="neither AVX-512 BF16 nor AMX"):
        Ranker(spec, table.columns)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    batch = next(iter(Batches(table, 256).read()))[0]
    exact = Ranker(recipe().ranking, table.columns).step(batch).loss
    assert Ranker(spec, table.columns).step(batch).loss == pytest.approx(exact, rel=0.02)


def test_a_recipe_whose_features_are_not_the_tables_is_refused(table, tmp_path):
    other = load_recipe("criteo-deeprec")
    with pytest.raises(ArtifactError, match=r"prepared with another \[features\] than recipe"):
        train(other, TableData(table), tmp_path, TrainConfig(threads=1))


def test_a_recipe_without_models_has_nothing_to_train(table, tmp_path):
    bare = dataclasses.replace(recipe(), ranking=None)
    with pytest.raises(RecmillError, match="there is nothing to train"):
        train(bare, TableData(table), tmp_path, TrainConfig(threads=1))


def test_another_model_is_not_mixed_into_old_checkpoints(table, tmp_path):
    short = recipe("ranking.train.max_steps=2")
    train(short, TableData(table), tmp_path, TrainConfig(threads=1))
    with pytest.raises(ArtifactError, match=r"holds checkpoints already\. Add --resume"):
        train(short, TableData(table), tmp_path, TrainConfig(threads=1))
    other = dataclasses.replace(short, ranking=dataclasses.replace(short.ranking, top=(32,)))
    with pytest.raises(ArtifactError, match=r"another \[ranking\] than the recipe has now"):
        train(other, TableData(table), tmp_path, TrainConfig(threads=1, resume=True))
    again = train(short, TableData(table), tmp_path, TrainConfig(threads=1, resume=True))
    assert again[0].was_complete
    longer = recipe("ranking.train.max_steps=4")
    went_on = train(longer, TableData(table), tmp_path, TrainConfig(threads=1, resume=True))
    assert (went_on[0].resumed_from, went_on[0].best.step) == (2, 4)


def test_sgd_and_lamb_train(table, batch):
    for name in ("sgd", "lamb", "adamw"):
        spec = recipe().ranking
        spec = dataclasses.replace(spec, train=dataclasses.replace(spec.train, dense=Optimizer(name, 0.01)))
        ranker = Ranker(spec, table.columns)
        assert ranker.step(batch).loss > ranker.step(batch).loss


def test_a_run_killed_while_it_pruned_after_its_last_step_is_pruned_by_the_next_one(table, tmp_path):
    short = recipe("ranking.train.max_steps=2")
    train(short, TableData(table), tmp_path, TrainConfig(threads=1))
    steps = tmp_path / "ranking"
    whole = {path.name for path in steps.glob("step-*")}
    shutil.copytree(steps / max(whole), steps / "step-00000001.gone.partial")
    again = train(short, TableData(table), tmp_path, TrainConfig(threads=1, resume=True))
    assert again[0].was_complete
    assert {path.name for path in steps.glob("step-*")} == whole


def test_the_plan_of_a_run_that_was_killed_at_once_is_not_that_of_the_next_one(table, tmp_path, monkeypatch):
    generate("criteo", 2_000, 2, tmp_path / "log")
    other = prepare(recipe(), str(tmp_path / "log"), tmp_path / "table").table
    into, short = tmp_path / "into", recipe("ranking.train.max_steps=2")
    with monkeypatch.context() as patch:
        patch.setattr(
            "recmill.artifacts.checkpoint.checkpoint.write_manifest",
            lambda *_: (_ for _ in ()).throw(KeyboardInterrupt),
        )
        with pytest.raises(KeyboardInterrupt):
            train(short, TableData(other), into, TrainConfig(threads=1))
    train(short, TableData(table), into, TrainConfig(threads=1))
    assert Checkpoint.open(into).plan.digest() == table.plan.digest() != other.plan.digest()


def test_unfinished_work_of_prepare_is_left_alone(table, tmp_path):
    (tmp_path / "_work").mkdir()
    with pytest.raises(ArtifactError, match="holds unfinished work"):
        train(recipe(), TableData(table), tmp_path, TrainConfig(threads=1))
    assert [path.name for path in tmp_path.iterdir()] == ["_work"]
