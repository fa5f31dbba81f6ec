"""recall@10 of the list that a server answers is the number that the evaluation printed, for every shipped recipe."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from statistics import mean

import httpx
import polars as pl
import pytest
from servers import in_thread
from shop import run_quietly

from recmill import Table, load_recipe
from recmill.recipe.load import shipped_recipes
from recmill.stages.serve.config import ServeConfig

ROWS = {"shop": 1_500, "movielens": 6_000, "recsys2021": 1_500}
LISTING = [name for name in sorted(shipped_recipes()) if load_recipe(name).retrieval]
GENERATED = [name for name in LISTING if load_recipe(name).generate]


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("logs")
    for shape, rows in ROWS.items():
        run_quietly("generate", shape, "--rows", rows, "--into", folder / shape)
    return {shape: folder / shape for shape in ROWS}


@pytest.mark.parametrize("name", GENERATED)
def test_a_server_answers_what_was_measured(name: str, logs: dict[str, Path], tmp_path: Path) -> None:
    recipe = load_recipe(name)
    assert recipe.generate is not None
    table, checkpoint, bundle = tmp_path / "table", tmp_path / "checkpoint", tmp_path / "served"
    keep = ["--set", f"table.keep={recipe.log.user}, {recipe.log.item}"]
    run_quietly("prepare", name, "--data", logs[recipe.generate], "--into", table, *keep)
    few = ["--set", "retrieval.train.max_steps=5"]
    few += ["--set", "ranking.train.max_steps=5"] if recipe.ranking else []
    run_quietly("train", name, "--table", table, "--into", checkpoint, *few, "--threads", 1)
    served = ["--served", "--served-bundle", bundle, "--threads", 1]
    run_quietly("evaluate", name, "--checkpoint", checkpoint, "--table", table, *served)
    measured_folder = checkpoint / "refit" if recipe.refit else checkpoint
    measured = json.loads((measured_folder / "evaluation.json").read_text())["served"]
    running = in_thread(ServeConfig(bundle=bundle, http_port=0, grpc_port=0, threads=1))
    try:
        recalls = list(_recalls(running.http, _relevant(name, Table.open(table), measured["split"])))
    finally:
        running.stop()
    assert len(recalls) == measured["users"] > 0
    assert mean(recalls) == pytest.approx(measured["metrics"]["recall@10"], abs=1e-9)


def _relevant(name: str, table: Table, split: str) -> dict[object, set[object]]:
    """User -> the items of the split's clicks that were new to them, counted from the Table alone."""
    recipe = load_recipe(name)
    columns = [f"raw_{recipe.log.user}", f"raw_{recipe.log.item}"]
    clicks = {
        part: table.to_polars(part).filter(pl.col(recipe.click_label) == 1).select(columns).unique()
        for part in ("train", "eval", "test")
    }
    before = clicks["train"] if split == "eval" else pl.concat([clicks["train"], clicks["eval"]])
    new = clicks[split].join(before, on=columns, how="anti")
    return {user: set(items) for user, items in new.group_by(columns[0]).agg(columns[1]).rows()}


def _recalls(address: str, relevant: dict[object, set[object]]) -> Iterator[float]:
    with httpx.Client(base_url=address) as client:
        for user, items in relevant.items():
            answer = client.post("/v1/recommend", json={"user": user, "k": 10}).raise_for_status().json()
            yield len(items & {item["id"] for item in answer["items"]}) / len(items)
