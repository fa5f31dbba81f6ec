"""Expands shorthand to the full tree: one entry may cover many columns; afterwards each column has its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from recmill.recipe.convert import Entries, Problems
from recmill.recipe.names import expand_names
from recmill.recipe.steps import COMBINING, STEPS, Step

INTERACTION = "interaction"  # the label of logs in which every row is positive


def expand(raw: Mapping[str, Any], problems: Problems) -> dict[str, Any]:
    """Split columns, features and labels that cover many columns into one entry each. The reader reports errors."""
    tree = _with_derived_label(dict(raw))
    if isinstance(tree.get("tune"), dict) and isinstance(tree["tune"].get("space"), dict):
        tree["tune"] = {**tree["tune"], "space": dict(_key_paths(tree["tune"]["space"]))}
    if "log" in tree:
        tree["log"] = _with_columns(tree["log"], "log", problems)
    if isinstance(tree.get("tables"), dict):
        tables = tree["tables"].items()
        tree["tables"] = {name: _with_columns(table, f"tables.{name}", problems) for name, table in tables}
    for section in ("features", "labels"):
        if isinstance(tree.get(section), list | tuple):
            entries = enumerate(tree[section])
            paths = ((f"{section}[{index}]", entry) for index, entry in entries)
            tree[section] = Entries(
                (path, one) for path, entry in paths for one in _features_of(entry, path, problems)
            )
    return tree


def _with_derived_label(tree: dict[str, Any]) -> dict[str, Any]:
    """Add a label for retrieval without one, which learns from every row: each is an interaction with its item."""
    retrieval, log = tree.get("retrieval"), tree.get("log")
    if not isinstance(retrieval, dict) or "label" in retrieval or not isinstance(log, dict):
        return tree
    item, labels = log.get("item"), tree.get("labels", [])
    if not isinstance(item, str) or labels:
        return tree
    name = item.replace('"', '""')
    steps = [{"expression": {"sql": f'"{name}" is not null', "type": "int"}}]
    label = {"name": INTERACTION, "columns": [item], "steps": steps}
    return {**tree, "retrieval": {**retrieval, "label": INTERACTION}, "labels": [label]}


def _key_paths(space: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Flatten the keys of a search space: `ranking.top = ...` as nested by TOML becomes `"ranking.top" = ...`."""
    for key, value in space.items():
        if isinstance(value, dict) and value and not {"low", "high"} & set(value):
            yield from _key_paths(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _with_columns(section: Any, path: str, problems: Problems) -> Any:
    """`{ name = "i1..i13", type = "int" }` becomes thirteen columns."""
    columns = section.get("columns") if isinstance(section, dict) else None
    if not isinstance(columns, list | tuple):
        return section
    paths = ((f"{path}.columns[{index}]", column) for index, column in enumerate(columns))
    return {
        **section,
        "columns": Entries(
            (where, one) for where, column in paths for one in _columns_of(column, where, problems)
        ),
    }


def _columns_of(column: Any, path: str, problems: Problems) -> Iterator[Any]:
    if not isinstance(column, dict) or not isinstance(column.get("name"), str):
        yield column
        return
    try:
        names = expand_names(column["name"])
    except ValueError as error:
        problems.add(f"{path}.name", str(error))
        return
    if not names:
        problems.add(f"{path}.name", "is empty")
    for name, more in zip(names, _names_in_file(column, names, path, problems), strict=True):
        yield {**column, "name": name, **more}


def _names_in_file(
    column: Mapping[str, Any], names: Sequence[str], path: str, problems: Problems
) -> list[dict[str, str]]:
    """`in_file` of each column, if it is a range like `name`; a single name stays as it is, punctuation included."""
    written = column.get("in_file")
    if len(names) < 2 or not isinstance(written, str) or not written:
        return [{}] * len(names)
    try:
        in_file = expand_names(written)
    except ValueError as error:
        problems.add(f"{path}.in_file", str(error))
        return [{}] * len(names)
    if len(in_file) == len(names):
        return [{"in_file": one} for one in in_file]
    if len(in_file) > 1:
        problems.add(f"{path}.in_file", f"has {len(in_file)} names, but name has {len(names)}")
    return [{}] * len(names)


def _features_of(entry: Any, path: str, problems: Problems) -> Sequence[Any]:
    if not isinstance(entry, dict):
        return [entry]
    columns = _names_in(entry.get("columns"))
    if not columns:
        return [{"name": "?", **entry}]  # the name is fine; the reader reports the real problem
    name = entry.get("name")
    if _combines(entry.get("steps")):
        if name is None and len(columns) > 1:
            problems.add(
                f"{path}.name", "is missing: what is made of several columns needs a name of its own"
            )
        return [{"name": ", ".join(columns), **entry, "columns": columns}]
    if name is not None and not isinstance(name, str):
        return [{**entry, "columns": [column]} for column in columns]
    if name is not None and len(columns) > 1 and "{column}" not in name:
        name = problems.add(
            f"{path}.name",
            f'is "{name}" for {len(columns)} columns; write {{column}} into it, '
            "or begin with a step that combines them (cross, pack, expression, function)",
        )
    template = "{column}" if name is None else name
    return [
        {**entry, "name": template.replace("{column}", column), "columns": [column]} for column in columns
    ]


def _names_in(columns: Any) -> list[str] | None:
    """The columns that an entry covers, or None if they are unclear."""
    if isinstance(columns, list | tuple) and not all(isinstance(name, str) for name in columns):
        return None
    try:
        return expand_names(columns) if isinstance(columns, str | list | tuple) else None
    except ValueError:
        return None


def _combines(steps: Any) -> bool:
    """Whether the first step takes all columns at once."""
    if not isinstance(steps, list | tuple) or not steps:
        return False
    first = steps[0]
    name = first if isinstance(first, str) else next(iter(first), "") if isinstance(first, dict) else ""
    return STEPS.get(name, Step) in COMBINING
