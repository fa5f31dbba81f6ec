"""`[tune]`: validation of the search space, and the recipe with values from it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from recmill.recipe import recipe as r
from recmill.recipe.convert import Paths, Problems, Reader, hints_of, show
from recmill.recipe.names import nearest, repeated

MODELS: dict[str, type] = {"ranking": r.Ranking, "retrieval": r.Retrieval}
COSTS = ("seconds", "parameters", "bytes")
LOWER_IS_BETTER = (*COSTS, "log_loss", "normalised_entropy", "rmse", "mae")
_OF_BINARY = ("auc", "pr_auc", "accuracy", "log_loss", "normalised_entropy", "rce")
_OF_NUMBERS = ("r2", "rank_correlation", "rmse", "mae")
_MEANS_OF_NUMBERS = ("r2", "rank_correlation")  # others are in the unit of a label
_OF_RETRIEVAL = ("recall@10", "ndcg@10", "mrr@10", "hit@10")
_AT_K = re.compile(r"(recall|ndcg|mrr|hit)@[1-9]\d{0,5}")


def check_tune(recipe: r.Recipe, paths: Paths) -> Iterator[str]:
    """Check the section by itself. Compatibility with the models is checked when a search begins."""
    tune = recipe.tune
    if tune is None:
        return
    if not tune.space:
        yield "tune.space is empty; name at least one key, such as ranking.embedding_dim = [8, 16]"
    for key, dimension in tune.space.items():
        yield from _check_dimension(key, dimension)
    models = sorted({key.partition(".")[0] for key in tune.space} & set(MODELS))
    if len(models) > 1:
        yield f"tune.space has keys of {' and '.join(models)}; one search is for one model"
    leaves = [
        leaf for key, dimension in tune.space.items() for leaf in dict.fromkeys(_leaves(key, dimension))
    ]
    for name in (*repeated(leaves), *(leaf for leaf in leaves if _is_inside(leaf, leaves))):
        yield f"tune.space sets {name} in two places; keep one of them"
    for model in models[:1]:
        yield from _check_objectives(model, tune.objectives, recipe.ranking)


def _leaves(key: str, dimension: r.Dimension) -> Iterator[str]:
    """The keys that a dimension sets."""
    for value in dimension.values if isinstance(dimension, r.Choices) else (None,):
        if isinstance(value, dict):
            yield from (f"{key}.{name}" for name in value)
        else:
            yield key


def _is_inside(leaf: str, leaves: list[str]) -> bool:
    return any(leaf.startswith(f"{other}.") for other in leaves)


def _check_objectives(model: str, objectives: tuple[str, ...], ranking: r.Ranking | None) -> Iterator[str]:
    known = metrics_of(model, ranking)
    for name in repeated(objectives):
        yield f'tune.objectives has "{name}" more than once'
    for place, name in enumerate(objectives):
        if place and name not in COSTS:
            yield f'tune.objectives[{place}] is "{name}"; after the metric come costs{nearest(name, COSTS)}'
        elif not place and not is_metric(model, name, ranking):
            yield f'tune.objectives[0] is "{name}"; expected a metric of {model}{nearest(name, known)}'


def metrics_of(model: str, ranking: r.Ranking | None = None) -> tuple[str, ...]:
    """All metrics in evaluations of a model; those of a ranker depend on its labels."""
    if model == "retrieval":
        return _OF_RETRIEVAL
    if ranking is None or not ranking.number_losses:
        return _OF_BINARY
    of_numbers = _MEANS_OF_NUMBERS if ranking.tasks is not None else _OF_NUMBERS
    return (*(_OF_BINARY if ranking.binary_labels else ()), *of_numbers)


def quality_of(model: str, ranking: r.Ranking | None = None) -> str:
    """The metric that chooses the best checkpoint and guides searches: AUC, or R2 without binary labels."""
    preferred = "ndcg@10" if model == "retrieval" else "auc"
    known = metrics_of(model, ranking)
    return preferred if preferred in known else known[0]


def is_metric(model: str, name: str, ranking: r.Ranking | None = None) -> bool:
    """Whether evaluations of a model have this metric; with several labels, also as `label.name`."""
    task, _, own = name.rpartition(".")
    if ranking is not None and ranking.tasks is not None and task in ranking.labels:
        return own in (_OF_NUMBERS if task in ranking.number_losses else _OF_BINARY)
    return name in metrics_of(model, ranking) or (model == "retrieval" and _AT_K.fullmatch(name) is not None)


def _check_dimension(key: str, dimension: r.Dimension) -> Iterator[str]:
    model, _, rest = key.partition(".")
    if model not in MODELS:
        sections = [field.name for field in dataclasses.fields(r.Recipe)]
        known = "" if model in sections else nearest(model, MODELS)
        yield f"tune.space.{key} is no key of ranking or retrieval, and other keys need another Table{known}"
        return
    kind = MODELS[model]
    passed = model
    for name in rest.split(".") if rest else ():
        known_keys = hints_of(kind) if dataclasses.is_dataclass(kind) else {}
        if name not in known_keys:
            hint = nearest(name, known_keys) if known_keys else f"; {passed} is a value, not a table"
            yield f"tune.space.{key} is not a known key{hint}"
            return
        kind, passed = _required(known_keys[name]), f"{passed}.{name}"
    if isinstance(dimension, r.Range):
        yield from _check_range(f"tune.space.{key}", dimension, kind)
    elif isinstance(dimension, r.Choices):
        yield from _check_choices(f"tune.space.{key}", dimension, kind)


def _required(kind: Any) -> Any:
    """The kind of a key that may be absent."""
    options = [option for option in get_args(kind) if option is not type(None)]
    return options[0] if get_origin(kind) in (Union, UnionType) and len(options) == 1 else kind


def _check_choices(path: str, choices: r.Choices, kind: Any) -> Iterator[str]:
    if not choices.values:
        yield f"{path} is empty; name at least one choice"
    for place, value in enumerate(choices.values):
        if value in choices.values[:place]:
            yield f"{path}[{place}] is {show(value)}, which is among the choices already"
    problems = Problems()
    for place, value in enumerate(choices.values):
        _read_part(Reader(problems), kind, value, f"{path}[{place}]")
    yield from problems.found


def _read_part(reader: Reader, kind: Any, value: Any, path: str) -> None:
    """Like the reader, but of a table only the keys that are present."""
    if not (isinstance(kind, type) and dataclasses.is_dataclass(kind) and isinstance(value, dict)):
        reader.read(kind, value, path)
        return
    hints = hints_of(kind)
    for name, part in value.items():
        if name in hints:
            _read_part(reader, _required(hints[name]), part, f"{path}.{name}")
        else:
            reader.problems.add(f"{path}.{name}", f"is not a known key{nearest(str(name), hints)}")


def _check_range(path: str, found: r.Range, kind: Any) -> Iterator[str]:
    number = number_kind(kind)
    if number is None:
        yield f"{path} is no number; list its choices instead of low and high"
        return
    problems = Problems()
    for name in ("low", "high"):
        Reader(problems).read(kind, getattr(found, name), f"{path}.{name}")
    yield from problems.found
    if found.low >= found.high:
        yield f"{path}.low must be below high, got {show(found.low)} and {show(found.high)}"
    if found.log and found.low <= 0:
        yield f"{path}.low must be above 0 for log = true, got {show(found.low)}"
    if found.step is None:
        return
    if found.log:
        yield f"{path}.step has no meaning beside log = true; remove one of them"
    if found.step <= 0 or (number is int and not isinstance(found.step, int)):
        expected = "a positive integer" if number is int else "a number above 0"
        yield f"{path}.step must be {expected}, got {show(found.step)}"


def number_kind(kind: Any) -> type | None:
    """int or float when the values of a key are numbers, whatever their bounds."""
    kind = _required(kind)
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    return kind if kind in (int, float) else None


def kind_at(key: str) -> Any:
    """The kind of the values at a key path that `check_tune` accepted."""
    model, *names = key.split(".")
    kind: Any = MODELS[model]
    for name in names:
        kind = _required(hints_of(kind)[name])
    return kind


def tuned_model(tune: r.Tune) -> str:
    """ranking or retrieval."""
    return next(iter(tune.space)).partition(".")[0]


def objectives_of(tune: r.Tune, ranking: r.Ranking | None) -> tuple[str, ...]:
    """The metric first, then costs."""
    return tune.objectives or (quality_of(tuned_model(tune), ranking), "seconds")


def merged(tree: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """A plain recipe with values set by key path; keys that a table does not name keep their values."""
    result = dict(tree)
    for key, value in values.items():
        name, _, rest = key.partition(".")
        inner = {rest: value} if rest else value
        place = result.get(name)
        result[name] = (
            merged(place if isinstance(place, dict) else {}, inner)
            if rest or isinstance(value, dict)
            else value
        )
    return result
