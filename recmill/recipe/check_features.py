"""Validation of features and labels: columns exist, each step fits its input, references resolve."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby

from recmill.errors import ExpressionError
from recmill.recipe import recipe as r
from recmill.recipe import steps as s
from recmill.recipe.convert import Paths, paths_of
from recmill.recipe.expressions import columns_of, parse_expression
from recmill.recipe.expressions.rules import need_result
from recmill.recipe.kinds import (
    MODEL_READY,
    RAW,
    Unfit,
    after,
    describe,
    element_of,
    is_list,
    kinds_along,
    kinds_of_columns,
)
from recmill.recipe.names import nearest, repeated

Entry = r.Feature | r.Label
_FITTED = (
    s.Standardise, s.MinMax, s.Quantiles, s.Vocabulary, s.Lookup, s.Count, s.Frequency, s.Target, s.Aggregate,
)  # fmt: skip


def check_features(recipe: r.Recipe, paths: Paths) -> Iterator[str]:
    """Check each feature by itself."""
    kinds = kinds_of_columns(recipe)

    def check(path: str, feature: Entry) -> Iterator[str]:
        assert isinstance(feature, r.Feature)
        yield from _check_steps(path, feature, kinds)
        kind = ends_as(feature, kinds)
        if kind is not None and feature.dim is not None and element_of(kind) not in ("id", "key"):
            yield f"{path}.dim has no meaning for {describe(kind)}; only ids and keys have embeddings"

    yield from _by_entry("features", recipe.features, paths, check)


def check_labels(recipe: r.Recipe, paths: Paths) -> Iterator[str]:
    """Check each label by itself."""
    kinds = kinds_of_columns(recipe)

    def check(path: str, label: Entry) -> Iterator[str]:
        yield from _check_steps(path, label, kinds)
        kind = ends_as(label, kinds)
        if kind is not None and (is_list(kind) or kind == "key"):
            yield f"{path} ends as {describe(kind)}; a label is one number a row"
        for number, step in enumerate(label.steps):
            fitted = isinstance(step, _FITTED) or (isinstance(step, s.Fill) and step.statistic is not None)
            if fitted:
                where = f"{path}.steps[{number}].{step.step_name()}"
                yield f"{where} is fitted to the data; a label must not be"

    yield from _by_entry("labels", recipe.labels, paths, check)


def _by_entry(
    section: str, entries: Sequence[Entry], paths: Paths, check: Callable[[str, Entry], Iterator[str]]
) -> Iterator[str]:
    """Problems of each entry of the file once, with the names of the affected features unless all are."""
    where = paths_of(paths, section, entries)
    for path, group in groupby(zip(where, entries, strict=True), key=lambda pair: pair[0]):
        covered = [entry for _, entry in group]
        found: dict[str, list[str]] = {}
        for entry in covered:
            for problem in check(path, entry):
                found.setdefault(problem, []).append(entry.name)
        for problem, names in found.items():
            said = len(names) == len(covered) or f'"{names[0]}"' in problem
            yield problem if said else f"{problem} (for {', '.join(names)})"


def ends_as(entry: Entry, kinds: Mapping[str, str]) -> str | None:
    """The kind after the last step; None when a step does not fit."""
    if not entry.columns:
        return None
    current = [kinds.get(column, "") for column in entry.columns]
    try:
        for step in entry.steps:
            current = [after(step, current)]
    except Unfit:
        return None
    return current[0] or None


def _check_steps(path: str, entry: Entry, kinds: Mapping[str, str]) -> Iterator[str]:
    problems = list(_check_columns(path, entry, kinds))
    yield from problems
    if problems:
        return
    current = [kinds[column] for column in entry.columns]
    vocabularies: set[str | None] = set()
    for number, step in enumerate(entry.steps):
        where = f"{path}.steps[{number}].{step.step_name()}"
        if isinstance(step, s.COMBINING) and number:
            yield f"{where} takes the feature's columns, so it must be the first step"
            return
        if isinstance(step, s.Vocabulary | s.Lookup):
            if step.named in vocabularies:
                yield f"{where} takes ids of the same vocabulary; give each its own name with named"
            vocabularies.add(step.named)
        yield from _check_parameters(where, step, current[0])
        if isinstance(step, s.Expression):
            yield from _check_expression(where, step, entry.columns, kinds)
        try:
            current = [after(step, current)]
        except Unfit as reason:
            yield f"{where} {reason}"
            return
    if element_of(current[0]) not in MODEL_READY:
        yield f"{path} ends as {describe(current[0])}; add vocabulary, hash or key as its last step"


def _check_columns(path: str, entry: Entry, kinds: Mapping[str, str]) -> Iterator[str]:
    if not entry.columns:
        yield f"{path}.columns is empty; name at least one column"
    for name in repeated(entry.columns):
        yield f'{path}.columns has "{name}" more than once'
    for column in entry.columns:
        if column not in kinds:
            yield f'{path} reads column "{column}", but the rows have no such column{nearest(column, kinds)}'
    if len(entry.columns) > 1 and not (entry.steps and isinstance(entry.steps[0], s.COMBINING)):
        yield (
            f"{path} has {len(entry.columns)} columns; "
            "begin with a step that combines them (cross, pack, expression, function)"
        )


def _check_parameters(path: str, step: s.Step, kind: str) -> Iterator[str]:
    """Check parameters that depend on each other; bounds of numbers are checked during parsing."""
    if isinstance(step, s.Buckets) and (not step.edges or list(step.edges) != sorted(set(step.edges))):
        yield f"{path}.edges must be increasing numbers, got {list(step.edges)}"
    for number, edges in enumerate((isinstance(step, s.Cross) and step.edges) or ()):
        if list(edges) != sorted(set(edges)):
            yield f"{path}.edges[{number}] must be increasing numbers, got {list(edges)}"
    if isinstance(step, s.Clip) and step.min is None and step.max is None:
        yield f"{path} needs min, max or both"
    if isinstance(step, s.Clip) and element_of(kind) != "float":
        for name, bound in (("min", step.min), ("max", step.max)):
            if bound is not None and not -(2.0**63) <= bound < 2.0**63:
                yield f"{path}.{name} is {bound}, beyond the 64 bits of {describe(element_of(kind))}"
    if isinstance(step, s.Clip) and kind.endswith("id") and ((step.min or 0) > 0 or (step.max or 0) < 0):
        yield f"{path} takes ids out of their range: min must be 0 or less, and max 0 or more"
    if isinstance(step, s.Clip | s.MinMax):
        yield from _check_range(path, step.min, step.max)
    if isinstance(step, s.Map) and not step.ids:
        yield f"{path}.ids is empty; name at least one value"
    if isinstance(step, s.Pad) and element_of(kind) != "float" and not step.value.is_integer():
        yield f"{path}.value is {step.value}, but the list holds {describe(element_of(kind))}"
    elif isinstance(step, s.Pad) and element_of(kind) in ("id", "key") and step.value:
        yield f"{path}.value is {step.value:g}, but ids are filled with 0, which is not an id"
    if isinstance(step, s.Function) and not _is_path(step.path):
        yield f'{path}.path must look like package.module:function, got "{step.path}"'
    if isinstance(step, s.Split | s.Cross) and not step.separator:
        yield f"{path}.separator must not be empty"
    if isinstance(step, s.Vocabulary | s.Lookup | s.Key) and step.named == "":
        yield f"{path}.named must not be empty"


def _check_range(path: str, least: float | None, most: float | None) -> Iterator[str]:
    if least is not None and most is not None and least >= most:
        yield f"{path}.min must be below max, got {least} and {most}"


def _is_path(path: str) -> bool:
    module, colon, name = path.partition(":")
    return bool(colon) and name.isidentifier() and all(part.isidentifier() for part in module.split("."))


def _check_expression(
    path: str, step: s.Expression, columns: Sequence[str], kinds: Mapping[str, str]
) -> Iterator[str]:
    try:
        tree = parse_expression(step.sql, kinds)
        need_result(tree, step.type)
    except ExpressionError as error:
        yield f"{path}.sql, {error}"
        return
    read = columns_of(tree)
    for name in columns:
        if name not in read:
            yield f'{path}.sql does not mention column "{name}"; remove it from columns, or use it'
    for name in read:
        if name not in columns:
            yield f'{path}.sql reads column "{name}"; add it to columns'


# features and labels together


def check_names(recipe: r.Recipe, paths: Paths) -> Iterator[str]:
    """Check that every column of a Table has a unique name."""
    if not recipe.features:
        yield "features is empty; name at least one"
    entries: list[Entry] = [*recipe.features, *recipe.labels]
    for name in repeated(entry.name for entry in entries):
        yield f'more than one feature or label is called "{name}"; give each a name of its own'
    where = [*paths_of(paths, "features", recipe.features), *paths_of(paths, "labels", recipe.labels)]
    for path, entry in zip(where, entries, strict=True):
        if not entry.name or entry.name.startswith("__"):
            yield f'{path}.name is "{entry.name}"; names must not be empty or begin with __'


def check_references(recipe: r.Recipe, paths: Paths) -> Iterator[str]:
    """Check the labels, columns and vocabularies that steps name."""
    kinds = kinds_of_columns(recipe)
    labels = [label.name for label in recipe.labels]
    steps = [step for feature in recipe.features for step in feature.steps]
    named = {step.named for step in steps if isinstance(step, s.Vocabulary) and step.named}
    own = _with_own_vocabulary(recipe)

    def check(path: str, feature: Entry) -> Iterator[str]:
        for number, step in enumerate(feature.steps):
            where = f"{path}.steps[{number}].{step.step_name()}"
            if isinstance(step, s.Target) and step.label not in labels:
                hint = nearest(step.label, labels)
                yield f'{where}.label is "{step.label}", but there is no such label{hint}'
            if isinstance(step, s.Aggregate):
                yield from _check_aggregate(where, step, kinds)
            if isinstance(step, s.Lookup) and step.named in own - named:  # of both problems, report the name
                yield (
                    f'{where} is "{step.named}", the vocabulary of feature "{step.named}" alone; to share it, write '
                    f'{{ vocabulary = {{ named = "{step.named}" }} }} in that feature'
                )
            elif isinstance(step, s.Lookup) and step.named not in named:
                hint = nearest(step.named, named) or "; no vocabulary has a name"
                yield f'{where}.named is "{step.named}", but no vocabulary has that name{hint}'

    yield from _by_entry("features", recipe.features, paths, check)
    yield from _check_shared_vocabularies(recipe, paths)
    yield from _check_circles(recipe)


def _check_aggregate(path: str, step: s.Aggregate, kinds: Mapping[str, str]) -> Iterator[str]:
    kind = kinds.get(step.column)
    if kind is None:
        hint = nearest(step.column, kinds)
        yield f'{path}.column is "{step.column}", but the rows have no such column{hint}'
    elif kind not in RAW:
        yield f'{path}.column is "{step.column}", which holds {describe(kind)}; expected one value a row'
    elif kind == "text" and step.statistic not in ("count", "distinct"):
        yield f'{path} takes the {step.statistic} of "{step.column}", which is text'


def _check_shared_vocabularies(recipe: r.Recipe, paths: Paths) -> Iterator[str]:
    """Check that features with a shared vocabulary agree on its parameters and on its values."""
    first: dict[str, tuple[str, s.Vocabulary]] = {}
    held: dict[str, tuple[r.Feature, str, str]] = {}
    own = _with_own_vocabulary(recipe)
    for place, feature, kind, step in _vocabulary_steps(recipe, paths):
        name = step.named or feature.name
        if isinstance(step, s.Vocabulary) and step.named in own:
            yield f'{place}.named is "{name}", which is the vocabulary of feature "{name}"; take another name'
        if isinstance(step, s.Vocabulary) and step.named:
            owner, other = first.setdefault(name, (place.partition(".steps")[0], step))
            if dataclasses.replace(step, keep=other.keep) != other:
                yield f'{place} has other parameters than "{name}" in {owner}; make them the same'
        holds = "text" if element_of(kind) == "text" else "whole numbers"
        other_feature, other_place, other_holds = held.setdefault(name, (feature, place, holds))
        if holds != other_holds and feature is not other_feature:
            yield f'{place} gets {holds}, but "{name}" in {other_place} holds {other_holds}; cast one of them'


def _check_circles(recipe: r.Recipe) -> Iterator[str]:
    """Check that vocabularies are not circular: one that counts another's ids is fitted after it."""
    needs: dict[str, set[str]] = {}
    for feature in recipe.features:
        looked_up: set[str] = set()
        for step in feature.steps:
            if isinstance(step, s.Lookup):
                looked_up.add(step.named)
            elif isinstance(step, s.Vocabulary):
                needs.setdefault(step.named or feature.name, set()).update(looked_up)
    while ready := [name for name, others in needs.items() if needs.keys().isdisjoint(others)]:
        for name in ready:
            del needs[name]
    if needs:
        yield f"features: vocabularies {', '.join(needs)} depend on each other; give them names of their own"


def _with_own_vocabulary(recipe: r.Recipe) -> set[str]:
    """Features with an unnamed vocabulary, in which no other feature can look values up."""
    return {
        feature.name
        for feature in recipe.features
        if any(isinstance(step, s.Vocabulary) and not step.named for step in feature.steps)
    }


def _vocabulary_steps(
    recipe: r.Recipe, paths: Paths
) -> Iterator[tuple[str, r.Feature, str, s.Vocabulary | s.Lookup]]:
    """Steps that use a vocabulary, with their key path and input kind; valid ones first."""
    kinds = kinds_of_columns(recipe)
    found: list[tuple[str, r.Feature, str, s.Vocabulary | s.Lookup]] = []
    for path, feature in zip(paths_of(paths, "features", recipe.features), recipe.features, strict=True):
        try:
            along = kinds_along(feature, kinds)
        except (Unfit, LookupError):
            continue  # reported elsewhere
        for number, step in enumerate(feature.steps):
            if isinstance(step, s.Vocabulary | s.Lookup):
                found.append((f"{path}.steps[{number}].{step.step_name()}", feature, along[number], step))
    yield from sorted(found, key=lambda entry: isinstance(entry[3], s.Lookup))
