"""HTML that is safe by construction: everything that is not Markup already is escaped."""

from __future__ import annotations

import html
import re

# Characters that neither HTML nor UTF-8 can represent: control characters and lone surrogates.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
_CHILDLESS = {"meta", "path", "line", "circle", "rect"}


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def escaped(text: str) -> Markup:
    """The text as HTML shows it; characters that no page may hold become a replacement mark."""
    if isinstance(text, Markup):
        return text
    return Markup(html.escape(_UNPRINTABLE.sub("\ufffd", text), quote=True))


def tag(name: str, /, *children: str, **attributes: str | float | None) -> Markup:
    """One element. In attribute names _ stands for -, a final _ is dropped (`class_`); None leaves one out."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escaped(_text(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _CHILDLESS:
        return Markup(f"<{name}{written}/>")
    return Markup(f"<{name}{written}>{joined(*children)}</{name}>")


def joined(*parts: str) -> Markup:
    return Markup("".join(escaped(part) for part in parts))


def _text(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value:.2f}".rstrip("0").rstrip(".")
