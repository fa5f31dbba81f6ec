"""`recmill init`: it says what it decided, writes a recipe that `check` accepts, and never replaces one in silence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., tuple[int, str, str]]
EVENTS = "user,item,rating,time\n" + "".join(
    f"{n % 5},{n % 9},{1 + n % 5},{1_600_000_000 + n}\n" for n in range(60)
)


@pytest.fixture
def events(tmp_path: Path) -> Path:
    path = tmp_path / "events.csv"
    path.write_text(EVENTS)
    return path


def test_a_recipe_is_written_that_check_accepts(recmill: Run, events: Path, tmp_path: Path) -> None:
    into = tmp_path / "mine.toml"
    code, out, err = recmill("init", events, "--into", into)
    assert (code, err) == (0, "")
    assert "positive: rating >= 4, 40% of rows; change with --positive" in out
    assert "time   time   s since 1970, 2020-09-13 to 2020-09-13" in out
    assert out.endswith(f"next   recmill run {into} --data {tmp_path}\n")
    assert len(out.splitlines()) <= 20
    code, out, _ = recmill("check", into, "--data", tmp_path)
    assert code == 0
    assert "recipe mine is right" in out


def test_what_was_decided_is_there_as_json(recmill: Run, events: Path, tmp_path: Path) -> None:
    code, out, _ = recmill("init", events, "--into", tmp_path / "mine.toml", "--json")
    assert code == 0
    assert json.loads(out)["data"] == str(tmp_path)


def test_a_recipe_that_is_there_is_not_replaced(recmill: Run, events: Path, tmp_path: Path) -> None:
    into = tmp_path / "mine.toml"
    into.write_text("mine")
    code, _, err = recmill("init", events, "--into", into)
    assert (code, into.read_text()) == (2, "mine")
    assert "replace it with --force" in err
    assert recmill("init", events, "--into", into, "--force")[0] == 0


def test_without_a_terminal_a_question_is_an_error_that_names_the_flag(recmill: Run, tmp_path: Path) -> None:
    (tmp_path / "e.csv").write_text(EVENTS.replace("user,item", "a,b"))
    code, _, err = recmill("init", tmp_path / "e.csv", "--into", tmp_path / "mine.toml")
    assert code == 2
    assert err == (
        f"recmill: {tmp_path / 'e.csv'}: no name of a column tells: which one is the user? "
        "Give --user: a, b, rating, time.\n"
    )
    assert not (tmp_path / "mine.toml").exists()


def test_on_a_terminal_a_question_is_asked(
    recmill: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "e.csv").write_text(EVENTS.replace("user,item", "a,b"))
    answers = iter(["1", "b"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(answers))
    monkeypatch.setattr("recmill.cli.init._is_terminal", lambda: True)
    code, out, _ = recmill("init", tmp_path / "e.csv", "--into", tmp_path / "mine.toml")
    assert code == 0
    assert "user   a   5 users" in out
    assert "item   b   9 items" in out
