"""How a raw log is read."""

from dataclasses import dataclass
from typing import Annotated

from recmill.config import FRACTION, Flag

DEFAULT_MAX_BAD = 0.001


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """How many rows may be bad, and how the log is cut."""

    max_bad: Annotated[float, Flag("fraction of bad rows that is an error", FRACTION)] = DEFAULT_MAX_BAD
    partitions: Annotated[int | None, Flag("cut the log into about N units (default: by size)")] = None
