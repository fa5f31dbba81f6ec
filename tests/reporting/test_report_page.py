"""The page is one balanced, harmless file, whatever it is made from."""

from __future__ import annotations

import base64
import hashlib
import json
import math

import pytest
from html_check import Document

from recmill.reporting.html.content import (
    Axis,
    BarChart,
    Fact,
    Heights,
    HistogramChart,
    LineChart,
    Report,
    ReportTable,
    Section,
    Series,
)
from recmill.reporting.html.page import page, write_report

HOSTILE = "</title></style></script><script>alert(1)</script><img src=x onerror=\"alert('2')\"> & \x00 \ud800"
SHOWN = HOSTILE.replace("\x00", "\ufffd").replace("\ud800", "\ufffd")


def line_chart(*points, **scales):
    x, y = (tuple(float(point[side]) for point in points) for side in (0, 1))
    return LineChart(
        "Curve",
        Axis("step", scales.get("x", "linear")),
        Axis("loss", scales.get("y", "linear")),
        (Series("a", x, y),),
    )


def page_of(*charts, tables=()):
    return Document(page(Report("Run", sections=(Section("Part", charts=charts, tables=tables),))))


def hover_of(document):
    return json.loads(next(svg["data-hover"] for svg in document.named("svg") if "data-hover" in svg))


def test_an_empty_report_is_a_whole_page():
    document = Document(page(Report("Nothing yet")))
    assert document.inside("h1") == ["Nothing yet"]
    assert document.named("section") == []
    assert document.named("nav") == []


def test_an_empty_section_is_its_title_alone():
    document = Document(page(Report("Run", sections=(Section("Empty"),))))
    assert document.inside("h2") == ["Empty"]
    assert document.named("figure") == document.named("table") == document.named("pre") == []


def test_everything_of_a_section_is_on_the_page():
    section = Section(
        "Part",
        ("One sentence.",),
        (Fact("rows", 1_000_000, "of the test split"),),
        (line_chart((1, 0.5), (2, 0.25)),),
        (ReportTable(("name", "keys"), (("C1", 1234),), "Tables"),),
        "[log]\nfiles = 1\n",
    )
    document = Document(page(Report("Run", (Fact("AUC", 0.80251),), (section,))))
    assert document.inside("p") == ["One sentence."]
    assert document.inside("dt") == ["AUC", "rows"]
    assert document.inside("dd") == ["0.8025", "1,000,000"]
    assert document.inside("small") == ["of the test split"]
    assert document.inside("figcaption") == ["Curve"]
    assert document.inside("th") == ["name", "keys"]
    assert document.inside("td") == ["C1", "1,234"]
    assert document.inside("code") == ["[log]\nfiles = 1\n"]


def test_three_sections_get_a_table_of_contents():
    document = Document(page(Report("Run", sections=tuple(map(Section, ("A", "B", "C"))))))
    assert [link["href"] for link in document.named("a")] == ["#section1", "#section2", "#section3"]
    assert [section["id"] for section in document.named("section")] == ["section1", "section2", "section3"]


def hostile_report():
    axis = Axis(HOSTILE)
    charts = (
        LineChart(HOSTILE, axis, axis, (Series(HOSTILE, (1.0,), (2.0,), (HOSTILE,)),), diagonal=HOSTILE),
        HistogramChart(HOSTILE, axis, axis, (0.0, 1.0), (Heights(HOSTILE, (1.0,)), Heights(HOSTILE, (2.0,)))),
        BarChart(HOSTILE, axis, (HOSTILE,), (Heights(HOSTILE, (1.0,)), Heights(HOSTILE, (2.0,)))),
    )
    table = ReportTable((HOSTILE,), ((HOSTILE,),), HOSTILE)
    facts = (Fact(HOSTILE, HOSTILE, HOSTILE),)
    section = Section(
        HOSTILE,
        (HOSTILE,),
        facts,
        charts,
        (table, ReportTable((HOSTILE,), (), HOSTILE, folded=True)),
        HOSTILE,
    )
    return Report(HOSTILE, facts, (section,) * 3, (HOSTILE,))


