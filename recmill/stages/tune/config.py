"""The config of tune."""

from dataclasses import dataclass
from typing import Annotated, Literal

from recmill.config import MINUTES, NOT_NEGATIVE, SEED, Flag


@dataclass(frozen=True)
class TuneConfig:
    """How long a search goes on, and where its trials run."""

    trials: Annotated[int | None, Flag("trials in all, earlier runs included (default: the recipe's)")] = None
    minutes: Annotated[
        float | None, Flag("begin no trial after so many minutes (default: no limit)", MINUTES, metavar="M")
    ] = None
    within: Annotated[
        float,
        Flag(
            "take the cheapest recipe whose quality is within X of the best (default: the best)", NOT_NEGATIVE
        ),
    ] = 0.0
    jobs: Annotated[
        int | None,
        Flag("trials at once (default: 1; with --engine ray as many as there is room for)", metavar="J"),
    ] = None
    threads: Annotated[
        int | None, Flag("threads of each trial (default: the cores divided by --jobs; with --engine ray 1)")
    ] = None
    seed: Annotated[int | None, Flag("of the search (default: the recipe's)", SEED)] = None
    engine: Annotated[Literal["local", "ray"], Flag("where trials run (default: this machine)")] = "local"
    address: Annotated[
        str | None,
        Flag("with --engine ray: a cluster (default: started on this machine)", metavar="URL"),
    ] = None
