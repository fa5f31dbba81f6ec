"""Imports point down only, and what should start at once loads nothing heavy."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import recmill

PACKAGE = Path(recmill.__file__).parent
LAYERS = (
    ("cli", "__main__"),
    ("run", "hand_off", "tune", "bench"),
    ("prepare", "train", "evaluate", "score", "export", "serve", "deploy"),
    ("learner", "dealing"),
    ("models", "engines", "logs", "log_batches", "report"),
    ("checkpoint", "bundle", "store", "protocols"),
    ("embeddings", "index", "metrics"),
    ("growing",),
    ("table", "shard_file", "batches", "features"),
    ("ahead", "artifact", "kernels", "machine", "progress", "tracking", "work"),
    ("lock", "spec"),
    ("packages",),
    ("errors",),
)
PARTS = {file.stem for file in PACKAGE.iterdir()}  # other names of the package are its own
LAYER_OF = {name: number for number, layer in enumerate(LAYERS) for name in layer}
BELOW_ALL = ("__init__", "_native")  # the version, and the compiled core
VERBS = 2  # the layer whose parts never import each other: between them there is only an artifact on disk
STRANGERS = {("features", "engines"), ("engines", "features"), ("engines", "logs"), ("logs", "engines")}
HEAVY = ("torch", "ray", "pyspark", "pandas", "polars", "pyarrow", "numpy", "rich")


def modules() -> dict[str, Path]:
    """Dotted name below the package -> file, of every module there is."""
    files = sorted(PACKAGE.rglob("*.py"))
    return {".".join(file.relative_to(PACKAGE).with_suffix("").parts): file for file in files}


def imports_of(name: str, file: Path) -> Iterator[str]:
    """Every module of the package that a module imports anywhere, also late or for types."""
    package = ["recmill", *name.split(".")[:-1]]
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("recmill."))
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            if source == "recmill":
                yield from (f"recmill.{alias.name}" for alias in node.names if alias.name in PARTS)
            elif source.startswith("recmill."):
                yield source


def layer_names() -> Iterator[tuple[str, str, str]]:
    """(module, its part of the package, part that it imports), for each import across parts."""
    for name, file in modules().items():
        part = name.split(".")[0]
        for imported in imports_of(name, file):
            other = imported.split(".")[1]
            if part != other and not other.startswith("__version__"):
                yield name, part, other


def is_allowed(part: str, other: str) -> bool:
    if other in BELOW_ALL or part == "__init__":  # the package's own name opens doors, late
        return True
    above = LAYER_OF[other] < LAYER_OF[part]
    are_verbs = LAYER_OF[other] == LAYER_OF[part] == VERBS
    return not above and not are_verbs and (part, other) not in STRANGERS


def test_every_module_has_a_layer() -> None:
    parts = {name.split(".")[0] for name in modules()}
    assert parts - set(LAYER_OF) - set(BELOW_ALL) == set()


def test_imports_point_down_only() -> None:
    wrong = [f"{name} imports {other}" for name, part, other in layer_names() if not is_allowed(part, other)]
    assert wrong == []


def test_the_server_never_imports_what_trains() -> None:
    wrong = [
        f"{name} imports {other}"
        for name, part, other in layer_names()
        if part in ("serve", "bundle", "index", "store")
        and other in ("models", "learner", "train", "engines", "logs", "log_batches", "checkpoint")
    ]
    assert wrong == []


def test_no_module_is_a_drawer_for_everything() -> None:
    names = {part for name in modules() for part in name.split(".")}
    assert names & {"utils", "util", "common", "core", "helpers", "helper", "misc"} == set()


@pytest.mark.parametrize(
    "statement",
    [
        "import recmill",
        "import recmill.cli",
        "import recmill.spec.load",
        "import recmill.cli; recmill.cli.main(['--help'])",
        "import recmill.cli; recmill.cli.main(['prepare', '--help'])",
        "import recmill.cli; recmill.cli.main(['score', '--help'])",
        "import recmill.cli; recmill.cli.main(['tune', '--help'])",
        "import recmill.cli; recmill.cli.main(['recipes'])",
        "import recmill.cli; recmill.cli.main(['check', 'quickstart'])",
    ],
)
def test_what_answers_at_once_loads_nothing_heavy(statement: str) -> None:
    code = f"""
import contextlib, io, json, sys
with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
    {statement}
print(json.dumps([name for name in {HEAVY} if name in sys.modules]))
"""
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(answer.stdout) == []


def test_what_data_nodes_run_does_without_torch() -> None:
    pytest.importorskip("ray")
    code = "import sys, recmill.dealing.dealer, recmill.batches, recmill.log_batches; print('torch' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "False"


def test_modules_of_tests_have_names_of_their_own() -> None:
    """Tests are found by their folders, all of which are on the path at once: of two with one name, one is lost."""
    names = [file.name for file in Path(__file__).parent.rglob("*.py")]
    names = [name for name in names if name not in ("conftest.py", "__init__.py")]
    assert sorted(names) == sorted(set(names))


@pytest.mark.xdist_group("together")
def test_groups_of_tests_stay_together(request: pytest.FixtureRequest) -> None:
    """Otherwise each process starts a Ray and a Spark of its own. How pytest-xdist marks tests of a group:"""
    if "PYTEST_XDIST_WORKER" in os.environ:
        assert request.node.nodeid.endswith("@together")
