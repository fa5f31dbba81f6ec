"""Validation of the models: features and labels they name exist, and every setting applies to them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence

from recmill.errors import ExpressionError
from recmill.recipe import recipe as r
from recmill.recipe import steps as s
from recmill.recipe.check_features import ends_as
from recmill.recipe.convert import Paths, default_of
from recmill.recipe.crosses import columns_to_cross
from recmill.recipe.expressions import parse_score
from recmill.recipe.kinds import NUMBERS, describe, element_of, kinds_of_columns, width_of
from recmill.recipe.names import nearest, repeated
from recmill.recipe.tuning import is_metric, metrics_of


def check_recall(recipe: r.Recipe, paths: Paths) -> Iterator[str]:
    """Check that vectors of items are the same in every row: numbers of the item alone, of fixed length."""
    name = recipe.recall.content if recipe.recall is not None else None
    if name is None:
        return
    features = {feature.name: feature for feature in recipe.features}
    if name not in features:
        yield f'recall.content is "{name}", but there is no such feature{nearest(name, features)}'
        return
    feature = features[name]
    kind = ends_as(feature, kinds_of_columns(recipe))
    if kind is not None and (element_of(kind) not in NUMBERS or width_of(feature) is None):
        yield (
            f'recall.content is "{name}", which is no vector of numbers; end its steps with pack, or with '
            '{ split = ";" }, { cast = "float" }, { pad = 64 }'
        )
    if feature.of != "item":
        yield f'recall.content is "{name}", which belongs to the {feature.of}; it must be a feature of the item'


_TARGET = re.compile(r"(\w+\.)?[a-z_][a-z_0-9]*(@\d+)?\s*(>=|<=)\s*-?\d+(\.\d+)?([eE]-?\d+)?")
_TASK = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_OWN_MODEL = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
# Settings that only some models have. User-defined modules get all of them.
_OF_DLRM = ("bottom", "top", "interaction", "cross_layers", "cross_rank", "dropout")
_SETTINGS_OF: dict[str, tuple[str, ...]] = {
    "lr": (),
    "fm": (),
    "deepfm": ("hidden", "dropout"),
    "wide_deep": ("hidden", "dropout"),
    "dlrm": _OF_DLRM,
    "dcn": ("hidden", "cross_layers", "cross_rank", "dropout"),
    "masknet": ("hidden", "mask_blocks", "mask_width", "dropout"),
    "din": ("hidden", "sequences", "attention", "dropout"),
    "bst": ("hidden", "sequences", "dropout"),
    **dict.fromkeys(r.MULTI_TASK, (*_OF_DLRM, "tasks")),
    r.TREES: (),
}
# Settings of all rankers except trees, which have no embeddings and are fitted at once.
_NOT_OF_TREES = (
    "features",
    "embedding_dim",
    "wide",
    "wide_optimizer",
    "average",
    "loss",
    "weight",
    "dynamic",
)
_STEPS_ONLY = (
    "micro_batches",
    "epochs",
    "max_minutes",
    "dense",
    "sparse",
    "schedule",
    "evaluations",
    "target",
    "patience",
    "precision",
)
_SETTINGS_OF_TASKS: dict[str, tuple[str, ...]] = {
    "shared_bottom": (),
    "mmoe": ("experts",),
    "ple": ("experts", "task_experts", "levels"),
    "esmm": (),
}
_SETTINGS_OF_RETRIEVAL: dict[str, tuple[str, ...]] = {
    "two_tower": ("hidden", "loss"),
    "sasrec": ("blocks", "heads", "negatives", "dropout"),
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
_MOST_SIGHTINGS = 65_535  # the limit of a two-byte counter
_ROWS_ONLY = ("rowwise_adagrad", "ftrl", "adagrad_decay")
_DENSE_ONLY = ("adamw", "lamb")


def check_ranking(recipe: r.Recipe, paths: Paths) -> Iterator[str]:
    """Check the section by itself."""
    ranking = recipe.ranking
    if ranking is None:
        return
    yield from _check_model("ranking", ranking.model, tuple(_SETTINGS_OF))
    for name in settings_of_others("ranking", ranking.model):
        if getattr(ranking, name) != default_of(r.Ranking, name):
            yield f'ranking.{name} has no meaning for model = "{ranking.model}"; remove it'
    if ranking.model in r.OVER_DLRM:
        yield from _check_interaction(ranking)
    if ranking.model == r.TREES:
        yield from _check_trees(ranking)
    if ranking.model == "lr" and ranking.embedding_dim != 1:
        yield f"ranking.embedding_dim is {ranking.embedding_dim}; lr has one weight for each id: set it to 1"
    yield from _check_tasks(ranking)
    if ranking.cross is not None and (number := len(columns_to_cross(recipe))) < 2:
        yield (
            f'ranking.cross is "{ranking.cross}", but ranking.wide has {number} of the features that it can cross; it '
            "needs two of one column and one step each: vocabulary, hash, key, map, buckets or quantiles"
        )
    yield from _check_loss(ranking)
    if ranking.weight and ranking.weight in ranking.labels:
        yield f'ranking.weight is "{ranking.weight}", which is a target; weight rows by another label'
    if ranking.model in ("din", "bst") and not ranking.sequences:
        yield f"ranking.sequences is empty; {ranking.model} reads a list of earlier items, unpooled"
    if ranking.model == "din" and not ranking.attention:
        yield "ranking.attention is empty; din needs at least one hidden layer there"
    if ranking.wide_optimizer is not None:
        yield from _check_optimizer("ranking.wide_optimizer", ranking.wide_optimizer)
    yield from _check_training("ranking", ranking.train, ranking)
    yield from _check_admission("ranking.dynamic", ranking.dynamic)


def check_retrieval(recipe: r.Recipe, paths: Paths) -> Iterator[str]:
    """Check the section by itself."""
    retrieval = recipe.retrieval
    if retrieval is None:
        return
    for name in ("user", "item"):
        if not getattr(retrieval, name):
            yield f"retrieval.{name} is empty; name the features of that tower"
    yield from _check_model("retrieval", retrieval.model, tuple(_SETTINGS_OF_RETRIEVAL))
    for name in settings_of_others("retrieval", retrieval.model):
        if getattr(retrieval, name) != default_of(r.Retrieval, name):
            yield f'retrieval.{name} has no meaning for model = "{retrieval.model}"; remove it'
    if retrieval.model == "sasrec" and retrieval.embedding_dim % retrieval.heads:
        yield (
            f"retrieval.embedding_dim is {retrieval.embedding_dim}, but heads is {retrieval.heads}; "
            "each head needs an equal part of it"
        )
    if retrieval.loss == "bce" and not retrieval.log_q:
        yield 'retrieval.log_q has no meaning for loss = "bce"; remove it'
    for name in ("micro_batches", "precision"):
        if getattr(retrieval.train, name) != default_of(r.Training, name):
            yield f"retrieval.train.{name} has no meaning for retrieval; remove it"
    yield from _check_training("retrieval", retrieval.train)
    yield from _check_admission("retrieval.dynamic", retrieval.dynamic)


def _check_trees(ranking: r.Ranking) -> Iterator[str]:
    """Check trees alone: they have features and settings of their own, and nothing that is trained in steps."""
    if ranking.trees is None:
        yield 'ranking.trees is missing; model = "trees" reads the number features that it names'
    for path, section, default, names in (
        ("ranking", ranking, r.Ranking(r.TREES), _NOT_OF_TREES),
        ("ranking.train", ranking.train, r.Training(), _STEPS_ONLY),
    ):
        for name in names:
            if getattr(section, name) != getattr(default, name):
                yield (
                    f'{path}.{name} has no meaning for model = "trees", whose settings are in ranking.trees; '
                    "remove it"
                )


def settings_of_others(section: str, model: str) -> list[str]:
    """Settings that do not apply to a model. User-defined modules may use all of them."""
    settings = _SETTINGS_OF if section == "ranking" else _SETTINGS_OF_RETRIEVAL
    every = {name for names in settings.values() for name in names}
    return sorted(every - set(settings.get(model, every)))


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


def _check_admission(path: str, dynamic: r.Dynamic | None) -> Iterator[str]:
    if dynamic is None:
        return
    if dynamic.admit_after > _MOST_SIGHTINGS:
        yield f"{path}.admit_after must be at most {_MOST_SIGHTINGS}, got {dynamic.admit_after}"
    for name in ("bloom_counters", "shared_rows"):
        if dynamic.admit_after == 1 and getattr(dynamic, name) != default_of(r.Dynamic, name):
            yield f"{path}.{name} is for keys that are not admitted yet; it needs admit_after above 1"


def _check_tasks(ranking: r.Ranking) -> Iterator[str]:
    """Check the label or labels, and the settings of multi-task models."""
    tasks, model = ranking.tasks, ranking.model
    if tasks is None:
        if model in r.MULTI_TASK:
            yield f'ranking.tasks is missing; model = "{model}" learns several labels, which it names'
        elif not ranking.label:
            yield "ranking.label is missing"
        return
    if ranking.label:
        yield "ranking.label has no meaning beside ranking.tasks, whose labels are learned; remove one of them"
    if ranking.average > 1:
        yield "ranking.average is for models with one label; remove it"
    for name in ("wide", "trees"):
        if getattr(ranking, name):
            yield f"ranking.{name} is for models with one label; remove it, or name its features in ranking.features"
    if len(tasks.labels) < 2 or (model == "esmm" and len(tasks.labels) != 2):
        wanted = (
            "a click and what follows it" if model == "esmm" else "two or more; for one, use ranking.label"
        )
        yield f"ranking.tasks.labels has {len(tasks.labels)}, expected {wanted}"
    for name in repeated(tasks.labels):
        yield f'ranking.tasks.labels has "{name}" more than once'
    if tasks.weights and tasks.uncertainty:
        yield "ranking.tasks.weights has no meaning beside uncertainty, which learns them; remove one of them"
    for name in sorted(set(tasks.weights) - set(tasks.labels)):
        yield f'ranking.tasks.weights has "{name}", which is none of its labels{nearest(name, tasks.labels)}'
    for name in ("experts", "task_experts", "levels"):
        is_set = getattr(tasks, name) != default_of(r.Tasks, name)
        if is_set and name not in _SETTINGS_OF_TASKS.get(model, (name,)):
            yield f'ranking.tasks.{name} has no meaning for model = "{model}"; remove it'
    if model in ("mmoe", "ple") and not ranking.top:
        yield f"ranking.top is empty; the experts of {model} have its layers"
    yield from _check_serve_score(tasks)


def _check_loss(ranking: r.Ranking) -> Iterator[str]:
    """Check the loss of all labels, or of each numeric label."""
    loss, tasks = ranking.loss, ranking.tasks
    if loss and loss not in r.NUMBER_LOSSES and not _OWN_MODEL.fullmatch(loss):
        yield (
            f'ranking.loss is "{loss}"; expected {", ".join(r.NUMBER_LOSSES)}, your own function as '
            f"package.module:function, or none{nearest(loss, r.NUMBER_LOSSES)}"
        )
    if tasks is not None and loss in r.NUMBER_LOSSES:
        yield f'ranking.loss is "{loss}", which is for one label; beside others, name it in ranking.tasks.losses'
    if tasks is not None and tasks.losses and loss and loss not in r.NUMBER_LOSSES:
        yield "ranking.tasks.losses has no meaning beside your own ranking.loss, which gets all labels; remove one"
    if tasks is not None:
        for name in sorted(set(tasks.losses) - set(tasks.labels)):
            yield f'ranking.tasks.losses has "{name}", which is none of its labels{nearest(name, tasks.labels)}'
    if ranking.number_losses and ranking.model == "esmm":
        yield "ranking.tasks.losses has no meaning for esmm, whose second label is 1 or 0 after a click; use mmoe"
    if ranking.number_losses and ranking.trees is not None:
        yield "ranking.trees is for labels of 0 and 1; remove it"


def _check_serve_score(tasks: r.Tasks) -> Iterator[str]:
    if any(name == "served" or not _TASK.fullmatch(name) for name in tasks.labels):
        yield 'ranking.tasks.labels must be made of letters, digits and "_", and be none called "served"'
        return
    try:
        parse_score(tasks.order, tasks.labels)
    except ExpressionError as error:
        yield f"ranking.tasks.serve_score: {error}"


def _check_training(model: str, training: r.Training, ranking: r.Ranking | None = None) -> Iterator[str]:
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
            "there are too few evaluations"
        )
    if training.target is not None and not _TARGET.fullmatch(training.target.strip()):
        yield f'{path}.target must look like "auc >= 0.80", got "{training.target}"'
    elif training.target is not None:
        metric = re.split("[<>]", training.target)[0].strip()
        if not is_metric(model, metric, ranking):
            hint = nearest(metric, metrics_of(model, ranking))
            yield f'{path}.target names "{metric}", which is no metric of {model}{hint}'


def _check_optimizer(path: str, optimizer: r.Optimizer) -> Iterator[str]:
    for name in ("eps", "weight_decay", "l1", "l2", "initial_accumulator", "decay_rate", "decay_period"):
        is_set = getattr(optimizer, name) != default_of(r.Optimizer, name)
        if is_set and name not in _OPTIMIZER_SETTINGS[optimizer.name]:
            known = ", ".join(_OPTIMIZER_SETTINGS[optimizer.name])
            yield f"{path}.{name} has no meaning for {optimizer.name}, which takes: learning_rate, {known}"


def check_models(recipe: r.Recipe, paths: Paths) -> Iterator[str]:
    """Check models against features and labels. Invalid steps are reported elsewhere."""
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
    for path, name in _labels_named(recipe):
        if labels and name not in labels:
            yield f'{path} "{name}", but there is no such label{nearest(name, labels)}'
    yield from _check_packed(recipe, features)
    if retrieval:
        yield from _check_towers(recipe, retrieval, features)
        if retrieval.model == "sasrec":
            yield from _check_sasrec(recipe, retrieval, features)
        towers = (*retrieval.user, *retrieval.item)
        yield from _check_dynamic("retrieval.dynamic", retrieval.dynamic, towers, features)
    if ranking:
        read = (*ranking.features_among(features), *ranking.wide, *ranking.sequences)
        yield from _check_dynamic("ranking.dynamic", ranking.dynamic, read, features)
        used = ranking.features_among(features)
        targets = [features[name] for name in used if name in features and name not in ranking.sequences]
        yield from _check_sequences(recipe, "ranking.sequences", ranking.sequences, targets)


def _labels_named(recipe: r.Recipe) -> Iterator[tuple[str, str]]:
    ranking, retrieval = recipe.ranking, recipe.retrieval
    if ranking and ranking.label:
        yield "ranking.label is", ranking.label
    if ranking and ranking.tasks:
        yield from (("ranking.tasks.labels has", name) for name in ranking.tasks.labels)
    if ranking and ranking.weight:
        yield "ranking.weight is", ranking.weight
    if retrieval:
        yield "retrieval.label is", retrieval.label


def _features_named(recipe: r.Recipe) -> Iterator[tuple[str, tuple[str, ...]]]:
    if recipe.ranking:
        yield "ranking.features", recipe.ranking.features
        yield "ranking.sequences", recipe.ranking.sequences
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
        yield "retrieval needs log.user and log.item, the columns of users and items"
        return
    # A user's vector is computed at request time, so it may use the context; items are indexed before.
    for path, names, owners in (
        ("retrieval.user", retrieval.user, ("user", "context")),
        ("retrieval.item", retrieval.item, ("item",)),
    ):
        for name in names:
            if name in features and features[name].of not in owners:
                yield f'{path} has "{name}", which belongs to the {features[name].of}; see `of` in the recipe'
    of_items = [features[name] for name in retrieval.item if name in features and features[name].of == "item"]
    if of_items and not any(feature.columns == (recipe.log.item,) for feature in of_items):
        yield f'retrieval.item has no feature made of "{recipe.log.item}" alone; it identifies items'


def _check_sasrec(
    recipe: r.Recipe, retrieval: r.Retrieval, features: Mapping[str, r.Feature]
) -> Iterator[str]:
    for path, names in (("retrieval.user", retrieval.user), ("retrieval.item", retrieval.item)):
        what = "the list of items that the tower reads" if path == "retrieval.user" else "the item's id"
        if len(names) > 1:
            yield f'{path} has {len(names)} features, but model = "sasrec" takes one: {what}'
    items = [features[name] for name in retrieval.item if name in features]
    kinds = kinds_of_columns(recipe)
    for feature in items:
        if ends_as(feature, kinds) == "key":
            yield (
                f'retrieval.item has "{feature.name}", whose keys have no bound, but model = "sasrec" draws its '
                "negatives among all items; give it a vocabulary or a hash"
            )
    yield from _check_sequences(recipe, "retrieval.user", retrieval.user, items)


def _check_packed(recipe: r.Recipe, features: Mapping[str, r.Feature]) -> Iterator[str]:
    """Check that only sasrec trains on packed histories: most training rows have empty ones."""
    packed = [operation for operation in recipe.rows if isinstance(operation, r.History) and operation.packed]
    lists = {column for history in packed for column in history.list_columns.values()}
    if recipe.ranking is not None:
        yield from _check_reads_none("ranking", recipe.ranking.features_among(features), features, lists)
    if recipe.retrieval is not None and recipe.retrieval.model != "sasrec":
        yield from _check_reads_none("retrieval", recipe.retrieval.user, features, lists)


def _check_reads_none(
    model: str, names: Sequence[str], features: Mapping[str, r.Feature], lists: Collection[str]
) -> Iterator[str]:
    for name in names:
        if name in features and set(features[name].columns) & set(lists):
            yield (
                f'{model} reads "{name}", whose history is packed, so that most training rows have none; '
                "name other features for it, or remove packed"
            )


def _check_sequences(
    recipe: r.Recipe, path: str, names: Sequence[str], targets: Sequence[r.Feature]
) -> Iterator[str]:
    """Check that unpooled lists belong to users, and hold ids of some feature with one value per row."""
    kinds = kinds_of_columns(recipe)
    shared = {vocabulary_of(feature) for feature in targets if ends_as(feature, kinds) in ("id", "key")} - {
        None
    }
    for feature in (feature for feature in recipe.features if feature.name in names):
        kind = ends_as(feature, kinds)
        if kind is not None and kind not in ("list of id", "list of key"):
            yield f'{path} has "{feature.name}", which holds {describe(kind)}; it needs lists of ids'
        elif feature.of == "item":
            yield f'{path} has "{feature.name}", which belongs to the item; lists of users are read unpooled'
        elif kind is not None and vocabulary_of(feature) not in shared:
            yield (
                f'{path} has "{feature.name}", but no feature with one value a row has its vocabulary; '
                'give both the same `named`, as in { vocabulary = { named = "item" } } and { lookup = "item" }'
            )


def vocabulary_of(feature: r.Feature) -> str | None:
    """The name of a feature's shared vocabulary; None when it has none."""
    names = [getattr(step, "named", None) for step in feature.steps]
    return next((name for name in reversed(names) if name is not None), None)


def _check_dynamic(
    path: str, dynamic: r.Dynamic | None, names: Sequence[str], features: Mapping[str, r.Feature]
) -> Iterator[str]:
    used = [features[name] for name in names if name in features]
    has_keys = any(isinstance(step, s.Key) for feature in used for step in feature.steps)
    if dynamic is not None and not has_keys:
        yield f"{path} has no meaning without features that end with key; remove it"
