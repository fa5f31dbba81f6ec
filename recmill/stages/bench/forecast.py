"""How training scales to more workers than there are here: arithmetic over what was measured (docs/scaling.md)."""

from __future__ import annotations

from dataclasses import dataclass

from recmill.embeddings.placement import all_reduce_bytes

_COLLECTIVES = 4  # exchanges of sizes, keys, rows and gradients in a step


@dataclass(frozen=True)
class MachineRates:
    """What one machine told: a worker's speed alone, and what a row sends when there are several."""

    samples_per_second: float  # of one worker, without others
    wire_bytes_per_sample: float  # sent for embeddings and dense weights together, by all workers
    measured_with_workers: int
    dense_parameters: int
    batch_size: int = 2048  # of all workers together, when the bytes were measured

    @property
    def sparse_bytes_per_sample(self) -> float:
        """What a row would send if no key were at home: keys, rows and gradients."""
        workers = self.measured_with_workers
        dense = workers * all_reduce_bytes(self.dense_parameters, workers) / self.batch_size
        return max(0.0, self.wire_bytes_per_sample - dense) * workers / (workers - 1)


@dataclass(frozen=True)
class Network:
    """What a worker may send and receive at once, and what each message costs beside its bytes."""

    gigabits_per_second: float = 25.0
    microseconds_per_message: float = 15.0

    def seconds(self, num_bytes: float, messages: float) -> float:
        return (
            num_bytes * 8 / (self.gigabits_per_second * 1e9) + messages * self.microseconds_per_message / 1e6
        )


@dataclass(frozen=True)
class Forecast:
    """A step of many workers, in seconds, and what bounds it."""

    workers: int
    rows_each: int
    seconds_compute: float
    seconds_sparse: float
    seconds_dense: float
    samples_per_second: float
    efficiency: float  # of as many workers that need not talk
    limit: str


def forecast(measured: MachineRates, network: Network, workers: int, rows_each: int) -> Forecast:
    """A synchronous step: compute, then the exchange of rows before it and of gradients behind it.

    Dense gradients travel while those of rows do, so the longer of the two counts; nothing else overlaps.
    """
    compute = rows_each / measured.samples_per_second
    remote = (workers - 1) / workers
    sparse = network.seconds(
        rows_each * measured.sparse_bytes_per_sample * remote, _COLLECTIVES * (workers - 1)
    )
    dense = network.seconds(all_reduce_bytes(measured.dense_parameters, workers), 2 * (workers - 1))
    gradients = sparse / 2  # rows come, gradients go: each about half of the bytes
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
