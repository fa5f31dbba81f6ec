"""The config of size."""

from dataclasses import dataclass
from typing import Annotated

from recmill.config import COUNT, Flag


@dataclass(frozen=True)
class SizeConfig:
    """How large the log and the traffic are. What is None is that of the log that the recipe is made for."""

    rows: Annotated[int | None, Flag("rows of the log")] = None
    items: Annotated[int | None, Flag("different items", metavar="M")] = None
    users: Annotated[int | None, Flag("different users", metavar="U")] = None
    rate: Annotated[float | None, Flag("requests a second (default: 50)", COUNT, "R")] = None
