"""What can be set with `recmill deploy --set key=value`. What Kubernetes would refuse is refused here, with its key."""

from __future__ import annotations

import dataclasses
import json
import re
import tomllib
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from recmill import __version__
from recmill.errors import RecmillError
from recmill.recipe.convert import Problems, Reader
from recmill.recipe.numbers import AboveZero, Bounds, Positive, Whole

EXAMPLE_SERVER = "nfs.example.com"
STORAGE = ("pvc", "nfs", "hostpath")  # each is an overlay
MAX_NAME = 40  # leaves room for what is added to it: 63 characters are the most that a Service may have


class DeployError(RecmillError):
    """Every problem found in what is to be deployed, each with its key path."""

    exit_code = 2

    def __init__(self, source: str, problems: Sequence[str]) -> None:
        self.source = source
        self.problems = tuple(problems)
        super().__init__("\n".join(f"{source}: {problem}" for problem in self.problems))

    def __reduce__(self) -> tuple[type[DeployError], tuple[str, tuple[str, ...]]]:
        return type(self), (self.source, self.problems)


# what text fits


def _like(pattern: str, longest: int = 253) -> Callable[[Any], bool]:
    compiled = re.compile(pattern, re.ASCII)
    return lambda text: len(text) <= longest and compiled.fullmatch(text) is not None


_LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_HOST = rf"{_LABEL}(\.{_LABEL})*"
_DIGEST = r"@sha256:[0-9a-f]{64}"
_TAGGED = rf"({_HOST}(:\d+)?/)?[a-z0-9._/-]*[a-z0-9](:\w[\w.-]{{0,127}}({_DIGEST})?|{_DIGEST})"
_PATH = "A-Za-z0-9._/@+=~%-"  # characters that mean nothing to shells and to templates
_PATH_WORDS = "letters, digits and . _ / @ + = ~ % -"
FOLDER = f"/[{_PATH}]*"
# What Argo, Helm, Kubernetes or Docker would put something else in place of, and what breaks a line.
_TEMPLATE = re.compile(r"\{\{|\}\}|\$[({]|[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_QUANTITY = re.compile(r"(\d{1,15}(?:\.\d{1,6})?)(m|k|M|G|T|Ki|Mi|Gi|Ti)?", re.ASCII)
_UNITS = {"m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12} | {
    unit: 2.0 ** (10 * power) for power, unit in enumerate(("", "Ki", "Mi", "Gi", "Ti"))
}
_MONTHS = ("JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC")
_WEEKDAYS = ("SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT")
_CRON_FIELDS: tuple[tuple[int, int, tuple[str, ...]], ...] = (
    (0, 59, ()),
    (0, 23, ()),
    (1, 31, ()),
    (1, 12, _MONTHS),
    (0, 6, _WEEKDAYS),
)


def number_of(quantity: str) -> float:
    """A quantity of Kubernetes as a number: 500m is 0.5, 2Gi is 2147483648."""
    match = _QUANTITY.fullmatch(quantity)
    assert match is not None, quantity
    return float(match[1]) * _UNITS[match[2] or ""]


def _is_cpus(text: Any) -> bool:
    match = _QUANTITY.fullmatch(text)
    return match is not None and match[2] in (None, "m") and number_of(text) >= 0.001


def _is_memory(text: Any) -> bool:
    match = _QUANTITY.fullmatch(text)
    return match is not None and match[2] != "m" and number_of(text) >= 1


def _is_cron(text: Any) -> bool:
    parts = text.split(" ")
    return len(parts) == len(_CRON_FIELDS) and all(map(_is_cron_field, parts, _CRON_FIELDS))


def _is_cron_field(text: str, allowed: tuple[int, int, tuple[str, ...]]) -> bool:
    return all(_is_cron_part(part, *allowed) for part in text.split(","))


def _is_cron_part(text: str, low: int, high: int, names: tuple[str, ...]) -> bool:
    span, slash, step = text.partition("/")
    if slash and not re.fullmatch(r"[1-9]\d?", step, re.ASCII):
        return False
    if span == "*":
        return True
    ends = [_cron_number(end, low, names) for end in span.split("-")]
    known = [end for end in ends if end is not None and low <= end <= high]
    return len(known) == len(ends) <= 2 and known == sorted(known)


def _cron_number(text: str, low: int, names: tuple[str, ...]) -> int | None:
    if text.upper() in names:
        return low + names.index(text.upper())
    return int(text) if re.fullmatch(r"\d\d?", text, re.ASCII) else None


_GATE = r"[a-z_]+(@\d+)?\s*(>=|<=)\s*(live|constant|[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?)"

is_app_name = _like(rf"(?=[a-z]){_LABEL}", MAX_NAME)
AppName = Annotated[
    str,
    Bounds(f"lower-case letters, digits and -, from a letter on, at most {MAX_NAME} characters", is_app_name),
]
Label = Annotated[str, Bounds("lower-case letters, digits and -, at most 63 characters", _like(_LABEL, 63))]
Name = Annotated[str, Bounds("the name of a Kubernetes object, such as my-secret", _like(_HOST))]
StorageClass = Annotated[
    str, Bounds("the name of a storage class; leave it out for the cluster's default", _like(_HOST))
]
Host = Annotated[str, Bounds("a host name, such as recmill.example.com", _like(_HOST))]
ImageName = Annotated[
    str, Bounds("an image with its tag, such as registry.example.com/recmill-train:1.0", _like(_TAGGED, 512))
]
Folder = Annotated[
    str, Bounds(f"an absolute path of {_PATH_WORDS}, such as /exports/recmill", _like(FOLDER, 1024))
]
InnerFolder = Annotated[
    str,
    Bounds(
        f"a path inside the volume of {_PATH_WORDS}, such as logs/shop, or .",
        _like(rf"(?!.*\.\.)(?!/)[{_PATH}]+", 1024),
    ),
]
BundleUrl = Annotated[
    str,
    Bounds(
        "a URL such as s3://models/shop/bundle",
        _like(rf"(s3|gs)://{_LABEL}[{_PATH}]*(\?[&:{_PATH}]+)?", 1024),
    ),
]
Cpus = Annotated[str, Bounds("a number of cores, such as 2, 0.5 or 500m", _is_cpus)]
Memory = Annotated[str, Bounds("a quantity of bytes, such as 2Gi or 512Mi", _is_memory)]
Cron = Annotated[
    str, Bounds('five fields of cron: minute, hour, day, month, weekday, such as "0 3 * * *"', _is_cron)
]
Gate = Annotated[
    str,
    Bounds('conditions such as "auc>=0.80,ne<=live"', _like(rf"\s*{_GATE}\s*(,\s*{_GATE}\s*)*", 1000)),
]
NodePort = Annotated[int, Bounds("a port from 30000 to 32767", lambda port: 30_000 <= port <= 32_767)]
RedisReplicas = Annotated[
    int,
    Bounds("1, 3, 5 or 7: most of them must agree on who is primary", lambda number: number in (1, 3, 5, 7)),
]
NotRoot = Annotated[
    int, Bounds("a number from 1 to 4294967294; 0 is root", lambda number: 1 <= number < 2**32 - 1)
]


# the tree


@dataclass(frozen=True)
class Image:
    """Where pods get their programs."""

    train: ImageName = f"recmill-train:{__version__}"
    serve: ImageName = f"recmill-serve:{__version__}"
    redis: ImageName = "redis:8.2-alpine"
    pull_policy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"
    pull_secret: Name | None = None


@dataclass(frozen=True)
class Nfs:
    """An exported folder that holds `data` and `runs`."""

    server: Host = EXAMPLE_SERVER
    path: Folder = "/exports/recmill"


@dataclass(frozen=True)
class Storage:
    """Where the log and what is made of it lie. Without a class, the cluster's default; without a size, computed.

    `host_path` is a folder of the node, for a cluster of one; it holds `data` and `runs`.
    """

    kind: Literal["pvc", "nfs", "hostpath"] = "pvc"
    class_name: StorageClass | None = None
    size: Memory | None = None
    access: Literal["ReadWriteMany", "ReadWriteOnce"] = "ReadWriteMany"
    nfs: Nfs = Nfs()
    host_path: Folder = "/srv/recmill"


@dataclass(frozen=True)
class Data:
    """The log: a claim that is there already, or one that is made; and the folder inside it."""

    claim: Name | None = None
    path: InnerFolder = "."
    size: Memory | None = None


@dataclass(frozen=True)
class Publish:
    """Where bundles are published and served from: /runs/bundle, or a URL, with a secret that has its credentials."""

    url: BundleUrl | None = None
    secret: Name | None = None


@dataclass(frozen=True)
class Prepare:
    """How `recmill prepare` runs."""

    cpus: Cpus | None = None
    memory: Memory | None = None


@dataclass(frozen=True)
class Train:
    """How `recmill train` runs; `workers` are those of Ray."""

    cpus: Cpus | None = None
    memory: Memory | None = None
    workers: Positive | None = None


@dataclass(frozen=True)
class Scaling:
    """When more servers are started: above this percentage of their CPU, or so many requests/s for each."""

    metric: Literal["cpu", "rate"] = "cpu"
    target: Positive | None = None


@dataclass(frozen=True)
class Ingress:
    """How clients outside of the cluster reach the servers."""

    host: Host | None = None
    class_name: Name | None = None


@dataclass(frozen=True)
class Serve:
    """How `recmill serve` runs. Secrets are named, never written."""

    replicas: Positive | None = None
    max_replicas: Positive | None = None
    cpus: Cpus | None = None
    memory: Memory | None = None
    split: bool = False
    hpa: Scaling = Scaling()
    node_port: NodePort | None = None
    ingress: Ingress = Ingress()
    tls_secret: Name | None = None
    token_secret: Name | None = None


@dataclass(frozen=True)
class Redis:
    """A store of features beside the servers; of several replicas, sentinels choose the primary."""

    enabled: bool = False
    replicas: RedisReplicas = 1
    auth_secret: Name | None = None
    memory: Memory | None = None


@dataclass(frozen=True)
class Monitoring:
    """Objects of the Prometheus operator, and the dashboard."""

    enabled: bool = False


@dataclass(frozen=True)
class Ray:
    """A Ray cluster; `version` is that of the train image."""

    version: Annotated[str, Bounds("a version such as 2.60.0", _like(r"\d+\.\d+\.\d+"))] = "2.60.0"
    data_workers: Positive = 2
    train_workers: Positive = 2


@dataclass(frozen=True)
class Spark:
    """A Spark application; `version` is that of the train image."""

    version: Annotated[str, Bounds("a version such as 4.3.0", _like(r"\d+\.\d+\.\d+"))] = "4.3.0"
    executors: Positive = 2
    executor_cpus: Positive = 2
    executor_memory: Memory | None = None
    driver_memory: Memory | None = None
    service_account: Name = "spark"


@dataclass(frozen=True)
class DeployConfig:
    """All of it. None means: computed from the recipe by `recmill size`, or the cluster's own default."""

    name: AppName | None = None  # the recipe's
    namespace: Label = "recmill"
    user: NotRoot = 10001
    group: NotRoot = 10001
    rows: Positive | None = None
    items: Positive | None = None
    users: Positive | None = None
    rate: AboveZero | None = None
    gate: Gate | None = None
    retry_limit: Whole = 3
    schedule: Cron = "0 3 * * *"
    image: Image = Image()
    storage: Storage = Storage()
    data: Data = Data()
    publish: Publish = Publish()
    prepare: Prepare = Prepare()
    train: Train = Train()
    serve: Serve = Serve()
    redis: Redis = Redis()
    monitoring: Monitoring = Monitoring()
    ray: Ray = Ray()
    spark: Spark = Spark()

    @classmethod
    def of(cls, pairs: Sequence[str]) -> DeployConfig:
        """Settings from `key=value` texts; of two for the same key, the last holds. DeployError has all problems."""
        reading = Problems()
        tree: dict[str, Any] = {}
        malformed = [pair for pair in pairs if not _put(tree, pair)]
        settings: DeployConfig = Reader(reading).dataclass(cls, tree, "")
        problems = [f'{pair}: expected key=value, for example --set "namespace=shop"' for pair in malformed]
        problems += [*_templates(pairs), *reading.found]
        if not problems:
            problems = _conflicts(settings)
        if problems:
            raise DeployError("--set", problems)
        return settings


def _templates(pairs: Sequence[str]) -> Iterator[str]:
    """Values that some program between here and the container would read as a template, whatever their key allows."""
    for key, _, value in (pair.partition("=") for pair in pairs):
        yield from template_in(key.strip(), value)


def template_in(what: str, value: str) -> Iterator[str]:
    """What is wrong with a text that ends up in a manifest, if it is a template there."""
    if match := _TEMPLATE.search(value):
        yield (
            f"{what} must not hold {json.dumps(match[0])}: templates and line ends are made of it; "
            f"got {json.dumps(value[:80])}"
        )


def _put(tree: dict[str, Any], pair: str) -> bool:
    """Set `serve.replicas=3` in the tree, read as the type that the key has. False if it is no such pair."""
    key, equals, text = pair.partition("=")
    keys = key.strip().split(".")
    if not equals or not all(keys):
        return False
    place, kind = tree, DeployConfig
    for name in keys[:-1]:
        if not isinstance(place.get(name), dict):
            place[name] = {}
        place, kind = place[name], _kind_of(kind, name)
    place[keys[-1]] = _value(_kind_of(kind, keys[-1]), text)
    return True


def _kind_of(owner: Any, name: str) -> Any:
    """The type of a key without None and bounds; str for a key that is not known."""
    if not dataclasses.is_dataclass(owner):
        return str
    kind: Any = get_type_hints(owner).get(name, str)
    if get_origin(kind) in (Union, types.UnionType):
        kind = next(option for option in get_args(kind) if option is not type(None))
    return kind


def _value(kind: Any, text: str) -> Any:
    if kind not in (int, float, bool):
        return text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _conflicts(settings: DeployConfig) -> list[str]:
    """Values that are right alone but not together."""
    problems = []
    serve, storage = settings.serve, settings.storage
    if settings.publish.secret and not settings.publish.url:
        problems.append("publish.secret has the credentials of publish.url, which is missing. Add it")
    if storage.kind == "nfs" and storage.nfs.server == EXAMPLE_SERVER:
        problems.append("storage.nfs.server is missing: storage.kind=nfs needs the address of the NFS server")
    if storage.kind != "pvc" and storage.class_name:
        problems.append(
            f"storage.class_name is for storage.kind=pvc; volumes of {storage.kind} have none. Remove one of them"
        )
    if serve.replicas and serve.max_replicas and serve.max_replicas < serve.replicas:
        problems.append(
            f"serve.max_replicas must be at least serve.replicas ({serve.replicas}), got {serve.max_replicas}"
        )
    if serve.hpa.metric == "cpu" and serve.hpa.target is not None and serve.hpa.target > 100:
        problems.append(
            f"serve.hpa.target must be a percentage up to 100 with serve.hpa.metric=cpu, got {serve.hpa.target}"
        )
    if storage.access == "ReadWriteOnce" and (serve.replicas or 1) > 1:
        problems.append(
            "storage.access=ReadWriteOnce lets one node mount the bundles; serve.replicas must then be 1, "
            f"got {serve.replicas}"
        )
    return problems


def defaults() -> dict[str, Any]:
    """Key path -> default of every setting."""
    settings: dict[str, Any] = {}

    def walk(prefix: str, value: Any) -> None:
        for field in dataclasses.fields(value):
            inner = getattr(value, field.name)
            if dataclasses.is_dataclass(inner):
                walk(f"{prefix}{field.name}.", inner)
            else:
                settings[prefix + field.name] = inner

    walk("", DeployConfig())
    return settings
