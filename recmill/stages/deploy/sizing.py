"""How much a recipe needs: memory, disk, cores and servers, with the arithmetic shown.

Constants were measured on 2 cores of an Intel Xeon with AVX-512 (benchmarks/, docs/log.md). Estimates are meant to be
right within a factor of two; a table that outgrows them is killed by its limit, so limits have some room.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from recmill.recipe.defaults import DEFAULT_BATCH_SIZE
from recmill.recipe.recipe import Recipe
from recmill.stages.deploy.model_size import STORE_BYTES, ModelSize, Traffic, traffic_of

MB, GB = 1 << 20, 1 << 30


@dataclass(frozen=True)
class Resources:
    """Cores and bytes of one container."""

    cpus: float
    memory: int


@dataclass(frozen=True)
class Line:
    """One line of the arithmetic: what, how it was computed, and what came out."""

    what: str
    how: str
    result: str

    def __str__(self) -> str:
        return f"{self.what:<22} {self.how} = {self.result}"


@dataclass(frozen=True)
class Sizing:
    """What each stage needs. `prepare_fixed` is the part of prepare's memory that its --memory does not bound."""

    prepare: Resources
    train: Resources
    export: Resources
    serve: Resources
    replicas: int
    requests_per_core: float
    log_bytes: int
    table_bytes: int
    checkpoint_bytes: int
    bundle_bytes: int
    runs_bytes: int
    redis_bytes: int
    prepare_fixed: int
    prepare_seconds: float
    train_seconds: float
    arithmetic: tuple[Line, ...] = field(default=(), repr=False)

    @property
    def prepare_bound(self) -> int:
        """--memory of prepare that keeps it within its container."""
        return self.prepare.memory - self.prepare_fixed

    def lines(self) -> list[str]:
        """The arithmetic, line by line."""
        return [str(line) for line in self.arithmetic]

    def summary(self) -> list[str]:
        """What each stage is given."""
        stages = {"prepare": self.prepare, "train": self.train, "export": self.export, "serve": self.serve}
        each = {name: f"{need.cpus:g} cores   {_bytes(need.memory)}" for name, need in stages.items()}
        each["serve"] += f"   {self.replicas} servers"
        each["disk"] = f"log {_bytes(self.log_bytes)}   runs {_bytes(self.runs_bytes)}"
        return [f"{name:<8} {needs}" for name, needs in each.items()]


# what was measured

_GFLOPS = 92.0  # of a core that trains
_ID_MICROSECONDS, _ROW_MICROSECONDS = 0.16, 1.0  # to look up and update an id; to read a row
_SECOND_CORE = 0.77  # what a core adds when others are busy
_PREPARED_CELLS = 190_000 * 40.0  # values that a core prepares in a second
_CANDIDATES, _SERVE_GFLOPS = 500, 137.0
_REQUEST_MS = 3.0  # of a request, beside the graph
_SPLIT, _NEIGHBOURS = 0.5, 1.2  # what the split graph saves; two busy cores
_BUSY = 0.5  # of a core's time, above which p99 climbs
_VOCABULARY_BYTES = 27  # of a fitted value in prepare
# In a text file, with separator.
_COLUMN_BYTES = {"int": 4.0, "float": 8.0, "text": 9.0, "hex": 8.5, "bool": 2.0, "time": 11.0}
# Python and its libraries, one process
_PROGRAM = {"prepare": 300 * MB, "train": 500 * MB, "export": 800 * MB, "serve": 300 * MB}
_COPIES = 12  # of a batch's floats while a model learns from it
_PACKED = 0.55  # bytes of a Table for each byte of its values
_VERSIONS = 4  # bundles that are kept, with the one that is being made
_LEAST_BOUND, _USUAL_BOUND = 256 * MB, 2 * GB
_ROOM = 1.3  # of memory that is found by adding up
_HOURS = 1.0  # of training that cores are chosen for
_MOST_CPUS = 16
SERVE_CPUS = 2  # of one server, a process on each


def smallest_bound() -> int:
    """The least --memory that prepare takes."""
    return _LEAST_BOUND


# what the stages need


def size(
    recipe: Recipe,
    rows: int | None = None,
    items: int | None = None,
    users: int | None = None,
    rate: float | None = None,
) -> Sizing:
    """What the stages need for a log of so many rows, items and users and for so many requests/s.

    What is not given is that of the log that the recipe is made for.
    """
    usual = traffic_of(recipe)
    traffic = Traffic(rows or usual.rows, items or usual.items, users or usual.users, rate or usual.rate)
    shape, sheet = ModelSize(recipe, traffic), _Sheet()
    disk = _disk(shape, sheet)
    prepare, fixed, prepare_seconds = _prepare(shape, disk, sheet)
    train, train_seconds = _train(shape, sheet)
    export = Resources(2, _up(_PROGRAM["export"] + _ROOM * 2 * disk.bundle))
    sheet.add(
        "export memory",
        f"program {_bytes(_PROGRAM['export'])} + bundle {_bytes(disk.bundle)} x 2 x {_ROOM}",
        _bytes(export.memory),
    )
    serve, replicas, per_core = _serve(shape, disk, sheet)
    redis = _redis(shape, sheet)
    return Sizing(
        prepare=prepare,
        train=train,
        export=export,
        serve=serve,
        replicas=replicas,
        requests_per_core=per_core,
        log_bytes=_up(disk.log * _ROOM, GB),
        table_bytes=round(disk.table),
        checkpoint_bytes=round(disk.checkpoint),
        bundle_bytes=round(disk.bundle),
        runs_bytes=_up(disk.runs * _ROOM, GB),
        redis_bytes=redis,
        prepare_fixed=fixed,
        prepare_seconds=prepare_seconds,
        train_seconds=train_seconds,
        arithmetic=tuple(sheet.lines),
    )


