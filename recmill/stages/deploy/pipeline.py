"""pipeline: an Argo Workflow that retrains and publishes, but only what passed its gate.

main      tidy -> check -> prepare -> improve
improve   train -> evaluate -> accept | improve again | reject
accept    export -> publish -> roll out
reject    set aside -> refuse

roll-back alone, as an entry of its own, serves the version before again.

Everything is on the volume of runs:

/runs/work/<workflow>/     Table, checkpoint and candidate of one run, until the next run begins
/runs/reports/<workflow>/  the page of its evaluation, and how it ended
/runs/bundle/              what is served, with the checkpoints that the next gate compares with
/runs/rejected/            what the gate refused, each version with its page
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from recmill.recipe.recipe import Ranking, Recipe, Retrieval
from recmill.stages.deploy.parts import (
    BUNDLES,
    HTTP_PORT,
    REJECTED,
    RUNS,
    Files,
    Object,
    Site,
    check_measured,
    container,
    kustomization,
    pod_security,
    storage_overlays,
    volumes,
)
from recmill.stages.deploy.serving import SERVE, TLS, TOKENS, chosen
from recmill.stages.deploy.settings import DeployConfig, DeployError, template_in
from recmill.stages.deploy.sizing import MB, Resources
from recmill.stages.deploy.yaml import dumps

COMPONENT = "pipeline"
WORK = f"{RUNS}/work/{{{{workflow.name}}}}"
REPORTS = f"{RUNS}/reports/{{{{workflow.name}}}}"
TABLE, CHECKPOINT, CANDIDATE = f"{WORK}/table", f"{WORK}/checkpoint", f"{WORK}/candidate"
VERDICT = "/tmp/verdict"
VERSIONS_KEPT = 3
ROLLOUT_SECONDS = 600
KEPT_SECONDS = 7 * 86_400  # a finished Workflow, with its log
_SMALL = Resources(1, 512 * MB)  # a command that looks, copies or waits
_HOUR = 3600


def render(recipe: Recipe, settings: DeployConfig) -> Files:
    """base: the WorkflowTemplate and its rights; overlays: storage, and storage with a daily run; run.yaml: one run."""
    site = Site.of(recipe, settings)
    check_measured(recipe)
    files = {"base/workflow.yaml": dumps([workflow_template(site)]), "base/rights.yaml": dumps(rights(site))}
    if site.recipe_objects():
        files["base/recipe.yaml"] = dumps(site.recipe_objects())
    names = [name.removeprefix("base/") for name in files]
    files = {"base/kustomization.yaml": kustomization(site, names), **files, **storage_overlays(site)}
    for kind in ("pvc", "nfs"):
        files[f"overlays/{kind}-daily/kustomization.yaml"] = kustomization(
            site, [f"../{kind}", "../../daily"]
        )
    files["daily/kustomization.yaml"] = kustomization(site, ["cron.yaml"])
    files["daily/cron.yaml"] = dumps([cron_workflow(site)])
    files["run.yaml"] = dumps([run(site)])
    return files


# objects


def workflow_template(site: Site) -> Object:
    return {
        "apiVersion": "argoproj.io/v1alpha1",
        "kind": "WorkflowTemplate",
        "metadata": site.metadata(COMPONENT),
        "spec": _workflow_spec(site),
    }


def cron_workflow(site: Site) -> Object:
    return {
        "apiVersion": "argoproj.io/v1alpha1",
        "kind": "CronWorkflow",
        "metadata": site.metadata(COMPONENT, f"{site.name}-daily"),
        "spec": {
            "schedules": [site.settings.schedule],
            "timezone": "Etc/UTC",
            "concurrencyPolicy": "Forbid",
            "startingDeadlineSeconds": _HOUR,
            "successfulJobsHistoryLimit": 3,
            "failedJobsHistoryLimit": 3,
            "workflowSpec": {"workflowTemplateRef": {"name": _name(site)}},
        },
    }


def run(site: Site) -> Object:
    """One run, for `kubectl create`."""
    return {
        "apiVersion": "argoproj.io/v1alpha1",
        "kind": "Workflow",
        "metadata": {"generateName": f"{_name(site)}-", "labels": site.labels(COMPONENT)},
        "spec": {"workflowTemplateRef": {"name": _name(site)}},
    }


def rights(site: Site) -> list[Object]:
    """What Argo's own container in each pod may do: tell how a step ended. Containers of steps have no token."""
    name = _name(site)
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name}
    account = {"kind": "ServiceAccount", "name": name, "namespace": site.settings.namespace}
    rule = {"apiGroups": ["argoproj.io"], "resources": ["workflowtaskresults"], "verbs": ["create", "patch"]}
    rbac = "rbac.authorization.k8s.io/v1"
    # Argo finds the token of its container by this name; the cluster writes it, nothing secret is here.
    token = site.metadata(COMPONENT, f"{name}.service-account-token")
    token["annotations"] = {"kubernetes.io/service-account.name": name}
    return [
        {
            "apiVersion": "v1",
            "kind": "ServiceAccount",
            "metadata": site.metadata(COMPONENT),
            "automountServiceAccountToken": False,
        },
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": token,
            "type": "kubernetes.io/service-account-token",
        },
        {"apiVersion": rbac, "kind": "Role", "metadata": site.metadata(COMPONENT), "rules": [rule]},
        {
            "apiVersion": rbac,
            "kind": "RoleBinding",
            "metadata": site.metadata(COMPONENT),
            "roleRef": reference,
            "subjects": [account],
        },
    ]


