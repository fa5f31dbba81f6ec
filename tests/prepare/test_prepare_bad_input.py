"""Bad rows are counted and set aside; bad logs are errors that say what to do."""

from __future__ import annotations

import base64
import gzip
import json

import pytest
from logs_and_recipes import events_recipe, prepared, rows_of, write_events

from recmill.dataset.loader import Batches
from recmill.dataset.table import Table
from recmill.errors import ArtifactError, FeatureError, LogError, TooManyBadRows

BAD = [
    (b"u1\t1\t5\n", "wrong number of fields"),
    (b"u1\tabc\t6\t1.0\t0\n", "not an integer"),
    (b"u1\t3\t7\tcheap\t0\n", "not a number"),
    (b"u\xff\t3\t8\t1.0\t1\n", "invalid UTF-8"),
    (b"u1\t3\t9\t1.0\t2\n", "value not allowed"),
    (b"u1\t3\t9\t1.0\t\n", "missing required value"),
]


def spoiled(folder, num_good):
    data = write_events(folder, num_good)
    file = data / "events0.tsv"
    lines = file.read_bytes().splitlines(keepends=True)
    for place, (line, _) in enumerate(BAD):
        lines.insert(place * 7 + 3, line)
    file.write_bytes(b"".join(lines))
    return data


@pytest.mark.parametrize("partitions", [1, 9])
def test_bad_rows_are_counted_by_reason_and_set_aside_with_their_place(tmp_path, partitions):
    data = spoiled(tmp_path / "log", 200)
    found = prepared(events_recipe(), data, tmp_path / "table", max_bad=0.1, partitions=partitions)
    assert dict(found.tally.reasons) == {reason: 1 for _, reason in BAD}
    assert found.tally.rows == 206
    assert found.table.num_rows() == 200
    records = [
        json.loads(line)
        for file in sorted((tmp_path / "table" / "rejected").iterdir())
        for line in file.read_text().splitlines()
    ]
    content = (data / "events0.tsv").read_bytes()
    texts = [base64.b64decode(r["base64"]) if "base64" in r else r["text"].encode() for r in records]
    assert sorted(texts) == sorted(line.rstrip(b"\n") for line, _ in BAD)
    for record, text in zip(records, texts, strict=True):
        assert content[record["offset"] : record["offset"] + len(text)] == text


def test_good_rows_are_not_changed_by_their_bad_neighbours(tmp_path):
    clean = prepared(events_recipe(), write_events(tmp_path / "clean", 200), tmp_path / "a").table
    dirty = prepared(events_recipe(), spoiled(tmp_path / "dirty", 200), tmp_path / "b", max_bad=0.1).table
    assert rows_of(clean).equals(rows_of(dirty))


def test_too_many_bad_rows_is_an_error_that_shows_the_first_ones(tmp_path):
    data = spoiled(tmp_path / "log", 200)
    with pytest.raises(TooManyBadRows) as caught:
        prepared(events_recipe(), data, tmp_path / "table")
    message = str(caught.value)
    assert "6 of 206 rows (2.91%) are bad, more than --max-bad 0.10% allows" in message
    assert "1 rows: not a number" in message
    assert "events0.tsv at" in message
    with pytest.raises(ArtifactError):
        Table.open(tmp_path / "table")


def test_after_raising_max_bad_the_same_folder_works(tmp_path):
    data = spoiled(tmp_path / "log", 200)
    with pytest.raises(TooManyBadRows):
        prepared(events_recipe(), data, tmp_path / "table")
    assert prepared(events_recipe(), data, tmp_path / "table", max_bad=0.05).table.num_rows() == 200


def test_an_empty_log_is_an_error(tmp_path):
    (tmp_path / "events0.tsv").write_text("")
    with pytest.raises(LogError, match=r"The log is empty: events0\.tsv"):
        prepared(events_recipe(), tmp_path, tmp_path / "table")


def test_a_log_of_nothing_but_bad_rows_is_an_error_whatever_max_bad_says(tmp_path):
    (tmp_path / "events0.tsv").write_text("nonsense\n" * 5)
    with pytest.raises(TooManyBadRows):
        prepared(events_recipe(), tmp_path, tmp_path / "table", max_bad=1.0)


