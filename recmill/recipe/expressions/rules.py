"""Type rules of conditions and expressions: valid combinations of kinds, and kinds of results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from recmill.errors import ExpressionError
from recmill.recipe.expressions.syntax import ColumnNode, Literal, Node
from recmill.recipe.kinds import NUMBERS, element_of, is_list

# A constant with a decimal point and no exponent is a decimal, and so is its result with whole numbers. Quotients of
# decimals are rounded.
_NUMBERS = (*NUMBERS, "decimal")
ANY_NUMBER = (*_NUMBERS, "null")
DIGITS_OF_QUOTIENTS = 6
CAST_NAMES: Mapping[str, str] = {
    "int": "int", "integer": "int", "bigint": "int", "float": "float", "double": "float", "real": "float",
    "text": "text", "varchar": "text", "string": "text", "bool": "bool", "boolean": "bool",
}  # fmt: skip


@dataclass(frozen=True)
class FunctionRule:
    """Kinds of each argument of a function (None: any), and of its result (None: the common kind of the arguments).

    `num_optional` of the last parameters may be left out; `repeats` allows any number of the last one; `constants`
    are parameters that cannot depend on the row, and their allowed values.
    """

    parameters: tuple[tuple[str, ...] | None, ...]
    result: str | None
    num_optional: int = 0
    repeats: bool = False
    constants: Mapping[int, range] = field(default_factory=dict)


_NUMBER, _INT, _TEXT, _LIST = ANY_NUMBER, ("int",), ("text", "null"), ("list",)
_SLICE = {1: range(1, 1 << 31), 2: range(1 << 31)}
_ALIKE = FunctionRule((None,), None, repeats=True)
_TO_FLOAT = FunctionRule((_NUMBER,), "float")
_OF_NUMBER = FunctionRule((_NUMBER,), None)
_OF_TEXT = FunctionRule((_TEXT,), "text")
FUNCTIONS: Mapping[str, FunctionRule] = {
    "abs": _OF_NUMBER, "ceil": _OF_NUMBER, "floor": _OF_NUMBER, "sign": _OF_NUMBER,
    "round": FunctionRule((_NUMBER, _INT), None, num_optional=1, constants={1: range(16)}),
    "sqrt": _TO_FLOAT, "exp": _TO_FLOAT, "ln": _TO_FLOAT, "log2": _TO_FLOAT, "log10": _TO_FLOAT, "log1p": _TO_FLOAT,
    "pow": FunctionRule((_NUMBER, _NUMBER), "float"),
    "coalesce": _ALIKE, "greatest": _ALIKE, "least": _ALIKE,
    "nullif": FunctionRule((None, None), None),
    "lower": _OF_TEXT, "upper": _OF_TEXT, "trim": _OF_TEXT,
    "length": FunctionRule((_TEXT,), "int"),
    "substr": FunctionRule((_TEXT, _INT, _INT), "text", num_optional=1, constants=_SLICE),
    "starts_with": FunctionRule((_TEXT, _TEXT), "bool"), "ends_with": FunctionRule((_TEXT, _TEXT), "bool"),
    "array_length": FunctionRule((_LIST,), "int"),
    "array_contains": FunctionRule((_LIST, None), "bool"),
}  # fmt: skip
ALIASES: Mapping[str, str] = {
    "ceiling": "ceil",
    "power": "pow",
    "char_length": "length",
    "substring": "substr",
}
AGGREGATES = {
    "avg", "count", "dense_rank", "first", "lag", "last", "lead", "max", "mean", "median", "min", "quantile", "rank",
    "row_number", "std", "stddev", "sum", "var", "variance",
}  # fmt: skip


def common_kind(nodes: Sequence[Node], doing: str) -> str:
    """The common kind of several nodes."""
    found = "null"
    for node in nodes:
        if is_list(node.kind):
            raise ExpressionError(node.at, f"{named(node)} is a {node.kind}, which cannot be {doing}")
        found = together(found, node.kind) or _clash(nodes, node, doing)
    return found


def together(left: str, right: str) -> str | None:
    """The common kind of two kinds; None when there is none."""
    if "null" in (left, right):
        return right if left == "null" else left
    if left == right:
        return left
    if left in _NUMBERS and right in _NUMBERS:
        return next(kind for kind in ("float", "decimal", "int") if kind in (left, right))
    return None


def kind_of_result(operator: str, left: str, right: str) -> str:
    """The kind of an arithmetic result: whole numbers give whole numbers, except that their quotients are floats."""
    kind = together(left, right)
    if kind in ("float", "decimal"):
        return kind
    return "float" if operator == "/" else "int"


def _clash(nodes: Sequence[Node], node: Node, doing: str) -> str:
    other = next(one for one in nodes if together(one.kind, node.kind) is None)
    raise ExpressionError(
        node.at, f"{named(other)} is {other.kind} and {named(node)} is {node.kind}; they cannot be {doing}"
    )


def need(node: Node, kinds: Sequence[str], what: str) -> None:
    """Raise when a node has none of these kinds."""
    if node.kind not in kinds and not ("list" in kinds and is_list(node.kind)):
        raise ExpressionError(node.at, f"expected {what}, but {named(node)} is {node.kind}")


def need_truth(node: Node) -> None:
    need(node, ("bool", "null"), "what is true or false")


def need_member(node: Node, lists: Node) -> None:
    """Raise when a value cannot be an element of a list."""
    need(lists, ("list",), "a column of lists")
    element = element_of(lists.kind)
    if is_list(node.kind) or together(node.kind, element) is None:
        raise ExpressionError(
            node.at, f"{named(node)} is {node.kind}, but {named(lists)} is a {lists.kind}; give it {element}"
        )


def need_result(node: Node, kind: str) -> None:
    """Raise when the result of a whole expression cannot have the requested kind."""
    if is_list(node.kind) != is_list(kind):
        raise ExpressionError(node.at, f"the expression gives {node.kind}, but its type is {kind}")
    if element_of(node.kind) == "text" and element_of(kind) != "text":
        raise ExpressionError(
            node.at, f'the expression gives {node.kind}, but its type is {kind}; set type = "{node.kind}"'
        )


def named(node: Node) -> str:
    if isinstance(node, ColumnNode):
        return f'column "{node.name}"'
    if isinstance(node, Literal):
        text = "null" if node.value is None else str(node.value)
        text = text if len(text) <= 40 else f"{text[:40]}..."
        return f"'{text}'" if isinstance(node.value, str) else text.lower()
    return "what stands here"
