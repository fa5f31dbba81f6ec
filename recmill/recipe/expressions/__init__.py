"""Conditions and expressions over the columns of a row, for requests and recipes."""

from recmill.recipe.expressions.parse import parse_condition, parse_expression, parse_filter, parse_score
from recmill.recipe.expressions.syntax import Node, columns_of

__all__ = ["Node", "columns_of", "parse_condition", "parse_expression", "parse_filter", "parse_score"]
