"""Trials on a Ray cluster, as trainables of Ray Tune. What to try next and what to stop stays the study's business."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from recmill.engines.ray_connection import connected
from recmill.errors import MissingPackage
from recmill.recipe.load import recipe_to_dict
from recmill.reporting.machine import available_cores
from recmill.stages.tune.study import Study

try:
    from ray import tune
    from ray.tune.schedulers import FIFOScheduler, TrialScheduler
    from ray.tune.search import Searcher
except ImportError:
    raise MissingPackage('Engine "ray"', "ray", "ray") from None

_WORK = "ray"  # what Ray Tune writes about trials, below --into
_SETTINGS = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # the study is the record
    "TUNE_DISABLE_SIGINT_HANDLER": "1",  # Ctrl-C is ours
    "RAY_AIR_NEW_OUTPUT": "0",
}


def run_trials(
    study: Study, table: Path, into: Path, num_jobs: int | None, num_threads: int, address: str | None
) -> None:
    """Run trials until the study has no more; the Table must have the same path on all nodes.

    What runs when this is interrupted ends with it. Without an address, Ray is started on this machine.
    """
    request = {"model": study.model, "table": str(table.resolve()), "threads": num_threads}
    search = _Search(study, request)
    work = into.resolve() / _WORK
    with connected(address, max(available_cores(), num_threads)), _settings():
        try:
            tune.run(
                _train,
                name="trials",
                storage_path=str(work),
                search_alg=search,
                scheduler=_Decide(study, search),
                num_samples=-1,
                max_concurrent_trials=num_jobs,
                resources_per_trial={"cpu": num_threads},
                raise_on_failed_trial=False,
                trial_dirname_creator=lambda trial: str(trial.trial_id),
                verbose=0,
            )
        finally:
            shutil.rmtree(work, ignore_errors=True)


@contextmanager
def _settings() -> Iterator[None]:
    """Ray Tune is told how to behave by the environment; what it would say about its files is no news."""
    before = {name: os.environ.get(name) for name in _SETTINGS}
    logger = logging.getLogger("ray.tune")
    level = logger.level
    os.environ.update(_SETTINGS)
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def _train(config: Mapping[str, str]) -> None:
    """One trial, in a process of the cluster. What it says has the form that local trials have."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from recmill.recipe.load import recipe_from_dict
    from recmill.stages.tune.trial import Numbers, reason_of, run_trial

    def say(message: Mapping[str, Any], numbers: Numbers | None = None) -> None:
        tune.report({**(numbers or {}), "message": json.dumps(message)})  # numbers are for Ray's own pages

    def hear(numbers: Numbers) -> bool:
        say({"evaluation": numbers}, numbers)  # when the trial is to stop, this does not return
        return True

    request = json.loads(config["request"])
    try:
        recipe = recipe_from_dict(request["recipe"])
        say({"found": run_trial(recipe, request["model"], Path(request["table"]), request["threads"], hear)})
    except Exception as error:
        say({"failed": reason_of(error)})


class _Search(Searcher):
    """Asks the study what to try, and tells it how trials ended."""

    def __init__(self, study: Study, request: Mapping[str, Any]) -> None:
        super().__init__()
        self.study = study
        self.request = request
        self.numbers: dict[str, int] = {}  # of the study's trials, by the names that Ray Tune has for them
        self.ends: dict[str, dict[str, Any]] = {}

    def set_search_properties(self, metric: Any, mode: Any, config: Any, **spec: Any) -> bool:
        return True

    def suggest(self, trial_id: str) -> Any:
        trial = self.study.next()
        if trial is None:
            return self.FINISHED
        self.numbers[trial_id] = trial.number
        return {"request": json.dumps({**self.request, "recipe": recipe_to_dict(trial.recipe)})}

    def on_trial_complete(self, trial_id: str, result: Any = None, error: bool = False) -> None:
        number, end = self.numbers.pop(trial_id, None), self.ends.pop(trial_id, {})
        if number is None:
            return
        if "found" in end:
            self.study.completed(number, end["found"])
        elif "stopped" in end:
            self.study.pruned(number, end["stopped"])
        else:
            self.study.failed(number, end.get("failed", "its process died"))

    def save(self, checkpoint_path: str) -> None:
        """Nothing: the study is on disk already."""

    def restore(self, checkpoint_path: str) -> None:
        """Nothing: the study is opened, not restored."""


class _Decide(FIFOScheduler):
    """Tells the study of evaluations, and Ray Tune which trials to stop."""

    _supports_buffered_results = False

    def __init__(self, study: Study, search: _Search) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.study = study
        self.search = search

    def on_trial_result(self, tune_controller: Any, trial: Any, result: Mapping[str, Any]) -> str:
        message = json.loads(result["message"])
        if "evaluation" not in message:
            self.search.ends[trial.trial_id] = message
            return str(TrialScheduler.CONTINUE)
        reason = self.study.heard(self.search.numbers[trial.trial_id], message["evaluation"])
        if reason is None:
            return str(TrialScheduler.CONTINUE)
        self.search.ends[trial.trial_id] = {"stopped": reason}
        return str(TrialScheduler.STOP)

    def on_trial_error(self, tune_controller: Any, trial: Any) -> None:
        why = "its process died, as it does when memory is short; Ray's log of the worker says more"
        self.search.ends.setdefault(trial.trial_id, {"failed": why})
