"""`recmill deploy` and `recmill size` as commands."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., tuple[int, str, str]]
TRAIN_JOB = ["quickstart", "--target", "train-job"]


def test_it_says_what_was_written_and_what_comes_next(recmill: Run, tmp_path: Path) -> None:
    code, out, _ = recmill("deploy", "quickstart", "--target", "train-job", "--into", tmp_path)
    assert code == 0
    assert f"wrote  {tmp_path}/train-job/base/job.yaml" in out
    assert out.splitlines()[-1] == f"next   kubectl apply -k {tmp_path}/train-job/overlays/pvc"


def test_the_next_step_is_the_overlay_of_the_storage_that_was_chosen(recmill: Run, tmp_path: Path) -> None:
    chosen = ["--set", "storage.kind=nfs", "--set", "storage.nfs.server=10.0.0.5"]
    code, out, _ = recmill(
        "deploy", "quickstart", "--target", "train-job", "--into", tmp_path, *chosen, "--json"
    )
    assert code == 0
    assert json.loads(out)["next"] == f"kubectl apply -k {tmp_path}/train-job/overlays/nfs"


@pytest.mark.parametrize("target", ["stack", "train-job", "pipeline", "serve", "ray", "spark"])
def test_the_next_step_names_a_folder_that_kustomize_can_build(
    recmill: Run, tmp_path: Path, target: str
) -> None:
    code, out, _ = recmill("deploy", "quickstart", "--target", target, "--into", tmp_path, "--json")
    assert code == 0
    apply, _, run = json.loads(out)["next"].partition(" && ")
    assert (run == f"kubectl create -f {tmp_path}/stack/run.yaml") == (target == "stack")
    folder = apply.removeprefix("kubectl apply -k ")
    assert (Path(folder) / "kustomization.yaml").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["quickstar", "--target", "train-job"], 'no such recipe file or shipped recipe; did you mean "quickstart"?'),
        (["quickstart", "--target", "train"], '--target: there is no target "train"; did you mean "train-job"?'),
        ([*TRAIN_JOB, "--set", "serve.replicas=-2"], "serve.replicas must be a positive integer, got -2"),
        ([*TRAIN_JOB, "--set", "name=Shop"], "name must be lower-case letters"),
        ([*TRAIN_JOB, "--set", "storage.class_name="], "storage.class_name must be the name"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_before_anything_is_written(
    recmill: Run, tmp_path: Path, arguments: list[str], message: str
) -> None:
    code, _, errors = recmill("deploy", *arguments, "--into", tmp_path / "out")
    assert code == 2
    assert message in errors
    assert not (tmp_path / "out").exists()


def test_a_file_changed_by_hand_is_told_and_overwritten_with_force(recmill: Run, tmp_path: Path) -> None:
    command = ["deploy", "quickstart", "--target", "train-job", "--into", tmp_path]
    recmill(*command)
    job = tmp_path / "train-job/base/job.yaml"
    job.write_text("mine")
    code, _, errors = recmill(*command)
    assert (code, job.read_text()) == (2, "mine")
    assert "base/job.yaml was changed by hand" in errors
    assert recmill(*command, "--force")[0] == 0
    assert job.read_text() != "mine"


def test_size_shows_its_arithmetic_and_what_each_stage_is_given(recmill: Run) -> None:
    code, out, _ = recmill(
        "size", "quickstart", "--rows", 1_000_000, "--items", 1000, "--users", 5000, "--rate", 300
    )
    assert code == 0
    assert "log                    1,000,000 rows x 47 B" in out
    assert "1,000 items x " in out
    assert "servers                300 requests/s / (2 cores x " in out
    assert [line.split()[0] for line in out.splitlines()[-5:]] == [
        "prepare",
        "train",
        "export",
        "serve",
        "disk",
    ]


def test_size_is_there_for_machines(recmill: Run) -> None:
    code, out, _ = recmill("size", "criteo-dlrm", "--rows", 1000, "--json")
    assert code == 0
    found = json.loads(out)
    assert found["train"]["cpus"] == 2
    assert found["arithmetic"][0]["what"] == "log"
