"""Target serve: what is rendered is what a cluster takes, and its containers really run."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from cluster import NoUser
from pods import Node, Pod, Pods, a_node, address_of
from rendered import base_objects, named
from s3_server import ENVIRONMENT, running_s3
from shop import Shop
from tools import old_kustomize
from validate import kustomized, validate

from recmill.recipe.load import load_recipe, recipe_from_dict, recipe_to_dict
from recmill.recipe.recipe import Recipe
from recmill.recipe.steps import Function
from recmill.stages.deploy.deploy import deploy, render
from recmill.stages.deploy.serve import ROLES, startup_seconds
from recmill.stages.deploy.settings import DeployConfig, DeployError, number_of
from recmill.stages.deploy.yaml import loads
from recmill.stages.export.publish import publish_at

Object = dict[str, Any]
ALL = (
    "serve.split=true",
    "redis.enabled=true",
    "monitoring.enabled=true",
    "serve.ingress.host=shop.example.com",
    "serve.ingress.class_name=nginx",
    "serve.node_port=30123",
    "serve.tls_secret=shop-tls",
    "serve.token_secret=shop-tokens",
    "serve.hpa.metric=rate",
    "image.pull_secret=registry",
    "storage.class_name=fast",
)


def objects(quickstart: Recipe, *pairs: str) -> list[Object]:
    return base_objects(quickstart, "serve", *pairs)


def container_of(workload: Object) -> Object:
    (container,) = workload["spec"]["template"]["spec"]["containers"]
    return container  # type: ignore[no-any-return]


# what is rendered


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    into = tmp_path_factory.mktemp("serve")
    deploy(load_recipe("quickstart"), "serve", into, DeployConfig())
    return into / "serve"


@pytest.mark.services
@pytest.mark.parametrize("overlay", ["pvc", "nfs", "hostpath"])
def test_every_overlay_is_what_a_cluster_takes(rendered: Path, overlay: str) -> None:
    found = kustomized(rendered / "overlays" / overlay)
    validate(found)
    assert {one["metadata"].get("namespace") for one in found if one["kind"] != "PersistentVolume"} == {
        "recmill"
    }


@pytest.mark.services
def test_kustomize_of_years_ago_makes_the_same(rendered: Path) -> None:
    folder = rendered / "overlays/nfs"
    assert kustomized(folder, old_kustomize()) == kustomized(folder)


@pytest.mark.services
def test_everything_at_once_is_what_a_cluster_takes(quickstart: Recipe, tmp_path: Path) -> None:
    deploy(quickstart, "serve", tmp_path, DeployConfig.of(ALL))
    validate(kustomized(tmp_path / "serve/overlays/pvc"))
    assert sorted(path.name for path in (tmp_path / "serve/overlays").iterdir()) == ["hostpath", "nfs", "pvc"]


def test_servers_are_confined_and_say_what_they_need(quickstart: Recipe) -> None:
    for one in objects(quickstart, *ALL):
        if one["kind"] not in ("Deployment", "StatefulSet", "Job"):
            continue
        pod, container = one["spec"]["template"]["spec"], container_of(one)
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] == 10001
        assert pod["automountServiceAccountToken"] is False
        assert pod["imagePullSecrets"] == [{"name": "registry"}]
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert container["resources"]["limits"].keys() == {"cpu", "memory"}


def test_a_pod_is_given_the_time_that_it_drains(quickstart: Recipe) -> None:
    deployment = named(objects(quickstart), "Deployment", "quickstart-serve")
    pod, command = deployment["spec"]["template"]["spec"], container_of(deployment)["command"]
    drain = int(command[command.index("--drain-seconds") + 1])
    _, pause = container_of(deployment)["lifecycle"]["preStop"]["exec"]["command"]
    # A server of several processes waits 5 s longer before it ends them.
    assert pod["terminationGracePeriodSeconds"] > int(pause) + drain + 5


def test_a_large_bundle_is_given_longer_to_start(quickstart: Recipe) -> None:
    assert startup_seconds(10 << 20) < 125
    assert startup_seconds(40 << 30) > 2000
    probe = container_of(named(objects(quickstart), "Deployment", "quickstart-serve"))["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 120


def test_roles_apart_are_found_by_headless_services(quickstart: Recipe) -> None:
    found = objects(quickstart, "serve.split=true")
    command = container_of(named(found, "Deployment", "quickstart-serve"))["command"]
    for role in ROLES:
        assert command[command.index(f"--{role}-at") + 1] == f"quickstart-{role}:8081"
        service = named(found, "Service", f"quickstart-{role}")["spec"]
        assert (service["clusterIP"], service["ports"][1]["port"]) == ("None", 8081)


def test_transports_to_outside_always_ask_for_tokens(quickstart: Recipe) -> None:
    for transport in ("serve.node_port=30001", "serve.ingress.host=shop.example.com"):
        deployment = named(objects(quickstart, transport), "Deployment", "quickstart-serve")
        command = container_of(deployment)["command"]
        assert "--token-file" in command
        assert "--insecure" not in command
    command = container_of(named(objects(quickstart), "Deployment", "quickstart-serve"))["command"]
    assert "--insecure" in command


def test_nobody_is_let_in_or_out_but_for_what_is_needed(quickstart: Recipe) -> None:
    found = objects(quickstart, "redis.enabled=true", "serve.split=true")
    deny = named(found, "NetworkPolicy", "quickstart-deny")["spec"]
    assert deny["policyTypes"] == ["Ingress", "Egress"]
    assert not {"ingress", "egress"} & deny.keys()
    covered = deny["podSelector"]["matchExpressions"][0]["values"]
    assert covered == ["serve", *ROLES, "redis", "load"]
    redis = named(found, "NetworkPolicy", "quickstart-redis")["spec"]
    assert "egress" not in redis
    assert [port["port"] for port in redis["ingress"][0]["ports"]] == [6379]
    leaves = [
        named(found, "NetworkPolicy", f"quickstart-{name}")["spec"]["egress"] for name in ("rank", "to-redis")
    ]
    assert [[rule["ports"][0]["port"] for rule in rules] for rules in leaves] == [[53], [53, 6379]]


def test_no_secret_is_written(quickstart: Recipe) -> None:
    found = objects(quickstart, *ALL)
    assert "Secret" not in {one["kind"] for one in found}
    command = container_of(named(found, "Deployment", "quickstart-serve"))["command"]
    assert "redis://:$(REDIS_PASSWORD)@quickstart-redis:6379" in command


def test_a_rate_is_scaled_on_by_a_metric_of_the_server(quickstart: Recipe) -> None:
    (metric,) = named(
        objects(quickstart, "serve.hpa.metric=rate", "serve.hpa.target=40"),
        "HorizontalPodAutoscaler",
        "quickstart-serve",
    )["spec"]["metrics"]
    assert metric["pods"] == {
        "metric": {"name": "recmill_requests_total"},
        "target": {"type": "AverageValue", "averageValue": "40"},
    }


def test_storage_of_one_node_is_refused_for_several_servers(quickstart: Recipe) -> None:
    with pytest.raises(DeployError, match=r"serve\.replicas"):
        render(quickstart, "serve", DeployConfig.of(["storage.access=ReadWriteOnce"]))
    files = render(quickstart, "serve", DeployConfig.of(["storage.access=ReadWriteOnce", "serve.replicas=1"]))
    scaling = named(loads(files["base/servers.yaml"]), "HorizontalPodAutoscaler", "quickstart-serve")
    assert (scaling["spec"]["minReplicas"], scaling["spec"]["maxReplicas"]) == (1, 1)


def test_a_recipe_that_scores_rows_has_no_store_and_no_roles() -> None:
    criteo = load_recipe("criteo-dlrm")
    with pytest.raises(DeployError) as caught:
        render(criteo, "serve", DeployConfig.of(["redis.enabled=true", "serve.split=true"]))
    assert [problem.partition(" ")[0] for problem in caught.value.problems] == [
        "redis.enabled",
        "serve.split",
    ]


def test_features_of_users_and_items_together_cannot_be_served_apart(quickstart: Recipe) -> None:
    tree = recipe_to_dict(quickstart)
    crossed = {"name": "pair", "columns": ["user_id", "item_id"], "steps": ["cross", {"hash": 100}]}
    recipe = recipe_from_dict({**tree, "name": "mine", "features": [*tree["features"], crossed]})
    for target in ("serve", "helm"):
        with pytest.raises(
            DeployError, match=r'serve\.split .* feature "pair" looks at users and items together'
        ):
            render(recipe, target, DeployConfig.of(["serve.split=true"]))


@pytest.mark.parametrize("target", ["train-job", "pipeline"])
def test_a_recipe_that_holds_nothing_out_cannot_be_evaluated(quickstart: Recipe, target: str) -> None:
    with pytest.raises(DeployError, match=r"split is missing: nothing is held out"):
        render(dataclasses.replace(quickstart, name="mine", split=None), target, DeployConfig())


def test_every_mount_has_a_volume_also_for_a_recipe_of_ones_own(quickstart: Recipe) -> None:
    for one in objects(dataclasses.replace(quickstart, name="mine"), *ALL):
        if one["kind"] in ("Deployment", "StatefulSet", "Job"):
            volumes = {volume["name"] for volume in one["spec"]["template"]["spec"]["volumes"]}
            volumes |= {claim["metadata"]["name"] for claim in one["spec"].get("volumeClaimTemplates", [])}
            assert {mount["name"] for mount in container_of(one)["volumeMounts"]} == volumes


def test_all_roles_and_the_load_job_wait_for_the_first_bundle(quickstart: Recipe) -> None:
    waiting = {
        one["metadata"]["name"]: [
            first["command"] for first in one["spec"]["template"]["spec"]["initContainers"]
        ]
        for one in objects(quickstart, *ALL)
        if one["kind"] in ("Deployment", "Job")
    }
    assert waiting.keys() == {"quickstart-load", *(f"quickstart-{role}" for role in ("serve", *ROLES))}
    assert all(first == [["recmill", "bundle", "wait", "/runs/bundle"]] for first in waiting.values())


def test_only_the_claim_of_bundles_is_made(quickstart: Recipe) -> None:
    files = render(quickstart, "serve", DeployConfig())
    claims = loads(files["overlays/pvc/claims.yaml"])
    assert [(one["kind"], one["metadata"]["name"]) for one in claims] == [
        ("PersistentVolumeClaim", "quickstart-runs")
    ]
    pipeline = render(quickstart, "train-job", DeployConfig())
    assert claims[0] in loads(pipeline["overlays/pvc/claims.yaml"])  # so that both may be applied


def test_what_the_page_names_is_rendered(quickstart: Recipe) -> None:
    page = (Path(__file__).parent.parent.parent / "docs/deploy-serve.md").read_text()
    files = render(quickstart, "serve", DeployConfig())
    for path in re.findall(r"out/serve/([\w/.-]+\w)", page):
        assert any(name == path or name.startswith(f"{path}/") for name in files), path
    found = objects(quickstart, *ALL)
    names = {(one["kind"].lower(), one["metadata"]["name"]) for one in found}
    named_there = re.findall(r"\b(deployment|service|job)/([\w-]+)", page)
    assert named_there
    assert set(named_there) <= names
    assert "seriesQuery: 'recmill_requests_total{" in page


# containers that run


@pytest.fixture(scope="module")
def node(shop: Shop) -> Iterator[Node]:
    try:
        with a_node(shop.bundles) as made:
            yield made
    except NoUser as reason:
        pytest.skip(str(reason))


def recommended(address: str, token: str | None = None, scheme: str = "http") -> httpx.Response:
    headers = {"authorization": f"Bearer {token}"} if token else {}
    body = {"user": "u1", "k": 3, "deadline_ms": 5000, "trace": True}
    return httpx.post(
        f"{scheme}://{address}:8080/v1/recommend", json=body, headers=headers, verify=False, timeout=20
    )


@pytest.mark.services
@pytest.mark.processes
def test_the_deployment_starts_answers_and_drains(node: Node, rendered: Path) -> None:
    pods = Pods(node, kustomized(rendered / "overlays/pvc"))
    try:
        pod = pods.start("Deployment", "quickstart-serve")
        pod.wait_until_started()
        assert pod.probe("readinessProbe")
        assert pod.probe("livenessProbe")
        answer = recommended(pods.services["quickstart-serve"])
        assert (answer.status_code, len(answer.json()["items"]), answer.json().get("degraded", [])) == (
            200,
            3,
            [],
        )
        metrics = httpx.get(f"http://{pod.address}:8080/metrics").text
        assert 'recmill_requests_total{method="recommend",status="200",transport="http"} 1.0' in metrics
        codes = _while_it_ends(pod)
        assert codes[0] == 200
        assert set(codes) <= {200}, "a request was lost while the pod ended"
        pod.wait_until_ended()
    finally:
        pods.close()


def _while_it_ends(pod: Any) -> list[int]:
    """Status of requests that still come while others hear that it ends, which is what preStop waits for."""
    codes: list[int] = []
    done = threading.Event()

    def ask() -> None:
        while not done.is_set():
            codes.append(recommended(pod.address).status_code)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        pod.pre_stop()
    finally:
        done.set()
        thread.join()
    pod.terminate()
    return codes


@pytest.fixture(scope="module")
def secrets(node: Node) -> dict[str, dict[str, str]]:
    folder = node.folder
    names = ",".join(f"IP:{address_of(place)}" for place in range(8))
    files = ["-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")]
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    name = ["-subj", "/CN=shop", "-addext", f"subjectAltName={names}"]
    subprocess.run(["openssl", "req", "-x509", *key, *name, *files], check=True, capture_output=True)
    certificate = (folder / "cert.pem").read_text()
    return {
        "shop-tls": {
            "tls.crt": certificate,
            "tls.key": (folder / "key.pem").read_text(),
            "ca.crt": certificate,
        },
        "quickstart-tokens": {
            "tokens": "0123456789abcdef-read read\nfedcba9876543210-admin admin\n",
            "read-token": "0123456789abcdef-read\n",
        },
        "quickstart-redis": {"password": "a5" * 16},
    }


@pytest.mark.services
@pytest.mark.processes
def test_roles_apart_with_redis_tokens_and_tls_answer(
    node: Node, secrets: dict[str, dict[str, str]], quickstart: Recipe, tmp_path: Path
) -> None:
    asked = ["serve.split=true", "redis.enabled=true", "serve.node_port=30080", "serve.tls_secret=shop-tls"]
    deploy(quickstart, "serve", tmp_path, DeployConfig.of([*asked, "serve.cpus=1"]))
    pods = Pods(node, kustomized(tmp_path / "serve/overlays/pvc"), secrets, ["redis"])
    try:
        redis = pods.start("StatefulSet", "quickstart-redis")
        redis.wait_until_started()
        pods.start("Job", "quickstart-load").wait_until_ended()
        names = [f"quickstart-{role}" for role in (*ROLES, "serve")]
        servers = {name: pods.start("Deployment", name) for name in names}
        for server in servers.values():
            server.wait_until_started()
        assert all(server.probe("livenessProbe") for server in servers.values())
        address = pods.services["quickstart-nodeport"]
        assert recommended(address, scheme="https").status_code == 401
        answer = recommended(address, "0123456789abcdef-read", "https")
        assert answer.status_code == 200, answer.text
        assert (len(answer.json()["items"]), answer.json().get("degraded", [])) == (3, [])
        assert list(answer.json()["trace"]["stages"]) == ["recall", "features", "rank"]
        _check_that_redis_was_asked(redis)
        for server in servers.values():
            server.terminate()
        for server in servers.values():
            server.wait_until_ended()
    finally:
        pods.close()


def _check_that_redis_was_asked(redis: Any) -> None:
    """With its password alone, and for rows that the Job loaded."""
    password, command = redis.env["REDISCLI_AUTH"], ["redis-cli", "-h", redis.address]
    asked = {"capture_output": True, "text": True, "check": True}
    refused = subprocess.run([*command, "get", "recmill:loaded"], **asked)  # type: ignore[call-overload]
    assert "NOAUTH" in refused.stdout
    with_password = {**asked, "env": {**os.environ, "REDISCLI_AUTH": password}}
    loaded = subprocess.run([*command, "get", "recmill:loaded"], **with_password)  # type: ignore[call-overload]
    assert loaded.stdout.strip()
    stats = subprocess.run([*command, "info", "stats"], **with_password).stdout  # type: ignore[call-overload]
    assert (
        int(next(line for line in stats.splitlines() if line.startswith("keyspace_hits")).split(":")[1]) > 0
    )
    config = subprocess.run([*command, "config", "get", "maxmemory"], **with_password).stdout.split()  # type: ignore[call-overload]
    limit = number_of(redis.container["resources"]["limits"]["memory"])
    assert 0.75 * limit < int(config[1]) < limit


@pytest.mark.services
@pytest.mark.processes
def test_servers_go_on_when_the_primary_of_redis_is_lost(
    node: Node, secrets: dict[str, dict[str, str]], quickstart: Recipe, tmp_path: Path
) -> None:
    asked = ["redis.enabled=true", "redis.replicas=3", "serve.cpus=1"]
    deploy(quickstart, "serve", tmp_path, DeployConfig.of(asked))
    pods = Pods(node, kustomized(tmp_path / "serve/overlays/pvc"), secrets, ["redis"])
    try:
        redis = [_replica(pods, number) for number in range(3)]
        for container in (one for pod in redis for one in pod):
            container.wait_until_started()
        for _, sentinel in redis:  # as fast as a test wants it
            for name, milliseconds in (("down-after-milliseconds", "500"), ("failover-timeout", "2000")):
                cli(sentinel, "sentinel", "set", "features", name, milliseconds, port=26379)
        until(lambda: roles(redis) == ["master", "slave", "slave"])
        until(lambda: all(knows_the_others(sentinel) for _, sentinel in redis))
        until(lambda: "min_slaves_good_slaves:2" in cli(redis[0][0], "info", "replication"))
        pods.start("Job", "quickstart-load").wait_until_ended()
        server = pods.start("Deployment", "quickstart-serve")
        server.wait_until_started()
        assert recommended(server.address).json().get("degraded", []) == []
        for container in redis[0]:
            container.process.kill()
        assert recommended(server.address).status_code == 200
        until(lambda: sorted(roles(redis[1:])) == ["master", "slave"])
        event = {"events": [{"user": "u1", "item": "i7"}]}
        httpx.post(f"http://{server.address}:8080/v1/events", json=event, timeout=20).raise_for_status()
        primary = redis[1 + roles(redis[1:]).index("master")][0]
        until(lambda: wrote(primary))
        until(lambda: recommended(server.address).json().get("degraded", []) == [])
        # The one that was lost comes back, and follows.
        redis[0] = _replica(pods, 0)
        until(lambda: sorted(roles(redis)) == ["master", "slave", "slave"])
        assert roles(redis)[0] == "slave"
    finally:
        pods.close()


@pytest.mark.services
@pytest.mark.processes
def test_servers_of_a_url_wait_for_a_bundle_there_and_mount_no_volume(
    node: Node, shop: Shop, quickstart: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RECMILL_CACHE", str(tmp_path / "cache"))
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    with running_s3() as s3:
        url = s3.url("published")
        settings = DeployConfig.of([f"publish.url={url}", "publish.secret=s3", "serve.cpus=1"])
        deploy(quickstart, "serve", tmp_path, settings)
        objects = kustomized(tmp_path / "serve/base")
        validate(objects)
        assert "persistentVolumeClaim" not in str(objects)
        policy = named(objects, "NetworkPolicy", "quickstart-to-storage")["spec"]
        assert policy["egress"][-1] == {"ports": [{"protocol": "TCP", "port": s3.port}]}
        pods = Pods(node, objects, {"s3": ENVIRONMENT})
        # Pods have addresses of their own here, and the storage is at this machine's.
        publisher = threading.Timer(3, publish_at, [shop.bundles, url], {"despite_gate": True})
        publisher.start()
        try:
            server = pods.start("Deployment", "quickstart-serve")
            server.wait_until_started()
            first = server.log.read_text()
            assert "no version yet\nfound  " in first
            assert len(recommended(server.address).json()["items"]) == 3
        finally:
            publisher.join()
            pods.close()


def _replica(pods: Pods, number: int) -> tuple[Pod, Pod]:
    """Both containers of one pod, started at once."""
    started = [pods.start("StatefulSet", "quickstart-redis", number, name) for name in ("redis", "sentinel")]
    return started[0], started[1]


def cli(pod: Pod, *command: str, port: int = 6379) -> str:
    done = subprocess.run(
        ["redis-cli", "-h", pod.address, "-p", str(port), *command],
        env={**os.environ, "REDISCLI_AUTH": pod.env["REDISCLI_AUTH"]},
        capture_output=True,
        text=True,
    )
    return done.stdout


def roles(redis: list[tuple[Pod, Pod]]) -> list[str]:
    return [(cli(pod, "role").splitlines() or ["none"])[0] for pod, _ in redis]


def knows_the_others(sentinel: Pod) -> bool:
    """Whether it knows enough for an election, and whom to elect."""
    lines = cli(sentinel, "sentinel", "master", "features", port=26379).splitlines()
    state = dict(zip(lines[::2], lines[1::2], strict=True))
    return (state.get("num-slaves"), state.get("num-other-sentinels")) == ("2", "2")


def wrote(primary: Pod) -> bool:
    """Whether the primary has taken a command that changes something from a client."""
    stats = cli(primary, "info", "commandstats")
    return any(f"cmdstat_{name}:" in stats for name in ("set", "hset", "eval", "evalsha", "rpush", "lpush"))


def until(holds: Callable[[], bool], seconds: float = 120) -> None:
    ends_at = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < ends_at, "it never came to hold"
        time.sleep(0.1)


def test_servers_trust_the_functions_that_the_recipe_itself_names(quickstart: Recipe) -> None:
    first, *others = quickstart.features
    trusted = dataclasses.replace(first, steps=(Function("mine.things:same", "text"), *first.steps))
    recipe = dataclasses.replace(quickstart, features=(trusted, *others))
    found = objects(recipe, "redis.enabled=true")
    for kind, name in (("Deployment", "quickstart-serve"), ("Job", "quickstart-load")):
        command = container_of(named(found, kind, name))["command"]
        assert command[command.index("--trust-code") + 1] == "mine.things"
    assert not any("--trust-code" in text for text in render(quickstart, "serve", DeployConfig()).values())
