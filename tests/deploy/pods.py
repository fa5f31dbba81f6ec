"""Rendered pods as processes of this machine: each has an address of its own, folders as volumes, and is not root."""

from __future__ import annotations

import math
import os
import re
import shutil
import signal
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster import Cluster, Paths, folder_for_all, python_path

from recmill.stages.deploy.settings import number_of

Object = dict[str, Any]
WORKLOADS = ("Deployment", "StatefulSet", "Job")


class Pods:
    """The pods of some objects. `secrets` are texts by name and key."""

    def __init__(
        self,
        node: Node,
        objects: Sequence[Object],
        secrets: Mapping[str, Mapping[str, str]] | None = None,
        packages: Sequence[str] = (),
    ) -> None:
        """`packages` are those that commands need beside our own."""
        self.node = node
        self.programs, self.changes_user = node.programs_with(packages)
        self.folder = Path(tempfile.mkdtemp(dir=node.folder))
        self.folder.chmod(0o755)
        self.secrets = secrets or {}
        self.workloads = {
            (one["kind"], one["metadata"]["name"]): one for one in objects if one["kind"] in WORKLOADS
        }
        self.addresses = {key: address_of(place) for place, key in enumerate(self.workloads)}
        self.names = {name: address for key in self.workloads for name, address in self._replicas(key)}
        self.services = {
            one["metadata"]["name"]: self._behind(one) for one in objects if one["kind"] == "Service"
        }
        self.started: list[Pod] = []

    def _behind(self, service: Object) -> str:
        """The address of the only pods that a Service selects."""
        wanted = service["spec"]["selector"].items()
        found = [
            self.addresses[key]
            for key, one in self.workloads.items()
            if wanted <= one["spec"]["template"]["metadata"]["labels"].items()
        ]
        assert len(found) == 1, f"{service['metadata']['name']} selects {len(found)} workloads"
        return found[0]

    def _replicas(self, key: tuple[str, str]) -> Iterator[tuple[str, str]]:
        """The name in DNS of each pod of a StatefulSet, and its address; the first has that of the workload."""
        spec = self.workloads[key]["spec"]
        for number in range(spec["replicas"] if key[0] == "StatefulSet" else 0):
            address = address_of(len(self.workloads) + number) if number else self.addresses[key]
            yield f"{key[1]}-{number}.{spec['serviceName']}", address

    def start(self, kind: str, name: str, number: int = 0, container: str | None = None) -> Pod:
        """One container of the pod of a workload; `number` is that of a StatefulSet's replica."""
        pod = Pod(self, (kind, name), number, container)
        self.started.append(pod)
        return pod

    def close(self) -> None:
        for pod in self.started:
            pod.kill()


