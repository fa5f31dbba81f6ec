"""Engines: where the rows of prepare and score are worked on."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from recmill.errors import MissingPackage, RecmillError

if TYPE_CHECKING:
    from recmill.engines.frames import FrameEngine
    from recmill.reporting.progress import Progress

ENGINES = ("local", "ray", "spark")
_PACKAGES = {"ray": "ray", "spark": "pyspark"}


def check_engine(
    name: str, workers: int | None = None, address: str | None = None, conf: Mapping[str, str] | None = None
) -> None:
    """Fail before any work if there is no such engine, or it has no such settings."""
    if name not in ENGINES:
        raise RecmillError(f'There is no engine "{name}"; there are: {", ".join(ENGINES)}.')
    if address is not None and name == "local":
        raise RecmillError(
            f"--address {address} has no meaning with engine local, which is this process. "
            "Add --engine ray or --engine spark, or remove --address."
        )
    if conf and name != "spark":
        raise RecmillError(
            f"--spark-conf has no meaning with engine {name}. Add --engine spark, or remove it."
        )
    if workers is not None and address is not None and name == "spark":
        raise RecmillError(
            "--workers has no meaning for Spark at an address: Spark itself decides how many tasks run at once. "
            "Use its own settings instead, such as --spark-conf spark.cores.max=8."
        )
    if name in _PACKAGES and importlib.util.find_spec(_PACKAGES[name]) is None:
        raise MissingPackage(f'Engine "{name}"', _PACKAGES[name], name)


def open_engine(
    name: str,
    work: Path,
    workers: int | None = None,
    memory: int = 2 << 30,
    progress: Progress | None = None,
    address: str | None = None,
    conf: Mapping[str, str] | None = None,
) -> FrameEngine:
    """An engine, which is closed by `close` or as a context. `work` holds what a rerun can reuse.

    `workers` is how many tasks run at once: threads of this process, or tasks of a cluster. `memory` bounds this
    process and, on a cluster, each task. Without an address, a cluster is started on this machine.
    """
    check_engine(name, workers, address, conf)
    if name == "local":
        from recmill.engines.local import LocalEngine

        return LocalEngine(work, workers, memory, progress)
    from recmill.engines.cluster import Cluster, ClusterEngine

    cluster: Cluster
    if name == "ray":
        from recmill.engines.ray import RayCluster

        cluster = RayCluster(work, address, workers, memory)
    else:
        from recmill.engines.spark import SparkCluster

        address = f"local[{workers}]" if workers is not None else address
        cluster = SparkCluster(work, address, conf, memory)
    return ClusterEngine(cluster, work, memory, progress)
