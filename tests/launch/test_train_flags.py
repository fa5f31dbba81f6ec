"""`recmill train` says which flags go together, and takes its workers from torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import small_trainings
from small_trainings import last_state, sightings, write_log


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
def test_torchrun_s_processes_train_together(recmill, tmp_path: Path) -> None:
    log = write_log(tmp_path / "log")
    recipe = f"{Path(small_trainings.__file__)}:recipe_of"
    arguments = ["train", recipe, "--from-log", str(log), "--threads", "1", "--quiet", "--json"]
    code, out, err = recmill(*arguments, "--into", tmp_path / "one")
    assert code == 0, err
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "-m", "recmill", *arguments, "--into", str(tmp_path / "two")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    (one,), (two,) = (json.loads(said)["models"] for said in (out, done.stdout))
    assert sightings(tmp_path / "one") == sightings(tmp_path / "two")
    assert (last_state(tmp_path / "one")["workers"], last_state(tmp_path / "two")["workers"]) == (1, 2)
    assert two["samples"] == one["samples"]
    assert two["metrics"]["auc"] == pytest.approx(one["metrics"]["auc"], abs=0.01)
