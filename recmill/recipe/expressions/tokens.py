"""Tokens of a text: words, numbers, texts and operators, each with its offset."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from recmill.errors import ExpressionError

MAX_CHARACTERS = 2_000
KEYWORDS = {
    "and", "as", "between", "case", "cast", "else", "end", "false", "ilike", "in", "is", "like", "not", "null", "or",
    "then", "true", "when",
}  # fmt: skip
_TOKEN = re.compile(
    r"""(?P<blank>[ \t\r\n]+)
    |(?P<number>(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)(?!\w)
    |(?P<word>[^\W\d]\w*)
    |'(?P<text>(?:[^']|'')*+)'
    |"(?P<quoted>(?:[^"]|"")++)"
    |(?P<sign><=|>=|<>|!=|==|\|\||[-+*/%<>=(),])""",
    re.VERBOSE,
)
_SAME = {"==": "=", "!=": "<>"}


@dataclass(frozen=True)
class Token:
    """A token. `kind` keyword has its word in lower case; a name may have been in double quotes."""

    kind: Literal["keyword", "name", "number", "text", "sign", "end"]
    text: str
    at: int
    shown: str

    def __str__(self) -> str:
        return "the end" if self.kind == "end" else _shortened(self.shown)


def tokens_of(text: str) -> Iterator[Token]:
    """All tokens and an end token. Raises ExpressionError for invalid text."""
    if len(text) > MAX_CHARACTERS:
        raise ExpressionError(
            MAX_CHARACTERS, f"expected at most {MAX_CHARACTERS:,} characters, got {len(text):,}"
        )
    at = 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise _not_a_token(text, at)
        if match.lastgroup != "blank":
            yield _token(match)
        at = match.end()
    yield Token("end", "", at, "")


def _token(match: re.Match[str]) -> Token:
    group, shown = str(match.lastgroup), match[0]
    found = match[group]
    if not shown.isprintable() and not _is_unicode(shown):
        raise ExpressionError(match.start(), "expected Unicode text, found half of a surrogate pair")
    if group == "word" and found.lower() in KEYWORDS:
        return Token("keyword", found.lower(), match.start(), shown)
    if group in ("word", "quoted"):
        return Token("name", found.replace('""', '"'), match.start(), shown)
    if group == "text":
        return Token("text", found.replace("''", "'"), match.start(), shown)
    if group == "number":
        return Token("number", found, match.start(), shown)
    return Token("sign", _SAME.get(found, found), match.start(), shown)


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _not_a_token(text: str, at: int) -> ExpressionError:
    if text[at] in "'\"":
        return ExpressionError(at, f"a quote ({text[at]}) is opened here and never closed")
    if text[at].isdigit() or text[at] == ".":
        word = re.compile(r"[\w.]*").match(text, at)
        found = word[0] if word and word[0] else text[at]
        return ExpressionError(at, f"{_shortened(found)} is neither a number nor a name")
    return ExpressionError(at, f"{text[at]!r} means nothing here")


def _shortened(text: str, longest: int = 40) -> str:
    return text if len(text) <= longest else text[:longest] + "..."
