"""ray: RayJobs that prepare and train, and a RayCluster that stays, with separate nodes for data and for training.

For KubeRay 1.5.1 or later, which makes each cluster's token, and Ray 2.53 or later, whose nodes answer /api/healthz.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from recmill.recipe.recipe import Recipe
from recmill.stages.deploy.parts import (
    CHECKPOINT,
    TABLE,
    Files,
    Object,
    Site,
    container,
    container_security,
    pod_spec,
    pod_template,
    resources,
    volumes,
)
from recmill.stages.deploy.settings import DeployConfig, DeployError
from recmill.stages.deploy.sizing import GB, MB, Resources, smallest_bound
from recmill.stages.deploy.stages import base, check_shared_storage, overlays

DATA_RESOURCE, TRAIN_RESOURCE = "data", "train"  # what a node is for, as Ray calls it
GCS_PORT, DASHBOARD_PORT, HEALTH_PORT, METRICS_PORT = 6379, 8265, 52365, 8080
KEPT_SECONDS = 600  # a finished job's cluster, with its logs

_LEAST_RAY = (2, 53, 0)
_LONGEST_JOB_NAME = 47  # that KubeRay takes
_NODE_BYTES = 512 * MB  # Ray's own processes on a worker
_HEAD = Resources(2, 2 * GB)  # Ray's own processes on the head
_TRAINER_BYTES = GB  # a training worker without tables and batches
_ROOM = (
    1.3  # of a worker's share of the tables: keys are not spread evenly, and small tables are on every worker
)
_STORE_SHARE, _LEAST_STORE = 0.3, 512 * MB  # of the object store: beside what tasks hold, what they pass on
_SUBMITTER = Resources(0.5, 512 * MB)
_AUTOSCALER = Resources(0.5, 512 * MB)
_IDLE_SECONDS = 120


def render(recipe: Recipe, settings: DeployConfig) -> Files:
    """base/{prepare,train,cluster}: one each; overlays/{pvc,nfs}/...: the same with the storage that they mount."""
    site = Site.of(recipe, settings)
    _check(site)
    check_shared_storage(site)
    made = {"prepare": prepare_job(site), "train": train_job(site), "cluster": cluster(site)}
    files: Files = {}
    for stage, whole in made.items():
        beside = [network_policy(site, f"ray-{stage}"), *site.recipe_objects()]
        files |= base(site, stage, {f"{stage}.yaml": [whole, *beside]})
    return files | overlays(site, list(made))


def _check(site: Site) -> None:
    found = []
    version, longest = site.settings.ray.version, _LONGEST_JOB_NAME - len("-ray-prepare")
    if tuple(map(int, version.split("."))) < _LEAST_RAY:
        found.append(f"ray.version must be at least {'.'.join(map(str, _LEAST_RAY))}, got {version}")
    if len(site.name) > longest:
        found.append(
            f"name must have at most {longest} characters for target ray, got {len(site.name)}: {site.name}"
        )
    if found:
        raise DeployError("--set", found)


# what nodes are given


@dataclass(frozen=True)
class Nodes:
    """Nodes that are alike. `work` is what tasks hold; Ray and its object store come on top."""

    name: str
    number: int
    cpus: int
    work: int
    store: int

    @property
    def need(self) -> Resources:
        return Resources(self.cpus, _NODE_BYTES + self.work + self.store)


def data_nodes(site: Site) -> Nodes:
    """A task for each core, each with its own memory."""
    cpus, memory = max(1, math.ceil(site.sizing.prepare.cpus)), task_memory(site)
    store = max(_LEAST_STORE, int(cpus * memory * _STORE_SHARE))
    work = cpus * (site.sizing.prepare_fixed + memory)
    return Nodes(DATA_RESOURCE, site.settings.ray.data_workers, cpus, work, store)


def task_memory(site: Site) -> int:
    """--memory of `recmill prepare`, which here bounds each task: tasks of a node share what one process would have."""
    share = site.sizing.prepare_bound // max(1, math.ceil(site.sizing.prepare.cpus))
    return max(smallest_bound(), share)


def train_nodes(site: Site) -> Nodes:
    """A worker for each node. What is set is what each gets; what is computed for one machine is dealt out."""
    asked, whole = site.settings.train, site.sizing.train
    number = asked.workers or site.settings.ray.train_workers
    cpus = whole.cpus if asked.cpus else whole.cpus / number
    memory = whole.memory if asked.memory else _TRAINER_BYTES + int(_ROOM * whole.memory / number)
    return Nodes(TRAIN_RESOURCE, number, max(1, math.ceil(cpus)), memory, _LEAST_STORE)


def _head_need(site: Site) -> Resources:
    """Ray's own, and the driver."""
    return Resources(_HEAD.cpus, _HEAD.memory + _LEAST_STORE + site.sizing.prepare_fixed + task_memory(site))


