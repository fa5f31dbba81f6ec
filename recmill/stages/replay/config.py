"""The config of the served evaluation."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from recmill.config import Flag

DEFAULT_USERS = 2_000


@dataclass(frozen=True)
class ReplayConfig:
    """Which users' lists are measured."""

    served_users: Annotated[
        int, Flag("of how many held-out users the served list is measured; a sample if there are more")
    ] = DEFAULT_USERS
    served_bundle: Annotated[
        Path | None, Flag("keep the bundle that was measured there: users and items as of the held-out rows")
    ] = None
    which: str = "best"
    threads: int | None = None  # None: all cores
