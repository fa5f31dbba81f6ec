"""Files as people have them: each is read right, or there is a question or an error that says what to do."""

# ruff: noqa: E501 -- one case is one line: a file, and what is found in it

from __future__ import annotations

import gzip
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from recmill.errors import LogError, RecmillError
from recmill.recipe.recipe import Filter
from recmill.stages.init.config import InitConfig
from recmill.stages.init.init import InitResult, init
from recmill.stages.init.roles import Unclear

NUM_ROWS = 24
FIRST_SECOND = 1_600_000_000
Rows = list[tuple[Any, ...]]


def rows(
    time: Callable[[int], Any] = lambda n: FIRST_SECOND + 3600 * n,
    rating: Callable[[int], Any] = lambda n: 1 + n % 5,
) -> Rows:
    """user, item, rating, time"""
    return [(f"u{n % 4}", f"i{n % 7}", rating(n), time(n)) for n in range(NUM_ROWS)]


def text(
    table: Sequence[Sequence[Any]], header: str | None = "user,item,rating,time", separator: str = ","
) -> str:
    lines = [separator.join(map(str, row)) for row in table]
    return "\n".join(([] if header is None else [header.replace(",", separator)]) + lines) + "\n"


def day(n: int) -> datetime:
    return datetime(2020, 1, 15) + timedelta(hours=n)


def written(format: str) -> Callable[[int], str]:
    return lambda n: day(n).strftime(format)


def quoted(table: Rows, escape: str) -> str:
    """Titles of items with a quote and a separator in them."""
    lines = [f'"{u}","{i}","{r}","say {escape}"hi{escape}", {t}"' for u, i, r, t in table]
    return '"user","item","rating","remark"\n' + "\n".join(lines) + "\n"


GOOD = {"user": "user", "item": "item", "time": "time", "positive": "rating >= 4", "header": True}
PLAIN = text(rows())

