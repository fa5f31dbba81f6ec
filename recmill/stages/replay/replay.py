"""replay: measure the list that users will be served, before it is served.

A bundle is exported as of the cut before the held-out rows, opened as a server opens it, and queried for every
held-out user.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from recmill.artifacts.bundle.bundle import Bundle, publish_bundle
from recmill.artifacts.checkpoint.checkpoint import Checkpoint
from recmill.artifacts.manifest import link_or_copy
from recmill.errors import RecmillError
from recmill.learner.ranking import Ranker
from recmill.learner.retrieval import Retriever
from recmill.metrics import RankingSums
from recmill.recall.interactions import Array, Interactions
from recmill.recall.parameters import RecallParameters
from recmill.recipe.recipe import SPLITS, Recipe
from recmill.recipe.trust import modules_of
from recmill.reporting.machine import available_cores
from recmill.reporting.progress import Progress
from recmill.stages.evaluate.gate import Verdict, judge_served, parse_gate
from recmill.stages.export.config import ExportConfig
from recmill.stages.export.export import choose, describe_bundle, open_learners, write_models, write_sides
from recmill.stages.export.sides import content_vectors
from recmill.stages.export.snapshot import EntitySnapshot, read_snapshot
from recmill.stages.replay.baselines import POPULAR, baseline_lists, fit_all_neighbours, seen_of
from recmill.stages.replay.config import ReplayConfig
from recmill.stages.replay.fit import RecallFit, fit_channels, fit_weights
from recmill.stages.replay.queries import HeldOutQueries, offsets_of
from recmill.stages.serve import messages as m
from recmill.stages.serve.recommender import Recommender

CUTOFFS = (10, 50)
HEADLINE = "recall@10"
_LIGHT = 10  # clicks up to which a user counts as light and an item as rare
_MAX_COMPARED = 100  # lists whose items are compared for diversity


_NOTHING = (
    "No user has a held-out click on an item that is new to them: there is nothing to measure lists by."
)


class NothingToMeasure(RecmillError):
    """The held-out rows have no clicks to measure lists by."""


@dataclass(frozen=True)
class ServedResult:
    """Metrics of the served lists on held-out clicks, next to simple baselines on the same users."""

    split: str
    steps: dict[str, int]
    fit: RecallFit
    sums: RankingSums
    baselines: dict[str, RankingSums]
    segments: dict[str, RankingSums]
    facts: dict[str, float]  # coverage, novelty and the like
    losses: dict[str, float]  # the fraction of relevant items that remain after each stage
    left_out: dict[str, int]
    differences: dict[
        str, tuple[float, float]
    ]  # recall@10 minus that of each baseline, and half of the 95% interval
    users: list[Any] = field(default_factory=list)
    lists: Array | None = None
    verdicts: list[Verdict] = field(default_factory=list)

    @property
    def metrics(self) -> dict[str, float]:
        return {
            **self.sums.means(),
            **{f"{name}_margin": value for name, value in self.sums.margins().items()},
        }

    @property
    def best_baseline(self) -> str:
        return max(self.baselines, key=lambda name: self.baselines[name].means().get(HEADLINE, 0.0))

    @property
    def passed(self) -> bool:
        """Whether all conditions hold, and the list does not lose to most popular beyond the 95% interval."""
        mean, margin = self.differences[POPULAR]
        return mean + margin >= 0 and all(verdict.passed for verdict in self.verdicts)

    def judged(self, gate: str | None) -> ServedResult:
        """The result with the verdicts of a gate's conditions on served lists."""
        conditions = parse_gate(gate or "")
        return replace(
            self, verdicts=judge_served(conditions, self.sums.means(), self.baselines[POPULAR].means())
        )


def can_replay(recipe: Recipe) -> bool:
    """Whether the recipe recommends lists and holds out rows to measure them by."""
    log = recipe.log
    return (
        recipe.split is not None
        and log.user is not None
        and log.item is not None
        and bool(recipe.click_label)
    )


def replay(
    folder: Checkpoint,
    data: str,
    config: ReplayConfig = ReplayConfig(),  # noqa: B008, frozen
    progress: Progress | None = None,
) -> ServedResult:
    """Fit recall on eval, then measure the served list on test; without test rows, on two halves of eval."""
    recipe = folder.recipe
    if not can_replay(recipe):
        raise RecmillError(
            f'Recipe "{recipe.name}" has no list to measure: it needs log.user, log.item, a model and [split].'
        )
    with _BundleMaker.open(folder, data, config, progress or Progress(quiet=True)) as maker:
        first = maker.snapshot("eval")
        interactions = _interactions(first)
        queries = HeldOutQueries.of(first, interactions.sequences)
        test = maker.snapshot("test")
        has_test = test.held_out is not None and test.held_out.height > 0
        if not has_test:
            queries, measured = queries.halves()
        fitted, ease_variant = maker.fit(first, interactions, queries)
        if has_test:
            interactions = _interactions(test)
            measured = HeldOutQueries.of(test, interactions.sequences)
        snapshot = test if has_test else first
        if not len(measured):
            raise NothingToMeasure(_NOTHING)
        return maker.measure(
            snapshot, interactions, measured, fitted, ease_variant, SPLITS[2 if has_test else 1]
        )


