"""Results of the public functions besides artifacts, shown as small tables on a terminal and in notebooks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from recmill.reporting.tables import html_table, text_table

if TYPE_CHECKING:
    from recmill.stages.evaluate.evaluate import EvaluateResult
    from recmill.stages.replay.replay import ServedResult

_HEADER = ("model", "split", "metric", "value", "95% CI")


def _served_rows(served: ServedResult) -> Iterator[tuple[str, ...]]:
    """The served list and its baselines, as lines of the table."""
    metrics = served.metrics
    for name in ("recall@10", "ndcg@10", "hit@10"):
        yield ("served", served.split, name, f"{metrics[name]:.4f}", f"±{metrics[f'{name}_margin']:.4f}")
    for baseline, sums in served.baselines.items():
        yield (baseline, served.split, "recall@10", f"{sums.means()['recall@10']:.4f}", "")


@dataclass(frozen=True)
class EvaluationReport:
    """Metrics of each model on held-out rows. Printed, it is a table; `path` is the HTML report with plots."""

    models: Mapping[str, EvaluateResult]
    path: Path
    served: ServedResult | None = None

    @property
    def metrics(self) -> dict[str, dict[str, float]]:
        """Metrics by name, for each model."""
        return {name: dict(result.metrics) for name, result in self.models.items()}

    @property
    def passed(self) -> bool:
        """Whether all conditions of the gate hold; true without a gate."""
        is_served_well = self.served is None or self.served.passed
        return is_served_well and all(result.passed for result in self.models.values())

    def rows(self) -> list[tuple[str, ...]]:
        """Lines of the table: model, split, metric, value and half the width of its 95% confidence interval."""
        rows: list[tuple[str, ...]] = list(_served_rows(self.served)) if self.served is not None else []
        for name, result in self.models.items():
            metrics = result.metrics
            for metric, value in metrics.items():
                if metric.endswith("_margin"):
                    continue
                shown = f"{value:,.0f}" if metric in ("rows", "users") else f"{value:.4f}"
                margin = f"±{metrics[f'{metric}_margin']:.4f}" if f"{metric}_margin" in metrics else ""
                rows.append((name, result.split, metric, shown, margin))
            rows += [
                (name, result.split, "gate", str(verdict).partition(" ")[0], str(verdict.condition))
                for verdict in result.verdicts
            ]
        return rows

    def __str__(self) -> str:
        return text_table(_HEADER, self.rows())

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return html_table(_HEADER, self.rows())