def _name(site: Site) -> str:
    return f"{site.name}-{COMPONENT}"


# the workflow


def _workflow_spec(site: Site) -> Object:
    settings = site.settings
    spec: Object = {
        "entrypoint": "main",
        "onExit": "keep-outcome",
        "arguments": {
            "parameters": [
                {"name": "gate", "value": _gate(site)},
                {"name": "retry-limit", "value": str(settings.retry_limit)},
                {"name": "server", "value": server_url(site)},
            ]
        },
        "synchronization": {"mutexes": [{"name": _name(site)}]},
        "activeDeadlineSeconds": _deadline(site),
        "ttlStrategy": {"secondsAfterCompletion": KEPT_SECONDS},
        "podGC": {"strategy": "OnPodSuccess"},
        "podMetadata": {"labels": site.labels(COMPONENT)},
        "serviceAccountName": _name(site),
        "executor": {"serviceAccountName": _name(site)},
        "automountServiceAccountToken": False,
        "securityContext": pod_security(site),
    }
    if settings.image.pull_secret:
        spec["imagePullSecrets"] = [{"name": settings.image.pull_secret}]
    return {**spec, "volumes": [*volumes(site), *_secret_volumes(site)], "templates": _templates(site)}


def _gate(site: Site) -> str:
    """What was asked for; else, no worse than what is live. Rankers must beat the constant predictor in any case."""
    return site.settings.gate or ("ne<=live" if site.recipe.ranking is not None else "ndcg@10>=live")


def _deadline(site: Site) -> int:
    """Four times what all attempts are expected to take, and two hours for the rest."""
    sizing = site.sizing
    expected = sizing.prepare_seconds + sizing.train_seconds * (1 + site.settings.retry_limit)
    return 2 * _HOUR + _rounded(4 * expected)


