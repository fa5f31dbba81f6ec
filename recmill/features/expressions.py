"""Compiles trees of `recmill.recipe.expressions` to Polars expressions.

Null as in SQL: comparing or computing with null gives null, `and` and `or` have three-valued logic, and a row whose
condition is null does not meet it. NaN equals itself and is above every other number.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import lru_cache, singledispatch

import polars as pl

from recmill.features.base import selected
from recmill.features.kernels import is_text
from recmill.features.numeric import dtype_of
from recmill.recipe.expressions import Node, columns_of, parse_filter
from recmill.recipe.expressions import syntax as x
from recmill.recipe.expressions.rules import DIGITS_OF_QUOTIENTS, common_kind, kind_of_result, together
from recmill.recipe.kinds import LIST_OF, element_of

_EMPTY = "null"


def kinds_of_schema(schema: Mapping[str, pl.DataType]) -> dict[str, str]:
    """Name -> kind of the columns that conditions can read."""
    found = {name: _kind_of_dtype(dtype) for name, dtype in schema.items()}
    return {name: kind for name, kind in found.items() if kind is not None}


def _kind_of_dtype(dtype: pl.DataType) -> str | None:
    if isinstance(dtype, pl.List):
        element = _kind_of_dtype(dtype.inner)  # type: ignore[arg-type]
        return None if element is None or element.startswith(LIST_OF) else LIST_OF + element
    if is_text(dtype):
        return "text"
    if dtype == pl.Boolean:
        return "bool"
    return "int" if dtype.is_integer() else "float" if dtype.is_float() else None


def keep_where(sql: str, frame: pl.DataFrame) -> pl.DataFrame:
    """The rows that meet a recipe's condition."""
    return frame.filter(matches(sql, frame))


def matches(sql: str, frame: pl.DataFrame) -> pl.Series:
    """Which rows meet a recipe's condition; null counts as no."""
    return evaluate_condition(sql, frame).fill_null(False)


def evaluate_condition(sql: str, frame: pl.DataFrame) -> pl.Series:
    """A recipe's condition for each row: true, false, or null where it depends on a null."""
    node, condition = _filter(sql, tuple(kinds_of_schema(frame.schema).items()))
    rows = frame.select(columns_of(node))
    if not rows.width:
        rows = pl.DataFrame({_EMPTY: pl.Series([None] * frame.height, dtype=pl.Boolean)})
    return selected(rows, [condition.alias("matches")])["matches"]


def columns_read(sql: str, kinds: Mapping[str, str]) -> list[str]:
    """The columns that a recipe's condition reads."""
    return columns_of(_filter(sql, tuple(kinds.items()))[0])


@lru_cache(256)
def _filter(sql: str, kinds: tuple[tuple[str, str], ...]) -> tuple[Node, pl.Expr]:
    node = parse_filter(sql, dict(kinds))
    return node, compiled(node)


# trees to Polars


@singledispatch
def compiled(node: Node) -> pl.Expr:
    """The tree as a Polars expression, whose length is bounded by its number of nodes."""
    raise AssertionError(node)


@compiled.register
def _(node: x.ColumnNode) -> pl.Expr:
    return pl.col(node.name)


@compiled.register
def _(node: x.Literal) -> pl.Expr:
    return pl.lit(node.value, dtype=_dtype(node.kind))


@compiled.register
def _(node: x.Logic) -> pl.Expr:
    return _balanced(node.operator, [_truth(operand) for operand in node.operands])


def _balanced(operator: str, operands: list[pl.Expr]) -> pl.Expr:
    """Combine operands as a balanced tree: a chain would be as deep as it is long."""
    if len(operands) == 1:
        return operands[0]
    middle = len(operands) // 2
    left, right = _balanced(operator, operands[:middle]), _balanced(operator, operands[middle:])
    return left & right if operator == "and" else left | right


@compiled.register
def _(node: x.Not) -> pl.Expr:
    return ~_truth(node.operand)


