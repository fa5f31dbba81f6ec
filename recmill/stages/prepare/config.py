"""The config of prepare."""

from dataclasses import dataclass
from typing import Annotated

from recmill.config import Flag
from recmill.engines.config import EngineConfig
from recmill.logs.config import LogConfig


@dataclass(frozen=True, kw_only=True)
class PrepareConfig(EngineConfig, LogConfig):
    """Where and how prepare runs; none of it changes the rows of the Table."""

    binary: Annotated[bool, Flag("Criteo: also write <split>.bin, 40 int32 a row")] = False