def _interactions(snapshot: EntitySnapshot) -> Interactions:
    if snapshot.clicks is None or snapshot.held_out is None:
        raise NothingToMeasure(_NOTHING)
    return snapshot.clicks.interactions()


class _Models:
    """Chosen checkpoints, and the part of a bundle that depends on them alone."""

    def __init__(self, folder: Checkpoint, which: str, options: ExportConfig, path: Path) -> None:
        self.folder, self.path = folder, path
        self.chosen = choose(folder, which)
        self.learners = open_learners(folder, self.chosen, options)
        path.mkdir()
        self.described = write_models(path, folder, self.learners, options)


class _BundleMaker:
    """Makes bundles of one checkpoint as of earlier times, in a temporary folder."""

    def __init__(
        self, folder: Checkpoint, data: str, config: ReplayConfig, progress: Progress, work: Path
    ) -> None:
        self.folder, self.data, self.config, self.progress, self.work = folder, data, config, progress, work
        self.options = ExportConfig(which=config.which, threads=config.threads)
        self.threads = config.threads or available_cores()
        self.measured = _Models(folder, config.which, self.options, work / "models")
        # A refit was trained on the rows that recall is fitted to.
        self.fitted = (
            _Models(folder.selection(), "best", self.options, work / "models-before-eval")
            if folder.is_refit
            else self.measured
        )

    @classmethod
    @contextmanager
    def open(
        cls, folder: Checkpoint, data: str, config: ReplayConfig, progress: Progress
    ) -> Iterator[_BundleMaker]:
        with tempfile.TemporaryDirectory(prefix=".served-", dir=folder.path) as work:
            yield cls(folder, data, config, progress, Path(work))

    def snapshot(self, before: str) -> EntitySnapshot:
        work = self.work / f"before-{before}"
        return read_snapshot(
            self.folder.recipe, self.folder.plan, self.data, work, self.progress, before=before
        )

    def recommender(
        self, models: _Models, snapshot: EntitySnapshot, recall: RecallParameters, name: str
    ) -> Recommender:
        into, folder = self.work / name, models.folder
        shutil.copytree(models.path, into, copy_function=link_or_copy)
        retriever: Ranker | Retriever | None = models.learners.get("retrieval")
        write_sides(into, folder, models.described, retriever, snapshot, recall, self.options)
        manifest = describe_bundle(into, name, folder, models.described, snapshot, recall, self.options)
        publish_bundle(into, manifest)
        return Recommender(Bundle.open(into, modules_of(self.folder.recipe)))

    def fit(
        self, snapshot: EntitySnapshot, interactions: Interactions, queries: HeldOutQueries
    ) -> tuple[RecallFit, str]:
        assert snapshot.items is not None
        vectors = content_vectors(self.folder.plan, snapshot.items)
        neighbours = fit_all_neighbours(interactions, self.threads, vectors)
        channels = fit_channels(interactions, queries, neighbours)
        recommender = self.recommender(self.fitted, snapshot, channels.parameters, "fit")
        return fit_weights(channels.parameters, recommender, interactions, queries), channels.ease_variant

    def measure(
        self,
        snapshot: EntitySnapshot,
        interactions: Interactions,
        queries: HeldOutQueries,
        fitted: RecallFit,
        ease_variant: str,
        split: str,
    ) -> ServedResult:
        sampled = queries.sample(self.config.served_users)
        recommender = self.recommender(self.measured, snapshot, fitted.parameters, "measure")
        with self.progress.stage("served lists", len(sampled)) as bar:
            answers = _answers(recommender, sampled, max(CUTOFFS), bar.advance)
        if self.config.served_bundle is not None:
            shutil.copytree(self.work / "measure", self.config.served_bundle)
        half_life = fitted.parameters.popular_half_life
        others = baseline_lists(interactions, sampled, half_life, ease_variant, self.threads, max(CUTOFFS))
        seen = np.diff(seen_of(interactions, sampled).offsets)
        groups = {
            "new users": seen == 0,
            f"1 to {_LIGHT} clicks": (seen > 0) & (seen <= _LIGHT),
            f"more than {_LIGHT} clicks": seen > _LIGHT,
        }
        return ServedResult(
            split,
            {model: checkpoint.step for model, checkpoint in self.measured.chosen.items()},
            fitted,
            sums_of(answers.lists, sampled),
            {name: sums_of(lists, sampled) for name, lists in others.items()},
            {
                name: sums_of(answers.lists[rows], sampled.take(np.flatnonzero(rows)))
                for name, rows in groups.items()
            },
            facts_of(answers.lists[:, : CUTOFFS[0]], sampled, interactions),
            answers.losses,
            {"users": len(queries) - len(sampled), "repeated clicks": queries.num_repeats},
            {name: _difference(answers.lists, lists, sampled) for name, lists in others.items()},
            sampled.users,
            answers.lists,
        )


