"""A package that is not installed is an error with the line that installs it, in every command."""

from __future__ import annotations

import argparse
import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from shop import Shop

import recmill
from recmill.cli import build_parser
from recmill.errors import OPTIONAL

PACKAGE = Path(recmill.__file__).parent
PROJECT = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]
CORE = {"numpy", "polars", "pyarrow", "rich", "msgspec", "shtab"}
NOT_OURS = {"IPython", "grpc_tools", "py4j"}  # loaded by a notebook itself, a generator, a part of pyspark

# Python itself then finds no such packages, in this process and those that it starts.
SITECUSTOMIZE = """
import os, sys
from importlib.machinery import PathFinder

class Without:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in os.environ["WITHOUT_PACKAGES"].split(","):
            return None
        return PathFinder.find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Without
"""
ALL = ",".join(OPTIONAL)
# what is missing -> the extra that is named, and the command; T, C, B, L are the shop's, O is a folder
CASES = [
    (ALL, "local", "run quickstart --data L --into O/run --quiet"),
    (ALL, "local", "start L/events.csv --into O/start --quiet"),
    ("uvicorn", "local", "start L/events.csv --into O/start --quiet"),
    (ALL, "local", "demo --quiet"),
    (ALL, "serve", "demo O/none"),
    (ALL, "train", "train quickstart --table T --into O/c --quiet"),
    (ALL, "train", "train quickstart --follow L --publish O/b --into C --for 1 --quiet"),
    ("torch", "train", "train quickstart --from-log L --into O/c --quiet"),
    ("ray", "ray", "train quickstart --table T --into O/c --engine ray --quiet"),
    (ALL, "train", "evaluate quickstart --checkpoint C --table T --quiet"),
    (ALL, "train", "score --checkpoint C --table T --into O/s --scores"),
    (ALL, "serve", "score --bundle B --table T --into O/s --scores"),
    (ALL, "tune", "tune quickstart --table T --into O/t --trials 1 --quiet"),
    ("safetensors", "train", "tune quickstart --table T --into O/t --trials 1 --quiet"),
    (ALL, "train", "checkpoint show C"),
    (ALL, "train", "export --checkpoint C --into O/b --quiet"),
    (ALL, "train", "bundle publish B --into O/b --checkpoint C --despite-gate"),
    (ALL, "redis", "load --bundle B --features redis://127.0.0.1:1"),
    (ALL, "serve", "serve --bundle B --http-port 0 --grpc-port 0"),
    ("uvicorn", "serve", "serve --bundle B --http-port 0 --grpc-port 0 --processes 2"),
    ("grpc_health", "serve", "serve --bundle B --http-port 0 --grpc-port 0"),
    ("redis", "redis", "serve --bundle B --features redis://127.0.0.1:1 --http-port 0 --grpc-port 0"),
    (ALL, "serve", "client -s 127.0.0.1:1 -d L/events.csv -n 1 -w 0"),
    (ALL, "deploy", "deploy quickstart --target serve --into O/d"),
    ("pyspark", "spark", "prepare quickstart --data L --into O/t --engine spark --quiet"),
    (ALL, "train", "bench train --rows 100"),
]
NEEDS_NONE = [
    "bench prepare --rows 100",
    "generate shop --rows 100 --into O/log",
    "recipes",
    "init L/events.csv --into O/mine.toml",
    "check quickstart --data L",
    "prepare quickstart --data L --into O/table --quiet",
    "size quickstart",
    "bundle verify B",
    "rollback --bundle B CURRENT",
    "completion bash",
]


def run_without(packages: str, command: str, shop: Shop, folder: Path) -> subprocess.CompletedProcess[str]:
    (folder / "sitecustomize.py").write_text(SITECUSTOMIZE)
    current = next(path.name for path in shop.bundles.iterdir() if path.is_dir() and path.name[0] == "0")
    here = {
        "T": shop.table,
        "C": shop.checkpoint,
        "B": shop.bundles,
        "L": shop.log,
        "O": folder,
        "CURRENT": current,
    }
    words = [re.sub(r"^([A-Z]+)(?=/|$)", lambda found: str(here[found[1]]), word) for word in command.split()]
    environment = {**os.environ, "PYTHONPATH": str(folder), "WITHOUT_PACKAGES": packages}
    line = [sys.executable, "-m", "recmill", *words]
    return subprocess.run(line, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.stages
@pytest.mark.processes
@pytest.mark.parametrize(("packages", "extra", "command"), CASES, ids=lambda value: str(value)[:40])
def test_a_missing_package_names_its_extra(
    shop: Shop, tmp_path: Path, packages: str, extra: str, command: str
) -> None:
    done = run_without(packages, command, shop, tmp_path)
    assert done.returncode == 1, done
    assert re.fullmatch(
        rf'recmill: .* needs [\w-]+\. Install it: pip install "recmill\[{extra}\]"\n', done.stderr
    )


@pytest.mark.stages
@pytest.mark.processes
@pytest.mark.parametrize("command", NEEDS_NONE)
def test_what_needs_no_extra_runs_without_any(shop: Shop, tmp_path: Path, command: str) -> None:
    done = run_without(ALL, command, shop, tmp_path)
    assert done.returncode == 0, done.stderr


def test_every_command_is_tried_without_packages() -> None:
    (commands,) = [
        action for action in build_parser()._actions if isinstance(action, argparse._SubParsersAction)
    ]
    tried = {command.split()[0] for command in [*NEEDS_NONE, *(case[2] for case in CASES)]}
    assert tried == set(commands.choices)


def distributions_of(extra: str) -> set[str]:
    return {re.split(r"[\[<>=;]", one)[0].strip().lower() for one in PROJECT["optional-dependencies"][extra]}


def test_the_table_of_packages_is_that_of_the_project() -> None:
    for module, (distribution, extra) in OPTIONAL.items():
        assert distribution in distributions_of(extra), module
    extras = set(PROJECT["optional-dependencies"]) - {"dev"}
    brought = set.union(*map(distributions_of, extras)) - {
        "recmill",
        "opentelemetry-exporter-otlp-proto-http",
    }
    assert brought == {distribution for distribution, _ in OPTIONAL.values()}


def test_every_package_that_is_imported_is_in_the_table() -> None:
    imported = set()
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
                imported.add(node.module.partition(".")[0])
    others = imported - set(sys.stdlib_module_names) - CORE - NOT_OURS - {"recmill"}
    assert others <= OPTIONAL.keys()
