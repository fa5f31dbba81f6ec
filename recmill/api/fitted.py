"""The result of `recmill.fit`: recommendations with titles, similar items, reasons, and a server."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from recmill.api.arguments import PathLike
from recmill.api.results import EvaluationReport
from recmill.errors import ArtifactError, BadRequest, RecmillError
from recmill.reporting.tables import html_table, text_table
from recmill.stages.serve import messages as m
from recmill.stages.serve.reasons import titles
from recmill.stages.serve.recommender import Recommender

if TYPE_CHECKING:
    import polars as pl

    from recmill.recipe.recipe import Recipe
    from recmill.stages.run.run import RunResult

_MAX_RANKED = 1_000


@dataclass(frozen=True)
class RecommendedItem:
    """An item of a list; its title is None when the log has none."""

    id: m.Id
    title: str | None
    score: float


class Recommendations(Sequence[RecommendedItem]):
    """Items, best first. Prints as a table with titles, also in notebooks."""

    def __init__(self, items: Sequence[RecommendedItem]) -> None:
        self._items = list(items)

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: Any) -> Any:
        return self._items[index]

    @property
    def ids(self) -> list[m.Id]:
        """The items' ids."""
        return [item.id for item in self._items]

    def to_polars(self) -> pl.DataFrame:
        """A frame with id, title and score."""
        import polars as pl

        columns = {name: [getattr(item, name) for item in self._items] for name in ("id", "title", "score")}
        return pl.DataFrame(columns, schema_overrides={"title": pl.String, "score": pl.Float64})

    def _table(self) -> tuple[list[str], list[list[str]]]:
        has_titles = any(item.title is not None for item in self._items)
        header = ["item", *(["title"] if has_titles else []), "score"]
        rows = [
            [str(item.id), *([item.title or ""] if has_titles else []), f"{item.score:.3f}"]
            for item in self._items
        ]
        return header, rows

    def __repr__(self) -> str:
        return text_table(*self._table())

    def _repr_html_(self) -> str:
        return html_table(*self._table())


@dataclass(frozen=True)
class Explanation:
    """Why an item is recommended to a user: its rank in their list, in each channel, and the items that led to it."""

    user: m.Id
    item: m.Id
    title: str | None
    rank: int | None  # from 1; None beyond the first thousand, or for an item that the user already had
    channels: dict[str, int]  # channel -> the item's rank in it
    because: list[m.Reason]

    def __str__(self) -> str:
        name = self.title or str(self.item)
        place = f"number {self.rank} of the list" if self.rank is not None else "not in the list"
        lines = [f"{name}: {place} of user {self.user}"]
        lines += [f"  because of {r.title or r.id} ({r.channel})" for r in self.because]
        lines += [f"  number {rank} of {name}" for name, rank in self.channels.items()]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return str(self)


class RunningServer:
    """A server in another process. Use it in a `with` block, or call `stop`."""

    def __init__(self, bundle: Path, http_port: int, grpc_port: int) -> None:
        command = [sys.executable, "-m", "recmill", "serve", "--bundle", str(bundle), "--json"]
        ports = ["--http-port", str(http_port), "--grpc-port", str(grpc_port)]
        self._process = subprocess.Popen([*command, *ports], stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RecmillError(f"serve: the server ended with exit code {self._process.wait()}.")
        ready = json.loads(line)
        self.http: str = ready["http"]
        self.grpc: str = ready["grpc"]

    def stop(self) -> None:
        """Answer the requests in progress, then stop."""
        self._process.terminate()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def __enter__(self) -> RunningServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"console and HTTP at {self.http}/, gRPC at {self.grpc}; stop() ends it"


class FittedRecommender:
    """A trained recommender and its origin: see `recipe`, `decisions` and `path`."""

    def __init__(self, ran: RunResult, decisions: Sequence[str]) -> None:
        assert ran.bundle is not None
        self._ran = ran
        self.decisions = tuple(decisions)
        self.path = Path(ran.into)  # Table, checkpoint, report and bundle
        self.recommender = Recommender(ran.bundle)

    @property
    def recipe(self) -> Recipe:
        """The recipe that was decided on; `path / "recipe.toml"` is its text."""
        return self.recommender.bundle.recipe

    def recommend(self, user: m.Id | None, k: int = 10, **fields: Any) -> Recommendations:
        """The k best items of a user; unknown users get popular items.

        Other arguments are those of a request, such as `where="price < 30"` or `recent=["i1"]`.
        """
        answer = self.recommender.recommend(user, k=k, **fields)
        return self._titled([item.id for item in answer.items], [item.score for item in answer.items])

    def similar(self, item: m.Id, k: int = 10) -> Recommendations:
        """The k items most similar to an item, by co-interactions and by vectors."""
        found = self.recommender.similar(item, k=k)
        if not found.known:
            raise BadRequest(f"{item!r} is no item of the log.")
        return self._titled([one.id for one in found.items], [one.score for one in found.items])

    def explain(self, user: m.Id, item: m.Id) -> Explanation:
        """Why an item is recommended to a user: earlier interactions that led to it, and the channels that found it."""
        index = self._item_index(item)
        ranked = self.recommender.recommend(user, k=_MAX_RANKED, candidates=_MAX_RANKED)
        ids = [str(one.id) for one in ranked.items]
        lists = self.recommender.channel_lists(m.Recall(user=user, k=_MAX_RANKED))
        channels = {
            name: int(np.flatnonzero(found == index)[0]) + 1
            for name, found in lists.items()
            if index in found
        }
        rank = ids.index(str(item)) + 1 if str(item) in ids else None
        asked = m.Describe(user=user, items=[m.Item(id=item, score=0.0, channel="")], explain=True)
        because = self.recommender.describe(asked).items[0].because
        return Explanation(user, item, self._titles([index])[0], rank, channels, because)

    def evaluate(self) -> EvaluationReport:
        """Metrics of the served list on held-out rows next to simple baselines, and of each model."""
        results, report = self._ran.results, self._ran.report
        assert report is not None
        return EvaluationReport(
            {one.model: one for one in results["evaluate"]}, report, results.get("served")
        )

    def save(self, into: PathLike) -> Path:
        """Copy the bundle and its recipe to a directory for `recmill.open_bundle` and `recmill serve`."""
        target = Path(into)
        if target.exists() and any(target.iterdir()):
            raise ArtifactError(f"{target}: exists already and is not empty. Give another directory.")
        shutil.copytree(self.path / "bundle", target, dirs_exist_ok=True)
        return target

    def serve(self, http_port: int = 8080, grpc_port: int = 8081) -> RunningServer:
        """Serve over HTTP and gRPC from another process, until `stop()`; port 0 picks a free one."""
        return RunningServer(self.path / "bundle", http_port, grpc_port)

    def __repr__(self) -> str:
        return "\n".join((*self.decisions, "", str(self.evaluate())))

    # items

    @property
    def _items(self) -> Any:
        items = self.recommender.bundle.items
        assert items is not None
        return items

    def _item_index(self, item: m.Id) -> int:
        index = int(self._items.indices([item])[0])
        if index < 0:
            raise BadRequest(f"{item!r} is no item of the log.")
        return index

    def _titles(self, indices: Sequence[int]) -> list[str | None]:
        return titles(self._items, self.recipe, np.asarray(indices, np.int64))

    def _titled(self, ids: Sequence[m.Id], scores: Sequence[float]) -> Recommendations:
        titles = self._titles(self._items.indices(ids).tolist())
        return Recommendations(
            [RecommendedItem(*one) for one in zip(ids, titles, scores, strict=True)],
        )
