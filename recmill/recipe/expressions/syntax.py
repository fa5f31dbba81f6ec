"""The syntax tree of conditions and expressions: a few node types, each with a kind.

Kinds are those of columns (`recmill.recipe.kinds`), "decimal" (see rules.py), and "null" for a missing constant.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

Constant = int | float | str | bool | None


@dataclass(frozen=True)
class Node:
    """`at` is the index of its first character in the text."""

    at: int
    kind: str

    def children(self) -> Iterator[Node]:
        for field in fields(self):
            value = getattr(self, field.name)
            parts = value if isinstance(value, tuple) else (value,)
            for part in parts:
                if isinstance(part, Node):
                    yield part


@dataclass(frozen=True)
class ColumnNode(Node):
    name: str


@dataclass(frozen=True)
class Literal(Node):
    value: Constant


@dataclass(frozen=True)
class Logic(Node):
    """`and` or `or` of two or more operands."""

    operator: str
    operands: tuple[Node, ...]


@dataclass(frozen=True)
class Not(Node):
    operand: Node


@dataclass(frozen=True)
class Compare(Node):
    """One of = <> < <= > >=."""

    operator: str
    left: Node
    right: Node


@dataclass(frozen=True)
class Between(Node):
    operand: Node
    low: Node
    high: Node


@dataclass(frozen=True)
class In(Node):
    """Whether a value is one of some constants."""

    operand: Node
    values: tuple[Literal, ...]


@dataclass(frozen=True)
class Member(Node):
    """Whether a value is an element of a list."""

    operand: Node
    list: Node


@dataclass(frozen=True)
class Is(Node):
    """`is` null, true or false: never null itself."""

    operand: Node
    value: bool | None


@dataclass(frozen=True)
class Like(Node):
    """`%` matches any text, `_` any one character."""

    operand: Node
    pattern: str
    ignores_case: bool


@dataclass(frozen=True)
class Arithmetic(Node):
    """Operands of one precedence from left to right, with the operators (+ - * / % ||) between them."""

    operators: tuple[str, ...]
    operands: tuple[Node, ...]


@dataclass(frozen=True)
class Negative(Node):
    operand: Node


@dataclass(frozen=True)
class FunctionCall(Node):
    function: str
    arguments: tuple[Node, ...]


@dataclass(frozen=True)
class Case(Node):
    """The result of the first condition that is true; `otherwise` when none is."""

    conditions: tuple[Node, ...]
    results: tuple[Node, ...]
    otherwise: Node


@dataclass(frozen=True)
class CastNode(Node):
    """Cast to the node's kind; values that cannot be converted become null."""

    operand: Node


def columns_of(node: Node) -> list[str]:
    """The distinct columns that a tree reads, in the order of the text."""
    found: dict[str, None] = {}
    waiting = [node]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ColumnNode):
            found[node.name] = None
        waiting += reversed(list(node.children()))
    return list(found)
