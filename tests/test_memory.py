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


@pytest.mark.processes
@pytest.mark.parametrize("megabytes", [400, 1200, 1600])
def test_below_a_limit_of_memory_train_says_so_without_a_traceback(table, tmp_path, megabytes):
    command = [sys.executable, "-m", "recmill", "train", "quickstart", "--table", str(table)]
    limited = ["bash", "-c", f'ulimit -v {megabytes << 10}; exec "$@"', "limited", *command]
    ran = subprocess.run([*limited, "--into", str(tmp_path / "c"), "--quiet"], capture_output=True, text=True)
    assert ran.returncode == ResourceError.exit_code
    assert "Traceback" not in ran.stderr
    said = next(
        line for line in ran.stderr.splitlines() if line.startswith("recmill: train ran out of memory")
    )
    assert f"(ulimit -v) is {megabytes:,} MB" in said
