"""What `evaluate` leaves behind: evaluation.json for machines, and one HTML page for people."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from recmill.artifacts.checkpoint.checkpoint import Checkpoint
from recmill.artifacts.manifest import write_whole
from recmill.metrics import RankingSums, ScoreSums, TaskSums
from recmill.number_metrics import NumberSums
from recmill.recipe.load import recipe_to_dict
from recmill.reporting.html.content import Fact, Report, ReportTable, Section
from recmill.reporting.html.environment import environment_section
from recmill.reporting.html.page import write_report
from recmill.reporting.html.sections import (
    number_sections,
    ranking_sections,
    recipe_section,
    retrieval_sections,
    tables_section,
    training_sections,
)
from recmill.reporting.html.served import served_facts, served_sections, served_verdict
from recmill.reporting.tracking import JSONL_FILE, plain, read_history
from recmill.stages.evaluate.evaluate import EvaluateResult
from recmill.stages.evaluate.gate import is_better

EVALUATION = "evaluation.json"


def write_evaluation(
    folder: Checkpoint,
    evaluated: Sequence[EvaluateResult],
    report: Path,
    served: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Write both; what the JSON holds is returned. `served` is what was measured of the lists that users get.

    `outcome` is passed, improving (not yet passed, but better than the evaluation before, or the first) or failed.
    """
    earlier = _read_earlier(folder)
    models = {model.model: _as_json(folder, model, earlier.get(model.model, {})) for model in evaluated}
    passed = all(model.passed for model in evaluated) and (served is None or served["passed"])
    content: dict[str, Any] = plain(
        {
            "checkpoint": str(folder.path),
            "passed": passed,
            "outcome": "passed" if passed else "improving" if _improves(models) else "failed",
            "report": str(report.absolute()),
            "models": models,
            **({"served": served} if served is not None else {}),
        }
    )
    report.parent.mkdir(parents=True, exist_ok=True)
    write_report(report, _report(folder, evaluated, served))
    write_whole(folder.path / EVALUATION, json.dumps(content, indent=1) + "\n", contended=True)
    return content


def _read_earlier(folder: Checkpoint) -> dict[str, Any]:
    """Models of the evaluation before; nothing when there was none that can be read."""
    try:
        return dict(json.loads((folder.path / EVALUATION).read_text(encoding="utf-8"))["models"])
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _improves(models: Mapping[str, Any]) -> bool:
    failed = [one for model in models.values() for one in model["gate"] if not one["passed"]]
    return any(
        one["before"] is None or is_better(one["condition"].split(" ")[1], one["found"], one["before"])
        for one in failed
    )


def _before(earlier: Mapping[str, Any], last_step: int, condition: str) -> float | None:
    """What was found when less was learned; an evaluation that runs again looks at what the first one looked at."""
    known = {one["condition"]: one for one in earlier.get("gate", ())}
    if condition not in known:
        return None
    name = "before" if earlier.get("last_step") == last_step else "found"
    return known[condition].get(name)  # type: ignore[no-any-return]


def _as_json(folder: Checkpoint, model: EvaluateResult, earlier: Mapping[str, Any]) -> dict[str, Any]:
    last_step = folder.of(model.model).find("last").step
    return {
        "step": model.checkpoint.step,
        "last_step": last_step,
        "split": model.split,
        "metrics": model.metrics,
        "baselines": model.baselines,
        "protocol": model.protocol.name if model.protocol else None,
        "notes": model.notes,
        "segments": {
            part.column: {name: found.as_dict() for name, found in part.metrics()} for part in model.segments
        },
        "gate": [
            {
                "condition": str(verdict.condition),
                "found": verdict.found,
                "bound": verdict.bound,
                "passed": verdict.passed,
                "before": _before(earlier, last_step, str(verdict.condition)),
            }
            for verdict in model.verdicts
        ],
    }


