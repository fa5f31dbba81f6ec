"""The config of load."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from recmill.config import COUNT, Flag, ValueKind


@dataclass(frozen=True)
class LoadConfig:
    """The rows to load into a feature store, the key prefix, and the rate."""

    side: Annotated[Literal["user", "item", "both"], Flag("whose rows")] = "both"
    parquet: Annotated[
        Path | None,
        Flag("raw columns of one side to load instead of the bundle's rows", ValueKind(Path, "FILE")),
    ] = None
    rate: Annotated[float | None, Flag("rows per second at most (default: no bound)", COUNT, "ROWS")] = None
    ttl: Annotated[int | None, Flag("rows expire after this time (default: never)", COUNT, "SECONDS")] = None
    prefix: Annotated[str, Flag("what keys begin with", metavar="TEXT")] = "recmill"
    resume: Annotated[bool, Flag("skip what an interrupted load of the same rows has written")] = False