# A name, the events' content, flags, and what must be found.
GUESSED: list[tuple[str, str | bytes, dict[str, Any], dict[str, Any]]] = [
    ("comma", PLAIN, {}, {**GOOD, "separator": ",", "encoding": "utf-8", "quote": "", "kind": "time"}),
    ("tab", text(rows(), separator="\t"), {}, {**GOOD, "separator": "\t"}),
    ("semicolon", text(rows(), separator=";"), {}, {**GOOD, "separator": ";"}),
    ("pipe", text(rows(), separator="|"), {}, {**GOOD, "separator": "|"}),
    ("double colon", text(rows(), separator="::"), {}, {**GOOD, "separator": "::"}),
    ("control character", text(rows(), separator="\x01"), {}, {**GOOD, "separator": "\x01"}),
    ("comma and space", text(rows(), separator=", "), {}, {**GOOD, "separator": ", "}),
    ("space", text(rows(), separator=" "), {}, {**GOOD, "separator": " "}),
    ("windows line ends", PLAIN.replace("\n", "\r\n"), {}, {**GOOD, "separator": ","}),
    ("no newline at the end", PLAIN.rstrip("\n"), {}, GOOD),
    ("byte order mark", b"\xef\xbb\xbf" + PLAIN.encode(), {}, {**GOOD, "encoding": "utf-8"}),
    ("utf-16", PLAIN.encode("utf-16"), {}, {**GOOD, "encoding": "utf-16"}),
    ("utf-16 big endian", b"\xfe\xff" + PLAIN.encode("utf-16-be"), {}, {**GOOD, "encoding": "utf-16"}),
    ("latin-1", PLAIN.replace("i3", "caf\xe9").encode("latin-1"), {}, {**GOOD, "encoding": "latin-1"}),
    ("utf-8 letters", PLAIN.replace("i3", "caf\xe9"), {}, {**GOOD, "encoding": "utf-8"}),
    ("doubled quotes", quoted(rows(), '"'), {}, {"quote": '"', "escape": "", "time": None}),
    ("escaped quotes", quoted(rows(), "\\"), {}, {"quote": '"', "escape": "\\", "time": None}),
    ("quoted header", '"user";"item";"rating";"time"\n' + text(rows(), None, ";"), {}, {**GOOD, "quote": '"'}),
    ("spaces in the header", PLAIN.replace("user,item", " user , item "), {}, GOOD),
    ("capitals and signs", PLAIN.replace("user,item", "User-ID,Movie Id"), {}, {"user": "User-ID", "item": "Movie Id"}),
    ("no header, by number", text(rows(), None), {"user": "1", "item": "2"}, {**GOOD, "header": False}),
    ("no header, swapped", text([(i, u, r, t) for u, i, r, t in rows()], None), {"user": "2", "item": "1"}, {**GOOD, "header": False}),
    ("days", text(rows(written("%Y-%m-%d"))), {}, {**GOOD, "kind": "time"}),
    ("iso times", text(rows(lambda n: day(n).isoformat() + "Z")), {}, {**GOOD, "kind": "time"}),
    ("times with a space", text(rows(lambda n: str(day(n)))), {}, {**GOOD, "kind": "time", "format": ""}),
    ("milliseconds", text(rows(lambda n: (FIRST_SECOND + n) * 1000)), {}, {**GOOD, "kind": "time"}),
    ("microseconds", text(rows(lambda n: (FIRST_SECOND + n) * 10**6)), {}, {**GOOD, "kind": "time"}),
    ("days first", text(rows(written("%d/%m/%Y %H:%M"))), {}, {**GOOD, "format": "%d/%m/%Y %H:%M"}),
    ("months first", text(rows(written("%m/%d/%Y"))), {}, {**GOOD, "format": "%m/%d/%Y"}),
    ("given format", text(rows(lambda n: f"0{1 + n % 9}.03.2020")), {"time_format": "%d.%m.%Y"}, {**GOOD, "format": "%d.%m.%Y"}),
    ("numbers that only order", PLAIN.replace("time", "position"), {"time": "position"}, {"time": "position", "split": "last"}),
    ("no time wanted", PLAIN, {"time": "none"}, {"time": None, "split": "random"}),
    ("ids alone", text([row[:2] for row in rows()], "user,item"), {}, {"time": None, "positive": None, "split": "random"}),
    ("ids and time", text([(*row[:2], row[3]) for row in rows()], "user,item,time"), {}, {"time": "time", "positive": None}),
    ("clicks", text(rows(rating=lambda n: int(n % 3 == 0)), "user,item,clicked,time"), {}, {"positive": "clicked = 1", "ranks": True, "split": "time"}),
    ("true and false", text(rows(rating=lambda n: n % 3 == 0), "user,item,liked,time"), {}, {"positive": "liked = true"}),
    ("ten stars", text(rows(rating=lambda n: 1 + n % 10)), {}, {"positive": "rating >= 8"}),
    ("half stars", text(rows(rating=lambda n: 0.5 + n % 10 / 2)), {}, {"positive": "rating >= 4"}),
    ("zero is not rated", text(rows(rating=lambda n: (n % 2) * (n % 10))), {}, {"positive": None}),
    ("kinds of events", text(rows(rating=lambda n: ("view", "cart")[n % 2]), "user,item,event,time"), {}, {"positive": None}),
    ("impressions", text(rows(rating=lambda n: ("impression", "click")[n % 2]), "user,item,event,time"), {}, {"positive": "event not in ('impression')"}),
    ("given positives", PLAIN, {"positive": "rating > 2"}, {**GOOD, "positive": "rating > 2"}),
    ("a column without a name", text([(n, *row) for n, row in enumerate(rows())], ",user,item,rating,time"), {}, GOOD),
    ("json lines", pl.DataFrame(rows(), schema=["user", "item", "rating", "time"], orient="row").write_ndjson(), {}, {**GOOD, "header": False, "format_of_file": "jsonl"}),
    ("wide", text([(*row, *range(300)) for row in rows()], "user,item,rating,time," + ",".join(f"x{n}" for n in range(300))), {}, GOOD),
    ("a backslash at the end of a field", "user,item,path\n" + "".join(f'"u{n % 4}","i{n % 7}","C:\\{n}\\"\n' for n in range(NUM_ROWS)), {}, {"quote": '"', "escape": ""}),
    ("ids as pandas writes them", text([(f"{n % 4}.0" if n % 5 else "", n % 7) for n in range(NUM_ROWS)], "user,item"), {}, {"user": "user", "filters": ["user is not null"]}),
    ("no header, a small category", text([(n % 4, n % 7, n % 3, FIRST_SECOND + n) for n in range(NUM_ROWS)], None), {"user": "1", "item": "2"}, {"positive": None, "time": "time"}),
    ("outcomes beside the click", text([(*row[:2], n % 2, n % 3 % 2, n % 5) for n, row in enumerate(rows())], "user,item,is_click,is_like,device"), {}, {"positive": "is_click = 1", "features": ["user", "item", "device"]}),
    ("rows without a user", PLAIN.replace("u3,", ","), {}, {**GOOD, "filters": ["user is not null"]}),
    ("a bad row, allowed", PLAIN + "u1,i1\n", {"max_bad": 0.1}, GOOD),
]  # fmt: skip

