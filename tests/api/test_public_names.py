"""`recmill.__all__` is the contract: what it names, documents and annotates."""

from __future__ import annotations

import inspect
import subprocess
import sys
from dataclasses import fields
from typing import Any

import pytest

import recmill
from recmill.stages.evaluate.evaluate import EvaluateConfig
from recmill.stages.export.export import ExportConfig
from recmill.stages.prepare.prepare import PrepareConfig
from recmill.stages.score.score import ScoreConfig
from recmill.stages.serve import messages as m
from recmill.stages.train.train import TrainConfig
from recmill.stages.tune.tune import TuneConfig

FUNCTIONS = [name for name in recmill.__all__ if inspect.isfunction(getattr(recmill, name))]
CLASSES = [name for name in recmill.__all__ if inspect.isclass(getattr(recmill, name))]
# What only commands can choose.
PRIVATE_FIELDS = {TrainConfig: {"wait_policy"}}  # torch may have been imported before, and read it only once
# What a function takes beside its stage's config: inputs, where results land, whether progress is shown.
OTHER_ARGUMENTS = {
    "prepare": {"recipe", "data", "into", "plan", "quiet"},
    "train": {
        *("recipe", "table", "from_log", "plan", "into", "engine", "workers", "address"),
        *("on_step", "on_evaluation", "quiet"),
    },
    "evaluate": {"checkpoint", "table", "report", "quiet", "data", "served", "served_bundle", "served_users"},
    "score": {"model", "rows", "into", "trust_code", "quiet"},
    "export": {"checkpoint", "data", "into", "quiet"},
    "tune": {"recipe", "table", "into", "on_trial", "quiet"},
}


def test_every_public_name_is_a_function_or_a_class() -> None:
    assert sorted([*FUNCTIONS, *CLASSES]) == sorted(recmill.__all__)


@pytest.mark.processes
def test_a_star_import_gives_the_public_names_and_nothing_else() -> None:
    code = "names = set(dir())\nfrom recmill import *\nprint(*sorted(set(dir()) - names - {'names'}))"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.split() == sorted(recmill.__all__)


@pytest.mark.parametrize("name", recmill.__all__)
def test_a_public_name_has_a_docstring_of_its_own(name: str) -> None:
    assert inspect.getdoc(getattr(recmill, name))
    assert name in dir(recmill)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_public_function_is_annotated_in_full(name: str) -> None:
    signature = inspect.signature(getattr(recmill, name))
    assert signature.return_annotation is not inspect.Signature.empty
    assert [p.name for p in signature.parameters.values() if p.annotation is inspect.Parameter.empty] == []


@pytest.mark.parametrize("name", CLASSES)
def test_public_methods_of_public_classes_are_annotated_and_documented(name: str) -> None:
    for method, function in inspect.getmembers(getattr(recmill, name), inspect.isfunction):
        if not method.startswith("_") and function.__module__.startswith("recmill."):
            assert "return" in function.__annotations__, method


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("prepare", PrepareConfig),
        ("train", TrainConfig),
        ("evaluate", EvaluateConfig),
        ("score", ScoreConfig),
        ("export", ExportConfig),
        ("tune", TuneConfig),
    ],
)
def test_arguments_of_a_stage_are_the_fields_of_its_config(name: str, config: type[Any]) -> None:
    arguments = set(inspect.signature(getattr(recmill, name)).parameters)
    configured = {field.name for field in fields(config)} - PRIVATE_FIELDS.get(config, set())
    assert arguments - OTHER_ARGUMENTS[name] == configured


@pytest.mark.parametrize(
    ("query", "keywords"),
    [(m.Recommend, m.RecommendFields), (m.Recall, m.RecallFields), (m.Query, m.QueryFields)],
)
def test_keyword_arguments_of_a_recommender_are_the_fields_of_the_query(
    query: type[Any], keywords: type[Any]
) -> None:
    # A recommender is one version, and the user is its first argument.
    assert set(query.__struct_fields__) - {"user", "version"} == set(keywords.__annotations__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match='has no attribute "fitt"'):
        recmill.fitt  # noqa: B018
