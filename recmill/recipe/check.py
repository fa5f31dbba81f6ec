"""Validation of a recipe: columns exist, steps fit the values they get, sections agree with each other.

Bounds of numbers and names of choices are checked during parsing (`recmill.recipe.convert`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict

from recmill.errors import ExpressionError
from recmill.recipe import recipe as r
from recmill.recipe.check_features import check_features, check_labels, check_names, check_references
from recmill.recipe.check_inputs import check_binary_labels, check_held_out, check_inputs, check_refit
from recmill.recipe.check_models import check_models, check_ranking, check_recall, check_retrieval
from recmill.recipe.convert import Paths, default_of, paths_of
from recmill.recipe.expressions import columns_of, parse_filter
from recmill.recipe.kinds import added_kinds, describe, kind_of, kinds_of_columns
from recmill.recipe.names import nearest, repeated
from recmill.recipe.tuning import check_tune

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_KEYS = ("int", "text", "bool")


def problems_in(recipe: r.Recipe, paths: Paths | None = None, broken: Collection[str] = ()) -> list[str]:
    """Everything that would make this recipe fail later, as sentences that begin with a key path.

    Checks that need a `broken` section are skipped: their problems would follow from those already known.
    """
    untrusted = set(broken)
    problems: list[str] = []
    for check, needs in _CHECKS:
        if untrusted.isdisjoint(needs):
            found = list(check(recipe, paths or {}))
            problems += found
            if found and check is _check_rows:
                untrusted.add("rows")  # columns may be missing because of it
    return problems


def _check_recipe(recipe: r.Recipe, paths: Paths) -> Iterator[str]:
    if not _NAME.fullmatch(recipe.name):
        yield f'name must be made of letters, digits, ".", "_" and "-", got "{recipe.name}"'


# files and their columns


def _check_log(recipe: r.Recipe, paths: Paths) -> Iterator[str]:
    log = recipe.log
    yield from _check_files("log", log, paths)
    columns = {column.name: column for column in log.columns}
    for role in ("user", "item", "time"):
        name = getattr(log, role)
        if name is None:
            continue
        if name not in columns:
            yield f'log.{role} is "{name}", but the log has no such column{nearest(name, columns)}'
        elif role == "time" and kind_of(columns[name]) not in ("int", "float"):
            yield f'log.time is "{name}", which holds {describe(kind_of(columns[name]))}; expected numbers'
        elif role != "time" and kind_of(columns[name]) not in _KEYS:
            yield f'log.{role} is "{name}", which holds numbers; expected whole numbers or text'
        elif role != "time" and columns[name].of not in (role, "context"):
            yield f'log.{role} is "{name}", but that column has of = "{columns[name].of}"'
    if log.user is not None and log.user == log.item:
        yield f'log.user and log.item are both "{log.user}"'


def _check_tables(recipe: r.Recipe, paths: Paths) -> Iterator[str]:
    for name, table in recipe.tables.items():
        yield from _check_files(f"tables.{name}", table, paths)


def _check_files(path: str, spec: r.Files, paths: Paths) -> Iterator[str]:
    if not spec.files:
        yield f"{path}.files is empty; name at least one file or pattern"
    for index, pattern in enumerate(spec.files):
        if not pattern:
            yield f"{path}.files[{index}] is empty"
    if not spec.columns:
        yield f"{path}.columns is empty; name the columns of the file"
    for name in repeated(column.name for column in spec.columns):
        yield f'{path}.columns has "{name}" more than once'
    for column, where in zip(spec.columns, paths_of(paths, f"{path}.columns", spec.columns), strict=True):
        yield from _check_column(where, column)
        if column.in_file and spec.format == "delimited" and spec.header is False:
            yield f"{where}.in_file needs {path}.header = true: without it the file has no names"
    yield from _check_text_format(path, spec)


def _check_column(path: str, column: r.Column) -> Iterator[str]:
    if column.name.startswith("__"):
        yield f'{path}.name is "{column.name}"; names that begin with __ are reserved'
    if column.allowed is not None and not column.allowed:
        yield f"{path}.allowed is empty; no row would be good"
    if column.format and column.type != "time":
        yield f'{path}.format has no meaning for type = "{column.type}"; remove it, or write type = "time"'
    for value in column.allowed or ():
        if type(value) not in _ALLOWED[column.type] or (column.type == "hex" and not _is_hex(value)):
            shown = f'"{value}"' if isinstance(value, str) else str(value).lower()
            yield f"{path}.allowed has {shown}, but the column's type is {column.type}"


_ALLOWED: dict[str, tuple[type, ...]] = {
    "text": (str,),
    "bool": (bool,),
    "int": (int,),
    "hex": (int, str),
    "float": (int, float),
    "time": (int, float),
}


def _is_hex(value: object) -> bool:
    return isinstance(value, int) or bool(re.fullmatch(r"[0-9a-fA-F]{1,16}", str(value)))


def _check_text_format(path: str, spec: r.Files) -> Iterator[str]:
    if spec.format != "delimited":
        for name, value in asdict(r.TextFormat()).items():  # artifacts store these for every format
            if getattr(spec, name) not in (None, value):
                yield f'{path}.{name} has no meaning for format = "{spec.format}"; remove it'
        return
    yield from _check_text(path, spec.text)


def _check_text(path: str, text: r.TextFormat) -> Iterator[str]:
    if not text.separator:
        yield f"{path}.separator is empty"
    if set(text.separator) & set("\r\n"):
        yield f"{path}.separator must not hold line ends"
    if len(text.quote) > 1 or not text.quote.isascii() or text.quote in ("\r", "\n"):
        yield f'{path}.quote must be one ASCII character or empty, got "{text.quote}"'
    elif text.quote and text.quote in text.separator:
        yield f"{path}.quote and separator must differ"
    if text.escape and not text.quote:
        yield f"{path}.escape is for quotes inside of quoted fields; add quote, or remove it"
    elif len(text.escape) > 1 or not text.escape.isascii() or text.escape in ("\r", "\n"):
        yield f'{path}.escape must be one ASCII character or empty, got "{text.escape}"'
    elif text.escape and text.escape in text.quote + text.separator:
        yield f"{path}.escape must differ from quote and separator"


# rows


def _check_rows(recipe: r.Recipe, paths: Paths) -> Iterator[str]:
    kinds = {column.name: kind_of(column) for column in recipe.log.columns}
    after_split: str | None = None
    for index, operation in enumerate(recipe.rows):
        path = f"rows[{index}].{operation.operation_name()}"
        yield from _check_columns_read(operation, path, kinds)
        yield from _check_operation(recipe, operation, path, kinds)
        if after_split and not r.runs_after_split(operation):
            yield f"{path} comes after {after_split}, which needs the split to be made; put it before"
        if r.runs_after_split(operation):
            after_split = after_split or path
        added = added_kinds(recipe, operation, kinds)
        for name in added:
            if name in kinds:
                remedy = _how_to_rename(operation)
                yield f'{path} would add column "{name}", which the rows already have{remedy}'
        kinds.update(added)
    yield from _check_once(recipe)


def _how_to_rename(operation: r.RowOperation) -> str:
    return f"; rename it in tables.{operation.table}.columns" if isinstance(operation, r.Join) else ""


def _check_once(recipe: r.Recipe) -> Iterator[str]:
    if sum(isinstance(operation, r.Negatives) for operation in recipe.rows) > 1:
        yield "rows has negatives more than once; raise per_row of the first instead"
    joined = {operation.table for operation in recipe.rows if isinstance(operation, r.Join)}
    for name in recipe.tables if joined <= set(recipe.tables) else ():
        if name not in joined:
            yield f"tables.{name} is never joined; add a join to [[rows]] or remove the table"


# The kind that each column of an operation must have.
_GROUP_KEY = ("whole numbers or text", _KEYS)
_ORDER = ("numbers or text", ("int", "float", "text", "bool"))
_COLUMNS_READ: dict[type[r.RowOperation], dict[str, tuple[str, tuple[str, ...]]]] = {
    r.Join: {"on": _GROUP_KEY},
    r.Dedupe: {"by": _GROUP_KEY, "order": _ORDER},
    r.History: {
        "columns": ("one value a row", ("int", "float", "text", "bool")),
        "by": _GROUP_KEY,
        "order": _ORDER,
    },
    r.Lag: {"columns": ("numbers", ("int", "float")), "by": _GROUP_KEY, "order": _ORDER},
    r.Negatives: {"label": ("one value a row", ("int", "float", "text", "bool"))},
    r.HistoryNegatives: {"history": ("lists of items", ("list of int", "list of text", "list of bool"))},
}


def _check_columns_read(operation: r.RowOperation, path: str, kinds: Mapping[str, str]) -> Iterator[str]:
    for field, (needs, accepted) in _COLUMNS_READ.get(type(operation), {}).items():
        value = getattr(operation, field)
        names = (value,) if isinstance(value, str) else value
        if not names:
            yield f"{path}.{field} is empty; name at least one column"
        for name in repeated(names):
            yield f'{path}.{field} has "{name}" more than once'
        for name in names:
            yield from check_column(f"{path}.{field}", name, kinds, needs, accepted)


def check_column(
    path: str, name: str, kinds: Mapping[str, str], needs: str, accepted: Collection[str]
) -> Iterator[str]:
    """Check that a column exists and has the required kind."""
    if name not in kinds:
        yield f'{path} reads column "{name}", but the rows have no such column{nearest(name, kinds)}'
    elif kinds[name] not in accepted:
        yield f'{path} needs {needs}, but column "{name}" holds {describe(kinds[name])}'


def _check_operation(
    recipe: r.Recipe, operation: r.RowOperation, path: str, kinds: Mapping[str, str]
) -> Iterator[str]:
    if isinstance(operation, r.Filter):
        yield from _check_condition(f"{path}.sql", operation.sql, kinds)
    if isinstance(operation, r.Join):
        yield from _check_join(recipe, operation, path, kinds)
    if isinstance(operation, r.History) and operation.where is not None:
        yield from _check_condition(f"{path}.where", operation.where, kinds)
    if isinstance(operation, r.History) and operation.packed:
        for name in ("min_length", "last"):
            if getattr(operation, name) != default_of(r.History, name):
                yield f"{path}.{name} has no meaning beside packed, which chooses rows itself; remove it"
    if isinstance(operation, r.DRAWING) and recipe.log.item is None:
        yield f"{path} draws items, but log.item does not name the item column"
    if isinstance(operation, r.Negatives) and operation.label in kinds:
        yield from _check_label_value(path, operation, kinds[operation.label])


def _check_condition(path: str, sql: str, kinds: Mapping[str, str]) -> Iterator[str]:
    try:
        condition = parse_filter(sql, kinds)
    except ExpressionError as error:
        yield f"{path}, {error}"
        return
    if not columns_of(condition):
        yield f'{path} is "{sql}", which reads no column; the rows have: {", ".join(kinds)}'


def _check_label_value(path: str, negatives: r.Negatives, kind: str) -> Iterator[str]:
    value = negatives.label_value
    if isinstance(value, str) != (kind == "text") or (kind == "int" and isinstance(value, float)):
        shown = f'"{value}"' if isinstance(value, str) else value
        yield f'{path}.label_value is {shown}, but column "{negatives.label}" holds {describe(kind)}'


def _check_join(recipe: r.Recipe, join: r.Join, path: str, kinds: Mapping[str, str]) -> Iterator[str]:
    table = recipe.tables.get(join.table)
    if table is None:
        hint = nearest(join.table, recipe.tables)
        yield f'{path}.table is "{join.table}", but the recipe has no [tables.{join.table}]{hint}'
        return
    found = {column.name: kind_of(column) for column in table.columns}
    if join.on not in found:
        yield f'{path}.on is "{join.on}", but table {join.table} has no such column{nearest(join.on, found)}'
    elif join.on in kinds and kinds[join.on] != found[join.on]:
        sides = f"{kinds[join.on]} with {found[join.on]}"
        yield f'{path}.on joins {sides}; give column "{join.on}" one type on both sides'


# split and table


_MEANING = {
    "held_out": ("tail", "time", "hash", "random"),
    "held_out_files": ("files",),
    "column": ("time", "hash", "last", "random"),
    "order": ("last",),
    "eval_from": ("time",),
    "test_from": ("time",),
    "halve": ("tail", "files", "time", "hash", "random"),
    "seed": ("hash", "random"),
}
_SPLIT_COLUMNS = {
    "time": ("numbers", ("int", "float")),
    "hash": ("whole numbers or text", _KEYS),
    "last": ("whole numbers or text", _KEYS),
    "random": ("whole numbers or text", _KEYS),
}


def _check_split(recipe: r.Recipe, paths: Paths) -> Iterator[str]:
    split = recipe.split
    if split is None:
        return
    for name, meant_for in _MEANING.items():
        if getattr(split, name) != default_of(r.Holdout, name) and split.by not in meant_for:
            yield f'split.{name} has no meaning for by = "{split.by}"; remove it'
    for name, what in _missing_in(split):
        yield f'split.{name} is missing; split by "{split.by}" needs {what}'
    kinds = kinds_of_columns(recipe, before_split=True)
    if split.column is not None and split.by in _SPLIT_COLUMNS:
        yield from check_column("split.column", split.column, kinds, *_SPLIT_COLUMNS[split.by])
    if split.order is not None and split.by == "last":
        yield from check_column("split.order", split.order, kinds, *_ORDER)
    if split.by == "time":
        yield from _check_times(split)
    if split.by == "random":
        yield from _check_leaks(recipe)


def _missing_in(split: r.Holdout) -> Iterator[tuple[str, str]]:
    if split.held_out is None and (
        split.by in ("tail", "hash", "random") or (split.by == "time" and split.eval_from is None)
    ):
        yield "held_out", "the share of rows to hold out"
    if split.by == "files" and not split.held_out_files:
        yield "held_out_files", "the names or patterns to hold out"
    if split.column is None and split.by in _MEANING["column"]:
        yield "column", "a column"
    if split.order is None and split.by == "last":
        yield "order", "a column to order rows by"


def _check_leaks(recipe: r.Recipe) -> Iterator[str]:
    for index, operation in enumerate(recipe.rows):
        if isinstance(operation, r.History):
            path = f"rows[{index}].{operation.operation_name()}"
            yield (
                f'split.by is "random", so {path} would show held-out rows to the training rows after them; '
                'use by = "last" or by = "time", or remove it'
            )


def _check_times(split: r.Holdout) -> Iterator[str]:
    if split.eval_from is None:
        if split.test_from is not None:
            yield "split.eval_from is missing; test_from needs the time at which eval begins"
        return
    for name in ("held_out", "halve"):
        if getattr(split, name) != default_of(r.Holdout, name):
            yield f"split.{name} has no meaning beside eval_from, which says where to cut; remove one of them"
    if split.test_from is not None and split.test_from <= split.eval_from:
        yield f"split.test_from must be above eval_from, got {split.test_from} and {split.eval_from}"


def _check_table(recipe: r.Recipe, paths: Paths) -> Iterator[str]:
    kinds = kinds_of_columns(recipe)
    taken = {feature.name for feature in recipe.features} | {label.name for label in recipe.labels}
    layout = recipe.table
    for name in repeated(layout.keep):
        yield f'table.keep has "{name}" more than once'
    for name in layout.keep:
        if name not in kinds:
            yield f'table.keep has "{name}", but the rows have no such column{nearest(name, kinds)}'
        if f"raw_{name}" in taken:
            yield f'table.keep would add column "raw_{name}", which is a feature or label already'
    if layout.seed and layout.order != "shuffle":
        yield f'table.seed has no meaning for order = "{layout.order}"; remove it'


_ROWS = ("log", "tables", "rows")
# The checks, and the sections that must be valid for each.
_CHECKS: tuple[tuple[Callable[[r.Recipe, Paths], Iterator[str]], tuple[str, ...]], ...] = (
    (_check_recipe, ("name",)),
    (_check_log, ("log",)),
    (_check_tables, ("tables",)),
    (_check_rows, _ROWS),
    (_check_split, (*_ROWS, "split")),
    (check_labels, _ROWS),
    (check_features, _ROWS),
    (check_names, ("features", "labels")),
    (check_references, (*_ROWS, "features", "labels")),
    (_check_table, (*_ROWS, "features", "labels", "table")),
    (check_ranking, ("ranking",)),
    (check_retrieval, ("retrieval",)),
    (check_models, (*_ROWS, "features", "labels", "ranking", "retrieval")),
    (check_inputs, (*_ROWS, "features", "table", "ranking", "retrieval")),
    (check_recall, (*_ROWS, "features", "recall")),
    (check_binary_labels, ("log", "labels", "ranking", "retrieval")),
    (check_held_out, ("split", "ranking", "retrieval")),
    (check_refit, ("split", "ranking", "retrieval")),
    (check_tune, ("tune",)),
)
