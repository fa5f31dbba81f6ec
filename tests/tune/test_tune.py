"""Searches from end to end: real processes, a tiny Table."""

from __future__ import annotations

import json
import os
import signal
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest
from forked import ForkedCommand
from small_study import FEW_STEPS, SPACE, small_recipe

from recmill.dataset.table import Table
from recmill.recipe.load import load_recipe
from recmill.stages.tune.trial import Stopped, run_trial

pytestmark = pytest.mark.processes

ALL = [argument for override in (*FEW_STEPS, SPACE) for argument in ("--set", override)]


def command(table: Table, into: Path, *more: object) -> list[str]:
    arguments = ["tune", "criteo-deeprec", *ALL, "--table", table.path, "--into", into, "--threads", 1, *more]
    return [str(argument) for argument in arguments]


def trials(into: Path) -> list[dict[str, Any]]:
    file = into / "trials.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def test_a_search_finds_a_recipe_that_trains_and_records_what_failed(
    recmill: Any, table: Table, tmp_path: Path
) -> None:
    into = tmp_path / "study"
    code, out, err = recmill(*command(table, into, "--trials", 4, "--jobs", 2, "--quiet"))
    assert (code, err) == (0, "")
    found = {tuple(one["values"].values()): one for one in trials(into)}
    assert {values: one["state"] for values, one in found.items()} == {
        (4, 0.003): "complete",
        (2, 0.003): "complete",
        (4, 1e30): "failed",
        (2, 1e30): "failed",
    }
    assert "nothing was updated" in found[4, 1e30]["reason"]
    assert found[2, 0.003]["found"]["parameters"] < found[4, 0.003]["found"]["parameters"]
    assert len(found[4, 0.003]["evaluations"]) == 2
    lines = out.splitlines()
    assert lines[0].startswith(f"read   {table.path}")
    assert lines[-1] == f"next   recmill train {into}/best.toml --table {table.path} --into {into}/checkpoint"

    best = load_recipe(str(into / "best.toml"))
    assert best.ranking.train.dense.learning_rate == 0.003
    assert best.features == table.recipe.features
    assert best.tune == small_recipe().tune
    assert "[tune.space]" in (into / "best.toml").read_text()
    page = (into / "report.html").read_text()
    assert "auc against seconds" in page
    assert "nothing was updated" in page

    code, out, err = recmill(
        "train", into / "best.toml", "--table", table.path, "--into", tmp_path / "checkpoint", "--quiet"
    )
    assert code == 0, err

    code, out, _ = recmill(*command(table, into, "--trials", 4, "--within", 1, "--json"))
    answer = json.loads(out)
    assert code == 0
    assert (answer["trials"], answer["objectives"]) == (4, ["auc", "seconds"])
    assert answer["best"]["number"] in answer["front"]
    cheaper = tomllib.loads((into / "best.toml").read_text())
    assert cheaper["ranking"]["embedding_dim"] == answer["best"]["values"]["ranking.embedding_dim"]


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def wait_for(condition: Any, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it takes too long"
        time.sleep(0.05)


def test_a_search_that_was_killed_goes_on_and_leaves_no_process(
    recmill: Any, table: Table, tmp_path: Path
) -> None:
    into = tmp_path / "study"
    space = ["--set", 'tune.space={ "ranking.embedding_dim" = [4, 2, 3] }', "--trials", 3, "--quiet"]
    arguments = command(table, into, *space)
    search = ForkedCommand(*arguments)
    # The first trial is over, and the second one has begun.
    wait_for(lambda: trials(into) and children_of(search.pid))
    (child,) = children_of(search.pid)
    search.kill()
    search.communicate()
    wait_for(lambda: not Path(f"/proc/{child}").exists())

    code, _, err = recmill(*arguments)
    assert (code, err) == (0, "")
    states = [one["state"] for one in trials(into)]
    assert sorted(states) == ["complete", "complete", "complete", "interrupted"]
    (lost,) = [one["values"] for one in trials(into) if one["state"] == "interrupted"]
    assert lost in [one["values"] for one in trials(into) if one["state"] == "complete"]


def test_a_trial_whose_process_is_killed_is_recorded_and_the_search_goes_on(
    table: Table, tmp_path: Path
) -> None:
    into = tmp_path / "study"
    space = ["--set", 'tune.space={ "ranking.embedding_dim" = [4, 2] }', "--trials", 2, "--quiet"]
    search = ForkedCommand(*command(table, into, *space))
    wait_for(lambda: children_of(search.pid))
    os.kill(children_of(search.pid)[0], signal.SIGKILL)
    out, _ = search.communicate(timeout=60)
    assert search.returncode == 0
    assert "failed: its process was killed, as systems do when memory is short" in out
    assert [one["state"] for one in trials(into)] == ["failed", "complete"]


def test_a_trial_stops_when_nobody_wants_more_of_it(table: Table) -> None:
    heard: list[dict[str, float]] = []

    def hear(numbers: dict[str, float]) -> bool:
        heard.append(numbers)
        return False

    with pytest.raises(Stopped):
        run_trial(small_recipe(), "ranking", table.path, 1, hear)
    assert [(numbers["share"] < 1, "auc" in numbers, numbers["seconds"] > 0) for numbers in heard] == [
        (True, True, True)
    ]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--address", "auto"], "--address is for --engine ray. Remove it."),
        (["--set", "tune.space.ranking.embeding_dim=[4]"], 'did you mean "embedding_dim"?'),
        (["--trials", "0"], "must be a whole number from 1"),
        (["--within", "-1"], "must be a number from 0"),
    ],
)
def test_what_is_wrong_is_said_before_anything_runs(
    recmill: Any, table: Table, tmp_path: Path, more: list[str], said: str
) -> None:
    code, _, err = recmill(*command(table, tmp_path / "study", *more))
    assert code == 2
    assert said in err
    assert not (tmp_path / "study").exists()