class Pod:
    """One container, running, after its init containers have ended."""

    def __init__(self, pods: Pods, key: tuple[str, str], number: int, container: str | None) -> None:
        self.pods = pods
        spec = pods.workloads[key]["spec"]
        self.spec = spec["template"]["spec"]
        (main,) = [one for one in self.spec["containers"] if container in (None, one["name"])]
        self.name = f"{key[1]}-{number}"
        self.address = pods.names.get(f"{self.name}.{spec.get('serviceName')}", pods.addresses[key])
        self.folder = pods.folder / f"{key[0]}-{self.name}".lower()
        self.folder.mkdir(exist_ok=True)
        self.claims = spec.get("volumeClaimTemplates", [])
        self.log = self.folder / f"output-{main['name']}"
        for one in self.spec.get("initContainers", ()):
            assert self._started(one).wait(60) == 0, self.log.read_text()
        self.process = self._started(main)

    def _started(self, container: Object) -> subprocess.Popen[bytes]:
        self.container = container
        self.mounts = self._mounts()
        self.env = self._env()
        with open(self.log, "ab") as log:
            return subprocess.Popen(
                self.here(container["command"]), stdout=log, stderr=log, **self._as_user()
            )

    # what the cluster would do before it starts a container

    def _mounts(self) -> dict[str, Path]:
        volumes = {volume["name"]: volume for volume in self.spec["volumes"]}
        volumes |= {claim["metadata"]["name"]: {"emptyDir": {}} for claim in self.claims}
        return {
            mount["mountPath"]: self._volume(volumes[mount["name"]], mount)
            for mount in self.container["volumeMounts"]
        }

    def _volume(self, volume: Object, mount: Object) -> Path:
        if "persistentVolumeClaim" in volume:
            assert mount.get("readOnly"), "servers only read bundles"
            assert volume["persistentVolumeClaim"]["claimName"] == "quickstart-runs"
            return self.pods.node.runs
        path = self.folder / f"volume-{mount['name']}"
        if path.exists():  # another container of the pod has it
            return path
        path.mkdir()
        if "secret" in volume:
            for name, text in self.pods.secrets[volume["secret"]["secretName"]].items():
                (path / name).write_text(text)
                (path / name).chmod(volume["secret"]["defaultMode"])
                self._give(path / name, group_only=True)
        else:
            self._give(path)
        return path

    def _give(self, path: Path, group_only: bool = False) -> None:
        """What fsGroup does."""
        if self.pods.changes_user:
            os.chown(path, 0 if group_only else self._user["runAsUser"], self._user["fsGroup"])

    @property
    def _user(self) -> Object:
        security: Object = self.spec["securityContext"]
        assert security["runAsNonRoot"]
        return security

    def _as_user(self) -> Object:
        """The pod's user, where tests may become it."""
        who = self._user
        ids = {"user": who["runAsUser"], "group": who["runAsGroup"], "extra_groups": [who["fsGroup"]]}
        return {"env": self.env, "cwd": "/", **(ids if self.pods.changes_user else {})}

    def _env(self) -> dict[str, str]:
        """Of the image, and of the container."""
        image = {
            "PATH": f"{self.pods.programs}:/usr/local/bin:/usr/bin:/bin",
            "PYTHONPATH": python_path(),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        own: dict[str, str] = {}
        for one in self.container.get("env", []):
            own[one["name"]] = re.sub(r"\$\((\w+)\)", lambda found: own[found[1]], self._value(one))
        given = {
            name: value
            for one in self.container.get("envFrom", [])
            for name, value in self.pods.secrets[one["secretRef"]["name"]].items()
        }
        return image | given | {name: self._translated(value) for name, value in own.items()}

    def _value(self, one: Object) -> str:
        if "value" in one:
            return str(one["value"])
        source = one["valueFrom"]
        if "secretKeyRef" in source:
            return self.pods.secrets[source["secretKeyRef"]["name"]][source["secretKeyRef"]["key"]]
        if source.get("fieldRef") == {"fieldPath": "metadata.name"}:
            return self.name
        kind, resource = source["resourceFieldRef"]["resource"].split(".")
        return str(math.ceil(number_of(self.container["resources"][kind][resource])))

    def here(self, command: Sequence[str]) -> list[str]:
        """A command as it runs on this machine: variables filled in, mounts, names and addresses replaced."""
        filled = [re.sub(r"\$\((\w+)\)", lambda found: self.env[found[1]], part) for part in command]
        return [self._translated(part) for part in filled]

    def _translated(self, text: str) -> str:
        text = Paths(self.mounts).here(text)
        for name, address in self.pods.names.items():
            text = re.sub(rf"(?<![\w.-]){re.escape(name)}(?![\w.-])", address, text)
        for name in sorted(self.pods.services, key=len, reverse=True):
            text = re.sub(rf"(?<![\w-]){name}(?=:)", self.pods.services[name], text)
        if "://" in text:  # of another program on this machine
            return text
        return re.sub(r"\b(0\.0\.0\.0|127\.0\.0\.1)\b", self.address, text)

    # what it would do while the container runs

    def probe(self, name: str) -> bool:
        """Whether startupProbe, readinessProbe or livenessProbe succeeds: a busy machine may miss some in a row."""
        probe = self.container[name]
        if "exec" in probe:
            return self._exec(probe["exec"]["command"], probe["timeoutSeconds"]) == 0
        get = probe["httpGet"]
        ports = {port["name"]: port["containerPort"] for port in self.container["ports"]}
        url = f"{get['scheme'].lower()}://{self.address}:{ports[get['port']]}{get['path']}"
        for _ in range(probe.get("failureThreshold", 3)):
            if answers(url, probe["timeoutSeconds"]):
                return True
            time.sleep(probe["periodSeconds"] / 4)
        return False

    def _exec(self, command: Sequence[str], timeout: float | None = None) -> int:
        return subprocess.run(
            self.here(command), timeout=timeout, capture_output=True, **self._as_user()
        ).returncode

    def wait_until_started(self) -> None:
        probe = self.container["startupProbe"]
        for _ in range(probe["failureThreshold"]):
            assert self.process.poll() is None, self.log.read_text()
            if self.probe("startupProbe"):
                return
            time.sleep(probe["periodSeconds"] / 4)
        raise AssertionError(f"did not start: {self.log.read_text()}")

    def wait_until_ended(self, seconds: float = 60) -> None:
        """It must end well."""
        assert self.process.wait(seconds) == 0, self.log.read_text()

    def pre_stop(self) -> None:
        assert self._exec(self.container["lifecycle"]["preStop"]["exec"]["command"]) == 0

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


def answers(url: str, timeout: float) -> bool:
    """As the kubelet asks: any certificate will do, and 2xx and 3xx are well."""
    context = ssl._create_unverified_context() if url.startswith("https") else None
    try:
        with urllib.request.urlopen(url, timeout=timeout, context=context) as response:
            return bool(200 <= response.status < 400)
    except OSError:
        return False


def address_of(place: int) -> str:
    """A loopback address that no other test process has."""
    return f"127.{20 + os.getpid() // 250 % 200}.{1 + os.getpid() % 250}.{place + 1}"


@dataclass(frozen=True)
class Node:
    """A folder that any user can enter, our program, and a volume with bundles that no pod may write."""

    folder: Path
    cluster: Cluster
    runs: Path

    def programs_with(self, packages: Sequence[str]) -> tuple[Path, bool]:
        """Where `recmill` is, and whether another user runs it.

        The Python that others can run may be an older one, for which a package wants more than is installed.
        """
        user = self.cluster.user
        if user is None:
            return self.cluster.programs, False
        imports = "".join(f"import {package};" for package in packages)
        done = subprocess.run(
            [self.cluster.python, "-c", imports],
            user=user,
            group=user,
            extra_groups=[],
            cwd="/",
            env={"PYTHONPATH": python_path(), "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
        )
        if done.returncode == 0:
            return self.cluster.programs, True
        own = self.folder / "own-image"
        own.mkdir(exist_ok=True)
        (own / "recmill").write_text(f'#!/bin/sh\nexec {sys.executable} -m recmill "$@"\n')
        (own / "recmill").chmod(0o755)
        return own, False


@contextmanager
def a_node(bundles: Path) -> Iterator[Node]:
    folder = folder_for_all("recmill-pods-")
    runs = folder / "runs"
    try:
        shutil.copytree(bundles, runs / "bundle")
        for path in [runs, *runs.rglob("*")]:
            path.chmod(0o555 if path.is_dir() else 0o444)
        yield Node(folder, Cluster(folder), runs)
    finally:
        for path in [runs, *runs.rglob("*")]:
            if path.is_dir():
                path.chmod(0o755)
        shutil.rmtree(folder)
