"""The config of generate."""

import re
from dataclasses import dataclass
from typing import Annotated, Literal

from recmill.config import SEED, Flag, ValueKind


def _parse_days(text: str) -> tuple[int, ...]:
    days: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,4})(?:-(\d{1,4}))?\s*", part, re.ASCII)
        if not match:
            raise ValueError(f"must look like 0-3,23, got {text}")
        days += range(int(match[1]), int(match[2] or match[1]) + 1)
    return tuple(days)


@dataclass(frozen=True)
class GenerateConfig:
    """How a log is drawn and written. `days` and `compress` are for criteo, `format` and `compress` for recsys2021."""

    seed: Annotated[int, Flag("equal seeds give equal files", SEED)] = 0
    days: Annotated[
        tuple[int, ...] | None,
        Flag("criteo: write these day files, such as 0-3,23", ValueKind(_parse_days, "LIST")),
    ] = None
    format: Annotated[Literal["csv", "parquet"] | None, Flag("recsys2021: file format")] = None
    compress: Annotated[bool, Flag("criteo, recsys2021: gzip the files")] = False
