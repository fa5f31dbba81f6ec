"""spark: a SparkApplication that prepares, and the same for plain spark-submit on Kubernetes.

For the Spark operator 2.1 or later, which hands pod templates to Spark. The train image must have Spark in it.
"""

from __future__ import annotations

import shlex
from typing import Any

from recmill.recipe.recipe import Recipe
from recmill.stages.deploy.parts import (
    TABLE,
    Files,
    Object,
    Site,
    container,
    pod_spec,
    pod_template,
    volumes,
)
from recmill.stages.deploy.settings import DeployConfig, DeployError, number_of
from recmill.stages.deploy.sizing import GB, MB, Resources, smallest_bound
from recmill.stages.deploy.stages import base, check_shared_storage, overlays
from recmill.stages.deploy.yaml import dumps

MASTER = "k8s://https://kubernetes.default.svc"  # of a driver that is inside the cluster
PROGRAM_FOLDER = "/etc/recmill-spark"
KEPT_SECONDS = 7 * 86_400

_PROGRAM = """\
import sys

from recmill.cli import main

sys.exit(main())
"""
_POD_COMMAND = ("python", "-m", "recmill.stages.deploy.spark_pod")
_JAVA_BYTES = GB  # rows pass through Java as small pieces; tasks hold their memory in Python
_DRIVER_CPUS = 1
_RETRY_SECONDS = 30


def render(recipe: Recipe, settings: DeployConfig) -> Files:
    """base/prepare: the application, and what it may do; overlays: with storage; submit: without the operator."""
    site = Site.of(recipe, settings)
    _check(site)
    check_shared_storage(site)
    beside = {
        "program.yaml": [program(site), *site.recipe_objects()],
        "rights.yaml": rights(site),
        "network.yaml": [network_policy(site)],
    }
    return {
        **base(site, "rights", beside),
        **base(site, "prepare", {"application.yaml": [application(site)]}, beside=["rights"]),
        **overlays(site, ["prepare"]),
        **_submit(site),
    }


def _check(site: Site) -> None:
    found = []
    asked, least = site.settings.spark, _pod_memory(site, executor_tasks(site), smallest_bound())
    for name, memory, needed in (
        ("spark.executor_memory", asked.executor_memory, least),
        ("spark.driver_memory", asked.driver_memory, _pod_memory(site, 1, smallest_bound())),
    ):
        if memory and number_of(memory) < needed:
            found.append(f"{name} must be at least {-(-needed // MB)}Mi for this recipe, got {memory}")
    if found:
        raise DeployError("--set", found)


# what pods are given


def executor_tasks(site: Site) -> int:
    return site.settings.spark.executor_cpus