# objects


def prepare_job(site: Site) -> Object:
    spec = _cluster_spec(site, "ray-prepare", [data_nodes(site)])
    return _job(site, "prepare", prepare_command(site), spec)


def train_job(site: Site) -> Object:
    spec = _cluster_spec(site, "ray-train", [data_nodes(site), train_nodes(site)])
    return _job(site, "train", train_command(site), spec)


def cluster(site: Site) -> Object:
    """A cluster for whoever comes: one data node waits, others and those that train come when they are asked for."""
    spec = _cluster_spec(site, "ray-cluster", [data_nodes(site), train_nodes(site)], autoscaled=True)
    metadata = site.metadata("ray-cluster", f"{site.name}-ray")
    return {"apiVersion": "ray.io/v1", "kind": "RayCluster", "metadata": metadata, "spec": spec}


def prepare_command(site: Site) -> list[str]:
    command = ["recmill", "prepare", site.recipe_argument, "--data", site.data_path, "--into", TABLE]
    memory = f"{task_memory(site) // MB}MB"
    return [*command, "--engine", "ray", "--address", "auto", "--memory", memory]


def train_command(site: Site) -> list[str]:
    data, train = data_nodes(site), train_nodes(site)
    command = ["recmill", "train", site.recipe_argument, "--table", TABLE, "--into", CHECKPOINT, "--resume"]
    command += ["--engine", "ray", "--address", "auto"]
    command += [
        "--workers",
        str(train.number),
        "--cpus-per-worker",
        str(train.cpus),
        "--worker-resource",
        train.name,
    ]
    return [*command, "--data-workers", str(data.number * data.cpus), "--data-resource", data.name]


def _job(site: Site, stage: str, command: Sequence[str], cluster_spec: Object) -> Object:
    """Tried again with a new cluster, which goes on where the one before was."""
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": site.metadata(f"ray-{stage}"),
        "spec": {
            "entrypoint": shlex.join(command),
            "backoffLimit": site.settings.retry_limit,
            "shutdownAfterJobFinishes": True,
            "ttlSecondsAfterFinished": KEPT_SECONDS,
            "submissionMode": "K8sJobMode",
            "submitterConfig": {"backoffLimit": 2},
            "submitterPodTemplate": _submitter(site, f"ray-{stage}"),
            "rayClusterSpec": cluster_spec,
        },
    }


def _submitter(site: Site, component: str) -> Object:
    """The pod that sends the command to the head and shows its output."""
    made = _ray_container(site, "ray-job-submitter", _SUBMITTER, data=False, runs="none")
    spec = pod_spec(site, [made], volumes=volumes(site, data=False, runs=False), restart_policy="Never")
    return pod_template(site, component, spec)


def _cluster_spec(site: Site, component: str, groups: Sequence[Nodes], autoscaled: bool = False) -> Object:
    scaling = {"enableInTreeAutoscaling": True, "autoscalerOptions": _autoscaler(site)} if autoscaled else {}
    return {
        "rayVersion": site.settings.ray.version,
        "authOptions": {"mode": "token"},
        **scaling,
        "headGroupSpec": {
            # Nothing is scheduled on the head but the driver.
            "rayStartParams": {"num-cpus": "0", "object-store-memory": str(_LEAST_STORE)},
            "template": _head(site, component, autoscaled),
        },
        "workerGroupSpecs": [_group(site, component, nodes, autoscaled) for nodes in groups],
    }


