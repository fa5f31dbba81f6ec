"""What all targets are made of: names, labels, pods with their safety, volumes, kustomizations."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from recmill import __version__
from recmill.recipe.load import load_recipe, shipped_recipes
from recmill.recipe.recipe import Recipe
from recmill.recipe.write import toml_of
from recmill.stages.deploy.settings import MAX_NAME, DeployConfig, DeployError, is_app_name, number_of
from recmill.stages.deploy.sizing import MB, Resources, Sizing, size, smallest_bound
from recmill.stages.deploy.yaml import dumps

Object = dict[str, Any]
Files = dict[str, str]  # relative path -> content

RUNS = "/runs"  # Table, checkpoint, bundles, rejected
DATA = "/data"  # the log
TABLE, CHECKPOINT, BUNDLES, REJECTED = (
    f"{RUNS}/table",
    f"{RUNS}/checkpoint",
    f"{RUNS}/bundle",
    f"{RUNS}/rejected",
)
RECIPE_FOLDER = "/etc/recmill"
HTTP_PORT, GRPC_PORT = 8080, 8081
GRACE_SECONDS = 60

_RUNS_VOLUME, _DATA_VOLUME, _TMP_VOLUME, _RECIPE_VOLUME = "runs", "data", "tmp", "recipe"


@dataclass(frozen=True)
class Site:
    """A recipe with its settings: every name, and what each stage needs, settled."""

    recipe: Recipe
    settings: DeployConfig
    name: str
    sizing: Sizing

    @classmethod
    def of(cls, recipe: Recipe, settings: DeployConfig) -> Site:
        return cls(recipe, settings, settings.name or _name_of(recipe), _sizing(recipe, settings))

    # names and labels

    def labels(self, component: str) -> dict[str, str]:
        return {
            **self.selector(component),
            "app.kubernetes.io/part-of": "recmill",
            "app.kubernetes.io/version": __version__,
        }

    def selector(self, component: str) -> dict[str, str]:
        """The labels that never change, by which a Service finds its pods."""
        return {
            "app.kubernetes.io/name": "recmill",
            "app.kubernetes.io/instance": self.name,
            "app.kubernetes.io/component": component,
        }

    def metadata(self, component: str, name: str | None = None, **more: Any) -> Object:
        """Name (by default `<app>-<component>`) and labels; the namespace is said once, in the kustomization."""
        return {"name": name or f"{self.name}-{component}", "labels": self.labels(component), **more}

    @property
    def runs_claim(self) -> str:
        return f"{self.name}-runs"

    @property
    def data_claim(self) -> str:
        return self.settings.data.claim or f"{self.name}-data"

    # what commands are told

    @cached_property
    def is_shipped(self) -> bool:
        """Whether the image has this very recipe under its name."""
        shipped = self.recipe.name in shipped_recipes()
        return shipped and load_recipe(self.recipe.name) == self.recipe

    @property
    def recipe_argument(self) -> str:
        """RECIPE of commands: the name of a shipped one, or the file of the ConfigMap."""
        return self.recipe.name if self.is_shipped else f"{RECIPE_FOLDER}/recipe.toml"

    @property
    def data_path(self) -> str:
        """--data of commands."""
        path = self.settings.data.path.rstrip("/")
        return DATA if path == "." else f"{DATA}/{path.removeprefix('./')}"

    @property
    def prepare_bound(self) -> str:
        """--memory of `recmill prepare`, so that all of it stays within the container's memory."""
        return f"{self.sizing.prepare_bound // MB}MB"

    def recipe_objects(self) -> list[Object]:
        """The ConfigMap that holds the recipe; nothing for a shipped one."""
        if self.is_shipped:
            return []
        metadata = self.metadata("recipe")
        return [
            {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": metadata,
                "data": {"recipe.toml": toml_of(self.recipe)},
            }
        ]


def check_measured(recipe: Recipe) -> None:
    """Raises when the stage that evaluates would have nothing to measure."""
    if recipe.split is None:
        problem = "split is missing: nothing is held out, so that no model can be evaluated. Add [split]"
        raise DeployError(f"recipe {recipe.name}", [problem])


def _name_of(recipe: Recipe) -> str:
    if is_app_name(recipe.name):
        return recipe.name
    likely = re.sub(r"[^a-z0-9]+", "-", recipe.name.lower()).strip("-")[:MAX_NAME].rstrip("-")
    hint = f"such as --set name={likely}" if is_app_name(likely) else "with --set name=..."
    raise DeployError(
        "--set",
        [f'name is missing: the recipe\'s own, "{recipe.name}", is none for Kubernetes. Add one, {hint}'],
    )