@dataclass(frozen=True)
class _Answers:
    lists: Array
    losses: dict[str, float]


def _answers(recommender: Recommender, queries: HeldOutQueries, k: int, advance: Any) -> _Answers:
    """The served list of each query, and the number of relevant items after each stage."""
    assert recommender.recaller is not None
    num_items = len(recommender.recaller.items)
    lists = np.full((len(queries), k), -1, np.int64)
    names = ("known items", "in a channel's list", "among the candidates", f"in the list of {CUTOFFS[0]}")
    kept = np.zeros(len(names))
    for number, (user, relevant) in enumerate(zip(queries.users, queries.relevant, strict=True)):
        by_stage = recommender.recommend_by_stage(m.Recommend(user=user, k=k))
        lists[number, : len(by_stage["list"])] = by_stage["list"]
        stages = (by_stage["recall"], by_stage["candidates"], by_stage["list"][: CUTOFFS[0]])
        kept += [(relevant < num_items).sum(), *(np.isin(relevant, items).sum() for items in stages)]
        advance(1, 1)
    total = max(1, sum(map(len, queries.relevant)))
    return _Answers(lists, dict(zip(names, (kept / total).tolist(), strict=True)))


def sums_of(lists: Array, queries: HeldOutQueries) -> RankingSums:
    sums = RankingSums(CUTOFFS)
    if len(queries):
        sums.add(lists, offsets_of(queries.relevant), np.concatenate(queries.relevant))
    return sums


def facts_of(lists: Array, queries: HeldOutQueries, interactions: Interactions) -> dict[str, float]:
    """Beyond accuracy: catalogue coverage, popularity and diversity of the listed items."""
    shown = lists[lists >= 0]
    shown = shown[shown < interactions.num_items]
    probability = (interactions.counts + 1) / (len(interactions) + interactions.num_items)
    popularity_rank = np.argsort(np.argsort(interactions.counts, kind="stable")) / max(
        1, interactions.num_items - 1
    )
    return {
        "catalogue coverage": len(np.unique(shown)) / max(1, interactions.num_items),
        "novelty in bits": float(-np.log2(probability[shown]).mean()) if len(shown) else 0.0,
        "mean popularity percentile": float(popularity_rank[shown].mean()) if len(shown) else 0.0,
        "diversity within a list": _diversity(lists[:_MAX_COMPARED], interactions),
        f"recall@{CUTOFFS[0]} of items with at most {_LIGHT} clicks": _recall_of_rare(
            lists, queries, interactions
        ),
    }


def _diversity(lists: Array, interactions: Interactions) -> float:
    """1 minus the mean cosine similarity of the users of two items of the same list."""
    order = np.argsort(interactions.items, kind="stable")
    users, ends = interactions.users[order], np.cumsum(interactions.counts)
    starts = ends - interactions.counts
    cosines = []
    for row in lists:
        clicked_by = [np.unique(users[starts[item] : ends[item]]) for item in row if 0 <= item < len(ends)]
        for one, other in combinations(clicked_by, 2):
            common = len(np.intersect1d(one, other, assume_unique=True))
            cosines.append(common / max(1.0, np.sqrt(len(one) * len(other))))
    return 1 - float(np.mean(cosines)) if cosines else 0.0


def _recall_of_rare(lists: Array, queries: HeldOutQueries, interactions: Interactions) -> float:
    counts = np.append(interactions.counts, 0)  # the last bin stands for every unknown item
    rare = [items[counts[np.minimum(items, interactions.num_items)] <= _LIGHT] for items in queries.relevant]
    hits = sum(np.isin(items, row).sum() for items, row in zip(rare, lists, strict=True))
    return float(hits / max(1, sum(map(len, rare))))


def _difference(lists: Array, other: Array, queries: HeldOutQueries) -> tuple[float, float]:
    """Mean paired difference of recall@10 over users, and half of its 95% interval."""
    k = CUTOFFS[0]
    pairs = zip(lists[:, :k], other[:, :k], queries.relevant, strict=True)
    each = [
        (np.isin(mine, right).sum() - np.isin(its, right).sum()) / len(right) for mine, its, right in pairs
    ]
    return float(np.mean(each)), float(1.96 * np.std(each) / np.sqrt(max(1, len(each))))
