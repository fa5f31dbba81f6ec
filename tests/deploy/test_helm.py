"""The chart makes what a cluster takes, with commands that run, and takes only values that make sense."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rendered import base_objects, named
from shop import Shop
from tools import helm
from validate import Invalid, templated, validate

from recmill.cli import build_parser
from recmill.recipe.load import load_recipe
from recmill.recipe.recipe import Recipe
from recmill.stages.deploy.deploy import deploy
from recmill.stages.deploy.settings import DeployConfig, DeployError
from recmill.stages.deploy.yaml import loads
from recmill.stages.serve.config import ServeConfig as ServerSettings

sys.path.insert(0, str(Path(__file__).parent.parent / "serve"))
from servers import in_thread

Object = dict[str, Any]
pytestmark = pytest.mark.services

CHOICES = {
    "defaults": [],
    "redis": ["redis.enabled=true", "redis.auth_secret=mine", "storage.class_name=fast", "redis.memory=1Gi"],
    "replicas": ["redis.enabled=true", "redis.replicas=3", "monitoring.enabled=true"],
    "url": [
        "publish.url=s3://models/shop/bundle?region=eu-west-1",
        "publish.secret=s3",
        "redis.enabled=true",
    ],
    "split": ["serve.split=true", "serve.hpa.metric=rate", "user=2000", "group=3000"],
    "monitoring": ["monitoring.enabled=true", "image.pull_secret=registry", "serve.hpa.target=55"],
    "ingress": ["serve.ingress.host=shop.example.com", "serve.ingress.class_name=nginx"],
    "nodeport": ["serve.node_port=30123", "serve.replicas=4", "serve.max_replicas=9", "name=other"],
    "tokens": ["serve.token_secret=mine", "serve.cpus=1500m", "serve.memory=3Gi"],
    "all": [
        "serve.split=true",
        "redis.enabled=true",
        "monitoring.enabled=true",
        "serve.ingress.host=shop.example.com",
        "serve.node_port=30123",
        "serve.tls_secret=shop-tls",
        "serve.token_secret=shop-tokens",
        "serve.hpa.metric=rate",
        "serve.hpa.target=40",
        "image.serve=r.example.com/serve:2",
        "image.pull_policy=Always",
    ],
}


@pytest.fixture(scope="module")
def chart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The chart as it is in the package: its own values are those of the quickstart recipe."""
    into = tmp_path_factory.mktemp("helm")
    deploy(load_recipe("quickstart"), "helm", into, DeployConfig())
    return into / "helm/recmill"


def tree(pairs: list[str]) -> Object:
    """Pairs of --set as values; numbers and truth values as YAML reads them, but for quantities."""
    values: Object = {}
    for pair in pairs:
        key, _, text = pair.partition("=")
        *path, last = key.split(".")
        place = values
        for name in path:
            place = place.setdefault(name, {})
        place[last] = text if last in ("cpus", "memory", "size") else loads(text)[0]
    return values


@pytest.mark.parametrize("choice", CHOICES)
def test_what_the_chart_makes_is_what_a_cluster_takes(chart: Path, choice: str) -> None:
    validate(templated(chart, tree(CHOICES[choice]), "quickstart"))


@pytest.mark.parametrize("choice", CHOICES)
def test_commands_and_their_secrets_are_those_of_the_command_line(chart: Path, choice: str) -> None:
    """Each flag that names a file names one of a volume that is mounted."""
    for one in templated(chart, tree(CHOICES[choice]), "quickstart", flags=["--skip-tests"]):
        if one["kind"] not in ("Deployment", "Job"):
            continue
        pod = one["spec"]["template"]["spec"]
        for container in (*pod["initContainers"], *pod["containers"]):
            command = [word.replace("$(CPUS)", "2") for word in container["command"]]
            assert command[0] == "recmill"
            given = build_parser().parse_args(command[1:])
            mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
            files = [value for value in vars(given).values() if str(value).startswith("/")]
            assert files or choice == "url"
            assert all(any(str(file).startswith(f"{mount}/") for mount in mounts) for file in files)
            variables = {variable["name"] for variable in container["env"]}
            assert ("$(REDIS_PASSWORD)" in " ".join(command)) == ("REDIS_PASSWORD" in variables)


