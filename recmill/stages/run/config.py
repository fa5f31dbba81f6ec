"""The config of run: that of the chain, and those of its stages."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated

from recmill.config import Flag
from recmill.stages.prepare.config import PrepareConfig
from recmill.stages.train.config import RayTrainConfig, TrainConfig

DEFAULT_ROWS = 100_000


@dataclass(frozen=True)
class RunConfig:
    """How the stages run."""

    rows: Annotated[int, Flag("rows to generate when there is no --data")] = DEFAULT_ROWS
    gate: Annotated[
        str | None, Flag("exit with 1 unless the models meet them; see evaluate", metavar="CONDITIONS")
    ] = None
    served: Annotated[
        bool,
        Flag("measure the served list before it is published, and fit how its channels are merged"),
    ] = True
    at_once: Annotated[
        bool,
        Flag("train while the Table is prepared, in log order; so it is when both stages run on clusters"),
    ] = False
    prepare: PrepareConfig = field(default_factory=PrepareConfig)
    train: TrainConfig = field(default_factory=lambda: TrainConfig(resume=True))
    ray: RayTrainConfig | None = None  # of training on Ray; without it, this process trains
    note: Callable[[str], None] = lambda line: None
    warn: Callable[[str], None] = lambda message: None
