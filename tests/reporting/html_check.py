"""A strict reader of HTML for tests: every tag is closed by its own, and the text can be looked at."""

from __future__ import annotations

from html.parser import HTMLParser

VOID = {"meta"}


class Document(HTMLParser):
    """All elements with their attributes, and all text, of a balanced page; an unbalanced one is an error."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(text)
        self.close()
        assert self.open == [], f"never closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), f"{tag} has an attribute twice: {names}"
        self.elements.append((tag, dict(attrs)))
        self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag, f"</{tag}> closes another element"

    def handle_data(self, data):
        self.texts.append((self.open[-1] if self.open else "", data))

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]

    def classed(self, class_: str) -> list[dict[str, str | None]]:
        return [
            attributes for _, attributes in self.elements if class_ in (attributes.get("class") or "").split()
        ]

    def inside(self, tag: str) -> list[str]:
        return [data for name, data in self.texts if name == tag]