# A name, the events' content, and a question's flag or an error's words.
REFUSED: list[tuple[str, str | bytes, str]] = [
    ("empty", "", "is empty"),
    ("blank", "\n\n  \n", "is empty"),
    ("a header alone", "user,item,rating,time\n", "no rows"),
    ("no header", text(rows(), None), "--user: 1 (u0, u1, u2, ...), 2 (i0, i1, i2, ...)"),
    ("names or values", "anna,alien\nbert,brazil\ncarl,casablanca\n", "--header: yes, no"),
    ("two users", PLAIN.replace("item", "uid"), "--user: user, uid"),
    ("no item", PLAIN.replace("item", "thing"), "--item: thing"),
    ("a header twice", PLAIN.replace("rating", "user"), 'Left out: "user" (occurs more than once)'),
    ("one user", text([("NA", *row[1:]) for row in rows()]), "\"user\" is always 'NA': which column is the user?"),
    ("days or months first", text(rows(lambda n: f"0{1 + n % 9}/03/2020")), "--time-format: %d/%m/%Y, %m/%d/%Y"),
    ("two times", text([(*row, row[3]) for row in rows()], "user,item,rating,time,timestamp"), "--time: time, timestamp, none"),
    ("two labels", text([(*row, 1) for row in rows()], "user,item,rating,time,liked"), "--positive"),
    ("views and clicks", text(rows(rating=lambda n: ("view", "click")[n % 2]), "user,item,event,time"), "--positive: \"event <> 'view'\", all"),
    ("a rating in words", text(rows(rating=lambda n: "good")), '"rating" is no number'),
    ("no separator", "user\n" + "\n".join(f"u{n}" for n in range(20)), "--separator"),
    ("ragged", "user,item\nu1,i1,i2\nu2\nu3,i1,i5,i6\n", "no separator gives its lines the same number of fields"),
    ("a bad row", PLAIN + "u1,i1\n", "1 of 25 rows are bad; the first"),
    ("bytes", b"\x00\x01\x02user,item\xff" * 50, "is not text"),
    ("a zip archive", b"PK\x03\x04" + b"0" * 100, "zip archive or an Excel sheet"),
    ("gzip without its suffix", gzip.compress(PLAIN.encode()), "Rename it to events.csv.gz"),
    ("a JSON array", '[{"user": 1, "item": 2}]', "is a JSON array"),
    ("no JSON", "{'user': 1, 'item': 2}\n" * 3, "not a JSON object"),
]  # fmt: skip


def write(path: Path, content: str | bytes) -> str:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


