"""A cluster of one machine: runs the commands of rendered objects, as another user, with volumes in a folder.

As in a cluster: command lines, environment and mounts are read out of the objects; each pod has an empty folder of its
own for `emptyDir`; claims and ConfigMaps are folders; processes are those of an unprivileged user when the tests are
root's; Argo's steps, conditions, parameters, recursion, retries and exit handlers are followed, and what is not known
here is an error.

Not as in a cluster: there is no image, so that `recmill` is the package of the tests; paths are not mounted, so that a
mount path at the beginning of a path in an argument or variable is replaced by the folder behind it; ports are free
ones of this machine; limits of memory, read-only mounts and read-only roots are not enforced, but for a folder that
belongs to root; steps that Argo would run at once run one after another.
"""

from __future__ import annotations

import ast
import atexit
import json
import operator
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from ports import free_port

Object = dict[str, Any]
ROOT = Path(__file__).parent.parent.parent
SECONDS = 120.0


class NotKnown(Exception):
    """A field or an expression that this cluster does not know."""


class NoUser(Exception):
    """Why commands cannot run as another user here."""


@dataclass(frozen=True)
class Ran:
    """One command that ended."""

    step: str
    command: list[str]
    exit_code: int
    output: str
    seconds: float


@dataclass
class Workflow:
    """How a run ended, and every command of it, in order."""

    name: str
    status: str = "Running"
    ran: list[Ran] = field(default_factory=list)
    failures: list[Object] = field(default_factory=list)

    @property
    def steps(self) -> list[str]:
        return [one.step for one in self.ran]

    def __str__(self) -> str:
        said = (f"{one.step}, {one.seconds:.1f} s: {' '.join(one.command)}\n{one.output}" for one in self.ran)
        return f"{self.name} {self.status}\n" + "\n".join(said)

    def output(self, step: str) -> str:
        """What all commands of a step said."""
        return "\n".join(one.output for one in self.ran if one.step == step)


class Cluster:
    """Applies objects and runs them."""

    def __init__(self, folder: Path, objects: Sequence[Object] = ()) -> None:
        """`folder` must be one that other users can enter."""
        self.folder = folder
        self.objects = {(one["kind"], one["metadata"]["name"]): one for one in objects}
        self.user = _unprivileged_user()
        self.python = _python_of(self.user)
        self.programs = folder / "image"
        self.programs.mkdir()
        script = self.programs / "recmill"
        script.write_text(f'#!/bin/sh\nexec {self.python} -m recmill "$@"\n')
        script.chmod(0o755)

    def apply(self, objects: Sequence[Object]) -> None:
        self.objects |= {(one["kind"], one["metadata"]["name"]): one for one in objects}

    def claim(self, name: str) -> Path:
        """The folder behind a claim, which must have been applied."""
        if ("PersistentVolumeClaim", name) not in self.objects:
            raise NotKnown(f"there is no claim {name}")
        path = self.folder / "claims" / name
        if not path.exists():
            path.mkdir(parents=True)
            self.own(path)
        return path

    def own(self, path: Path) -> None:
        """As `fsGroup` does: the folder is the user's."""
        if self.user is not None:
            os.chown(path, self.user, self.user)

    # pods

    def _folders(self, volumes: Sequence[Object], pod: Path) -> dict[str, Path]:
        return {volume["name"]: self._folder_of(volume, pod) for volume in volumes}

    def _folder_of(self, volume: Object, pod: Path) -> Path:
        (kind,) = volume.keys() - {"name"}
        path = pod / volume["name"]
        if kind == "persistentVolumeClaim":
            return self.claim(volume[kind]["claimName"])
        if kind == "configMap":
            path.mkdir()
            for name, text in self.objects[("ConfigMap", volume[kind]["name"])]["data"].items():
                (path / name).write_text(text)
            return path
        if kind == "emptyDir":
            path.mkdir()
            self.own(path)
            return path
        raise NotKnown(f"volume {kind}")

    @contextmanager
    def pod(
        self, security: Object, volumes: Sequence[Object], *containers: Object
    ) -> Iterator[list[Process]]:
        """The process of each container, before it runs; the pod's folders are gone afterwards."""
        if not security["runAsNonRoot"] or self.user not in (None, security["runAsUser"]):
            raise NotKnown("a pod of another user")
        pod = Path(tempfile.mkdtemp(prefix="pod-", dir=self.folder))
        pod.chmod(0o755)
        try:
            folders = self._folders(volumes, pod)
            yield [Process(self, one, _paths(one, folders, pod)) for one in containers]
        finally:
            shutil.rmtree(pod)


