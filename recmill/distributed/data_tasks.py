"""Ray tasks that read, parse and apply features, on whatever CPUs or nodes are free."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import ray
from ray.exceptions import GetTimeoutError, RayTaskError

from recmill.dataset.batch import Batch, between, joined
from recmill.errors import RecmillError

P = TypeVar("P")
T = TypeVar("T")
PREFETCHED = 2  # results that are ready and wait, besides those in progress
_RETRIES = 10  # retries of a task whose process or node died
_MAX_OPENED = 2  # the splits of a run share a source; a process outlives a run


@dataclass(frozen=True)
class DataWorkers:
    """How many tasks read at once, and the custom resource of their nodes (any node without one).

    A task reserves one CPU. If no CPU becomes free within `patience_seconds`, because training workers hold them all,
    tasks run without a reservation: slowly, but training does not wait for ever.
    """

    number: int
    resource: str | None = None
    patience_seconds: float = 30.0

    def options(self, num_cpus: int = 1) -> dict[str, Any]:
        return {
            "num_cpus": num_cpus,
            "resources": node_affinity_resource(self.resource),
            "scheduling_strategy": "SPREAD",
            "max_retries": _RETRIES,
        }


def node_affinity_resource(resource: str | None) -> dict[str, float]:
    """A Ray custom resource that selects the nodes; CPUs limit how many tasks run there at once."""
    return {resource: 0.001} if resource else {}


@dataclass(frozen=True)
class Broadcast:
    """A large value that every process needs: put into the object store, unpacked once per process."""

    key: str
    refs: tuple[ray.ObjectRef[Any], ...]  # inside a tuple, Ray does not unpack it for each task

    @classmethod
    def of(cls, value: Any) -> Broadcast:
        return cls(uuid.uuid4().hex, (ray.put(value),))

    def open(self) -> Any:
        if self.key not in _opened:
            while len(_opened) >= _MAX_OPENED:
                _opened.pop(next(iter(_opened)))
            _opened[self.key] = ray.get(self.refs[0])
        return _opened[self.key]


_opened: dict[str, Any] = {}


@dataclass(frozen=True)
class Slice:
    """One rank's rows of a unit, and how many of them belong to each global batch of the unit."""

    rows: Batch
    counts: tuple[int, ...]


def _read_slices(
    source: Broadcast, split: str, number: int, epoch: int, spans: Sequence[Sequence[tuple[int, int]]]
) -> Any:
    """A task: read a unit and cut it; `spans` are, for each rank, the rows of each batch."""
    unit = source.open()[split].unit(number, epoch)
    slices = [
        Slice(
            joined([between(unit, begin, end) for begin, end in of_rank]),
            tuple(end - begin for begin, end in of_rank),
        )
        for of_rank in spans
    ]
    return slices if len(slices) > 1 else slices[0]


def _call(function: Broadcast, part: Any) -> Any:
    return function.open()(part)


slices_task = ray.remote(_read_slices)
_call_task = ray.remote(_call)


def get(ref: Any, timeout: float | None = None) -> Any:
    """`ray.get` that raises our own errors as they were raised, not wrapped by the task."""
    try:
        return ray.get(ref, timeout=timeout)
    except RayTaskError as error:
        if isinstance(error.cause, RecmillError):
            raise error.cause from None
        raise


class OnTasks:
    """Calls a function for every unit in Ray tasks; results come in order, some of them prefetched."""

    def __init__(self, workers: DataWorkers) -> None:
        self.workers = workers

    def __call__(self, function: Callable[[P], T], parts: Sequence[P]) -> Iterator[T]:
        task: Any = _call_task.options(**self.workers.options())
        broadcast = Broadcast.of(function)
        window = self.workers.number + PREFETCHED
        waiting = [task.remote(broadcast, part) for part in parts[:window]]
        for index in range(len(parts)):
            try:
                result = get(waiting[0], self.workers.patience_seconds)
            except GetTimeoutError:
                for ref in waiting:
                    ray.cancel(ref)
                task = _call_task.options(**self.workers.options(num_cpus=0))
                waiting = [task.remote(broadcast, part) for part in parts[index : index + window]]
                result = get(waiting[0])
            del waiting[0]
            if index + window < len(parts):
                waiting.append(task.remote(broadcast, parts[index + window]))
            yield result
