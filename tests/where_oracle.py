"""What conditions mean, one row at a time in plain Python: slow, and nothing of Polars. And inputs to try it with."""

from __future__ import annotations

import math
import operator
import random
import re
from collections.abc import Callable, Mapping
from typing import Any

from recmill.recipe.expressions import Node
from recmill.recipe.expressions import syntax as x

Row = Mapping[str, Any]
KINDS = {
    "n": "int", "price": "float", "word": "text", "is_new": "bool", "in": "int", "tags": "list of text",
    "ids": "list of int", "vals": "list of float",
}  # fmt: skip
ROWS: list[dict[str, Any]] = [
    {"n": n, "price": price, "word": word, "is_new": is_new, "in": 3, "tags": tags, "ids": ids, "vals": vals}
    for n, price, word, is_new, tags, ids, vals in [
        (0, 0.0, "", True, [], [], []),
        (1, -0.0, "a", False, ["a"], [1], [1.0]),
        (-7, 2.5, "ab", None, ["a", "b", None], [1, None], [2.5, -0.0]),
        (None, None, None, None, None, None, None),
        (2**53 + 1, math.nan, "a%b_c", True, ["%"], [2**53 + 1], [math.nan]),
        (-(2**63), math.inf, "it's\n", False, [None], [0, 0], [None]),
        (2**63 - 1, -math.inf, "日本é\0", True, ["", "it's\n"], [-7], [math.inf]),
        (3, 1e308, "AB\\.", False, ["AB\\."], [3, 2], [1e308]),
    ]
]


def meets(node: Node, row: Row) -> bool:
    """Whether a row meets a condition: only what is true does."""
    return value_of(node, row) is True


def value_of(node: Node, row: Row) -> Any:
    """The value of a tree for a row; None is null."""
    return _VALUES[type(node)](node, row)


def _logic(node: x.Logic, row: Row) -> bool | None:
    found = [value_of(operand, row) for operand in node.operands]
    decides = node.operator == "or"
    if decides in found:
        return decides
    return None if None in found else not decides


def _not(node: x.Not, row: Row) -> bool | None:
    found = value_of(node.operand, row)
    return None if found is None else not found


def _compare(node: x.Compare, row: Row) -> bool | None:
    return compared(node.operator, value_of(node.left, row), value_of(node.right, row))


def compared(sign: str, left: Any, right: Any) -> bool | None:
    if left is None or right is None:
        return None
    if isinstance(left, float) or isinstance(right, float):
        left, right = _order(float(left)), _order(float(right))
    if isinstance(left, str):
        left, right = left.encode(), right.encode()
    return bool(_SIGNS[sign](left, right))


def _order(number: float) -> tuple[bool, float]:
    """NaN equals itself and is above all."""
    return (True, 0.0) if math.isnan(number) else (False, number)


