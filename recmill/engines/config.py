"""Which engine runs a stage, and with what. Free of heavy imports, and of annotations as text: see recmill.config."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from recmill.config import SIZE, Flag

DEFAULT_MEMORY = 2 << 30


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Where rows are processed: on threads of this process, or in tasks of a cluster."""

    engine: Annotated[
        Literal["local", "ray", "spark"], Flag("where to run (default: local, threads of this process)")
    ] = "local"
    address: Annotated[
        str | None,
        Flag(
            "address of a cluster: Ray's auto or HOST:PORT; Spark's spark://HOST:PORT, yarn, k8s://URL, local[2] or "
            "sc://HOST:PORT for Spark Connect (default: a cluster that is started on this machine)",
            metavar="URL",
        ),
    ] = None
    spark_conf: Annotated[
        Mapping[str, str],
        Flag("a setting of Spark's own, such as spark.executor.memory=4g; may be given again"),
    ] = field(default_factory=dict)
    memory: Annotated[
        int, Flag("memory bound, such as 1GB, of this process and of each task of a cluster", SIZE)
    ] = DEFAULT_MEMORY
    workers: Annotated[
        int | None,
        Flag(
            "threads, or tasks of a cluster at once (default: the cores that this process or the cluster has)"
        ),
    ] = None
