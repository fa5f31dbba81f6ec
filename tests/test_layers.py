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
# From the top down. A module belongs to the longest name here that it begins with.
LAYERS = (
    ("cli", "api", "client", "__main__"),
    ("stages.run", "stages.tune", "stages.bench", "stages.check"),
    ("stages.replay",),
    (
        "stages.prepare",
        "stages.train",
        "stages.evaluate",
        "stages.score",
        "stages.export",
        "stages.serve",
        "stages.deploy",
        "stages.init",
    ),
    ("distributed",),
    ("learner",),
    ("dataset.log_loader",),
    # Cells are parsed alike by those who read files and by servers that follow a stream.
    (
        "models",
        "engines",
        "logs",
        "logs.entries",
        "logs.columns",
        "logs.times",
        "synthetic",
        "reporting.html",
    ),
    ("artifacts",),
    ("embeddings", "artifacts.vector_index", "metrics", "logistic", "recall"),
    ("number_metrics",),
    ("dataset",),
    ("features", "artifacts.work"),
    ("features.kernels", "storage"),
    ("dataset.prefetch", "artifacts.manifest", "reporting"),
    ("artifacts.lock", "recipe"),
    ("errors", "config"),
)
LAYER_OF = {name: number for number, layer in enumerate(LAYERS) for name in layer}
BELOW_ALL = ("", "_native")  # the version, and the compiled core
STAGES = 3  # the layer whose packages never import each other: between them there is only an artifact on disk
SEPARATE = {("features", "engines"), ("engines", "features"), ("engines", "logs"), ("logs", "engines")}
HEAVY = ("torch", "ray", "pyspark", "pandas", "polars", "pyarrow", "numpy", "rich")


def modules() -> dict[str, Path]:
    """Dotted name below the package -> file, of every module there is."""
    files = sorted(PACKAGE.rglob("*.py"))
    return {".".join(file.relative_to(PACKAGE).with_suffix("").parts): file for file in files}


def _is_module(name: str) -> bool:
    path = PACKAGE.parent.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").exists()


def imports_of(name: str, file: Path) -> Iterator[str]:
    """Every module of the package that a module imports anywhere, also late or for types."""
    package = ["recmill", *name.split(".")[:-1]]
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("recmill."))
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            if source == "recmill" or source.startswith("recmill."):
                found = (f"{source}.{alias.name}" for alias in node.names)
                yield from {name if _is_module(name) else source for name in found}


def layer_name(module: str) -> str:
    """The name in LAYERS that a dotted name below the package belongs to."""
    parts = module.split(".")
    prefixes = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((name for name in prefixes if name in LAYER_OF), parts[0])


def imports_across() -> Iterator[tuple[str, str, str]]:
    """(module, its name in LAYERS, the name that it imports), for each import from one to another."""
    for module, file in modules().items():
        name = layer_name(module)
        for imported in imports_of(module, file):
            other = layer_name(imported.removeprefix("recmill").removeprefix("."))
            if name != other and other not in BELOW_ALL:
                yield module, name, other


def is_allowed(name: str, other: str) -> bool:
    if name == "__init__":  # the public API imports what it offers, late
        return True
    is_above = LAYER_OF[other] < LAYER_OF[name]
    are_stages = LAYER_OF[other] == LAYER_OF[name] == STAGES
    return not is_above and not are_stages and (name, other) not in SEPARATE


def test_every_module_has_a_layer() -> None:
    names = {layer_name(module.removesuffix(".__init__")) for module in modules()}
    packages = {file.parent.name for file in PACKAGE.glob("*/__init__.py")}
    assert names - set(LAYER_OF) - {"__init__"} - packages == set()


def test_imports_point_down_only() -> None:
    wrong = [
        f"{module} imports {other}" for module, name, other in imports_across() if not is_allowed(name, other)
    ]
    assert wrong == []


def test_the_server_never_imports_what_trains() -> None:
    wrong = [
        f"{module} imports {imported}"
        for module, file in modules().items()
        if module.startswith(
            ("stages.serve.", "artifacts.bundle.", "artifacts.vector_index", "artifacts.feature_store.")
        )
        for imported in imports_of(module, file)
        if layer_name(imported.removeprefix("recmill."))
        in ("models", "learner", "stages.train", "distributed", "engines", "logs", "dataset.log_loader")
        or imported.startswith("recmill.artifacts.checkpoint")
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
        "import recmill.recipe.load",
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
    needed = ("distributed.dispatcher", "dataset.batch", "dataset.log_loader")
    code = f"import sys, {', '.join(f'recmill.{name}' for name in needed)}; print('torch' in sys.modules)"
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
