"""Evaluation protocols: named ways to measure retrieval, so that published numbers are comparable.

Numbers of two protocols must never be compared: the same model gets 0.06 or 0.20 for what both call Recall@10.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from recmill.errors import RecmillError
from recmill.recipe.recipe import Holdout, Recipe

_CUTOFF = re.compile(r"@(\d+)")


@dataclass(frozen=True)
class DataCounts:
    """Rows with label 1 in all splits of a Table, and their users and items."""

    interactions: int
    users: int | None = None  # None when the Table lacks the column that identifies them
    items: int | None = None


@dataclass(frozen=True)
class Protocol:
    """The eval queries of a model, and its metrics.

    For each query, all items of the training rows are ranked; items that the user clicked in earlier splits are
    masked: they are neither ranked nor count as relevant. A query is a user (`user`), or a user in one state
    (`state`): held-out clicks that share all features of the user tower form one query, and a longer history makes
    another query of the same user.
    """

    name: str
    about: str
    ask: Literal["user", "state"]
    cutoffs: tuple[int, ...]
    metrics: tuple[str, ...]  # metrics that the source reports
    split: Holdout | None = None
    data: str = ""
    counts: DataCounts | None = None
    source: str = ""
    published: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def notes(self, recipe: Recipe, found: DataCounts) -> list[str]:
        """Reasons why numbers measured here must not be compared with the published ones; empty when they may."""
        return [*self._notes_on_split(recipe), *self._notes_on_counts(found)]

    def _notes_on_split(self, recipe: Recipe) -> Iterator[str]:
        if self.split is None:
            return
        split = recipe.split
        if split is None or replace(split, column=None, order=None, seed=0) != self.split:
            by = f'by = "{split.by}"' if split is not None else "nothing held out"
            yield f'not the split of {self.name}: {by}, expected by = "{self.split.by}"'

    def _notes_on_counts(self, found: DataCounts) -> Iterator[str]:
        if self.counts is None:
            return
        for name, expected in vars(self.counts).items():
            number = getattr(found, name)
            if number is not None and number != expected:
                yield f"not {self.data}: {number:,} {name}, expected {expected:,}"


def protocol_for(recipe: Recipe) -> Protocol:
    """The protocol of a recipe: the one with its name, else its held-out clicks.

    The cutoff of the recipe's own target is measured too.
    """
    protocol = PROTOCOLS.get(recipe.name, HELD_OUT_CLICKS)
    target = recipe.retrieval.train.target if recipe.retrieval is not None else None
    found = _CUTOFF.search(target or "")
    more = {int(found[1])} if found else set()
    return replace(protocol, cutoffs=tuple(sorted({*protocol.cutoffs, *more})))


def protocol_named(name: str) -> Protocol:
    if name not in PROTOCOLS:
        raise RecmillError(f'There is no protocol "{name}"; known: {", ".join(PROTOCOLS)}.')
    return PROTOCOLS[name]


HELD_OUT_CLICKS = Protocol(
    name="held-out-clicks",
    about="Clicks of the held-out rows, each with the state of the user just before as its query.",
    ask="state",
    cutoffs=(10, 50),
    metrics=("recall@10", "ndcg@10", "recall@50", "ndcg@50"),
)

ML1M_RANDOM_811 = Protocol(
    name="ml1m-random-811",
    about=(
        "Ratings of at least 3; of each user's, a tenth at random is test and a tenth eval; for test, items of eval "
        "are masked too. Means over users."
    ),
    ask="user",
    cutoffs=(10,),
    metrics=("recall@10", "ndcg@10", "mrr@10", "hit@10"),
    split=Holdout(by="random", held_out=0.2, halve=True),
    data="MovieLens-1M",
    # The source gives 6,040 users and 3,629 items: it counts a padding token of each.
    counts=DataCounts(interactions=836_478, users=6_039, items=3_628),
    source="RecBole, general recommendation, MovieLens-1M, embedding size 64",
    published={
        "BPR": {"recall@10": 0.1776, "ndcg@10": 0.2401, "mrr@10": 0.4187, "hit@10": 0.7199},
        "NeuMF": {"recall@10": 0.1651, "ndcg@10": 0.2271, "mrr@10": 0.4020, "hit@10": 0.7029},
        "LightGCN": {"recall@10": 0.1861, "ndcg@10": 0.2538, "mrr@10": 0.4388, "hit@10": 0.7330},
        "SimGCL": {"recall@10": 0.2029, "ndcg@10": 0.2667, "mrr@10": 0.4550, "hit@10": 0.7640},
        "XSimGCL": {"recall@10": 0.2116, "ndcg@10": 0.2750, "mrr@10": 0.4638, "hit@10": 0.7743},
    },
)

ML1M_LEAVE_LAST_OUT = Protocol(
    name="ml1m-leave-last-out",
    about="All ratings; each user's last one is test, the one before it eval; everything rated before is masked.",
    ask="user",
    cutoffs=(10, 50, 200),
    metrics=("hit@10", "ndcg@10", "hit@50", "hit@200"),
    split=Holdout(by="last"),
    data="MovieLens-1M",
    counts=DataCounts(interactions=1_000_209, users=6_040, items=3_706),
    source="generative-recommenders (HSTU), MovieLens-1M",
    published={
        "SASRec": {"hit@10": 0.2853, "ndcg@10": 0.1603, "hit@50": 0.5474, "hit@200": 0.7528},
        "GRU4Rec": {"hit@10": 0.2811, "ndcg@10": 0.1648},
        "BERT4Rec": {"hit@10": 0.2843, "ndcg@10": 0.1537},
        "HSTU": {"hit@10": 0.3097, "ndcg@10": 0.1720, "hit@50": 0.5754, "hit@200": 0.7716},
        "HSTU-large": {"hit@10": 0.3294, "ndcg@10": 0.1893, "hit@50": 0.5935, "hit@200": 0.7839},
    },
)

PROTOCOLS = {protocol.name: protocol for protocol in (HELD_OUT_CLICKS, ML1M_RANDOM_811, ML1M_LEAVE_LAST_OUT)}