def found_in(result: InitResult) -> dict[str, Any]:
    """What a recipe says, under the keys of the table above."""
    recipe = result.recipe
    log = recipe.log
    time = next((column for column in log.columns if column.name == log.time), None)
    label = next((label for label in recipe.labels if label.name == "positive"), None)
    return {
        **{key: getattr(log, key) for key in ("user", "item", "time")},
        **vars(log.text),
        "format_of_file": log.format,
        "kind": None if time is None else time.type,
        "format": None if time is None else time.format,
        "positive": None if label is None else label.steps[0].sql,  # type: ignore[attr-defined]
        "split": recipe.split and recipe.split.by,
        "filters": [operation.sql for operation in recipe.rows if isinstance(operation, Filter)],
        "features": [feature.name for feature in recipe.features],
        "ranks": recipe.ranking is not None,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("content", "flags", "expected"), [pytest.param(*case[1:], id=case[0]) for case in GUESSED]
)
def test_a_file_is_read_as_what_it_is(
    content: str | bytes, flags: dict[str, Any], expected: dict[str, Any], tmp_path: Path
) -> None:
    result = init([write(tmp_path / "events.csv", content)], InitConfig(**flags))
    found = found_in(result)
    assert {key: found[key] for key in expected} == expected
    assert len(result.lines) <= 18


@pytest.mark.parametrize(("content", "words"), [pytest.param(*case[1:], id=case[0]) for case in REFUSED])
def test_what_a_file_does_not_tell_is_a_question_or_an_error(
    content: str | bytes, words: str, tmp_path: Path
) -> None:
    with pytest.raises(RecmillError) as raised:
        init([write(tmp_path / "events.csv", content)], InitConfig())
    assert words in str(raised.value)


# Parquet and compressed files


def test_parquet_is_known_by_its_bytes_and_has_its_own_types(tmp_path: Path) -> None:
    frame = pl.DataFrame(rows(day), schema=["user", "item", "rating", "time"], orient="row")
    frame.with_columns(
        pl.Series("tags", [["a", "b"]] * NUM_ROWS), pl.col("user").cast(pl.Categorical)
    ).write_parquet(tmp_path / "events.csv")
    found = found_in(init([str(tmp_path / "events.csv")], InitConfig()))
    assert {key: found[key] for key in ("user", "time", "positive", "kind", "format_of_file")} == {
        "user": "user", "time": "time", "positive": "rating >= 4", "kind": "time", "format_of_file": "parquet",
    }  # fmt: skip


def test_whole_numbers_that_pandas_wrote_as_floats_are_ids(tmp_path: Path) -> None:
    pl.DataFrame({"user": [1.0, 2.0, None, 1.0], "item": [5, 6, 7, 8]}).write_parquet(tmp_path / "e.parquet")
    recipe = init([str(tmp_path / "e.parquet")], InitConfig()).recipe
    assert [column.type for column in recipe.log.columns] == ["int", "int"]


def test_gzip_is_read_by_its_suffix(tmp_path: Path) -> None:
    path = tmp_path / "events.csv.gz"
    path.write_bytes(gzip.compress(PLAIN.encode()))
    found = found_in(init([str(path)], InitConfig()))
    assert {key: found[key] for key in GOOD} == GOOD


def test_an_empty_parquet_file_is_an_error(tmp_path: Path) -> None:
    pl.DataFrame({"user": [], "item": []}).write_parquet(tmp_path / "e.parquet")
    with pytest.raises(LogError, match="has no rows"):
        init([str(tmp_path / "e.parquet")], InitConfig())


# files of items and users


ITEMS = [(f"i{n}", f"Title {n}, the {n}th", "Action|Drama" if n % 2 else "Drama|Comedy") for n in range(7)]


def test_items_are_joined_by_their_column_and_lists_are_split(tmp_path: Path) -> None:
    events = write(tmp_path / "events.csv", PLAIN)
    items = write(tmp_path / "items.tsv", text(ITEMS, "item,name,genres", "\t"))
    result = init([events, items], InitConfig())
    genres = next(feature for feature in result.recipe.features if feature.name == "genres")
    assert genres.of == "item"
    assert genres.steps[0].separator == "|"  # type: ignore[attr-defined]
    assert result.recipe.retrieval is not None
    assert result.recipe.retrieval.item == ("item", "genres")
    assert result.titles == ("name",)