def _sizing(recipe: Recipe, settings: DeployConfig) -> Sizing:
    """What `recmill size` says, with what the settings say instead of it."""
    asked = settings
    computed = size(recipe, asked.rows, asked.items, asked.users, asked.rate)
    found = dataclasses.replace(
        computed,
        prepare=_asked(computed.prepare, asked.prepare.cpus, asked.prepare.memory),
        train=_asked(computed.train, asked.train.cpus, asked.train.memory),
        serve=_asked(computed.serve, asked.serve.cpus, asked.serve.memory),
        replicas=asked.serve.replicas
        or min(computed.replicas, asked.serve.max_replicas or computed.replicas),
        runs_bytes=_bytes(asked.storage.size, computed.runs_bytes),
        log_bytes=_bytes(asked.data.size, computed.log_bytes),
        redis_bytes=_bytes(asked.redis.memory, computed.redis_bytes),
    )
    if found.prepare_bound < smallest_bound():
        least = computed.prepare_fixed + smallest_bound()
        raise DeployError(
            "--set",
            [
                f"prepare.memory must be at least {quantity(least)} for this recipe, got {settings.prepare.memory}"
            ],
        )
    return found


def _asked(computed: Resources, cpus: str | None, memory: str | None) -> Resources:
    return Resources(number_of(cpus) if cpus else computed.cpus, _bytes(memory, computed.memory))


def _bytes(asked: str | None, computed: int) -> int:
    return int(number_of(asked)) if asked else computed


def quantity(num_bytes: float) -> str:
    """Bytes as Kubernetes writes them, rounded up to whole Mi, or Gi when they come out even."""
    mebibytes = math.ceil(num_bytes / MB)
    return f"{mebibytes // 1024}Gi" if mebibytes % 1024 == 0 else f"{mebibytes}Mi"


def cores(cpus: float) -> str:
    return f"{cpus:g}" if cpus == int(cpus) else f"{math.ceil(cpus * 1000)}m"


def resources(need: Resources) -> Object:
    """Requests and limits alike: what a pod is promised is what it gets, and what its threads are counted by."""
    amounts = {"cpu": cores(need.cpus), "memory": quantity(need.memory)}
    return {"requests": dict(amounts), "limits": dict(amounts)}


# pods


def container_security() -> Object:
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def pod_security(site: Site) -> Object:
    user, group = site.settings.user, site.settings.group
    return {
        "runAsNonRoot": True,
        "runAsUser": user,
        "runAsGroup": group,
        "fsGroup": group,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def container(
    site: Site,
    name: str,
    command: Sequence[str],
    need: Resources,
    *,
    image: str | None = None,
    data: bool = False,
    runs: Literal["read", "write", "none"] = "write",
    env: Sequence[Object] = (),
    mounts: Sequence[Object] = (),
    **more: Any,
) -> Object:
    """A container that runs a command of ours; the train image unless another is named. `more` are further fields."""
    return {
        "name": name,
        "image": image or site.settings.image.train,
        "imagePullPolicy": site.settings.image.pull_policy,
        "command": list(command),
        # Any user id may be set, also one that the image has no home for.
        "env": [{"name": "HOME", "value": "/tmp"}, {"name": "USER", "value": "recmill"}, *env],
        "resources": resources(need),
        "securityContext": container_security(),
        "volumeMounts": [*_mounts(site, data, runs), *mounts],
        **more,
    }


def _mounts(site: Site, data: bool, runs: str) -> list[Object]:
    found: list[Object] = [{"name": _TMP_VOLUME, "mountPath": "/tmp"}]
    if data:
        found.append({"name": _DATA_VOLUME, "mountPath": DATA, "readOnly": True})
    if runs != "none":
        found.append(
            {"name": _RUNS_VOLUME, "mountPath": RUNS, **({"readOnly": True} if runs == "read" else {})}
        )
    if not site.is_shipped:
        found.append({"name": _RECIPE_VOLUME, "mountPath": RECIPE_FOLDER, "readOnly": True})
    return found


def volumes(site: Site, *, data: bool = True, runs: bool = True, recipe: bool = True) -> list[Object]:
    """Volumes of a pod, for the mounts that `container` makes. An overlay says which storage is behind a claim."""
    found: list[Object] = [{"name": _TMP_VOLUME, "emptyDir": {"sizeLimit": "2Gi"}}]
    if data:
        found.append(
            {"name": _DATA_VOLUME, "persistentVolumeClaim": {"claimName": site.data_claim, "readOnly": True}}
        )
    if runs:
        found.append({"name": _RUNS_VOLUME, "persistentVolumeClaim": {"claimName": site.runs_claim}})
    if recipe and not site.is_shipped:
        found.append({"name": _RECIPE_VOLUME, "configMap": {"name": f"{site.name}-recipe"}})
    return found


def pod_spec(
    site: Site,
    containers: Sequence[Object],
    *,
    init_containers: Sequence[Object] = (),
    volumes: Sequence[Object],
    restart_policy: Literal["Always", "OnFailure", "Never"] | None = None,
    **more: Any,
) -> Object:
    """A pod that is nobody special: not root, no token of the cluster, no way to the host. `more`: further fields."""
    spec: Object = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": pod_security(site),
        "terminationGracePeriodSeconds": GRACE_SECONDS,
    }
    if restart_policy:
        spec["restartPolicy"] = restart_policy
    if site.settings.image.pull_secret:
        spec["imagePullSecrets"] = [{"name": site.settings.image.pull_secret}]
    if init_containers:
        spec["initContainers"] = list(init_containers)
    return {**spec, "containers": list(containers), "volumes": list(volumes), **more}


