"""What a run is: one frozen tree, written as TOML or built in Python, stored inside every artifact."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from recmill.spec.steps import Step, Value

Owner = Literal["user", "item", "context"]

# Columns that recmill adds to rows. Names that begin with __ are ours.
POSITION = "__position"  # place in the log: int64, file number << 44 | offset; unique, and the same for any partitioning
SPLIT = "__split"  # index into SPLITS
COPY = "__copy"  # 0 for a row of the log, from 1 for the negatives made from it
SPLITS = ("train", "eval", "test")


@dataclass(frozen=True)
class Column:
    """One column of a log. `hex` is an integer written in base 16; `text` stays text."""

    name: str
    type: Literal["int", "float", "text", "hex", "bool"]
    of: Owner = "context"
    allowed: tuple[Value, ...] | None = None
    required: bool = False


@dataclass(frozen=True)
class Log:
    """Raw events as users have them. `files` are names or globs, relative to the data directory."""

    files: tuple[str, ...]
    columns: tuple[Column, ...]
    format: Literal["delimited", "parquet", "jsonl"] = "delimited"
    separator: str = "\t"
    header: bool = False
    quote: str = ""
    encoding: Literal["utf-8", "latin-1"] = "utf-8"
    user: str | None = None
    item: str | None = None
    time: str | None = None


@dataclass(frozen=True)
class SideTable:
    """A smaller file with more columns for a key, such as users or items; joined by a `join` row operation."""

    files: tuple[str, ...]
    columns: tuple[Column, ...]
    format: Literal["delimited", "parquet", "jsonl"] = "delimited"
    separator: str = "\t"
    header: bool = False
    quote: str = ""
    encoding: Literal["utf-8", "latin-1"] = "utf-8"


@dataclass(frozen=True)
class RowOperation:
    """Something that adds, drops or orders rows, or looks at other rows. Runs before features, in recipe order."""

    main: ClassVar[str | None] = None


@dataclass(frozen=True)
class Filter(RowOperation):
    """Keep the rows for which a SQL expression over the log's columns is true."""

    main: ClassVar[str | None] = "sql"
    sql: str


@dataclass(frozen=True)
class Sample(RowOperation):
    """Keep a fraction of the rows, the same ones on every run."""

    main: ClassVar[str | None] = "fraction"
    fraction: float
    seed: int = 0


@dataclass(frozen=True)
class Join(RowOperation):
    """Add the columns of a side table; rows without a match get missing values."""

    main: ClassVar[str | None] = "table"
    table: str
    on: str


@dataclass(frozen=True)
class Dedupe(RowOperation):
    """Keep one row for each combination of `by`: the first or the last in the order of `order`."""

    by: tuple[str, ...]
    order: str
    keep: Literal["first", "last"] = "last"


@dataclass(frozen=True)
class History(RowOperation):
    """For each row, the user's earlier values of `columns` as `<column>_history`, oldest first.

    The row itself and rows of the same time stamp are not part of it. Rows with fewer than `min_length`
    earlier events are dropped; `last` keeps only that many latest rows for each user.
    """

    columns: tuple[str, ...]
    by: str
    order: str
    where: str | None = None
    max_length: int = 100
    min_length: int = 0
    last: int | None = None


@dataclass(frozen=True)
class Lag(RowOperation):
    """`<column>_lag<shift>`: the value minus the one `shift` rows earlier in the same group."""

    columns: tuple[str, ...]
    by: str
    order: str
    shift: int = 1


@dataclass(frozen=True)
class Negatives(RowOperation):
    """For each row, `per_row` copies with another item of the training rows and the label column set to `label_value`.

    Columns of the item come along. `uniform` draws each item alike, `popularity` as often as it occurs.
    """

    label: str
    per_row: int = 1
    by: Literal["uniform", "popularity"] = "uniform"
    label_value: Value = 0
    seed: int = 0


@dataclass(frozen=True)
class HistoryNegatives(RowOperation):
    """For each item of a history column, `per_item` other items, as `<column>_negatives` (lists joined in order)."""

    history: str
    per_item: int = 1
    by: Literal["uniform", "popularity"] = "uniform"
    seed: int = 0


ROW_OPERATIONS: dict[str, type[RowOperation]] = {
    "filter": Filter,
    "sample": Sample,
    "join": Join,
    "dedupe": Dedupe,
    "history": History,
    "lag": Lag,
    "negatives": Negatives,
    "history_negatives": HistoryNegatives,
}