class _Sheet:
    """The lines of the arithmetic."""

    def __init__(self) -> None:
        self.lines: list[Line] = []

    def add(self, what: str, how: str, result: str) -> None:
        self.lines.append(Line(what, how, result))


@dataclass(frozen=True)
class _Disk:
    log: float
    table: float
    checkpoint: float
    bundle: float
    runs: float


def _disk(shape: ModelSize, sheet: _Sheet) -> _Disk:
    rows = shape.traffic.rows
    log = rows * sum(_COLUMN_BYTES[column.type] for column in shape.recipe.log.columns)
    sheet.add("log", f"{rows:,} rows x {log / rows:,.0f} B", _bytes(log))
    table = rows * shape.row_bytes * _PACKED
    sheet.add("Table", f"{rows:,} rows x {shape.row_bytes:,.0f} B x {_PACKED} packed", _bytes(table))
    _add_tables(shape, sheet)
    checkpoint = _checkpoint(shape, sheet)
    bundle = _bundle(shape, sheet)
    raw = log * _PACKED  # columns that the pipeline keeps, to measure the live model on the same rows
    runs = 2 * (table + raw) + (2 + _VERSIONS) * checkpoint + 2 * _VERSIONS * bundle
    sheet.add(
        "disk of runs",
        f"(Table + raw columns {_bytes(raw)}) x 2 while it is made + checkpoints x 2 while they change "
        f"and {_VERSIONS} kept + {_VERSIONS} bundles and as many that were refused",
        _bytes(runs),
    )
    return _Disk(log, table, checkpoint, bundle, runs)


def _add_tables(shape: ModelSize, sheet: _Sheet) -> None:
    for collection in dict.fromkeys(table.model for table in shape.tables):
        tables = [table for table in shape.tables if table.model == collection]
        ids = sum(table.ids for table in tables)
        how = (
            " + ".join(f"{table.name} {table.ids:,}" for table in tables)
            if len(tables) <= 12
            else f"{len(tables)} tables x {ids / len(tables):,.0f} on average"
        )
        sheet.add("embedding rows", f"{collection}: {how}", f"{ids:,}")


def _checkpoint(shape: ModelSize, sheet: _Sheet) -> float:
    total = 0.0
    for name, spec, weights in shape.models:
        tables = sum(table.saved for table in shape.tables if table.model.startswith(name))
        # A full one, and deltas that come to as much; after the first epoch each has nearly all rows.
        copies = min(
            spec.evaluations, 2 if spec.epochs <= 1 or spec.evaluations < spec.saving.full_every else 3
        )
        total += copies * (tables + 12.0 * weights)
        sheet.add(
            "checkpoints",
            f"{name}: (tables {_bytes(tables)} + {weights:,} dense weights x 12 B) x {copies}",
            _bytes(copies * (tables + 12.0 * weights)),
        )
    return total


def _bundle(shape: ModelSize, sheet: _Sheet) -> float:
    tables = sum(table.served for table in shape.tables)
    weights = sum(weights for _, _, weights in shape.models)
    total = tables + 8.0 * weights
    sheet.add("bundle", f"tables {_bytes(tables)} + {weights:,} dense weights x 8 B", _bytes(total))
    for side, many in shape.entities:
        each = shape.entity_bytes(side)
        sheet.add("bundle", f"{many:,} {side}s x {each:,.0f} B", _bytes(many * each))
        total += many * each
    return total


def _prepare(shape: ModelSize, disk: _Disk, sheet: _Sheet) -> tuple[Resources, int, float]:
    """Resources, the part of memory that --memory does not bound, and seconds."""
    ids = sum({table.name: table.ids for table in shape.tables}.values())
    fixed = _PROGRAM["prepare"] + round(ids * _VOCABULARY_BYTES)
    bound = min(_USUAL_BOUND, max(_LEAST_BOUND, _up(2 * disk.log)))
    memory = _up(fixed + bound)
    sheet.add(
        "prepare memory",
        f"program {_bytes(_PROGRAM['prepare'])} + {ids:,} ids x {_VOCABULARY_BYTES} B + --memory {_bytes(bound)}",
        _bytes(memory),
    )
    cells = shape.traffic.rows * (len(shape.recipe.features) + len(shape.recipe.labels))
    cpus, seconds = _cores_for(cells / _PREPARED_CELLS)
    sheet.add(
        "prepare time",
        f"{cells:,} values / {_PREPARED_CELLS:,.0f} a second and core, {cpus} cores",
        _time(seconds),
    )
    return Resources(cpus, memory), fixed, seconds


