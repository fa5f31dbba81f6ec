"""The configs of bench: what is measured, and how often."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from recmill.config import SIZE, Flag

Shape = Literal["dlrm", "dlrm_dot", "dlrm_cross", "wide_deep"]
EngineName = Literal["local", "ray", "spark"]

_ROWS = Flag("generated Criteo rows")
_REPEAT = Flag("interleaved rounds; medians are reported")
_CORES = Flag("threads (default: the cores this process may use)")
_PEER = Flag(
    "another system of benchmarks/peers, or all; needs a checkout; may be repeated (default: none)",
    metavar="NAME",
)
_DATA = Flag("keep and reuse the generated log there (default: a temporary folder)")


@dataclass(frozen=True)
class PrepareBenchConfig:
    """Raw Criteo text to Table, beside a bare read of the same file."""

    rows: Annotated[int, _ROWS] = 1_000_000
    recipe: Annotated[str, Flag("recipe to prepare with")] = "criteo-dlrm"
    memory: Annotated[int, Flag("memory bound of prepare", SIZE)] = 2 << 30
    workers: Annotated[int | None, _CORES] = None
    repeat: Annotated[int, _REPEAT] = 1
    peer: Annotated[tuple[str, ...], _PEER] = ()
    data: Annotated[Path | None, _DATA] = None


@dataclass(frozen=True)
class TrainBenchConfig:
    """Training from a Table and from the raw log. A run lasts `seconds`, or longer until it has made `min_steps`."""

    shape: Annotated[
        tuple[Shape, ...],
        Flag(
            "DeepRec's DLRM (batch 2048), the same with dot products or cross layers instead of concatenation, "
            "which no peer trains, or Intel's Wide & Deep (batch 512); may be repeated (default: dlrm)"
        ),
    ] = ()
    rows: Annotated[int, _ROWS] = 1_000_000
    repeat: Annotated[int, _REPEAT] = 5
    threads: Annotated[tuple[int, ...], Flag("may be repeated (default: 1 and all cores)")] = ()
    peer: Annotated[tuple[str, ...], _PEER] = ()
    peer_python: Annotated[
        Mapping[str, str],
        Flag(
            "interpreter of a peer that has an environment of its own; may be repeated", metavar="PEER=PYTHON"
        ),
    ] = field(default_factory=dict)
    seconds: Annotated[int, Flag("timed seconds of one run")] = 5
    data: Annotated[Path | None, _DATA] = None
    min_steps: int = 60


@dataclass(frozen=True)
class EmbeddingsBenchConfig:
    """Lookup and update of batches of `batch` keys, over tables that hold `keys` keys together."""

    keys: Annotated[
        tuple[int, ...],
        Flag("keys in all tables together; may be repeated (default: 100000 and 10000000)"),
    ] = ()
    dim: Annotated[int, Flag("floats of a row")] = 16
    memory: Annotated[
        int | None, Flag("bound of records in memory; the rest is on disk (default: none)", SIZE)
    ] = None
    threads: Annotated[int | None, _CORES] = None
    repeat: Annotated[int, _REPEAT] = 5
    data: Annotated[Path | None, Flag("folder of the disk tier (default: the current directory)")] = None
    batch: int = 2048 * 26


@dataclass(frozen=True)
class DenseBenchConfig:
    """The products of dense layers, one kernel at a time."""

    milliseconds: Annotated[int, Flag("time for each product of each layer")] = 300


@dataclass(frozen=True)
class ScaleBenchConfig:
    """One process and several workers, and a forecast for many."""

    rows: Annotated[int, _ROWS] = 400_000
    repeat: Annotated[int, _REPEAT] = 3
    engine: Annotated[
        tuple[EngineName, ...],
        Flag("engines to prepare with, and ray to train on; may be repeated (default: all three)"),
    ] = ()
    gigabits: Annotated[int, Flag("network of the forecast")] = 25
    data: Annotated[Path | None, _DATA] = None