class Paths:
    """Mount paths and the folders that stand for them here."""

    def __init__(self, mounts: Mapping[str, Path]) -> None:
        self.mounts = mounts
        longest_first = sorted(mounts, key=len, reverse=True)
        found = "|".join(re.escape(path) for path in longest_first)
        self._pattern = re.compile(rf"(?<![\w./-])({found})(?![\w.-])")

    def here(self, text: str) -> str:
        return self._pattern.sub(lambda match: str(self.mounts[match[1]]), text)


def _paths(container: Object, folders: Mapping[str, Path], pod: Path) -> Paths:
    mounts = {one["mountPath"]: folders[one["name"]] for one in container["volumeMounts"]}
    return Paths({**mounts, **({} if "/tmp" in mounts else {"/tmp": pod})})


class Process:
    """The command of a container."""

    def __init__(self, cluster: Cluster, container: Object, paths: Paths) -> None:
        known = {"image", "imagePullPolicy", "command", "args", "env", "resources", "securityContext"}
        known |= {"volumeMounts", "name", "ports", "lifecycle"}
        known |= {"startupProbe", "readinessProbe", "livenessProbe"}
        _only(container, known, "container")
        self.cluster = cluster
        self.paths = paths
        self.ports = {str(one["containerPort"]): str(free_port()) for one in container.get("ports", ())}
        values = {one["name"]: _value_of(one, container) for one in container["env"]}
        command = [*container["command"], *container.get("args", ())]
        command = [re.sub(r"\$\((\w+)\)", lambda found: values[found[1]], text) for text in command]
        # Listening on all addresses is for a network with rules of its own.
        self.command = ["127.0.0.1" if text == "0.0.0.0" else self._here(text) for text in command]
        self.environment = {name: paths.here(value) for name, value in values.items()}

    def _here(self, text: str) -> str:
        return self.ports.get(text, self.paths.here(text))

    def start(self) -> subprocess.Popen[str]:
        cluster = self.cluster
        given = {
            "PATH": f"{cluster.programs}:/usr/bin:/bin",
            "PYTHONPATH": python_path(),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_WAIT_POLICY": "PASSIVE",
        }
        other = {} if cluster.user is None else {"user": cluster.user, "group": cluster.user}
        return subprocess.Popen(
            self.command,
            env={**given, **self.environment},
            cwd=self.paths.mounts["/tmp"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            **({**other, "extra_groups": []} if other else {}),
        )

    def run(self) -> tuple[int, str]:
        """Exit code, as Kubernetes tells it, and all that was said."""
        process = self.start()
        try:
            output, _ = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            raise AssertionError(f"{self.command} did not end within {SECONDS:g} s:\n{output}") from None
        code = process.returncode
        return (128 - code if code < 0 else code), output


def _value_of(variable: Object, container: Object) -> str:
    if "value" in variable:
        return str(variable["value"])
    resource = variable["valueFrom"]["resourceFieldRef"]["resource"]
    if resource != "limits.cpu":
        raise NotKnown(f"variable of {resource}")
    return str(container["resources"]["limits"]["cpu"])


def _unprivileged_user() -> int | None:
    """Whom commands run as; None is whoever runs the tests, if that is not root."""
    return 10001 if os.getuid() == 0 else None


def folder_for_all(prefix: str) -> Path:
    """A new folder that any user can enter. TMPDIR may be in one that is its owner's alone."""
    for base in map(Path, dict.fromkeys([tempfile.gettempdir(), "/tmp", "/var/tmp"])):
        if all(part.stat().st_mode & stat.S_IXOTH for part in [base, *base.parents]):
            folder = Path(tempfile.mkdtemp(prefix=prefix, dir=base))
            folder.chmod(0o755)
            return folder
    raise NoUser("there is no folder for temporary files that another user can enter")


@cache
def python_path() -> str:
    """Where packages are, for a Python that knows nothing of our environment. What we compiled may lie elsewhere."""
    import recmill._native

    folder = folder_for_all("recmill-package-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / "recmill").mkdir()
    parts = {path.name: path for path in (ROOT / "recmill").iterdir()}
    native = Path(recmill._native.__file__)
    for name, path in {**parts, native.name: native}.items():
        (folder / "recmill" / name).symlink_to(path)
    return ":".join([str(folder), *(path for path in sys.path if path.endswith("site-packages"))])


@cache
def _python_of(user: int | None) -> str:
    """A Python that this user can run, with our packages."""
    if user is None:
        return sys.executable
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    tried = {}
    for python in (sys.executable, f"/usr/bin/python{version}", f"/usr/local/bin/python{version}"):
        try:
            done = subprocess.run(
                [python, "-c", "import recmill.cli, recmill._native, polars"],
                user=user,
                group=user,
                extra_groups=[],
                cwd="/",
                env={"PYTHONPATH": python_path(), "HOME": "/tmp", "PYTHONDONTWRITEBYTECODE": "1"},
                capture_output=True,
                text=True,
            )
        except OSError as error:
            tried[python] = str(error)
            continue
        if done.returncode == 0:
            return python
        tried[python] = done.stderr.strip().splitlines()[-1]
    raise NoUser(f"user {user} can run no Python with our packages: {tried}")


# servers


class Server:
    """A Deployment's pod, and where it answers. As for a kubelet, a process that ends is started again.

    Init containers come first, one after another, each until it ends well.
    """

    def __init__(
        self, first: Sequence[Process], process: Process, url: str, probes: Mapping[str, str]
    ) -> None:
        self.url = url
        self.probes = probes  # startupProbe and so on -> URL
        self._first, self._made = first, process
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._keep_running)
        self._running: subprocess.Popen[str] | None = None
        self.initialized: list[Ran] = []
        self.ended: list[Ran] = []

    def start(self) -> None:
        self._thread.start()

    def _keep_running(self) -> None:
        for process in self._first:
            while not self._stop.is_set() and self._run("init", process, self.initialized) != 0:
                self._stop.wait(5)
        while not self._stop.is_set():
            self._run("serve", self._made, self.ended)
            self._stop.wait(5)

    def _run(self, step: str, process: Process, ended: list[Ran]) -> int:
        self._running = process.start()
        started = time.monotonic()
        output, _ = self._running.communicate()
        code = self._running.returncode
        ended.append(Ran(step, process.command, code, output, time.monotonic() - started))
        return code

    def stop(self) -> None:
        """Told to end, it must end well."""
        self._stop.set()
        assert self._running is not None
        self._running.terminate()
        self._thread.join(60)
        if self._thread.is_alive():
            os.killpg(self._running.pid, signal.SIGKILL)
            self._thread.join()
        assert self.ended, f"it never started: {self.initialized}"
        assert self.ended[-1].exit_code == 0, self.ended[-1].output

    def wait(self, probe: str) -> None:
        """Until a probe is answered with 200."""
        ends_at = time.monotonic() + SECONDS
        while time.monotonic() < ends_at:
            try:
                with urlopen(self.probes[probe], timeout=5) as answer:
                    assert answer.status == 200
                    return
            except OSError:
                time.sleep(0.2)
        raise AssertionError(f"{probe} was never answered: {[one.output for one in self.ended]}")

    def ask(self, path: str, question: Object | None = None) -> Object:
        body = None if question is None else json.dumps(question).encode()
        request = Request(self.url + path, body, {"content-type": "application/json"})
        with urlopen(request, timeout=30) as answer:
            found: Object = json.load(answer)
            return found


@contextmanager
def deployed(cluster: Cluster, name: str) -> Iterator[Server]:
    """One pod of a Deployment."""
    spec = cluster.objects[("Deployment", name)]["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    first = spec.get("initContainers", ())
    with cluster.pod(spec["securityContext"], spec["volumes"], *first, container) as (*before, made):
        ports = {one["name"]: made.ports[str(one["containerPort"])] for one in container["ports"]}
        asked = {
            probe: container[probe]["httpGet"]
            for probe in ("startupProbe", "readinessProbe", "livenessProbe")
        }
        probes = {
            probe: f"http://127.0.0.1:{ports[one['port']]}{one['path']}" for probe, one in asked.items()
        }
        server = Server(before, made, f"http://127.0.0.1:{ports['http']}", probes)
        server.start()
        try:
            yield server
        finally:
            server.stop()


# Argo

_SPEC = {"entrypoint", "onExit", "arguments", "volumes", "templates", "securityContext"}
# How Argo looks after pods and objects, which has no meaning for what a run does.
_OF_ARGO = {
    "synchronization",
    "activeDeadlineSeconds",
    "ttlStrategy",
    "podGC",
    "podMetadata",
    "imagePullSecrets",
}
_OF_ARGO |= {"serviceAccountName", "executor", "automountServiceAccountToken"}


def submit(
    cluster: Cluster, template: str, name: str, parameters: Mapping[str, str] | None = None
) -> Workflow:
    """`argo submit --from workflowtemplate/TEMPLATE --name NAME -p KEY=VALUE`, and wait for its end."""
    spec = cluster.objects[("WorkflowTemplate", template)]["spec"]
    _only(spec, _SPEC | _OF_ARGO, "spec")
    given = {one["name"]: one["value"] for one in spec["arguments"]["parameters"]}
    unknown = (parameters or {}).keys() - given.keys()
    if unknown:
        raise NotKnown(f"parameters {unknown}")
    workflow = Workflow(name)
    scope = {f"workflow.parameters.{key}": value for key, value in {**given, **(parameters or {})}.items()}
    scope["workflow.name"] = name
    run = _Run(cluster, spec, workflow, scope)
    workflow.status = (
        "Succeeded" if run.template(spec["entrypoint"], spec["entrypoint"], {}) is not None else "Failed"
    )
    run.scope |= {"workflow.status": workflow.status, "workflow.failures": json.dumps(workflow.failures)}
    if run.template(spec["onExit"], spec["onExit"], {}) is None:
        workflow.status = "Error"
    return workflow


class _Run:
    """One run of a workflow. A template gives its output parameters, or None when it failed."""

    def __init__(self, cluster: Cluster, spec: Object, workflow: Workflow, scope: dict[str, str]) -> None:
        self.cluster = cluster
        self.spec = spec
        self.workflow = workflow
        self.scope = scope
        self.templates = {one["name"]: one for one in spec["templates"]}

    def template(self, step: str, name: str, inputs: Mapping[str, str]) -> dict[str, str] | None:
        template = self.templates[name]
        wanted = [one["name"] for one in template.get("inputs", {}).get("parameters", ())]
        if set(wanted) != set(inputs):
            raise NotKnown(f"{name} takes {wanted}, got {list(inputs)}")
        scope = self.scope | {f"inputs.parameters.{key}": value for key, value in inputs.items()}
        if "steps" in template:
            _only(template, {"name", "inputs", "steps"}, name)
            return self._steps(template["steps"], scope)
        known = {"name", "inputs", "outputs", "activeDeadlineSeconds", "retryStrategy", "container"}
        _only(template, known, name)
        return self._tried(step, template, scope)

    def _steps(self, groups: Sequence[Sequence[Object]], scope: dict[str, str]) -> dict[str, str] | None:
        for group in groups:
            results = [self._step(step, dict(scope)) for step in group]
            if any(result is None for result in results):
                return None
            for step, result in zip(group, results, strict=True):
                for key, value in (result or {}).items():
                    scope[f"steps.{step['name']}.outputs.parameters.{key}"] = value
        return {}

    def _step(self, step: Object, scope: dict[str, str]) -> dict[str, str] | None:
        _only(step, {"name", "template", "when", "arguments"}, "step")
        if "when" in step and not holds(filled(step["when"], scope)):
            return {}
        given = step.get("arguments", {}).get("parameters", ())
        return self.template(
            step["name"], step["template"], {one["name"]: filled(one["value"], scope) for one in given}
        )

    def _tried(self, step: str, template: Object, scope: dict[str, str]) -> dict[str, str] | None:
        retry = template["retryStrategy"]
        _only(retry, {"limit", "retryPolicy", "expression", "backoff"}, "retryStrategy")
        for _ in range(int(retry["limit"]) + 1):
            code, found = self._container(step, template, scope)
            if code == 0:
                return found
            again = {"lastRetry.status": "Failed", "lastRetry.exitCode": str(code)}
            if not computed(retry["expression"], again):
                break
        self.workflow.failures.append({"displayName": step, "message": f"exit code {code}"})
        return None

    def _container(
        self, step: str, template: Object, scope: dict[str, str]
    ) -> tuple[int, dict[str, str] | None]:
        container = json.loads(filled(json.dumps(template["container"]), scope, in_json=True))
        security, volumes = self.spec["securityContext"], self.spec["volumes"]
        mounted = {one["name"] for one in container["volumeMounts"]}
        wanted = [volume for volume in volumes if volume["name"] in mounted]
        with self.cluster.pod(security, wanted, container) as (process,):
            started = time.monotonic()
            code, output = process.run()
            ran = Ran(step, process.command, code, output, time.monotonic() - started)
            self.workflow.ran.append(ran)
            outputs = template.get("outputs", {}).get("parameters", ())
            if code != 0:
                return code, None
            return code, {
                one["name"]: Path(process.paths.here(one["valueFrom"]["path"])).read_text() for one in outputs
            }


def _only(found: Object, known: set[str], where: str) -> None:
    if more := found.keys() - known:
        raise NotKnown(f"{where}: {', '.join(sorted(more))}")


# expressions


def filled(text: str, scope: Mapping[str, str], in_json: bool = False) -> str:
    """Text with every {{name}} and {{=expression}} replaced."""

    def value(match: re.Match[str]) -> str:
        inside = match[1]
        if inside.startswith("="):
            found = computed(json.loads(f'"{inside[1:]}"') if in_json else inside[1:], scope)
            text = f"{found:g}" if isinstance(found, float) else str(found)
        elif inside in scope:
            text = scope[inside]
        else:
            raise NotKnown(f"{{{{{inside}}}}}; there is: {', '.join(scope)}")
        return json.dumps(text)[1:-1] if in_json else text

    return re.sub(r"\{\{(.+?)\}\}", value, text)


def holds(condition: str) -> bool:
    """A `when` whose names are filled in: words are texts, as for Argo."""
    quoted = re.sub(r"(?<!['\w-])([A-Za-z_][\w-]*)(?!['\w-])", r"'\1'", condition)
    return bool(computed(quoted, {}))


_OPERATORS: Mapping[type[ast.AST], Any] = {
    ast.Add: operator.add,
    ast.Mult: operator.mul,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.GtE: operator.ge,
}


def computed(expression: str, scope: Mapping[str, str]) -> Any:
    """The few forms of expressions that we use; others are not known."""
    python = expression.replace("&&", " and ").replace("||", " or ")
    return _value(ast.parse(python.strip(), mode="eval").body, scope)


def _value(node: ast.AST, scope: Mapping[str, str]) -> Any:
    match node:
        case ast.Constant(value):
            return value
        case ast.Attribute() | ast.Name():
            return scope[ast.unparse(node)]
        case ast.Call(func=ast.Name("asInt"), args=[argument]):
            return int(_value(argument, scope))
        case ast.BinOp(left, action, right) if type(action) in _OPERATORS:
            return _OPERATORS[type(action)](_value(left, scope), _value(right, scope))
        case ast.Compare(left, [action], [right]) if type(action) in _OPERATORS:
            return _OPERATORS[type(action)](_value(left, scope), _value(right, scope))
        case ast.BoolOp(ast.And(), values):
            return all(_value(one, scope) for one in values)
        case ast.BoolOp(ast.Or(), values):
            return any(_value(one, scope) for one in values)
        case ast.UnaryOp(ast.USub(), operand):
            return -_value(operand, scope)
    raise NotKnown(ast.unparse(node))
