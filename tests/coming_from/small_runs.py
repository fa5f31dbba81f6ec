"""Recipes of the coming-from pages on a tiny log: Tables, rankers, runs and commands."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from coming_from_pages import flags_of

from recmill.batches import Array, Batch, Batches
from recmill.checkpoint import Checkpoint, CheckpointFolder
from recmill.cli import main
from recmill.embeddings.table import EmbeddingTable, Records
from recmill.learner.ranking import Ranker
from recmill.logs.generate import generate
from recmill.prepare import prepare
from recmill.spec.load import load_recipe
from recmill.spec.recipe import Recipe
from recmill.table import Table
from recmill.train import Options, Trained, train
from recmill.train.source import TableSource

NUM_ROWS = 2400
BATCH = 100
_TRAINING = [f"ranking.train.batch_size={BATCH}", "ranking.train.target=", "ranking.train.evaluations=2"]
SMALL = {
    "criteo-dlrm": ["ranking.embedding_dim=8", "ranking.bottom=[16, 8]", "ranking.top=[16]", *_TRAINING],
    "criteo-deeprec": ["ranking.bottom=[16]", "ranking.top=[16]", *_TRAINING],
    "criteo-widedeep": ["ranking.embedding_dim=8", "ranking.hidden=[16]", *_TRAINING],
    "criteo-dcn": [
        "ranking.embedding_dim=8",
        "ranking.bottom=[16, 8]",
        "ranking.top=[16]",
        "ranking.cross_rank=4",
        *_TRAINING,
    ],
}


@dataclass(frozen=True)
class Ran:
    """A training run that came to its end."""

    trained: Trained
    folder: CheckpointFolder

    @property
    def checkpoints(self) -> list[Checkpoint]:
        return self.folder.of("ranking").all()

    @property
    def steps(self) -> list[int]:
        return [checkpoint.step for checkpoint in self.checkpoints]


class SmallRuns:
    """Tables are prepared once for each recipe; every run has a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.number = 0
        self._tables: dict[tuple[Any, ...], Table] = {}
        self._checkpoints: dict[str, Path] = {}
        generate("criteo", NUM_ROWS, 3, folder / "kaggle")
        generate("criteo", NUM_ROWS, 3, folder / "days", days=[0, 1, 23])
        names = [
            "label",
            *(f"i{number}" for number in range(1, 14)),
            *(f"c{number}" for number in range(1, 27)),
        ]
        log = pl.read_csv(folder / "kaggle/train.txt", separator="\t", has_header=False, new_columns=names)
        log.write_parquet(folder / "kaggle/train.parquet")

    def log(self, base: str) -> Path:
        return self.folder / ("days" if base == "criteo-dcn" else "kaggle")

    def new_folder(self) -> Path:
        self.number += 1
        return self.folder / f"run-{self.number}"

    def table(self, recipe: Recipe) -> Table:
        key = (recipe.log, recipe.rows, recipe.features, recipe.split, recipe.table)
        if key not in self._tables:
            self._tables[key] = prepare(recipe, str(self.log(recipe.name)), self.new_folder()).table
        return self._tables[key]

    def ranker(self, base: str, *values: str) -> Ranker:
        """Just as the recipe says, in its full size."""
        recipe = load_recipe(base, values)
        assert recipe.ranking is not None
        return Ranker(recipe.ranking, self.table(recipe).columns)

    def train(self, base: str, *values: str, into: Path | None = None, **options: Any) -> Ran:
        """The recipe made small, then changed by `values`."""
        recipe = load_recipe(base, [*SMALL[base], *values])
        into = into or self.new_folder()
        (trained,) = train(recipe, TableSource(self.table(recipe)), into, Options(threads=1, **options))
        return Ran(trained, CheckpointFolder.open(into))

    def stepped(self, base: str, *values: str, num_steps: int = 12) -> tuple[Ranker, list[Batch]]:
        """A small ranker after some steps, and the batches that it saw."""
        recipe = load_recipe(base, [*SMALL[base], *values])
        assert recipe.ranking is not None
        table = self.table(recipe)
        ranker = Ranker(recipe.ranking, table.columns)
        batches = [batch for batch, _ in Batches(table, BATCH).read()][:num_steps]
        for batch in batches:
            ranker.step(batch)
        return ranker, batches

    def checkpoint(self, base: str) -> Path:
        """A short run to look at."""
        if base not in self._checkpoints:
            self._checkpoints[base] = self.train(base, "ranking.train.max_steps=4").folder.path
        return self._checkpoints[base]

    def arguments(self, base: str, command: Sequence[str], into: Path) -> list[str]:
        """A command of a page with places of this folder, and with what the page leaves out."""
        table = self.table(load_recipe(base, SMALL[base])).path
        places = {"--data": self.log(base), "--from-log": self.log(base), "--table": table, "--plan": table}
        places |= {"--checkpoint": self.checkpoint(base), "--into": into}
        needed = {"train": ["--table", "--into"], "evaluate": ["--checkpoint", "--table"], "run": []}[
            command[0]
        ]
        flags = flags_of(command) | {flag: None for flag in needed if flag not in command}
        if "--from-log" in flags:
            del flags["--table"]
        words = [command[0], base]
        if command[0] != "evaluate":
            words += [
                word for value in [*SMALL[base], "ranking.train.max_steps=16"] for word in ("--set", value)
            ]
        for flag, value in flags.items():
            words += [flag] if flag not in places and value is None else [flag, str(places.get(flag, value))]
        return words

    def run_command(
        self, base: str, command: Sequence[str], capsys: Any, into: Path | None = None
    ) -> tuple[int, Any, Path]:
        """Exit code, what it printed as JSON unless it failed, and where it wrote."""
        into = into or self.new_folder()
        arguments = [*self.arguments(base, command, into), "--json", "--quiet"]
        capsys.readouterr()
        code = main(arguments)
        said = capsys.readouterr().out
        return code, json.loads(said) if said else None, into


def records_of(table: EmbeddingTable) -> Records:
    """All keys that have a row, with everything they have."""
    with table.begin_snapshot() as snapshot:
        pieces = list(snapshot)
    parts = ("keys", "rows", "states", "counts", "steps")
    return Records(*(np.concatenate([getattr(piece, part) for piece in pieces]) for part in parts))


def sightings(batches: Sequence[Batch], feature: str) -> tuple[Array, Array]:
    """The keys of a feature and how often each was seen."""
    keys, counts = np.unique(
        np.concatenate([batch.keys[feature].values for batch in batches]), return_counts=True
    )
    return keys, counts