def _report(
    folder: Checkpoint, evaluated: Sequence[EvaluateResult], served: Mapping[str, Any] | None
) -> Report:
    sections: list[Section] = list(served_sections(served)) if served is not None else []
    sections += [_gate_section(evaluated)] if any(model.verdicts for model in evaluated) else []
    for model in evaluated:
        sections += [_titled(section, model.model) for section in _sections(folder, model)]
    recipe = json.dumps(recipe_to_dict(folder.recipe), indent=1)
    facts = [*served_facts(served)] if served is not None else []
    facts += [fact for model in evaluated for fact in _facts(model)]
    return Report(
        f"{folder.recipe.name}: evaluation",
        tuple(facts),
        (*sections, recipe_section(recipe), environment_section()),
        (served_verdict(served),) if served is not None else (),
    )


def _facts(model: EvaluateResult) -> list[Fact]:
    if "auc" in model.metrics:
        margin = f"± {model.metrics['auc_margin']:.4f}, {model.split} rows, step {model.checkpoint.step:,}"
        return [
            Fact("AUC", model.metrics["auc"], margin),
            *(
                Fact(f"AUC of a {name}", found["auc"], "the same rows")
                for name, found in model.baselines.items()
                if "auc" in found
            ),
            Fact("normalised entropy", model.metrics["normalised_entropy"], "below 1 beats a constant"),
        ]
    if "r2" in model.metrics:
        return _facts_of_numbers(model)
    names = [name for name in model.metrics if name.startswith(("recall@", "ndcg@")) and "margin" not in name]
    where = f"{model.split} rows, step {model.checkpoint.step:,}"
    return [Fact(name, model.metrics[name], where) for name in names[:3]]


def _facts_of_numbers(model: EvaluateResult) -> list[Fact]:
    where = f"{model.split} rows, step {model.checkpoint.step:,}"
    return [
        Fact("R2", model.metrics["r2"], f"above 0 beats a constant; {where}"),
        *(Fact(f"R2 of a {name}", found["r2"], "the same rows") for name, found in model.baselines.items()),
        Fact("rank correlation", model.metrics["rank_correlation"], "of labels and predictions"),
    ]


def _sections(folder: Checkpoint, model: EvaluateResult) -> list[Section]:
    if isinstance(model.sums, TaskSums):
        measured = tuple(
            _titled(section, label)
            for label, sums in model.sums.tasks.items()
            for section in _sections_of_label(sums)
        )
    elif isinstance(model.sums, NumberSums):
        measured = number_sections(model.sums)
    elif not isinstance(model.sums, RankingSums):
        by_column = {part.column: dict(part.metrics()) for part in model.segments}
        measured = ranking_sections(model.sums, by_column)
    else:
        published = model.protocol.published if model.protocol and not model.notes else None
        measured = retrieval_sections(model.sums.means(), model.sums.margins(), published)
    history = training_sections(read_history(folder.path / model.model / JSONL_FILE))
    tables = tables_section([{"table": name, **asdict(found)} for name, found in model.tables.items()])
    return [*measured, *history, tables]


def _sections_of_label(sums: ScoreSums | NumberSums) -> tuple[Section, ...]:
    return number_sections(sums) if isinstance(sums, NumberSums) else ranking_sections(sums)


def _titled(section: Section, model: str) -> Section:
    return Section(
        f"{model.capitalize()}: {section.title.lower()}",
        section.text,
        section.facts,
        section.charts,
        section.tables,
        section.code,
    )


def _gate_section(evaluated: Sequence[EvaluateResult]) -> Section:
    rows = [
        (
            model.model,
            str(verdict.condition),
            verdict.found,
            "nothing is live yet" if verdict.bound is None else verdict.bound,
            "skip" if verdict.bound is None else "pass" if verdict.passed else "FAIL",
        )
        for model in evaluated
        for verdict in model.verdicts
    ]
    passed = all(model.passed for model in evaluated)
    text = (
        "All conditions are met."
        if passed
        else "Not all conditions are met: this model must not be published."
    )
    return Section(
        "Gate", (text,), tables=(ReportTable(("model", "condition", "found", "bound", ""), tuple(rows)),)
    )
