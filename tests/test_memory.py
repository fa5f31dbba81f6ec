"""Too little memory is one clear error of every command, whoever asked for it."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest
import torch

from recmill.cli.memory import lack_of_memory
from recmill.errors import ResourceError
from recmill.recipe.load import load_recipe
from recmill.stages.prepare.prepare import PrepareConfig, prepare
from recmill.synthetic.generate import generate

HUGE = 1 << 60


@pytest.mark.parametrize(
    "ask",
    [
        lambda: bytearray(HUGE),
        lambda: np.empty(HUGE, np.uint8),
        lambda: torch.empty(HUGE, dtype=torch.uint8),
        lambda: pa.allocate_buffer(HUGE),
    ],
    ids=["python", "numpy", "torch", "arrow"],
)
def test_whoever_lacks_memory_the_error_is_the_same(ask):
    with pytest.raises(Exception) as raised:  # noqa: PT011, each library has its own
        ask()
    found = lack_of_memory("train", raised.value)
    assert found is not None
    assert str(found).startswith("train ran out of memory")
    assert "smaller batch" in str(found)


def test_other_errors_are_not_taken_for_a_lack_of_memory():
    assert lack_of_memory("train", RuntimeError("no such feature")) is None
    assert lack_of_memory("train", KeyError("allocate")) is None


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shop")
    generate("shop", 300, 1, folder / "log")
    prepare(load_recipe("quickstart"), str(folder / "log"), folder / "table", PrepareConfig(partitions=1))
    return folder / "table"


def _train_below(megabytes, table, into, *flags):
    command = [
        sys.executable,
        "-m",
        "recmill",
        "train",
        "quickstart",
        "--table",
        str(table),
        "--into",
        str(into),
    ]
    limited = [
        "bash",
        "-c",
        f'ulimit -v {megabytes << 10}; exec "$@"',
        "limited",
        *command,
        "--quiet",
        *flags,
    ]
    return subprocess.run(limited, capture_output=True, text=True, timeout=120)


@pytest.mark.processes
@pytest.mark.parametrize("megabytes", [400, 1200])
def test_a_limit_below_what_libraries_need_is_refused_before_they_are_loaded(table, tmp_path, megabytes):
    ran = _train_below(megabytes, table, tmp_path / "c")
    assert ran.returncode == ResourceError.exit_code
    (line,) = ran.stderr.splitlines()
    assert line.startswith("recmill: train ran out of memory before it began: it needs at least 1,250 MB")
    assert f"(ulimit -v) is {megabytes:,} MB" in line


@pytest.mark.processes
def test_train_that_asks_for_more_than_the_limit_says_so_without_a_traceback(table, tmp_path):
    ran = _train_below(3000, table, tmp_path / "c", "--set", "ranking.bottom=[60000000, 16]")
    assert ran.returncode == ResourceError.exit_code
    assert "Traceback" not in ran.stderr
    last = ran.stderr.splitlines()[-1]
    assert last.startswith("recmill: train ran out of memory")
    assert "(ulimit -v) is 3,000 MB" in last


@pytest.mark.processes
def test_other_errors_below_a_limit_are_what_they_are_without_one(table, tmp_path):
    ran = _train_below(3000, table, tmp_path / "c", "--set", "ranking.dimm=4")
    assert ran.returncode != 0
    (line,) = ran.stderr.splitlines()
    assert "ranking.dimm is not a known key" in line


@pytest.mark.processes
@pytest.mark.parametrize(
    "megabytes", [1400, 2000]
)  # a pool that takes 1 GB at once fits below the second alone
def test_below_a_limit_train_takes_little_address_space(megabytes, table, tmp_path):
    ran = _train_below(megabytes, table, tmp_path / "c")
    assert ran.returncode == 0, ran.stderr
