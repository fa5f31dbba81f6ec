"""The recipe: one frozen tree, written as TOML or built in Python, stored inside every artifact."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Literal, Self

from recmill.recipe.names import Names
from recmill.recipe.numbers import (
    AboveZero,
    Dropout,
    Fraction,
    NotNegative,
    Positive,
    Share,
    ShareOrAll,
    TreeDepth,
    Whole,
)
from recmill.recipe.steps import Step, Value

Owner = Literal["user", "item", "context"]
Shape = Literal["criteo", "recsys2021", "movielens", "shop"]

# Columns that recmill adds to rows. Names that begin with __ are ours.
POSITION = "__position"  # of a row in the log: see dataset/positions.py
SPLIT = "__split"  # index into SPLITS
COPY = "__copy"  # 0 for a row of the log, from 1 for the negatives made from it
SPLITS = ("train", "eval", "test")


@dataclass(frozen=True)
class Column:
    """One column of a log. `hex` is a hexadecimal integer; `text` stays text.

    `time` becomes seconds since 1970: ISO dates and times, numbers since 1970, or the given `format` (strptime).
    """

    name: str
    type: Literal["int", "float", "text", "hex", "bool", "time"]
    of: Owner = "context"
    allowed: tuple[Value, ...] | None = None
    required: bool = False
    format: str = ""
    in_file: str = ""

    @property
    def name_in_file(self) -> str:
        """The column's name in the file, if it differs: usually a key with another name in the log."""
        return self.in_file or self.name


Encoding = Literal["utf-8", "latin-1", "utf-16"]


@dataclass(frozen=True)
class TextFormat:
    """How delimited text is parsed."""

    separator: str = "\t"
    header: bool = False
    quote: str = ""
    escape: str = ""
    encoding: Encoding = "utf-8"


@dataclass(frozen=True)
class Files:
    """Files of rows: names or globs, relative to the data directory.

    `separator`, `header`, `quote`, `escape` and `encoding` are for delimited text; other formats do not need them. A
    value of None is detected from the first bytes of the files (logs/sniff.py); recipes in artifacts have all values.
    """

    files: tuple[str, ...]
    columns: tuple[Column, ...]
    format: Literal["delimited", "parquet", "jsonl"] = "delimited"
    separator: str | None = None
    header: bool | None = None
    quote: str | None = None
    escape: str | None = None
    encoding: Encoding | None = None

    @property
    def text(self) -> TextFormat:
        """The given text format, completed with TSV without a header."""
        given = {one.name: getattr(self, one.name) for one in fields(TextFormat)}
        return TextFormat(**{name: value for name, value in given.items() if value is not None})

    def with_text(self, other: TextFormat | Files) -> Self:
        """The files with missing values of the text format taken from `text`."""
        open_keys = [one.name for one in fields(TextFormat) if getattr(self, one.name) is None]
        return replace(self, **{name: getattr(other, name) for name in open_keys})


@dataclass(frozen=True)
class Log(Files):
    """Raw events; `user`, `item` and `time` name the columns of users, items and times."""

    user: str | None = None
    item: str | None = None
    time: str | None = None


@dataclass(frozen=True)
class SideTable(Files):
    """A smaller file with more columns for a key, such as users or items; `join` in `[[rows]]` adds them."""


@dataclass(frozen=True)
class RowOperation:
    """Adds, drops or orders rows. Operations run before features, in recipe order."""

    main: ClassVar[str | None] = None

    @classmethod
    def operation_name(cls) -> str:
        """The name in recipes."""
        return next(name for name, kind in ROW_OPERATIONS.items() if kind is cls)


@dataclass(frozen=True)
class Filter(RowOperation):
    """Keep the rows for which a condition over the log's columns is true."""

    main: ClassVar[str | None] = "sql"
    sql: str


@dataclass(frozen=True)
class Sample(RowOperation):
    """Keep a fraction of the rows, the same ones on every run."""

    main: ClassVar[str | None] = "fraction"
    fraction: ShareOrAll
    seed: Whole = 0


