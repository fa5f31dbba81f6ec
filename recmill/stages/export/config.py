"""The config of export."""

from dataclasses import dataclass
from typing import Annotated, Literal

from recmill.config import Flag
from recmill.engines.config import DEFAULT_MEMORY


@dataclass(frozen=True)
class ExportConfig:
    """How a bundle is made. What did not pass its gate is refused unless `despite_gate`."""

    rows: Annotated[Literal["float32", "float16", "int8"], Flag("how embedding rows are stored")] = "float32"
    products: Annotated[
        Literal["float32", "int8"],
        Flag("how the ranker multiplies on servers; int8 is calibrated and checked on rows of the log"),
    ] = "float32"
    which: Annotated[str, Flag("which checkpoint", metavar="best|last|STEP")] = "best"
    index: Annotated[
        Literal["auto", "exact", "clustered"],
        Flag("how items are found by vector (default: exact up to 200,000 items, clustered above)"),
    ] = "auto"
    despite_gate: Annotated[bool, Flag("publish also what did not pass its gate in evaluate")] = False
    publish: Annotated[bool, Flag("make the version current; without it, what is current stays so")] = True
    keep: Annotated[int | None, Flag("remove all but the newest N versions (default: keep all)")] = None
    memory: int = DEFAULT_MEMORY
    threads: int | None = None  # all cores
