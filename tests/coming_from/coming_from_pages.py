"""The tables of the coming-from pages about training and serving, row by row."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
# Page -> the shipped recipe that its values change.
BASES = {
    "deeprec": "criteo-deeprec",
    "e2eaiok": "criteo-dlrm",
    "ray-notebook": "criteo-dcn",
    "intel-wide-deep": "criteo-widedeep",
    "friesian-serving": "recsys2021",
}
CODE = re.compile(r"`([^`]+)`")
VALUE = re.compile(r"[a-z][\w.\[\]]*=.*")
# What a server answers: a path, a method of its gRPC service, a metric.
CALL = re.compile(r"(?:GET|POST) /\S+|rpc \w+|recmill_\w+")
KEY = re.compile(r"(?:log|split|table|ranking|retrieval)(?:\.[a-z_]+)+")


@dataclass(frozen=True)
class Part:
    """One thing that a row names on our side: a key with its value, a flag of a command, a call, or a recipe."""

    name: str
    value: Any = None


@dataclass(frozen=True)
class Row:
    """What they call it, what it is here, and what differs."""

    page: str
    theirs: tuple[str, ...]
    codes: tuple[str, ...]
    differs: str

    @property
    def base(self) -> str:
        return BASES[self.page]

    @property
    def values(self) -> list[str]:
        """What goes after --set."""
        return [code for code in self.codes if VALUE.fullmatch(code)]

    @property
    def command(self) -> list[str] | None:
        commands = [code for code in self.codes if code.startswith("recmill ")]
        assert len(commands) <= 1, "a row shows one command"
        return shlex.split(commands[0])[1:] if commands else None

    @property
    def recipes(self) -> list[str]:
        known = {*self.values, *self.calls}
        return [code for code in self.codes if code not in known and not code.startswith("recmill ")]

    @property
    def calls(self) -> list[str]:
        return [code for code in self.codes if CALL.fullmatch(code)]

    def parts(self) -> Iterator[Part]:
        for value in self.values:
            key, _, text = value.partition("=")
            yield from _leaves(key, toml_value(text))
        for recipe in self.recipes:
            yield Part("recipe", recipe)
        yield from map(Part, self.calls)
        if self.command:
            flags, name = flags_of(self.command), " ".join(name_of(self.command))
            yield from (Part(f"{name} {flag}", value) for flag, value in flags.items())
            if not flags:
                yield Part(" ".join(self.command))

    def __str__(self) -> str:
        return f"{self.page} {self.theirs[0]}"


def page_text(page: str) -> str:
    """A page without its fenced blocks, which test_docs.py looks at."""
    text = (ROOT / "docs" / f"coming-from-{page}.md").read_text(encoding="utf-8")
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def rows_of(page: str) -> list[Row]:
    found = []
    for line in page_text(page).splitlines():
        if line.startswith("| `"):
            theirs, ours, differs = (cell.strip() for cell in line.strip("|").split(" |"))
            found.append(Row(page, tuple(CODE.findall(theirs)), tuple(CODE.findall(ours)), differs))
            assert found[-1].codes or ours == "none", line
    return found


ALL_ROWS = [row for page in BASES for row in rows_of(page)]


def toml_value(text: str) -> Any:
    """As --set reads it; None for a key that is taken out."""
    try:
        return tomllib.loads(f"value = {text}")["value"] if text else None
    except tomllib.TOMLDecodeError:
        return text


def _leaves(key: str, value: Any) -> Iterator[Part]:
    """A table is as many values as it has keys; a split is one."""
    if isinstance(value, dict) and key != "split":
        for name, inner in value.items():
            yield from _leaves(f"{key}.{name}", inner)
    else:
        yield Part(key, value)


def name_of(command: Sequence[str]) -> list[str]:
    """The word of a command; two of one that has commands of its own."""
    return list(command[: 2 if command[0] == "bench" else 1])


def flags_of(command: Sequence[str]) -> dict[str, str | None]:
    """Flags of a command with what follows them."""
    found: dict[str, str | None] = {}
    for word, following in zip(command, [*command[1:], "--"], strict=True):
        if word.startswith("-"):
            found[word] = None if following.startswith("-") else following
    return found
