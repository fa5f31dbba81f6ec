"""A log of shown ads: no users, a label of 0 and 1, many columns. It becomes a ranker, and never a list."""

from __future__ import annotations

from pathlib import Path

import pytest

from recmill.errors import RecmillError
from recmill.stages.init.config import InitConfig
from recmill.stages.init.init import init

NAMES = [f"c{number}" for number in range(9)]


def write(path: Path, header: str | None, device: int = 1) -> str:
    rows = [
        ",".join(map(str, [n % 4 // 3, n, f"d{n % device}", *(f"x{n % (c + 2)}" for c in range(8)), n % 30]))
        for n in range(60)
    ]
    path.write_text("\n".join(rows if header is None else [header, *rows]) + "\n")
    return str(path)


def test_shown_rows_without_users_become_a_ranker_of_all_columns_that_come_back(tmp_path: Path) -> None:
    ads = write(tmp_path / "ads.csv", f"click,id,device_id,{','.join(NAMES)}")
    result = init([ads], InitConfig())
    recipe = result.recipe
    assert recipe.log.user is None
    assert recipe.retrieval is None
    assert recipe.ranking is not None
    # `id` is that of a row, and there is one device.
    assert recipe.ranking.features == ("c8", *(f"id_{name}" for name in NAMES))
    assert "user   none" in "\n".join(result.lines)
    assert [column.name for column in recipe.log.columns] == ["click", *NAMES]


def test_without_a_header_a_first_column_of_0_and_1_is_the_label(tmp_path: Path) -> None:
    recipe = init([write(tmp_path / "train.txt", None)], InitConfig()).recipe
    assert recipe.log.columns[0].name == "label"
    assert len(recipe.log.columns) == 12
    assert recipe.ranking is not None


@pytest.mark.parametrize("device", [3, 30])
def test_a_column_of_users_is_still_asked_about(tmp_path: Path, device: int) -> None:
    ads = write(tmp_path / "ads.csv", f"click,id,device_id,{','.join(NAMES)}", device)
    with pytest.raises(RecmillError, match="which one is the item"):
        init([ads], InitConfig())


def test_columns_that_are_given_are_not_overruled(tmp_path: Path) -> None:
    ads = write(tmp_path / "ads.csv", f"click,id,device_id,{','.join(NAMES)}", 5)
    recipe = init([ads], InitConfig(user="device_id", item="c3")).recipe
    assert (recipe.log.user, recipe.log.item) == ("device_id", "c3")
    assert recipe.retrieval is not None


@pytest.mark.stages
def test_the_recipe_of_a_ranker_alone_runs(recmill, tmp_path: Path) -> None:
    ads = write(tmp_path / "ads.csv", f"click,id,device_id,{','.join(NAMES)}")
    assert recmill("init", ads, "--into", tmp_path / "ads.toml")[0] == 0
    code, out, err = recmill(
        "run",
        tmp_path / "ads.toml",
        "--data",
        tmp_path,
        "--into",
        tmp_path / "run",
        "--threads",
        1,
        "--quiet",
    )
    assert code == 0, err
    assert "AUC" in out
    assert (tmp_path / "run" / "bundle").exists()