@compiled.register
def _(node: x.Compare) -> pl.Expr:
    left, right = _alike(node.left, node.right)
    return _COMPARISONS[node.operator](left, right)


_COMPARISONS: dict[str, Callable[[pl.Expr, pl.Expr], pl.Expr]] = {
    "=": pl.Expr.__eq__,
    "<>": pl.Expr.__ne__,
    "<": pl.Expr.__lt__,
    "<=": pl.Expr.__le__,
    ">": pl.Expr.__gt__,
    ">=": pl.Expr.__ge__,
}


@compiled.register
def _(node: x.Between) -> pl.Expr:
    operand, low, high = _alike(node.operand, node.low, node.high)
    return (operand >= low) & (operand <= high)


@compiled.register
def _(node: x.In) -> pl.Expr:
    kind = common_kind((node.operand, *node.values), "compared")
    values = [value.value for value in node.values if value.value is not None]
    constants = pl.Series(values, dtype=_dtype(kind), strict=False)
    found = _as(node.operand, kind).is_in(constants.implode())
    if not columns_of(node.operand):
        # otherwise Polars would treat it as a column of one row, which it does not repeat
        found = found.first()
    # Not being among the others is unknown when one of them is null.
    return found if len(values) == len(node.values) else pl.when(found).then(True)


@compiled.register
def _(node: x.Member) -> pl.Expr:
    kind = together(element_of(node.list.kind), node.operand.kind) or "null"
    lists = compiled(node.list).cast(pl.List(_dtype(kind)))
    value = _as(node.operand, kind)
    return pl.when(value.is_not_null()).then(lists.list.contains(value))


@compiled.register
def _(node: x.Is) -> pl.Expr:
    if node.value is None:
        return compiled(node.operand).is_null()
    return _truth(node.operand).eq_missing(pl.lit(node.value))


@compiled.register
def _(node: x.Like) -> pl.Expr:
    operand = compiled(node.operand).cast(pl.String)
    return operand.str.contains(_regex_of(node.pattern, node.ignores_case))


def _regex_of(pattern: str, ignores_case: bool) -> str:
    """A regex for Polars, whose matcher takes linear time. At the ends, `%` is expressed by leaving out the anchor."""
    inner = pattern.strip("%")
    parts = re.findall("%+|_|[^%_]+", inner)
    middle = "".join(_WILDCARDS.get(part[0]) or pl.escape_regex(part) for part in parts)
    begin = "" if pattern.startswith("%") else "^"
    end = "" if pattern.endswith("%") else "$"
    return f"(?s{'i' * ignores_case}){begin}{middle}{end}"


_WILDCARDS = {"%": ".*", "_": "."}


# only in expressions


@compiled.register
def _(node: x.Arithmetic) -> pl.Expr:
    if node.operators[0] == "||":
        return pl.concat_str([compiled(operand).cast(pl.String) for operand in node.operands])
    result, kind = _number(node.operands[0]), node.operands[0].kind
    for operator, operand in zip(node.operators, node.operands[1:], strict=True):
        result = _OPERATORS[operator](result, _number(operand))
        kind = kind_of_result(operator, kind, operand.kind)
        if operator == "/" and kind == "decimal":
            result = result.round(DIGITS_OF_QUOTIENTS)
    return result


def _number(node: Node) -> pl.Expr:
    return compiled(node) if node.kind in ("int", "float", "decimal") else _as(node, "int")


def _remainder(left: pl.Expr, right: pl.Expr) -> pl.Expr:
    """The remainder with the sign of the left operand, as in SQL; Polars uses that of the right one."""
    return left.abs() % right.abs() * left.sign()


_OPERATORS: dict[str, Callable[[pl.Expr, pl.Expr], pl.Expr]] = {
    "+": pl.Expr.__add__,
    "-": pl.Expr.__sub__,
    "*": pl.Expr.__mul__,
    "/": pl.Expr.__truediv__,
    "%": _remainder,
}


@compiled.register
def _(node: x.Negative) -> pl.Expr:
    return -_number(node.operand)


