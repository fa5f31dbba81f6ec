"""`recmill train` says which flags go together, and takes its workers from torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import small_trainings
from small_trainings import sightings, write_log


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--workers", "2"], "add --engine ray, or start them with torchrun: torchrun --nproc-per-node 2"),
        (["--data-workers", "2"], "--data-workers is for --engine ray"),
        (["--address", "auto"], "--address is for --engine ray"),
        (["--engine", "ray", "--data-resource", "cpu"], "Add --data-workers D"),
        (["--engine", "ray", "--address", "ray://head:10001"], "ray job submit"),
        (["--engine", "ray", "--workers", "4..2"], "must be a number from 1, or a range such as 2..4"),
    ],
)
def test_flags_that_do_not_go_together_say_what_would(recmill, tmp_path, flags, message) -> None:
    code, _, errors = recmill("train", "quickstart", "--table", tmp_path, "--into", tmp_path / "c", *flags)
    assert code == 2
    assert message in errors


@pytest.mark.processes
def test_torchrun_s_processes_train_together(tmp_path: Path) -> None:
    log = write_log(tmp_path / "log")
    recipe = f"{Path(small_trainings.__file__)}:recipe_of"
    arguments = ["train", recipe, "--from-log", str(log), "--threads", "1", "--quiet", "--json"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    found = {}
    for name, start in {"one": [sys.executable], "two": torchrun}.items():
        command = [*start, "-m", "recmill", *arguments, "--into", str(tmp_path / name)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
        assert done.returncode == 0, done.stderr
        (found[name],) = json.loads(done.stdout)["models"]
    assert sightings(tmp_path / "one") == sightings(tmp_path / "two")
    assert found["two"]["samples"] == found["one"]["samples"]
    assert found["two"]["metrics"]["auc"] == pytest.approx(found["one"]["metrics"]["auc"], abs=0.01)
