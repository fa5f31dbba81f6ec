"""The pipeline as it is rendered: nothing is published but behind the gate, and no overlay knows other storage."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from cluster import NotKnown, computed, filled, holds

from recmill.cli import build_parser
from recmill.recipe.load import load_recipe, shipped_recipes
from recmill.recipe.recipe import Recipe
from recmill.stages.deploy.context import DeployContext
from recmill.stages.deploy.pipeline import render, server_url
from recmill.stages.deploy.serve import render as render_serve
from recmill.stages.deploy.settings import DeployConfig, DeployError
from recmill.stages.deploy.yaml import loads


def spec_of(recipe: Recipe, *pairs: str) -> dict[str, Any]:
    (template,) = loads(render(recipe, DeployConfig.of(pairs))["base/workflow.yaml"])
    spec: dict[str, Any] = template["spec"]
    return spec


def templates_of(recipe: Recipe, *pairs: str) -> dict[str, Any]:
    return {one["name"]: one for one in spec_of(recipe, *pairs)["templates"]}


def parameters(spec: dict[str, Any]) -> dict[str, str]:
    return {one["name"]: one["value"] for one in spec["arguments"]["parameters"]}


def calls(templates: dict[str, Any], name: str) -> list[tuple[str, str | None]]:
    """Templates that a template of steps calls, with their conditions."""
    return [(step["template"], step.get("when")) for group in templates[name]["steps"] for step in group]


def test_publishing_is_behind_the_gate_and_nowhere_else(quickstart: Recipe) -> None:
    templates = templates_of(quickstart)
    callers = {
        name: [called for called, _ in calls(templates, name)]
        for name, one in templates.items()
        if "steps" in one
    }
    assert [name for name, called in callers.items() if "publish" in called] == ["accept"]
    assert callers["accept"] == ["export", "publish", "roll-out"]
    assert [name for name, called in callers.items() if "accept" in called] == ["improve"]
    condition = dict(calls(templates, "improve"))["accept"]
    assert condition == "{{steps.evaluate.outputs.parameters.verdict}} == passed"
    writers = [
        name
        for name, one in templates.items()
        if "/runs/bundle" in one.get("container", {}).get("command", [])
    ]
    # Evaluate reads what is live; rolling back takes what was published before, and no step leads to it.
    assert writers == ["evaluate", "publish", "roll-out", "roll-back"]
    assert not any("roll-back" in called for called in callers.values())


@pytest.mark.parametrize(
    ("verdict", "attempt", "follows"),
    [
        ("passed", 0, "accept"),
        ("passed", 3, "accept"),
        ("improving", 0, "improve"),
        ("improving", 2, "improve"),
        ("improving", 3, "reject"),
        ("failed", 0, "reject"),
        ("", 0, "reject"),
        ("nonsense", 0, "reject"),
    ],
)
def test_each_verdict_leads_to_one_step(quickstart: Recipe, verdict: str, attempt: int, follows: str) -> None:
    scope = {
        "steps.evaluate.outputs.parameters.verdict": verdict or "''",
        "inputs.parameters.attempt": str(attempt),
        "workflow.parameters.retry-limit": "3",
    }
    conditions = [(name, when) for name, when in calls(templates_of(quickstart), "improve") if when]
    assert [name for name, when in conditions if holds(filled(when, scope))] == [follows]


def test_each_attempt_trains_for_as_long_again(quickstart: Recipe) -> None:
    command = templates_of(quickstart)["train"]["container"]["command"]
    second = [filled(word, {"workflow.name": "w", "inputs.parameters.attempt": "1"}) for word in command]
    assert second[-4:] == ["--set", "retrieval.train.epochs=6", "--set", "ranking.train.epochs=6"]
    assert "--resume" in second


def test_steps_of_an_attempt_are_whole_numbers_however_many() -> None:
    recipe = load_recipe("criteo-dlrm", ["ranking.train.max_steps=1234567"])
    command = templates_of(recipe)["train"]["container"]["command"]
    second = [filled(word, {"workflow.name": "w", "inputs.parameters.attempt": "1"}) for word in command]
    assert "ranking.train.max_steps=2469134" in second


@pytest.mark.parametrize("name", ["{{workflow.name}}", "$(HOME)", "a\nb"])
def test_columns_whose_names_are_templates_are_refused(name: str) -> None:
    recipe = load_recipe("criteo-dlrm")
    columns = tuple(dataclasses.replace(one, name=one.name.replace("i1", name)) for one in recipe.log.columns)
    features = [
        dataclasses.replace(one, columns=tuple(column.replace("i1", name) for column in one.columns))
        for one in recipe.features
    ]
    log = dataclasses.replace(recipe.log, columns=columns)
    with pytest.raises(DeployError, match="the name of a column must not hold"):
        templates_of(dataclasses.replace(recipe, log=log, features=tuple(features)))


@pytest.mark.parametrize("name", sorted(shipped_recipes()))
def test_every_command_is_one_of_todays_commands(name: str) -> None:
    given = {"gate": "ne<=live", "server": "http://shop:8080", "retry-limit": "3"}
    scope = {f"workflow.parameters.{key}": value for key, value in given.items()}
    scope |= {"workflow.name": "run-1", "inputs.parameters.attempt": "1"}
    secrets = ("serve.token_secret=tokens", "serve.tls_secret=tls")
    found = [
        one["container"]["command"]
        for one in templates_of(load_recipe(name), *secrets).values()
        if "container" in one
    ]
    ours = [[filled(word, scope) for word in command] for command in found if command[0] == "recmill"]
    for command in ours:
        build_parser().parse_args(command[1:])
    others = [command[0] for command in found if command[0] != "recmill"]
    assert (len(ours), others) == (9, ["find", "sh", "sh"])


def test_each_overlay_has_one_kind_of_storage(quickstart: Recipe) -> None:
    files = render(quickstart, DeployConfig())
    shared = "".join(text for name, text in files.items() if not name.startswith("overlays/"))
    of_kind = {"nfs": {"nfs:"}, "hostpath": {"hostPath:"}, "pvc": set()}
    assert not any(field in shared for fields in of_kind.values() for field in fields)
    for kind, fields in of_kind.items():
        claims = files[f"overlays/{kind}/claims.yaml"]
        assert {field for field in ("nfs:", "hostPath:") if field in claims} == fields
        (daily,) = loads(files[f"overlays/{kind}-daily/kustomization.yaml"])
        assert daily["resources"] == [f"../{kind}", "../../daily"]


def test_the_daily_run_is_the_same_workflow(quickstart: Recipe) -> None:
    files = render(quickstart, DeployConfig.of(["schedule=30 4 * * 1-5", "name=shop"]))
    (cron,), (run,) = loads(files["daily/cron.yaml"]), loads(files["run.yaml"])
    assert cron["spec"]["schedules"] == ["30 4 * * 1-5"]
    assert cron["spec"]["concurrencyPolicy"] == "Forbid"
    assert run["metadata"]["namespace"] == "recmill"  # `kubectl create -f` needs no flag
    assert cron["spec"]["workflowSpec"] == run["spec"] == {"workflowTemplateRef": {"name": "shop-pipeline"}}
    (template,) = loads(files["base/workflow.yaml"])
    assert template["spec"]["synchronization"] == {"mutexes": [{"name": "shop-pipeline"}]}


@pytest.mark.parametrize(
    ("recipe", "pairs", "gate"),
    [
        ("quickstart", [], "ne<=live"),
        ("ml1m-random-811", [], "ndcg@10>=live"),
        ("quickstart", ["gate=auc>=0.8,ne<=live"], "auc>=0.8,ne<=live"),
    ],
)
def test_the_gate_is_no_worse_than_what_is_live_unless_it_is_said(
    recipe: str, pairs: list[str], gate: str
) -> None:
    assert parameters(spec_of(load_recipe(recipe), *pairs))["gate"] == gate


def test_servers_are_asked_at_a_name_that_target_serve_has(quickstart: Recipe) -> None:
    files = render_serve(quickstart, DeployConfig())
    services = {
        one["metadata"]["name"]: one["spec"]
        for name, text in files.items()
        if name.startswith("base/") and "kustomization" not in name
        for one in loads(text)
        if one["kind"] == "Service"
    }
    host = (
        server_url(DeployContext.of(quickstart, DeployConfig())).removeprefix("http://").removesuffix(":8080")
    )
    assert services[host]["clusterIP"] == "None"  # so that it has an address for each server


def test_a_pipeline_publishes_at_a_url_with_its_credentials(quickstart: Recipe) -> None:
    url = "s3://models/shop/bundle?region=eu-west-1"
    templates = templates_of(quickstart, f"publish.url={url}", "publish.secret=s3", "redis.enabled=true")
    users = {name for name, one in templates.items() if url in one.get("container", {}).get("command", [])}
    assert users == {"evaluate", "publish", "load", "roll-out", "roll-back"}
    assert "/runs/bundle" not in str([one.get("container", {}).get("command") for one in templates.values()])
    for name in users:
        container = templates[name]["container"]
        assert container["envFrom"] == [{"secretRef": {"name": "s3"}}]
        assert {"name": "RECMILL_CACHE", "value": "/runs/work/{{workflow.name}}/cache"} in container["env"]


def test_redis_is_filled_from_a_new_bundle_before_it_is_rolled_out(quickstart: Recipe) -> None:
    templates = templates_of(quickstart, "redis.enabled=true", "redis.auth_secret=mine")
    assert [called for called, _ in calls(templates, "accept")] == ["export", "publish", "load", "roll-out"]
    step = templates["load"]["container"]
    files = render_serve(quickstart, DeployConfig.of(["redis.enabled=true", "redis.auth_secret=mine"]))
    objects = {(one["kind"], one["metadata"]["name"]): one for one in loads(files["base/redis.yaml"])}
    (job,) = objects["Job", "quickstart-load"]["spec"]["template"]["spec"]["containers"]
    assert {key: step[key] for key in ("image", "command", "env")} == {
        key: job[key] for key in ("image", "command", "env")
    }
    (rule,) = objects["NetworkPolicy", "quickstart-redis"]["spec"]["ingress"]
    assert "pipeline" in rule["from"][0]["podSelector"]["matchExpressions"][0]["values"]
    assert "load" not in templates_of(quickstart)


def test_tokens_and_certificates_come_from_the_secrets_of_the_servers(quickstart: Recipe) -> None:
    pairs = ["serve.token_secret=my-tokens", "serve.tls_secret=my-tls"]
    spec, rollout = spec_of(quickstart, *pairs), templates_of(quickstart, *pairs)["roll-out"]["container"]
    secrets = {one["name"]: one["secret"]["secretName"] for one in spec["volumes"] if "secret" in one}
    assert secrets == {"tokens": "my-tokens", "tls": "my-tls"}
    mounts = {one["name"]: one["mountPath"] for one in rollout["volumeMounts"]}
    flags = dict(zip(rollout["command"][4::2], rollout["command"][5::2], strict=True))
    assert flags["--token-file"] == f"{mounts['tokens']}/read-token"
    assert flags["--ca"] == f"{mounts['tls']}/ca.crt"
    assert parameters(spec)["server"] == "https://quickstart-serve-headless:8080"


def test_what_the_cluster_does_is_tried_again_and_what_a_command_says_is_not(quickstart: Recipe) -> None:
    for template in templates_of(quickstart).values():
        if "container" not in template:
            continue
        expression = template["retryStrategy"]["expression"]
        for status, code, again in [
            ("Failed", -1, True),
            ("Error", -1, True),
            ("Failed", 143, True),
            ("Failed", 1, False),
            ("Failed", 137, False),
        ]:
            scope = {"lastRetry.status": status, "lastRetry.exitCode": str(code)}
            assert computed(expression, scope) is again


def test_a_field_that_the_cluster_of_tests_does_not_know_is_an_error() -> None:
    with pytest.raises(NotKnown):
        computed("toJson(inputs.parameters.attempt)", {"inputs.parameters.attempt": "1"})
    with pytest.raises(NotKnown):
        filled("{{pod.name}}", {})