def _head(site: Site, component: str, autoscaled: bool) -> Object:
    ports = [
        {"name": "gcs-server", "containerPort": GCS_PORT},
        {"name": "dashboard", "containerPort": DASHBOARD_PORT},
        {"name": "metrics", "containerPort": METRICS_PORT},
    ]
    made = _ray_container(
        site, "ray-head", _head_need(site), data=_reads_log(component), ports=ports, **_probes()
    )
    # The autoscaler, beside the head, asks Kubernetes for nodes.
    token: Object = {"automountServiceAccountToken": True} if autoscaled else {}
    return _pod(site, component, made, **token)


def _group(site: Site, component: str, nodes: Nodes, autoscaled: bool) -> Object:
    least = (1 if nodes.name == DATA_RESOURCE else 0) if autoscaled else nodes.number
    made = _ray_container(site, "ray-worker", nodes.need, data=_reads_log(component), **_probes())
    return {
        "groupName": nodes.name,
        "replicas": least,
        "minReplicas": least,
        "maxReplicas": nodes.number,
        "rayStartParams": {
            "object-store-memory": str(nodes.store),
            # A word of the shell, as KubeRay and Ray's autoscaler want it.
            "resources": json.dumps(json.dumps({nodes.name: 1})),
        },
        "template": _pod(site, component, made),
    }


def _pod(site: Site, component: str, made: Object, **more: Any) -> Object:
    spec = pod_spec(site, [made], volumes=volumes(site, data=_reads_log(component)), **more)
    return pod_template(site, component, spec)


def _reads_log(component: str) -> bool:
    """Training on Ray learns from the Table."""
    return component != "ray-train"


def _ray_container(
    site: Site,
    name: str,
    need: Resources,
    *,
    data: bool,
    runs: Literal["read", "write", "none"] = "write",
    **more: Any,
) -> Object:
    """A container whose command is KubeRay's to make."""
    env = [{"name": "RAY_USAGE_STATS_ENABLED", "value": "0"}]
    made = container(site, name, (), need, data=data, runs=runs, env=env, **more)
    del made["command"]
    return made


def _probes() -> Object:
    """Those that KubeRay would make for older versions of Ray need wget, which the image does not have."""
    asked: Object = {
        "httpGet": {"path": "/api/healthz", "port": HEALTH_PORT},
        "periodSeconds": 10,
        "timeoutSeconds": 5,
    }
    return {
        "readinessProbe": {**asked, "failureThreshold": 6},
        "livenessProbe": {**asked, "initialDelaySeconds": 30, "failureThreshold": 12},
    }


def _autoscaler(site: Site) -> Object:
    return {
        "version": "v2",
        "idleTimeoutSeconds": _IDLE_SECONDS,
        "upscalingMode": "Default",
        "imagePullPolicy": site.settings.image.pull_policy,
        "resources": resources(_AUTOSCALER),
        "securityContext": container_security(),
        "env": [{"name": "HOME", "value": "/tmp"}],
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
    }


def network_policy(site: Site, component: str) -> Object:
    """Who reaches a Ray cluster can run programs on it: its own pods may, and KubeRay's operator may ask."""
    operator = {
        "namespaceSelector": {},
        "podSelector": {"matchLabels": {"app.kubernetes.io/name": "kuberay-operator"}},
    }
    ours = {"matchLabels": site.selector(component)}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": site.metadata(component),
        "spec": {
            "podSelector": ours,
            "policyTypes": ["Ingress"],
            "ingress": [
                {"from": [{"podSelector": ours}]},
                {"from": [operator], "ports": [{"protocol": "TCP", "port": DASHBOARD_PORT}]},
            ],
        },
    }
