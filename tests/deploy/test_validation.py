"""Every object of every target and overlay is one that a cluster takes, and asks for no more than it needs."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from schemas import SCHEMAS
from tools import old_kustomize
from validate import Invalid, kustomized, templated, validate

from recmill.recipe.load import load_recipe
from recmill.stages.deploy.deploy import TARGETS, deploy, render
from recmill.stages.deploy.settings import DeployConfig
from recmill.stages.deploy.yaml import loads

pytestmark = [pytest.mark.services, pytest.mark.xdist_group("manifests")]  # what is rendered is shared

Object = dict[str, Any]

KUSTOMIZED = tuple(target for target in TARGETS if target not in ("docker", "helm"))
SETTINGS: dict[str, tuple[str, ...]] = {
    "as they are": (),
    "all at once": (
        "name=shop",
        "namespace=shop-models",
        "user=2000",
        "group=3000",
        "image.pull_secret=registry",
        "storage.class_name=fast",
        "serve.split=true",
        "serve.node_port=30080",
        "serve.ingress.host=shop.example.com",
        "serve.tls_secret=shop-tls",
        "serve.token_secret=shop-tokens",
        "serve.hpa.metric=rate",
        "redis.enabled=true",
        "redis.auth_secret=shop-redis",
        "redis.replicas=3",
        "monitoring.enabled=true",
        "train.workers=4",
        "spark.executors=8",
        "gate=auc>=0.6,ne<=constant",
    ),
}
# A recipe that no image has: its file comes with the objects.
OWN = ("quickstart", ("ranking.train.batch_size=777",))


@cache
def _rendered(settings: str, target: str) -> dict[str, list[Object]]:
    """Folder of a kustomization -> its objects, all built at once."""
    recipe = load_recipe(*OWN) if settings == "all at once" else load_recipe("quickstart")
    with TemporaryDirectory() as into:
        deploy(recipe, target, Path(into), DeployConfig.of(SETTINGS[settings]))
        folders = sorted(path.parent for path in Path(into, target).rglob("kustomization.yaml"))
        with ThreadPoolExecutor(2) as pool:
            built = pool.map(kustomized, folders)
            return {
                str(folder.relative_to(into)): objects for folder, objects in zip(folders, built, strict=True)
            }


@cache
def _chart(settings: str) -> list[Object]:
    with TemporaryDirectory() as into:
        deploy(load_recipe("quickstart"), "helm", Path(into), DeployConfig.of(SETTINGS[settings]))
        (chart,) = Path(into).rglob("Chart.yaml")
        return templated(chart.parent, flags=["--values", str(Path(into, "helm/values.yaml"))])


def all_objects(settings: str) -> Iterator[Object]:
    for target in KUSTOMIZED:
        for objects in _rendered(settings, target).values():
            yield from objects
    yield from _chart(settings)


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("target", KUSTOMIZED)
def test_a_cluster_takes_every_object(target: str, settings: str) -> None:
    built = _rendered(settings, target)
    assert built
    for objects in built.values():
        validate(objects)


@pytest.mark.parametrize("settings", SETTINGS)
def test_a_cluster_takes_every_object_of_the_chart(settings: str) -> None:
    validate(_chart(settings))


def test_files_that_are_no_part_of_a_kustomization_are_pod_templates() -> None:
    files = render(load_recipe("quickstart"), "spark", DeployConfig())
    for name in ("submit/driver.yaml", "submit/executor.yaml"):
        (pod,) = loads(files[name])
        validate([{**pod, "metadata": {**pod["metadata"], "name": "from-template"}}])


def test_an_old_kustomize_builds_the_same(tmp_path: Path) -> None:
    """One overlay of each shape: claims, several bases, a base in a folder above."""
    for target, folder in (
        ("serve", "overlays/hostpath"),
        ("stack", "overlays/pvc-daily"),
        ("ray", "overlays/nfs/train"),
    ):
        deploy(load_recipe("quickstart"), target, tmp_path, DeployConfig())
        built = kustomized(tmp_path / target / folder, old_kustomize())
        assert built == _rendered("as they are", target)[f"{target}/{folder}"]


@pytest.mark.parametrize("settings", SETTINGS)
def test_everything_is_in_the_one_namespace(settings: str) -> None:
    wanted = DeployConfig.of(SETTINGS[settings]).namespace
    for target in KUSTOMIZED:
        for objects in _rendered(settings, target).values():
            found = {one["metadata"].get("namespace") for one in objects if one["kind"] != "PersistentVolume"}
            assert found == {wanted}


# broken fields are caught

# Kind -> a field with a value of a wrong type, and a field that must not be missing.
BROKEN: dict[str, tuple[str, Any, str]] = {
    "ConfigMap": ("data", ["text"], "metadata.name"),
    "CronWorkflow": ("spec.schedules", "0 3 * * *", "spec.workflowSpec"),
    "Deployment": ("spec.selector", "app", "spec.template"),
    "HorizontalPodAutoscaler": ("spec.maxReplicas", "many", "spec.scaleTargetRef"),
    "Ingress": ("spec.rules", {}, "spec.rules.0.http.paths.0.pathType"),
    "Job": ("spec.backoffLimit", "three", "spec.template"),
    "NetworkPolicy": ("spec.policyTypes", "Ingress", "metadata.name"),
    "PersistentVolume": ("spec.accessModes", "ReadWriteMany", "spec.hostPath.path"),
    "PersistentVolumeClaim": ("spec.accessModes", "ReadWriteMany", "metadata.name"),
    "PodDisruptionBudget": ("spec.selector", "app", "metadata.name"),
    "RayCluster": ("spec.workerGroupSpecs.0.maxReplicas", "2", "spec.headGroupSpec"),
    "RayJob": ("spec.ttlSecondsAfterFinished", "600", "spec.entrypoint"),
    "Role": ("rules.0.verbs", "get", "rules.0.verbs"),
    "RoleBinding": ("subjects", {}, "roleRef"),
    "Secret": ("type", 1, "metadata.name"),
    "Service": ("spec.ports.0.port", "http", "spec.ports.0.port"),
    "ServiceAccount": ("metadata.labels", ["app"], "metadata.name"),
    "ServiceMonitor": ("spec.endpoints.0.interval", 15, "spec.selector"),
    "SparkApplication": ("spec.executor.cores", "2", "spec.driver"),
    "StatefulSet": ("spec.replicas", "one", "spec.selector"),
    "WorkflowTemplate": ("spec.templates.0.name", 1, "spec.templates.0.name"),
}


def test_every_rendered_kind_is_broken_below() -> None:
    found = {one["kind"] for settings in SETTINGS for one in all_objects(settings)} - {"Pod"}
    assert found == set(BROKEN)
    assert {kind for _, kind in SCHEMAS} - {"Workflow"} <= found


def _example(kind: str) -> Object:
    every = (one for settings in SETTINGS for one in all_objects(settings))
    return copy.deepcopy(next(one for one in every if one["kind"] == kind))


def _place(one: Any, path: str) -> tuple[Any, Any]:
    """Who holds the last word of a path, and that word."""
    *before, last = [int(word) if word.isdecimal() else word for word in path.split(".")]
    for word in before:
        one = one[word]
    return one, last


@pytest.mark.parametrize("kind", BROKEN)
def test_an_unknown_field_is_caught(kind: str) -> None:
    one = _example(kind)
    validate([one])
    one.get("spec", one)["replcas"] = 1
    with pytest.raises(Invalid, match="replcas"):
        validate([one])


@pytest.mark.parametrize("kind", BROKEN)
def test_a_wrong_type_is_caught(kind: str) -> None:
    one = _example(kind)
    path, value, _ = BROKEN[kind]
    owner, last = _place(one, path)
    assert last in owner or isinstance(last, int)
    owner[last] = value
    with pytest.raises(Invalid, match=re.escape(str(last))):
        validate([one])


@pytest.mark.parametrize("kind", BROKEN)
def test_a_missing_field_is_caught(kind: str) -> None:
    one = _example(kind)
    owner, last = _place(one, BROKEN[kind][2])
    del owner[last]
    with pytest.raises(Invalid, match=str(last)):
        validate([one])


OF_OPERATORS = sorted({kind for _, kind in SCHEMAS} - {"Workflow", "CronWorkflow", "ServiceMonitor"})


@pytest.mark.parametrize("kind", OF_OPERATORS)
def test_a_wrong_field_of_a_pod_inside_an_operators_object_is_caught(kind: str) -> None:
    one = _example(kind)
    found = next(container for _, container, _ in containers_of(one))
    found["volumeMonts"] = []
    with pytest.raises(Invalid, match="volumeMonts"):
        validate([one])


def test_a_kind_that_nobody_knows_is_an_error() -> None:
    with pytest.raises(Invalid, match="no kind of Kubernetes"):
        validate([{"apiVersion": "example.com/v1", "kind": "Job", "metadata": {"name": "a"}, "spec": {}}])


def test_a_name_that_kubernetes_would_refuse_is_an_error() -> None:
    with pytest.raises(Invalid, match="is no name of Kubernetes"):
        validate([{"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "My_Map"}}])


# no object asks for more than it needs

# Containers whose root filesystem is not read-only, with the reason.
WRITABLE: dict[str, str] = {}


def pods_of(one: Object) -> Iterator[Object]:
    """The pod specs inside an object, whatever its kind."""
    spec = one.get("spec", {})
    match one["kind"]:
        case "Deployment" | "Job":
            yield spec["template"]["spec"]
        case "StatefulSet":
            claims = [{"name": claim["metadata"]["name"]} for claim in spec.get("volumeClaimTemplates", ())]
            yield {**spec["template"]["spec"], "volumes": [*spec["template"]["spec"]["volumes"], *claims]}
        case "Pod":
            yield spec
        case "Workflow" | "WorkflowTemplate":
            for template in spec.get("templates", ()):
                works = [template[work] for work in ("container", "script") if work in template]
                if works:
                    inherited = {key: spec[key] for key in ("securityContext", "volumes") if key in spec}
                    yield {**inherited, **template, "containers": works}
        case "RayCluster":
            yield from _pods_of_ray(spec)
        case "RayJob":
            yield spec["submitterPodTemplate"]["spec"]
            yield from _pods_of_ray(spec["rayClusterSpec"])
        case "SparkApplication":
            yield from (spec[role]["template"]["spec"] for role in ("driver", "executor"))


def _pods_of_ray(spec: Object) -> Iterator[Object]:
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        yield group["template"]["spec"]


def containers_of(one: Object) -> Iterator[tuple[str, Object, Object]]:
    """Name, container and the pod that it is in."""
    for pod in pods_of(one):
        for container in (*pod.get("initContainers", ()), *pod["containers"]):
            yield f"{one['kind']}/{one['metadata']['name']}/{container.get('name', 'main')}", container, pod


def all_containers(settings: str) -> list[tuple[str, Object, Object]]:
    return [found for one in all_objects(settings) for found in containers_of(one)]


@pytest.fixture(params=SETTINGS)
def containers(request: pytest.FixtureRequest) -> list[tuple[str, Object, Object]]:
    found = all_containers(request.param)
    assert len(found) > 20
    return found


def test_every_workload_is_looked_into() -> None:
    with_pods = {one["kind"] for one in all_objects("all at once") if any(pods_of(one))}
    assert with_pods == {
        "Deployment", "StatefulSet", "Job", "Pod", "WorkflowTemplate", "RayCluster", "RayJob", "SparkApplication",
    }  # fmt: skip


def test_nothing_runs_as_root(containers: list[tuple[str, Object, Object]]) -> None:
    for name, container, pod in containers:
        security = {**pod["securityContext"], **container["securityContext"]}
        assert security["runAsNonRoot"] is True, name
        assert security["runAsUser"] > 0, name
        assert security["runAsGroup"] > 0, name
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}, name


def test_nothing_is_privileged_or_sees_the_host(containers: list[tuple[str, Object, Object]]) -> None:
    for name, container, pod in containers:
        security = container["securityContext"]
        assert not security.get("privileged"), name
        assert security["allowPrivilegeEscalation"] is False, name
        assert security["capabilities"] == {"drop": ["ALL"]}, name
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys(), name
        assert not any("hostPath" in volume for volume in pod.get("volumes", ())), name


def test_root_filesystems_are_read_only(containers: list[tuple[str, Object, Object]]) -> None:
    for name, container, _ in containers:
        if container.get("name") not in WRITABLE:
            assert container["securityContext"]["readOnlyRootFilesystem"] is True, name


def test_every_mount_has_a_volume(containers: list[tuple[str, Object, Object]]) -> None:
    for name, container, pod in containers:
        there = {volume["name"] for volume in pod.get("volumes", ())}
        assert {mount["name"] for mount in container["volumeMounts"]} <= there, name


def test_requests_and_limits_are_said_everywhere(containers: list[tuple[str, Object, Object]]) -> None:
    for name, container, _ in containers:
        if not name.startswith("SparkApplication/"):  # Spark computes them of what is said beside its pods
            for said in ("requests", "limits"):
                assert container["resources"][said].keys() >= {"cpu", "memory"}, name


def test_spark_is_told_requests_and_limits_beside_its_pods() -> None:
    spec = _example("SparkApplication")["spec"]
    for role in ("driver", "executor"):
        assert spec[role].keys() >= {"cores", "coreLimit", "memory", "memoryOverhead"}


def test_images_have_a_tag_of_their_own(containers: list[tuple[str, Object, Object]]) -> None:
    for name, container, _ in containers:
        tag = container["image"].rpartition(":")[2] if ":" in container["image"].rpartition("/")[2] else ""
        assert tag not in ("", "latest"), name


@pytest.mark.parametrize("settings", SETTINGS)
def test_no_secret_is_written_into_an_object(settings: str) -> None:
    for one in all_objects(settings):
        # Kubernetes itself fills a service account's token in.
        if one["kind"] == "Secret":
            assert one["type"] == "kubernetes.io/service-account-token"
            assert not {"data", "stringData"} & one.keys()
    for name, container, _ in all_containers(settings):
        for variable in container.get("env", ()):
            if re.search(r"PASSWORD|TOKEN|SECRET|CREDENTIAL", variable["name"]):
                assert "secretKeyRef" in variable.get("valueFrom", {}) or variable["value"].startswith("/"), (
                    name
                )