@pytest.mark.parametrize("choice", ["defaults", "all"])
def test_what_reads_bundles_waits_for_the_first(chart: Path, choice: str) -> None:
    for one in templated(chart, tree(CHOICES[choice]), "quickstart", flags=["--skip-tests"]):
        if one["kind"] in ("Deployment", "Job"):
            (first,) = one["spec"]["template"]["spec"]["initContainers"]
            assert first["command"] == ["recmill", "bundle", "wait", "/runs/bundle"]


def test_servers_ask_for_tokens_when_clients_come_from_outside(chart: Path) -> None:
    def command(*pairs: str) -> list[str]:
        objects = templated(chart, tree(list(pairs)), "quickstart")
        (server,) = [one for one in objects if one["kind"] == "Deployment"]
        words: list[str] = server["spec"]["template"]["spec"]["containers"][0]["command"]
        return words

    assert "--insecure" in command()
    for pair in ("serve.node_port=30001", "serve.ingress.host=shop.example.com", "serve.token_secret=mine"):
        assert "--insecure" not in command(pair)
        assert "--token-file=/var/run/secrets/recmill/tokens/tokens" in command(pair)


def test_every_service_and_policy_selects_pods_that_are_there(chart: Path) -> None:
    objects = templated(chart, tree(CHOICES["all"]), "quickstart", flags=["--skip-tests"])
    pods = [
        one["spec"]["template"]["metadata"]["labels"] for one in objects if "template" in one.get("spec", {})
    ]
    assert len(pods) == 6
    for one in objects:
        if one["kind"] == "Service":
            assert any(one["spec"]["selector"].items() <= labels.items() for labels in pods), one["metadata"][
                "name"
            ]
        if one["kind"] == "NetworkPolicy":
            wanted = one["spec"]["podSelector"]["matchLabels"]
            assert any(wanted.items() <= labels.items() for labels in pods), one["metadata"]["name"]


@pytest.mark.parametrize("kind", ["pvc", "nfs", "hostpath"])
def test_storage_is_made_when_asked_for_and_kept_when_the_release_goes(chart: Path, kind: str) -> None:
    nfs = {"server": "10.0.0.5", "path": "/exports/shop/"}
    values = {"storage": {"kind": kind, "nfs": nfs, "host_path": "/srv/shop/"}}
    objects = templated(chart, values, "quickstart")
    validate(objects)
    made = [one for one in objects if one["kind"].startswith("PersistentVolume")]
    assert {one["metadata"]["annotations"]["helm.sh/resource-policy"] for one in made} == {"keep"}
    (claim,) = [one for one in made if one["kind"] == "PersistentVolumeClaim"]
    assert claim["metadata"]["name"] == "quickstart-runs"
    assert claim["spec"]["resources"]["requests"]["storage"] == "1Gi"
    if kind != "pvc":
        volume = made[0]
        if kind == "nfs":
            assert volume["spec"]["nfs"] == {"server": "10.0.0.5", "path": "/exports/shop/runs"}
        else:
            assert volume["spec"]["hostPath"] == {"path": "/srv/shop/runs", "type": "Directory"}
        assert claim["spec"]["volumeName"] == volume["metadata"]["name"] == "recmill-quickstart-runs"


def test_servers_of_a_url_are_those_of_kustomize(chart: Path, quickstart: Recipe) -> None:
    pairs = [*CHOICES["url"], "serve.split=true"]
    ours = base_objects(quickstart, "serve", *pairs)
    charts = templated(chart, tree(pairs), "quickstart", flags=["--skip-tests"])
    assert not [one for one in charts if one["kind"] == "PersistentVolumeClaim"]
    for one in ours:
        if one["metadata"]["name"] == "quickstart-to-storage":
            assert named(charts, one["kind"], one["metadata"]["name"])["spec"] == one["spec"]
        if one["kind"] == "Deployment":
            pod = one["spec"]["template"]["spec"]
            other = named(charts, one["kind"], one["metadata"]["name"])["spec"]["template"]["spec"]
            assert other["volumes"] == pod["volumes"]
            assert other["initContainers"] == pod["initContainers"]
            for key in ("env", "envFrom", "volumeMounts"):
                assert other["containers"][0][key] == pod["containers"][0][key]


