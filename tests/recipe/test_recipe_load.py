"""TOML and Python to Recipe: shorthand, overrides, owners, round trips."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from small_recipe import TREE, feature, load, problems, small

from recmill.errors import RecipeError
from recmill.recipe import recipe as r
from recmill.recipe import steps as s
from recmill.recipe.load import load_recipe, recipe_from_dict, recipe_to_dict, shipped_recipes
from recmill.recipe.names import expand_names

ALL = sorted(shipped_recipes())


@pytest.mark.parametrize("name", ALL)
def test_a_shipped_recipe_loads_under_the_name_of_its_file(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.name == name
    assert recipe.description.endswith(".")


@pytest.mark.parametrize("name", ALL)
def test_a_recipe_survives_the_way_through_json(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe_from_dict(json.loads(json.dumps(recipe_to_dict(recipe)))) == recipe


@pytest.mark.parametrize(
    ("names", "expanded"),
    [
        ("i1..i3", ["i1", "i2", "i3"]),
        ("i1..3", ["i1", "i2", "i3"]),
        ("c08..c11", ["c08", "c09", "c10", "c11"]),
        ("a, i9..i10,\n b", ["a", "i9", "i10", "b"]),
        (["i1..i2", "a, b"], ["i1", "i2", "a, b"]),
        ("x_1y2..x_1y3", ["x_1y2", "x_1y3"]),
        ("", []),
    ],
)
def test_ranges_and_commas_stand_for_many_names(names: str | list[str], expanded: list[str]) -> None:
    assert expand_names(names) == expanded


def test_one_entry_covers_many_columns() -> None:
    recipe = load_recipe("criteo-dlrm")
    assert [column.name for column in recipe.log.columns] == [
        "label", *(f"i{n}" for n in range(1, 14)), *(f"c{n}" for n in range(1, 27))
    ]  # fmt: skip
    assert [feature.name for feature in recipe.features[:14]] == [*(f"i{n}" for n in range(1, 14)), "c1"]
    assert recipe.features[0].steps == (s.Fill(value=0), s.Clip(min=0.0), s.Log(), s.Standardise())


def test_in_file_is_a_range_where_the_name_is_one() -> None:
    columns = [
        {"name": "i1..i3", "type": "int", "in_file": "I1..I3"},
        {"name": "a", "type": "int", "in_file": "A, b"},
    ]
    recipe = load(log={**TREE["log"], "header": True, "columns": [*TREE["log"]["columns"], *columns]})
    assert [column.name_in_file for column in recipe.log.columns[-4:]] == ["I1", "I2", "I3", "A, b"]
    assert recipe_from_dict(recipe_to_dict(recipe)) == recipe


def test_a_name_may_hold_the_column() -> None:
    recipe = load(features=feature("log", columns="n1..n2", name="{column}_log"))
    assert [(made.name, made.columns) for made in recipe.features] == [
        ("n1_log", ("n1",)),
        ("n2_log", ("n2",)),
    ]


def test_a_combining_step_takes_all_columns_into_one_feature() -> None:
    recipe = load(features=feature({"cross": "_"}, {"hash": 10}, columns=["user", "item"], name="pair"))
    assert [(made.name, made.columns) for made in recipe.features] == [("pair", ("user", "item"))]


def test_names_expand_wherever_columns_or_features_are_named() -> None:
    recipe = load(
        rows=[{"lag": {"columns": "n1..n2", "by": "user", "order": "time"}}],
        table={"keep": "user, n1..n2"},
        ranking={"model": "wide_deep", "label": "clicked", "wide": "user, item", "features": "user, n1..n3"},
    )
    assert isinstance(recipe.rows[0], r.Lag)
    assert recipe.rows[0].columns == ("n1", "n2")
    assert recipe.table.keep == ("user", "n1", "n2")
    assert recipe.ranking is not None
    assert (recipe.ranking.wide, recipe.ranking.features) == (("user", "item"), ("user", "n1", "n2", "n3"))


@pytest.mark.parametrize(
    ("written", "step"),
    [
        ("log", s.Log()),
        ({"log": 3}, s.Log(add=3.0)),
        ({"fill": {"statistic": "mean"}}, s.Fill(statistic="mean")),
        ({"min_max": {}}, s.MinMax()),
        ({"clip": {"min": 1}}, s.Clip(min=1.0)),
    ],
)
def test_a_step_is_a_name_a_value_or_a_table(written: object, step: s.Step) -> None:
    assert load(features=feature(written)).features[0].steps == (step,)


def test_a_map_may_be_written_without_its_key() -> None:
    recipe = load(features=feature({"map": {"a": 1, "b": 2}}, columns="words"))
    assert recipe.features[0].steps == (s.Map({"a": 1, "b": 2}),)


# owners


def test_owners_are_derived_from_keys_joins_and_histories() -> None:
    owners = {feature.name: feature.of for feature in load_recipe("quickstart").features}
    assert owners == {
        "user_id": "user", "country": "user", "age_band": "user", "recent_items": "user", "recent_categories": "user",
        "item_id": "item", "category": "item", "brand": "item", "price": "item",
        "device": "context", "hour": "context", "price_shown": "context", "position": "context",
    }  # fmt: skip


def test_a_feature_of_two_owners_is_context() -> None:
    recipe = load(features=feature({"cross": "_"}, {"hash": 10}, columns=["user", "item"], name="pair"))
    assert recipe.features[0].of == "context"


@pytest.mark.parametrize("of", ["user", "item", "context"])
def test_an_owner_that_the_recipe_gives_stays(of: str) -> None:
    recipe = load(features=feature("vocabulary", columns="user", of=of))
    assert recipe.features[0].of == of
    assert recipe_from_dict(recipe_to_dict(recipe)) == recipe


# overrides


def test_overrides_change_values_before_they_are_checked() -> None:
    recipe = load_recipe(
        "criteo-dlrm",
        [
            "split.held_out=0.25",
            "features[1].steps=[{ hash = 1000 }]",
            "features[1].dim=16",
            "ranking.train.target=auc >= 0.7",
            'log.files=["a", "b"]',
        ],
    )
    assert recipe.split is not None
    assert recipe.ranking is not None
    assert recipe.split.held_out == 0.25
    assert recipe.features[38] == r.Feature("c26", ("c26",), (s.Hash(1000),), dim=16)
    assert recipe.ranking.train.target == "auc >= 0.7"
    assert recipe.log.files == ("a", "b")


def test_an_override_makes_sections_that_are_not_there() -> None:
    recipe = load_recipe("criteo-dlrm", ["table.order=shuffle", "table.seed=7"])
    assert recipe.table == r.TableLayout("shuffle", 7)


def test_an_override_without_value_takes_the_key_out() -> None:
    recipe = load_recipe("recsys2021", ["log.format=parquet", "log.separator="])
    assert (recipe.log.format, recipe.log.separator) == ("parquet", None)


def test_every_wrong_override_is_reported() -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe("quickstart", ["features[44].dim=3", "nothing", "=3", "log.user.name=3", "features.x=1"])
    assert caught.value.problems == (
        '--set features[44].dim=3: features is a list of 9, numbered from 0; it has no "44"',
        '--set nothing: expected key=value, for example --set "split.held_out=0.2"',
        '--set =3: expected key=value, for example --set "split.held_out=0.2"',
        '--set log.user.name=3: log.user is a value, not a table; it has no "name"',
        '--set features.x=1: features is a list of 9, numbered from 0; it has no "x"',
    )


# where recipes come from


def test_a_wrong_name_gets_the_nearest_right_one() -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe("quikstart")
    assert str(caught.value) == 'quikstart: no such recipe file or shipped recipe; did you mean "quickstart"?'


def test_a_file_is_named_in_its_problems(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('name = "mine"\n')
    with pytest.raises(RecipeError) as caught:
        load_recipe(str(path))
    assert str(caught.value) == f"{path}: log is missing\n{path}: features is missing"


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"name = ", "is not valid TOML: Invalid value (at end of document)"),
        (
            b"\xff",
            "is not valid TOML: 'utf-8' codec can't decode byte 0xff in position 0: invalid start byte",
        ),
        (b"x = " + b"[" * 5000, "is nested too deeply"),
    ],
)
def test_what_is_no_toml_is_a_recipe_error(tmp_path: Path, content: bytes, problem: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_bytes(content)
    with pytest.raises(RecipeError) as caught:
        load_recipe(str(path))
    assert caught.value.problems == (problem,)


def test_a_directory_and_a_python_file_say_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("")
    with pytest.raises(RecipeError, match="is a directory; expected a recipe file"):
        load_recipe(str(tmp_path))
    with pytest.raises(RecipeError, match=r"is Python; name its function too: .*mine\.py:function"):
        load_recipe(str(tmp_path / "mine.py"))


# Python


PYTHON = """
import recmill.recipe.recipe as r
import recmill.recipe.steps as s