def pod_template(
    site: Site, component: str, spec: Object, annotations: Mapping[str, str] | None = None
) -> Object:
    metadata: Object = {"labels": site.labels(component)}
    if annotations:
        metadata["annotations"] = dict(annotations)
    return {"metadata": metadata, "spec": spec}


# storage and kustomizations


def claims(site: Site, kind: Literal["pvc", "nfs"]) -> list[Object]:
    """The claims that pods mount, and for NFS the volumes behind them. A claim that is there already is left alone."""
    wanted = [(site.runs_claim, "runs", site.sizing.runs_bytes)]
    if not site.settings.data.claim:
        wanted.append((site.data_claim, "data", site.sizing.log_bytes))
    if kind == "pvc":
        return [_claim(site, name, num_bytes) for name, _, num_bytes in wanted]
    return [made for name, folder, num_bytes in wanted for made in _nfs(site, name, folder, num_bytes)]


def _claim(site: Site, name: str, num_bytes: int) -> Object:
    storage = site.settings.storage
    named = {"storageClassName": storage.class_name} if storage.class_name else {}
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": site.metadata("storage", name),
        "spec": {
            "accessModes": [storage.access],
            **named,
            "resources": {"requests": {"storage": quantity(num_bytes)}},
        },
    }


def _nfs(site: Site, name: str, folder: str, num_bytes: int) -> list[Object]:
    """A volume of the cluster and a claim that can only be bound to it."""
    namespace, nfs = site.settings.namespace, site.settings.storage.nfs
    volume_name = f"{namespace}-{name}"
    volume: Object = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": site.metadata("storage", volume_name),
        "spec": {
            "capacity": {"storage": quantity(num_bytes)},
            "accessModes": ["ReadWriteMany"],
            "persistentVolumeReclaimPolicy": "Retain",
            "storageClassName": "",
            "claimRef": {
                "apiVersion": "v1",
                "kind": "PersistentVolumeClaim",
                "namespace": namespace,
                "name": name,
            },
            "nfs": {"server": nfs.server, "path": f"{nfs.path.rstrip('/')}/{folder}"},
        },
    }
    claim = _claim(site, name, num_bytes)
    claim["spec"] |= {"accessModes": ["ReadWriteMany"], "storageClassName": "", "volumeName": volume_name}
    return [volume, claim]


def kustomization(site: Site, resources: Sequence[str], **more: Any) -> str:
    """A kustomization.yaml; `more` are further fields, such as patches."""
    return dumps(
        [
            {
                "apiVersion": "kustomize.config.k8s.io/v1beta1",
                "kind": "Kustomization",
                "namespace": site.settings.namespace,
                "resources": list(resources),
                **more,
            }
        ]
    )


def storage_overlays(site: Site) -> Files:
    """overlays/pvc and overlays/nfs: the base, and the claims that it mounts. Neither knows the other."""
    files: Files = {}
    kinds: tuple[Literal["pvc", "nfs"], ...] = ("pvc", "nfs")
    for kind in kinds:
        files[f"overlays/{kind}/kustomization.yaml"] = kustomization(site, ["../../base", "claims.yaml"])
        files[f"overlays/{kind}/claims.yaml"] = dumps(claims(site, kind))
    return files
