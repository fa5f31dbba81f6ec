"""Several labels in one ranker, on planted rows whose two labels ask for opposite items."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from recmill.dataset.batch import Batch, Keys
from recmill.errors import FeatureError
from recmill.features.chain import ColumnInfo
from recmill.learner.ranking import Ranker
from recmill.metrics import exact_auc
from recmill.recipe import recipe as r

LABELS = ("like", "reply")
COLUMNS = [
    ColumnInfo("x", "number", "feature"),
    ColumnInfo("user", "id", "feature", size=33),
    ColumnInfo("item", "id", "feature", size=33),
    *(ColumnInfo(name, "number", "label") for name in (*LABELS, "engaged")),
]
MODELS = ("shared_bottom", "mmoe", "ple", "esmm")


def planted(num_rows: int, seed: int, follows: bool = False) -> Batch:
    """Even users like even items and reply to odd ones; with `follows`, replies are some of the likes instead."""
    draw = np.random.default_rng(seed)
    user, item = draw.integers(1, 33, (2, num_rows))
    x = draw.normal(size=(num_rows, 1)).astype(np.float32)
    is_even = (user + item) % 2 == 0
    like = draw.random(num_rows) < np.where(is_even, 0.5, 0.1)
    reply = draw.random(num_rows) < np.where(is_even, 0.1, 0.5)
    if follows:
        reply = like & (draw.random(num_rows) < np.where(item % 4 == 0, 0.8, 0.2))
    labels = {"like": like, "reply": reply, "engaged": like | reply}
    keys = {"user": Keys(user), "item": Keys(item)}
    return Batch(num_rows, x, keys, {}, {name: value.astype(np.float32) for name, value in labels.items()})


def ranker(model: str, num_threads: int = 1, **of_tasks) -> Ranker:
    train = r.Training(batch_size=512, dense=r.Optimizer("adam", 0.01), sparse=r.Optimizer("adagrad", 0.1))
    make = partial(r.Ranking, model, embedding_dim=8, bottom=(8,), top=(16,), interaction="cat", train=train)
    spec = make("engaged") if model == "dlrm" else make(tasks=r.Tasks(LABELS, **of_tasks))
    return Ranker(spec, COLUMNS, num_threads)


def train(learner: Ranker, steps: int, follows: bool = False) -> list[float]:
    learner.start(planted(512, 0, follows))
    return [learner.step(planted(512, step, follows)).loss for step in range(steps)]


def test_tasks_that_conflict_are_each_predicted_where_the_merged_label_cannot_tell_them_apart():
    held_out = planted(8192, seed=10_000)
    merged = ranker("dlrm")
    train(merged, 300)
    of_merged = [exact_auc(held_out.labels[label], merged.predict(held_out)) for label in LABELS]
    assert max(of_merged) < 0.56  # either kind of item is engaged with alike
    for model in ("shared_bottom", "mmoe", "ple"):
        learner = ranker(model, tower=(8,))
        train(learner, 300)
        metrics = learner.evaluate([(held_out, None)]).metrics().as_dict()
        for label, auc in zip(LABELS, of_merged, strict=True):
            assert metrics[f"{label}.auc"] > auc + 0.12
            assert metrics[f"{label}.rce"] > 5
            assert metrics[f"{label}.calibration"] == pytest.approx(1, abs=0.1)


def test_esmm_gives_the_probability_of_click_and_conversion_over_all_rows():
    learner = ranker("esmm", tower=(8,))
    train(learner, 400, follows=True)
    held_out = planted(8192, seed=10_000, follows=True)
    click, conversion = learner.predict(held_out).T
    assert (conversion <= click).all()
    is_even, often = (held_out.keys["user"].values + held_out.keys["item"].values) % 2 == 0, 0.8 * 0.5
    is_often = is_even & (held_out.keys["item"].values % 4 == 0)
    assert conversion[is_often].mean() == pytest.approx(often, abs=0.06)
    assert conversion[~is_even].mean() < 0.1


def test_esmm_refuses_a_conversion_without_its_click():
    with pytest.raises(
        FeatureError, match=r'Label "reply" is 1 in .* rows whose label "like" is 0; esmm learns'
    ):
        ranker("esmm").step(planted(512, 0))


@pytest.mark.parametrize("model", MODELS)
def test_the_first_answers_are_the_rates_of_each_task(model):
    learner, rows = ranker(model), planted(4096, 0, follows=True)
    learner.start(rows)
    means = learner.predict(rows).mean(axis=0)
    assert means == pytest.approx([rows.labels[label].mean() for label in LABELS], rel=0.15)


def test_a_weight_of_a_task_scales_its_part_of_the_loss():
    rows = planted(512, 0)
    like, both, more = (
        ranker("shared_bottom", weights=weights).step(rows).loss
        for weights in ({"reply": 1e-6}, {}, {"like": 2.0, "reply": 3.0})
    )
    assert more == pytest.approx(2 * like + 3 * (both - like), rel=1e-4)


def test_a_task_that_cannot_be_learned_gets_less_weight_where_weights_are_learned():
    learner = ranker("shared_bottom", uncertainty=True)
    random = np.random.default_rng(0)
    for step in range(100):
        rows = planted(512, step)
        rows.labels["reply"][:] = random.random(512) < 0.5  # by chance alone
        learner.step(rows)
    like, reply = learner.model.get_parameter("log_variances").tolist()
    assert reply > like + 0.05
