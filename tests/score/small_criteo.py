"""A small Criteo log, taken through the stages; its recipe looks at each row alone, so the log itself can be scored."""

from __future__ import annotations

from pathlib import Path

import polars as pl
from shop import Stages, run_quietly

from recmill.stages.score.score import ScoreResult

SMALL = [
    *["--set", "ranking.bottom=[8, 16]", "--set", "ranking.top=[8]"],
    *["--set", "ranking.train.max_steps=6", "--set", "ranking.train.batch_size=256"],
]


class Criteo(Stages):
    @property
    def lines(self) -> list[str]:
        return (self.log / "train.txt").read_text().splitlines(keepends=True)


def make_criteo(path: Path) -> Criteo:
    made = Criteo(path)
    run_quietly("generate", "criteo", "--rows", 3000, "--into", made.log)
    run_quietly("prepare", "criteo-deeprec", "--data", made.log, "--into", made.table)
    run_quietly(
        "train", "criteo-deeprec", "--table", made.table, "--into", made.checkpoint, *SMALL, "--threads", 1
    )
    run_quietly("export", "--checkpoint", made.checkpoint, "--data", made.log, "--into", made.bundles)
    return made


def write_log(folder: Path, lines: list[str]) -> Path:
    folder.mkdir()
    (folder / "train.txt").write_text("".join(lines))
    return folder


def read(into: Path, output: str = "scores") -> pl.DataFrame:
    """All rows of an output, in order."""
    return pl.concat([pl.read_parquet(file) for file in ScoreResult.open(into).files(output)])
