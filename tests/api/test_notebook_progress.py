"""Progress in a Jupyter kernel, with a stand-in for IPython, which is no dependency of ours."""

from __future__ import annotations

import io
import sys
from types import ModuleType, SimpleNamespace

import pytest

from recmill.reporting import progress
from recmill.reporting.progress import Progress


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a notebook would show, one entry for each change."""
    changes: list[str] = []
    package, displays = ModuleType("IPython"), ModuleType("IPython.display")
    kernel = SimpleNamespace(config={"IPKernelApp": {}})

    def display(content: str, display_id: bool) -> SimpleNamespace:
        assert display_id
        changes.append(content)
        return SimpleNamespace(update=changes.append)

    package.get_ipython = lambda: kernel  # type: ignore[attr-defined]
    displays.HTML, displays.display = str, display  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", package)
    monkeypatch.setitem(sys.modules, "IPython.display", displays)
    monkeypatch.setattr(progress, "_SECONDS_BETWEEN_UPDATES", 0.0)
    return changes


def test_a_notebook_shows_a_bar_that_goes_away_at_the_end(shown: list[str]) -> None:
    with Progress(stream=io.StringIO()).stage("<train>", 10) as bar:
        bar.note = "step 4/10"
        bar.advance(4, 0)
    first, second, last = shown
    assert first == '<code>&lt;train&gt;</code> <progress max="10" value="0"></progress> <code></code>'
    assert (
        second == '<code>&lt;train&gt;</code> <progress max="10" value="4"></progress> <code>step 4/10</code>'
    )
    assert last == ""


def test_a_quiet_stage_shows_nothing(shown: list[str]) -> None:
    with Progress(quiet=True).stage("train", 10) as bar:
        bar.advance(4, 0)
    assert shown == []


def test_a_terminal_with_ipython_is_no_notebook(shown: list[str]) -> None:
    sys.modules["IPython"].get_ipython = lambda: SimpleNamespace(config={})
    with Progress(stream=io.StringIO()).stage("train", 10) as bar:
        bar.advance(4, 0)
    assert shown == []