def task_memory(site: Site) -> int:
    """--memory of `recmill prepare`: of the driver and of each task. What pods are set to have bounds it."""
    asked, tasks = site.settings.spark, executor_tasks(site)
    bounds = [max(smallest_bound(), site.sizing.prepare_bound // tasks)]
    if asked.executor_memory:
        bounds = [_task_share(site, asked.executor_memory, tasks)]
    if asked.driver_memory:
        bounds.append(_task_share(site, asked.driver_memory, 1))
    return min(bounds)


def _task_share(site: Site, memory: str, tasks: int) -> int:
    return (int(number_of(memory)) - _JAVA_BYTES) // tasks - site.sizing.prepare_fixed


def _pod_memory(site: Site, tasks: int, bound: int) -> int:
    """Java, and for each task Python with its vocabularies and its bound."""
    return _JAVA_BYTES + tasks * (site.sizing.prepare_fixed + bound)


def _memory(site: Site, tasks: int, asked: str | None) -> Object:
    whole = int(number_of(asked)) if asked else _pod_memory(site, tasks, task_memory(site))
    return {"memory": f"{_JAVA_BYTES // MB}m", "memoryOverhead": f"{(whole - _JAVA_BYTES) // MB}m"}


def _executor_memory(site: Site) -> Object:
    return _memory(site, executor_tasks(site), site.settings.spark.executor_memory)


# objects


def application(site: Site) -> Object:
    """The operator's way: it submits, watches and tries again; a new driver goes on with what is finished."""
    asked = site.settings.spark
    secret = site.settings.image.pull_secret
    driver = {
        "cores": _DRIVER_CPUS,
        "coreLimit": str(_DRIVER_CPUS),
        **_memory(site, 1, asked.driver_memory),
        "serviceAccount": asked.service_account,
        "template": driver_pod(site),
    }
    executor = {
        "cores": asked.executor_cpus,
        "coreLimit": str(asked.executor_cpus),
        **_executor_memory(site),
        "template": executor_pod(site),
    }
    return {
        "apiVersion": "sparkoperator.k8s.io/v1beta2",
        "kind": "SparkApplication",
        "metadata": site.metadata("spark-prepare"),
        "spec": {
            "type": "Python",
            "pythonVersion": "3",
            "mode": "cluster",
            "sparkVersion": asked.version,
            "image": site.settings.image.train,
            "imagePullPolicy": site.settings.image.pull_policy,
            **({"imagePullSecrets": [secret]} if secret else {}),
            "mainApplicationFile": f"local://{PROGRAM_FOLDER}/main.py",
            "arguments": arguments(site),
            "sparkConf": spark_conf(site),
            "dynamicAllocation": {
                "enabled": True,
                "initialExecutors": 1,
                "minExecutors": 1,
                "maxExecutors": asked.executors,
            },
            "restartPolicy": {
                "type": "OnFailure",
                "onFailureRetries": site.settings.retry_limit,
                "onFailureRetryInterval": _RETRY_SECONDS,
                "onSubmissionFailureRetries": site.settings.retry_limit,
                "onSubmissionFailureRetryInterval": _RETRY_SECONDS,
            },
            "timeToLiveSeconds": KEPT_SECONDS,
            "driver": driver,
            "executor": executor,
        },
    }


def arguments(site: Site) -> list[str]:
    """Of recmill. Memory of executors is said again, because the engine would compute it without their programs."""
    command = ["prepare", site.recipe_argument, "--data", site.data_path, "--into", TABLE]
    command += ["--engine", "spark", "--address", MASTER, "--memory", f"{task_memory(site) // MB}MB"]
    overhead = _executor_memory(site)["memoryOverhead"]
    return [*command, "--spark-conf", f"spark.executor.memoryOverhead={overhead}"]


def spark_conf(site: Site) -> dict[str, str]:
    """What both ways of submitting share."""
    asked = site.settings.spark
    return {
        # Executors come and go; the log is cut for as many as there may be.
        "spark.default.parallelism": str(asked.executors * asked.executor_cpus),
        "spark.dynamicAllocation.shuffleTracking.enabled": "true",
        "spark.authenticate": "true",
        "spark.network.crypto.enabled": "true",
        "spark.ui.killEnabled": "false",
    }


def driver_pod(site: Site) -> Object:
    """The driver asks Kubernetes for executors, so that it has its service account's token."""
    return _pod(site, "spark-kubernetes-driver", automountServiceAccountToken=True)


def executor_pod(site: Site) -> Object:
    return _pod(site, "spark-kubernetes-executor")


def _pod(site: Site, name: str, **more: Any) -> Object:
    """What Spark starts from; it adds image, resources, arguments and environment."""
    mount = {"name": "program", "mountPath": PROGRAM_FOLDER, "readOnly": True}
    made = container(site, name, _POD_COMMAND, Resources(1, GB), data=True, mounts=[mount], workingDir="/tmp")
    del made["resources"]
    program_volume = {"name": "program", "configMap": {"name": _program_name(site)}}
    spec = pod_spec(site, [made], volumes=[*volumes(site), program_volume], **more)
    return pod_template(site, "spark-prepare", spec)


def _program_name(site: Site) -> str:
    return f"{site.name}-spark-program"


def program(site: Site) -> Object:
    """Spark takes a file for its program, wherever the image has recmill."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": site.metadata("spark-prepare", _program_name(site)),
        "data": {"main.py": _PROGRAM},
    }


def rights(site: Site) -> list[Object]:
    """What a driver may do in its namespace: make executors and what they are told by."""
    name = site.settings.spark.service_account
    metadata = site.metadata("spark-prepare", name)
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name}
    verbs = ["get", "list", "watch", "create", "update", "patch", "delete", "deletecollection"]
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata},
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "Role",
            "metadata": metadata,
            "rules": [
                {
                    "apiGroups": [""],
                    "resources": ["pods", "services", "configmaps", "persistentvolumeclaims"],
                    "verbs": verbs,
                }
            ],
        },
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "RoleBinding",
            "metadata": metadata,
            "roleRef": role,
            "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": site.settings.namespace}],
        },
    ]


def network_policy(site: Site) -> Object:
    """Driver and executors talk with each other, and nobody with them."""
    ours = {"matchLabels": site.selector("spark-prepare")}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": site.metadata("spark-prepare"),
        "spec": {
            "podSelector": ours,
            "policyTypes": ["Ingress"],
            "ingress": [{"from": [{"podSelector": ours}]}],
        },
    }


# without the operator


def _submit(site: Site) -> Files:
    pods = {"driver.yaml": driver_pod(site), "executor.yaml": executor_pod(site)}
    return {
        "submit/submit.sh": submit_script(site),
        "submit/spark.conf": "".join(f"{key} {value}\n" for key, value in submit_conf(site).items()),
        **{
            f"submit/{name}": dumps([{"apiVersion": "v1", "kind": "Pod", **template}])
            for name, template in pods.items()
        },
    }


def submit_conf(site: Site) -> dict[str, str]:
    """What the operator would make of the application."""
    asked, image = site.settings.spark, site.settings.image
    driver, executor = _memory(site, 1, asked.driver_memory), _executor_memory(site)
    found = {
        "spark.app.name": f"{site.name}-spark-prepare",
        "spark.kubernetes.namespace": site.settings.namespace,
        "spark.kubernetes.container.image": image.train,
        "spark.kubernetes.container.image.pullPolicy": image.pull_policy,
        "spark.kubernetes.authenticate.driver.serviceAccountName": asked.service_account,
        "spark.kubernetes.driver.podTemplateFile": "driver.yaml",
        "spark.kubernetes.executor.podTemplateFile": "executor.yaml",
        "spark.kubernetes.driver.limit.cores": str(_DRIVER_CPUS),
        "spark.kubernetes.executor.limit.cores": str(asked.executor_cpus),
        "spark.driver.cores": str(_DRIVER_CPUS),
        "spark.driver.memory": driver["memory"],
        "spark.driver.memoryOverhead": driver["memoryOverhead"],
        "spark.executor.cores": str(asked.executor_cpus),
        "spark.executor.memory": executor["memory"],
        "spark.executor.memoryOverhead": executor["memoryOverhead"],
        "spark.dynamicAllocation.enabled": "true",
        "spark.dynamicAllocation.initialExecutors": "1",
        "spark.dynamicAllocation.minExecutors": "1",
        "spark.dynamicAllocation.maxExecutors": str(asked.executors),
        **spark_conf(site),
    }
    if image.pull_secret:
        found["spark.kubernetes.container.image.pullSecrets"] = image.pull_secret
    return found


def submit_script(site: Site) -> str:
    words = shlex.join([f"local://{PROGRAM_FOLDER}/main.py", *arguments(site)])
    return f"""\
#!/bin/sh
# Submits without the Spark operator: KUBERNETES_API=https://HOST:PORT sh submit.sh
# The API server's address: kubectl config view --minify --output jsonpath='{{.clusters[0].cluster.server}}'
cd "$(dirname "$0")" || exit 1
exec spark-submit --master "k8s://${{KUBERNETES_API:?is missing}}" --deploy-mode cluster --properties-file spark.conf \\
  {words}
"""
