"""The study: what was tried, what to try next. It lives in a file, so that a search goes on where it was left."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recmill.artifacts.lock import lock_folder
from recmill.errors import ArtifactError, RecipeError, check_installed
from recmill.recipe import recipe as r
from recmill.recipe.convert import to_plain
from recmill.recipe.load import recipe_to_dict
from recmill.recipe.search import changed, searched
from recmill.recipe.tuning import LOWER_IS_BETTER, objectives_of, tuned_model
from recmill.stages.tune.front import Numbers, TrialResult, why_behind
from recmill.stages.tune.space import all_drawn, distributions, own_values, values_of

if TYPE_CHECKING:
    import optuna

JOURNAL = "study.log"
_NAME = "recmill"
_MANY_TRIALS = (
    200  # from here on, NSGA-II has enough generations to be better than TPE for several objectives
)
_TOO_EARLY = 0.3  # share of a run before which evaluations tell little about its end
_REPEATED = "repeated"


@dataclass(frozen=True)
class Trial:
    """One recipe to try."""

    number: int
    values: Mapping[str, Any]
    recipe: r.Recipe


@dataclass(frozen=True)
class Budget:
    """How long a search goes on: so many trials in all, and none begins after a while."""

    trials: int
    minutes: float | None = None


@contextmanager
def open_study(
    into: Path, recipe: r.Recipe, table: str, budget: Budget, seed: int, on_end: Callable[[TrialResult], None]
) -> Iterator[Study]:
    """The study in a folder, new or as it was left, for one process at a time.

    Trials that were running when their search died count as interrupted and will be tried again.
    """
    check_installed("recmill tune", "optuna", "torch", "safetensors")
    tune = searched(recipe)
    with lock_folder(into):
        yield Study(into, recipe, tune, table, budget, seed, on_end)


class Study:
    """Draws trials and remembers what came of them. Only the process that drives a search uses it."""

    def __init__(
        self,
        into: Path,
        recipe: r.Recipe,
        tune: r.Tune,
        table: str,
        budget: Budget,
        seed: int,
        on_end: Callable[[TrialResult], None],
    ) -> None:
        self.recipe = recipe
        self.tune = tune
        self.model = tuned_model(tune)
        self.objectives = objectives_of(tune, recipe.ranking)
        self.budget = budget
        self.on_end = on_end
        self._deadline = None if budget.minutes is None else time.monotonic() + 60 * budget.minutes
        self._running: dict[int, optuna.Trial] = {}
        self._evaluations: dict[int, list[Numbers]] = {}
        self._distributions = distributions(tune.space)
        self._study = self._open(into / JOURNAL, seed)
        self._check_goes_on(into, table)
        self._take_over()

    def _open(self, path: Path, seed: int) -> optuna.Study:
        import optuna
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        _mend(path)
        down, up = optuna.study.StudyDirection.MINIMIZE, optuna.study.StudyDirection.MAXIMIZE
        directions = [down if name in LOWER_IS_BETTER else up for name in self.objectives]
        study = optuna.create_study(
            storage=JournalStorage(JournalFileBackend(str(path))),
            study_name=_NAME,
            directions=directions,
            load_if_exists=True,
        )
        # A search that goes on must not draw again what it drew in the beginning.
        own_seed = (seed + 7919 * len(study.trials)) % 2**32
        if len(directions) > 1 and self.budget.trials >= _MANY_TRIALS:
            study.sampler = optuna.samplers.NSGAIISampler(seed=own_seed)
        else:
            study.sampler = optuna.samplers.TPESampler(seed=own_seed)
        return study

    def _check_goes_on(self, into: Path, table: str) -> None:
        asked = {
            "recipe": recipe_to_dict(self.recipe),
            "search space": to_plain(self.tune.space),
            "objectives": list(self.objectives),
            "Table": table,
        }
        asked = json.loads(json.dumps(asked))
        begun = self._study.user_attrs.get("asked")
        if begun is None:
            self._study.set_user_attr("asked", asked)
            return
        for name, value in asked.items():
            if begun[name] != value:
                raise ArtifactError(
                    f"{into} holds a search that began with another {name}. Choose another --into."
                )

    def _take_over(self) -> None:
        from optuna.trial import TrialState

        if not self._study.trials:
            own = own_values(self.recipe, self.tune.space)
            if own is not None:
                self._study.enqueue_trial(own)
        for trial in self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            # Killed between the two, it is queued twice, and the second one is known as a repetition.
            self._study.enqueue_trial(trial.params)
            self._study.tell(trial.number, state=TrialState.FAIL)

    def next(self) -> Trial | None:
        """The next recipe to try; None when the budget is spent or every combination was tried."""
        while self.num_left > 0 and (self._deadline is None or time.monotonic() < self._deadline):
            drawn = self._study.ask(self._distributions)
            self._running[drawn.number] = drawn
            self._evaluations[drawn.number] = []
            if self._was_tried(drawn):
                self._end(drawn.number, "FAIL", reason=_REPEATED)
                if not self._plan_untried():
                    return None
                continue
            values = values_of(self.tune.space, drawn.params)
            try:
                return Trial(drawn.number, values, changed(self.recipe, values))
            except RecipeError as error:
                self.failed(drawn.number, "; ".join(error.problems))
        return None

    @property
    def num_left(self) -> int:
        """Trials that may still begin."""
        ended = [one for one in self.tried() if one.state != "interrupted"]
        return self.budget.trials - len(ended) - len(self._running)

    def heard(self, number: int, numbers: Numbers) -> str | None:
        """Remember an evaluation of a running trial; why it should stop now, or None."""
        trial, evaluations = self._running[number], self._evaluations[number]
        evaluations.append(numbers)
        trial.set_user_attr("evaluations", evaluations)
        if len(self.objectives) == 1:
            trial.report(numbers[self.objectives[0]], len(evaluations))
        if not self.tune.pruning or not _TOO_EARLY <= numbers["share"] < 1:
            return None
        return why_behind(evaluations, self.tried(), self.objectives)

    def completed(self, number: int, found: Numbers) -> None:
        missing = [name for name in self.objectives if name not in found]
        if missing:
            known = ", ".join(sorted(found))
            self.failed(number, f'objective "{missing[0]}" is not among what was measured: {known}')
            return
        self._running[number].set_user_attr("found", dict(found))
        self._end(number, "COMPLETE", values=[found[name] for name in self.objectives])

    def pruned(self, number: int, reason: str) -> None:
        self._end(number, "PRUNED", reason=reason)

    def failed(self, number: int, reason: str) -> None:
        self._end(number, "FAIL", reason=reason)

    def _end(self, number: int, state: str, values: list[float] | None = None, reason: str = "") -> None:
        from optuna.trial import TrialState

        trial = self._running.pop(number)
        del self._evaluations[number]
        if reason:
            trial.set_user_attr("reason", reason)
        self._study.tell(number, values, state=TrialState[state])
        if reason != _REPEATED:
            self.on_end(_tried(self._study.trials[number], self.tune.space))

    def tried(self) -> list[TrialResult]:
        """Every trial that ended, in the order of their numbers."""
        from optuna.trial import TrialState

        ended = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)
        trials = self._study.get_trials(deepcopy=False, states=ended)
        return [_tried(one, self.tune.space) for one in trials if one.user_attrs.get("reason") != _REPEATED]

    def own(self) -> TrialResult | None:
        """How the recipe as it is did, if that was tried."""
        drawn = own_values(self.recipe, self.tune.space)
        values = values_of(self.tune.space, drawn) if drawn is not None else None
        same = (one for one in self.tried() if one.values == values and one.state == "complete")
        return next(same, None)

    def _was_tried(self, drawn: optuna.Trial) -> bool:
        """Whether another trial that is running or ended, unless interrupted, had these values."""
        from optuna.trial import TrialState

        return any(
            other.params == drawn.params and other.number != drawn.number
            for other in self._study.get_trials(deepcopy=False)
            if other.state in (TrialState.COMPLETE, TrialState.PRUNED, TrialState.RUNNING)
            or other.user_attrs.get("reason")
        )

    def _plan_untried(self) -> bool:
        """Queue a combination that was not tried, if that can be told; False when there is none left."""
        combinations = all_drawn(self.tune.space)
        if combinations is None:
            return True
        known = [trial.params for trial in self._study.get_trials(deepcopy=False)]
        untried = next((one for one in combinations if one not in known), None)
        if untried is not None:
            self._study.enqueue_trial(untried)
        return untried is not None


def _tried(trial: optuna.trial.FrozenTrial, space: Mapping[str, r.Dimension]) -> TrialResult:
    attributes = trial.user_attrs
    states: Any = {"COMPLETE": "complete", "PRUNED": "pruned", "FAIL": "failed"}
    is_interrupted = trial.state.name == "FAIL" and "reason" not in attributes
    return TrialResult(
        trial.number,
        "interrupted" if is_interrupted else states[trial.state.name],
        values_of(space, trial.params),
        attributes.get("found", {}),
        attributes.get("reason", ""),
        tuple(attributes.get("evaluations", ())),
    )


def _mend(journal: Path) -> None:
    """Clear what a process that died while writing left behind: its lock, and half a line."""
    for leftover in journal.parent.glob(f"{journal.name}.lock*"):
        leftover.unlink()
    if not journal.exists():
        return
    content = journal.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        os.truncate(journal, whole)
