"""Spark for tests: real executors in processes of their own, and a Spark Connect server, all on loopback."""

from __future__ import annotations

import atexit
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pyspark
from ports import free_port
from quick_java import QUICK_JAVA

import recmill
from recmill.engines.spark import SparkCluster

# What executors unpickle imports these: the package, the tests of engines, and what all tests share.
PYTHONPATH = os.pathsep.join(map(str, (Path(recmill.__file__).parents[1], *Path(__file__).parents[:2])))


class SparkConf:
    """Two executors with a core each. What is opened at its address while it runs shares them."""

    name = "spark"
    address = "local-cluster[2,1,700]"
    conf: Mapping[str, str] = {
        "spark.app.name": "tests of recmill",
        "spark.executor.memory": "600m",
        "spark.driver.memory": "600m",
        "spark.executorEnv.PYTHONPATH": PYTHONPATH,
        "spark.executorEnv.OMP_WAIT_POLICY": "PASSIVE",
        "spark.executor.extraJavaOptions": QUICK_JAVA,
    }

    def __init__(self, folder: Path) -> None:
        from pyspark.sql import SparkSession

        self.cluster = SparkCluster(folder, self.address, self.conf)
        # Executors of a local cluster have their folders inside of Spark's package, whatever one sets.
        self.executors = (
            Path(pyspark.__file__).parent / "work" / SparkSession.active().sparkContext.applicationId
        )

    def stop(self) -> None:
        self.cluster.close()
        shutil.rmtree(self.executors, ignore_errors=True)


@cache
def shared_spark() -> SparkConf:
    """The one Spark of this test process; it ends with the process."""
    folder = tempfile.mkdtemp(prefix="recmill-spark-")
    conf = SparkConf(Path(folder))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    atexit.register(conf.stop)
    return conf


@contextmanager
def connect_server(folder: Path) -> Iterator[str]:
    """A Spark Connect server with two cores of its own: its address."""
    port = free_port()
    settings = {
        "spark.master": "local[2]",
        "spark.driver.memory": "600m",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.ui.enabled": "false",
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": str(port),
        "spark.local.dir": str(folder),
    }
    server = "org.apache.spark.sql.connect.service.SparkConnectServer"
    command = [str(Path(pyspark.__file__).parent / "bin" / "spark-submit"), "--class", server]
    for key, value in settings.items():
        command += ["--conf", f"{key}={value}"]
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH, "PYSPARK_PYTHON": sys.executable}
    with (
        open(folder / "server.log", "wb") as log,
        subprocess.Popen(
            [*command, "spark-internal"], env=environment, stdout=log, stderr=log, cwd=folder
        ) as process,
    ):
        try:
            _wait_until_it_answers(port, process)
            yield f"sc://127.0.0.1:{port}"
        finally:
            process.kill()


def _wait_until_it_answers(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.2)
    raise AssertionError(f"the Spark Connect server did not start (exit code {process.poll()})")