@dataclass(frozen=True)
class Join(RowOperation):
    """Add the columns of a side table; rows without a match get missing values."""

    main: ClassVar[str | None] = "table"
    table: str
    on: str


@dataclass(frozen=True)
class Dedupe(RowOperation):
    """Keep one row for each combination of `by`: the first or the last by `order`."""

    by: Names
    order: str
    keep: Literal["first", "last"] = "last"


@dataclass(frozen=True)
class History(RowOperation):
    """For each row, the user's earlier values of `columns` as `<column>_history`, oldest first.

    The row itself and rows of the same time stamp are excluded; with `same_time`, rows of that time stamp which
    precede it in the log are included. Rows with fewer than `min_length` earlier events are dropped; `last` keeps
    only that many latest rows of each user.

    `packed` is for models that learn from every element of a history: a user's last training row has its history, and
    so has every `max_length`-th before it; the others have an empty one. All held-out rows have theirs.
    """

    columns: Names
    by: str
    order: str
    where: str | None = None
    max_length: Positive = 100
    min_length: Whole = 0
    last: Positive | None = None
    same_time: bool = False
    packed: bool = False

    @property
    def list_columns(self) -> dict[str, str]:
        """Column -> the column of its history."""
        return {name: f"{name}_history" for name in self.columns}


@dataclass(frozen=True)
class Lag(RowOperation):
    """`<column>_lag<shift>`: the value minus the one `shift` rows earlier in the same group."""

    columns: Names
    by: str
    order: str
    shift: Positive = 1


@dataclass(frozen=True)
class Negatives(RowOperation):
    """For each row, `per_row` copies with another item of the training rows and label set to `label_value`.

    Columns of the item are copied too. `uniform` draws all items alike, `popularity` as often as they occur.
    """

    label: str
    per_row: Positive = 1
    by: Literal["uniform", "popularity"] = "uniform"
    label_value: Value = 0
    seed: Whole = 0


@dataclass(frozen=True)
class HistoryNegatives(RowOperation):
    """For each item of a history column, `per_item` other items in its order, as `<column>_negatives`."""

    history: str
    per_item: Positive = 1
    by: Literal["uniform", "popularity"] = "uniform"
    seed: Whole = 0


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

# These draw from the items of the training rows.
DRAWING = (Negatives, HistoryNegatives)


def runs_after_split(operation: RowOperation) -> bool:
    """Whether an operation depends on which rows train; such operations come last in [[rows]]."""
    return isinstance(operation, DRAWING) or (isinstance(operation, History) and operation.packed)


@dataclass(frozen=True)
class Holdout:
    """Which rows train and which are held out. Without `[split]`, every row trains.

    tail: the last `held_out` fraction of the log by position     files: the files that match `held_out_files`
    time: rows at or after `from`, or the last fraction by time    hash: a fraction of the values of `column`
    last: for each `column` (a user), the last row by `order` is test, the one before it eval
    random: of the rows of each `column` (a user), about the fraction `held_out`, drawn at random
    With `halve`, the first half of the held-out rows is eval and the second is test; else all of them are eval.
    """

    by: Literal["tail", "files", "time", "hash", "last", "random"]
    held_out: Share | None = None
    held_out_files: tuple[str, ...] = ()
    column: str | None = None
    order: str | None = None
    eval_from: float | None = None
    test_from: float | None = None
    halve: bool = False
    seed: Whole = 0


@dataclass(frozen=True)
class Feature:
    """One output column: its name, its input columns and the steps between."""

    name: str
    columns: Names
    steps: tuple[Step, ...] = ()
    of: Owner = "context"
    dim: Positive | None = None


@dataclass(frozen=True)
class Label:
    """The target of models: a column of the log, or steps over several."""

    name: str
    columns: Names
    steps: tuple[Step, ...] = ()


