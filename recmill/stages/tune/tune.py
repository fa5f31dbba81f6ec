"""tune: search recipes, quality against cost; the best one becomes a recipe of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from recmill.artifacts.manifest import write_whole
from recmill.dataset.table import Table
from recmill.errors import RecmillError
from recmill.recipe.load import load_recipe
from recmill.recipe.recipe import Recipe
from recmill.recipe.search import searched
from recmill.reporting.machine import available_cores
from recmill.reporting.progress import Progress
from recmill.stages.tune.config import TuneConfig
from recmill.stages.tune.front import TrialResult, choose, front
from recmill.stages.tune.study import Budget, Study, open_study
from recmill.stages.tune.write import BEST, best_recipe, write_page, write_trials


@dataclass(frozen=True)
class TuneResult:
    """A search as it stands: what was tried, which trials nothing beats, and which was taken."""

    into: Path
    objectives: tuple[str, ...]
    tried: list[TrialResult]
    front: list[TrialResult]
    best: TrialResult | None
    own: TrialResult | None  # the recipe as it was, if that is in the space

    @property
    def recipe(self) -> Recipe | None:
        """The best recipe found; None when no trial came to its end."""
        return load_recipe(str(self.into / BEST)) if self.best is not None else None


def tune(
    recipe: Recipe,
    table: Table,
    into: Path,
    options: TuneConfig = TuneConfig(),  # noqa: B008, frozen
    bars: Progress | None = None,
    report: Callable[[TrialResult], None] = lambda tried: None,
) -> TuneResult:
    """Try recipes until the budget is spent; `report` hears of each trial as it ends.

    Killed and run again, it goes on. Results are written whenever a trial ends, so they are there also when it is
    interrupted.
    """
    if not table.num_rows("eval"):
        raise RecmillError(
            f"Table {table.path} has no eval rows to measure trials on. Add a [split] and prepare again."
        )
    asked = searched(recipe)
    budget = Budget(options.trials or asked.trials, options.minutes)
    seed = asked.seed if options.seed is None else options.seed
    with (bars or Progress(quiet=True)).stage("tune", budget.trials) as bar:

        def ended(one: TrialResult) -> None:
            seen = one.found or (one.evaluations[-1] if one.evaluations else {})
            bar.advance(1, int(seen.get("samples", 0)))
            report(one)
            write_trials(into, study.tried())

        with open_study(into, recipe, table.digest, budget, seed, ended) as study:
            bar.done = budget.trials - study.num_left
            try:
                _run(study, table, into, options)
            finally:
                tuned = _write(into, recipe, study, options.within)
    return tuned


def _run(study: Study, table: Table, into: Path, options: TuneConfig) -> None:
    if options.engine == "ray":
        from recmill.stages.tune.ray import run_trials as run_on_ray

        run_on_ray(study, table.path, into, options.jobs, options.threads or 1, options.address)
        return
    from recmill.stages.tune.local import run_trials

    jobs = options.jobs or 1
    run_trials(study, table.path, jobs, options.threads or max(1, available_cores() // jobs))


def _write(into: Path, recipe: Recipe, study: Study, within: float) -> TuneResult:
    """The results of all trials so far."""
    tried, objectives = study.tried(), study.objectives
    best, own = choose(tried, objectives, within), study.own()
    text = best_recipe(recipe, objectives, best) if best else ""
    write_trials(into, tried)
    if best:
        write_whole(into / BEST, text)
    write_page(into, recipe, objectives, tried, best, own, text)
    return TuneResult(into, objectives, tried, front(tried, objectives), best, own)
