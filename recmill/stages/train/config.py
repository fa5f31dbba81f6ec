"""The configs of train: of a run, of its workers on Ray, and of following a log."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from recmill.config import FRACTION, SECONDS, SIZE, WHOLE, Flag, ValueKind
from recmill.logs.config import DEFAULT_MAX_BAD

Model = Literal["ranking", "retrieval"]
WorkerRange = tuple[int, int]  # at least, at most


@dataclass(frozen=True)
class TrainConfig:
    """Where and how a run happens; the recipe decides what it learns."""

    only: Annotated[Model | None, Flag("train this model (default: all that the recipe has)")] = None
    threads: Annotated[int | None, Flag("threads (default: chosen by a short probe at startup)")] = None
    wait_policy: Annotated[
        Literal["passive", "active"],
        Flag("what idle threads do: sleep, or spin, which is faster on a dedicated machine"),
    ] = "passive"
    table_memory: Annotated[
        int | None,
        Flag("memory bound of embedding tables; what is beyond it lies on disk (default: none)", SIZE),
    ] = None
    track: Annotated[
        tuple[Literal["tensorboard", "mllog", "mlflow"], ...],
        Flag("also write what goes to history.jsonl for this tool; may be repeated"),
    ] = ()
    profile: Annotated[int | None, Flag("write a Chrome trace of N steps beside the checkpoints")] = None
    resume: Annotated[bool, Flag("go on from the last good checkpoint in --into")] = False
    max_bad: Annotated[float, Flag("with --from-log: fraction of bad rows that is an error", FRACTION)] = (
        DEFAULT_MAX_BAD
    )
    wire: Annotated[
        Literal["float32", "float16", "bfloat16"],
        Flag("how rows of embeddings and their gradients travel between workers"),
    ] = "float32"
    balance: Annotated[bool, Flag("give slow workers smaller slices of each batch")] = True


def _parse_worker_range(text: str) -> WorkerRange:
    match = re.fullmatch(r"([1-9][0-9]{0,5})(?:\.\.([1-9][0-9]{0,5}))?", text, re.ASCII)
    if not match or int(match[2] or match[1]) < int(match[1]):
        raise ValueError(f"must be a number from 1, or a range such as 2..4, got {text}")
    return int(match[1]), int(match[2] or match[1])


@dataclass(frozen=True)
class RayTrainConfig:
    """How many workers train on Ray, and where. With a range, as many as fit into the cluster."""

    workers: Annotated[
        WorkerRange,
        Flag(
            "on Ray: processes that train together, or a range: as many as the cluster has room for "
            "(default: 1)",
            ValueKind(_parse_worker_range, "N|A..B"),
        ),
    ] = (1, 1)
    address: Annotated[
        str | None,
        Flag(
            "on Ray: the cluster (default: Ray is started on this machine)",
            metavar="auto|HOST:PORT",
        ),
    ] = None
    max_failures: Annotated[
        int, Flag("on Ray: how often workers may be lost before the run ends", WHOLE, metavar="K")
    ] = 3
    cpus_per_worker: Annotated[int, Flag("on Ray: CPUs and threads of each worker", metavar="C")] = 1
    worker_resource: Annotated[
        str | None,
        Flag("on Ray: train only on nodes with this custom resource", metavar="NAME"),
    ] = None
    data_workers: Annotated[
        int | None,
        Flag(
            "on Ray: read, parse and apply features in so many tasks at once, on any node",
            metavar="D",
        ),
    ] = None
    data_resource: Annotated[
        str | None, Flag("with --data-workers: only on nodes with this custom resource", metavar="NAME")
    ] = None

    @property
    def num_cpus(self) -> int:
        """CPUs that the smallest such run uses."""
        return self.workers[0] * self.cpus_per_worker + (self.data_workers or 0)


@dataclass(frozen=True)
class FollowConfig:
    """How often a delta is published, the learning rate (a fraction of the recipe's), and the duration."""

    every_seconds: Annotated[
        float, Flag("with --follow: seconds between deltas", SECONDS, name="--every")
    ] = 5.0
    rate: Annotated[float, Flag("with --follow: fraction of the recipe's learning rates", FRACTION)] = 0.3
    max_seconds: Annotated[
        float | None, Flag("with --follow: stop after (default: never)", SECONDS, name="--for")
    ] = None
    tables: Annotated[
        Path | None,
        Flag("with --follow from a stream: the directory of side tables", metavar="DIR"),
    ] = None
    threads: int = 1
    warn: Callable[[str], None] = lambda message: None
