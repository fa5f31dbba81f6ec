"""What a search leaves behind: every trial as a line, the best recipe as a file, and a page with plots."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from recmill.artifacts.manifest import write_whole
from recmill.recipe import recipe as r
from recmill.recipe.convert import show
from recmill.recipe.search import changed
from recmill.recipe.tuning import COSTS
from recmill.recipe.write import toml_of
from recmill.reporting.html.content import Axis, Cell, Fact, LineChart, Report, ReportTable, Section, Series
from recmill.reporting.html.environment import environment_section
from recmill.reporting.html.page import write_report
from recmill.reporting.html.sections import recipe_section, slice_chart, tradeoff_chart
from recmill.reporting.tracking import plain
from recmill.stages.tune.front import TrialResult, front, measured, signed

TRIALS, BEST, REPORT = "trials.jsonl", "best.toml", "report.html"


def write_trials(into: Path, tried: Sequence[TrialResult]) -> None:
    """One JSON object a line."""
    write_whole(into / TRIALS, "".join(json.dumps(plain(asdict(one))) + "\n" for one in tried))


def best_recipe(recipe: r.Recipe, objectives: Sequence[str], best: TrialResult) -> str:
    """The recipe of a trial as a file, which says where it comes from."""
    names = dict.fromkeys((*objectives, *COSTS))
    numbers = ", ".join(f"{name} {show_number(best.found[name])}" for name in names)
    lines = [f"# Trial {best.number} of a search: {numbers}", "# It set:"]
    lines += [f"#   {key} = {show(value)}" for key, value in best.values.items()]
    tuned = replace(changed(recipe, best.values), tune=recipe.tune)  # a next search may begin here
    return "\n".join(lines) + "\n\n" + toml_of(tuned)


def write_page(
    into: Path,
    recipe: r.Recipe,
    objectives: Sequence[str],
    tried: Sequence[TrialResult],
    best: TrialResult | None,
    own: TrialResult | None,
    text: str,
) -> None:
    """The page for people."""
    ended, unbeaten = measured(tried, objectives), front(tried, objectives)
    assert recipe.tune is not None
    sections = [
        _front_section(objectives, ended, unbeaten, own),
        _slices_section(objectives[0], recipe.tune.space, ended),
        _trials_section(objectives, tried),
        *([recipe_section(text)] if best else []),
        environment_section(),
    ]
    states = [one.state for one in tried]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    facts = [Fact("trials", len(tried), counts)]
    if best:
        names = dict.fromkeys((*objectives, *COSTS))
        facts += [Fact(name, best.found[name], _beside(name, best, own)) for name in names]
    write_report(into / REPORT, Report(f"{recipe.name}: search", tuple(facts), tuple(sections)))


def _beside(name: str, best: TrialResult, own: TrialResult | None) -> str:
    was = f"; {show_number(own.found[name])} as the recipe was" if own else ""
    return f"trial {best.number}{was}"


def _front_section(
    objectives: Sequence[str],
    ended: Sequence[TrialResult],
    unbeaten: Sequence[TrialResult],
    own: TrialResult | None,
) -> Section:
    quality = objectives[0]
    charts = [
        tradeoff_chart(
            quality, cost, *(_points(cost, quality, some) for some in (ended, unbeaten, [own] if own else []))
        )
        for cost in objectives[1:]
    ]
    text = (
        "Trials of the front: nothing that was tried is better in one objective and no worse in the others."
    )
    return Section(
        "Quality against cost" if charts else "Quality",
        (text,),
        charts=(*charts, _progress_chart(quality, ended)),
        tables=(_table(objectives, unbeaten, "The front"),),
    )


def _points(x: str, y: str, tried: Sequence[TrialResult]) -> list[tuple[float, float, str]]:
    return [
        (float(one.found[x]), float(one.found[y]), f"trial {one.number}: {show_values(one)}") for one in tried
    ]


def _progress_chart(quality: str, ended: Sequence[TrialResult]) -> LineChart:
    """Each trial's quality, and the best until then."""
    best: list[TrialResult] = []
    for one in ended:
        is_better = not best or signed(quality, one.found) > signed(quality, best[-1].found)
        best.append(one if is_better else best[-1])
    numbers = tuple(float(one.number) for one in ended)
    lines = (
        Series("best until then", numbers, tuple(float(one.found[quality]) for one in best)),
        Series("trials", numbers, tuple(float(one.found[quality]) for one in ended), dots=True, line=False),
    )
    return LineChart(f"{quality} by trial", Axis("trial"), Axis(quality), lines)


