"""`recmill check` also looks at what a recipe names outside of itself, before an hour of work does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from small_recipe import TREE, load

from recmill.recipe.write import toml_of

ROWS = "1\tu1\ti1\t0.5\t1\t2\ta b\t1\n2\tu2\ti2\t0.1\t1\t2\tb\t0\n"
USER = {"columns": "user", "steps": ["vocabulary"]}
ITEM = {"columns": "item", "steps": ["vocabulary"]}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "log"
    folder.mkdir()
    for name in ("day1.tsv", "day2.tsv"):
        (folder / name).write_text(ROWS)
    return folder


def check(recmill: Any, tmp_path: Path, sections: dict[str, Any], *more: object) -> tuple[int, str]:
    (tmp_path / "mine.toml").write_text(toml_of(load(**sections)))
    code, _, err = recmill("check", tmp_path / "mine.toml", *more)
    return code, err


@pytest.mark.parametrize(
    ("sections", "problem"),
    [
        (
            {"features": [{"columns": "n1", "steps": [{"function": "not_installed.here:twice"}]}]},
            "Function not_installed.here:twice cannot be imported: No module named 'not_installed'.",
        ),
        (
            {"features": [{"columns": "n1", "steps": [{"function": "json:twice"}]}]},
            "Function json:twice cannot be imported: module 'json' has no attribute 'twice'.",
        ),
        (
            {"features": [{"columns": "user", "steps": [{"vocabulary": {"extend": "runs/none"}}]}]},
            'No vocabulary "user" in runs/none.',
        ),
        (
            {"features": [USER, ITEM], "ranking": {"model": "not_installed.here:Model", "label": "clicked"}},
            'ranking.model "not_installed.here:Model" cannot be imported',
        ),
        (
            {"features": [USER, ITEM], "ranking": {"model": "json:JSONDecoder", "label": "clicked"}},
            'ranking.model "json:JSONDecoder" is not a torch.nn.Module class.',
        ),
    ],
)
def test_what_a_recipe_names_must_be_here(
    recmill: Any, tmp_path: Path, sections: dict[str, Any], problem: str
) -> None:
    code, err = check(recmill, tmp_path, sections)
    assert (code, err.startswith(f"recmill: {problem}")) == (1, True), err


@pytest.mark.parametrize(
    ("held_out", "problem"),
    [
        ("day2*", None),
        ("day3*", 'split.held_out_files has "day3*", but the log has: day1.tsv, day2.tsv.'),
        ("day*", "split.held_out_files holds out every file (day1.tsv, day2.tsv); nothing is left to train on."),
    ],
)  # fmt: skip
def test_held_out_files_are_some_of_the_log(
    recmill: Any, tmp_path: Path, data: Path, held_out: str, problem: str | None
) -> None:
    log = {**TREE["log"], "files": ["day*.tsv"]}
    sections = {"log": log, "split": {"by": "files", "held_out_files": held_out}}
    code, err = check(recmill, tmp_path, sections, "--data", data)
    assert (code, err) == ((0, "") if problem is None else (1, f"recmill: {problem}\n"))
