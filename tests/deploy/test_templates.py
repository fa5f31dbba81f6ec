"""Templates: values come out of YAML as they went in, and a line without its value is left out."""

from __future__ import annotations

import re
from typing import Any

import pytest

from recmill.recipe.load import load_recipe, shipped_recipes
from recmill.stages.deploy.deploy import TARGETS, render
from recmill.stages.deploy.settings import DeployConfig
from recmill.stages.deploy.templates import files_in, fill, fill_file
from recmill.stages.deploy.yaml import loads


@pytest.mark.parametrize(
    "value",
    [
        "text", "2", "true", "null", "a, b", "x: y", "a #b", "{{workflow.name}}", "$(CPUS)", "ne<=live", "", "'", '"',
        "é", "1e3", "0x1F", "~", "- a", "[", 3, 0.5, True, ["a", "2", "b, c"], {"cpu": "2", "memory": "1Gi"},
    ],
)  # fmt: skip
def test_a_value_is_read_as_it_was_given_wherever_it_stands(value: Any) -> None:
    text = "alone: ${x}\ninside: {a: ${x}, b: [1, ${x}]}\nlist:\n  - ${x}\n"
    (read,) = loads(fill(text, {"x": value}))
    assert read == {"alone": value, "inside": {"a": value, "b": [1, value]}, "list": [value]}


def test_a_line_whose_value_is_none_is_left_out() -> None:
    text = "a: 1\nclass: ${x}\nlist:\n  - {name: ${y}, of: ${x}}\n  - ${y}\n"
    assert fill(text, {"x": None, "y": "kept"}) == "a: 1\nlist:\n  - kept\n"


def test_comments_and_layout_stay() -> None:
    assert fill("# why\na: {b: ${x}} # and how\n", {"x": 1}) == "# why\na: {b: 1} # and how\n"


def test_a_value_inside_of_a_text_must_need_no_quotes() -> None:
    assert fill("name: ${x}-runs\n", {"x": "shop"}) == "name: shop-runs\n"
    with pytest.raises(AssertionError, match="cannot be quoted: a: b"):
        fill("name: ${x}-runs\n", {"x": "a: b"})


def test_a_text_of_several_lines_becomes_a_block() -> None:
    text = fill("data:\n  recipe.toml: ${x}\n", {"x": 'name = "a"\n\n[log]\n'})
    assert text == 'data:\n  recipe.toml: |\n    name = "a"\n\n    [log]\n'
    assert loads(text) == [{"data": {"recipe.toml": 'name = "a"\n\n[log]\n'}}]


def test_variables_of_shells_argo_and_kubernetes_are_left_alone() -> None:
    text = 'a: ["${HOME:-/x}", "$(CPUS)", "{{workflow.name}}", "$X"]\n'
    assert fill(text, {}) == text
    assert (
        fill_file("run.sh", "exec ${program} $HOME\n", {"program": "sh -c 'a b'"})
        == "exec sh -c 'a b' $HOME\n"
    )


@pytest.mark.parametrize("target", TARGETS)
def test_every_placeholder_of_every_target_is_filled(target: str) -> None:
    for name in shipped_recipes():
        files = render(load_recipe(name), target, DeployConfig())
        for path, text in files.items():
            if not path.endswith(("recmill.json", "dashboard.json")):  # ${datasource} is Grafana's
                assert not re.search(r"\$\{[a-z]", text), path


def test_templates_chart_and_dashboard_are_in_the_package() -> None:
    """Read by importlib.resources, as from a wheel."""
    assert {"Chart.yaml", "values.yaml", "values.schema.json", "templates/_helpers.tpl"} <= files_in(
        "chart"
    ).keys()
    assert "files/dashboard.json" in files_in("chart")
    folders = {name.partition("/")[0] for name in files_in("manifests")}
    assert {"train-job", "pipeline", "ray", "spark", "serve", "docker", "storage"} <= folders
