"""Engines: where the rows of prepare and score are processed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from recmill.engines.config import EngineConfig as EngineConfig
from recmill.errors import MissingPackage, RecmillError

if TYPE_CHECKING:
    from recmill.engines.engine import Engine
    from recmill.reporting.progress import Progress

ENGINES = ("local", "ray", "spark")
_PACKAGES = {"ray": "ray", "spark": "pyspark"}


def check_engine(config: EngineConfig) -> None:
    """Fail early if there is no such engine, or it lacks one of the settings."""
    name, address = config.engine, config.address
    if name not in ENGINES:
        raise RecmillError(f'There is no engine "{name}"; there are: {", ".join(ENGINES)}.')
    if address is not None and name == "local":
        raise RecmillError(
            f"--address {address} is not for engine local, which is this process. "
            "Add --engine ray or --engine spark, or remove --address."
        )
    if config.spark_conf and name != "spark":
        raise RecmillError(f"--spark-conf is not for engine {name}. Add --engine spark, or remove it.")
    if config.workers is not None and address is not None and name == "spark":
        raise RecmillError(
            "--workers has no meaning for Spark at an address: Spark itself decides how many tasks run at once. "
            "Use its own settings instead, such as --spark-conf spark.cores.max=8."
        )
    if name in _PACKAGES and importlib.util.find_spec(_PACKAGES[name]) is None:
        raise MissingPackage(f'Engine "{name}"', _PACKAGES[name], name)


def open_engine(config: EngineConfig, work: Path, progress: Progress | None = None) -> Engine:
    """Open an engine, which is closed by `close` or as a context.

    `work` holds the unfinished work that a rerun reuses.
    """
    check_engine(config)
    if config.engine == "local":
        from recmill.engines.local import LocalEngine

        return LocalEngine(work, config.workers, config.memory, progress)
    from recmill.engines.cluster import Cluster, ClusterEngine

    cluster: Cluster
    if config.engine == "ray":
        from recmill.engines.ray import RayCluster

        cluster = RayCluster(work, config.address, config.workers, config.memory)
    else:
        from recmill.engines.spark import SparkCluster

        address = f"local[{config.workers}]" if config.workers is not None else config.address
        cluster = SparkCluster(work, address, config.spark_conf, config.memory)
    return ClusterEngine(cluster, work, config.memory, progress)
