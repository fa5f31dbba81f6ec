"""What a plan learned, feature by feature, for people."""

from __future__ import annotations

from dataclasses import dataclass

from recmill.features.base import ValueTable
from recmill.features.chain import Chain
from recmill.features.plan import Plan

NUM_TOP = 3


@dataclass(frozen=True)
class Explained:
    """One feature: what it became and what was fitted for it."""

    name: str
    kind: str
    of: str
    size: int | None
    coverage: float | None  # share of the training values that have an id of their own
    unknown: float | None  # share that is 0: too rare for an id
    missing: float | None
    top: list[tuple[str, int]]
    learned: dict[str, object]


def explain(plan: Plan) -> list[Explained]:
    """One entry for each feature, in recipe order."""
    return [_explain(plan, chain) for chain in plan.features]


def _explain(plan: Plan, chain: Chain) -> Explained:
    info = chain.info()
    learned = {key: value for transform in chain.transforms for key, value in transform.state.items()}
    table = next((transform.table for transform in chain.transforms if transform.table is not None), None)
    coverage = unknown = missing = None
    if table is not None and table.facts:
        values = table.facts["values"]
        coverage = table.facts["known"] / max(1, values)
        unknown = 1 - coverage
        missing = table.facts["missing"] / max(1, values + table.facts["missing"])
    return Explained(
        info.name, info.kind, info.of, info.size, coverage, unknown, missing, _top(table), learned
    )


def _top(table: ValueTable | None) -> list[tuple[str, int]]:
    if table is None or "count" not in table.frame.columns:
        return []
    best = table.frame.top_k(NUM_TOP, by="count").sort("count", "value", descending=[True, False])
    return [(str(value), int(count)) for value, count in best.select("value", "count").iter_rows()]
