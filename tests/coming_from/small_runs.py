"""Recipes of the coming-from pages on a tiny log: Tables, rankers, runs, bundles and commands."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from coming_from_pages import flags_of
from starlette.routing import BaseRoute, Match

from recmill import open_bundle
from recmill.artifacts.checkpoint.checkpoint import Checkpoint
from recmill.artifacts.checkpoint.step import StepCheckpoint
from recmill.cli import main
from recmill.dataset.batch import Array, Batch
from recmill.dataset.loader import Batches
from recmill.dataset.table import Table
from recmill.embeddings.table import EmbeddingTable, KeyRecords
from recmill.learner.ranking import Ranker
from recmill.recipe.load import load_recipe
from recmill.recipe.recipe import Recipe
from recmill.stages.bench.serve.server import start_server
from recmill.stages.prepare.prepare import prepare
from recmill.stages.serve.calls import CallDispatcher
from recmill.stages.serve.config import ServeConfig
from recmill.stages.serve.http_routes import HttpApp
from recmill.stages.serve.inference import Scoring
from recmill.stages.serve.service import Service
from recmill.stages.serve.telemetry import Telemetry
from recmill.stages.train.source import TableData
from recmill.stages.train.train import TrainConfig, TrainResult, train
from recmill.synthetic.generate import generate

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
    "recsys2021": [
        "ranking.top=[16]",
        "retrieval.hidden=[16, 8]",
        "retrieval.train.max_steps=4",
    ],
}
SHORT = {base: [*values, "ranking.train.max_steps=4"] for base, values in SMALL.items()}


@dataclass(frozen=True)
class Ran:
    """A training run that came to its end."""

    trained: TrainResult
    folder: Checkpoint

    @property
    def checkpoints(self) -> list[StepCheckpoint]:
        return self.folder.of("ranking").all()

    @property
    def steps(self) -> list[int]:
        return [checkpoint.step for checkpoint in self.checkpoints]


class SmallRuns:
    """Tables are prepared and commands are run once; what they wrote is looked at by many rows of the pages."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.number = 0
        self._tables: dict[str, Table] = {}
        self._checkpoints: dict[tuple[str, str], Path] = {}
        self._bundles: dict[tuple[str, ...], Path] = {}
        self._scored: dict[str, Any] = {}
        self._runs: dict[tuple[str, ...], Ran] = {}
        self._commands: dict[tuple[str, ...], tuple[int, Any, Path]] = {}
        generate("criteo", NUM_ROWS, 3, folder / "kaggle")
        generate("criteo", NUM_ROWS, 3, folder / "days", days=[0, 1, 23])
        generate("recsys2021", NUM_ROWS, 3, folder / "tweets")
        names = [
            "label",
            *(f"i{number}" for number in range(1, 14)),
            *(f"c{number}" for number in range(1, 27)),
        ]
        log = pl.read_csv(folder / "kaggle/train.txt", separator="\t", has_header=False, new_columns=names)
        log.write_parquet(folder / "kaggle/train.parquet")

    def log(self, base: str) -> Path:
        return self.folder / {"criteo-dcn": "days", "recsys2021": "tweets"}.get(base, "kaggle")

    def new_folder(self) -> Path:
        self.number += 1
        return self.folder / f"run-{self.number}"

    def table(self, recipe: Recipe) -> Table:
        key = repr((recipe.log, recipe.rows, recipe.features, recipe.split, recipe.table))
        if key not in self._tables:
            self._tables[key] = prepare(recipe, str(self.log(recipe.name)), self.new_folder()).table
        return self._tables[key]

    def ranker(self, base: str, *values: str) -> Ranker:
        """Just as the recipe says, in its full size."""
        recipe = load_recipe(base, values)
        assert recipe.ranking is not None
        return Ranker(recipe.ranking, self.table(recipe).columns)

    def train(self, base: str, *values: str) -> Ran:
        """The recipe made small, then changed by `values`."""
        if (base, *values) not in self._runs:
            self._runs[base, *values] = self.train_into(self.new_folder(), base, *values)
        return self._runs[base, *values]

    def train_into(self, into: Path, base: str, *values: str) -> Ran:
        """A run of one's own, to go on with."""
        recipe = load_recipe(base, [*SMALL[base], *values])
        (trained,) = train(recipe, TableData(self.table(recipe)), into, TrainConfig(threads=1))
        return Ran(trained, Checkpoint.open(into))

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

    def checkpoint(self, base: str, purpose: str = "evaluate") -> Path:
        """A short run to look at. Those to export have one of their own, which no gate has been held against."""
        if (base, purpose) not in self._checkpoints:
            recipe, into = load_recipe(base, SHORT[base]), self.new_folder()
            train(recipe, TableData(self.table(recipe)), into, TrainConfig(threads=1))
            self._checkpoints[base, purpose] = into
        return self._checkpoints[base, purpose]

    def export(self, base: str, *flags: str, data: Path | None = None) -> Path:
        """Where `recmill export` wrote the bundle of a short run."""
        into = self.new_folder()
        places = {
            "--checkpoint": self.checkpoint(base, "export"),
            "--data": data or self.log(base),
            "--into": into,
        }
        words = [str(word) for place in places.items() for word in place]
        assert main(["export", *words, *flags, "--quiet"]) == 0
        return into

    def bundle(self, base: str, *flags: str) -> Path:
        """A bundle to look at."""
        if (base, *flags) not in self._bundles:
            self._bundles[base, *flags] = self.export(base, *flags)
        return self._bundles[base, *flags]

    def rows_of_log(self, base: str) -> pl.DataFrame:
        """Rows of a Criteo log with the recipe's names, label first."""
        return pl.read_parquet(self.log(base) / "train.parquet").head(300)

    def scores_in_process(self, base: str, bundles: Path) -> Array:
        """Chances of those rows; ids are the numbers that the log writes in base 16."""
        ids = pl.col("^c[0-9]+$").str.to_integer(base=16)
        return open_bundle(bundles).score(self.rows_of_log(base).drop("label").with_columns(ids))

    def scored(self, base: str, capsys: Any) -> Any:
        """What `recmill client` says of 300 rows of the log that a server of the bundle scored: 6 batches of 50."""
        if base not in self._scored:
            file = self.folder / "eval.csv"
            self.rows_of_log(base).write_csv(file)
            with start_server(self.bundle(base), ["--threads", "1"]) as server:
                capsys.readouterr()
                words = ["client", "-s", str(server.grpc), "-d", str(file), "-b", "50", "-n", "6", "-w", "2"]
                assert main([*words, "--label", "label", "--clients", "2", "--json"]) == 0
            self._scored[base] = json.loads(capsys.readouterr().out)
        return self._scored[base]

    def has_path(self, method: str, path: str) -> bool:
        """Does a server answer this?"""
        scope = {"type": "http", "method": method, "path": path}
        return any(route.matches(scope)[0] == Match.FULL for route in self._routes)

    @cached_property
    def _routes(self) -> list[BaseRoute]:
        service = Service(ServeConfig(bundle=self.bundle("criteo-widedeep"), watch=False))
        dispatcher = CallDispatcher(service, Telemetry(), threads=1)
        try:
            return HttpApp(dispatcher, Scoring(dispatcher), []).app.routes
        finally:
            dispatcher.close()
            service.close()

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

    def run_command(self, base: str, command: Sequence[str], capsys: Any) -> tuple[int, Any, Path]:
        """Exit code, what it printed as JSON unless it failed, and where it wrote."""
        key = tuple(self.arguments(base, command, self.folder))
        if key not in self._commands:
            self._commands[key] = self.run_into(self.new_folder(), base, command, capsys)
        return self._commands[key]

    def run_into(self, into: Path, base: str, command: Sequence[str], capsys: Any) -> tuple[int, Any, Path]:
        """The same in a folder of one's own, to run it again there."""
        arguments = [*self.arguments(base, command, into), "--json", "--quiet"]
        capsys.readouterr()
        code = main(arguments)
        said = capsys.readouterr().out
        return code, json.loads(said) if said else None, into


def records_of(table: EmbeddingTable) -> KeyRecords:
    """All keys that have a row, with everything they have."""
    with table.begin_snapshot() as snapshot:
        pieces = list(snapshot)
    parts = ("keys", "rows", "states", "counts", "steps")
    return KeyRecords(*(np.concatenate([getattr(piece, part) for piece in pieces]) for part in parts))


def sightings(batches: Sequence[Batch], feature: str) -> tuple[Array, Array]:
    """The keys of a feature and how often each was seen."""
    keys, counts = np.unique(
        np.concatenate([batch.keys[feature].values for batch in batches]), return_counts=True
    )
    return keys, counts