def test_without_headers_the_keys_of_other_files_tell_users_and_items(tmp_path: Path) -> None:
    log = [(n % 40 + 1, n % 7 + 1, 1 + n % 5, FIRST_SECOND + n) for n in range(200)]
    events = write(tmp_path / "ratings.dat", text(log, None, "::"))
    movies = write(tmp_path / "movies.dat", text([(n, f"Film {n}", "A|B") for n in range(1, 9)], None, "::"))
    users = write(
        tmp_path / "users.dat", text([(n, "FM"[n % 2], 20 + n % 3) for n in range(1, 41)], None, "::")
    )
    recipe = init([events, movies, users], InitConfig()).recipe
    assert [column.name for column in recipe.log.columns] == ["user", "item", "rating", "time"]
    assert {name: table.columns[0].name for name, table in recipe.tables.items()} == {
        "items": "item",
        "users": "user",
    }
    assert [column.name for column in recipe.tables["items"].columns] == ["item", "title", "item_c3"]


def test_a_file_that_shares_no_column_is_an_error(tmp_path: Path) -> None:
    events = write(tmp_path / "events.csv", PLAIN)
    items = write(tmp_path / "items.csv", text(ITEMS, "sku,name,genres", "\t"))
    with pytest.raises(LogError, match='"sku" seems to be the item, which the log calls "item"'):
        init([events, items], InitConfig())


def test_the_id_of_a_file_named_for_its_items_is_what_the_log_calls_otherwise(tmp_path: Path) -> None:
    log = [(n % 4, f"i{n % 7}", n) for n in range(NUM_ROWS)]
    events = write(tmp_path / "plays.csv", text(log, "userID,artistID,weight"))
    artists = write(tmp_path / "artists.tsv", text(ITEMS, "id,name,genres", "\t"))
    result = init([events, artists], InitConfig())
    key = result.recipe.tables["items"].columns[0]
    assert (key.name, key.in_file) == ("artistID", "id")
    assert "joined by id, which the log calls artistID" in "\n".join(result.lines)
    tags = write(tmp_path / "tags.tsv", text(ITEMS, "id,name,genres", "\t"))
    with pytest.raises(LogError, match='"id" seems to be the item, which the log calls "artistID"'):
        init([events, tags], InitConfig())


def test_ids_that_occur_once_share_a_vector_when_they_are_many(tmp_path: Path) -> None:
    log = [(n % 1000, n if n < 40_000 else n % 20_000) for n in range(80_000)]
    recipe = init([write(tmp_path / "e.csv", text(log, "user,item"))], InitConfig()).recipe
    steps = {feature.columns[0]: feature.steps[0] for feature in recipe.features}
    assert [steps[name].min_count for name in ("user", "item")] == [1, 1]  # type: ignore[attr-defined]
    log = [(n % 1000, n if n < 40_000 else n % 20_000 + 40_000) for n in range(80_000)]
    recipe = init([write(tmp_path / "e.csv", text(log, "user,item"))], InitConfig()).recipe
    steps = {feature.columns[0]: feature.steps[0] for feature in recipe.features}
    assert [steps[name].min_count for name in ("user", "item")] == [1, 2]  # type: ignore[attr-defined]


def test_an_item_that_stands_twice_is_an_error(tmp_path: Path) -> None:
    events = write(tmp_path / "events.csv", PLAIN)
    items = write(tmp_path / "items.tsv", text([*ITEMS, ITEMS[0]], "item,name,genres", "\t"))
    with pytest.raises(LogError, match="such as 'i0'; a file of items has one row for each"):
        init([events, items], InitConfig())


def test_ids_that_are_texts_in_one_file_are_texts_in_both(tmp_path: Path) -> None:
    events = write(tmp_path / "events.csv", text([(n % 3, n % 5) for n in range(20)], "user,item"))
    items = write(tmp_path / "items.csv", text([(f"{n:02}", "abc"[n % 3]) for n in range(5)], "item,brand"))
    recipe = init([events, items], InitConfig()).recipe
    assert [recipe.log.columns[1].type, recipe.tables["items"].columns[0].type] == ["text", "text"]


def test_a_question_takes_an_option_by_its_number() -> None:
    question = Unclear("which?", "user", ("1 (u0, u1, ...)", "2 (i0, i1, ...)"))
    assert question.answer("2") == "2"
    assert Unclear("which?", "positive", ('"rating >= 4"', "all")).answer("1") == "rating >= 4"
    assert Unclear("which?", "time", ("time", "ts", "none")).answer("ts") == "ts"