def recipe():
    columns = (r.Column("user", "text"), r.Column("click", "int"))
    return r.Recipe(
        "mine",
        r.Log(("a.tsv",), columns, user="user"),
        features=(r.Feature("user", ("user",), (s.Vocabulary(),), dim=4),),
        labels=(r.Label("click", ("click",)),),
    )

def tree():
    columns = [{"name": "x", "type": "int"}]
    return {"name": "mine", "log": {"files": "a.tsv", "columns": columns}, "features": [{"columns": "x", "dim": -8}]}

def typo():
    return r.Recipe("mine", r.Log(("a.tsv",), "user"), features=None)

def number():
    return 3

def broken():
    return 1 / 0
"""


@pytest.fixture
def python_file(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(PYTHON)
    return str(tmp_path / "mine.py")


def test_a_python_function_gives_a_recipe_with_owners(python_file: str) -> None:
    recipe = load_recipe(f"{python_file}:recipe")
    assert recipe.features == (r.Feature("user", ("user",), (s.Vocabulary(),), of="user", dim=4),)


def test_overrides_work_on_python_recipes_too(python_file: str) -> None:
    assert load_recipe(f"{python_file}:recipe", ["features[0].dim=9"]).features[0].dim == 9


def test_a_module_on_the_path_may_hold_the_function(
    python_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(python_file).parent))
    assert load_recipe("mine:recipe").name == "mine"


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        ("tree", "features[0].dim must be a positive integer, got -8"),
        ("number", "must return a Recipe or a dict, got int"),
        ("nothing", "failed: AttributeError: module 'recmill_user_recipe' has no attribute 'nothing'"),
    ],
)
def test_what_python_recipes_get_wrong_is_a_recipe_error(
    python_file: str, function: str, problem: str
) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(f"{python_file}:{function}")
    assert caught.value.problems[0] == problem


def test_wrong_types_in_a_python_recipe_are_reported(python_file: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(f"{python_file}:typo")
    assert caught.value.problems == ('log.columns must be a list, got "user"', "features is missing")


def test_a_failing_function_names_its_line(python_file: str) -> None:
    with pytest.raises(
        RecipeError, match=r"failed: ZeroDivisionError: division by zero \(.*mine\.py, line 25\)"
    ):
        load_recipe(f"{python_file}:broken")


def test_no_problem_means_a_recipe() -> None:
    assert problems() == []
    assert load().name == small()["name"]
