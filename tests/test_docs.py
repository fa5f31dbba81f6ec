"""The documentation: commands parse, links lead somewhere, nothing shipped is left out."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import recmill.recipe.recipe as r
from recmill.cli import build_parser
from recmill.config import flag_fields
from recmill.recipe.load import recipe_from_dict, shipped_recipes
from recmill.stages.evaluate.config import EvaluateConfig
from recmill.stages.export.config import ExportConfig
from recmill.stages.init.config import InitConfig
from recmill.stages.prepare.config import PrepareConfig
from recmill.stages.score.config import ScoreConfig
from recmill.stages.serve.config import ServeConfig
from recmill.stages.train.config import FollowConfig, RayTrainConfig, TrainConfig
from recmill.stages.tune.config import TuneConfig

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def page(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def fenced(path: Path) -> Iterator[tuple[str, str]]:
    """Language and text of every fenced block."""
    return ((match[1], match[2]) for match in FENCE.finditer(page(path)))


def commands() -> Iterator[Any]:
    """Every `recmill ...` line of every fenced block, continued lines joined."""
    for path in PAGES:
        for _, block in fenced(path):
            for line in block.replace("\\\n", " ").splitlines():
                text = line.strip().removeprefix("$ ")
                if re.match(r"recmill\s+[a-z-]", text):
                    yield pytest.param(text, id=f"{path.name}: {text}"[:100])


def anchors(path: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", page(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("line", list(commands()))
def test_a_command_in_the_documentation_parses(line: str) -> None:
    # What follows two spaces, a pipe or a redirection is not part of the command.
    command = re.split(r"\s{2,}|\s[|>&#]", line.removeprefix("recmill").strip())[0]
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            build_parser().parse_args(shlex.split(command))
    except SystemExit as exit:
        if exit.code:
            pytest.fail(f"{line}: {said.getvalue().splitlines()[-1]}")


def flags_by_command(parser: argparse.ArgumentParser, name: str = "recmill") -> dict[str, set[str]]:
    found = {name: {flag for action in parser._actions for flag in action.option_strings}}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, inner in action.choices.items():
                found |= flags_by_command(inner, f"{name} {word}")
    return found


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_in_prose_have_the_flags_that_are_named(path: Path) -> None:
    known, wrong = flags_by_command(build_parser()), []
    for code in re.findall(r"`(recmill [a-z][^`]*)`", FENCE.sub("", page(path))):
        words = code.split()
        for first in words[1].split("|"):  # `recmill serve|score --trust-code` is about both
            inner = f"recmill {first} {words[2].split('|')[0]}" if len(words) > 2 else ""
            command = inner if inner in known else f"recmill {first}"
            named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", code))
            if command not in known or not named <= known[command]:
                wrong.append(code)
    assert wrong == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(path: Path) -> None:
    missing = []
    for link in LINK.findall(FENCE.sub("", page(path))):
        target, _, anchor = link.partition("#")
        if "://" in link or link.startswith("mailto:"):
            continue
        file = (path.parent / target).resolve() if target else path
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file)):
            missing.append(link)
    assert missing == []


@pytest.mark.parametrize("name", sorted(shipped_recipes()))
def test_every_shipped_recipe_is_documented(name: str) -> None:
    assert f"| `{name}` |" in page(ROOT / "docs" / "recipes.md")


def test_every_key_of_a_recipe_is_documented() -> None:
    text = page(ROOT / "docs" / "recipes.md")
    sections = [
        r.Recipe,
        r.Log,
        r.Column,
        r.Holdout,
        r.Feature,
        r.Label,
        r.TableLayout,
        r.Ranking,
        r.Retrieval,
    ]
    sections += [r.Training, r.Optimizer, r.Schedule, r.Saving, r.Dynamic, r.Tune, r.Range]
    sections += r.ROW_OPERATIONS.values()
    keys = {field.name for section in sections for field in dataclasses.fields(section)} - {
        "rows",
        "tables",
        "labels",
    }
    assert sorted(key for key in keys if not re.search(rf"[`\[.]{key}\b", text)) == []
    assert sorted(name for name in r.ROW_OPERATIONS if f"| `{name}` |" not in text) == []


def test_the_recipe_on_the_recipes_page_is_right() -> None:
    blocks = [text for language, text in fenced(ROOT / "docs" / "recipes.md") if language == "toml"]
    whole = next(text for text in blocks if text.startswith("name ="))
    assert recipe_from_dict(tomllib.loads(whole)).name == "mine"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_toml_blocks_are_toml(path: Path) -> None:
    for language, text in fenced(path):
        if language == "toml":
            tomllib.loads(text)


# The page that documents the flags of each config.
FLAGS_ON_PAGES: dict[type, str] = {
    PrepareConfig: "prepare.md",
    TrainConfig: "train.md",
    RayTrainConfig: "ray.md",
    FollowConfig: "freshness.md",
    EvaluateConfig: "evaluate.md",
    ScoreConfig: "score.md",
    ExportConfig: "export.md",
    ServeConfig: "serve.md",
    TuneConfig: "tune.md",
    InitConfig: "first-hour.md",
}


@pytest.mark.parametrize("config", FLAGS_ON_PAGES)
def test_every_flag_of_a_config_is_on_its_page(config: type) -> None:
    text = page(ROOT / "docs" / FLAGS_ON_PAGES[config])
    flags = [flag.option for flag in flag_fields(config)]
    missing = [flag for flag in flags if not re.search(rf"--(no-)?{flag.removeprefix('--')}(?![\w-])", text)]
    assert missing == []


def test_defaults_in_tables_of_flags_are_those_of_the_config() -> None:
    rows = re.findall(r"^\| `(--[a-z-]+)` \|[^|]*\| (\S+) \|$", page(ROOT / "docs/serve.md"), re.MULTILINE)
    shown = {flag.option: flag.kind.show(flag.default) for flag in flag_fields(ServeConfig)}
    assert len(rows) >= 8
    assert {flag: default for flag, default in rows if shown[flag] != default} == {}
