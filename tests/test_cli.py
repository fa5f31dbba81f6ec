"""The command line: what it says, where it says it, and with which exit code."""

# ruff: noqa: E501 -- one case is one line: what is typed, and what is said about it

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest

from recmill.cli import build_parser, main
from recmill.config import FRACTION, SIZE
from recmill.recipe.load import shipped_recipes
from recmill.recipe.recipe import Shape
from recmill.synthetic.generate import SHAPES as GENERATED_SHAPES
from recmill.synthetic.generate import generate

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    into = tmp_path_factory.mktemp("shop")
    assert main(["generate", "shop", "--rows", "400", "--into", str(into), "--quiet"]) == 0
    return into


def commands() -> dict[str, argparse.ArgumentParser]:
    actions = build_parser()._actions
    return next(dict(action.choices) for action in actions if isinstance(action, argparse._SubParsersAction))


def in_process(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "recmill", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


# help


@pytest.mark.parametrize("name", sorted(commands()))
def test_help_of_a_command_shows_its_flags_and_examples(recmill: Run, name: str) -> None:
    code, out, err = recmill(name, "--help")
    assert (code, err) == (0, "")
    assert f"\nexamples:\n  recmill {name}" in out
    for action in commands()[name]._actions:
        assert action.help
        assert all(flag in out for flag in action.option_strings)


def test_without_a_command_the_help_is_shown(recmill: Run) -> None:
    code, out, _ = recmill()
    assert code == 0
    assert all(re.search(rf"^    {name}\s", out, re.MULTILINE) for name in commands())


def test_every_shape_can_be_generated_and_named_in_recipes() -> None:
    assert set(GENERATED_SHAPES) == set(get_args(Shape))


def test_the_version_is_shown(recmill: Run) -> None:
    assert recmill("--version")[:2] == (0, "recmill 0.1.0\n")


# wrong usage: 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["prepair"], "invalid choice: 'prepair'"),
        (["check"], "the following arguments are required: RECIPE"),
        (["check", "quikstart"], 'quikstart: no such recipe file or shipped recipe; did you mean "quickstart"?'),
        (["check", "quickstart", "--set", "split.held_out=2"], "quickstart.toml: split.held_out must be a number"),
        (["check", "quickstart", "--set", "split"], "--set split: expected key=value"),
        (["recipes", "quikstart"], 'There is no shipped recipe "quikstart"; did you mean "quickstart"?'),
        (["recipes", "pyproject.toml"], 'There is no shipped recipe "pyproject.toml"'),
        (["prepare", "quickstart", "--data", "x"], "--into DIR is missing: where should the Table be written?"),
        (["prepare", "quickstart", "--data", "x", "--sample", "2", "--into", "y"], "--into has no meaning with --sample"),
        (["prepare", "quickstart", "--data", "x", "--sample", "2", "--binary"], "--binary has no meaning with --sample"),
        (["prepare", "quickstart", "--data", "x", "--into", "y", "--memory", "lots"], "must be a size such as 500MB or 2GB, got lots"),
        (["prepare", "quickstart", "--data", "x", "--into", "y", "--memory", "0GB"], "must be a size such as 500MB or 2GB, got 0GB"),
        (["prepare", "quickstart", "--data", "x", "--into", "y", "--workers", "0"], "must be a whole number from 1, got 0"),
        (["prepare", "quickstart", "--data", "x", "--into", "y", "--max-bad", "200%"], "must be a fraction such as 0.001 or 0.1%, got 200%"),
        (["train", "quickstart", "--follow", "s3://x/y", "--publish", "b", "--into", "c"], "--follow s3://x/y: objects of a store do not grow."),
        (["run", "quickstart", "--data", "x", "--rows", "5"], "--rows is for generated logs"),
        (["generate", "shop", "--rows", "ten", "--into", "x"], "must be a whole number from 1, got ten"),
        (["generate", "shop", "--rows", "9" * 5000, "--into", "x"], "must be a whole number from 1, got 9"),
        (["generate", "shop", "--rows", "5", "--seed", "-1", "--into", "x"], "must be a whole number from 0 to 2**63 - 1"),
        (["generate", "shop", "--rows", "5", "--days", "1", "--into", "x"], "--days is for criteo; shop has no such option."),
        (["generate", "criteo", "--rows", "5", "--format", "csv", "--into", "x"], "--format is for recsys2021; criteo has no such option."),
        (["generate", "movielens", "--rows", "5", "--compress", "--into", "x"], "--compress is for criteo and recsys2021; movielens has no"),
        (["generate", "criteo", "--rows", "5", "--days", "a-b", "--into", "x"], "--days: must look like 0-3,23, got a-b"),
    ],
)  # fmt: skip
def test_wrong_usage_is_2_and_says_why(
    recmill: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = recmill(*arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


def test_every_problem_of_a_recipe_has_its_own_line(recmill: Run) -> None:
    code, _, err = recmill("check", "quickstart", "--set", "split.held_out=2", "--set", "features[3].dim=-8")
    assert code == 2
    assert err == (
        "recmill: quickstart.toml: features[3].dim must be a positive integer, got -8\n"
        "quickstart.toml: split.held_out must be a number above 0 and below 1, got 2\n"
    )


@pytest.mark.parametrize(
    ("text", "size"),
    [("1", 1), ("2GB", 2 << 30), ("1.5 gb", 3 << 29), ("64M", 64 << 20), ("10kb", 10_240), ("1TB", 1 << 40)],
)
def test_sizes(text: str, size: int) -> None:
    assert SIZE.parse(text) == size


@pytest.mark.parametrize(("text", "fraction"), [("0", 0.0), ("0.5", 0.5), ("0.1%", 0.001), ("100%", 1.0)])
def test_fractions(text: str, fraction: float) -> None:
    assert FRACTION.parse(text) == fraction


# bad data: 1


def test_a_missing_directory_is_1(recmill: Run, tmp_path: Path) -> None:
    code, out, err = recmill(
        "prepare", "quickstart", "--data", tmp_path / "no", "--into", tmp_path / "table", "--quiet"
    )
    assert (code, out) == (1, "")
    assert err.startswith(f"recmill: {tmp_path / 'no'}: no such directory.")


def test_a_place_that_cannot_be_written_is_1(recmill: Run, shop: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, out, err = recmill("generate", "shop", "--rows", "5", "--into", tmp_path / "file" / "x", "--quiet")
    assert (code, out) == (1, "")
    assert err.startswith("recmill: ")
    assert "Traceback" not in err


# recipes and check


def test_recipes_are_listed_with_a_description(recmill: Run) -> None:
    code, out, _ = recmill("recipes")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == sorted(shipped_recipes())
    assert all(len(line.split()) > 3 for line in out.splitlines())


@pytest.mark.parametrize("name", sorted(shipped_recipes()))
def test_a_printed_recipe_is_a_recipe_to_start_from(recmill: Run, tmp_path: Path, name: str) -> None:
    code, out, _ = recmill("recipes", name)
    (tmp_path / "mine.toml").write_text(out)
    assert code == 0
    assert recmill("check", tmp_path / "mine.toml")[0] == 0


def test_check_says_what_is_in_the_recipe_and_what_comes_next(recmill: Run) -> None:
    code, out, err = recmill("check", "quickstart")
    assert (code, err) == (0, "")
    assert out == (
        "recipe quickstart is right: 7 columns, 13 features, 1 label\n"
        "next   recmill prepare quickstart --data DIR --into runs/quickstart/table\n"
    )


def test_check_looks_at_the_files(recmill: Run, shop: Path) -> None:
    code, out, _ = recmill("check", "quickstart", "--data", shop)
    assert code == 0
    assert "first rows: 400 parse, 0 do not" in out
    assert out.count("first rows:") == 3
    code, out, _ = recmill("check", "quickstart", "--data", shop, "--json")
    answer = json.loads(out)
    assert (code, answer["good"], answer["recipe"], answer["features"]) == (0, True, "quickstart", 13)
    assert sorted(answer["files"]) == ["log", "tables.items", "tables.users"]
    assert answer["files"]["log"]["matches"]["events.csv"][0][0] == "events.csv"


def test_check_warns_of_missing_and_empty_files(recmill: Run, tmp_path: Path) -> None:
    generate("criteo", 100, 1, tmp_path)
    for day in (0, 1, 4, 23):
        (tmp_path / f"day_{day}").write_bytes((tmp_path / "train.txt").read_bytes() if day != 1 else b"")
    code, out, _ = recmill("check", "criteo-full-dlrm", "--data", tmp_path)
    assert code == 0
    assert "first rows: 300 parse, 0 do not" in out
    assert (
        "log has a gap: day_2, day_3, day_5, day_6, day_7, day_8, day_9, day_10, day_11, day_12, and 10 more"
        in out
    )
    assert "log has files without any row: day_1." in out


def test_check_finds_missing_files_and_bad_rows(recmill: Run, shop: Path, tmp_path: Path) -> None:
    (tmp_path / "users.csv").write_bytes((shop / "users.csv").read_bytes())
    (tmp_path / "events.csv").write_text(
        "time,user_id,item_id,device,position,price_shown,clicked\nsoon,a,b,c,1,2.5,0\n"
    )
    code, out, err = recmill("check", "quickstart", "--data", tmp_path)
    assert (code, err) == (1, "")
    assert "items.csv: nothing matches" in out
    assert "(column time)" in out
    assert "next" not in out
    code, out, _ = recmill("check", "quickstart", "--data", tmp_path, "--json")
    answer = json.loads(out)
    assert (code, answer["good"]) == (1, False)
    assert answer["files"]["log"]["first_rows_bad"][0][3] == "time"


_RATINGS = """
name = "ratings"
labels = [{ name = "liked", columns = "rating" }]
features = [{ columns = "user, item", steps = ["vocabulary"] }]
retrieval = { label = "liked", user = "user", item = "item" }

[log]
files = ["ratings.csv"]
separator = ","
user = "user"
item = "item"
columns = [{ name = "user, item, rating", type = "int" }]
"""


def test_check_finds_a_rating_that_would_be_a_label(recmill: Run, tmp_path: Path) -> None:
    (tmp_path / "ratings.csv").write_text("1,1,1\n1,2,5\n2,1,4\n")
    (tmp_path / "mine.toml").write_text(_RATINGS)
    code, out, err = recmill("check", tmp_path / "mine.toml", "--data", tmp_path)
    assert (code, err) == (1, "")
    assert 'Label "liked" is neither 0 nor 1 in 2 of 3 rows: 1 in 1, 4 in 1, 5 in 1' in out
    (tmp_path / "mine.toml").write_text(_RATINGS + '\n[[rows]]\nfilter = "rating <= 1"\n')
    assert recmill("check", tmp_path / "mine.toml", "--data", tmp_path)[0] == 0


# generate


@pytest.mark.parametrize(
    ("arguments", "files", "recipe"),
    [
        (["shop"], ["events.csv", "items.csv", "users.csv"], "quickstart"),
        (["movielens"], ["movies.dat", "ratings.dat", "users.dat"], "movielens"),
        (["criteo"], ["train.txt"], "criteo-deeprec"),
        (["criteo", "--days", "0-1,23"], ["day_0", "day_1", "day_23"], "criteo-dcn"),
        (["criteo", "--compress"], ["train.txt.gz"], "criteo-deeprec"),
        (["recsys2021"], ["part-00000.csv"], "recsys2021"),
        (["recsys2021", "--format", "parquet"], ["part-00000.parquet"], "recsys2021"),
    ],
)
def test_generate_names_a_recipe_that_reads_what_it_wrote(
    recmill: Run, tmp_path: Path, arguments: list[str], files: list[str], recipe: str
) -> None:
    code, out, err = recmill("generate", *arguments, "--rows", 300, "--into", tmp_path / "log", "--quiet")
    assert (code, err) == (0, "")
    written = sorted(
        file.name for file in (tmp_path / "log").iterdir() if not file.name.startswith((".", "_"))
    )
    assert written == files
    following = out.splitlines()[-1].split()
    assert following[:4] == ["next", "recmill", "prepare", recipe]
    overrides = following[following.index("--set") :] if "--set" in following else []
    assert recmill("check", recipe, "--data", tmp_path / "log", *overrides)[0] == 0


def test_generate_speaks_json(recmill: Run, tmp_path: Path) -> None:
    code, out, _ = recmill(
        "generate", "shop", "--rows", 50, "--seed", 3, "--into", tmp_path, "--json", "--quiet"
    )
    answer = json.loads(out)
    assert (code, answer["shape"], answer["rows"], len(answer["files"])) == (0, "shop", 50, 3)
    assert set(answer["best"]) >= {"auc", "logloss"}


# prepare and run


def test_prepare_says_what_was_read_and_written(recmill: Run, shop: Path, tmp_path: Path) -> None:
    arguments = ["prepare", "quickstart", "--data", shop, "--into", tmp_path / "table", "--quiet"]
    code, out, err = recmill(*arguments)
    assert (code, err) == (0, "")
    words = [line.split()[0] for line in out.splitlines()]
    assert words == ["read", "wrote", "digest"]
    code, again, _ = recmill(*arguments)
    assert code == 0
    assert again.splitlines()[0] == f"found  {tmp_path / 'table'}   nothing to do"
    assert again.splitlines()[-1] == out.splitlines()[-1]


def test_prepare_speaks_json_and_explains_in_it(recmill: Run, shop: Path, tmp_path: Path) -> None:
    code, out, _ = recmill(
        "prepare",
        "quickstart",
        "--data",
        shop,
        "--into",
        tmp_path / "table",
        "--quiet",
        "--json",
        "--explain",
    )
    answer = json.loads(out)
    assert (code, answer["rows_read"], sum(answer["rows"].values())) == (0, 400, 400)
    assert len(answer["features"]) == 13
    assert answer["features"][0]["name"] == "user_id"


def test_explain_shows_a_line_for_each_feature(recmill: Run, shop: Path, tmp_path: Path) -> None:
    code, out, _ = recmill(
        "prepare", "quickstart", "--data", shop, "--into", tmp_path / "t", "--quiet", "--explain"
    )
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()[4:]] == [
        "user_id", "item_id", "category", "brand", "country", "age_band", "device",
        "recent_items", "recent_categories", "hour", "price", "price_shown", "position",
    ]  # fmt: skip


def test_sample_shows_raw_above_prepared_values_and_writes_nothing(
    recmill: Run, shop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = recmill("prepare", "quickstart", "--data", shop, "--sample", 10)
    lines = out.splitlines()
    assert (code, err) == (0, "")
    assert lines[0] == "fitted on the first 400 rows"
    assert lines[1].split() == ["row", *map(str, range(8))]
    assert ["row", "8", "9"] in [line.split() for line in lines]
    assert [line.partition(" " * 2)[0] or line.split()[0] for line in lines[2:6]] == [
        "user_id", "user_id", "item_id", "item_id",
    ]  # fmt: skip
    assert (lines[2].startswith("  user_id"), lines[3].startswith("user_id")) == (True, True)
    assert lines[2].split()[1].startswith("u")
    assert max(map(len, lines)) < 160
    assert list(tmp_path.iterdir()) == []


def test_sample_speaks_json(recmill: Run, shop: Path) -> None:
    code, out, _ = recmill("prepare", "quickstart", "--data", shop, "--sample", 3, "--json", "--explain")
    answer = json.loads(out)
    assert (code, len(answer["rows"]), len(answer["raw"]), len(answer["features"])) == (0, 3, 3, 13)
    assert answer["fitted_on_rows"] == 400
    assert isinstance(answer["rows"][0]["recent_items"], list)


def test_bad_rows_of_a_side_table_count_like_those_of_the_log(
    recmill: Run, shop: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("users.csv", "items.csv", "events.csv"):
        (tmp_path / name).write_bytes((shop / name).read_bytes())
    with open(tmp_path / "items.csv", "a", encoding="utf-8") as items:
        items.write("half a row\n")
    arguments = ["prepare", "quickstart", "--data", tmp_path, "--into", tmp_path / "table", "--quiet"]
    code, _, err = recmill(*arguments)
    assert code == 1
    assert err.startswith("recmill: Side table items: 1 of ")
    assert "raise --max-bad" in err
    code, _, _ = recmill(*arguments, "--max-bad", "20%")
    assert code == 0
    assert "Side table items: left out 1 rows: wrong number of fields" in caplog.text


def test_bad_rows_are_set_aside_and_too_many_are_1(recmill: Run, shop: Path, tmp_path: Path) -> None:
    for name in ("users.csv", "items.csv", "events.csv"):
        (tmp_path / name).write_bytes((shop / name).read_bytes())
    with open(tmp_path / "events.csv", "a", encoding="utf-8") as events:
        events.write("soon,u,i,phone,1,2.5,0\n")
    arguments = ["prepare", "quickstart", "--data", tmp_path, "--into", tmp_path / "table", "--quiet"]
    code, out, err = recmill(*arguments)
    assert (code, out) == (1, "")
    assert "Traceback" not in err
    code, out, _ = recmill(*arguments, "--max-bad", "1%")
    assert code == 0
    assert f"bad    1 rows set aside in {tmp_path / 'table' / 'rejected'}" in out


def test_a_recipe_without_generator_needs_data(recmill: Run, tmp_path: Path) -> None:
    code, _, err = recmill("run", "quickstart", "--set", "generate=", "--into", tmp_path / "run")
    assert code != 0
    assert 'Recipe "quickstart" has no generator; give its log with --data DIR.' in err


# as users start it


def test_a_reader_who_leaves_early_is_no_error() -> None:
    command = f"{sys.executable} -m recmill recipes recsys2021 | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ['name = "recsys2021"', "0"]
    assert done.stderr == ""


def test_errors_of_a_real_process_go_to_stderr_with_the_right_code() -> None:
    done = in_process("check", "nothing.toml")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("recmill: nothing.toml: no such recipe file")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("u1", "u1"),
        ("0374AA3753E0328B94CC1402CBC17B9D", "0374AA3753E..."),
        ("Warm Pure Alder lamp", "Warm Pure Alder lamp"),
    ],
)
def test_long_ids_are_cut_and_titles_are_not(name: str, shown: str) -> None:
    from recmill.cli.run import _short

    assert _short(name) == shown
