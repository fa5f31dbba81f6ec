"""Runs of 1, 2 and 4 workers end alike, and each can go on where another stopped."""

from __future__ import annotations

import numpy as np
import pytest
from even_odd import MODELS
from worker_runs import assert_same_tables, contents

from recmill.artifacts.checkpoint.checkpoint import Checkpoint
from recmill.artifacts.checkpoint.compare import diff
from recmill.learner.saved import open_learner

pytestmark = [pytest.mark.processes, pytest.mark.stages]

SIZES = (2, 4)


def model_of(name: str) -> str:
    return next(iter(MODELS[name]))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", MODELS)
def test_losses_and_metrics_are_those_of_one_process(runs, name, size):
    (alone,), ran = runs.found[name, 1], runs.found[name, size]
    np.testing.assert_allclose(ran[0].losses, alone.losses, rtol=1e-5)
    assert all(other.metrics == ran[0].metrics for other in ran)
    assert ran[0].metrics.keys() == alone.metrics.keys()
    for key, value in alone.metrics.items():
        assert ran[0].metrics[key] == pytest.approx(value, abs=2e-3), key


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", MODELS)
def test_tables_have_the_keys_and_counts_of_one_process(runs, name, size):
    assert_same_tables(runs.into(name, size), runs.into(name, 1), model_of(name))


def test_keys_came_and_went_in_the_runs_that_are_compared(runs):
    tables = contents(runs.into("dynamic", 1))
    states = Checkpoint.open(runs.into("dynamic", 1)).of("ranking").find("last").admission()
    assert all(len(keys) > 20 for keys in tables.values())
    assert len(states["deep/item_key.keys"]) > 20
    assert len(states["deep/item_key.removed"]) > 0


@pytest.mark.parametrize("size", SIZES)
def test_shared_rows_and_counters_of_several_workers_are_those_of_one_process(runs, size):
    rows, counters = (
        [
            Checkpoint.open(runs.into(name, workers)).of(model).find("last").admission()[array]
            for workers in (size, 1)
        ]
        for name, model, array in (
            ("dynamic", "ranking", "deep/item_key.shared_rows"),
            ("bce", "retrieval", "item/item_key.bloom"),
        )
    )
    np.testing.assert_allclose(*rows, atol=2e-4)
    assert np.abs(rows[1]).max() > 0.02  # they began with at most 0.01
    np.testing.assert_array_equal(*counters)
    assert np.count_nonzero(counters[1]) > 20


def test_a_run_goes_on_with_another_number_of_workers(runs):
    assert [ran.state.workers for size in (1, 2, 4) for ran in runs.found["moving", size][:1]] == [1, 2, 4]
    assert_same_tables(runs.moving, runs.into("dynamic", 1))
    last = Checkpoint.open(runs.moving).of("ranking").find("last")
    straight = Checkpoint.open(runs.into("dynamic", 1)).of("ranking").find("last")
    assert last.state["cursor"] == straight.state["cursor"]
    assert last.metrics["auc"] == pytest.approx(straight.metrics["auc"], abs=2e-3)


@pytest.mark.parametrize("size", SIZES)
def test_every_worker_writes_its_shard_and_the_first_one_the_rest(runs, size):
    last = Checkpoint.open(runs.into("dynamic", size)).of("ranking").find("last")
    table = last.manifest["tables"]["deep/item_key"]
    assert table["files"] == [f"tables/deep/item_key.{rank}-{size}.arrow" for rank in range(size)]
    assert "dense.safetensors" in last.manifest["files"]
    assert not list(runs.folder.rglob("*.partial"))


@pytest.mark.parametrize("size", SIZES)
def test_checkpoints_of_several_workers_open_in_one_process(runs, size):
    folder = Checkpoint.open(runs.into("fixed", size))
    saved, alone = (open_learner(Checkpoint.open(runs.into("fixed", n)), "ranking") for n in (size, 1))
    keys = {name: table.statistics().keys for name, table in saved.learner.tables.items()}
    assert keys == {name: table.statistics().keys for name, table in alone.learner.tables.items()}
    checkpoints = folder.of("ranking")
    steps = checkpoints.all()
    assert diff(checkpoints, steps[0], steps[-1])["tables"]["deep/item"]["changed"] > 0


@pytest.mark.parametrize("size", SIZES)
def test_all_workers_hear_of_each_checkpoint_at_the_same_time(runs, size):
    ran = runs.found["fixed", size]
    assert len(ran[0].reports) >= 2
    assert all(other.reports == ran[0].reports for other in ran)


def test_the_state_says_which_unit_comes_next_and_who_trained(runs):
    state = runs.found["dynamic", 4][0].state
    assert (state.workers, state.units) == (4, 1)
    assert state.samples == runs.found["dynamic", 1][0].state.samples


def test_only_what_others_hold_travels(runs):
    (alone,), ran = runs.found["fixed", 1], runs.found["fixed", 2]
    assert alone.wire_bytes == 0
    assert all(worker.wire_bytes > 0 for worker in ran)