_SIGNS: dict[str, Callable[[Any, Any], Any]] = {
    "=": operator.eq, "<>": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip


def _between(node: x.Between, row: Row) -> bool | None:
    operand, low, high = (value_of(part, row) for part in (node.operand, node.low, node.high))
    if any(isinstance(part, float) for part in (operand, low, high)):
        operand, low, high = (None if part is None else float(part) for part in (operand, low, high))
    above, below = compared(">=", operand, low), compared("<=", operand, high)
    if above is False or below is False:
        return False
    return None if above is None or below is None else True


def _in(node: x.In, row: Row) -> bool | None:
    operand = value_of(node.operand, row)
    values = [value.value for value in node.values]
    if any(isinstance(value, float) for value in values) and operand is not None:
        operand = float(operand)
    found = [compared("=", operand, value) for value in values]
    return True if True in found else None if operand is None or None in found else False


def _member(node: x.Member, row: Row) -> bool | None:
    operand, values = value_of(node.operand, row), value_of(node.list, row)
    if operand is None or values is None:
        return None
    return any(compared("=", operand, value) for value in values)


def _is(node: x.Is, row: Row) -> bool:
    return value_of(node.operand, row) is node.value


def _like(node: x.Like, row: Row) -> bool | None:
    operand = value_of(node.operand, row)
    if operand is None:
        return None
    parts = {"%": ".*", "_": "."}
    pattern = "".join(parts.get(letter) or re.escape(letter) for letter in node.pattern)
    flags = re.DOTALL | (re.IGNORECASE if node.ignores_case else 0)
    return re.fullmatch(pattern, operand, flags) is not None


_VALUES: dict[type[Node], Callable[[Any, Row], Any]] = {
    x.ColumnNode: lambda node, row: row[node.name],
    x.Literal: lambda node, row: node.value,
    x.Logic: _logic,
    x.Not: _not,
    x.Compare: _compare,
    x.Between: _between,
    x.In: _in,
    x.Member: _member,
    x.Is: _is,
    x.Like: _like,
}


class Writer:
    """Writes conditions at random, by the grammar; most fit the columns of KINDS."""

    def __init__(self, random: random.Random) -> None:
        self.random = random

    def condition(self, depth: int = 3) -> str:
        choice = self.random.random()
        if depth and choice < 0.3:
            sign = self.random.choice([" and ", " or ", " AND "])
            return sign.join(self.condition(depth - 1) for _ in range(self.random.randint(2, 3)))
        if depth and choice < 0.45:
            return f"not {self.condition(depth - 1)}"
        if depth and choice < 0.6:
            return f"({self.condition(depth - 1)})"
        return self.predicate()

    def predicate(self) -> str:
        family = self.random.choice(["number", "number", "text", "bool", "list"])
        if self.random.random() < 0.03:
            family = "any"
        if family == "list":
            return self.random.choice(
                [
                    f"{self.value('text')} in tags",
                    f"{self.value('number')} {self.maybe('not ')}in ids",
                    f"{self.value('number')} in vals",
                    f"tags is {self.maybe('not ')}null",
                ]
            )
        operand = self.value(family)
        constants = ", ".join(self.constant(family) for _ in range(self.random.randint(1, 4)))
        choices = [
            f"{operand} {self.random.choice(['=', '==', '<>', '!=', '<', '<=', '>', '>='])} {self.value(family)}",
            f"{operand} {self.maybe('not ')}in ({constants})",
            f"{operand} {self.maybe('not ')}between {self.value(family)} and {self.value(family)}",
            f"{operand} is {self.maybe('not ')}null",
        ]
        if family == "text":
            pattern = "".join(
                self.random.choices(["%", "_", "a", "b", "A", ".", "\\", "本", "''", "(", "*"], k=4)
            )
            choices.append(
                f"{operand} {self.maybe('not ')}{self.random.choice(['like', 'ilike'])} '{pattern}'"
            )
        if family == "bool":
            choices += [operand, f"{operand} is {self.maybe('not ')}{self.random.choice(['true', 'false'])}"]
        return self.random.choice(choices)

    def maybe(self, word: str) -> str:
        return self.random.choice(["", word])

    def value(self, family: str) -> str:
        columns = {"number": ["n", "price", '"in"', "is_new"], "text": ["word"], "bool": ["is_new"]}
        names = columns.get(family) or ["n", "word", "tags", "nothing", '"n"']
        return self.random.choice(names) if self.random.random() < 0.6 else self.constant(family)

    def constant(self, family: str) -> str:
        constants = {
            "number": [
                "0", "1", "-7", "3", "2.5", "-0.0", ".5", "1e308", "9007199254740993", "9223372036854775807",
                "-9223372036854775808", "null", "1e-400", "true",
            ],
            "text": ["''", "'a'", "'ab'", "'it''s\n'", "'日本é\0'", "'%'", "null"],
            "bool": ["true", "false", "TRUE", "null"],
        }  # fmt: skip
        found = constants.get(family) or [one for many in constants.values() for one in many]
        return self.random.choice(found)


HOSTILE = [
    "price IN (SELECT x FROM read_csv('/etc/passwd'))",
    "n in (select 1)",
    "LENGTH(LPAD(word, 20000000, 'x')) > 1",
    "least() > 1",
    "repeat(word, 1000000000) = 'a'",
    "(" * 3_000,
    "((((((" * 200 + "n" + "))))))" * 200,
    "not " * 400 + "is_new",
    "n = " + "9" * 400,
    "n > 1e400",
    "price = " + "1" * 1_900 + ".5",
    "word like '" + "%a" * 900 + "'",
    "word like '" + "%a_" * 60 + "'",
    "n in (" + "1," * 900 + "1)",
    "word = '\ud800'",
    "\0",
    "n = 1\0",
    "n = 1; drop table x",
    "n = 1 -- x",
    "n = 1 /* x */",
    "word = 'a' union select 1",
    "ｎ = 1",
    "n ＝ 1",
    "n = ١",
    "n = 1e",
    "n = 0x10",
    "n = 1_000",
    "'" * 1_999,
    '"' * 1_999,
    '"' + "n" * 1_990 + '" = 1',
    "n" * 1_990 + " = 1",
    "is_new and " * 170 + "is_new",
    "word ilike '" + "_" * 200 + "'",
    "word like '" + "%_" * 100 + "'",
    "cast(n as text) = 'a'",
    "n + 1 > 2",
    "exists (select 1)",
    "n = any(ids)",
    "word ~ '(a+)+$'",
    "case when is_new then true end",
    "n between 1 and",
    "in = 3",
    "n in ()",
    "n is",
    "",
    " ",
    "tags = 'a'",
    "ids in ids",
    "word > 3",
    "n = 'a'",
    "not n",
    "tags",
    "null",
    "true",
    "null is null",
    "\u202e n = 1",
]


_PIECES = ["'", '"', "(", ")", "\0", "\ud800", "é", " or ", "null", "1e999", "%", "-", "SELECT "]


def mutated(text: str, random: random.Random) -> str:
    """One to three pieces of a text cut out, doubled, exchanged, or put in from somewhere else."""
    for _ in range(random.randint(1, 3)):
        at, until = sorted(random.choices(range(len(text) + 1), k=2))
        until = min(until, at + 12)
        piece = random.choice(
            [
                "",
                text[at:until] * 2,
                "'",
                '"',
                "(",
                ")",
                "\0",
                "\ud800",
                "é",
                " or ",
                "null",
                "1e999",
                "%",
                "-",
                "SELECT ",
            ]
        )
        text = text[:at] + piece + text[until:]
    return text


def some_input(writer: Writer) -> str:
    """A condition by the grammar, a hostile text, or one of these damaged."""
    random = writer.random
    choice = random.random()
    text = random.choice(HOSTILE) if choice < 0.15 else writer.condition()
    return mutated(text, random) if random.random() < 0.3 else text