@pytest.mark.parametrize("replicas", [1, 3])
def test_redis_is_that_of_kustomize(chart: Path, quickstart: Recipe, replicas: int) -> None:
    pairs = ["redis.enabled=true", f"redis.replicas={replicas}"]
    ours = [one for one in base_objects(quickstart, "serve", *pairs) if "redis" in one["metadata"]["name"]]
    assert len(ours) == 4 + (replicas > 1)
    charts = templated(chart, tree(pairs), "quickstart")
    for one in ours:
        other = named(charts, one["kind"], one["metadata"]["name"])
        assert other["spec"] == one["spec"]
    (server,) = [one for one in charts if one["kind"] == "Deployment"]
    command = server["spec"]["template"]["spec"]["containers"][0]["command"]
    (ours_server,) = [one for one in base_objects(quickstart, "serve", *pairs) if one["kind"] == "Deployment"]
    theirs = ours_server["spec"]["template"]["spec"]["containers"][0]["command"]
    assert f"--features={theirs[theirs.index('--features') + 1]}" in command


def test_values_of_a_recipe_are_taken_by_the_chart(tmp_path: Path) -> None:
    settings = DeployConfig.of(["name=ads", "serve.replicas=5", "user=2000", "serve.hpa.metric=rate"])
    deploy(load_recipe("criteo-dlrm"), "helm", tmp_path, settings)
    flags = ["--values", str(tmp_path / "helm/values.yaml")]
    objects = {one["kind"]: one for one in templated(tmp_path / "helm/recmill", flags=flags)}
    assert objects["Deployment"]["metadata"]["name"] == "ads-serve"
    assert objects["Deployment"]["spec"]["template"]["spec"]["securityContext"]["runAsUser"] == 2000
    assert objects["HorizontalPodAutoscaler"]["spec"]["minReplicas"] == 5


def test_lint_has_nothing_to_say(chart: Path) -> None:
    for values in ({}, tree(CHOICES["all"])):
        done = subprocess.run(
            [helm(), "lint", "--strict", str(chart), "--values", "-"],
            input=json.dumps(values),
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stdout
        assert "[WARNING]" not in done.stdout
        assert "[ERROR]" not in done.stdout


def test_notes_name_what_was_made(chart: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(chart, tmp_path / "recmill"))
    first, *lines = (chart / "templates/NOTES.txt").read_text().splitlines()
    shown = "".join(f"  {line}\n" for line in lines)
    (copy / "templates/shown.yaml").write_text(f"{first}\nkind: Notes\ntext: |\n{shown}")
    values = {"serve": {"node_port": 30001}, "redis": {"enabled": True, "auth_secret": "mine"}}
    objects = templated(copy, values, "quickstart", "shop")
    (text,) = [one["text"] for one in objects if one["kind"] == "Notes"]
    assert "kubectl --namespace shop rollout status deployment/quickstart-serve" in text
    assert "secret quickstart-tokens (keys tokens, read-token)" in text
    assert "secret mine (key password)" in text


@pytest.mark.parametrize(
    "pair",
    [
        "serve.replicas=-1",
        "serve.replicas=0",
        "serve.cpus=two",
        "serve.memory=lots",
        "serve.node_port=80",
        "serve.hpa.metric=memory",
        "serve.tls_secret=My_Secret",
        "serve.ingress.host=-shop",
        "storage.class_name=Fast SSD",
        "image.serve=recmill-serve",
        "image.pull_policy=Sometimes",
        "redis.replicas=2",
        "publish.url=http://models/shop",
        "user=0",
        "name=Shop",
        "redis.memory=-1Gi",
    ],
)
def test_a_wrong_value_is_refused_by_the_chart_as_by_deploy(chart: Path, pair: str) -> None:
    with pytest.raises(
        Invalid, match=r"values don't meet the specifications|" + pair.split(".")[-1].split("=")[0]
    ):
        templated(chart, tree([pair]))
    with pytest.raises(DeployError):
        DeployConfig.of([pair])


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"serve": {"replica": 3}}, "Additional property replica is not allowed"),
        ({"redsi": {}}, "Additional property redsi is not allowed"),
        ({"serve": {"replicas": 5, "max_replicas": 2}}, "serve.max_replicas must be at least serve.replicas"),
        ({"serve": {"hpa": {"target": 400}}}, "must be a percentage"),
        ({"storage": {"access": "ReadWriteOnce"}}, "needs serve.max_replicas of 1"),
        ({"monitoring": {"enabled": "yes"}}, "boolean"),
    ],
)
def test_values_that_are_unknown_or_do_not_go_together_are_refused(
    chart: Path, values: Object, reason: str
) -> None:
    with pytest.raises(Invalid, match=reason):
        templated(chart, values)