@dataclass(frozen=True)
class TableLayout:
    """The order of prepared rows, and the raw columns that the Table keeps, as `raw_<column>`.

    log: as read     shuffle: at random     interleave: all files in parallel, each in its own order, so that
    a batch holds rows of every day
    """

    order: Literal["log", "shuffle", "interleave"] = "log"
    seed: Whole = 0
    keep: Names = ()


@dataclass(frozen=True)
class Optimizer:
    """An update rule and its learning rate.

    For embedding rows, all other numbers are on the scale of the gradient of one log row, so that they are
    independent of the batch size. Those of dense weights are on the scale of a batch's mean gradient.
    """

    name: Literal["sgd", "adagrad", "rowwise_adagrad", "adam", "adamw", "lamb", "ftrl", "adagrad_decay"]
    learning_rate: AboveZero
    eps: AboveZero | None = None
    weight_decay: NotNegative = 0.0
    l1: NotNegative = 0.0
    l2: NotNegative = 0.0
    initial_accumulator: NotNegative | None = None
    decay_rate: Fraction | None = None
    decay_period: Positive | None = None


@dataclass(frozen=True)
class Schedule:
    """Learning rate over the run, as fractions of all steps: warm up, hold, decay.

    Without `decay_from`, rankers decay from the middle on and two towers not at all. `drop_factor` multiplies the
    rate each time an evaluation is worse than the best one before it.
    """

    warmup: Fraction = 0.0
    decay_from: Fraction | None = None
    decay: Literal["polynomial", "cosine"] = "polynomial"
    power: AboveZero = 2.0
    drop_factor: Share | None = None


@dataclass(frozen=True)
class Saving:
    """When checkpoints are written: at each evaluation and at the end, and also every N steps or minutes.

    Every `full_every`-th is full, those between are deltas of the one before. The last `keep` and the best one stay,
    with the checkpoints that their deltas depend on.
    """

    every_steps: Positive | None = None
    every_minutes: AboveZero | None = None
    full_every: Positive = 5
    keep: Positive = 2


@dataclass(frozen=True)
class Training:
    """How a model is trained.

    A step takes `batch_size` rows; by default, it follows from the number of training rows (see defaults.py).
    `micro_batches` splits a step into this many parts, computed one after the other, for less memory. The run ends
    after `epochs`, or earlier: after `max_steps`, after `max_minutes`, when an evaluation meets `target`, or when
    `patience` evaluations brought no improvement.
    """

    batch_size: Positive | None = None
    micro_batches: Positive = 1
    epochs: AboveZero = 1.0
    max_steps: Positive | None = None
    max_minutes: AboveZero | None = None
    dense: Optimizer = field(default_factory=lambda: Optimizer("adagrad", 0.01))
    sparse: Optimizer = field(default_factory=lambda: Optimizer("rowwise_adagrad", 0.02))
    schedule: Schedule = field(default_factory=Schedule)
    saving: Saving = field(default_factory=Saving)
    evaluations: Positive = 1
    target: str | None = None
    patience: Positive | None = None
    precision: Literal["float32", "bfloat16"] = "float32"
    seed: Whole = 0


@dataclass(frozen=True)
class Dynamic:
    """Admission and eviction in dynamic tables.

    A key gets a row at its `admit_after`-th occurrence, counted exactly or by `bloom_counters` two-byte counters.
    Until then it reads zeros, or one of `shared_rows` rows, from which its own will start.
    """

    admit_after: Positive = 1
    bloom_counters: Positive | None = None
    shared_rows: Whole = 0
    evict_every_steps: Positive = 500
    evict_after_steps: Positive | None = None
    evict_below_norm: AboveZero | None = None
    capacity: Positive | None = None


TREES = "trees"  # a ranker that consists of [ranking.trees] alone


@dataclass(frozen=True)
class Trees:
    """Gradient-boosted trees over number features, as the ranker or blended with its model on eval rows.

    At most `rounds` trees of `depth` levels, whose leaves hold `min_rows` rows or more; each round samples a fraction
    of the features and of the rows.
    """

    features: Names
    rounds: Positive = 600
    depth: TreeDepth = 6
    learning_rate: AboveZero = 0.05
    min_rows: Positive = 100
    feature_fraction: ShareOrAll = 0.3
    row_fraction: ShareOrAll = 0.8
    l2: NotNegative = 10.0


