"""A file of another form than the recipe says: the error names the keys to change."""

from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., tuple[int, str, str]]
FIXTURES = Path(__file__).parents[1] / "fixtures"

RECIPE = """
name = "mine"
[log]
files = ["events.csv"]
separator = "\\t"
header = false
quote = ""
columns = [
  { name = "user", type = "text" },
  { name = "item", type = "text" },
  { name = "clicked", type = "int", allowed = [0, 1], required = true },
]
[split]
by = "hash"
column = "user"
held_out = 0.2
[[features]]
columns = ["user", "item"]
steps = [{ vocabulary = {} }]
[[labels]]
columns = "clicked"
[ranking]
model = "dlrm"
label = "clicked"
"""
ROWS = [(f"u{i % 7}", f"i{i % 11}", i % 2) for i in range(60)]


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("".join(f"{u},{i},{c}\n" for u, i, c in ROWS), 'set separator = ","'),
        (
            "user,item,clicked\r\n" + "".join(f"{u},{i},{c}\r\n" for u, i, c in ROWS),
            'set separator = ",", header = true',
        ),
        (
            "Id;user;item;Clicked\n" + "".join(f'{n};"{u}";"{i}";{c}\n' for n, (u, i, c) in enumerate(ROWS)),
            'set separator = ";", header = true, quote = "\\""; its header has no column clicked, '
            'but has "Id, user, item, Clicked"; name what the file calls it, as in '
            '{ name = "clicked", in_file = "Clicked" }',
        ),
        (
            "".join(f"{n}\t{u}\t{i}\t{c}\n" for n, (u, i, c) in enumerate(ROWS)),
            "its rows have 4 fields, the recipe has 3 columns",
        ),
        (
            "".join(f'{{"user": "{u}", "item": "{i}", "clicked": {c}}}\n' for u, i, c in ROWS),
            'set format = "jsonl"',
        ),
    ],
    ids=["separator", "header", "quotes", "one more field", "JSON lines"],
)
def test_a_file_of_another_form_gets_a_hint_at_the_right_keys(
    recmill: Run, tmp_path: Path, text: str, hint: str
) -> None:
    (tmp_path / "events.csv").write_text(text, newline="")
    (tmp_path / "mine.toml").write_text(RECIPE)
    sentence = f"events.csv does not match the recipe: {hint}.\n"
    code, checked, _ = recmill("check", tmp_path / "mine.toml", "--data", tmp_path)
    assert code == 1
    assert checked.endswith(sentence)
    code, _, prepared = recmill(
        "prepare", tmp_path / "mine.toml", "--data", tmp_path, "--into", tmp_path / "t"
    )
    assert code == 1
    assert prepared.endswith(sentence)


def test_kaggle_s_csv_of_criteo_can_be_read_by_what_the_error_says(recmill: Run, tmp_path: Path) -> None:
    names = ["Id", "Label", *(f"I{n}" for n in range(1, 14)), *(f"C{n}" for n in range(1, 27))]
    rows = (FIXTURES / "criteo/train.txt").read_text().splitlines()
    lines = [",".join(names), *(f"{n},{row}".replace("\t", ",") for n, row in enumerate(rows, 10_000_000))]
    (tmp_path / "train.txt").write_text("".join(f"{line}\r\n" for line in lines), newline="")
    code, said, _ = recmill("check", "criteo-dlrm", "--data", tmp_path)
    assert code == 1
    assert 'train.txt: no column "label"; the file has: Id, Label, I1, ' in said
    assert said.endswith('Then add in_file = "Label" to the column, or rename it.\n')
    followed = [f"columns[{n}].in_file={name}" for n, name in enumerate(["Label", "I1..I13", "C1..C26"])]
    code, said, _ = recmill(
        "check", "criteo-dlrm", "--data", tmp_path, *(w for key in followed for w in ("--set", f"log.{key}"))
    )
    assert (code, " parse, 0 do not" in said) == (0, True)


def test_a_recipe_without_a_split_is_pointed_out(recmill: Run, tmp_path: Path) -> None:
    start, end = RECIPE.index("[split]"), RECIPE.index("[[features]]")
    (tmp_path / "mine.toml").write_text(RECIPE[:start] + RECIPE[end:])
    code, said, _ = recmill("check", tmp_path / "mine.toml")
    assert code == 0
    assert "warning        [split] is missing: every row trains" in said


def test_values_that_are_wrong_in_a_file_of_the_right_form_get_no_hint(recmill: Run, tmp_path: Path) -> None:
    (tmp_path / "events.csv").write_text("".join(f"{u}\t{i}\t7\n" for u, i, _ in ROWS))
    (tmp_path / "mine.toml").write_text(RECIPE)
    _, checked, _ = recmill("check", tmp_path / "mine.toml", "--data", tmp_path)
    assert "0 parse, 60 do not" in checked
    assert "looks different" not in checked