@pytest.mark.parametrize("pair", ["serve.split=true", "redis.enabled=true"])
def test_a_choice_that_does_not_fit_the_recipe_is_refused_by_its_chart(tmp_path: Path, pair: str) -> None:
    deploy(load_recipe("criteo-dlrm"), "helm", tmp_path, DeployConfig())
    flags = ["--values", str(tmp_path / "helm/values.yaml")]
    with pytest.raises(Invalid, match=f"{pair.partition('=')[0]} must be false for this recipe"):
        templated(tmp_path / "helm/recmill", flags=[*flags, "--set", pair])


def test_a_release_whose_name_is_none_for_a_service_is_refused(chart: Path) -> None:
    for name in ("1shop", "a" * 41):
        with pytest.raises(Invalid, match="name must be lower-case letters"):
            templated(chart, name=name)


def test_the_chart_takes_every_default_by_the_name_that_deploy_knows(chart: Path) -> None:
    from recmill.stages.deploy.settings import defaults

    def paths(values: Object, prefix: str = "") -> set[str]:
        found = set()
        for name, value in values.items():
            found |= paths(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name}
        return found

    own = {
        "publish.port",
        "publish.cache",
        "serve.startup_seconds",
        "serve.hpa.requests_per_second",
        "redis.disk",
    }  # computed by deploy
    own |= {"recipe.trust_code", "recipe.can_split", "recipe.can_use_redis"}
    known = paths(loads((chart / "values.yaml").read_text())[0])
    assert known - own <= defaults().keys()
    served = {key for key in defaults() if key.startswith(("serve.", "redis.", "monitoring."))}
    assert served <= known


def test_helm_test_asks_the_service_by_its_name(chart: Path) -> None:
    objects = templated(chart, {"serve": {"tls_secret": "mine"}}, "quickstart")
    (pod,) = [one for one in objects if one["kind"] == "Pod"]
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    assert pod["spec"]["containers"][0]["command"][-1] == "https://quickstart-serve:8080"
    assert "quickstart-serve" in {one["metadata"]["name"] for one in objects if one["kind"] == "Service"}


def test_what_helm_test_runs_succeeds_with_a_server_and_fails_without(chart: Path, shop: Shop) -> None:
    (pod,) = [one for one in templated(chart, None, "quickstart") if one["kind"] == "Pod"]
    _, *script = pod["spec"]["containers"][0]["command"]
    server = in_thread(ServerSettings(bundle=shop.bundles, http_port=0, grpc_port=0, threads=1))
    try:
        asked = subprocess.run(
            [sys.executable, *script[:-1], server.http], capture_output=True, text=True, timeout=30
        )
    finally:
        server.stop()
    assert (asked.returncode, asked.stdout) == (0, "/health/ready 200\n/openapi.json 200\n"), asked.stderr
    gone = subprocess.run([sys.executable, *script[:-1], server.http], capture_output=True, timeout=30)
    assert gone.returncode != 0