@dataclass(frozen=True)
class Holdout:
    """Which rows train and which are held out. Without `[split]`, every row trains.

    tail: the last `held_out` share of the log by position     files: the files that match `held_out_files`
    time: rows at or after `from`, or the last share by time   hash: a share of the values of `column`
    last: for each `column` (a user), the last row by `order` is test, the one before it eval
    With `halve`, the first half of what is held out is eval and the second is test; else all of it is eval.
    """

    by: Literal["tail", "files", "time", "hash", "last"]
    held_out: float | None = None
    held_out_files: tuple[str, ...] = ()
    column: str | None = None
    order: str | None = None
    eval_from: float | None = None
    test_from: float | None = None
    halve: bool = False
    seed: int = 0


@dataclass(frozen=True)
class Feature:
    """One output column: what it is called, which columns it reads and the steps between."""

    name: str
    columns: tuple[str, ...]
    steps: tuple[Step, ...] = ()
    of: Owner = "context"
    dim: int | None = None


@dataclass(frozen=True)
class Label:
    """What models learn: a column of the log, or steps over several."""

    name: str
    columns: tuple[str, ...]
    steps: tuple[Step, ...] = ()


@dataclass(frozen=True)
class TableLayout:
    """How prepared rows are ordered: as in the log, shuffled, or `interleave`d: all files side by side, each in its
    own order, so that a batch holds rows of every day. `keep` names raw columns that the Table holds too,
    as `raw_<column>`.
    """

    order: Literal["log", "shuffle", "interleave"] = "log"
    seed: int = 0
    keep: tuple[str, ...] = ()


@dataclass(frozen=True)
class Optimizer:
    """An update rule and its learning rate."""

    name: Literal["sgd", "adagrad", "rowwise_adagrad", "adam", "adamw", "lamb", "ftrl", "adagrad_decay"]
    learning_rate: float
    eps: float | None = None
    weight_decay: float = 0.0
    l1: float = 0.0
    l2: float = 0.0


@dataclass(frozen=True)
class Schedule:
    """Learning rate over the run, as fractions of all steps: warm up, hold, decay."""

    warmup: float = 0.0
    decay_from: float = 1.0
    decay: Literal["polynomial", "cosine"] = "polynomial"
    power: float = 2.0


@dataclass(frozen=True)
class Training:
    """How a model is trained."""

    batch_size: int = 2048
    epochs: float = 1.0
    dense: Optimizer = field(default_factory=lambda: Optimizer("adagrad", 0.01))
    sparse: Optimizer = field(default_factory=lambda: Optimizer("rowwise_adagrad", 0.02))
    schedule: Schedule = field(default_factory=Schedule)
    evaluations: int = 1
    target: str | None = None
    patience: int | None = None
    seed: int = 0


@dataclass(frozen=True)
class Dynamic:
    """Options of dynamic tables: when a key gets a row, and when it loses it again."""

    admit_after: int = 1
    evict_after_steps: int | None = None
    evict_below_norm: float | None = None
    capacity: int | None = None


@dataclass(frozen=True)
class Ranking:
    """A model that scores (user, item, context) rows."""

    model: str
    label: str
    features: tuple[str, ...] = ()
    embedding_dim: int = 16
    bottom: tuple[int, ...] = ()
    top: tuple[int, ...] = ()
    interaction: Literal["dot", "cat", "cross"] = "dot"
    cross_layers: int = 3
    cross_rank: int = 512
    wide: tuple[str, ...] = ()
    hidden: tuple[int, ...] = ()
    dropout: float = 0.0
    dynamic: Dynamic | None = None
    wide_optimizer: Optimizer | None = None
    train: Training = field(default_factory=Training)


@dataclass(frozen=True)
class Retrieval:
    """Two towers, one of users and one of items, that meet in a dot product."""

    label: str
    user: tuple[str, ...]
    item: tuple[str, ...]
    model: str = "two_tower"
    embedding_dim: int = 16
    hidden: tuple[int, ...] = (128, 64)
    loss: Literal["in_batch_softmax", "bce"] = "in_batch_softmax"
    temperature: float = 0.05
    log_q: bool = True
    train: Training = field(default_factory=Training)


@dataclass(frozen=True)
class Recipe:
    """The whole chain, from log to model."""

    name: str
    log: Log
    features: tuple[Feature, ...]
    labels: tuple[Label, ...] = ()
    description: str = ""
    generate: str | None = None
    tables: dict[str, SideTable] = field(default_factory=dict)
    rows: tuple[RowOperation, ...] = ()
    split: Holdout | None = None
    table: TableLayout = field(default_factory=TableLayout)
    ranking: Ranking | None = None
    retrieval: Retrieval | None = None
