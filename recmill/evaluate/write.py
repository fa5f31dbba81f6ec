"""What `evaluate` leaves behind: evaluation.json for machines, and one HTML page for people."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from recmill.artifact import write_whole
from recmill.checkpoint import CheckpointFolder
from recmill.evaluate import Evaluated
from recmill.metrics import ScoreSums
from recmill.report.content import Fact, Report, Section, Table
from recmill.report.environment import environment_section
from recmill.report.page import write_report
from recmill.report.sections import (
    ranking_sections,
    recipe_section,
    retrieval_sections,
    tables_section,
    training_sections,
)
from recmill.spec.load import recipe_to_dict
from recmill.tracking import JSONL_FILE, plain, read_history

EVALUATION = "evaluation.json"


def write_evaluation(
    folder: CheckpointFolder, evaluated: Sequence[Evaluated], report: Path
) -> dict[str, Any]:
    """Write both; what the JSON holds is returned."""
    content: dict[str, Any] = plain(
        {
            "checkpoint": str(folder.path),
            "passed": all(model.passed for model in evaluated),
            "models": {model.model: _as_json(model) for model in evaluated},
        }
    )
    write_whole(folder.path / EVALUATION, json.dumps(content, indent=1) + "\n")
    report.parent.mkdir(parents=True, exist_ok=True)
    write_report(report, _report(folder, evaluated))
    return {**content, "report": str(report)}


def _as_json(model: Evaluated) -> dict[str, Any]:
    return {
        "step": model.checkpoint.step,
        "split": model.split,
        "metrics": model.metrics,
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
            }
            for verdict in model.verdicts
        ],
    }


def _report(folder: CheckpointFolder, evaluated: Sequence[Evaluated]) -> Report:
    sections: list[Section] = [_gate_section(evaluated)] if any(model.verdicts for model in evaluated) else []
    for model in evaluated:
        sections += [_titled(section, model.model) for section in _sections(folder, model)]
    recipe = json.dumps(recipe_to_dict(folder.recipe), indent=1)
    facts = [fact for model in evaluated for fact in _facts(model)]
    return Report(
        f"{folder.recipe.name}: evaluation",
        tuple(facts),
        (*sections, recipe_section(recipe), environment_section()),
    )


def _facts(model: Evaluated) -> list[Fact]:
    if "auc" in model.metrics:
        margin = f"± {model.metrics['auc_margin']:.4f}, {model.split} rows, step {model.checkpoint.step:,}"
        return [
            Fact("AUC", model.metrics["auc"], margin),
            Fact("normalised entropy", model.metrics["normalised_entropy"], "below 1 beats a constant"),
        ]
    names = [name for name in model.metrics if name.startswith(("recall@", "ndcg@")) and "margin" not in name]
    where = f"{model.split} rows, step {model.checkpoint.step:,}"
    return [Fact(name, model.metrics[name], where) for name in names[:3]]


def _sections(folder: CheckpointFolder, model: Evaluated) -> list[Section]:
    if isinstance(model.sums, ScoreSums):
        by_column = {part.column: dict(part.metrics()) for part in model.segments}
        measured = ranking_sections(model.sums, by_column)
    else:
        published = model.protocol.published if model.protocol and not model.notes else None
        measured = retrieval_sections(model.sums.means(), model.sums.margins(), published)
    history = training_sections(read_history(folder.path / model.model / JSONL_FILE))
    tables = tables_section([{"table": name, **asdict(found)} for name, found in model.tables.items()])
    return [*measured, *history, tables]


def _titled(section: Section, model: str) -> Section:
    return Section(
        f"{model.capitalize()}: {section.title.lower()}",
        section.text,
        section.facts,
        section.charts,
        section.tables,
        section.code,
    )


def _gate_section(evaluated: Sequence[Evaluated]) -> Section:
    rows = [
        (
            model.model,
            str(verdict.condition),
            verdict.found,
            verdict.bound,
            "pass" if verdict.passed else "FAIL",
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
        "Gate", (text,), tables=(Table(("model", "condition", "found", "bound", ""), tuple(rows)),)
    )
