"""pipeline: an Argo Workflow that retrains and publishes, but only what passed its gate.

main      tidy -> check -> prepare -> improve
improve   train -> evaluate -> accept | improve again | reject
accept    export -> publish -> fill Redis, if it is there -> roll out
reject    set aside -> refuse

roll-back alone, as an entry of its own, serves the version before again. The steps are in manifests/pipeline.
"""

from __future__ import annotations

import json
from typing import Any

from recmill.recipe.recipe import Ranking, Recipe, Retrieval
from recmill.stages.deploy.context import DeployContext, check_measured, resources
from recmill.stages.deploy.serve import (
    TLS_FOLDER,
    TOKENS_FOLDER,
    enabled_parts,
    load_command,
    redis_secret,
    startup_seconds,
)
from recmill.stages.deploy.settings import DeployConfig, DeployError, template_in
from recmill.stages.deploy.sizing import MB, Resources
from recmill.stages.deploy.templates import Files, fill, read, render_folder

_SMALL = Resources(1, 512 * MB)  # a command that looks, copies or waits
_HOUR = 3600
# An evicted or lost pod has no exit code, which reads as -1; one that was asked to go has 143. What the cluster did is
# tried again, what a command answered is not.
_RETRY = {
    "limit": "3",
    "retryPolicy": "Always",
    "expression": "lastRetry.status == 'Error' || asInt(lastRetry.exitCode) < 0 || asInt(lastRetry.exitCode) == 143",
    "backoff": {"duration": "30s", "factor": "2"},  # no longest: it would count from when a step first began
}
_WORK = "/runs/work/{{workflow.name}}"


def render(recipe: Recipe, settings: DeployConfig) -> Files:
    """base: the WorkflowTemplate and its rights; overlays: storage, and storage with a daily run; run.yaml: one run."""
    context = DeployContext.of(recipe, settings)
    check_measured(recipe)
    values = {**context.values(), **_values(context)}
    files = render_folder("manifests/pipeline", values)
    if settings.redis.enabled:
        files["base/workflow.yaml"] += fill(read("manifests/parts/load-step.yaml"), values)
    if recipe_map := context.recipe_map():
        files["base/recipe.yaml"] = recipe_map
    return files | context.storage_overlays()


def _values(context: DeployContext) -> dict[str, Any]:
    settings, sizing, chosen = context.settings, context.sizing, enabled_parts(context.settings)
    tokens, tls = "tokens" in chosen, "tls" in chosen
    return {
        "gate": _gate(context),
        "retry_limit_text": str(settings.retry_limit),
        "server": server_url(context),
        "schedule": settings.schedule,
        "retry_strategy": _RETRY,
        "deadline": _deadline(context),
        "prepare_deadline": _HOUR + _whole_hours(4 * sizing.prepare_seconds),
        "small_resources": resources(_SMALL),
        "export_resources": resources(sizing.export),
        "prepare_command": _prepare_command(context),
        "train_command": _train_command(context),
        "rollout_command": _rollout_command(context),
        "work_cache": f"{_WORK}/cache" if settings.publish.url else None,
        "load_template": "load" if settings.redis.enabled else None,
        "load_command": load_command(context),
        "serve_resources": resources(sizing.serve),
        "redis_secret": redis_secret(context),
        "token_secret": (settings.serve.token_secret or f"{context.name}-tokens") if tokens else None,
        "tokens_folder": TOKENS_FOLDER if tokens else None,
        "tls_secret": settings.serve.tls_secret if tls else None,
        "tls_folder": TLS_FOLDER if tls else None,
    }


def server_url(context: DeployContext) -> str:
    """The name that has an address for each server of target `serve`."""
    scheme = "https" if context.settings.serve.tls_secret else "http"
    return f"{scheme}://{context.name}-serve-headless:8080"


def _gate(context: DeployContext) -> str:
    """What is set; else, no worse than what is live. Rankers must beat the constant predictor in any case."""
    return context.settings.gate or ("ne<=live" if context.recipe.ranking is not None else "ndcg@10>=live")


def _deadline(context: DeployContext) -> int:
    """Four times what all attempts are expected to take, and two hours for the rest."""
    sizing = context.sizing
    expected = sizing.prepare_seconds + sizing.train_seconds * (1 + context.settings.retry_limit)
    return 2 * _HOUR + _whole_hours(4 * expected)


def _whole_hours(seconds: float) -> int:
    """Rounded up, for people to read."""
    return -(-int(seconds) // _HOUR) * _HOUR


# commands that depend on the recipe


def _prepare_command(context: DeployContext) -> list[str]:
    """The Table keeps raw columns: the live model, whose features were fitted on another day, is measured on them."""
    recipe = context.recipe
    of_features = [name for feature in recipe.features for name in feature.columns]
    of_labels = [name for label in recipe.labels for name in label.columns]
    names = list(dict.fromkeys([*recipe.table.keep, *of_features, *of_labels]))
    problems = [problem for name in names for problem in template_in("the name of a column", name)]
    if problems:
        raise DeployError(f"recipe {recipe.name}", problems)
    command = ["recmill", "prepare", context.recipe_argument, "--data", context.data_path]
    command += ["--into", f"{_WORK}/table", "--memory", context.prepare_bound]
    return [*command, "--set", f"table.keep={json.dumps(names)}"]


def _train_command(context: DeployContext) -> list[str]:
    command = ["recmill", "train", context.recipe_argument, "--table", f"{_WORK}/table"]
    command += ["--into", f"{_WORK}/checkpoint", "--resume"]
    for key, value in _lengths(context.recipe):
        # Each attempt goes on for as long again.
        once = f"{value:g}" if isinstance(value, float) else value
        command += ["--set", f"{key}={{{{={once} * (asInt(inputs.parameters.attempt) + 1)}}}}"]
    return command


def _lengths(recipe: Recipe) -> list[tuple[str, float | int]]:
    """Keys of the recipe that say for how long each model is trained."""
    lengths = []
    for model in ("retrieval", "ranking"):
        spec: Ranking | Retrieval | None = getattr(recipe, model)
        for name in ("epochs", "max_steps") if spec is not None else ():
            value = getattr(spec.train, name) if spec is not None else None
            if value is not None:
                lengths.append((f"{model}.train.{name}", value))
    return lengths


def _rollout_command(context: DeployContext) -> list[str]:
    command = ["recmill", "bundle", "rollout", context.bundle, "--server", "{{workflow.parameters.server}}"]
    # Servers may have to start, the first time, or to read a large bundle.
    command += ["--timeout", str(600 + startup_seconds(context.sizing.bundle_bytes))]
    chosen = enabled_parts(context.settings)
    if "tokens" in chosen:
        command += ["--token-file", f"{TOKENS_FOLDER}/read-token"]
    if "tls" in chosen:
        command += ["--ca", f"{TLS_FOLDER}/ca.crt", "--tls-name", f"{context.name}-serve"]
    return command
