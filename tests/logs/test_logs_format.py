"""What a recipe leaves open about delimited text follows from the first bytes of its files."""

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from log_reading import columns_of, read_all
from shop import FEW_STEPS, Shop

from recmill.artifacts.checkpoint.checkpoint import Checkpoint
from recmill.dataset.table import Table
from recmill.errors import LogError
from recmill.logs.base import open_source
from recmill.recipe.defaults import is_resolution
from recmill.recipe.load import load_recipe
from recmill.recipe.recipe import Log, TextFormat
from recmill.stages.train.source import LogData
from recmill.synthetic.generate import generate

Run = Callable[..., tuple[int, str, str]]

COLUMNS = columns_of(user="text", item="int", title="text")
ROWS = [(f"u{n % 5}", n, f"film {n}") for n in range(30)]


def text_of(rows: list[Any], separator: str, header: str = "") -> str:
    return header + "".join(separator.join(map(str, row)) + "\n" for row in rows)


def opened(folder: Path, text: str | bytes, **given: Any) -> Any:
    content = text.encode() if isinstance(text, str) else text
    (folder / "events.csv").write_bytes(content)
    return open_source(Log(("events.csv",), given.pop("columns", COLUMNS), **given), str(folder))


QUOTED = [(f'"{u}"', i, f'"{t}, or ""not"""') for u, i, t in ROWS]
ESCAPED = [(f'"{u}"', i, f'"{t}, or \\"not\\""') for u, i, t in ROWS]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (text_of(ROWS, "\t"), TextFormat()),
        (text_of(ROWS, ","), TextFormat(",")),
        (text_of(ROWS, "::"), TextFormat("::")),
        (text_of(ROWS, "||"), TextFormat("||")),
        (text_of(ROWS, ", "), TextFormat(", ")),
        (text_of(ROWS, "\x01"), TextFormat("\x01")),
        (text_of(ROWS, ";", "user;item;title\n"), TextFormat(";", True)),
        (
            text_of([(n, *row) for n, row in enumerate(ROWS)], "|", "id|user|item|title\n"),
            TextFormat("|", True),
        ),
        (text_of(QUOTED, ","), TextFormat(",", False, '"')),
        (text_of(QUOTED, ",", "user,item,title\r\n"), TextFormat(",", True, '"')),
        (text_of(ESCAPED, ","), TextFormat(",", False, '"', "\\")),
        # A title that begins with quotes is not a quoted field.
        (text_of([*ROWS, ("u1", 99, '"Great Performances" Cats')], "::"), TextFormat("::")),
        (text_of(ROWS, "\t").encode("utf-16"), TextFormat(encoding="utf-16")),
        (b"\xef\xbb\xbf" + text_of(ROWS, ",", "user,item,title\n").encode(), TextFormat(",", True)),
        ("", TextFormat()),
    ],
)
def test_format_is_what_the_columns_fit(tmp_path: Path, text: str | bytes, expected: TextFormat) -> None:
    source = opened(tmp_path, text)
    assert source.spec.text == expected
    found = read_all(source)
    assert not found.bad
    assert len(found.rows) >= len(ROWS) or not text


def test_words_of_a_text_are_no_header_and_separators_in_it_divide_no_numbers(tmp_path: Path) -> None:
    rows = text_of([(f"text {number}", number) for number in range(20)], "\t")
    source = opened(tmp_path, rows, columns=columns_of(text="text", number="int"))
    assert source.spec.text == TextFormat("\t")
    assert not read_all(source).bad


def test_what_is_given_is_not_guessed(tmp_path: Path) -> None:
    found = opened(tmp_path, text_of(QUOTED, ","), quote="", separator=",", header=False).spec.text
    assert found == TextFormat(",")
    found = opened(tmp_path, text_of(ROWS, ",", "user,item,title\n"), header=False).spec.text
    assert found == TextFormat(",", header=False)


@pytest.mark.parametrize(
    ("text", "given", "message"),
    [
        (
            text_of([("a,5", "b")] * 20, ";"),
            {"columns": columns_of(x="text", y="text")},
            r'events\.csv: "," and ";" both divide its lines into 2 fields; .* Set separator in the recipe',
        ),
        (
            text_of(ROWS, ",", "who,what,how\n"),
            {},
            r'is the first line a header\? It is "who, what, how", and no name in it is a column.*header = false',
        ),
        (
            text_of([(f'"{u}"', i, f'"{t}"') for u, i, t in ROWS] + [('"a" b', 1, "c")], ","),
            {},
            "most fields that begin with a quote end with one, but not all. Set quote",
        ),
        (
            text_of(ROWS, ",", "User,Item,Title\n"),
            {},
            r'no column "user"; the file has: User, Item, Title\. .* add in_file = "User"',
        ),
    ],
    ids=["separator", "header", "quote", "other spelling"],
)
def test_what_is_ambiguous_is_an_error_that_names_the_key(
    tmp_path: Path, text: str, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(LogError, match=message):
        read_all(opened(tmp_path, text, **given))


def test_compressed_files_and_empty_first_files_are_looked_into(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"")
    (tmp_path / "b.csv.gz").write_bytes(gzip.compress(text_of(ROWS, ";", "user;item;title\n").encode()))
    source = open_source(Log(("a.csv", "b.csv"), COLUMNS), str(tmp_path))
    assert source.spec.text == TextFormat(";", True)
    assert read_all(source).num_rows == len(ROWS)


OPEN = [
    f"{where}.{key}="
    for where in ("log", "tables.users", "tables.items")
    for key in ("separator", "header", "quote")
]


def test_stages_agree_on_a_format_that_the_recipe_leaves_open(
    recmill: Run, shop: Shop, tmp_path: Path
) -> None:
    flags = [word for key in OPEN for word in ("--set", key)]
    code, said, _ = recmill("check", "quickstart", "--data", shop.log, *flags)
    assert (code, ' separator ",", header' in said) == (0, True)
    table = tmp_path / "table"
    assert recmill("prepare", "quickstart", "--data", shop.log, "--into", table, *flags)[0] == 0
    log, expected = Table.open(table).recipe.log, Table.open(shop.table).recipe.log
    assert (log, Table.open(table).digest) == (expected, Table.open(shop.table).digest)
    checkpoint = tmp_path / "checkpoint"
    trained = ["--into", checkpoint, "--only", "ranking", *FEW_STEPS[:2], "--threads", "1", *flags]
    assert recmill("train", "quickstart", "--table", table, *trained)[0] == 0
    assert Checkpoint.open(checkpoint).recipe.log == expected
    assert is_resolution(Checkpoint.open(checkpoint).recipe, load_recipe("quickstart", [*OPEN, FEW_STEPS[1]]))


def test_training_from_a_log_stores_what_was_found(tmp_path: Path) -> None:
    generate("criteo", 300, 0, tmp_path)
    source = LogData(load_recipe("criteo-deeprec", ["log.separator="]), str(tmp_path))
    assert source.recipe.log == source.plan.recipe.log
    assert None not in (source.recipe.log.separator, source.recipe.log.header, source.recipe.log.quote)
