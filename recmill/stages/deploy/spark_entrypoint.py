"""The entrypoint of Spark's pods on Kubernetes, which is called with `driver ...` or with `executor`.

Spark counts on its own images to turn these words, and what it puts into the environment, into a program. In the train
image, which has Spark as a Python package, that is done here.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from recmill.errors import MissingPackage, RecmillError

_EXECUTOR = "org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBackend"
_JAVA_OPTION = re.compile(r"SPARK_JAVA_OPT_(\d+)")
_FLAGS = {
    "--driver-url": "SPARK_DRIVER_URL",
    "--executor-id": "SPARK_EXECUTOR_ID",
    "--cores": "SPARK_EXECUTOR_CORES",
    "--app-id": "SPARK_APPLICATION_ID",
    "--hostname": "SPARK_EXECUTOR_POD_IP",
    "--resourceProfileId": "SPARK_RESOURCE_PROFILE_ID",
    "--podName": "SPARK_EXECUTOR_POD_NAME",
}


def command_of(words: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """The program of a pod and its arguments."""
    home = spark_home()
    match words:
        case ["driver", *rest]:
            bind = environment.get("SPARK_DRIVER_BIND_ADDRESS")
            conf = ["--conf", f"spark.driver.bindAddress={bind}"] if bind else []
            return [str(home / "bin" / "spark-submit"), *conf, "--deploy-mode", "client", *rest]
        case ["executor"]:
            return _executor(home, environment)
    raise RecmillError(f'expected "driver ..." or "executor" from Spark, got: {" ".join(words) or "nothing"}')


def _executor(home: Path, environment: Mapping[str, str]) -> list[str]:
    missing = sorted({*_FLAGS.values(), "SPARK_EXECUTOR_MEMORY"} - environment.keys())
    if missing:
        raise RecmillError(f"an executor of Spark needs {', '.join(missing)} in its environment")
    java = environment.get("JAVA_HOME")
    memory = environment["SPARK_EXECUTOR_MEMORY"]
    places = [environment.get("SPARK_CONF_DIR"), f"{home}/jars/*", environment.get("SPARK_EXTRA_CLASSPATH")]
    return [
        f"{java}/bin/java" if java else "java",
        *_java_options(environment),
        f"-Xms{memory}",
        f"-Xmx{memory}",
        "-cp",
        ":".join(place for place in places if place),
        _EXECUTOR,
        *(word for flag, name in _FLAGS.items() for word in (flag, environment[name])),
    ]


def _java_options(environment: Mapping[str, str]) -> list[str]:
    """SPARK_JAVA_OPT_0, SPARK_JAVA_OPT_1, ... in the order of their numbers."""
    found = {
        int(match[1]): value for name, value in environment.items() if (match := _JAVA_OPTION.fullmatch(name))
    }
    return [found[number] for number in sorted(found)]


def spark_home() -> Path:
    """Where Spark's programs and jars are, without importing it."""
    found = importlib.util.find_spec("pyspark")
    if found is None or found.origin is None:
        raise MissingPackage("A pod of Spark", "pyspark", "spark")
    return Path(found.origin).parent


def main() -> None:
    try:
        command = command_of(sys.argv[1:], os.environ)
    except RecmillError as error:
        sys.exit(f"error: {error}")
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