def test_a_truncated_gzip_is_an_error_and_no_table_appears(tmp_path):
    packed = gzip.compress((write_events(tmp_path / "log", 5000) / "events0.tsv").read_bytes())
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "events0.tsv.gz").write_bytes(packed[: len(packed) // 2])
    recipe = events_recipe(
        log={"files": ["*.gz"], "columns": [{"name": "user", "type": "text"}]},
        labels=[],
        features=[{"columns": "user", "steps": ["vocabulary"]}],
        table={},
    )
    with pytest.raises(LogError, match=r"events0\.tsv\.gz"):
        prepared(recipe, tmp_path / "cut", tmp_path / "table")
    with pytest.raises(ArtifactError, match="incomplete"):
        Table.open(tmp_path / "table")


def test_a_missing_file_names_what_is_there(tmp_path):
    (tmp_path / "other.csv").write_text("x")
    with pytest.raises(LogError, match=r"other\.csv"):
        prepared(events_recipe(), tmp_path, tmp_path / "table")


def test_a_directory_where_a_file_should_be_is_an_error(tmp_path):
    (tmp_path / "events0.tsv").mkdir()
    with pytest.raises(LogError, match="directory"):
        prepared(events_recipe(), tmp_path, tmp_path / "table")


def test_a_missing_label_says_how_to_set_rows_aside(tmp_path):
    columns = [{"name": "item", "type": "int"}, {"name": "click", "type": "int"}]
    recipe = events_recipe(
        log={"files": ["log.tsv"], "columns": columns},
        features=[{"columns": "item", "steps": ["vocabulary"]}],
        table={},
    )
    (tmp_path / "log.tsv").write_text("1\t1\n2\t\n")
    with pytest.raises(FeatureError, match=r'Label "clicked" is missing in 1 of 2 rows.*required = true'):
        prepared(recipe, tmp_path, tmp_path / "table")


def test_a_split_that_leaves_no_training_rows_is_an_error(tmp_path):
    data = write_events(tmp_path / "log", 20)
    recipe = events_recipe(split={"by": "time", "column": "time", "eval_from": -1})
    with pytest.raises(LogError, match="No rows are left to train on"):
        prepared(recipe, data, tmp_path / "table")


def test_a_side_table_with_a_key_twice_is_an_error(tmp_path):
    data = write_events(tmp_path / "log", 20)
    (data / "users.tsv").write_text("u1\tFR\nu1\tDE\n")
    columns = [{"name": "user", "type": "text"}, {"name": "country", "type": "text"}]
    recipe = events_recipe(
        tables={"users": {"files": ["users.tsv"], "columns": columns}},
        rows=[{"join": {"table": "users", "on": "user"}}],
    )
    with pytest.raises(LogError, match=r'"user" is not unique, such as .u1'):
        prepared(recipe, data, tmp_path / "table")


RATINGS = {
    "log": {
        "files": ["log.tsv"],
        "user": "user",
        "item": "item",
        "columns": [
            {"name": "user, item, rating", "type": "int", "required": True},
        ],
    },
    "labels": [{"name": "liked", "columns": "rating"}],
    "features": [{"columns": "user, item", "steps": ["vocabulary"]}],
    "table": {},
}
TOWERS = {"label": "liked", "user": "user", "item": "item", "train": {"batch_size": 2}}


@pytest.mark.parametrize(
    "model",
    [{"retrieval": TOWERS}, {"ranking": {"model": "wide_deep", "label": "liked"}}],
)
def test_a_rating_without_a_threshold_is_an_error_with_the_values_found(tmp_path, model):
    (tmp_path / "log.tsv").write_text("1\t1\t1\n1\t2\t5\n2\t1\t5\n2\t2\t3\n")
    expected = (
        r'Label "liked" is neither 0 nor 1 in 3 of 4 rows: 1 in 1, 3 in 1, 5 in 2; models learn labels of 0 and 1\. '
        r"Write down what counts as 1 in its steps, such as .* \"rating >= 4\""
    )
    with pytest.raises(FeatureError, match=expected):
        prepared(events_recipe(**RATINGS, **model), tmp_path, tmp_path / "table")


def test_a_model_that_comes_after_the_table_does_not_learn_from_one_star(tmp_path):
    (tmp_path / "log.tsv").write_text("1\t1\t1\n1\t2\t5\n2\t1\t5\n2\t2\t3\n")
    table = prepared(
        events_recipe(**RATINGS), tmp_path, tmp_path / "table"
    ).table  # a label that nothing learns
    with pytest.raises(FeatureError, match='Label "liked" is neither 0 nor 1 in 3 of 4 rows'):
        Batches(table, 2, where="liked")
