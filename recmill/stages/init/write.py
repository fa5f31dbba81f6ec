"""Write a recipe with comments from the decisions about a log."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from recmill.logs.sniff import FileFormat
from recmill.stages.init.columns import ColumnProfile, ColumnType
from recmill.stages.init.decide import Decisions, ModelSizes
from recmill.stages.init.positives import quoted
from recmill.stages.init.shown import ShownRows
from recmill.stages.init.sides import SideFile

_LABEL = "positive"
_ID = "id_{column}"
_COUNT = '{ fill = 0 }, { clip = { min = 0 } }, "log", "standardise"'


def recipe_text(name: str, decided: Decisions) -> str:
    """The TOML file of a log with users and items."""
    sections = [_head(name, decided), _log(decided)]
    sections += [_side_table(side, decided) for side in decided.sides]
    sections += [_rows(decided), _split(decided), _label(decided), _features(decided), _table(decided)]
    sections += [_retrieval(decided)]
    if decided.positives.has_impressions:
        sections.append(_ranking(decided))
    return "\n".join("\n".join(section) + "\n" for section in sections if section)


def _head(name: str, decided: Decisions) -> list[str]:
    return [
        f"# Made by `recmill init` from {decided.file_names[0]}. Edit what is wrong, then run `recmill check`.",
        f"name = {_toml(name)}",
        f"description = {_toml(decided.summary)}",
    ]


def ranker_text(name: str, shown: ShownRows) -> str:
    """The TOML file of a log without users."""
    sections = [_shown_log(name, shown), _shown_split(shown), _shown_features(shown), _shown_ranking(shown)]
    return "\n".join("\n".join(section) + "\n" for section in sections)


def _shown_log(name: str, shown: ShownRows) -> list[str]:
    time = shown.time
    columns = []
    for column in shown.columns:
        is_time = time is not None and column.name == time.name
        formats = time.column.time_formats if time is not None and is_time else ()
        kind = "time" if is_time else column.type
        columns.append(_column(column, kind, column.name == shown.label.name, next(iter(formats), "")))
    return [
        f"# Made by `recmill init` from {shown.file_name}. Edit what is wrong, then run `recmill check`.",
        f"name = {_toml(name)}",
        f"description = {_toml(f'{shown.events.num_rows:,} rows of {shown.file_name}, without users.')}",
        "",
        "[log]",
        f"files = [{_toml(shown.file_name)}]",
        *_form(shown.events.form),
        *([f"time = {_toml(time.name)}"] if time is not None else []),
        *_columns(columns),
    ]


def _shown_split(shown: ShownRows) -> list[str]:
    by = [f'by = "time"\ncolumn = {_toml(shown.time.name)}'] if shown.time is not None else ['by = "tail"']
    label = shown.label
    sql = f"{quoted(label.name)} = {'true' if label.type == 'bool' else '1'}"
    step = f'{{ expression = {{ sql = {_toml(_never_null(sql, [label]))}, type = "int" }} }}'
    return [
        "# The last tenth is test, the tenth before it eval.",
        "[split]",
        *by,
        "held_out = 0.2",
        "halve = true",
        "",
        "[[labels]]",
        f'name = "{_LABEL}"',
        f"columns = [{_toml(label.name)}]",
        f"steps = [{step}]",
    ]


def _shown_features(shown: ShownRows) -> list[str]:
    # Counts span orders of magnitude: on a linear scale nearly all of them would be close to zero.
    counts = [c.name for c in shown.numbers if c.type == "int"]
    floats = [c.name for c in shown.numbers if c.type == "float"]
    ids = [column.name for column in shown.categories]
    lines = []
    for columns, comment, name, steps in (
        (counts, "Whole numbers on a logarithmic scale.", "", _COUNT),
        (floats, "Other numbers.", "", '{ fill = { statistic = "median" } }, "standardise"'),
        (
            ids,
            "A value must be seen twice to get an id of its own.",
            _ID,
            "{ vocabulary = { min_count = 2 } }",
        ),
    ):
        if columns:
            lines += [f"# {comment}", "[[features]]"]
            lines += [f"name = {_toml(name)}"] if name else []
            lines += [f"columns = {_toml(columns)}", f"steps = [{steps}]", ""]
    return lines[:-1]


def _shown_ranking(shown: ShownRows) -> list[str]:
    ids = [_ID.format(column=column.name) for column in shown.categories]
    return [
        "[table]",
        'order = "shuffle"',
        "",
        "[ranking]",
        'model = "wide_deep"',
        f'label = "{_LABEL}"',
        "embedding_dim = 16",
        f"features = {_toml([*(column.name for column in shown.numbers), *ids])}",
        f"wide = {_toml(ids)}",
        "hidden = [256, 128]",
        'wide_optimizer = { name = "ftrl", learning_rate = 0.05, initial_accumulator = 1, l2 = 10 }',
        "",
        "[ranking.train]",
        "epochs = 2",
        'dense = { name = "adam", learning_rate = 0.002 }',
        "# An eps this large keeps ids that were seen a few times near where they began.",
        'sparse = { name = "adagrad", learning_rate = 0.5, eps = 2 }',
    ]


# files


def _log(decided: Decisions) -> list[str]:
    time = f"\ntime = {_toml(decided.time.name)}" if decided.time is not None else ""
    return [
        "[log]",
        f"files = [{_toml(decided.file_names[0])}]",
        *_form(decided.events.form),
        f"user = {_toml(decided.user.name)}",
        f"item = {_toml(decided.item.name)}{time}",
        *_columns(_log_columns(decided)),
    ]


def _form(form: FileFormat) -> Iterator[str]:
    if form.format != "delimited":
        yield f"format = {_toml(form.format)}"
        return
    for key in ("separator", "header", "quote"):  # defaults too, so that nothing is guessed again
        yield f"{key} = {_toml(getattr(form, key))}"
    if form.escape:
        yield f"escape = {_toml(form.escape)}"
    if form.encoding != "utf-8":
        yield f"encoding = {_toml(form.encoding)}"


def _columns(columns: Iterable[str]) -> list[str]:
    return ["columns = [", *(f"  {column}," for column in columns), "]"]


def _log_columns(decided: Decisions) -> Iterator[str]:
    """The columns that are read; all of them, in order, for a file without a header."""
    used = {column.name for column in decided.used_columns}
    for column in decided.events.columns:
        if column.name in used or decided.is_by_position:
            required = column.name in (decided.user.name, decided.item.name) and not decided.missing(column)
            yield _column(column, decided.type_of(column), required, decided.time_format(column))


def _column(
    column: ColumnProfile, type_name: ColumnType, required: bool = False, time_format: str = ""
) -> str:
    more = ", required = true" if required else ""
    more += f", format = {_toml(time_format)}" if time_format else ""
    more += f", in_file = {_toml(column.in_file)}" if column.in_file else ""
    return f'{{ name = {_toml(column.name)}, type = "{type_name}"{more} }}'


def _side_table(side: SideFile, decided: Decisions) -> list[str]:
    path = decided.file_names[1 + decided.sides.index(side)]
    columns = [
        _column(column, decided.type_of(column) if column.name == side.key.name else _attribute_type(column))
        for column in decided.columns_of(side)
    ]
    return [
        f"[tables.{side.name}]",
        f"files = [{_toml(path)}]",
        *_form(side.file.form),
        *_columns(columns),
    ]


def _attribute_type(column: ColumnProfile) -> ColumnType:
    return "text" if column.type == "time" else column.type


# rows, split, label


def _rows(decided: Decisions) -> list[str]:
    lines: list[str] = []
    missing = [
        f"{quoted(key.name)} is not null" for key in (decided.user, decided.item) if decided.missing(key)
    ]
    if missing:
        lines += ["[[rows]]", f"filter = {_toml(' and '.join(missing))}", ""]
    for side in decided.sides:
        lines += ["[[rows]]", f"join = {{ table = {_toml(side.name)}, on = {_toml(side.key.name)} }}", ""]
    if decided.has_history:
        where = f", where = {_toml(decided.positives.sql)}" if decided.positives.has_impressions else ""
        assert decided.time is not None
        lines += [
            "# The user's items before each event; events of the same time are not part of it.",
            "[[rows]]",
            f"history = {{ columns = [{_toml(decided.item.name)}], by = {_toml(decided.user.name)}, "
            f"order = {_toml(decided.time.name)}{where}, max_length = 50 }}",
        ]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _split(decided: Decisions) -> list[str]:
    split = decided.split
    keys = {"by": split.by, "column": split.column, "order": split.order, "held_out": split.held_out}
    lines = [f"{key} = {_toml(value)}" for key, value in keys.items() if value is not None]
    return [f"# {decided.split_reason}", "[split]", *lines, *(["halve = true"] if split.halve else [])]


def _label(decided: Decisions) -> list[str]:
    sql = decided.positives.sql
    if sql is None:
        return []  # every row is positive: no label is needed
    columns = ", ".join(_toml(column.name) for column in decided.label_columns)
    return [
        f"# Positive rows: {decided.positives.share:.0%} of all.",
        "[[labels]]",
        f'name = "{_LABEL}"',
        f"columns = [{columns}]",
        f'steps = [{{ expression = {{ sql = {_toml(_never_null(sql, decided.label_columns))}, type = "int" }} }}]',
    ]


def _never_null(sql: str, columns: Sequence[ColumnProfile]) -> str:
    """A condition that is false where a column is null, instead of null."""
    missing = [column for column in columns if len(column.present) < len(column.values)]
    present = " and ".join(f"{quoted(column.name)} is not null" for column in missing)
    return f"{present} and ({sql})" if present else sql


# features and models


def _features(decided: Decisions) -> list[str]:
    lines = [
        "[[features]]",
        f"columns = [{_toml(decided.user.name)}]",
        f"steps = [{_vocabulary('user', decided.min_count(decided.user))}]",
    ]
    lines += [
        "",
        "[[features]]",
        f"columns = [{_toml(decided.item.name)}]",
        f"steps = [{_vocabulary('item', decided.min_count(decided.item))}]",
    ]
    if decided.has_history:
        history = _toml(f"{decided.item.name}_history")
        for name, pad in (
            ("recent_items", ""),
            ("last_items", ", { pad = { length = 5 } }"),
            ("last_item", ", { pad = { length = 1 } }"),
        ):
            lines += [
                "",
                "[[features]]",
                f'name = "{name}"',
                f"columns = {history}",
                f'steps = [{{ lookup = "item" }}{pad}]',
            ]
    for column in decided.categories:
        split = f"{{ split = {_toml(column.list_separator)} }}, " if column.list_separator else ""
        lines += ["", "[[features]]", f"columns = [{_toml(column.name)}]", f'steps = [{split}"vocabulary"]']
    for column in decided.numbers:
        steps = '[{ fill = { statistic = "median" } }, "standardise"]'
        lines += ["", "[[features]]", f"columns = [{_toml(column.name)}]", f"steps = {steps}"]
    return lines


def _vocabulary(name: str, min_count: int) -> str:
    more = f", min_count = {min_count}" if min_count > 1 else ""
    return f'{{ vocabulary = {{ named = "{name}"{more} }} }}'


def _table(decided: Decisions) -> list[str]:
    return [
        "[table]",
        'order = "shuffle"',
        f"keep = [{_toml(decided.user.name)}, {_toml(decided.item.name)}]",
    ]


def _retrieval(decided: Decisions) -> list[str]:
    sizes = decided.sizes
    label = [f'label = "{_LABEL}"'] if decided.positives.sql is not None else []
    users = ["recent_items", "last_items", "last_item"] if decided.has_history else [decided.user.name]
    return [
        f"# {sizes.reason}",
        "[retrieval]",
        *label,
        f"user = {_toml([*users, *decided.categories_of('user')])}",
        f"item = {_toml([decided.item.name, *decided.categories_of('item')])}",
        f"embedding_dim = {sizes.embedding_dim}",
        "hidden = []",
        "temperature = 0.1",
        "",
        "[retrieval.train]",
        f"batch_size = {sizes.batch_size}",
        f"epochs = {sizes.epochs}",
        *_optimizers(sizes),
    ]


def _optimizers(sizes: ModelSizes) -> list[str]:
    return [
        'dense = { name = "adam", learning_rate = 0.01 }',
        'sparse = { name = "adam", learning_rate = 0.005 }',
        "schedule = { decay_from = 0, power = 1 }",
    ]


def _ranking(decided: Decisions) -> list[str]:
    bottom = "bottom = [32, 16]\n" if decided.numbers else ""
    return [
        "# Rows without a click tell what was shown and not wanted, so a ranker can learn probabilities.",
        "[ranking]",
        'model = "dlrm"',
        f'label = "{_LABEL}"',
        f"embedding_dim = 16\n{bottom}top = [64, 32]",
    ]


def _toml(value: Any) -> str:
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_toml, value))}]"
    return str(value).lower() if isinstance(value, bool) else repr(value)