def test_hostile_names_are_only_text():
    document = Document(page(hostile_report()))
    assert len(document.named("script")) == 1
    assert document.named("img") == []
    assert not [name for _, attributes in document.elements for name in attributes if name.startswith("on")]
    for tag in [
        "h1",
        "h2",
        "p",
        "dt",
        "dd",
        "small",
        "th",
        "td",
        "figcaption",
        "caption",
        "summary",
        "code",
        "li",
    ]:
        assert set(document.inside(tag)) == {SHOWN}, tag
    assert hover_of(document) == [[220.0, f"{HOSTILE} 1", [[108.0, 0, f"{HOSTILE}: 2.0000, {HOSTILE}"]]]]


def test_nothing_is_loaded_from_elsewhere():
    document = Document(page(hostile_report()))
    asking = [
        (tag, name) for tag, attributes in document.elements for name in attributes if name in ("src", "href")
    ]
    assert set(asking) == {("a", "href")}
    assert {tag for tag, _ in document.elements} & {
        "link",
        "img",
        "iframe",
        "image",
        "use",
        "object",
    } == set()
    (style,) = document.inside("style")
    assert "url(" not in style
    assert "@import" not in style


def test_browsers_are_told_to_run_only_our_script():
    document = Document(page(Report("Run")))
    (script,) = document.inside("script")
    (policy,) = [meta["content"] for meta in document.named("meta") if "http-equiv" in meta]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy == f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"


def test_a_column_of_numbers_is_aligned_to_the_right():
    table = ReportTable(
        ("name", "keys", "rate", "mixed"), (("C1", 12345, 0.25, 1), ("C2", None, math.nan, "x"))
    )
    document = page_of(tables=(table,))
    assert [cell["class"] for cell in document.named("th") if "class" in cell] == ["number", "number"]
    assert document.inside("td") == ["C1", "12,345", "0.2500", "1", "C2", "–", "–", "x"]


def test_a_table_without_rows_keeps_its_head():
    document = page_of(tables=(ReportTable(("a", "b"), ()),))
    assert document.inside("th") == ["a", "b"]
    assert document.inside("td") == []


@pytest.mark.parametrize(
    "chart",
    [
        LineChart("Empty", Axis("x"), Axis("y"), ()),
        LineChart("No points", Axis("x"), Axis("y"), (Series("a", (), ()),)),
        LineChart("Only gaps", Axis("x"), Axis("y"), (Series("a", (1.0, 2.0), (math.nan, math.inf)),)),
        line_chart((1, 0), (2, -1), y="log"),
        LineChart("Only a diagonal", Axis("x"), Axis("y"), (), diagonal="chance"),
        HistogramChart("No series", Axis("x"), Axis("y"), (0.0, 1.0), ()),
        HistogramChart("No bins", Axis("x"), Axis("y"), (), ()),
        BarChart("No labels", Axis("y"), (), ()),
        BarChart("Missing", Axis("y"), ("a",), (Heights("x", (math.nan,)),)),
    ],
    ids=lambda chart: chart.title,
)
def test_a_chart_with_nothing_to_show_says_so(chart):
    document = page_of(chart)
    assert "no data" in document.inside("text")
    assert hover_of(document) == []


@pytest.mark.parametrize("scale", ["linear", "log", "logit"])
def test_a_single_point_is_a_dot(scale):
    document = page_of(line_chart((0.5, 0.5), x=scale, y=scale))
    assert len(document.classed("dot")) == 1
    assert document.classed("line") == []
    assert len(hover_of(document)) == 1


def test_a_value_that_is_no_number_leaves_a_gap():
    document = page_of(line_chart((1, 1), (2, 2), (3, math.nan), (4, 4), (5, 5), (6, math.inf), (7, 7)))
    (line,) = document.classed("line")
    assert line["d"].count("M") == 2
    assert len(document.classed("dot")) == 1
    assert [heading for _, heading, _ in hover_of(document)] == [f"step {step}" for step in (1, 2, 4, 5, 7)]