DLRM_CROSS_RANK = 512  # when a recipe gives none

# Rankers of several labels, and all that read features like DLRM.
MULTI_TASK = ("shared_bottom", "mmoe", "ple", "esmm")
OVER_DLRM = ("dlrm", *MULTI_TASK)


# Losses of numeric labels, such as seconds watched. Any other label is 0 or 1.
NUMBER_LOSSES = ("squared", "huber", "squared_log", "weighted_logistic")
Interaction = Literal["dot", "cat", "cross"]
NumberLoss = Literal["squared", "huber", "squared_log", "weighted_logistic"]


@dataclass(frozen=True)
class Tasks:
    """Several labels of one ranker, each with a probability of its own; losses are summed with `weights` (1 each).

    A label in `losses` is numeric and is predicted as a number, with the loss named there (see Ranking).

    With `uncertainty`, the weights are learned: each task's loss is divided by a variance, whose logarithm is a cost.
    Above the shared layers, each task has a tower of hidden layers. mmoe and ple have `experts` for all tasks, ple
    also `task_experts` for each, in `levels` on top of each other; an expert has the layers of `top`. Served items
    are ordered by `serve_score`, an expression over the labels; without one, by their sum.
    """

    labels: Names
    weights: dict[str, AboveZero] = field(default_factory=dict)
    losses: dict[str, NumberLoss] = field(default_factory=dict)
    serve_score: str | None = None
    uncertainty: bool = False
    tower: tuple[Positive, ...] = ()
    experts: Positive = 4
    task_experts: Positive = 1
    levels: Positive = 1

    @property
    def order(self) -> str:
        """The expression of `serve_score`, or its default."""
        return self.serve_score or " + ".join(f'"{label}"' for label in self.labels)


