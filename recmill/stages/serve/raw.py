"""Raw columns of requests: checked against the recipe, and converted to frames for the Plan."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import polars as pl

from recmill.errors import BadRequest
from recmill.features.numeric import dtype_of
from recmill.recipe.kinds import LIST_OF, kinds_of_columns, owners_of_columns
from recmill.recipe.recipe import Recipe

_LARGEST = 2**63
_MAX_LIST = 10_000


class RawColumns:
    """The raw columns that a recipe's features read: the kind of each, and its owner: user, item or context."""

    def __init__(self, recipe: Recipe) -> None:
        self.kinds = kinds_of_columns(recipe)
        self.owners = owners_of_columns(recipe)
        self._hex = {column.name for column in recipe.log.columns if column.type == "hex"}

    def of(self, *owners: str) -> list[str]:
        """Names of the columns of these owners; a column without an owner belongs to the context."""
        return [name for name in self.kinds if self.owners.get(name, "context") in owners]

    def typed(self, values: Mapping[str, Any], allowed: Collection[str], where: str) -> dict[str, Any]:
        """The values in the log's types; raises BadRequest that names what was expected."""
        return {name: self._typed(name, value, allowed, where) for name, value in values.items()}

    def _typed(self, name: str, value: Any, allowed: Collection[str], where: str) -> Any:
        if name not in allowed:
            raise BadRequest(
                f'{where} has a column "{name}"; expected some of: {", ".join(sorted(allowed))}.'
            )
        kind = self.kinds[name]
        if value is None:
            return None
        if not kind.startswith(LIST_OF):
            return self._one(name, value, kind, where)
        if not isinstance(value, (list, tuple)) or len(value) > _MAX_LIST:
            raise BadRequest(f'{where}: "{name}" must be a list of at most {_MAX_LIST:,} values.')
        element = kind.removeprefix(LIST_OF)
        return [None if part is None else self._one(name, part, element, where) for part in value]

    def _one(self, name: str, value: Any, kind: str, where: str) -> Any:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if kind == "text" and (isinstance(value, str) or (isinstance(value, int) and is_number)):
            return str(value).encode("utf-8", "replace").decode()  # JSON can carry lone surrogates
        if kind == "bool" and isinstance(value, bool):
            return value
        if kind == "float" and is_number and abs(value) <= sys.float_info.max:
            return float(value)
        if kind == "int" and (found := self._whole(name, value)) is not None:
            return found
        raise BadRequest(f'{where}: "{name}" must be {_EXPECTED[kind]}, got {_shown(value)}.')

    def _whole(self, name: str, value: Any) -> int | None:
        if isinstance(value, str):
            try:
                number = int(value, 16 if name in self._hex else 10)
            except ValueError:
                return None
        elif isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
            number = int(value)
        else:
            return None
        return number if -_LARGEST <= number < _LARGEST else None

    def frame(self, rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> pl.DataFrame:
        """Rows of these columns; absent values are null."""
        return pl.DataFrame(
            [
                pl.Series(name, [row.get(name) for row in rows], dtype_of(self.kinds[name]), strict=False)
                for name in columns
            ]
        )

    def cast(self, rows: pl.DataFrame, columns: Sequence[str]) -> pl.DataFrame:
        """These columns in the log's types; absent columns are null."""
        return rows.select(
            self._cast(rows, name).cast(dtype_of(self.kinds[name])).alias(name) for name in columns
        )

    def _cast(self, rows: pl.DataFrame, name: str) -> pl.Expr:
        if name not in rows.columns:
            return pl.lit(None)
        if name in self._hex and rows.schema[name] == pl.String:
            text = pl.col(name)
            return pl.when(text != "").then(text.str.to_integer(base=16))
        if self.kinds[name].startswith(LIST_OF) and not isinstance(rows.schema[name], pl.List):
            return pl.when(pl.col(name).is_not_null()).then(pl.concat_list(name))
        return pl.col(name)


_EXPECTED = {
    "text": "text",
    "bool": "true or false",
    "float": "a finite number",
    "int": "a whole number of 64 bits",
}


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
