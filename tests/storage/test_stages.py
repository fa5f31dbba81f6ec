"""The stages, with all that they write and read at a URL: the same artifacts as in a directory, on any machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from s3_server import Address
from shop import FEW_STEPS, Shop

import recmill as api
from recmill.artifacts.checkpoint.checkpoint import Checkpoint
from recmill.dataset.table import Table
from recmill.errors import ArtifactError
from recmill.storage.cache import cache_folder
from recmill.storage.index import read_index
from recmill.storage.objects import ObjectStore
from recmill.storage.workspace import written

Run = Callable[..., tuple[int, str, str]]
pytestmark = pytest.mark.stages


def another_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    monkeypatch.setenv("RECMILL_CACHE", str(tmp_path / name))


@pytest.fixture
def table(address: Address, shop: Shop, recmill: Run) -> str:
    code, out, err = recmill("prepare", "quickstart", "--data", shop.log, "--into", address("table"))
    assert code == 0, err
    assert f"wrote  {address('table')}" in out
    return address("table")


def test_a_table_is_the_one_that_a_directory_would_hold(
    table: str, shop: Shop, recmill: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    another_machine(monkeypatch, tmp_path, "b")
    found, expected = Table.open(table), Table.open(shop.table)
    assert found.digest == expected.digest
    shards = [path for path in cache_folder().rglob("*.parquet") if "plan" not in path.parts]
    assert shards == []  # none is fetched before it is read
    assert found.to_polars().equals(expected.to_polars())
    code, out, _ = recmill("prepare", "quickstart", "--data", shop.log, "--into", table)
    assert (code, out.split()[0]) == (0, "found")
    code, _, err = recmill("prepare", "shop-live", "--data", shop.log, "--into", table)
    assert code == 1
    assert "already holds a Table of another recipe" in err


def test_batches_of_a_table_are_those_of_a_directory(table: str, shop: Shop) -> None:
    from recmill.dataset.loader import Batches

    def numbers(opened: Table) -> list[list[float]]:
        return [batch.numbers.ravel().tolist() for batch, _ in Batches(opened, 512, seed=3).read()]

    assert numbers(Table.open(table)) == numbers(Table.open(shop.table))


def test_all_stages_work_from_urls(
    table: str, address: Address, shop: Shop, recmill: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, bundle, scores = address("checkpoint"), address("bundle"), address("scores")
    train = ("train", "quickstart", "--table", table, "--into", checkpoint, "--threads", 1)
    another_machine(monkeypatch, tmp_path, "trainer")
    assert recmill(*train, *FEW_STEPS, "--quiet")[0] == 0
    code, _, err = recmill(*train, *FEW_STEPS)
    assert code == 1
    assert "holds checkpoints already. Add --resume" in err

    another_machine(monkeypatch, tmp_path, "second-trainer")
    more = ["--set", "ranking.train.max_steps=25", "--set", "retrieval.train.max_steps=6"]
    assert recmill(*train, *more, "--resume", "--quiet")[0] == 0
    assert Checkpoint.open(checkpoint).of("ranking").find("last").step == 25

    another_machine(monkeypatch, tmp_path, "evaluator")
    measured = ("--checkpoint", checkpoint, "--table", table, "--threads", 1)
    assert recmill("evaluate", "quickstart", *measured)[0] == 0
    assert recmill("score", "--checkpoint", checkpoint, "--table", table, "--into", scores)[0] == 0

    another_machine(monkeypatch, tmp_path, "exporter")
    code, out, err = recmill("export", "--checkpoint", checkpoint, "--into", bundle)
    assert code == 0, err
    assert f"wrote  {bundle.partition('?')[0]}/" in out
    opened = api.open_bundle(bundle).bundle
    assert opened.manifest["evaluation"] is not None
    assert opened.manifest["checkpoint"]["path"] == checkpoint
    assert (opened.path / "report.html").is_file()
    code, out, _ = recmill("bundle", "verify", bundle)
    assert (code, out.split()[0]) == (0, "verified")


def test_a_run_publishes_below_a_url_and_is_found_done_elsewhere(
    address: Address, shop: Shop, recmill: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    into = address("run")
    below = ObjectStore(into).address
    ran = ("run", "quickstart", "--data", shop.log, "--into", into, "--threads", 1, *FEW_STEPS)
    code, out, err = recmill(*ran)
    assert code == 0, err
    assert f"next   recmill serve --bundle {below('bundle')}" in out
    assert Table.open(below("table")).digest == Table.open(shop.table).digest
    assert api.open_bundle(below("bundle")).recommend("u1", k=3).items
    another_machine(monkeypatch, tmp_path, "b")
    code, out, err = recmill(*ran)
    assert code == 0, err
    assert [line.split()[0] for line in out.splitlines()].count("found") >= 2
    for refused, words in (([], "a generated log lands in a directory"), (["--at-once"], "a disk that both")):
        data = ["--data", shop.log] if refused else []
        code, _, err = recmill("run", "quickstart", *data, "--into", into, *refused)
        assert code == 1
        assert words in err


def test_a_trainer_that_was_killed_goes_on_elsewhere(
    table: str, address: Address, recmill: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    into = address("checkpoint")
    train = ["train", "quickstart", "--table", table, "--into", into, "--only", "ranking", "--threads", "1"]
    often = ["--set", "ranking.train.saving.every_steps=5", "--set", "ranking.train.max_steps=100000"]
    command = [
        sys.executable,
        "-m",
        "recmill",
        *train,
        *often,
        "--set",
        "ranking.train.epochs=10000",
        "--quiet",
    ]
    store = ObjectStore(into)
    with subprocess.Popen(command) as trainer:
        ends_at = time.monotonic() + 120
        while read_index(store) is None:
            assert trainer.poll() is None, "the trainer ended"
            assert time.monotonic() < ends_at, "no checkpoint was published"
            time.sleep(0.1)
        os.kill(trainer.pid, signal.SIGKILL)
    published = Checkpoint.open(into).of("ranking").find("last").step
    for lease in store.list("_writers"):  # a minute has passed
        store.delete(lease.name)
    another_machine(monkeypatch, tmp_path, "elsewhere")
    steps = ["--set", f"ranking.train.max_steps={published + 5}", "--set", "ranking.train.epochs=10000"]
    assert recmill(*train, *steps, "--resume", "--quiet")[0] == 0
    last = Checkpoint.open(into).of("ranking").find("last")
    assert last.step == published + 5
    Checkpoint.open(into).of("ranking").chain(last)


def test_several_workers_cannot_write_to_a_url(address: Address, shop: Shop) -> None:
    with pytest.raises(ArtifactError, match="on a disk that they share"):
        api.train("quickstart", shop.table, into=address("c"), engine="ray", workers=2, quiet=True)


def test_a_table_that_is_prepared_elsewhere_meanwhile_is_refused(
    address: Address, recmill: Run, shop: Shop
) -> None:
    with written(address("table")):
        code, _, err = recmill("prepare", "quickstart", "--data", shop.log, "--into", address("table"))
    assert code == 1
    assert "is being written by another process" in err
