"""The 160-byte layout that DLRM tools read: each row is 40 int32, label, 13 counts and 26 ids."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from recmill.engines.shards import ShardRecord
from recmill.errors import FeatureError
from recmill.features.chain import Chain, run_chains
from recmill.features.plan import Plan
from recmill.recipe.recipe import COPY, POSITION, SPLIT

NUM_COUNTS, NUM_IDS = 13, 26


@dataclass(frozen=True)
class as_int32_rows:  # noqa: N801, reads as the function it is
    """Raw rows to label, counts before any step that leaves the whole numbers (readers take the log), and ids."""

    plan: Plan

    def __post_init__(self) -> None:
        kinds = [chain.info().kind for chain in self._features()]
        if len(self.plan.labels) != 1 or kinds.count("number") != NUM_COUNTS or kinds.count("id") != NUM_IDS:
            raise FeatureError(
                f"--binary needs one label, {NUM_COUNTS} number and {NUM_IDS} id features, as Criteo has; "
                f"this recipe has {len(self.plan.labels)}, {kinds.count('number')} and {kinds.count('id')}."
            )

    def _features(self) -> list[Chain]:
        """Those of the ranker's model: what its wide part or its trees read besides is made of the same columns."""
        ranking = self.plan.recipe.ranking
        every = [chain.feature.name for chain in self.plan.features]
        named = ranking.features_among(every) if ranking is not None else every
        return [chain for chain in self.plan.features if chain.feature.name in named]

    def __call__(self, frame: pl.DataFrame) -> pl.DataFrame:
        numbers = [chain for chain in self._features() if chain.info().kind == "number"]
        ids = [chain for chain in self._features() if chain.info().kind == "id"]
        jobs = [(chain, len(chain.transforms)) for chain in self.plan.labels]
        jobs += [(chain, _whole_number_steps(chain)) for chain in numbers]
        jobs += [(chain, len(chain.transforms)) for chain in ids]
        columns = run_chains(frame, jobs)
        carried = [frame[name] for name in (POSITION, SPLIT, COPY) if name in frame.columns]
        return pl.DataFrame([column.cast(pl.Int32).fill_null(0) for column in columns] + carried)


def _whole_number_steps(chain: Chain) -> int:
    for number, kind in enumerate(chain.kinds[1:]):
        if kind not in ("int", "bool"):
            return number
    return len(chain.transforms)


def concatenate(shards: Iterable[ShardRecord], source: Path, into: Path) -> None:
    """`<split>.bin` from the shards of each split, in order."""
    into.mkdir(parents=True, exist_ok=True)
    by_split: dict[str, list[ShardRecord]] = {}
    for shard in shards:
        by_split.setdefault(shard.split, []).append(shard)
    for split, pieces in by_split.items():
        aside = into / f"{split}.bin.partial"
        with open(aside, "wb") as whole:
            for piece in pieces:
                with open(source / piece.file, "rb") as file:
                    shutil.copyfileobj(file, whole, 1 << 22)
        aside.rename(into / f"{split}.bin")
