"""Are the models possible? Features and labels they name exist, and every setting has a meaning for them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from recmill.recipe import recipe as r
from recmill.recipe import steps as s
from recmill.recipe.convert import Paths, default_of
from recmill.recipe.names import nearest, repeated
from recmill.recipe.tuning import METRICS, is_metric

_TARGET = re.compile(r"[a-z_]+(@\d+)?\s*(>=|<=)\s*-?\d+(\.\d+)?([eE]-?\d+)?")
_OWN_MODEL = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
# Settings that only some models have. The user's own module gets all of them.
_SETTINGS_OF = {
    "dlrm": ("bottom", "top", "interaction", "cross_layers", "cross_rank"),
    "wide_deep": ("hidden",),
}
_OPTIMIZER_SETTINGS: dict[str, tuple[str, ...]] = {
    "sgd": ("weight_decay",),
    "adagrad": ("eps", "weight_decay", "initial_accumulator"),
    "rowwise_adagrad": ("eps", "weight_decay", "initial_accumulator"),
    "adam": ("eps", "weight_decay"),
    "adamw": ("eps", "weight_decay"),
    "lamb": ("eps", "weight_decay"),
    "ftrl": ("l1", "l2", "initial_accumulator"),
    "adagrad_decay": ("eps", "weight_decay", "initial_accumulator", "decay_rate", "decay_period"),
}
_MOST_SIGHTINGS = 65_535  # that a counter of two bytes tells
_ROWS_ONLY = ("rowwise_adagrad", "ftrl", "adagrad_decay")
_DENSE_ONLY = ("adamw", "lamb")


def check_ranking(recipe: r.Recipe, paths: Paths) -> Iterator[str]:
    """The section by itself."""
    ranking = recipe.ranking
    if ranking is None:
        return
    yield from _check_model("ranking", ranking.model, tuple(_SETTINGS_OF))
    for model, settings in _SETTINGS_OF.items():
        for name in settings if ranking.model in set(_SETTINGS_OF) - {model} else ():
            if getattr(ranking, name) != default_of(r.Ranking, name):
                yield f'ranking.{name} has no meaning for model = "{ranking.model}"; remove it'
    if ranking.model == "dlrm":
        yield from _check_interaction(ranking)
    if ranking.wide_optimizer is not None:
        yield from _check_optimizer("ranking.wide_optimizer", ranking.wide_optimizer)
    yield from _check_training("ranking", ranking.train)
    if ranking.dynamic is not None:
        yield from _check_admission(ranking.dynamic)


def check_retrieval(recipe: r.Recipe, paths: Paths) -> Iterator[str]:
    """The section by itself."""
    retrieval = recipe.retrieval
    if retrieval is None:
        return
    for name in ("user", "item"):
        if not getattr(retrieval, name):
            yield f"retrieval.{name} is empty; name the features of that tower"
    if retrieval.loss == "bce" and not retrieval.log_q:
        yield 'retrieval.log_q has no meaning for loss = "bce"; remove it'
    for name in ("micro_batches", "precision"):
        if getattr(retrieval.train, name) != default_of(r.Training, name):
            yield f"retrieval.train.{name} has no meaning for two towers; remove it"
    yield from _check_training("retrieval", retrieval.train)


def _check_model(path: str, model: str, known: Sequence[str]) -> Iterator[str]:
    if model not in known and not _OWN_MODEL.fullmatch(model):
        yield (
            f'{path}.model is "{model}"; expected {", ".join(known)}, '
            f"or your own module as package.module:Class{nearest(model, known)}"
        )


def _check_interaction(ranking: r.Ranking) -> Iterator[str]:
    if ranking.interaction != "cross":
        for name in ("cross_layers", "cross_rank"):
            if getattr(ranking, name) != default_of(r.Ranking, name):
                yield f'ranking.{name} has no meaning for interaction = "{ranking.interaction}"; remove it'
    if ranking.interaction != "cat" and ranking.bottom and ranking.bottom[-1] != ranking.embedding_dim:
        yield (
            f"ranking.bottom ends with {ranking.bottom[-1]}, but embedding_dim is {ranking.embedding_dim}; "
            f'interaction = "{ranking.interaction}" needs them equal'
        )


def _check_admission(dynamic: r.Dynamic) -> Iterator[str]:
    if dynamic.admit_after > _MOST_SIGHTINGS:
        yield f"ranking.dynamic.admit_after must be at most {_MOST_SIGHTINGS}, got {dynamic.admit_after}"
    for name in ("bloom_counters", "shared_rows"):
        if dynamic.admit_after == 1 and getattr(dynamic, name) != default_of(r.Dynamic, name):
            yield f"ranking.dynamic.{name} is for keys that wait for a row; it needs admit_after above 1"


def _check_training(model: str, training: r.Training) -> Iterator[str]:
    path = f"{model}.train"
    yield from _check_optimizer(f"{path}.dense", training.dense)
    yield from _check_optimizer(f"{path}.sparse", training.sparse)
    if training.dense.name in _ROWS_ONLY:
        yield f"{path}.dense.name is {training.dense.name}, which is for embedding rows; use adagrad"
    if training.sparse.name in _DENSE_ONLY:
        yield f"{path}.sparse.name is {training.sparse.name}, which is for dense weights; use adam"
    schedule = training.schedule
    if schedule.decay_from is not None and schedule.warmup > schedule.decay_from:
        yield (
            f"{path}.schedule.warmup must be at most decay_from, "
            f"got {schedule.warmup} and {schedule.decay_from}"
        )
    if schedule.decay != "polynomial" and schedule.power != default_of(r.Schedule, "power"):
        yield f'{path}.schedule.power has no meaning for decay = "{schedule.decay}"; remove it'
    if training.patience is not None and training.patience >= training.evaluations:
        yield (
            f"{path}.patience is {training.patience}, but evaluations is {training.evaluations}; "
            "there is nothing to wait for"
        )
    if training.target is not None and not _TARGET.fullmatch(training.target.strip()):
        yield f'{path}.target must look like "auc >= 0.80", got "{training.target}"'
    elif training.target is not None:
        metric = re.split("[<>]", training.target)[0].strip()
        if not is_metric(model, metric):
            hint = nearest(metric, METRICS[model])
            yield f'{path}.target names "{metric}", which is no metric of {model}{hint}'


def _check_optimizer(path: str, optimizer: r.Optimizer) -> Iterator[str]:
    for name in ("eps", "weight_decay", "l1", "l2", "initial_accumulator", "decay_rate", "decay_period"):
        is_set = getattr(optimizer, name) != default_of(r.Optimizer, name)
        if is_set and name not in _OPTIMIZER_SETTINGS[optimizer.name]:
            known = ", ".join(_OPTIMIZER_SETTINGS[optimizer.name])
            yield f"{path}.{name} has no meaning for {optimizer.name}, which takes: learning_rate, {known}"


def check_models(recipe: r.Recipe, paths: Paths) -> Iterator[str]:
    """Models against features and labels. Steps that do not fit are reported elsewhere."""
    features = {feature.name: feature for feature in recipe.features}
    labels = [label.name for label in recipe.labels]
    ranking, retrieval = recipe.ranking, recipe.retrieval
    if (ranking or retrieval) and not labels:
        yield "labels is empty; a model needs at least one"
    for path, names in _features_named(recipe):
        for name in repeated(names):
            yield f'{path} has "{name}" more than once'
        for name in names:
            if name not in features:
                yield f'{path} has "{name}", but there is no such feature{nearest(name, features)}'
    for path, model in (("ranking", ranking), ("retrieval", retrieval)):
        if model and labels and model.label not in labels:
            yield f'{path}.label is "{model.label}", but there is no such label{nearest(model.label, labels)}'
    if retrieval:
        yield from _check_towers(recipe, retrieval, features)
    if ranking:
        yield from _check_dynamic(ranking, features)


def _features_named(recipe: r.Recipe) -> Iterator[tuple[str, tuple[str, ...]]]:
    if recipe.ranking:
        yield "ranking.features", recipe.ranking.features
        yield "ranking.wide", recipe.ranking.wide
        if recipe.ranking.trees is not None:
            yield "ranking.trees.features", recipe.ranking.trees.features
    if recipe.retrieval:
        yield "retrieval.user", recipe.retrieval.user
        yield "retrieval.item", recipe.retrieval.item


def _check_towers(
    recipe: r.Recipe, retrieval: r.Retrieval, features: Mapping[str, r.Feature]
) -> Iterator[str]:
    if recipe.log.user is None or recipe.log.item is None:
        yield "retrieval needs log.user and log.item: which columns say who and what"
        return
    # A user's vector is made when a request comes, so it may know the context; items are indexed before.
    for path, names, owners in (
        ("retrieval.user", retrieval.user, ("user", "context")),
        ("retrieval.item", retrieval.item, ("item",)),
    ):
        for name in names:
            if name in features and features[name].of not in owners:
                yield f'{path} has "{name}", which belongs to the {features[name].of}; see `of` in the recipe'
    of_items = [features[name] for name in retrieval.item if name in features and features[name].of == "item"]
    if of_items and not any(feature.columns == (recipe.log.item,) for feature in of_items):
        yield f'retrieval.item has no feature made of "{recipe.log.item}" alone; items are told apart by it'


def _check_dynamic(ranking: r.Ranking, features: Mapping[str, r.Feature]) -> Iterator[str]:
    used = [features[name] for name in ranking.features or features if name in features]
    has_keys = any(isinstance(step, s.Key) for feature in used for step in feature.steps)
    if ranking.dynamic is not None and not has_keys:
        yield "ranking.dynamic has no meaning without features that end with key; remove it"
