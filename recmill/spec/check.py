"""Is this recipe possible? Columns exist, steps fit the values they get, sections agree with each other."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping

from recmill.spec import recipe as r
from recmill.spec import steps as s

# What a column holds on its way through the steps. Lists are written "list of <kind>".
#   int, float, bool, text   raw values      id   an integer with a known range      key   a 64-bit key
NUMBERS = ("int", "float", "bool")
RAW = (*NUMBERS, "text")
MODEL_READY = ("int", "float", "bool", "id", "key")


def problems_in(recipe: r.Recipe) -> list[str]:
    """Everything that would make this recipe fail later, as sentences that begin with a key path."""
    return [
        problem
        for check in (_check_log, _check_rows, _check_split, _check_features, _check_labels, _check_table, _check_models)
        for problem in check(recipe)
    ]


def kinds_of_columns(recipe: r.Recipe) -> dict[str, str]:
    """Name -> kind of every column that features may read: the log's, side tables' and those that rows add."""
    kinds = {column.name: _kind_of(column) for column in recipe.log.columns}
    for operation in recipe.rows:
        kinds.update(_added_kinds(recipe, operation, kinds))
    return kinds


def owners_of_columns(recipe: r.Recipe) -> dict[str, r.Owner]:
    """Name -> whether the column belongs to the user, the item or the context."""
    log = recipe.log
    owners: dict[str, r.Owner] = {column.name: column.of for column in log.columns}
    keys: dict[str | None, r.Owner] = {log.user: "user", log.item: "item"}
    for key, owner in keys.items():
        if key in owners:
            owners[key] = owner
    for operation in recipe.rows:
        if isinstance(operation, r.Join) and operation.table in recipe.tables:
            for column in recipe.tables[operation.table].columns:
                owners.setdefault(column.name, column.of if column.of != "context" else keys.get(operation.on, "context"))
        if isinstance(operation, r.History):
            owners.update({f"{column}_history": "user" for column in operation.columns})
    return owners


def kinds_along(feature: r.Feature | r.Label, kinds: Mapping[str, str]) -> list[str]:
    """The kind before the first step (of the first column), and after each step, of a valid feature."""
    current = [kinds[column] for column in feature.columns]
    along = [current[0]]
    for step in feature.steps:
        current = [_after(step, current)]
        along += current
    return along


def _kind_of(column: r.Column) -> str:
    return "int" if column.type == "hex" else column.type


def _added_kinds(recipe: r.Recipe, operation: r.RowOperation, kinds: Mapping[str, str]) -> dict[str, str]:
    if isinstance(operation, r.Join) and operation.table in recipe.tables:
        table = recipe.tables[operation.table]
        return {column.name: _kind_of(column) for column in table.columns if column.name != operation.on}
    if isinstance(operation, r.History):
        return {f"{name}_history": f"list of {kinds.get(name, 'int')}" for name in operation.columns}
    if isinstance(operation, r.HistoryNegatives):
        return {f"{operation.history}_negatives": kinds.get(operation.history, "list of int")}
    if isinstance(operation, r.Lag):
        return {f"{name}_lag{operation.shift}": kinds.get(name, "float") for name in operation.columns}
    return {}


# steps


class _Unfit(Exception):
    """A step cannot take what it is given."""


def _after(step: s.Step, kinds: list[str]) -> str:
    """The kind that `step` turns `kinds` into; raises _Unfit with the reason."""
    for kind, rule in _RULES.items():
        if isinstance(step, kind):
            return rule(step, kinds)
    raise AssertionError(step)


def _numeric(result: str) -> Callable[[s.Step, list[str]], str]:
    def rule(step: s.Step, kinds: list[str]) -> str:
        kind = kinds[0]
        element = kind.removeprefix("list of ")
        if element not in (*NUMBERS, "id"):
            raise _Unfit(f"needs numbers, but gets {_describe(kind)}")
        return result if kind == element else f"list of {result}"

    return rule


def _scalar_number(result: str) -> Callable[[s.Step, list[str]], str]:
    def rule(step: s.Step, kinds: list[str]) -> str:
        if kinds[0] not in (*NUMBERS, "id"):
            raise _Unfit(f"needs one number a row, but gets {_describe(kinds[0])}")
        return result

    return rule


def _category(result: str) -> Callable[[s.Step, list[str]], str]:
    def rule(step: s.Step, kinds: list[str]) -> str:
        kind = kinds[0]
        element = kind.removeprefix("list of ")
        if element not in ("int", "bool", "text", "id"):
            raise _Unfit(f"needs whole numbers or text, but gets {_describe(kind)}")
        if isinstance(step, s.Vocabulary) and step.keep == "most_frequent":
            if kind == element:
                raise _Unfit('has keep = "most_frequent", which reduces lists, but gets one value a row; add split before it')
            return result
        return result if kind == element else f"list of {result}"

    return rule


def _scalar_category(result: str) -> Callable[[s.Step, list[str]], str]:
    def rule(step: s.Step, kinds: list[str]) -> str:
        if kinds[0] not in ("int", "bool", "text", "id"):
            raise _Unfit(f"needs one whole number or text a row, but gets {_describe(kinds[0])}")
        return result

    return rule


def _list_of(*elements: str, result: str | None = None) -> Callable[[s.Step, list[str]], str]:
    def rule(step: s.Step, kinds: list[str]) -> str:
        element = kinds[0].removeprefix("list of ")
        if element == kinds[0] or (elements and element not in elements):
            raise _Unfit(f"needs a list, but gets {_describe(kinds[0])}")
        return result if result is not None else kinds[0]

    return rule


def _text(result: str) -> Callable[[s.Step, list[str]], str]:
    def rule(step: s.Step, kinds: list[str]) -> str:
        if kinds[0] != "text":
            raise _Unfit(f"needs text, but gets {_describe(kinds[0])}")
        return result

    return rule


def _fill(step: s.Step, kinds: list[str]) -> str:
    assert isinstance(step, s.Fill)
    kind = kinds[0]
    if (step.value is None) == (step.statistic is None):
        raise _Unfit("needs exactly one of value and statistic")
    if step.statistic and kind not in NUMBERS:
        raise _Unfit(f"takes the {step.statistic} of numbers, but gets {_describe(kind)}")
    if kind == "text" and not isinstance(step.value, str):
        raise _Unfit(f"replaces missing text by {step.value!r}, which is no text")
    if kind in NUMBERS and isinstance(step.value, str):
        raise _Unfit(f'replaces missing numbers by "{step.value}", which is no number')
    if kind.startswith("list of "):
        raise _Unfit("does not take lists; a missing list is an empty one already")
    return "float" if step.statistic or (kind == "int" and isinstance(step.value, float)) else kind


def _pack(step: s.Step, kinds: list[str]) -> str:
    if len(set(kinds)) > 1 and not set(kinds) <= set(NUMBERS):
        raise _Unfit(f"needs columns of one kind, but gets {', '.join(map(_describe, kinds))}")
    if any(kind.startswith("list of ") for kind in kinds):
        raise _Unfit("does not take lists")
    return f"list of {'float' if len(set(kinds)) > 1 else kinds[0]}"


def _cross(step: s.Step, kinds: list[str]) -> str:
    if len(kinds) < 2:
        raise _Unfit("needs at least two columns")
    for kind in kinds:
        if kind.startswith("list of ") or kind == "float":
            raise _Unfit(f"needs whole numbers or text, but gets {_describe(kind)}")
    return "text"


def _one_hot(step: s.Step, kinds: list[str]) -> str:
    if kinds[0] not in ("int", "bool", "id"):
        raise _Unfit(f"needs an id, but gets {_describe(kinds[0])}")
    return "list of float"


def _declared(step: s.Step) -> str:
    assert isinstance(step, (s.Expression, s.Function))
    return step.type


def _cast(step: s.Step, kinds: list[str]) -> str:
    assert isinstance(step, s.Cast)
    prefix = "list of " if kinds[0].startswith("list of ") else ""
    return prefix + step.to


_RULES: dict[type[s.Step], Callable[[s.Step, list[str]], str]] = {
    s.Fill: _fill,
    s.Clip: lambda step, kinds: _numeric(kinds[0].removeprefix("list of "))(step, kinds),
    s.Log: _numeric("float"),
    s.Cast: _cast,
    s.Add: _numeric("float"),
    s.Standardise: _scalar_number("float"),
    s.MinMax: _scalar_number("float"),
    s.Buckets: _numeric("id"),
    s.Quantiles: _scalar_number("id"),
    s.DatePart: _scalar_number("int"),
    s.Map: _category("id"),
    s.Vocabulary: _category("id"),
    s.Lookup: _category("id"),
    s.Hash: _category("id"),
    s.Key: _category("key"),
    s.Cross: _cross,
    s.Count: _scalar_category("int"),
    s.Frequency: _scalar_category("float"),
    s.Target: _scalar_category("float"),
    s.Aggregate: _scalar_category("float"),
    s.Split: _text("list of text"),
    s.First: _list_of(),
    s.Concat: _list_of("text", result="text"),
    s.Length: _list_of(result="int"),
    s.Pad: _list_of("int", "float", "bool", "id", "key"),
    s.Mask: _list_of(result="list of int"),
    s.OneHot: _one_hot,
    s.Pack: _pack,
    s.Expression: lambda step, kinds: _declared(step),
    s.Function: lambda step, kinds: _declared(step),
}


def _describe(kind: str) -> str:
    names = {"id": "ids", "key": "64-bit keys", "int": "whole numbers", "float": "numbers", "bool": "true/false"}
    prefix, element = ("lists of ", kind.removeprefix("list of ")) if kind.startswith("list of ") else ("", kind)
    return prefix + names.get(element, element)


# sections


def _check_log(recipe: r.Recipe) -> Iterator[str]:
    log = recipe.log
    yield from _check_file("log", log)
    for name, table in recipe.tables.items():
        yield from _check_file(f"tables.{name}", table)
    names = [column.name for column in log.columns]
    for role in ("user", "item", "time"):
        column = getattr(log, role)
        if column is not None and column not in names:
            yield f'log.{role} is "{column}", but the log has no such column{nearest(column, names)}'


def _check_file(path: str, spec: r.Log | r.SideTable) -> Iterator[str]:
    if not spec.files:
        yield f"{path}.files is empty; name at least one file or pattern"
    if not spec.columns:
        yield f"{path}.columns is empty; name the columns of the file"
    names = [column.name for column in spec.columns]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f'{path}.columns has "{name}" more than once'
    for index, column in enumerate(spec.columns):
        if column.name.startswith("__"):
            yield f'{path}.columns[{index}].name is "{column.name}"; names that begin with __ are reserved'
    if spec.format == "delimited" and not spec.separator:
        yield f"{path}.separator is empty"
    if len(spec.quote) > 1:
        yield f'{path}.quote must be one character or empty, got "{spec.quote}"'
    if spec.separator and spec.quote and spec.quote in spec.separator:
        yield f"{path}.quote and separator must differ"


def _check_rows(recipe: r.Recipe) -> Iterator[str]:
    kinds = {column.name: _kind_of(column) for column in recipe.log.columns}
    for index, operation in enumerate(recipe.rows):
        name = next(name for name, kind in r.ROW_OPERATIONS.items() if kind is type(operation))
        path = f"rows[{index}].{name}"
        for field, column in _columns_read(operation):
            if column not in kinds:
                yield f'{path}.{field} reads column "{column}", but the rows have: {", ".join(kinds)}'
        yield from _check_operation(recipe, operation, path, kinds)
        kinds.update(_added_kinds(recipe, operation, kinds))


def _columns_read(operation: r.RowOperation) -> Iterator[tuple[str, str]]:
    for field in ("on", "by", "order", "columns", "label", "history"):
        value = getattr(operation, field, None)
        if field == "by" and isinstance(operation, (r.Negatives, r.HistoryNegatives)):
            continue
        for column in (value,) if isinstance(value, str) else value or ():
            yield field, column


def _check_operation(recipe: r.Recipe, operation: r.RowOperation, path: str, kinds: Mapping[str, str]) -> Iterator[str]:
    if isinstance(operation, r.Join):
        yield from _check_join(recipe, operation, path, kinds)
    if isinstance(operation, (r.Negatives, r.HistoryNegatives)) and recipe.log.item is None:
        yield f"{path} draws items, but log.item does not say which column that is"
    if isinstance(operation, r.HistoryNegatives) and not kinds.get(operation.history, "list of").startswith("list of"):
        yield f'{path}.history is "{operation.history}", which is no history column'
    if isinstance(operation, r.Sample) and not 0 < operation.fraction <= 1:
        yield f"{path}.fraction must be above 0 and at most 1, got {operation.fraction}"
    positive = ("max_length", "shift", "per_row", "per_item", "last")
    for field in (field.name for field in dataclasses.fields(operation) if field.name in positive):
        value = getattr(operation, field)
        if value is not None and value < 1:
            yield f"{path}.{field} must be at least 1, got {value}"


def _check_join(recipe: r.Recipe, join: r.Join, path: str, kinds: Mapping[str, str]) -> Iterator[str]:
    table = recipe.tables.get(join.table)
    if table is None:
        yield f'{path}.table is "{join.table}", but the recipe has no [tables.{join.table}]{nearest(join.table, recipe.tables)}'
        return
    found = {column.name: _kind_of(column) for column in table.columns}
    if join.on not in found:
        yield f'{path}.on is "{join.on}", but table {join.table} has: {", ".join(found)}'
    elif join.on in kinds and kinds[join.on] != found[join.on]:
        yield f'{path}.on joins {kinds[join.on]} with {found[join.on]}; give column "{join.on}" one type on both sides'
    for name in found:
        if name != join.on and name in kinds:
            yield f'{path} would add column "{name}", which the rows already have; rename it in tables.{join.table}.columns'


def _check_split(recipe: r.Recipe) -> Iterator[str]:
    split = recipe.split
    if split is None:
        return
    kinds = kinds_of_columns(recipe)
    if split.held_out is not None and not 0 < split.held_out < 1:
        yield f"split.held_out must be between 0 and 1, got {split.held_out}"
    needs_share = split.by in ("tail", "hash") or (split.by == "time" and split.eval_from is None)
    if needs_share and split.held_out is None:
        yield f'split.held_out is missing; split by "{split.by}" needs the share of rows to hold out'
    if split.by == "files" and not split.held_out_files:
        yield 'split.held_out_files is missing; split by "files" needs the names or patterns to hold out'
    if split.by == "last" and split.halve:
        yield 'split.halve does not go with by = "last", which already holds out an eval and a test row for each user'
    for field, needed in (("column", ("time", "hash", "last")), ("order", ("last",))):
        column = getattr(split, field)
        if split.by in needed and column is None:
            yield f'split.{field} is missing; split by "{split.by}" needs a column'
        elif column is not None and column not in kinds:
            yield f'split.{field} is "{column}", but the rows have: {", ".join(kinds)}'
        elif column is not None and split.by not in needed:
            yield f'split.{field} has no meaning for by = "{split.by}"; remove it'


def _check_features(recipe: r.Recipe) -> Iterator[str]:
    kinds = kinds_of_columns(recipe)
    labels = {label.name for label in recipe.labels}
    if not recipe.features:
        yield "features is empty; name at least one"
    names: set[str] = set()
    vocabularies = {step.named for feature in recipe.features for step in feature.steps if isinstance(step, s.Vocabulary)}
    for feature in recipe.features:
        path = f'feature "{feature.name}"'
        if feature.name in names | labels:
            yield f"{path}: more than one feature or label has this name"
        names.add(feature.name)
        if feature.dim is not None and feature.dim < 1:
            yield f"{path}: dim must be a positive integer, got {feature.dim}"
        yield from _check_steps(path, feature, kinds, final=True)
        for step in feature.steps:
            yield from _check_references(path, step, labels, kinds, vocabularies)
    yield from _check_shared_vocabularies(recipe)


def _check_labels(recipe: r.Recipe) -> Iterator[str]:
    kinds = kinds_of_columns(recipe)
    for label in recipe.labels:
        yield from _check_steps(f'label "{label.name}"', label, kinds, final=True)
        for step in label.steps:
            if isinstance(step, _FITTED):
                yield f'label "{label.name}": {type(step).step_name()} is fitted to the data; a label must not be'


_FITTED = (s.Standardise, s.MinMax, s.Quantiles, s.Vocabulary, s.Lookup, s.Count, s.Frequency, s.Target, s.Aggregate)


def _check_steps(path: str, feature: r.Feature | r.Label, kinds: Mapping[str, str], final: bool) -> Iterator[str]:
    missing = [column for column in feature.columns if column not in kinds]
    for column in missing:
        yield f'{path} reads column "{column}", but the log has: {", ".join(kinds)}'
    if missing or not feature.columns:
        return
    current = [kinds[column] for column in feature.columns]
    for step in feature.steps:
        name = type(step).step_name()
        if isinstance(step, s.COMBINING) and step is not feature.steps[0]:
            yield f"{path}: {name} takes the feature's columns, so it must be the first step"
            return
        try:
            current = [_after(step, current)]
        except _Unfit as reason:
            yield f"{path}: step {name} {reason}"
            return
        yield from _check_parameters(f"{path}: {name}", step)
    if final and current[0].removeprefix("list of ") not in MODEL_READY:
        yield f"{path} ends as {_describe(current[0])}; add vocabulary, hash or key as its last step"


def _check_parameters(path: str, step: s.Step) -> Iterator[str]:
    for field in ("min_count", "max_size", "buckets", "length", "size", "count"):
        value = getattr(step, field, None)
        if isinstance(value, int) and value < 1:
            yield f"{path}.{field} must be a positive integer, got {value}"
    if isinstance(step, s.Quantiles) and step.buckets < 2:
        yield f"{path}.buckets must be at least 2, got {step.buckets}"
    if isinstance(step, s.Buckets) and (not step.edges or list(step.edges) != sorted(set(step.edges))):
        yield f"{path}.edges must be increasing numbers, got {list(step.edges)}"
    if isinstance(step, (s.Clip, s.MinMax)) and step.min is not None and step.max is not None and step.min >= step.max:
        yield f"{path}.min must be below max, got {step.min} and {step.max}"
    if isinstance(step, s.Log) and step.at_least <= 0:
        yield f"{path}.at_least must be above 0, got {step.at_least}"
    if isinstance(step, s.Map) and (not step.ids or min(step.ids.values()) < 0):
        yield f"{path}.ids must hold ids from 0 up"
    if isinstance(step, s.Target) and step.folds < 2:
        yield f"{path}.folds must be at least 2, got {step.folds}"
    if isinstance(step, s.Function) and step.path.count(":") != 1:
        yield f'{path}.path must look like package.module:function, got "{step.path}"'
    if isinstance(step, (s.Split, s.Cross)) and not step.separator:
        yield f"{path}.separator must not be empty"


def _check_references(
    path: str, step: s.Step, labels: set[str], kinds: Mapping[str, str], vocabularies: set[str | None]
) -> Iterator[str]:
    if isinstance(step, s.Target) and step.label not in labels:
        yield f'{path}: target.label is "{step.label}", but the recipe has no such label{nearest(step.label, labels)}'
    if isinstance(step, s.Aggregate) and kinds.get(step.column, "") not in RAW:
        yield f'{path}: aggregate.column is "{step.column}", but the log has: {", ".join(kinds)}'
    if isinstance(step, s.Aggregate) and kinds.get(step.column) == "text" and step.statistic not in ("count", "distinct"):
        yield f'{path}: aggregate takes the {step.statistic} of "{step.column}", which is text'
    if isinstance(step, s.Lookup) and step.named not in vocabularies:
        known = [name for name in vocabularies if name]
        yield f'{path}: no vocabulary is named "{step.named}"{nearest(step.named, known)}'


def _check_shared_vocabularies(recipe: r.Recipe) -> Iterator[str]:
    first: dict[str, tuple[str, s.Vocabulary]] = {}
    for feature in recipe.features:
        for step in feature.steps:
            if not isinstance(step, s.Vocabulary) or step.named is None:
                continue
            owner, other = first.setdefault(step.named, (feature.name, step))
            if dataclasses.replace(step, keep=other.keep) != other:
                yield (
                    f'feature "{feature.name}": vocabulary "{step.named}" has other parameters than in feature "{owner}"; '
                    "shared vocabularies need the same ones"
                )


def _check_table(recipe: r.Recipe) -> Iterator[str]:
    kinds = kinds_of_columns(recipe)
    taken = {feature.name for feature in recipe.features} | {label.name for label in recipe.labels}
    for name in recipe.table.keep:
        if name not in kinds:
            yield f'table.keep has "{name}", but the rows have: {", ".join(kinds)}'
        if f"raw_{name}" in taken:
            yield f'table.keep would add column "raw_{name}", which is a feature or label already'


def _check_models(recipe: r.Recipe) -> Iterator[str]:
    features = {feature.name for feature in recipe.features}
    labels = [label.name for label in recipe.labels]
    ranking, retrieval = recipe.ranking, recipe.retrieval
    if (ranking or retrieval) and not labels:
        yield "labels is empty; a model needs at least one"
    lists: list[tuple[str, tuple[str, ...]]] = []
    if ranking:
        lists += [("ranking.features", ranking.features), ("ranking.wide", ranking.wide)]
    if retrieval:
        lists += [("retrieval.user", retrieval.user), ("retrieval.item", retrieval.item)]
        if recipe.log.user is None or recipe.log.item is None:
            yield "retrieval needs log.user and log.item: which columns say who and what"
    for path, names in lists:
        for name in names:
            if name not in features:
                yield f'{path} has "{name}", but there is no such feature{nearest(name, features)}'
    for path, model in (("ranking", ranking), ("retrieval", retrieval)):
        if model and model.label not in labels:
            yield f'{path}.label is "{model.label}", but the recipe has no such label{nearest(model.label, labels)}'


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean "x"?` when something is close, else what is known."""
    options = sorted(known)
    close = difflib.get_close_matches(name, options, n=1)
    if close:
        return f'; did you mean "{close[0]}"?'
    return f"; known: {', '.join(options)}" if options else ""