def _slices_section(quality: str, space: Mapping[str, r.Dimension], ended: Sequence[TrialResult]) -> Section:
    """How quality went with each key: points over a range, the best and the mean of each choice."""
    charts = tuple(
        slice_chart(key, quality, _values_and(key, quality, ended), dimension.log)
        for key, dimension in space.items()
        if isinstance(dimension, r.Range)
    )
    tables = tuple(
        _choices_table(key, quality, dimension, ended)
        for key, dimension in space.items()
        if isinstance(dimension, r.Choices)
    )
    return Section("By key", charts=charts, tables=tables)


def _values_and(key: str, quality: str, ended: Sequence[TrialResult]) -> list[tuple[float, float, str]]:
    return [(float(one.values[key]), float(one.found[quality]), f"trial {one.number}") for one in ended]


def _choices_table(key: str, quality: str, choices: r.Choices, ended: Sequence[TrialResult]) -> ReportTable:
    rows: list[tuple[Cell, ...]] = []
    for value in choices.values:
        having = [one for one in ended if one.values[key] == value]
        best = max(having, key=lambda one: signed(quality, one.found), default=None)
        mean = sum(one.found[quality] for one in having) / len(having) if having else None
        seconds = sum(one.found["seconds"] for one in having) / len(having) if having else None
        highest = float(best.found[quality]) if best else None
        rows.append((show(value), len(having), highest, mean, seconds))
    return ReportTable(
        ("value", "trials", f"best {quality}", f"mean {quality}", "mean seconds"), tuple(rows), key
    )


def _trials_section(objectives: Sequence[str], tried: Sequence[TrialResult]) -> Section:
    unmeasured = [one for one in tried if one.state not in ("complete", "interrupted")]
    rows = tuple((one.number, one.state, show_values(one), one.reason) for one in unmeasured)
    tables = [_table(objectives, measured(tried, objectives), "Trials that came to their end", folded=True)]
    if rows:
        tables.append(
            ReportTable(("trial", "state", "values", "why"), rows, "Trials that did not", folded=True)
        )
    return Section("Trials", tables=tuple(tables))


def _table(
    objectives: Sequence[str], tried: Sequence[TrialResult], title: str, folded: bool = False
) -> ReportTable:
    numbers = tuple(dict.fromkeys((*objectives, *COSTS)))
    rows = tuple((one.number, *(one.found.get(name) for name in numbers), show_values(one)) for one in tried)
    return ReportTable(("trial", *numbers, "values"), rows, title, folded)


def show_values(one: TrialResult, between: str = "; ") -> str:
    """`embedding_dim 8; bottom [64, 8]`: keys without the sections they share."""
    parts: list[str] = []
    for key, value in one.values.items():
        named: dict[str, Any] = value if isinstance(value, dict) else {key.rpartition(".")[2]: value}
        section = (
            key.split(".")[-2] if key.count(".") > 2 else ""
        )  # dense.learning_rate, sparse.learning_rate
        parts += [f"{section}{'.' if section else ''}{name} {_short(part)}" for name, part in named.items()]
    return between.join(parts)


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else show(value)


def show_number(value: float) -> str:
    if float(value).is_integer():
        return f"{int(value):,}"
    return f"{value:.4f}" if abs(value) < 10 else f"{value:,.1f}"
