"""check: is a recipe right, is all that it names here, and do the first rows of its files parse?"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from recmill.errors import FeatureError
from recmill.recipe.recipe import Recipe
from recmill.recipe.search import searched
from recmill.recipe.steps import Vocabulary
from recmill.recipe.trust import functions_of

if TYPE_CHECKING:
    from recmill.logs.describe import FilesReport

_FIRST_LABELS = 10_000  # rows whose labels are looked at
_MOST_NAMED = 10


@dataclass(frozen=True)
class CheckResult:
    """What was found in the files of a recipe that is right: the log's and those of its side tables, by name."""

    recipe: Recipe
    files: Mapping[str, FilesReport] = field(default_factory=dict)
    labels: str | None = None  # why no model could learn from the first rows
    warnings: tuple[str, ...] = ()  # what works, but hardly as it is meant

    @property
    def good(self) -> bool:
        """Whether there is nothing in the way of `prepare`."""
        return self.files_parse and self.labels is None

    @property
    def files_parse(self) -> bool:
        return all(
            report.problem is None and not report.bad and report.num_good for report in self.files.values()
        )


def check(recipe: Recipe, data: str | None = None) -> CheckResult:
    """Look at what a recipe names and, with `data`, at the first rows of each of its files.

    Raises what is wrong with the recipe; what is wrong with files is in the result. Without `data`, nothing heavy is
    imported.
    """
    if recipe.tune is not None:
        searched(recipe)
    _check_named(recipe)
    if data is None:
        return CheckResult(recipe, warnings=_warnings(recipe))
    files = _describe_files(recipe, data)
    result = CheckResult(recipe, files, warnings=(*_warnings(recipe), *_file_warnings(files)))
    if not result.files_parse:
        return result
    _check_held_out_files(recipe, data)
    return replace(result, labels=_label_problem(recipe, data))


def _warnings(recipe: Recipe) -> tuple[str, ...]:
    if recipe.split is None and (recipe.ranking or recipe.retrieval):
        return (
            "[split] is missing: every row trains, so that no model can be measured and no gate can pass. "
            'Hold some out, such as: [split] by = "tail", held_out = 0.1',
        )
    return ()


def _file_warnings(files: Mapping[str, FilesReport]) -> Iterator[str]:
    for name, report in files.items():
        if report.missing:
            yield (
                f"{name} has a gap: {_listed(report.missing)} {_are(report.missing)} not there. "
                "Copy what is missing, or go on without."
            )
        if report.empty:
            yield f"{name} has files without any row: {_listed(report.empty)}. Should they have some?"


def _listed(names: Sequence[str]) -> str:
    more = [f"and {len(names) - _MOST_NAMED:,} more"] if len(names) > _MOST_NAMED else []
    return ", ".join([*names[:_MOST_NAMED], *more])


def _are(names: Sequence[str]) -> str:
    return "is" if len(names) == 1 else "are"


def _check_named(recipe: Recipe) -> None:
    """Fail when something that the recipe names is not on this machine: functions, vocabularies to extend, a model."""
    for path in functions_of(recipe):
        from recmill.features.lists import import_function

        import_function(path)
    for feature in recipe.features:
        for step in feature.steps:
            if isinstance(step, Vocabulary) and step.extend:
                from recmill.features.category import read_vocabulary

                read_vocabulary(step.extend, step.named or feature.name)
    if find_spec("torch") is not None:
        _check_own_models(recipe)


def _check_own_models(recipe: Recipe) -> None:
    named = {
        f"{section}.model": model.model
        for section in ("ranking", "retrieval")
        if (model := getattr(recipe, section)) is not None and ":" in model.model
    }
    loss = recipe.ranking.loss if recipe.ranking is not None else ""
    if named or loss:
        from recmill.models.own import own_loss, own_model

        for key, path in named.items():
            own_model(path, key)
        if loss:
            own_loss(loss)


def _check_held_out_files(recipe: Recipe, data: str) -> None:
    if recipe.split is not None and recipe.split.by == "files":
        from recmill.logs.base import open_source
        from recmill.logs.splits import held_out_files

        held_out_files(open_source(recipe.log, data), recipe.split)


def _describe_files(recipe: Recipe, data: str) -> dict[str, FilesReport]:
    from recmill.logs.describe import describe_files

    return {
        "log": describe_files(recipe.log, data),
        **{f"tables.{name}": describe_files(table, data) for name, table in recipe.tables.items()},
    }


def _label_problem(recipe: Recipe, data: str) -> str | None:
    from recmill.stages.prepare.prepare import check_first_labels

    with tempfile.TemporaryDirectory(prefix="recmill-check-") as work:
        try:
            check_first_labels(recipe, data, _FIRST_LABELS, Path(work))
        except FeatureError as error:
            return str(error)
    return None
