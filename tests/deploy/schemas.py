"""Strict schemas of kinds that operators add to Kubernetes: a field that is not listed here is an error.

Fields are those of the operators' own definitions, as far as we may want them: Argo Workflows 3.6 to 4, KubeRay 1.4 and
later, Prometheus operator 0.7x and later, Spark operator 2. Pods and their parts are Kubernetes' own definitions.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}
NUMBER: Schema = {"type": "number"}
WHOLE: Schema = {"type": "integer", "minimum": 0}
POSITIVE: Schema = {"type": "integer", "minimum": 1}
WHOLE_OR_TEXT: Schema = {"type": ["integer", "string"]}
LABELS: Schema = {"type": "object", "additionalProperties": TEXT}


def record(required: str = "", **fields: Schema) -> Schema:
    """An object with these fields and no others."""
    assert set(required.split()) <= fields.keys()
    return {
        "type": "object",
        "properties": fields,
        "required": required.split(),
        "additionalProperties": False,
    }


def listed(item: Schema, at_least: int = 0) -> Schema:
    return {"type": "array", "items": item, "minItems": at_least}


def one_of(*values: str) -> Schema:
    return {"enum": list(values)}


def kubernetes(name: str) -> Schema:
    """A definition of Kubernetes, strict too."""
    return {"$ref": f"https://kubernetes.io/api/_definitions.json#/$defs/io.k8s.{name}"}


def kind(api_version: str, name: str, spec: Schema) -> tuple[tuple[str, str], Schema]:
    whole = record(
        "apiVersion kind metadata spec",
        apiVersion={"const": api_version},
        kind={"const": name},
        metadata=kubernetes("apimachinery.pkg.apis.meta.v1.ObjectMeta"),
        spec=spec,
    )
    return (api_version, name), whole


CONTAINER = kubernetes("api.core.v1.Container")
POD_TEMPLATE = kubernetes("api.core.v1.PodTemplateSpec")
ENV = listed(kubernetes("api.core.v1.EnvVar"))
ENV_FROM = listed(kubernetes("api.core.v1.EnvFromSource"))
MOUNTS = listed(kubernetes("api.core.v1.VolumeMount"))
VOLUMES = listed(kubernetes("api.core.v1.Volume"))
RESOURCES = kubernetes("api.core.v1.ResourceRequirements")
SECURITY = kubernetes("api.core.v1.SecurityContext")
POD_SECURITY = kubernetes("api.core.v1.PodSecurityContext")
AFFINITY = kubernetes("api.core.v1.Affinity")
TOLERATIONS = listed(kubernetes("api.core.v1.Toleration"))
PULL_SECRETS = listed(kubernetes("api.core.v1.LocalObjectReference"))
PULL_POLICY = one_of("Always", "IfNotPresent", "Never")
SECRET_KEY = kubernetes("api.core.v1.SecretKeySelector")
CONFIG_MAP_KEY = kubernetes("api.core.v1.ConfigMapKeySelector")


# Argo Workflows

VALUE_FROM = record(
    configMapKeyRef=CONFIG_MAP_KEY,
    default=TEXT,
    expression=TEXT,
    jqFilter=TEXT,
    jsonPath=TEXT,
    parameter=TEXT,
    path=TEXT,
    supplied=record(),
)
PARAMETERS = listed(
    record(
        "name",
        name=TEXT,
        value=TEXT,
        default=TEXT,
        description=TEXT,
        enum=listed(TEXT),
        globalName=TEXT,
        valueFrom=VALUE_FROM,
    )
)
ARGUMENTS = record(parameters=PARAMETERS)
TEMPLATE_REF = record("name template", name=TEXT, template=TEXT, clusterScope=FLAG)
HOOKS: Schema = {
    "type": "object",
    "additionalProperties": record(
        arguments=ARGUMENTS, expression=TEXT, template=TEXT, templateRef=TEMPLATE_REF
    ),
}
RETRY = record(
    limit=WHOLE_OR_TEXT,
    retryPolicy=one_of("Always", "OnFailure", "OnError", "OnTransientError"),
    expression=TEXT,
    backoff=record(duration=TEXT, factor=WHOLE_OR_TEXT, maxDuration=TEXT, cap=TEXT),
    affinity=record(nodeAntiAffinity=record()),
)
SYNCHRONIZATION = record(
    mutexes=listed(record("name", name=TEXT, namespace=TEXT, database=FLAG)),
    semaphores=listed(record(configMapKeyRef=CONFIG_MAP_KEY, namespace=TEXT)),
)
POD_METADATA = record(annotations=LABELS, labels=LABELS)
_CALL = {
    "template": TEXT,
    "templateRef": TEMPLATE_REF,
    "arguments": ARGUMENTS,
    "when": TEXT,
    "continueOn": record(error=FLAG, failed=FLAG),
    "hooks": HOOKS,
    "withItems": {"type": "array"},
    "withParam": TEXT,
    "withSequence": record(count=WHOLE_OR_TEXT, start=WHOLE_OR_TEXT, end=WHOLE_OR_TEXT, format=TEXT),
}
STEP = record("name", name=TEXT, **_CALL)
TASK = record("name", name=TEXT, depends=TEXT, dependencies=listed(TEXT), **_CALL)
_CONTAINER_FIELDS = {
    "name": TEXT,
    "image": TEXT,
    "imagePullPolicy": PULL_POLICY,
    "command": listed(TEXT, 1),
    "args": listed(TEXT),
    "env": ENV,
    "envFrom": ENV_FROM,
    "lifecycle": kubernetes("api.core.v1.Lifecycle"),
    "ports": listed(kubernetes("api.core.v1.ContainerPort")),
    "resources": RESOURCES,
    "securityContext": SECURITY,
    "terminationMessagePath": TEXT,
    "terminationMessagePolicy": one_of("File", "FallbackToLogsOnError"),
    "volumeMounts": MOUNTS,
    "workingDir": TEXT,
}
SUSPEND = record(duration=TEXT)
RESOURCE = record(
    "action",
    action=one_of("get", "create", "apply", "delete", "replace", "patch"),
    manifest=TEXT,
    mergeStrategy=one_of("strategic", "merge", "json"),
    setOwnerReference=FLAG,
    successCondition=TEXT,
    failureCondition=TEXT,
    flags=listed(TEXT),
)
_WORK: dict[str, Schema] = {
    # Argo names the container "main" when it has no name.
    "container": record("image command", **_CONTAINER_FIELDS),
    "script": record("image command source", source=TEXT, **_CONTAINER_FIELDS),
    "dag": record("tasks", tasks=listed(TASK, 1), target=TEXT, failFast=FLAG),
    "steps": listed(listed(STEP, 1), 1),
    "resource": RESOURCE,
    "suspend": SUSPEND,
}
_TEMPLATE_FIELDS: dict[str, Schema] = {
    "activeDeadlineSeconds": WHOLE_OR_TEXT,
    "affinity": AFFINITY,
    "automountServiceAccountToken": FLAG,
    "daemon": FLAG,
    "executor": record(serviceAccountName=TEXT),
    "failFast": FLAG,
    "initContainers": listed(CONTAINER),
    "inputs": record(parameters=PARAMETERS),
    "metadata": POD_METADATA,
    "nodeSelector": LABELS,
    "outputs": record(parameters=PARAMETERS, exitCode=TEXT, result=TEXT),
    "parallelism": POSITIVE,
    "podSpecPatch": TEXT,
    "priorityClassName": TEXT,
    "retryStrategy": RETRY,
    "securityContext": POD_SECURITY,
    "serviceAccountName": TEXT,
    "sidecars": listed(CONTAINER),
    "synchronization": SYNCHRONIZATION,
    "timeout": TEXT,
    "tolerations": TOLERATIONS,
    "volumes": VOLUMES,
}
TEMPLATE = record("name", name=TEXT, **_TEMPLATE_FIELDS, **_WORK) | {
    "oneOf": [{"required": [work]} for work in _WORK]
}
TEMPLATE_DEFAULTS = record(**_TEMPLATE_FIELDS, container=record(**_CONTAINER_FIELDS))
WORKFLOW_SPEC = record(
    activeDeadlineSeconds=POSITIVE,
    affinity=AFFINITY,
    archiveLogs=FLAG,
    arguments=ARGUMENTS,
    automountServiceAccountToken=FLAG,
    entrypoint=TEXT,
    executor=record(serviceAccountName=TEXT),
    hooks=HOOKS,
    imagePullSecrets=PULL_SECRETS,
    nodeSelector=LABELS,
    onExit=TEXT,
    parallelism=POSITIVE,
    podDisruptionBudget=kubernetes("api.policy.v1.PodDisruptionBudgetSpec"),
    podGC=record(
        strategy=one_of("OnPodCompletion", "OnPodSuccess", "OnWorkflowCompletion", "OnWorkflowSuccess"),
        deleteDelayDuration=TEXT,
        labelSelector=kubernetes("apimachinery.pkg.apis.meta.v1.LabelSelector"),
    ),
    podMetadata=POD_METADATA,
    podPriorityClassName=TEXT,
    podSpecPatch=TEXT,
    priority={"type": "integer"},
    retryStrategy=RETRY,
    securityContext=POD_SECURITY,
    serviceAccountName=TEXT,
    shutdown=one_of("Stop", "Terminate"),
    suspend=FLAG,
    synchronization=SYNCHRONIZATION,
    templateDefaults=TEMPLATE_DEFAULTS,
    templates=listed(TEMPLATE, 1),
    tolerations=TOLERATIONS,
    ttlStrategy=record(secondsAfterCompletion=WHOLE, secondsAfterFailure=WHOLE, secondsAfterSuccess=WHOLE),
    volumeClaimGC=record(strategy=one_of("OnWorkflowCompletion", "OnWorkflowSuccess")),
    volumeClaimTemplates=listed(kubernetes("api.core.v1.PersistentVolumeClaim")),
    volumes=VOLUMES,
    workflowMetadata=POD_METADATA,
    workflowTemplateRef=record("name", name=TEXT, clusterScope=FLAG),
)
_RUNS_ITSELF = {"required": ["entrypoint", "templates"]}
_RUNS_A_TEMPLATE = {"required": ["workflowTemplateRef"], "properties": {"templates": False}}
RUN_SPEC = WORKFLOW_SPEC | {"oneOf": [_RUNS_ITSELF, _RUNS_A_TEMPLATE]}
CRON_SPEC = record(
    "schedules workflowSpec",
    schedules=listed(TEXT, 1),
    workflowSpec=RUN_SPEC,
    concurrencyPolicy=one_of("Allow", "Forbid", "Replace"),
    failedJobsHistoryLimit=WHOLE,
    successfulJobsHistoryLimit=WHOLE,
    startingDeadlineSeconds=WHOLE,
    stopStrategy=record("expression", expression=TEXT),
    suspend=FLAG,
    timezone=TEXT,
    when=TEXT,
    workflowMetadata=POD_METADATA,
)


# KubeRay

_GROUP: dict[str, Schema] = {
    "rayStartParams": LABELS,
    "template": POD_TEMPLATE,
    "resources": LABELS,
    "labels": LABELS,
}
HEAD = record(
    "rayStartParams template",
    serviceType=one_of("ClusterIP", "NodePort", "LoadBalancer"),
    enableIngress=FLAG,
    **_GROUP,
)
WORKERS = record(
    "groupName minReplicas maxReplicas rayStartParams template",
    groupName=TEXT,
    replicas=WHOLE,
    minReplicas=WHOLE,
    maxReplicas=POSITIVE,
    numOfHosts=POSITIVE,
    idleTimeoutSeconds=WHOLE,
    suspend=FLAG,
    **_GROUP,
)
RAY_CLUSTER_SPEC = record(
    "headGroupSpec rayVersion",
    headGroupSpec=HEAD,
    workerGroupSpecs=listed(WORKERS),
    rayVersion=TEXT,
    enableInTreeAutoscaling=FLAG,
    autoscalerOptions=record(
        version=one_of("v1", "v2"),
        idleTimeoutSeconds=WHOLE,
        upscalingMode=one_of("Default", "Aggressive", "Conservative"),
        image=TEXT,
        imagePullPolicy=PULL_POLICY,
        resources=RESOURCES,
        securityContext=SECURITY,
        env=ENV,
        envFrom=ENV_FROM,
        volumeMounts=MOUNTS,
    ),
    authOptions=record(mode=one_of("disabled", "token"), secretName=TEXT),
    headServiceAnnotations=LABELS,
    managedBy=TEXT,
    suspend=FLAG,
    upgradeStrategy=record(type=one_of("Recreate", "None")),
)
RAY_JOB_SPEC = record(
    "entrypoint",
    entrypoint=TEXT,
    rayClusterSpec=RAY_CLUSTER_SPEC,
    clusterSelector=LABELS,
    activeDeadlineSeconds=POSITIVE,
    backoffLimit=WHOLE,
    entrypointNumCpus=NUMBER,
    entrypointNumGpus=NUMBER,
    entrypointResources=TEXT,
    jobId=TEXT,
    managedBy=TEXT,
    metadata=LABELS,
    runtimeEnvYAML=TEXT,
    shutdownAfterJobFinishes=FLAG,
    submissionMode=one_of("K8sJobMode", "HTTPMode", "InteractiveMode"),
    submitterConfig=record(backoffLimit=WHOLE),
    submitterPodTemplate=POD_TEMPLATE,
    suspend=FLAG,
    ttlSecondsAfterFinished=WHOLE,
) | {"oneOf": [{"required": ["rayClusterSpec"]}, {"required": ["clusterSelector"]}]}


# Prometheus operator

_KEY = record(secret=SECRET_KEY, configMap=CONFIG_MAP_KEY)
RELABELINGS = listed(
    record(
        action=TEXT,
        sourceLabels=listed(TEXT),
        targetLabel=TEXT,
        regex=TEXT,
        replacement=TEXT,
        separator=TEXT,
        modulus=WHOLE,
    )
)
ENDPOINT = record(
    port=TEXT,
    targetPort=WHOLE_OR_TEXT,
    path=TEXT,
    scheme=one_of("http", "https"),
    interval=TEXT,
    scrapeTimeout=TEXT,
    authorization=record(type=TEXT, credentials=SECRET_KEY),
    tlsConfig=record(ca=_KEY, cert=_KEY, keySecret=SECRET_KEY, serverName=TEXT, insecureSkipVerify=FLAG),
    params={"type": "object", "additionalProperties": listed(TEXT)},
    honorLabels=FLAG,
    honorTimestamps=FLAG,
    filterRunning=FLAG,
    followRedirects=FLAG,
    enableHttp2=FLAG,
    relabelings=RELABELINGS,
    metricRelabelings=RELABELINGS,
)
SERVICE_MONITOR_SPEC = record(
    "endpoints selector",
    endpoints=listed(ENDPOINT, 1),
    selector=kubernetes("apimachinery.pkg.apis.meta.v1.LabelSelector"),
    namespaceSelector=record(any=FLAG, matchNames=listed(TEXT)),
    jobLabel=TEXT,
    targetLabels=listed(TEXT),
    podTargetLabels=listed(TEXT),
    sampleLimit=WHOLE,
    targetLimit=WHOLE,
    labelLimit=WHOLE,
)


# Spark operator

_SPARK_POD: dict[str, Schema] = {
    "cores": POSITIVE,
    "coreRequest": TEXT,
    "coreLimit": TEXT,
    "memory": TEXT,
    "memoryOverhead": TEXT,
    "template": POD_TEMPLATE,
    "image": TEXT,
    "configMaps": listed(record("name path", name=TEXT, path=TEXT)),
    "env": ENV,
    "envFrom": ENV_FROM,
    "labels": LABELS,
    "annotations": LABELS,
    "volumeMounts": MOUNTS,
    "affinity": AFFINITY,
    "tolerations": TOLERATIONS,
    "nodeSelector": LABELS,
    "podSecurityContext": POD_SECURITY,
    "securityContext": SECURITY,
    "initContainers": listed(CONTAINER),
    "sidecars": listed(CONTAINER),
    "terminationGracePeriodSeconds": WHOLE,
    "serviceAccount": TEXT,
    "priorityClassName": TEXT,
    "javaOptions": TEXT,
    "lifecycle": kubernetes("api.core.v1.Lifecycle"),
}
SPARK_SPEC = record(
    "type sparkVersion mode image mainApplicationFile driver executor",
    type=one_of("Java", "Python", "Scala", "R"),
    sparkVersion=TEXT,
    mode=one_of("cluster", "client"),
    image=TEXT,
    imagePullPolicy=PULL_POLICY,
    imagePullSecrets=listed(TEXT),
    mainApplicationFile=TEXT,
    arguments=listed(TEXT),
    sparkConf=LABELS,
    hadoopConf=LABELS,
    pythonVersion=one_of("2", "3"),
    memoryOverheadFactor=TEXT,
    volumes=VOLUMES,
    driver=record(serviceAnnotations=LABELS, serviceLabels=LABELS, **_SPARK_POD),
    executor=record(instances=POSITIVE, deleteOnTermination=FLAG, **_SPARK_POD),
    dynamicAllocation=record(
        enabled=FLAG,
        initialExecutors=WHOLE,
        minExecutors=WHOLE,
        maxExecutors=POSITIVE,
        shuffleTrackingTimeout=WHOLE,
    ),
    restartPolicy=record(
        type=one_of("Never", "OnFailure", "Always"),
        onFailureRetries=WHOLE,
        onFailureRetryInterval=POSITIVE,
        onSubmissionFailureRetries=WHOLE,
        onSubmissionFailureRetryInterval=POSITIVE,
    ),
    timeToLiveSeconds=POSITIVE,
    nodeSelector=LABELS,
)


ARGO = "argoproj.io/v1alpha1"
SCHEMAS: dict[tuple[str, str], Schema] = dict(
    [
        kind(ARGO, "Workflow", RUN_SPEC),
        kind(ARGO, "WorkflowTemplate", WORKFLOW_SPEC),
        kind(ARGO, "CronWorkflow", CRON_SPEC),
        kind("ray.io/v1", "RayCluster", RAY_CLUSTER_SPEC),
        kind("ray.io/v1", "RayJob", RAY_JOB_SPEC),
        kind("monitoring.coreos.com/v1", "ServiceMonitor", SERVICE_MONITOR_SPEC),
        kind("sparkoperator.k8s.io/v1beta2", "SparkApplication", SPARK_SPEC),
    ]
)
