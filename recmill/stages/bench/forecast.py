"""A forecast of training with more workers than this machine has, from what it measured (docs/scaling.md)."""

from __future__ import annotations

from dataclasses import dataclass

from recmill.distributed.placement import all_reduce_bytes

_COLLECTIVES = 4  # exchanges of sizes, keys, rows and gradients in a step


@dataclass(frozen=True)
class MachineRates:
    """What was measured on one machine: the speed of one worker, and the bytes that several send for a sample."""

    samples_per_second: float  # of one worker alone
    wire_bytes_per_sample: float  # embeddings and dense weights, all workers together
    measured_with_workers: int
    dense_parameters: int
    batch_size: int = 2048  # of all workers together, when the bytes were measured

    @property
    def sparse_bytes_per_sample(self) -> float:
        """Keys, rows and gradients of one sample if every key were on another worker."""
        workers = self.measured_with_workers
        dense = workers * all_reduce_bytes(self.dense_parameters, workers) / self.batch_size
        return max(0.0, self.wire_bytes_per_sample - dense) * workers / (workers - 1)


@dataclass(frozen=True)
class Network:
    """Bandwidth of one worker, and the latency of each message."""

    gigabits_per_second: float = 25.0
    microseconds_per_message: float = 15.0

    def seconds(self, num_bytes: float, messages: float) -> float:
        return (
            num_bytes * 8 / (self.gigabits_per_second * 1e9) + messages * self.microseconds_per_message / 1e6
        )


@dataclass(frozen=True)
class Forecast:
    """The seconds of a step with many workers, and what limits it."""

    workers: int
    rows_each: int
    seconds_compute: float
    seconds_sparse: float
    seconds_dense: float
    samples_per_second: float
    efficiency: float  # 1.0 if workers exchanged nothing
    limit: str


def forecast(measured: MachineRates, network: Network, workers: int, rows_each: int) -> Forecast:
    """A synchronous step: fetch rows, compute, send gradients.

    Dense and sparse gradients are sent at the same time, so the longer of the two counts; nothing else overlaps.
    """
    compute = rows_each / measured.samples_per_second
    remote = (workers - 1) / workers
    sparse = network.seconds(
        rows_each * measured.sparse_bytes_per_sample * remote, _COLLECTIVES * (workers - 1)
    )
    dense = network.seconds(all_reduce_bytes(measured.dense_parameters, workers), 2 * (workers - 1))
    gradients = sparse / 2  # rows one way, gradients the other: each about half of the bytes
    step = compute + sparse / 2 + max(gradients, dense)
    parts = {
        "compute": compute,
        "network, embeddings": sparse,
        "network, dense weights": dense if dense > gradients else 0.0,
    }
    return Forecast(
        workers, rows_each, compute, sparse, dense,
        workers * rows_each / step, compute / step, max(parts, key=lambda name: parts[name]),
    )  # fmt: skip
