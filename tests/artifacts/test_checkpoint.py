"""Checkpoints: full and delta, whole or not there, damage noticed, the best and the last kept."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from safetensors.numpy import load_file

from recmill.artifacts.checkpoint.checkpoints import Checkpoints
from recmill.artifacts.checkpoint.step import StepCheckpoint
from recmill.embeddings.table import EmbeddingTable, TableSpec
from recmill.errors import ArtifactError, ResourceError
from recmill.recipe.recipe import Saving

SPECS = (
    TableSpec("user", 4, "adam", admit_after=2, shared_rows=8),
    TableSpec("item", 4, "rowwise_adagrad"),
    TableSpec("fixed", 4, "sgd", num_rows=50),
    TableSpec("sketched", 4, "adagrad", admit_after=3, bloom_counters=64),
)


def new_tables() -> dict[str, EmbeddingTable]:
    return {f"deep/{spec.name}": EmbeddingTable(spec) for spec in SPECS}


def teach(tables: dict[str, EmbeddingTable], step: int, seed: int) -> None:
    """One step of training: some keys are seen and updated, some are evicted."""
    random = np.random.default_rng(seed)
    for table in tables.values():
        keys = random.integers(0, 50, 30)
        looked = table.lookup(keys, train=True, step=step)
        table.update(looked, random.normal(size=(30, 4)).astype(np.float32), 0.1, step)
        if table.spec.num_rows is None:
            table.remove(random.integers(0, 50, 5))


def contents(tables: dict[str, EmbeddingTable]) -> dict[str, object]:
    """Everything that a table knows, in an order that does not depend on how it came to be."""
    found: dict[str, object] = {}
    for name, table in tables.items():
        with table.begin_snapshot() as snapshot:
            pieces = list(snapshot)
            records = {
                int(key): (
                    piece.rows[i].tobytes(),
                    piece.states[i].tobytes(),
                    piece.counts[i],
                    piece.steps[i],
                )
                for piece in pieces
                for i, key in enumerate(piece.keys)
            }
            waiting = snapshot.waiting
            order = np.argsort(waiting.keys)
            parts = (waiting.keys[order], waiting.counts[order], waiting.steps[order])
            shared = (waiting.bloom, waiting.shared_rows, waiting.shared_states)
            found[name] = (records, [part.tobytes() for part in (*parts, *shared)])
    return found


def saved(folder: Path, num_saves: int) -> list[dict[str, object]]:
    """Train and save `num_saves` times; what the tables held each time."""
    tables, moments = new_tables(), []
    checkpoints = Checkpoints(folder, "auc", Saving(full_every=6, keep=9))
    for number in range(1, num_saves + 1):
        for step in range(3):
            teach(tables, 10 * number + step, 100 * number + step)
        dense = {"model.w": np.full(3, number, np.float32)}
        checkpoints.save(10 * number, dense, tables, {"cursor": number}, {"auc": 0.5 + 0.01 * number})
        checkpoints.wait()
        moments.append(contents(tables))
    return moments


def test_a_full_checkpoint_and_five_deltas_restore_the_live_tables(tmp_path):
    moments = saved(tmp_path, 6)
    checkpoints = Checkpoints(tmp_path, "auc")
    assert [found.delta_of is None for found in checkpoints.all()] == [
        True,
        False,
        False,
        False,
        False,
        False,
    ]
    for checkpoint, moment in zip(checkpoints.all(), moments, strict=True):
        tables = new_tables()
        arrays = checkpoints.restore(checkpoint, tables)
        assert contents(tables) == moment
        assert arrays["model.w"].tolist() == [checkpoint.step / 10] * 3
        assert checkpoint.state == {"cursor": checkpoint.step // 10}


def test_a_delta_after_a_restore_holds_only_what_changed_since(tmp_path):
    saved(tmp_path, 2)
    checkpoints, tables = Checkpoints(tmp_path, "auc", Saving(full_every=9, keep=9)), new_tables()
    checkpoints.restore(checkpoints.find("last"), tables)
    item = tables["deep/item"]
    looked = item.lookup(np.array([7]), train=True, step=30)
    item.update(looked, np.ones((1, 4), np.float32), 0.1, 30)
    checkpoints.save(30, {"model.w": np.zeros(3, np.float32)}, tables, {}, {})
    checkpoints.wait()
    last = checkpoints.find("last")
    assert [records.keys.tolist() for records in last.records("deep/item")] == [[7]]
    again = new_tables()
    checkpoints.restore(last, again)
    assert contents(again) == contents(tables)


def test_a_flipped_byte_in_any_file_is_noticed_and_the_checkpoint_before_is_used(tmp_path):
    saved(tmp_path / "good", 3)
    files = sorted(path for path in (tmp_path / "good/step-00000030").rglob("*") if path.is_file())
    assert len(files) == 2 + 1 + len(SPECS)
    for file in files:
        folder = tmp_path / "bad"
        shutil.copytree(tmp_path / "good", folder)
        damaged = folder / file.relative_to(tmp_path / "good")
        content = bytearray(damaged.read_bytes())
        content[len(content) // 2] ^= 0x01
        damaged.write_bytes(bytes(content))
        warnings: list[str] = []
        found = Checkpoints(folder, "auc").last_good(warnings.append)
        assert found is not None
        assert (found.step, len(warnings)) == (20, 1), file
        assert "step-00000030" in warnings[0]
        assert (folder / "step-00000030.damaged").is_dir()
        shutil.rmtree(folder)


def test_a_missing_or_shortened_file_is_noticed(tmp_path):
    saved(tmp_path, 2)
    (tmp_path / "step-00000020/dense.safetensors").unlink()
    warnings: list[str] = []
    assert Checkpoints(tmp_path, "auc").last_good(warnings.append) is not None
    with (tmp_path / "step-00000010/tables/deep/item.arrow").open("r+b") as file:
        file.truncate(100)
    assert Checkpoints(tmp_path, "auc").last_good(warnings.append) is None
    assert "dense.safetensors is missing" in warnings[0]
    assert "item.arrow does not have the digest of its record" in warnings[1]


def test_any_flipped_bit_of_a_manifest_is_noticed(tmp_path):
    saved(tmp_path, 1)
    path = tmp_path / "step-00000010/manifest.json"
    content = path.read_bytes()
    for place in range(0, len(content) - 1, 7):
        path.write_bytes(content[:place] + bytes([content[place] ^ (1 << place % 7)]) + content[place + 1 :])
        with pytest.raises(ArtifactError):
            StepCheckpoint.open(tmp_path / "step-00000010").verify()


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x01
    path.write_bytes(bytes(content))


def test_a_damaged_manifest_of_an_older_checkpoint_is_set_aside_and_the_run_goes_on(tmp_path):
    checkpoints, tables = Checkpoints(tmp_path, "auc", Saving(full_every=1, keep=9)), new_tables()
    for step in (10, 20, 30):
        checkpoints.save(step, {"model.w": np.zeros(3, np.float32)}, tables, {}, {"auc": 0.6})
    checkpoints.wait()
    damage(tmp_path / "step-00000010/manifest.json")
    assert checkpoints.find("last").step == 30
    assert checkpoints.find("20").step == 20
    with pytest.raises(ArtifactError, match="step-00000010"):
        checkpoints.find("best")
    warnings: list[str] = []
    again = Checkpoints(tmp_path, "auc", Saving(full_every=1, keep=9))
    last = again.last_good(warnings.append)
    assert last is not None
    assert last.step == 30
    assert "step-00000010" in warnings[0]
    assert "It is not needed" in warnings[0]
    again.restore(last, tables)
    again.forget_after(30)
    again.save(40, {"model.w": np.zeros(3, np.float32)}, tables, {}, {})
    again.wait()
    assert [found.step for found in again.all()] == [20, 30, 40]


def test_deltas_without_their_base_are_set_aside_too(tmp_path):
    checkpoints, tables = Checkpoints(tmp_path, "auc", Saving(full_every=2, keep=9)), new_tables()
    for step in (10, 20, 30, 40):
        checkpoints.save(step, {"model.w": np.zeros(3, np.float32)}, tables, {}, {"auc": 0.6})
    checkpoints.wait()
    damage(tmp_path / "step-00000010/manifest.json")
    last = Checkpoints(tmp_path, "auc").last_good(lambda warning: None)
    assert last is not None
    assert last.step == 40
    assert [found.step for found in checkpoints.all()] == [30, 40]


def test_damage_while_training_does_not_make_a_delta_of_another_base(tmp_path):
    checkpoints, tables = Checkpoints(tmp_path, "auc", Saving(full_every=9, keep=9)), new_tables()
    for step in (10, 20, 30):
        teach(tables, step, step)
        checkpoints.save(step, {"model.w": np.zeros(3, np.float32)}, tables, {}, {})
        checkpoints.wait()
        if step == 20:
            damage(tmp_path / "step-00000020/manifest.json")
    assert checkpoints.find("30").delta_of is None
    restored = new_tables()
    checkpoints.restore(checkpoints.find("30"), restored)
    assert contents(restored) == contents(tables)


def test_a_checkpoint_that_stands_on_itself_is_damaged(tmp_path):
    saved(tmp_path, 2)
    second = StepCheckpoint.open(tmp_path / "step-00000020")
    with pytest.raises(ArtifactError, match=r"its base step-00000020 does not exist"):
        Checkpoints(tmp_path, "auc").chain(
            StepCheckpoint(second.path, {**second.manifest, "delta_of": second.path.name})
        )


def test_the_last_the_best_and_what_they_stand_on_stay(tmp_path):
    tables = new_tables()
    checkpoints = Checkpoints(tmp_path, "auc", Saving(full_every=3, keep=1))
    for number, auc in enumerate([0.6, 0.9, 0.7, 0.7, 0.7, 0.7, 0.7, 0.7], start=1):
        teach(tables, number, number)
        checkpoints.save(number, {}, tables, {}, {"auc": auc})
    checkpoints.wait()
    # 2 is the best and a delta of 1; 8 is the last and a delta of 7.
    assert [found.step for found in checkpoints.all()] == [1, 2, 7, 8]
    assert checkpoints.find("best").step == 2
    assert checkpoints.find("last").step == 8
    assert checkpoints.find("7").step == 7
    with pytest.raises(ArtifactError, match="no checkpoint of step 5; it has: 1, 2, 7, 8, last, best"):
        checkpoints.find("5")
    for which in ("best", "last"):
        checkpoints.restore(checkpoints.find(which), new_tables())


def test_a_half_written_checkpoint_is_not_taken_for_a_whole_one(tmp_path):
    saved(tmp_path, 2)
    shutil.copytree(tmp_path / "step-00000020", tmp_path / "step-00000030.partial")
    shutil.copytree(tmp_path / "step-00000020", tmp_path / "step-00000040")
    (tmp_path / "step-00000040/manifest.json").unlink()
    checkpoints = Checkpoints(tmp_path, "auc")
    assert [found.step for found in checkpoints.all()] == [10, 20]
    checkpoints.forget_after(10)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000010", "step-00000040"]


def test_a_write_that_fails_is_reported_and_older_checkpoints_stay(tmp_path):
    saved(tmp_path, 1)
    tables, checkpoints = new_tables(), Checkpoints(tmp_path, "auc")
    (tmp_path / "step-00000020.partial").write_text("in the way")
    checkpoints.save(20, {}, tables, {}, {})
    with pytest.raises(ResourceError, match=r"could not be written to .*make room and resume"):
        checkpoints.wait()
    assert checkpoints.find("last").step == 10


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    saved(tmp_path, 1)
    checkpoints = Checkpoints(tmp_path, "auc")
    with pytest.raises(ArtifactError, match=r"the model has deep/item\. Is it a checkpoint of this recipe"):
        checkpoints.restore(checkpoints.find("last"), {"deep/item": EmbeddingTable(SPECS[1])})
    wider = new_tables() | {"deep/item": EmbeddingTable(TableSpec("item", 8))}
    with pytest.raises(ArtifactError, match='"deep/item" has dim 4, the model has 8'):
        checkpoints.restore(checkpoints.find("last"), wider)


def test_a_plain_script_reads_it(tmp_path):
    saved(tmp_path, 1)
    step = tmp_path / "step-00000010"
    assert json.loads((step / "manifest.json").read_text())["step"] == 10
    assert load_file(step / "dense.safetensors")["model.w"].tolist() == [1, 1, 1]
    table = pa.ipc.open_file(step / "tables/deep/item.arrow").read_all()
    assert table.column_names == ["key", "row", "state", "count", "step"]
    assert len(table["row"][0].as_py()) == 4