def test_hover_shows_the_lines_that_have_a_point_there():
    series = (Series("train", (1.0, 2.0), (0.5, 0.25)), Series("eval", (2.0,), (0.75,), ("best",)))
    found = hover_of(page_of(LineChart("Loss", Axis("step"), Axis("loss"), series)))
    assert [(heading, [text for _, _, text in lines]) for _, heading, lines in found] == [
        ("step 1", ["train: 0.5000"]),
        ("step 2", ["train: 0.2500", "eval: 0.7500, best"]),
    ]


def test_a_long_line_is_thinned_but_keeps_its_spike():
    points = [(step, 1.0) for step in range(100_000)]
    points[31_337] = (31_337, 9.0)
    found = hover_of(page_of(line_chart(*points)))
    assert len(found) <= 400
    assert ["step 31,337", "a: 9.0000"] in [[heading, lines[0][2]] for _, heading, lines in found]


def test_a_long_line_with_gaps_keeps_both_its_values_and_a_gap():
    points = [(step, math.nan if step == 500 else 1.0) for step in range(1000)]
    document = page_of(line_chart(*points))
    assert len(hover_of(document)) > 100
    assert document.classed("line")[0]["d"].count("M") == 2


def test_charts_have_titles_and_descriptions_for_readers_of_screens():
    document = page_of(line_chart((1, 0.5), (2, 0.25)), line_chart())
    charts = [svg for svg in document.named("svg") if svg.get("role") == "img"]
    ids = {element["id"] for name in ("title", "desc") for element in document.named(name) if "id" in element}
    assert [svg["aria-labelledby"].split() for svg in charts] == [
        ["chart1-title", "chart1-text"],
        ["chart2-title", "chart2-text"],
    ]
    assert ids == {"chart1-title", "chart1-text", "chart2-title", "chart2-text"}
    assert document.inside("desc") == [
        "loss over step. a: 2 points from 0.5000 at 1 to 0.2500 at 2, lowest 0.2500, highest 0.5000.",
        "loss over step. a: no data.",
    ]


def test_one_line_needs_no_legend_and_two_do():
    one, other = Series("a", (1.0,), (1.0,)), Series("b", (1.0,), (2.0,))
    assert page_of(LineChart("t", Axis("x"), Axis("y"), (one,))).named("li") == []
    assert page_of(LineChart("t", Axis("x"), Axis("y"), (one, other))).inside("li") == ["a", "b"]
    assert page_of(LineChart("t", Axis("x"), Axis("y"), (one,), "chance")).inside("li") == ["a", "chance"]


def test_bars_grow_from_zero_in_both_directions():
    chart = BarChart("t", Axis("y"), ("up", "down"), (Heights("a", (2.0, -2.0), (0.5, 0.0)),))
    document = page_of(chart)
    up, down = document.classed("bar")
    assert float(up["y"]) + float(up["height"]) == pytest.approx(float(down["y"]), abs=0.02)
    assert float(up["height"]) == pytest.approx(float(down["height"]), abs=0.02)
    assert len(document.classed("error")) == 1
    assert [(heading, lines[0][2]) for _, heading, lines in hover_of(document)] == [
        ("up", "a: 2.0000 ± 0.5000"),
        ("down", "a: -2.0000"),
    ]


def test_a_histogram_is_one_outline_for_each_series():
    chart = HistogramChart(
        "t", Axis("x"), Axis("y"), (0.0, 1.0, 2.0), (Heights("a", (1.0, 3.0)), Heights("b", (2.0, 2.0)))
    )
    document = page_of(chart)
    assert len(document.classed("see-through")) == 2
    assert [heading for _, heading, _ in hover_of(document)] == ["x 0.0 to 1.0000", "x 1.0000 to 2.0000"]


def test_a_report_is_written_whole_into_a_new_directory(tmp_path):
    path = tmp_path / "run" / "report.html"
    write_report(path, hostile_report())
    assert path.read_text(encoding="utf-8") == page(hostile_report())
    assert [file.name for file in path.parent.iterdir()] == ["report.html"]
