"""An engine is chosen by name; what it cannot do or does not have is said before any work."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from recmill.engines import EngineConfig, open_engine
from recmill.errors import RecmillError

WITHOUT_PACKAGE = """
import sys

sys.modules[{package!r}] = None  # what Python takes for a package that is not there
from recmill.cli import main
sys.exit(main({arguments!r}))
"""


@pytest.mark.parametrize(("name", "package"), [("ray", "ray"), ("spark", "pyspark")])
def test_a_missing_package_is_the_line_that_installs_it(tmp_path: Path, name: str, package: str) -> None:
    arguments = [
        "prepare",
        "quickstart",
        "--data",
        str(tmp_path),
        "--into",
        str(tmp_path / "table"),
        "--engine",
        name,
    ]
    code = WITHOUT_PACKAGE.format(package=package, arguments=arguments)
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert answer.returncode == 1
    assert f'Engine "{name}" needs {package}. Install it: pip install "recmill[{name}]"' in answer.stderr
    assert not (tmp_path / "table").exists()


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("dask", {}, r'There is no engine "dask"; there are: local, ray, spark\.'),
        ("local", {"address": "auto"}, r"--address auto is not for engine local.*Add --engine ray"),
        (
            "ray",
            {"spark_conf": {"spark.executor.memory": "1g"}},
            r"--spark-conf is not for engine ray",
        ),
        ("spark", {"address": "yarn", "workers": 4}, r"--workers has no meaning for Spark at an address"),
    ],
)
def test_settings_that_an_engine_does_not_have_are_errors(tmp_path, name, settings, message) -> None:
    with pytest.raises(RecmillError, match=message):
        open_engine(EngineConfig(engine=name, **settings), tmp_path)


def test_a_sample_is_taken_in_this_process(recmill, tmp_path: Path) -> None:
    code, _, said = recmill("prepare", "quickstart", "--data", tmp_path, "--sample", 3, "--engine", "ray")
    assert code == 2
    assert "--engine has no meaning with --sample" in said


def test_a_spark_setting_without_a_value_is_an_error(recmill, tmp_path: Path) -> None:
    code, _, said = recmill(
        "prepare", "quickstart", "--data", tmp_path, "--spark-conf", "spark.executor.memory"
    )
    assert code == 2
    assert "--spark-conf: must be KEY=VALUE, got spark.executor.memory" in said