@dataclass(frozen=True)
class Ranking:
    """A model that scores (user, item, context) rows: one `label`, or several by `tasks`.

    `sequences` are list features whose elements keep their vectors, for models that read them so: each must share its
    vocabulary with a feature of one value, such as the item, which is din's target. `average` trains this many models
    together, from different initial weights; the mean of their scores is served.

    With `cross`, pairs of the columns of `wide` are tried on training rows when a Table is prepared; the best become
    features of the resolved recipe.

    Without a `loss`, the label is 0 or 1 and the loss is the log loss; a user-defined one is package.module:function.
    With one of these, the label is a number, and so is the score:
    squared: its mean     huber: likewise, but errors beyond a standard deviation count linearly
    squared_log: squared over log(1 + label)     weighted_logistic: its mean as odds, from positive weights (YouTube)

    `weight` names a label that is not a target: the losses of rows are multiplied by it.
    """

    model: str
    label: str = ""
    features: Names = ()
    embedding_dim: Positive = 16
    bottom: tuple[Positive, ...] = ()
    top: tuple[Positive, ...] = ()
    interaction: Interaction = "dot"
    cross_layers: Positive = 3
    cross_rank: Positive | None = None
    wide: Names = ()
    cross: Literal["auto"] | None = None
    hidden: tuple[Positive, ...] = ()
    sequences: Names = ()
    attention: tuple[Positive, ...] = (32,)
    mask_blocks: Positive = 3
    mask_width: Positive = 64
    dropout: Dropout = 0.0
    average: Positive = 1
    loss: str = ""
    weight: str = ""
    dynamic: Dynamic | None = None
    wide_optimizer: Optimizer | None = None
    trees: Trees | None = None
    tasks: Tasks | None = None
    train: Training = field(default_factory=Training)

    @property
    def table_dim(self) -> int:
        """The dim of an embedding in its table: the columns of all members."""
        return self.embedding_dim * self.average

    def features_among(self, every: Iterable[str]) -> tuple[str, ...]:
        """The model's features: those that it names, or all of them; trees name theirs."""
        if self.model == TREES:
            return self.trees.features if self.trees is not None else ()
        return self.features or tuple(every)

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels that the model learns."""
        return self.tasks.labels if self.tasks is not None else (self.label,)

    @property
    def number_losses(self) -> dict[str, str]:
        """Numeric labels, with their losses; all others are 0 or 1."""
        if self.tasks is not None:
            return dict(self.tasks.losses)
        return {self.label: self.loss} if self.loss in NUMBER_LOSSES else {}

    @property
    def binary_labels(self) -> tuple[str, ...]:
        """Binary labels; the first of them is what counts as a click."""
        return tuple(label for label in self.labels if label not in self.number_losses)


@dataclass(frozen=True)
class Retrieval:
    """Two towers, one of users and one of items, whose vectors are compared by dot product.

    two_tower: without `hidden` layers a tower sums its embeddings. in_batch_softmax learns from rows whose label is
    1, bce from all.
    sasrec: the user tower is causal self-attention over one list of items, whose table is the item tower's. Each
    element is predicted from those before it, against `negatives` items, drawn uniformly for each step.
    A user-defined class of towers, package.module:Class, replaces both towers of two_tower.
    """

    label: str
    user: Names
    item: Names
    model: str = "two_tower"
    embedding_dim: Positive = 16
    hidden: tuple[Positive, ...] = (128, 64)
    loss: Literal["in_batch_softmax", "bce"] = "in_batch_softmax"
    temperature: AboveZero = 0.05
    log_q: bool = True
    blocks: Positive = 2
    heads: Positive = 1
    negatives: Positive = 512
    dropout: Dropout = 0.2
    dynamic: Dynamic | None = None
    train: Training = field(default_factory=Training)

    @property
    def vector_size(self) -> int:
        """The dimension of user and item vectors."""
        has_layers = self.model != "sasrec" and self.hidden
        return self.hidden[-1] if has_layers else self.embedding_dim


@dataclass(frozen=True)
class Dimension:
    """The values that one key of a model may take."""


@dataclass(frozen=True)
class Choices(Dimension):
    """A list of choices, as in TOML; a table sets several keys at once."""

    values: tuple[Any, ...]


@dataclass(frozen=True)
class Range(Dimension):
    """A number from `low` to `high`, in steps of `step` if given; with `log`, log-uniform."""

    low: int | float
    high: int | float
    log: bool = False
    step: int | float | None = None


@dataclass(frozen=True)
class Tune:
    """The search of `recmill tune`, by key paths of one model such as `ranking.train.dense.learning_rate`.

    The first objective is a metric of the model, the others are its costs; by default, the model's own metric and
    seconds of training. `pruning` stops trials that are behind at an evaluation.
    """

    space: dict[str, Dimension]
    objectives: tuple[str, ...] = ()
    pruning: bool = True
    trials: Positive = 20
    seed: Whole = 0


@dataclass(frozen=True)
class Recall:
    """Inputs of recall besides clicks: `content` is a feature of the item that is a vector of numbers."""

    content: str | None = None


@dataclass(frozen=True)
class Recipe:
    """All stages, from log to model."""

    name: str
    log: Log
    features: tuple[Feature, ...]
    labels: tuple[Label, ...] = ()
    description: str = ""
    generate: Shape | None = None
    tables: dict[str, SideTable] = field(default_factory=dict)
    rows: tuple[RowOperation, ...] = ()
    split: Holdout | None = None
    table: TableLayout = field(default_factory=TableLayout)
    ranking: Ranking | None = None
    retrieval: Retrieval | None = None
    recall: Recall | None = None
    refit: bool = False  # train once more with the eval rows, before test and export
    # Recipes that differ only in their search space make the same artifacts.
    tune: Tune | None = field(default=None, compare=False)

    @property
    def click_label(self) -> str | None:
        """The label that is 1 in clicks: that of retrieval, else of ranking; without any, every row is a click."""
        if self.retrieval is not None:
            return self.retrieval.label
        return None if self.ranking is None else next(iter(self.ranking.binary_labels), None)
