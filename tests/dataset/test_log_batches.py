"""Batches straight from the log hold the rows that a Table would, and go on from any cursor with the very next row."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from recmill.dataset.batch import between, joined
from recmill.dataset.loader import Batches
from recmill.dataset.log_loader import LogBatches
from recmill.dataset.schedule import Cursor
from recmill.dataset.table import Table
from recmill.errors import ArtifactError, FeatureError, LogError, TooManyBadRows
from recmill.features.plan import Plan
from recmill.logs import counted, gzip_text, reduced, text
from recmill.logs.base import open_source
from recmill.recipe.load import load_recipe, recipe_from_dict
from recmill.recipe.recipe import SPLITS, Recipe
from recmill.stages.prepare.prepare import PrepareConfig, prepare
from recmill.synthetic.generate import generate


def recipe_of(**changes: Any) -> Recipe:
    """user, item, time, price, tags and click, tab-separated without header."""
    types = {"user": "text", "item": "int", "time": "int", "price": "float", "tags": "text"}
    columns = [{"name": name, "type": kind} for name, kind in types.items()]
    tree = {
        "name": "events",
        "log": {
            "files": ["events*.tsv"],
            "columns": [*columns, {"name": "click", "type": "int", "allowed": [0, 1], "required": True}],
        },
        "labels": [{"name": "clicked", "columns": "click"}],
        "features": [
            {"columns": "user", "steps": ["vocabulary"]},
            {"columns": "item", "steps": ["key"]},
            {"name": "when", "columns": "time", "steps": [{"cast": "float"}]},
            {"columns": "tags", "steps": [{"split": ","}, "vocabulary"]},
            {"name": "user_rate", "columns": "user", "steps": [{"target": {"label": "clicked"}}]},
        ],
        "table": {"keep": ["time"]},
    }
    return recipe_from_dict({**tree, **changes})


def write_events(folder: Path, num_rows: int, files: int = 1, bad_every: int | None = None) -> Path:
    """Row n is at time n; now and then a row that cannot be read stands between."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = [""] * files
    for n in range(num_rows):
        tags = ",".join(f"t{tag}" for tag in range(n % 4))
        row = f"u{n * n % 23}\t{n % 17}\t{n}\t{n % 13 / 4}\t{tags}\t{n % 3 % 2}\n"
        texts[n * files // num_rows] += row + ("nonsense\n" if bad_every and n % bad_every == 0 else "")
    for number, content in enumerate(texts):
        (folder / f"events{number}.tsv").write_text(content)
    return folder


def table_of(recipe: Recipe, data: Path, into: Path) -> Table:
    return prepare(recipe, str(data), into, PrepareConfig(partitions=3, max_bad=0.2)).table


def signature(batch):
    """Everything in a batch as plain values, row by row where it matters."""
    keys = {
        name: (found.values.tolist(), None if found.offsets is None else found.offsets.tolist())
        for name, found in {**batch.keys, **batch.lists}.items()
    }
    return batch.size, batch.numbers.tolist(), keys, {name: y.tolist() for name, y in batch.labels.items()}


def signatures(batches, cursor=Cursor()):  # noqa: B008
    return [signature(batch) for batch, _ in batches.read(cursor)]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Logs of the tests are cut into many pieces, as large logs are."""
    monkeypatch.setattr(counted, "PIECE_BYTES", 700)


def assert_same_rows_in_every_split(recipe: Recipe, data: Path, table: Table, **options: Any) -> LogBatches:
    batches = LogBatches(recipe, table.plan, str(data), 16, max_bad=0.2, **options)
    for split in SPLITS:
        assert batches.log.num_rows(split) == table.num_rows(split)
        if table.num_rows(split):
            of_split = batches.of_split(split)
            assert of_split.log is batches.log
            assert of_split.num_rows == table.num_rows(split)
            assert of_split.batches_per_epoch == Batches(table, 16, split).batches_per_epoch
            assert signatures(of_split) == signatures(Batches(table, 16, split))
    return batches


SPLITS_OF_RECIPES = {
    "none": None,
    "tail": {"by": "tail", "held_out": 0.2, "halve": True},
    "files": {"by": "files", "held_out_files": ["events2.tsv"], "halve": True},
    "time from": {"by": "time", "column": "time", "eval_from": 200, "test_from": 250},
    "time share": {"by": "time", "column": "time", "held_out": 0.2, "halve": True},
    "hash": {"by": "hash", "column": "user", "held_out": 0.4, "halve": True, "seed": 1},
    "last": {"by": "last", "column": "user", "order": "time"},
    "random": {"by": "random", "column": "user", "held_out": 0.3, "halve": True, "seed": 4},
}


@pytest.mark.parametrize("name", SPLITS_OF_RECIPES)
def test_each_split_holds_the_rows_of_the_table_in_order(tmp_path, name):
    data = write_events(tmp_path / "log", 300, files=3, bad_every=40)
    recipe = recipe_of(split=SPLITS_OF_RECIPES[name]) if SPLITS_OF_RECIPES[name] else recipe_of()
    batches = assert_same_rows_in_every_split(recipe, data, table_of(recipe, data, tmp_path / "table"))
    assert len(batches.units) > 5
    assert batches.notes == ()


@pytest.mark.parametrize("name", ["last", "random"])
def test_splits_by_groups_do_not_depend_on_how_many_rows_are_held_at_once(tmp_path, monkeypatch, name):
    monkeypatch.setattr(reduced, "_HELD_BYTES", 100)
    data = write_events(tmp_path / "log", 300, files=3)
    recipe = recipe_of(split=SPLITS_OF_RECIPES[name])
    assert_same_rows_in_every_split(recipe, data, table_of(recipe, data, tmp_path / "table"))


@pytest.mark.parametrize("name", ["criteo-dlrm", "criteo-deeprec"])
def test_criteo_rows_equal_those_of_the_table(tmp_path, monkeypatch, name):
    monkeypatch.setattr(counted, "PIECE_BYTES", 100_000)
    generate("criteo", 3000, 1, tmp_path / "log")
    recipe = load_recipe(name, ["table.order=log"])
    table = table_of(recipe, tmp_path / "log", tmp_path / "table")
    assert_same_rows_in_every_split(recipe, tmp_path / "log", table)


def test_filter_sample_and_join_are_done_on_the_fly(tmp_path):
    data = write_events(tmp_path / "log", 300)
    (data / "users.tsv").write_text("".join(f"u{n}\tcountry{n % 3}\n" for n in range(0, 23, 2)))
    columns = [{"name": "user", "type": "text"}, {"name": "country", "type": "text"}]
    recipe = recipe_of(
        tables={"users": {"files": ["users.tsv"], "columns": columns}},
        rows=[
            {"filter": "item < 14"},
            {"sample": {"fraction": 0.7, "seed": 2}},
            {"join": {"table": "users", "on": "user"}},
            {"filter": "country is null or country <> 'country2'"},
        ],
        features=[{"columns": "country", "steps": ["vocabulary"]}, {"columns": "item", "steps": ["key"]}],
        split=SPLITS_OF_RECIPES["time share"],
    )
    assert_same_rows_in_every_split(recipe, data, table_of(recipe, data, tmp_path / "table"))


@pytest.mark.parametrize(
    ("rows", "word"),
    [
        ({"history": {"columns": ["item"], "by": "user", "order": "time"}}, "history"),
        ({"lag": {"columns": ["price"], "by": "user", "order": "time"}}, "lag"),
        ({"dedupe": {"by": ["user", "item"], "order": "time"}}, "dedupe"),
        ({"negatives": {"label": "click"}}, "negatives"),
    ],
)
def test_operations_that_need_other_rows_ask_for_a_table(tmp_path, rows, word):
    data = write_events(tmp_path / "log", 50)
    recipe = recipe_of(rows=[rows], log={**log_tree(recipe_of()), "user": "user", "item": "item"})
    with pytest.raises(FeatureError, match=rf"has {word}, which needs other rows.*recmill prepare"):
        LogBatches(recipe, table_of(recipe_of(), data, tmp_path / "table").plan, str(data), 10)


def log_tree(recipe: Recipe) -> dict[str, Any]:
    columns = [
        {
            "name": c.name,
            "type": c.type,
            "required": c.required,
            **({"allowed": list(c.allowed)} if c.allowed else {}),
        }
        for c in recipe.log.columns
    ]
    return {"files": list(recipe.log.files), "columns": columns}


@pytest.fixture(scope="module")
def tailed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tailed")
    data = write_events(folder / "log", 400, files=2, bad_every=30)
    recipe = recipe_of(split=SPLITS_OF_RECIPES["hash"])
    return recipe, table_of(recipe, data, folder / "table").plan, str(data)


@examples(10)
@given(batch_size=st.integers(1, 200), stop=st.integers(0, 30), resumed_size=st.integers(1, 200))
def test_a_cursor_goes_on_with_the_very_next_row(tailed, batch_size, stop, resumed_size):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(counted, "PIECE_BYTES", 900)
        whole = list(LogBatches(*tailed, batch_size, max_bad=0.2).read())
        stop = min(stop, len(whole) - 1)
        cursor = whole[stop][1]
        seen = [batch for batch, _ in whole[: stop + 1]]
        if cursor.epoch == 0:
            again = LogBatches(*tailed, resumed_size, max_bad=0.2)
            seen += [batch for batch, _ in again.read(cursor)]
        else:
            assert (stop, cursor) == (len(whole) - 1, Cursor(1))
    assert signature(joined(seen)) == signature(joined([batch for batch, _ in whole]))


def test_every_epoch_has_the_same_rows(tailed):
    batches = LogBatches(*tailed, 64, max_bad=0.2)
    assert signatures(batches, Cursor(3)) == signatures(batches)
    assert list(batches.read(Cursor(3)))[-1][1] == Cursor(4)


def test_a_cursor_of_another_log_is_an_error(tailed):
    batches = LogBatches(*tailed, 64, max_bad=0.2)
    with pytest.raises(ArtifactError, match=r"row 5 of unit 9,999, which its rows do not have now"):
        next(batches.read(Cursor(0, 9999, 5)))


def test_bad_rows_are_left_out_and_counted(tmp_path):
    data = write_events(tmp_path / "log", 300, bad_every=10)
    plan = table_of(recipe_of(), data, tmp_path / "table").plan
    batches = LogBatches(recipe_of(), plan, str(data), 50, max_bad=0.1)
    assert (batches.bad, batches.num_rows) == (30, 300)
    assert dict(batches.tally.reasons) == {"wrong number of fields": 30}
    assert sum(batch.size for batch, _ in batches.read()) == 300


def test_too_many_bad_rows_is_an_error_before_training(tmp_path):
    data = write_events(tmp_path / "log", 300, bad_every=10)
    plan = table_of(recipe_of(), data, tmp_path / "table").plan
    with pytest.raises(TooManyBadRows, match=r"30 of 330 rows \(9.09%\) are bad(.|\n)*events0.tsv at 2"):
        LogBatches(recipe_of(), plan, str(data), 50)


def gzip_in_blocks(text: bytes) -> bytes:
    """Two members, the first one with a block for every 200 bytes; a large file has one for some 100 KB."""
    packer = zlib.compressobj(wbits=31)
    half = len(text) // 2
    blocks = [
        packer.compress(text[at : min(at + 200, half)]) + packer.flush(zlib.Z_BLOCK)
        for at in range(0, half, 200)
    ]
    return b"".join(blocks) + packer.flush() + gzip.compress(text[half:])


def zstd(text: bytes) -> bytes:
    return bytes(pa.compress(text, "zstd", asbytes=True))


PACKED = {
    "gz": ({"files": ["events*.tsv.gz"]}, gzip_in_blocks),
    "zst": ({"files": ["events*.tsv.zst"]}, zstd),
    "quoted": ({"quote": '"'}, bytes),
    "utf-16": ({"encoding": "utf-16"}, lambda text: text.decode().encode("utf-16")),
    "utf-16.gz": (
        {"files": ["events*.gz"], "encoding": "utf-16"},
        lambda text: gzip.compress(text.decode().encode("utf-16")),
    ),
}


def packed(kind: str, data: Path, into: Path, **changes: Any) -> tuple[Recipe, Path]:
    """The same events in files that cannot be cut anywhere."""
    log, pack = PACKED[kind]
    suffix = "." + kind.partition(".")[2] if "." in kind else {"gz": ".gz", "zst": ".zst"}.get(kind, "")
    into.mkdir()
    for file in data.iterdir():
        (into / f"{file.name}{suffix}").write_bytes(pack(file.read_bytes()))
    form = {
        "separator": "\t",
        "header": False,
        "quote": "",
        "encoding": "utf-8",
    }  # not found out: nothing else reads
    return recipe_of(log={**log_tree(recipe_of()), **form, **log}, **changes), into


@pytest.mark.parametrize("name", SPLITS_OF_RECIPES)
def test_splits_of_compressed_files_are_those_of_plain_ones(tmp_path, name):
    data = write_events(tmp_path / "log", 300, files=3, bad_every=40)
    recipe = recipe_of(split=SPLITS_OF_RECIPES[name]) if SPLITS_OF_RECIPES[name] else recipe_of()
    table = table_of(recipe, data, tmp_path / "table")
    recipe, data = packed("gz", data, tmp_path / "packed", split=SPLITS_OF_RECIPES[name])
    batches = assert_same_rows_in_every_split(recipe, data, table)
    assert len(batches.units) > 5


@pytest.mark.parametrize("kind", PACKED)
def test_files_that_cannot_be_cut_anywhere_are_read_in_pieces(tmp_path, kind):
    data = write_events(tmp_path / "log", 300, files=2, bad_every=40)
    table = table_of(recipe_of(), data, tmp_path / "table")
    recipe, data = packed(kind, data, tmp_path / "packed")
    batches = LogBatches(recipe, table.plan, str(data), 64, max_bad=0.2)
    assert [signature(batch) for batch, _ in batches.read()] == signatures(Batches(table, 64))
    assert max(unit.rows for unit in batches.units) < 60
    assert batches.bad == LogBatches(recipe_of(), table.plan, str(tmp_path / "log"), 64, max_bad=0.2).bad
    alone = [signature(batches.unit(number, 0)) for number in range(len(batches.units))]
    backwards = [signature(batches.unit(number, 0)) for number in reversed(range(len(batches.units)))]
    assert backwards[::-1] == alone


@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_a_cursor_inside_a_compressed_file_goes_on_with_the_very_next_row(tmp_path, kind):
    data = write_events(tmp_path / "log", 300)
    plan = table_of(recipe_of(), data, tmp_path / "table").plan
    recipe, data = packed(kind, data, tmp_path / "packed")
    whole = list(LogBatches(recipe, plan, str(data), 64).read())
    assert whole[1][1].unit > 0
    for stop, (_, cursor) in enumerate(whole[:-1], start=1):
        again = LogBatches(recipe, plan, str(data), 64)
        assert signatures(again, cursor) == [signature(batch) for batch, _ in whole[stop:]]


def test_a_gzip_file_is_decompressed_once_to_count_it_and_its_pieces_from_marks(tmp_path, monkeypatch):
    monkeypatch.setattr(counted, "PIECE_BYTES", 40_000)
    data = write_events(tmp_path / "log", 20_000)
    plan = table_of(recipe_of(), data, tmp_path / "table").plan
    recipe, packed_data = packed("gz", data, tmp_path / "packed", split=SPLITS_OF_RECIPES["hash"])
    text_bytes = (data / "events0.tsv").stat().st_size
    text.expansion(open_source(recipe.log, str(packed_data)).files[0])  # looks at the first 4 MB, once
    read = count_decompressed(monkeypatch)
    batches = LogBatches(recipe, plan, str(packed_data), 64)
    assert sum(read) == text_bytes
    read.clear()
    for unit in range(6):
        batches.unit(unit, 0)
    assert (
        sum(read) < 6 * 200_000
    )  # of the first half, which has a block for every 200 bytes; 64 KB are read ahead


def test_only_pieces_that_a_split_cuts_are_counted_again(tmp_path, monkeypatch):
    data = write_events(tmp_path / "log", 3000)
    plan = table_of(recipe_of(), data, tmp_path / "table").plan
    recipe, packed_data = packed("gz", data, tmp_path / "packed", split=SPLITS_OF_RECIPES["tail"])
    again, count_piece = [], counted.CountedLog._count_piece

    def noted(self: counted.CountedLog, piece: counted.Piece) -> Any:
        again.append(piece)
        return count_piece(self, piece)

    monkeypatch.setattr(counted.CountedLog, "_count_piece", noted)
    batches = LogBatches(recipe, plan, str(packed_data), 64)
    assert len(again) == 2 < len(batches.log.pieces) / 20
    assert [batches.log.num_rows(split) for split in SPLITS] == [2400, 300, 300]


def count_decompressed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of text that each call from here on gives."""
    read, readinto = [], gzip_text.GzipText.readinto

    def counted_readinto(self: gzip_text.GzipText, room: memoryview) -> int:
        read.append(readinto(self, room))
        return read[-1]

    monkeypatch.setattr(gzip_text.GzipText, "readinto", counted_readinto)
    return read


@pytest.mark.parametrize("sizes", [(100, 100, 100), (150, 20, 130)])
def test_files_are_interleaved_as_in_the_table(tmp_path, sizes):
    data = tmp_path / "log"
    data.mkdir()
    for number, size in enumerate(sizes):
        rows = [f"u{number}\t{n % 7}\t{n}\t1.5\tt{'x' * (n % 5)}\t{n % 2}\n" for n in range(size)]
        (data / f"events{number}.tsv").write_text("".join(rows))
    recipe = recipe_of(table={"order": "interleave"}, split=SPLITS_OF_RECIPES["tail"])
    batches = assert_same_rows_in_every_split(recipe, data, table_of(recipe, data, tmp_path / "table"))
    assert batches.notes == ()
    assert len(next(iter(batches.units)).piece) == 3


def test_a_shuffle_is_left_to_tables_with_a_note(tmp_path):
    data = write_events(tmp_path / "log", 100)
    plan = table_of(recipe_of(), data, tmp_path / "table").plan
    batches = LogBatches(recipe_of(table={"order": "shuffle"}), plan, str(data), 100)
    assert batches.notes == ("Rows come in log order: table.order = shuffle is for a Table only.",)
    when = batches.layout.numbers.index("when")
    assert next(batches.read())[0].numbers[:, when].tolist() == list(range(100))


def test_compressed_files_are_not_interleaved_and_a_note_says_so(tmp_path):
    data = write_events(tmp_path / "log", 100)
    plan = table_of(recipe_of(), data, tmp_path / "table").plan
    for number in range(2):
        (data / f"day{number}.gz").write_bytes(gzip.compress((data / "events0.tsv").read_bytes()))
    recipe = recipe_of(log={**log_tree(recipe_of()), "files": ["day*.gz"]}, table={"order": "interleave"})
    batches = LogBatches(recipe, plan, str(data), 100)
    assert "interleave needs a Table" in batches.notes[0]
    assert batches.num_rows == 200


def test_a_plan_serves_a_log_that_it_was_not_fitted_on(tmp_path):
    plan = table_of(recipe_of(), write_events(tmp_path / "log", 20), tmp_path / "table").plan
    later = tmp_path / "later"
    later.mkdir()
    (later / "events0.tsv").write_text("unknown user\t3\t1\t1.0\tt1,new\t1\nu1\t3\t1\t1.0\t\t0\n")
    batch, _ = next(LogBatches(recipe_of(), plan, str(later), 10).read())
    assert batch.keys["user"].values[0] == 0 != batch.keys["user"].values[1]
    assert batch.keys["tags"].values[1] == 0
    assert batch.labels["clicked"].tolist() == [1, 0]


def test_only_rows_with_a_label_are_there_when_asked_for(tmp_path):
    data = write_events(tmp_path / "log", 100)
    recipe = recipe_of(split={"by": "time", "column": "time", "held_out": 0.2})
    table = table_of(recipe, data, tmp_path / "table")
    batches = LogBatches(recipe, table.plan, str(data), 16, where="clicked")
    assert batches.num_rows == 27
    assert signatures(batches) == signatures(Batches(table, 16, where="clicked"))
    assert batches.of_split("eval").num_rows == 6
    with pytest.raises(FeatureError, match='No label "bought"; the plan has: clicked'):
        LogBatches(recipe, table.plan, str(data), 16, where="bought")


def test_only_the_named_features_are_computed(tmp_path):
    data = write_events(tmp_path / "log", 100)
    plan = table_of(recipe_of(), data, tmp_path / "table").plan
    batch, _ = next(LogBatches(recipe_of(), plan, str(data), 10, features=["when", "item"]).read())
    assert batch.numbers.shape == (10, 1)
    assert (list(batch.keys), list(batch.labels)) == (["item"], ["clicked"])


def test_a_plan_of_another_log_names_the_column_that_differs(tmp_path):
    data = write_events(tmp_path / "log", 50)
    plan = table_of(recipe_of(), data, tmp_path / "table").plan
    tree = log_tree(recipe_of())
    tree["columns"][1] = {"name": "item", "type": "text"}
    with pytest.raises(
        FeatureError, match=r'"item" of the plan reads column "item" as int, but in .* it is text'
    ):
        LogBatches(recipe_of(log=tree), plan, str(data), 10)


def test_a_plan_that_was_not_fitted_is_an_error(tmp_path):
    data = write_events(tmp_path / "log", 50)
    with pytest.raises(FeatureError, match=r"is not fitted\. Run `recmill prepare` first"):
        LogBatches(recipe_of(), Plan(recipe_of()), str(data), 10)


def test_a_split_without_rows_is_an_error(tmp_path):
    data = write_events(tmp_path / "log", 50)
    batches = LogBatches(recipe_of(), table_of(recipe_of(), data, tmp_path / "table").plan, str(data), 10)
    with pytest.raises(LogError, match="has no eval rows"):
        batches.of_split("eval")
    with pytest.raises(LogError, match='no split "evaluation"; known: train, eval, test'):
        batches.of_split("evaluation")


@pytest.mark.parametrize("name", ["tail", "time share", "last"])
def test_an_empty_log_is_an_error(tmp_path, name):
    plan = table_of(recipe_of(), write_events(tmp_path / "log", 50), tmp_path / "table").plan
    (tmp_path / "events0.tsv").write_text("")
    with pytest.raises(LogError, match=r"The log is empty: events0\.tsv"):
        LogBatches(recipe_of(split=SPLITS_OF_RECIPES[name]), plan, str(tmp_path), 10)


def test_a_log_that_changes_while_it_is_trained_on_is_an_error(tmp_path):
    data = write_events(tmp_path / "log", 50)
    batches = LogBatches(recipe_of(), table_of(recipe_of(), data, tmp_path / "table").plan, str(data), 10)
    file = data / "events0.tsv"
    file.write_text(file.read_text().replace("u1\t", "u1,", 1))
    with pytest.raises(LogError, match=r"events0\.tsv: changed while it was being read"):
        list(batches.read())


def test_a_piece_of_the_log_is_read_in_one_go(tmp_path):
    data = write_events(tmp_path / "log", 300)
    source = open_source(recipe_of().log, str(data))
    units = source.units(parts=7)
    frames = [[batch.frame.height for batch in source.read(unit, 1 << 20)] for unit in units]
    assert [len(heights) for heights in frames] == [1] * 7
    assert sum(heights[0] for heights in frames) == 300


def test_a_reader_that_is_left_early_stops_its_thread(tailed):
    import threading

    before = threading.active_count()
    reading = LogBatches(*tailed, 16, max_bad=0.2).read()
    next(reading)
    reading.close()
    assert threading.active_count() == before


def test_parts_of_a_batch_join_to_the_whole(tailed):
    batch, _ = next(LogBatches(*tailed, 100, max_bad=0.2).read())
    parts = [between(batch, 0, 1), between(batch, 1, 60), between(batch, 60, 60), between(batch, 60, 100)]
    assert signature(joined(parts)) == signature(batch)
    assert np.shares_memory(parts[1].numbers, batch.numbers)


def test_parquet_logs_are_read_too(tmp_path):
    data = write_events(tmp_path / "log", 200)
    names = [column.name for column in recipe_of().log.columns]
    table = table_of(recipe_of(), data, tmp_path / "table")
    rows = pl.read_csv(data / "events0.tsv", separator="\t", has_header=False, new_columns=names)
    rows.write_parquet(data / "events.parquet", row_group_size=50)
    tree = {**log_tree(recipe_of()), "files": ["events.parquet"], "format": "parquet"}
    batches = LogBatches(recipe_of(log=tree), table.plan, str(data), 64, features=["item", "when"])
    assert signatures(batches) == signatures(Batches(table, 64, features=["item", "when"]))
