"""What the rows of the coming-from pages promise: one check for each recipe and each of its keys that they name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from coming_from_pages import Part, Row
from small_runs import NUM_ROWS, Ran, SmallRuns, records_of, sightings
from torch import nn

from recmill.embeddings.table import OPTIMIZERS
from recmill.errors import TrainingError
from recmill.learner.base import table_parameters
from recmill.learner.ranking import check_bfloat16
from recmill.learner.saved import open_learner
from recmill.models.wide_deep import WideDeep
from recmill.recipe.load import load_recipe, shipped_recipes

Check = Callable[[SmallRuns, Row, Part, Any], None]
CHECKS: dict[str, Check] = {}


def check(*names: str) -> Callable[[Check], Check]:
    def register(function: Check) -> Check:
        CHECKS.update(dict.fromkeys(names, function))
        return function

    return register


# recipes as a whole


@check("recipe")
def _(small: SmallRuns, row: Row, part: Part, capsys: Any) -> None:
    assert part.value in shipped_recipes()
    assert load_recipe(part.value).ranking is not None


# log, split, features, table


@check("log.format")
def _(small: SmallRuns, row: Row, part: Part, capsys: Any) -> None:
    table = small.table(load_recipe(row.base, row.values))
    assert table.digest == small.table(load_recipe(row.base)).digest


@check("log.files")
def _(small: SmallRuns, row: Row, part: Part, capsys: Any) -> None:
    table = small.table(load_recipe(row.base, row.values))
    assert sum(table.num_rows(split) for split in ("train", "eval", "test")) == NUM_ROWS


@check("split")
def _(small: SmallRuns, row: Row, part: Part, capsys: Any) -> None:
    if part.value is None:
        ran = small.train(row.base, *row.values, "ranking.train.max_steps=3")
        assert (ran.trained.state.evaluations, ran.trained.best.step) == ([], 3)
    else:
        table = small.table(load_recipe(row.base, row.values))
        day = NUM_ROWS // 3
        assert table.num_rows("train") == 2 * day
        assert (table.num_rows("eval"), table.num_rows("test")) == (day // 2, day // 2)


@check("table.order")
def _(small: SmallRuns, row: Row, part: Part, capsys: Any) -> None:
    shuffled, as_logged = (
        small.table(load_recipe(row.base, [value])) for value in (*row.values, "table.order=log")
    )
    assert shuffled.digest == as_logged.digest
    assert not shuffled.scan().collect().equals(as_logged.scan().collect())


@check("features[0].steps")
def _(small: SmallRuns, row: Row, part: Part, capsys: Any) -> None:
    table = small.table(load_recipe(row.base, [*row.values, "table.order=log", "table.keep=i1"]))
    rows = table.scan().collect()
    raw, found = rows["raw_i1"].fill_null(0).to_numpy(), rows["i1"].to_numpy()
    scaled = (raw - raw.min()) / (raw.max() - raw.min()) if "min_max" in part.value else np.log(raw + 3)
    np.testing.assert_allclose(found, scaled, rtol=1e-5, atol=1e-6)


@check("features[1].steps")
def _(small: SmallRuns, row: Row, part: Part, capsys: Any) -> None:
    recipe = load_recipe(row.base, row.values)
    column = next(column for column in small.table(recipe).columns if column.name == "c1")
    (step,) = part.value
    ids = small.table(recipe).scan().collect()["c1"]
    if step == "key":
        assert (column.kind, column.size) == ("key", None)
        assert ids.abs().max() > 1 << 40
    elif "hash" in step:
        assert column.size == step["hash"] + 1
    else:
        counts = ids.value_counts()
        assert column.size is not None
        assert counts["c1"].max() < column.size
        assert all(count >= step["vocabulary"]["min_count"] for id, count in counts.rows() if id)


# the model


@check(
    "ranking.model",
    "ranking.embedding_dim",
    "ranking.bottom",
    "ranking.top",
    "ranking.interaction",
    "ranking.cross_layers",
    "ranking.cross_rank",
    "ranking.hidden",
    "ranking.wide",
    "ranking.dropout",
)
def _(small: SmallRuns, row: Row, part: Part, capsys: Any) -> None:
    ranker = small.ranker(row.base, *row.values)
    spec, model = ranker.spec, ranker.model
    dims = {table.spec.dim for name, table in ranker.tables.items() if name.startswith("deep/")}
    assert dims == {spec.embedding_dim}
    if isinstance(model, WideDeep):
        assert widths(model.deep) == [13 + 26 * spec.embedding_dim, *spec.hidden, 1]
        assert sum(name.startswith("wide/") for name in ranker.tables) == len(spec.wide)
        assert len(spec.wide) == (0 if "ranking.wide=[]" in row.values else 26)
        assert small.stepped(row.base, *row.values, num_steps=2)[0].steps == 2
        assert model.deep.dropout == spec.dropout
        return
    mixed = {
        "dot": spec.embedding_dim + 27 * 26 // 2,
        "cat": 27 * spec.embedding_dim,
        "cross": 27 * spec.embedding_dim,
    }
    assert widths(model.bottom) == [13, *spec.bottom]
    assert widths(model.top) == [mixed[spec.interaction], *spec.top, 1]
    if spec.interaction == "cross":
        assert [layer.out_features for layer in model.cross.down] == [spec.cross_rank] * spec.cross_layers


def widths(layers: Any) -> list[int]:
    linear = [layer for layer in layers.layers if isinstance(layer, nn.Linear)]
    return [linear[0].in_features, *(layer.out_features for layer in linear)]


# optimizers

DENSE = {"sgd": "Sgd", "adagrad": "Adagrad", "adam": "Adam", "adamw": "Adam", "lamb": "Lamb"}


@check(
    *(
        f"ranking.{optimizer}.{setting}"
        for optimizer in ("train.dense", "train.sparse", "wide_optimizer")
        for setting in (
            "name",
            "learning_rate",
            "eps",
            "weight_decay",
            "initial_accumulator",
            "decay_rate",
            "decay_period",
        )
    )
)
def _(small: SmallRuns, row: Row, part: Part, capsys: Any) -> None:
    ranker, _ = small.stepped(row.base, *row.values, num_steps=3)
    which, _, setting = part.name.removeprefix("ranking.").removeprefix("train.").partition(".")
    if which == "dense":
        assert type(ranker.optimizers[0]).__name__ == DENSE[ranker.train_spec.dense.name]
        assert getattr(ranker.optimizers[0].spec, setting) == part.value
        return
    tables = "wide" if which == "wide_optimizer" else "deep"
    specs = [table.spec for name, table in ranker.tables.items() if name.startswith(f"{tables}/")]
    chosen = ranker.train_spec.sparse if tables == "deep" else ranker.spec.wide_optimizer
    assert chosen is not None
    assert {spec.optimizer for spec in specs} == {chosen.name} <= set(OPTIMIZERS)
    if setting == "learning_rate":
        assert chosen.learning_rate == part.value
    elif setting != "name":
        assert getattr(chosen, setting) == part.value
        assert {spec.parameters[setting] for spec in specs} == {
            table_parameters(chosen, ranker.batch_size)[setting]
        }


# training


@check("ranking.train.batch_size")
def _(small: SmallRuns, row: Row, part: Part, capsys: Any) -> None:
    assert load_recipe(row.base, row.values).ranking.train.batch_size == part.value
    ran = small.train(row.base, *row.values, "ranking.train.batch_size=150", "ranking.train.max_steps=4")
    assert ran.trained.state.samples == 4 * 150


@check("ranking.train.epochs")
def _(small: SmallRuns, row: Row, part: Part, capsys: Any) -> None:
    ran = small.train(row.base, *row.values)
    rows = small.table(load_recipe(row.base)).num_rows("train")
    assert (ran.trained.state.samples, ran.trained.state.stopped_by) == (part.value * rows, "end")


@check("ranking.train.evaluations")
def _(small: SmallRuns, row: Row, part: Part, capsys: Any) -> None:
    ran = small.train(row.base, *row.values, "ranking.train.max_steps=20", "ranking.train.epochs=2")
    steps = [evaluation["step"] for evaluation in ran.trained.state.evaluations]
    every = 20 // part.value
    assert steps == list(range(every, 21, every))


@check("ranking.train.precision")
def _(small: SmallRuns, row: Row, part: Part, capsys: Any) -> None:
    try:
        check_bfloat16()
    except TrainingError:
        with pytest.raises(TrainingError, match="neither AVX-512 BF16 nor AMX"):
            small.ranker(row.base, *row.values)
    else:
        ranker, _ = small.stepped(row.base, *row.values, num_steps=3)
        assert {str(parameter.dtype) for parameter in ranker.parameters} == {"torch.float32"}


def saved(small: SmallRuns, row: Row, *values: str) -> Ran:
    """Ten steps with one evaluation at the end, everything kept unless `values` say otherwise."""
    return small.train(
        row.base,
        *row.values,
        "ranking.train.max_steps=10",
        "ranking.train.evaluations=1",
        "ranking.train.saving.keep=100",
        *values,
    )


@check("ranking.train.saving.every_steps")
def _(small: SmallRuns, row: Row, part: Part, capsys: Any) -> None:
    assert saved(small, row, f"{part.name}=4").steps == [4, 8, 10]


@check("ranking.train.saving.every_minutes")
def _(small: SmallRuns, row: Row, part: Part, capsys: Any) -> None:
    assert saved(small, row).steps == [10]
    assert saved(small, row, f"{part.name}=1e-9").steps == list(range(1, 11))


@check("ranking.train.saving.full_every")
def _(small: SmallRuns, row: Row, part: Part, capsys: Any) -> None:
    ran = saved(small, row, "ranking.train.saving.every_steps=2", f"{part.name}=3")
    kinds = ["full" if checkpoint.delta_of is None else "delta" for checkpoint in ran.checkpoints]
    assert kinds == ["full", "delta", "delta", "full", "delta"]
    assert open_learner(ran.folder, "ranking", "last").learner.steps == 10


@check("ranking.train.saving.keep")
def _(small: SmallRuns, row: Row, part: Part, capsys: Any) -> None:
    often = ["ranking.train.evaluations=5", "ranking.train.saving.full_every=1", f"{part.name}={part.value}"]
    ran = saved(small, row, *often)
    assert part.value == 1
    assert ran.steps == sorted({ran.trained.best.step, 10})
    assert len(ran.trained.state.evaluations) == 5


# dynamic tables


@check("ranking.dynamic")
def _(small: SmallRuns, row: Row, part: Part, capsys: Any) -> None:
    ranker, _ = small.stepped(row.base, *row.values, num_steps=2)
    assert part.value is None
    assert all(table.spec.num_rows is not None for table in ranker.tables.values())


@check("ranking.dynamic.admit_after")
def _(small: SmallRuns, row: Row, part: Part, capsys: Any) -> None:
    counted_exactly = [value for value in row.values if "bloom_counters" not in value] or [f"{part.name}=3"]
    ranker, batches = small.stepped(row.base, *counted_exactly)
    for feature in ("c1", "c3", "c9"):
        keys, counts = sightings(batches, feature)
        assert set(records_of(ranker.tables[f"deep/{feature}"]).keys) == set(keys[counts >= part.value])


@check("ranking.dynamic.bloom_counters")
def _(small: SmallRuns, row: Row, part: Part, capsys: Any) -> None:
    ranker, batches = small.stepped(row.base, *row.values, f"{part.name}=10_000")
    for feature in ("c1", "c3", "c9"):
        keys, counts = sightings(batches, feature)
        table = ranker.tables[f"deep/{feature}"]
        assert set(keys[counts >= 3]) <= set(records_of(table).keys) <= set(keys)
        assert table.statistics().admission_bytes >= 2 * 10_000


@check("ranking.dynamic.shared_rows")
def _(small: SmallRuns, row: Row, part: Part, capsys: Any) -> None:
    ranker, batches = small.stepped(row.base, *row.values)
    keys, counts = sightings(batches, "c3")
    waiting = keys[counts < 3]
    rows = ranker.tables["deep/c3"].pool(ranker.tables["deep/c3"].lookup(waiting, train=False))
    assert len(waiting)
    assert np.abs(rows).max(axis=-1).min() > 0


@check("ranking.dynamic.evict_after_steps")
def _(small: SmallRuns, row: Row, part: Part, capsys: Any) -> None:
    ranker, _ = small.stepped(row.base, *row.values, f"{part.name}=5", "ranking.dynamic.evict_every_steps=1")
    tables = [table for table in ranker.tables.values() if table.spec.num_rows is None]
    assert sum(table.statistics().evicted for table in tables) > 0
    assert all(
        records_of(table).steps.min() >= ranker.steps - 5 for table in tables if table.statistics().keys
    )


@check("ranking.dynamic.evict_below_norm")
def _(small: SmallRuns, row: Row, part: Part, capsys: Any) -> None:
    assert part.value == pytest.approx((2 * 1.0) ** 0.5, abs=1e-4)
    values = [
        *row.values,
        f"{part.name}=0.025",
        "ranking.dynamic.evict_every_steps=12",
        "ranking.dynamic.admit_after=1",
    ]
    ranker, _ = small.stepped(row.base, *values)
    table = ranker.tables["deep/c3"]
    assert table.statistics().evicted > 0
    assert np.linalg.norm(records_of(table).rows, axis=1).min() >= 0.025
