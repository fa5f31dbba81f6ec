"""train-job: a Job that prepares, trains and evaluates on one node. An evicted pod goes on from its checkpoint."""

from __future__ import annotations

from recmill.recipe.recipe import Recipe
from recmill.stages.deploy.parts import (
    CHECKPOINT,
    RUNS,
    TABLE,
    Files,
    Object,
    Site,
    check_measured,
    container,
    kustomization,
    pod_spec,
    pod_template,
    storage_overlays,
    volumes,
)
from recmill.stages.deploy.settings import DeployConfig, DeployError
from recmill.stages.deploy.yaml import dumps

KEPT_SECONDS = 7 * 86_400  # a finished Job, with its log
_WRONG_RECIPE = 2  # exit code of a command that cannot work, however often it is tried
_GATE_FAILED = 1


def render(recipe: Recipe, settings: DeployConfig) -> Files:
    """base: the Job; overlays: the storage that it mounts."""
    site = Site.of(recipe, settings)
    check_measured(recipe)
    files = {"base/job.yaml": dumps([job(site)])}
    if site.recipe_objects():
        files["base/recipe.yaml"] = dumps(site.recipe_objects())
    names = [name.removeprefix("base/") for name in files]
    return {"base/kustomization.yaml": kustomization(site, names), **files, **storage_overlays(site)}


def job(site: Site) -> Object:
    prepare = container(site, "prepare", prepare_command(site), site.sizing.prepare, data=True)
    train = container(site, "train", train_command(site), site.sizing.train)
    evaluate = container(site, "evaluate", evaluate_command(site), site.sizing.train)
    spec = pod_spec(
        site,
        [evaluate],
        init_containers=[prepare, train],
        volumes=volumes(site),
        restart_policy="Never",
    )
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": site.metadata("train"),
        "spec": {
            "backoffLimit": site.settings.retry_limit,
            "ttlSecondsAfterFinished": KEPT_SECONDS,
            "podFailurePolicy": _failure_policy(),
            "template": pod_template(site, "train", spec),
        },
    }


def prepare_command(site: Site) -> list[str]:
    """Finds a finished Table and does nothing, or goes on with one that was begun."""
    recipe = site.recipe_argument
    return [
        "recmill",
        "prepare",
        recipe,
        "--data",
        site.data_path,
        "--into",
        TABLE,
        "--memory",
        site.prepare_bound,
    ]


def train_command(site: Site) -> list[str]:
    return ["recmill", "train", site.recipe_argument, "--table", TABLE, "--into", CHECKPOINT, "--resume"]


def evaluate_command(site: Site) -> list[str]:
    gate = _gate(site)
    command = ["recmill", "evaluate", site.recipe_argument, "--checkpoint", CHECKPOINT, "--table", TABLE]
    return [*command, "--report", f"{RUNS}/report.html", *(["--gate", gate] if gate else [])]


def _gate(site: Site) -> str | None:
    asked = site.settings.gate
    if asked and "live" in asked:
        raise DeployError(
            "--set", [f'gate "{asked}" compares with the live model, which only target pipeline knows']
        )
    return asked or ("ne<=constant" if site.recipe.ranking is not None else None)


def _failure_policy() -> Object:
    """A node that goes away is no failure; a gate that is not passed, or a wrong recipe, is one at once."""
    return {
        "rules": [
            {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            {
                "action": "FailJob",
                "onExitCodes": {"containerName": "evaluate", "operator": "In", "values": [_GATE_FAILED]},
            },
            {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [_WRONG_RECIPE]}},
        ]
    }