@compiled.register
def _(node: x.FunctionCall) -> pl.Expr:
    return _FUNCTIONS[node.function](node)


def _of_number(function: Callable[[pl.Expr], pl.Expr]) -> Callable[[x.FunctionCall], pl.Expr]:
    return lambda node: function(_as(node.arguments[0], node.kind))


def _of_text(function: Callable[..., pl.Expr]) -> Callable[[x.FunctionCall], pl.Expr]:
    return lambda node: function(*(_as(argument, "text") for argument in node.arguments))


def _of_all(function: Callable[[list[pl.Expr]], pl.Expr]) -> Callable[[x.FunctionCall], pl.Expr]:
    return lambda node: function([_as(argument, node.kind) for argument in node.arguments])


def _round(node: x.FunctionCall) -> pl.Expr:
    number, *digits = node.arguments
    return _as(number, node.kind).round(_constant(digits[0]) if digits else 0)


def _substr(node: x.FunctionCall) -> pl.Expr:
    text, *numbers = node.arguments
    start, *length = map(_constant, numbers)
    return _as(text, "text").str.slice(start - 1, length[0] if length else None)


def _constant(node: Node) -> int:
    assert isinstance(node, x.Literal)
    assert isinstance(node.value, int)
    return node.value


def _nullif(node: x.FunctionCall) -> pl.Expr:
    left, right = _alike(*node.arguments)
    return pl.when(left.ne_missing(right)).then(compiled(node.arguments[0]))


_FUNCTIONS: dict[str, Callable[[x.FunctionCall], pl.Expr]] = {
    "abs": _of_number(pl.Expr.abs),
    "ceil": _of_number(pl.Expr.ceil),
    "floor": _of_number(pl.Expr.floor),
    "sign": _of_number(pl.Expr.sign),
    "round": _round,
    "sqrt": _of_number(pl.Expr.sqrt),
    "exp": _of_number(pl.Expr.exp),
    "ln": _of_number(pl.Expr.log),
    "log2": _of_number(lambda number: number.log(2)),
    "log10": _of_number(pl.Expr.log10),
    "log1p": _of_number(pl.Expr.log1p),
    "pow": _of_all(lambda numbers: numbers[0].pow(numbers[1])),
    "coalesce": _of_all(pl.coalesce),
    "greatest": _of_all(pl.max_horizontal),
    "least": _of_all(pl.min_horizontal),
    "nullif": _nullif,
    "lower": _of_text(lambda text: text.str.to_lowercase()),
    "upper": _of_text(lambda text: text.str.to_uppercase()),
    "trim": _of_text(lambda text: text.str.strip_chars()),
    "length": _of_text(lambda text: text.str.len_chars().cast(pl.Int64)),
    "substr": _substr,
    "starts_with": _of_text(lambda text, part: text.str.starts_with(part)),
    "ends_with": _of_text(lambda text, part: text.str.ends_with(part)),
    "array_length": lambda node: compiled(node.arguments[0]).list.len().cast(pl.Int64),
}


@compiled.register
def _(node: x.Case) -> pl.Expr:
    result = _as(node.otherwise, node.kind)
    for condition, value in zip(reversed(node.conditions), reversed(node.results), strict=True):
        result = pl.when(_truth(condition)).then(_as(value, node.kind)).otherwise(result)
    return result


@compiled.register
def _(node: x.CastNode) -> pl.Expr:
    return compiled(node.operand).cast(_dtype(node.kind), strict=False)


# kinds


def _truth(node: Node) -> pl.Expr:
    return _as(node, "bool")


def _as(node: Node, kind: str) -> pl.Expr:
    return compiled(node).cast(_dtype(kind))


def _alike(*nodes: Node) -> list[pl.Expr]:
    """The nodes cast to their common kind."""
    kind = common_kind(nodes, "compared")
    return [_as(node, kind) for node in nodes]


def _dtype(kind: str) -> pl.DataType:
    return pl.Null() if kind == "null" else dtype_of("float" if kind == "decimal" else kind)
