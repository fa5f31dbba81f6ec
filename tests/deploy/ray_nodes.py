"""Nodes of Ray on this machine: started by what a RayCluster says and given jobs in the way of KubeRay."""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from cluster import ROOT, Paths
from ports import free_port

Object = dict[str, Any]
STORE_BYTES = 150 << 20
SECONDS = 240.0


class RayNodes:
    """A head and a node of each group. Every node has the cluster's token, and nobody else."""

    def __init__(self, spec: Object, paths: Paths) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="rt-"))  # short: paths of sockets have a limit
        self.paths = paths
        self.port, self.dashboard = free_port(), free_port()
        self.environment = self._environment(spec)
        self.probes: dict[str, str] = {}
        self.processes: list[subprocess.Popen[bytes]] = []
        try:
            self._start_all(spec)
        except BaseException:
            self.stop()
            raise

    def _start_all(self, spec: Object) -> None:
        """One after the other: nodes of one machine choose the names of their sockets by what is there."""
        head = {
            "port": str(self.port),
            "dashboard-port": str(self.dashboard),
            "dashboard-host": "127.0.0.1",
            "ray-client-server-port": str(free_port()),
            "temp-dir": str(self.folder / "ray"),
        }
        self._start("head", ["--head"], spec["headGroupSpec"], head)
        for group in spec["workerGroupSpecs"]:
            self._start(group["groupName"], [f"--address=127.0.0.1:{self.port}"], group, {})

    def _environment(self, spec: Object) -> dict[str, str]:
        programs = self.folder / "image"
        programs.mkdir()
        script = programs / "recmill"
        script.write_text(f'#!/bin/sh\nexec {sys.executable} -m recmill "$@"\n')
        script.chmod(0o755)
        container = spec["headGroupSpec"]["template"]["spec"]["containers"][0]
        said = {one["name"]: one["value"] for one in container["env"]} | {"HOME": str(self.folder)}
        assert spec["authOptions"] == {"mode": "token"}
        return {
            "PATH": f"{programs}:{Path(sys.executable).parent}:/usr/bin:/bin",
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "OMP_WAIT_POLICY": "PASSIVE",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            **said,
        }

    def _start(self, name: str, flags: list[str], group: Object, here: Mapping[str, str]) -> None:
        """A node, until it is ready. `here` and ports are this machine's; the rest is the group's."""
        agent = free_port()
        container = group["template"]["spec"]["containers"][0]
        self.probes[name] = f"http://127.0.0.1:{agent}{container['readinessProbe']['httpGet']['path']}"
        usual = {"num-cpus": container["resources"]["limits"]["cpu"], **group["rayStartParams"]}
        changed = {
            "node-ip-address": "127.0.0.1",
            "object-store-memory": str(STORE_BYTES),
            "dashboard-agent-listen-port": str(agent),
            "metrics-export-port": str(free_port()),
            **here,
        }
        words = [*flags, "--block", *(f"--{key}={value}" for key, value in {**usual, **changed}.items())]
        with open(self.folder / f"{name}.log", "wb") as log:
            self.processes.append(
                subprocess.Popen(
                    ["/bin/bash", "-c", "--", f"exec ray start {' '.join(words)}"],
                    env=self.environment,
                    cwd=self.folder,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
        until = time.monotonic() + SECONDS
        while not self._is_ready(name):
            if time.monotonic() > until or self.processes[-1].poll() is not None:
                raise AssertionError(f"{name} is not ready:\n{(self.folder / f'{name}.log').read_text()}")
            time.sleep(0.5)

    def _is_ready(self, name: str) -> bool:
        try:
            with urlopen(self.probes[name], timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def submit(self, entrypoint: str) -> str:
        """What a job said; it must have succeeded."""
        address = f"http://127.0.0.1:{self.dashboard}"
        done = subprocess.run(
            ["ray", "job", "submit", "--address", address, "--", *shlex.split(self.paths.here(entrypoint))],
            env=self.environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        assert done.returncode == 0, f"{entrypoint}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def stop(self) -> None:
        for process in reversed(self.processes):
            process.terminate()
        for process in self.processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)