def _train(shape: ModelSize, sheet: _Sheet) -> tuple[Resources, float]:
    """Models are trained one after the other, so that memory is that of the largest."""
    memory, work = 0.0, 0.0
    for name, spec, weights in shape.models:
        tables = sum(table.memory for table in shape.tables if table.model.startswith(name))
        floats = shape.floats_per_row(name)
        batch_size = spec.batch_size or DEFAULT_BATCH_SIZE
        batch = batch_size / spec.micro_batches * floats * 4 * _COPIES
        need = _PROGRAM["train"] + 1.5 * tables + batch
        memory = max(memory, need)
        sheet.add(
            "train memory",
            f"{name}: program {_bytes(_PROGRAM['train'])} + tables {_bytes(tables)} x 1.5 while they are saved + "
            f"batch {batch_size:,} x {floats:,} floats x 4 B x {_COPIES}",
            _bytes(need),
        )
        each = 6e-3 * weights / _GFLOPS + _ID_MICROSECONDS * shape.ids_per_row(name) + _ROW_MICROSECONDS
        seconds = shape.traffic.rows * spec.epochs * each / 1e6
        sheet.add(
            "train time",
            f"{name}: {shape.traffic.rows:,} rows x {spec.epochs:g} epochs x {each:,.1f} us of a core "
            f"({1e6 / each:,.0f} rows/s: {weights:,} dense weights, {shape.ids_per_row(name):.0f} ids a row)",
            _time(seconds),
        )
        work += seconds
    cpus, seconds = _cores_for(work)
    sheet.add(
        "train cores",
        f"{_time(work)} of work, so that it takes about an hour, at most {_MOST_CPUS}",
        f"{cpus} ({_time(seconds)})",
    )
    return Resources(cpus, _up(memory * _ROOM)), seconds


def _cores_for(work: float) -> tuple[int, float]:
    """Cores for so many seconds of one core's work, at least two, and the seconds that they take."""
    cpus = 2
    while cpus < _MOST_CPUS and _spread(work, cpus) > _HOURS * 3600:
        cpus *= 2
    return cpus, _spread(work, cpus)


def _spread(work: float, cpus: int) -> float:
    return work / (1 + (cpus - 1) * _SECOND_CORE)


def _serve(shape: ModelSize, disk: _Disk, sheet: _Sheet) -> tuple[Resources, int, float]:
    """Resources of a server of two processes, how many servers, and requests/s of a core."""
    weights = next((weights for name, _, weights in shape.models if name == "ranking"), 0)
    graph_ms = _CANDIDATES * 2 * weights / _SERVE_GFLOPS / 1e6 * _SPLIT
    request_ms = _NEIGHBOURS * (_REQUEST_MS + graph_ms)
    sheet.add(
        "a request",
        f"({_REQUEST_MS:g} ms + {_CANDIDATES} candidates x 2 x {weights:,} weights / {_SERVE_GFLOPS:g} GFLOP/s "
        f"x {_SPLIT:g}) x {_NEIGHBOURS:g}",
        f"{request_ms:.1f} ms of a core",
    )
    per_core = 1000 * _BUSY / request_ms
    sheet.add(
        "requests of a core", f"1000 ms x {_BUSY:g} busy / {request_ms:.1f} ms", f"{per_core:.0f} a second"
    )
    rate = shape.traffic.rate
    replicas = max(2, math.ceil(rate / (per_core * SERVE_CPUS)))
    sheet.add(
        "servers", f"{rate:g} requests/s / ({SERVE_CPUS} cores x {per_core:.0f}), at least 2", str(replicas)
    )
    memory = SERVE_CPUS * _PROGRAM["serve"] + 2 * disk.bundle * _ROOM
    sheet.add(
        "serve memory",
        f"{SERVE_CPUS} processes x {_bytes(_PROGRAM['serve'])} + bundle {_bytes(disk.bundle)} x 2 while versions "
        f"change x {_ROOM}",
        _bytes(memory),
    )
    return Resources(SERVE_CPUS, _up(memory)), replicas, per_core


def _redis(shape: ModelSize, sheet: _Sheet) -> int:
    memory = _up(_ROOM * shape.store_bytes + 64 * MB)
    if shape.entities:
        many = " + ".join(f"{number:,} {side}s" for side, number in shape.entities)
        sheet.add(
            "Redis memory", f"64 MB + ({many}) x ({STORE_BYTES} B + 8 B x features) x {_ROOM}", _bytes(memory)
        )
    return memory


def _up(number: float, unit: int = 64 * MB) -> int:
    """Rounded up to whole units."""
    return math.ceil(number / unit) * unit


def _bytes(number: float) -> str:
    for unit, many in (("TB", 1 << 40), ("GB", GB), ("MB", MB), ("KB", 1 << 10)):
        if number >= many:
            return f"{number / many:,.1f} {unit}"
    return f"{number:,.0f} B"


def _time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:,.0f} s"
    return f"{seconds / 60:,.0f} min" if seconds < 7200 else f"{seconds / 3600:,.1f} h"
