"""Parser of conditions and expressions, with a grammar that cannot access anything beyond the columns of one row.

    condition   := conjunction ("or" conjunction)*            conjunction := negation ("and" negation)*
    negation    := "not" negation | predicate
    predicate   := sum [("=" | "<>" | "<" | "<=" | ">" | ">=") sum | "is" ["not"] ("null" | "true" | "false")
                   | ["not"] ("between" sum "and" sum | "like" text | "ilike" text | "in" (constants | column))]
    sum         := product (("+" | "-" | "||") product)*      product := unary (("*" | "/" | "%") unary)*
    unary       := "-" unary | column | constant | "(" condition ")" | function "(" ... ")" | case | cast

Operators and functions of the last two lines are for expressions of recipes; conditions of requests have columns and
constants in their place. Length, depth and number of nodes are bounded, and so is the work per row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence

from recmill.errors import ExpressionError
from recmill.recipe.expressions import rules
from recmill.recipe.expressions.syntax import (
    Arithmetic,
    Between,
    Case,
    CastNode,
    ColumnNode,
    Compare,
    FunctionCall,
    In,
    Is,
    Like,
    Literal,
    Logic,
    Member,
    Negative,
    Node,
    Not,
    columns_of,
)
from recmill.recipe.expressions.tokens import Token, tokens_of
from recmill.recipe.kinds import is_list
from recmill.recipe.names import nearest

MAX_DEPTH = 32
MAX_NODES = 500
MAX_PATTERN = 200
_COMPARISONS = ("=", "<>", "<=", ">=", "<", ">")
# Where an operand is expected, these can only be names, unquoted in scores, where "like" is common.
_INFIX = ("and", "between", "ilike", "in", "is", "like", "or")
_LONGEST_NAME = 100
_INT64 = range(-(1 << 63), 1 << 63)


def parse_condition(text: str, kinds: Mapping[str, str]) -> Node:
    """A condition over columns and constants, as in requests; raises ExpressionError with the offset."""
    return _truth(_Parser(text, kinds, computes=False).whole())


def parse_filter(text: str, kinds: Mapping[str, str]) -> Node:
    """A condition of a recipe, which may compute; raises ExpressionError with the offset."""
    return _truth(_Parser(text, kinds, computes=True).whole())


def parse_expression(text: str, kinds: Mapping[str, str]) -> Node:
    """An expression with a value for each row; raises ExpressionError with the offset."""
    return _Parser(text, kinds, computes=True).whole()


def parse_score(text: str, tasks: Sequence[str]) -> Node:
    """A number computed from task probabilities; raises ExpressionError with the offset."""
    node = _Parser(
        text, dict.fromkeys(tasks, "float"), computes=True, unquoted=set(tasks) & set(_INFIX)
    ).whole()
    rules.need(node, rules.ANY_NUMBER, "a number for each row")
    if not columns_of(node):
        raise ExpressionError(0, f"expected a number made of tasks, which are: {', '.join(tasks)}")
    return node


def _truth(node: Node) -> Node:
    rules.need(node, ("bool", "null"), "a condition, which is true or false for each row")
    return node


class _Parser:
    def __init__(
        self, text: str, kinds: Mapping[str, str], computes: bool, unquoted: Collection[str] = ()
    ) -> None:
        self._tokens = list(tokens_of(text))
        self._next = 0
        self._kinds = kinds
        self._computes = computes
        self._unquoted = unquoted
        self._depth = 0
        self._num_nodes = 0

    def whole(self) -> Node:
        node = self._disjunction()
        if self._token.kind != "end":
            raise self._unexpected("and, or or the end")
        return node

    # tokens

    @property
    def _token(self) -> Token:
        return self._tokens[self._next]

    def _take(self) -> Token:
        self._next += 1
        return self._tokens[self._next - 1]

    def _sees(self, *texts: str) -> bool:
        return self._token.kind in ("keyword", "sign") and self._token.text in texts

    def _takes(self, *texts: str) -> Token | None:
        return self._take() if self._sees(*texts) else None

    def _expect(self, text: str) -> None:
        if not self._takes(text):
            raise self._unexpected(text)

    def _unexpected(self, expected: str) -> ExpressionError:
        token = self._token
        return ExpressionError(token.at, f"expected {expected}, found {token}{self._hint(token)}")

    def _hint(self, token: Token) -> str:
        if token.kind == "keyword" and token.shown in self._kinds:
            return f'; a column called like a keyword needs double quotes: "{token.shown}"'
        if token.kind == "name" and token.text.lower() == "select":
            return "; there are no subqueries"
        if token.kind == "sign" and token.text in "+-*/%||" and not self._computes:
            return "; conditions of requests do not compute"
        return ""

    def _made(self, node: Node) -> Node:
        """Every node passes here, so that their number stays bounded."""
        self._num_nodes += 1
        if self._num_nodes > MAX_NODES:
            raise ExpressionError(node.at, f"expected at most {MAX_NODES} columns, constants and operators")
        return node

    def _deeper(self, parse: Callable[[], Node]) -> Node:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise ExpressionError(self._token.at, f"expected at most {MAX_DEPTH} levels of nesting")
        node = parse()
        self._depth -= 1
        return node

    # boolean level

    def _disjunction(self) -> Node:
        return self._deeper(lambda: self._logic("or", lambda: self._logic("and", self._negation)))

    def _logic(self, operator: str, parse: Callable[[], Node]) -> Node:
        operands = [parse()]
        while self._takes(operator):
            operands.append(parse())
        if len(operands) == 1:
            return operands[0]
        for operand in operands:
            rules.need_truth(operand)
        return self._made(Logic(operands[0].at, "bool", operator, tuple(operands)))

    def _negation(self) -> Node:
        token = self._takes("not")
        if token is None:
            return self._predicate()
        operand = self._deeper(self._negation)
        rules.need_truth(operand)
        return self._made(Not(token.at, "bool", operand))

    def _predicate(self) -> Node:
        operand = self._sum()
        if self._sees(*_COMPARISONS):
            return self._comparison(operand)
        if self._takes("is"):
            return self._is(operand)
        negation = self._takes("not")
        for word, parse in (
            ("between", self._between),
            ("in", self._in),
            ("like", self._like),
            ("ilike", self._like),
        ):
            if self._sees(word):
                found = self._made(parse(operand))
                return self._made(Not(negation.at, "bool", found)) if negation else found
        if negation:
            raise self._unexpected("between, in, like or ilike")
        return operand

    def _comparison(self, left: Node) -> Node:
        operator = self._take()
        right = self._sum()
        rules.common_kind((left, right), "compared")
        return self._made(Compare(operator.at, "bool", operator.text, left, right))

    def _is(self, operand: Node) -> Node:
        negation = self._takes("not")
        word = self._takes("null", "true", "false")
        if word is None:
            raise self._unexpected("null, true or false")
        if word.text != "null":
            rules.need_truth(operand)
        value = {"null": None, "true": True, "false": False}[word.text]
        found = self._made(Is(operand.at, "bool", operand, value))
        return self._made(Not(negation.at, "bool", found)) if negation else found

    def _between(self, operand: Node) -> Node:
        self._expect("between")
        low = self._sum()
        self._expect("and")
        high = self._sum()
        rules.common_kind((operand, low, high), "compared")
        return Between(operand.at, "bool", operand, low, high)

    def _like(self, operand: Node) -> Node:
        word = self._take()
        if self._token.kind != "text":
            raise self._unexpected("a pattern in single quotes")
        pattern = self._take()
        rules.need(operand, ("text", "null"), f"text before {word.text}")
        if len(pattern.text) > MAX_PATTERN:
            raise ExpressionError(
                pattern.at,
                f"expected a pattern of at most {MAX_PATTERN} characters, got {len(pattern.text):,}",
            )
        return Like(operand.at, "bool", operand, pattern.text, word.text == "ilike")

    def _in(self, operand: Node) -> Node:
        self._expect("in")
        if not self._takes("("):
            lists = self._column(self._take()) if self._token.kind == "name" else None
            if lists is None:
                raise self._unexpected("constants in parentheses, or a column of lists")
            rules.need_member(operand, lists)
            return Member(operand.at, "bool", operand, lists)
        values = [self._constant()]
        while self._takes(","):
            values.append(self._constant())
        self._expect(")")
        rules.common_kind((operand, *values), "compared")
        return In(operand.at, "bool", operand, tuple(values))

    # values

    def _sum(self) -> Node:
        if not self._computes:
            return self._operand()
        return self._arithmetic(("+", "-", "||"), lambda: self._arithmetic(("*", "/", "%"), self._unary))

    def _arithmetic(self, signs: tuple[str, ...], parse: Callable[[], Node]) -> Node:
        operands, operators = [parse()], []
        while operator := self._takes(*signs):
            operators.append(operator.text)
            operands.append(parse())
        if not operators:
            return operands[0]
        kind = self._kind_of_arithmetic(operators, operands)
        return self._made(Arithmetic(operands[0].at, kind, tuple(operators), tuple(operands)))

    @staticmethod
    def _kind_of_arithmetic(operators: list[str], operands: list[Node]) -> str:
        if "||" in operators:
            if set(operators) != {"||"}:
                raise ExpressionError(operands[0].at, "|| stands beside + or -; expected parentheses")
            for operand in operands:
                rules.need(operand, ("text", *rules.ANY_NUMBER), "a text or a number")
            return "text"
        for operand in operands:
            rules.need(operand, rules.ANY_NUMBER, f"a number to {operators[0]}")
        kind = operands[0].kind
        for operator, operand in zip(operators, operands[1:], strict=True):
            kind = rules.kind_of_result(operator, kind, operand.kind)
        return kind

    def _unary(self) -> Node:
        if self._sees("-") and self._tokens[self._next + 1].kind != "number":
            token = self._take()
            operand = self._deeper(self._unary)
            rules.need(operand, rules.ANY_NUMBER, "a number after -")
            kind = "int" if operand.kind == "bool" else operand.kind
            return self._made(Negative(token.at, kind, operand))
        return self._operand()

    def _operand(self) -> Node:
        token = self._token
        if token.kind == "keyword" and token.text in self._unquoted:
            return self._column(self._take())
        if token.kind == "name":
            following = self._tokens[self._next + 1]
            if following.kind == "sign" and following.text == "(":
                return self._call()
            return self._column(self._take())
        if self._takes("("):
            node = self._disjunction()
            self._expect(")")
            return node
        if self._computes and self._sees("case"):
            return self._case()
        if self._computes and self._sees("cast"):
            return self._cast()
        return self._constant("a column, a constant or (")

    def _column(self, token: Token) -> Node:
        kind = self._kinds.get(token.text)
        if kind is None:
            hint = nearest(token.text[:_LONGEST_NAME], self._kinds)
            raise ExpressionError(token.at, f"there is no column {token}{hint}")
        return self._made(ColumnNode(token.at, kind, token.text))

    def _constant(self, expected: str = "a number, a text in single quotes, true, false or null") -> Literal:
        token = self._token
        node: Literal
        if self._takes("true", "false"):
            node = Literal(token.at, "bool", token.text == "true")
        elif self._takes("null"):
            node = Literal(token.at, "null", None)
        elif token.kind == "text":
            node = Literal(token.at, "text", self._take().text)
        else:
            is_negative = self._sees("-") and self._tokens[self._next + 1].kind == "number"
            if is_negative:
                self._take()
            if self._token.kind != "number":
                raise self._unexpected(expected)
            node = _number(token.at, ("-" if is_negative else "") + self._take().text)
        self._made(node)
        return node

    # only in expressions

    def _call(self) -> Node:
        token = self._take()
        name = rules.ALIASES.get(token.text.lower(), token.text.lower())
        if not self._computes:
            raise ExpressionError(
                token.at, f"expected a column, found {token}(); conditions have no functions"
            )
        if name in rules.AGGREGATES:
            raise ExpressionError(
                token.at,
                f"{token}() needs several rows at once; an expression must treat rows one by one. "
                "Use aggregate, count or target for statistics",
            )
        if name not in rules.FUNCTIONS:
            hint = nearest(name[:_LONGEST_NAME], rules.FUNCTIONS)
            raise ExpressionError(token.at, f"there is no function {token}(){hint}")
        self._expect("(")
        arguments: list[Node] = []
        while not self._takes(")"):
            if arguments:
                self._expect(",")
            arguments.append(self._disjunction())
        return self._made(_call(token, name, arguments))

    def _case(self) -> Node:
        at = self._take().at
        conditions: list[Node] = []
        results: list[Node] = []
        while self._takes("when"):
            conditions.append(self._disjunction())
            rules.need_truth(conditions[-1])
            self._expect("then")
            results.append(self._disjunction())
        if not conditions:
            raise self._unexpected("when")
        otherwise: Node = Literal(at, "null", None)
        if self._takes("else"):
            otherwise = self._disjunction()
        self._expect("end")
        kind = rules.common_kind((*results, otherwise), "results of one case")
        return self._made(Case(at, kind, tuple(conditions), tuple(results), otherwise))

    def _cast(self) -> Node:
        at = self._take().at
        self._expect("(")
        operand = self._disjunction()
        self._expect("as")
        if self._token.kind != "name" or self._token.text.lower() not in rules.CAST_NAMES:
            raise self._unexpected("int, float, text or bool")
        kind = rules.CAST_NAMES[self._take().text.lower()]
        self._expect(")")
        if is_list(operand.kind):
            raise ExpressionError(
                operand.at, f"{rules.named(operand)} is a {operand.kind}; lists have no cast"
            )
        if (operand.kind, kind) == ("text", "bool"):
            raise ExpressionError(operand.at, "text has no cast to bool; compare it with what is true")
        return self._made(CastNode(at, kind, operand))


def _number(at: int, text: str) -> Literal:
    if set(text) <= set("-0123456789"):
        value = int(text)
        if value not in _INT64:
            raise ExpressionError(at, f"a whole number of {len(text.lstrip('-'))} digits is beyond 64 bits")
        return Literal(at, "int", value)
    number = float(text)
    if not math.isfinite(number):
        raise ExpressionError(at, "the number is too large; the largest is about 1.8e308")
    return Literal(at, "float" if set(text) & set("eE") else "decimal", number)


def _call(token: Token, name: str, arguments: list[Node]) -> Node:
    function = rules.FUNCTIONS[name]
    most = math.inf if function.repeats else len(function.parameters)
    least = len(function.parameters) - function.num_optional
    if not least <= len(arguments) <= most:
        needs = f"{least} or more" if function.repeats else " or ".join(map(str, range(least, int(most) + 1)))
        raise ExpressionError(token.at, f"{token}() takes {needs} arguments, got {len(arguments)}")
    for number, argument in enumerate(arguments):
        accepted = function.parameters[min(number, len(function.parameters) - 1)]
        if accepted is not None:
            rules.need(argument, accepted, f"{accepted[0]} as argument {number + 1} of {name}()")
        allowed = function.constants.get(number)
        if allowed is not None and not (isinstance(argument, Literal) and argument.value in allowed):
            raise ExpressionError(
                argument.at,
                f"argument {number + 1} of {name}() must be a constant from {allowed[0]} to {allowed[-1]:,}",
            )
    if name == "array_contains":
        rules.need_member(arguments[1], arguments[0])
        return Member(token.at, "bool", arguments[1], arguments[0])
    if name == "nullif":
        rules.common_kind(arguments, "compared")
        return FunctionCall(token.at, arguments[0].kind, name, tuple(arguments))
    kind = function.result
    if kind is None:
        first = arguments[:1] if name == "round" else arguments
        kind = rules.common_kind(first, f"arguments of {name}()")
    return FunctionCall(token.at, kind, name, tuple(arguments))