def _rounded(seconds: float) -> int:
    """Up to a whole hour, for people to read."""
    return -(-int(seconds) // _HOUR) * _HOUR


def _templates(site: Site) -> list[Object]:
    verdict = "{{steps.evaluate.outputs.parameters.verdict}}"
    attempt, limit = "{{inputs.parameters.attempt}}", "{{workflow.parameters.retry-limit}}"
    may_go_on = f"{verdict} == improving && {attempt} < {limit}"
    gave_up = f"{verdict} != passed && ({verdict} != improving || {attempt} >= {limit})"
    next_attempt = "{{=asInt(inputs.parameters.attempt) + 1}}"
    return [
        _steps(
            "main", [[_call("tidy")], [_call("check")], [_call("prepare")], [_call("improve", attempt="0")]]
        ),
        _steps(
            "improve",
            [
                [_call("train", attempt=attempt)],
                [_call("evaluate")],
                [
                    _call("accept", when=f"{verdict} == passed"),
                    _call("again", "improve", when=may_go_on, attempt=next_attempt),
                    _call("reject", when=gave_up),
                ],
            ],
            inputs=["attempt"],
        ),
        _steps("accept", [[_call("export")], [_call("publish")], [_call("roll-out")]]),
        _steps("reject", [[_call("set-aside")], [_call("refuse")]]),
        *_containers(site),
    ]


def _containers(site: Site) -> list[Object]:
    sizing, runs = site.sizing, _commands(site)
    outcome = {"FOLDER": REPORTS, "STATUS": "{{workflow.status}}", "FAILURES": "{{workflow.failures}}"}
    in_time = _HOUR + _rounded(4 * sizing.prepare_seconds)
    return [
        _step(site, "tidy", runs["tidy"], _SMALL),
        _step(site, "check", runs["check"], _SMALL, data=True, runs="none"),
        _step(site, "prepare", runs["prepare"], sizing.prepare, data=True, deadline=in_time),
        _step(site, "train", runs["train"], sizing.train, inputs=["attempt"]),
        _step(site, "evaluate", runs["evaluate"], sizing.train, outputs={"verdict": VERDICT}),
        _step(site, "export", runs["export"], sizing.export, data=True),
        _step(site, "publish", runs["publish"], _SMALL),
        _step(site, "roll-out", runs["roll-out"], _SMALL, mounts=_secret_mounts(site)),
        _step(site, "set-aside", runs["set-aside"], sizing.export, data=True),
        _step(site, "refuse", runs["refuse"], _SMALL, runs="none"),
        _step(site, "roll-back", runs["roll-back"], _SMALL),
        _step(
            site,
            "keep-outcome",
            runs["keep-outcome"],
            _SMALL,
            env=[{"name": name, "value": value} for name, value in outcome.items()],
        ),
    ]


def _commands(site: Site) -> dict[str, list[str]]:
    """Step -> its command line."""
    recipe = site.recipe_argument
    data, table, checkpoint = ["--data", site.data_path], ["--table", TABLE], ["--checkpoint", CHECKPOINT]
    live = ["--live", BUNDLES, "--allow-no-live"]
    writes = ["--report", f"{REPORTS}/report.html", "--verdict", VERDICT]
    keep = ["--keep", str(VERSIONS_KEPT)]
    bound = ["--memory", site.prepare_bound]
    return {
        "tidy": _tidy_command(),
        "check": ["recmill", "check", recipe, *data],
        "prepare": ["recmill", "prepare", recipe, *data, "--into", TABLE, *bound, *_kept(site)],
        "train": ["recmill", "train", recipe, *table, "--into", CHECKPOINT, "--resume", *_epochs(site)],
        "evaluate": ["recmill", "evaluate", recipe, *checkpoint, *table, *_GATE, *live, *writes],
        "export": ["recmill", "export", *checkpoint, "--into", CANDIDATE, *data],
        "publish": ["recmill", "bundle", "publish", CANDIDATE, "--into", BUNDLES, *checkpoint, *keep],
        "roll-out": _rollout_command(site),
        "set-aside": ["recmill", "export", *checkpoint, "--into", REJECTED, *data, *_ASIDE, *keep],
        "refuse": ["sh", "-c", _REFUSE],
        "roll-back": ["recmill", "rollback", "--bundle", BUNDLES],
        "keep-outcome": ["sh", "-c", _KEEP_OUTCOME],
    }


_GATE = ("--gate", "{{workflow.parameters.gate}}")
_ASIDE = ("--despite-gate", "--no-publish")
_REFUSE = (
    'echo "The gate refused this model. Nothing was published; '
    f'the bundle and its report.html are in {REJECTED}." >&2\nexit 1\n'
)
_KEEP_OUTCOME = 'mkdir -p "$FOLDER"\nprintf \'%s\\n\' "$STATUS" "$FAILURES" > "$FOLDER/outcome.txt"\n'


def _tidy_command() -> list[str]:
    """Runs take turns, so what is there of others is left over."""
    others = ["-path", f"{RUNS}/work/*", "-not", "-path", WORK]
    return ["find", RUNS, "-mindepth", "2", "-maxdepth", "2", *others, "-exec", "rm", "-rf", "{}", "+"]


def _kept(site: Site) -> list[str]:
    """Raw columns in the Table: the live model, whose features were fitted on another day, is measured on them."""
    recipe = site.recipe
    of_features = [name for feature in recipe.features for name in feature.columns]
    of_labels = [name for label in recipe.labels for name in label.columns]
    names = list(dict.fromkeys([*recipe.table.keep, *of_features, *of_labels]))
    problems = [problem for name in names for problem in template_in("the name of a column", name)]
    if problems:
        raise DeployError(f"recipe {recipe.name}", problems)
    return ["--set", f"table.keep={json.dumps(names)}"]


def _epochs(site: Site) -> list[str]:
    """Each attempt goes on for as long again."""
    found = []
    for model in ("retrieval", "ranking"):
        spec: Ranking | Retrieval | None = getattr(site.recipe, model)
        if spec is None:
            continue
        for name in ("epochs", "max_steps"):
            value = getattr(spec.train, name)
            if value is not None:
                once = f"{value:g}" if isinstance(value, float) else value
                times = f"{{{{={once} * (asInt(inputs.parameters.attempt) + 1)}}}}"
                found += ["--set", f"{model}.train.{name}={times}"]
    return found


# the server


def server_url(site: Site) -> str:
    """The name that has an address for each server of target `serve`."""
    scheme = "https" if "tls" in chosen(site.settings) else "http"
    return f"{scheme}://{site.name}-{SERVE}-headless:{HTTP_PORT}"


def _rollout_command(site: Site) -> list[str]:
    command = ["recmill", "bundle", "rollout", BUNDLES, "--server", "{{workflow.parameters.server}}"]
    command += ["--timeout", str(ROLLOUT_SECONDS)]
    if "tokens" in chosen(site.settings):
        command += ["--token-file", f"{TOKENS}/read-token"]
    if "tls" in chosen(site.settings):
        command += ["--ca", f"{TLS}/ca.crt", "--tls-name", f"{site.name}-{SERVE}"]
    return command


def _secrets(site: Site) -> list[tuple[str, str, str]]:
    """Volume, secret and folder of what is needed to ask the servers."""
    asked, wanted = site.settings.serve, chosen(site.settings)
    named = [
        ("tokens", asked.token_secret or f"{site.name}-tokens", TOKENS),
        ("tls", asked.tls_secret or f"{site.name}-tls", TLS),
    ]
    return [one for one in named if one[0] in wanted]


_KEYS = {"tokens": "read-token", "tls": "ca.crt"}  # of the secrets; the rest of them is the servers' own


def _secret_volumes(site: Site) -> list[Object]:
    return [
        {
            "name": name,
            "secret": {"secretName": secret, "items": [{"key": _KEYS[name], "path": _KEYS[name]}]},
        }
        for name, secret, _ in _secrets(site)
    ]


def _secret_mounts(site: Site) -> list[Object]:
    return [{"name": name, "mountPath": folder, "readOnly": True} for name, _, folder in _secrets(site)]


# templates of Argo


def _steps(name: str, groups: Sequence[Sequence[Object]], inputs: Sequence[str] = ()) -> Object:
    return {"name": name, **_inputs(inputs), "steps": [list(group) for group in groups]}


def _call(name: str, template: str | None = None, when: str | None = None, **parameters: str) -> Object:
    call: Object = {"name": name, "template": template or name}
    if when is not None:
        call["when"] = when
    if parameters:
        given = [{"name": name, "value": value} for name, value in parameters.items()]
        call["arguments"] = {"parameters": given}
    return call


def _inputs(names: Sequence[str]) -> Object:
    return {"inputs": {"parameters": [{"name": name} for name in names]}} if names else {}


def _step(
    site: Site,
    name: str,
    command: Sequence[str],
    need: Resources,
    *,
    inputs: Sequence[str] = (),
    outputs: dict[str, str] | None = None,
    deadline: int | None = None,
    **more: Any,
) -> Object:
    """One container with one command. What the cluster did to it is tried again, what the command said is not."""
    main = container(site, name, command, need, **more)
    del main["name"]  # Argo's own
    template: Object = {"name": name, **_inputs(inputs)}
    if outputs:
        found = [{"name": key, "valueFrom": {"path": path}} for key, path in outputs.items()]
        template["outputs"] = {"parameters": found}
    if deadline is not None:
        template["activeDeadlineSeconds"] = deadline
    return {**template, "retryStrategy": dict(_RETRY), "container": main}


# An evicted or lost pod has no exit code, which reads as -1; one that was asked to go has 143.
_RETRY = {
    "limit": "3",
    "retryPolicy": "Always",
    "expression": "lastRetry.status == 'Error' || asInt(lastRetry.exitCode) < 0 || asInt(lastRetry.exitCode) == 143",
    "backoff": {"duration": "30s", "factor": "2"},  # no longest: it would count from when a step first began
}
