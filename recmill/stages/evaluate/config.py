"""The config of evaluate."""

from dataclasses import dataclass
from typing import Annotated, Literal

from recmill.config import Flag


@dataclass(frozen=True)
class EvaluateConfig:
    """What to measure, and on what."""

    split: Annotated[
        Literal["test", "eval", "train"] | None,
        Flag("which rows (default: test, or eval without test rows)"),
    ] = None
    which: Annotated[str, Flag("which checkpoint", metavar="best|last|STEP")] = "best"
    only: Annotated[Literal["ranking", "retrieval"] | None, Flag("measure this model (default: all)")] = None
    by: Annotated[
        tuple[str, ...], Flag("also measure each value of a column; may be repeated", metavar="COLUMN")
    ] = ()
    gate: Annotated[
        str | None,
        Flag(
            'exit with 1 unless all hold, such as "auc>=0.80,ne<=live,accuracy>=constant"; '
            "a ranker must always beat the constant predictor",
            metavar="CONDITIONS",
        ),
    ] = None
    live: Annotated[
        str | None,
        Flag(
            "the live model, measured on the same rows: its checkpoint, or where it is published, also a URL",
            metavar="DIR",
        ),
    ] = None
    allow_no_live: Annotated[
        bool, Flag("with --live: leave out conditions on it while nothing is published there")
    ] = False
    threads: Annotated[int | None, Flag("threads (default: all cores)")] = None
