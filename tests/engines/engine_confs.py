"""What differs between engines in tests: how one comes to be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from recmill.engines.cluster import Cluster
from recmill.stages.prepare.prepare import PrepareConfig

PACKAGES = {"ray": "ray", "spark": "pyspark"}


class EngineConf(Protocol):
    name: str

    def options(self, **changes: Any) -> PrepareConfig:
        """Options of prepare that use this engine."""


class ClusterConf(EngineConf, Protocol):
    """An engine of several processes."""

    def cluster(self, work: Path) -> Cluster: ...


class LocalConf:
    name = "local"

    def options(self, **changes: Any) -> PrepareConfig:
        return PrepareConfig(**changes)


class RayConf:
    """Two machines of one processor each, as far as Ray knows."""

    name = "ray"

    def __init__(self) -> None:
        from ray_cluster import shared_ray

        shared_ray()

    def options(self, **changes: Any) -> PrepareConfig:
        return PrepareConfig(engine="ray", **changes)

    def cluster(self, work: Path) -> Cluster:
        from recmill.engines.ray import RayCluster

        return RayCluster(work)


class SparkConf:
    """Two executors of one processor each."""

    name = "spark"

    def __init__(self) -> None:
        from spark_cluster import shared_spark

        shared_spark()

    def options(self, **changes: Any) -> PrepareConfig:
        return PrepareConfig(engine="spark", **changes)

    def cluster(self, work: Path) -> Cluster:
        from recmill.engines.spark import SparkCluster

        return SparkCluster(work)


CONFS: dict[str, Callable[[], EngineConf]] = {"local": LocalConf, "ray": RayConf, "spark": SparkConf}
