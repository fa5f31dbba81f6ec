"""The page about score: its Python runs as it stands, and it tells every flag, output and column."""

from __future__ import annotations

import re
from pathlib import Path

from shop import Shop
from small_criteo import read

from recmill.cli import build_parser

PAGE = Path(__file__).parent.parent.parent / "docs" / "score.md"


def test_the_first_command_and_the_python_of_the_page_run(
    recmill, shop: Shop, tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "quickstart").mkdir()
    for name in ("checkpoint", "table"):
        (tmp_path / "runs" / "quickstart" / name).symlink_to(shop.path / name)
    command = re.search(r"^recmill (score --checkpoint .*)$", PAGE.read_text(), re.MULTILINE)
    assert command is not None
    code, out, _ = recmill(*command[1].split())
    assert code == 0
    words = [line.split()[0] for line in out.splitlines()]
    assert words == ["model", "read", "AUC", "log", "wrote", "next"]
    python = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)[0]
    exec(python, {})
    assert "item_id" in capsys.readouterr().out
    for column in read(tmp_path / "runs" / "quickstart" / "scores").columns:
        assert f"`{column}`" in PAGE.read_text() or column in ("user_id", "item_id")


def test_every_flag_is_on_the_page() -> None:
    parsers = next(
        action for action in build_parser()._actions if action.choices and "score" in action.choices
    )
    flags = [flag for action in parsers.choices["score"]._actions for flag in action.option_strings]  # type: ignore[index,call-overload,union-attr]
    page = PAGE.read_text()
    assert [flag for flag in flags if f"`{flag}" not in page and flag not in ("-h", "--help", "--into")] == []
