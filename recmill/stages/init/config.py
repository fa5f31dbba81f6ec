"""The config of init: a given value replaces a guess."""

from dataclasses import dataclass
from typing import Annotated, Literal

from recmill.config import FRACTION, Flag
from recmill.logs.config import DEFAULT_MAX_BAD


@dataclass(frozen=True, kw_only=True)
class InitConfig:
    """Which column has which role; without these, the files decide. Columns without a header are numbered from 1."""

    user: Annotated[str | None, Flag("the column of users (default: by its name)", metavar="COLUMN")] = None
    item: Annotated[str | None, Flag("the column of items (default: by its name)", metavar="COLUMN")] = None
    time: Annotated[
        str | None,
        Flag("the column that orders events, or none (default: by name and values)", metavar="COLUMN"),
    ] = None
    time_format: Annotated[
        str | None,
        Flag("how times are written, such as %d/%m/%Y (default: by their values)", metavar="FORMAT"),
    ] = None
    positive: Annotated[
        str | None,
        Flag(
            "which rows count, such as 'rating >= 4', or all (default: by names and values)",
            metavar="CONDITION",
        ),
    ] = None
    separator: Annotated[
        str | None, Flag("between fields of the events (default: by their lines)", metavar="TEXT")
    ] = None
    header: Annotated[
        Literal["yes", "no"] | None,
        Flag("whether the first line of the events has names (default: by its values)"),
    ] = None
    max_bad: Annotated[float, Flag("fraction of bad rows that is an error", FRACTION)] = DEFAULT_MAX_BAD
