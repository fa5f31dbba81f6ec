"""docs/python.md: its code runs, in order, as one program, away from the checkout."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import recmill

PAGE = Path(__file__).parent.parent.parent / "docs" / "python.md"


def test_the_page_names_every_public_function() -> None:
    text = PAGE.read_text(encoding="utf-8")
    functions = [name for name in recmill.__all__ if name.islower()]
    assert [name for name in functions if f"`{name}(" not in text] == []


@pytest.mark.stages
@pytest.mark.processes
def test_the_code_of_the_page_runs_in_a_fresh_process(tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    program, temporary = tmp_path / "page.py", tmp_path / "tmp"
    program.write_text("\n".join(blocks), encoding="utf-8")
    temporary.mkdir()
    answer = subprocess.run(
        [sys.executable, str(program)],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(temporary)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    assert "ranking     test    auc" in answer.stdout
    assert list(temporary.glob("recmill-*")) == []  # what was not asked for is gone
    assert recmill.Checkpoint.open(tmp_path / "short").models == ["ranking"]
