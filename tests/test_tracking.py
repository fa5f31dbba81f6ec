"""Trackers write what they are told, once, whatever moment the run was killed at."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from recmill.errors import RecmillError
from recmill.reporting.tracking import (
    TRACKERS,
    JsonLines,
    MLflow,
    MLPerfLines,
    TensorBoard,
    open_trackers,
    read_history,
)


def records_of(path: Path, prefix: str = "") -> list[dict]:
    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    lines = path.read_text().splitlines()
    assert all(line.startswith(prefix) for line in lines)
    return [json.loads(line.removeprefix(prefix), parse_constant=refuse) for line in lines]


def without_time(records: list[dict]) -> list[dict]:
    return [{key: value for key, value in record.items() if key != "time_ms"} for record in records]


def mllog_of(path: Path) -> list[tuple]:
    return [(line["event_type"], line["key"], line["value"]) for line in records_of(path, ":::MLLOG ")]


def test_json_lines_hold_one_object_for_each_call(tmp_path):
    tracker = JsonLines(tmp_path)
    tracker.begin({"batch_size": 2048, "table": Path("runs/a")})
    tracker.log(10, {"loss": 0.5, "auc": np.float32(0.75)})
    tracker.event("checkpoint", "full", {"bytes": np.int64(12)})
    tracker.end("success")
    assert without_time(records_of(tmp_path / "history.jsonl")) == [
        {"begin": {"batch_size": 2048, "table": "runs/a"}},
        {"step": 10, "loss": 0.5, "auc": 0.75},
        {"event": "checkpoint", "step": 10, "value": "full", "metadata": {"bytes": 12}},
        {"end": "success"},
    ]


def test_lines_are_in_the_file_as_soon_as_they_are_logged(tmp_path):
    tracker = JsonLines(tmp_path)
    tracker.log(1, {"loss": 0.5})
    assert [line["step"] for line in read_history(tmp_path / "history.jsonl")] == [1]
    tracker.end("success")


@pytest.mark.parametrize("name", ["jsonl", "mllog"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, np.float32("nan"), np.float64("inf")])
def test_values_that_are_no_numbers_become_null(tmp_path, name, value):
    tracker = TRACKERS[name](tmp_path, None)
    tracker.begin({"decay": value})
    tracker.log(1, {"auc": value})
    tracker.event("eval_accuracy", value, {"list": [value, np.array([value])]})
    tracker.end("failed")
    (file,) = tmp_path.iterdir()
    text = file.read_text()
    assert "NaN" not in text
    assert "Infinity" not in text
    assert records_of(file, ":::MLLOG " if name == "mllog" else "")


def test_a_resumed_run_forgets_the_steps_after_it(tmp_path):
    first = JsonLines(tmp_path)
    first.begin({})
    for step in (100, 200, 300):
        first.log(step, {"loss": step / 1000})
        first.event("checkpoint", step)
    second = JsonLines(tmp_path, resume_from=200)
    second.begin({})
    second.log(300, {"loss": 0.25})
    second.end("success")
    assert [(line["step"], line["loss"]) for line in read_history(tmp_path / "history.jsonl")] == [
        (100, 0.1),
        (200, 0.2),
        (300, 0.25),
    ]
    records = records_of(tmp_path / "history.jsonl")
    assert [record["value"] for record in records if "event" in record] == [100, 200]
    assert [record.get("resumed_from") for record in records if "begin" in record] == [None, 200]


@pytest.mark.parametrize("name", ["jsonl", "mllog"])
def test_a_resumed_run_forgets_an_evaluation_that_never_ended(tmp_path, name):
    tracker = TRACKERS[name](tmp_path, None)
    tracker.begin({})
    tracker.log(50, {"loss": 0.5})
    tracker.event("eval_start", step=60)
    (file,) = tmp_path.iterdir()
    assert "eval_start" in file.read_text()
    TRACKERS[name](tmp_path, 55).end("aborted")
    assert "eval_start" not in file.read_text()
    assert "0.5" in file.read_text()


def test_a_new_run_begins_an_empty_file(tmp_path):
    JsonLines(tmp_path).log(1, {"loss": 0.5})
    JsonLines(tmp_path).log(1, {"loss": 0.25})
    assert [line["loss"] for line in read_history(tmp_path / "history.jsonl")] == [0.25]


def test_a_run_that_never_begins_leaves_the_old_one_alone(tmp_path):
    JsonLines(tmp_path).log(1, {"loss": 0.5})
    with pytest.raises(RecmillError):
        open_trackers(["mllog", "wandb"], tmp_path)
    JsonLines(tmp_path)
    assert [line["loss"] for line in read_history(tmp_path / "history.jsonl")] == [0.5]


@pytest.mark.parametrize("torn", [b'{"step": 20, "lo', b'{"step": 20}', b"\x00\x00\x00", b"\xff\n", b"[1]\n"])
def test_a_torn_last_line_is_cut(tmp_path, torn):
    file = tmp_path / "history.jsonl"
    file.write_bytes(b'{"step": 10, "loss": 0.5}\n' + torn)
    assert read_history(file) == [{"step": 10, "loss": 0.5}]
    tracker = JsonLines(tmp_path, resume_from=25)
    tracker.log(30, {"loss": 0.25})
    tracker.end("success")
    assert [line["step"] for line in read_history(file)] == [10, 30]
    assert len(records_of(file)) == 3


def test_a_killed_run_leaves_whole_lines(tmp_path):
    code = f"""
from pathlib import Path
from recmill.reporting.tracking import open_trackers
tracker = open_trackers(["mllog"], Path({str(tmp_path)!r}))
tracker.begin({{}})
for step in range(1, 10**9):
    tracker.log(step, {{"loss": 1 / step}})
    if step == 100:
        print(flush=True)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as run:
        run.stdout.readline()
        os.kill(run.pid, signal.SIGKILL)
    with open_trackers(["mllog"], tmp_path, resume_from=50) as tracker:
        tracker.log(51, {"loss": 0.0})
    steps = [line["step"] for line in read_history(tmp_path / "history.jsonl")]
    assert steps == list(range(1, 52))
    logged = records_of(tmp_path / "mllog.txt", ":::MLLOG ")
    assert [line["metadata"]["step"] for line in logged if line["key"] == "tracked_stats"] == steps


def test_mllog_uses_the_names_of_mlperf(tmp_path):
    tracker = MLPerfLines(tmp_path)
    tracker.event("cache_clear", True)
    tracker.begin({"seed": 7, "batch_size": 2048, "learning_rate": 0.1, "train_rows": 900, "eval_rows": 100})
    tracker.event("init_stop")
    tracker.event("run_start")
    tracker.event("eval_start")
    tracker.log(40, {"auc": 0.75, "loss": 0.5})
    tracker.event("eval_stop")
    tracker.end("success")
    assert mllog_of(tmp_path / "mllog.txt") == [
        ("POINT_IN_TIME", "cache_clear", True),
        ("INTERVAL_START", "init_start", None),
        ("POINT_IN_TIME", "seed", 7),
        ("POINT_IN_TIME", "global_batch_size", 2048),
        ("POINT_IN_TIME", "opt_base_learning_rate", 0.1),
        ("POINT_IN_TIME", "train_samples", 900),
        ("POINT_IN_TIME", "eval_samples", 100),
        ("INTERVAL_END", "init_stop", None),
        ("INTERVAL_START", "run_start", None),
        ("INTERVAL_START", "eval_start", None),
        ("POINT_IN_TIME", "tracked_stats", {"auc": 0.75, "loss": 0.5}),
        ("POINT_IN_TIME", "eval_accuracy", 0.75),
        ("INTERVAL_END", "eval_stop", None),
        ("INTERVAL_END", "run_stop", None),
    ]


def test_mllog_lines_say_when_and_where(tmp_path):
    tracker = MLPerfLines(tmp_path)
    tracker.begin({"steps_per_epoch": 80})
    tracker.log(40, {"auc": 0.75})
    tracker.end("aborted")
    accuracy, stop = records_of(tmp_path / "mllog.txt", ":::MLLOG ")[-2:]
    assert list(accuracy) == ["namespace", "time_ms", "event_type", "key", "value", "metadata"]
    assert accuracy["metadata"].pop("lineno") > 0
    assert accuracy["metadata"] == {"file": "test_tracking.py", "step": 40, "epoch_num": 0.5}
    assert stop["metadata"]["status"] == "aborted"


@pytest.mark.parametrize(
    ("error", "status"), [(None, "success"), (ValueError, "failed"), (KeyboardInterrupt, "aborted")]
)
def test_leaving_the_context_says_how_the_run_ended(tmp_path, error, status):
    def run():
        with open_trackers(["mllog"], tmp_path / "run") as tracker:
            tracker.begin({})
            if error:
                raise error

    if error:
        with pytest.raises(error):
            run()
    else:
        run()
    assert records_of(tmp_path / "run" / "history.jsonl")[-1]["end"] == status
    assert mllog_of(tmp_path / "run" / "mllog.txt")[-1][1] == "run_stop"


def test_json_lines_are_always_written_and_only_once(tmp_path):
    assert [type(one) for one in open_trackers([], tmp_path).trackers] == [JsonLines]
    assert [type(one) for one in open_trackers(["mllog", "jsonl", "mllog"], tmp_path).trackers] == [
        JsonLines,
        MLPerfLines,
    ]


def test_an_unknown_tracker_is_told_which_there_are(tmp_path):
    with pytest.raises(
        RecmillError, match='"wandb" is unknown; there are: jsonl, tensorboard, mllog, mlflow'
    ):
        open_trackers(["wandb"], tmp_path)


@pytest.mark.processes
@pytest.mark.parametrize("name", ["tensorboard", "mlflow"])
def test_a_missing_package_is_answered_with_the_install_line(tmp_path, name):
    code = f"""
import sys
sys.modules[{name!r}] = None  # as if it were not installed
from pathlib import Path
from recmill.errors import MissingPackage
from recmill.reporting.tracking import open_trackers
try:
    open_trackers([{name!r}], Path({str(tmp_path)!r}))
except MissingPackage as error:
    print(error)
"""
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout == f'Tracker "{name}" needs {name}. Install it: pip install "recmill[{name}]"\n'


def scalars_of(directory: Path, tag: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory / "tensorboard")).Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def test_tensorboard_reads_back_what_was_logged(tmp_path):
    pytest.importorskip("tensorboard")
    tracker = TensorBoard(tmp_path)
    tracker.begin({"batch_size": 2048})
    tracker.log(10, {"loss": 0.5, "recall@10": 0.25})
    tracker.event("checkpoint", "full")
    tracker.log(20, {"loss": 0.25})
    tracker.end("success")
    assert scalars_of(tmp_path, "loss") == [(10, 0.5), (20, 0.25)]
    assert scalars_of(tmp_path, "recall@10") == [(10, 0.25)]


def test_tensorboard_forgets_the_steps_after_a_resume(tmp_path):
    pytest.importorskip("tensorboard")
    first = TensorBoard(tmp_path)
    for step in (10, 20, 30):
        first.log(step, {"loss": step / 64})
    first.end("aborted")
    second = TensorBoard(tmp_path, resume_from=10)
    second.log(20, {"loss": 0.5})
    second.end("success")
    assert scalars_of(tmp_path, "loss") == [(10, 10 / 64), (20, 0.5)]
    TensorBoard(tmp_path).end("success")
    assert len(list((tmp_path / "tensorboard").iterdir())) == 1


def test_mlflow_keeps_one_run_and_no_step_twice(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    pytest.importorskip("mlflow")
    first = MLflow(tmp_path)
    first.begin({"batch_size": 2048})
    for step in (10, 20):
        first.log(step, {"recall@10": step / 64})
    second = MLflow(tmp_path, resume_from=10)
    second.begin({"batch_size": 2048})
    second.event("checkpoint", "full")
    for step in (20, 30):
        second.log(step, {"recall@10": step / 64})
    second.end("success")
    history = second.client.get_metric_history(second.run_id, "recall_10")
    assert second.run_id == first.run_id
    assert [(metric.step, metric.value) for metric in history] == [
        (10, 10 / 64),
        (20, 20 / 64),
        (30, 30 / 64),
    ]
    run = second.client.get_run(second.run_id)
    assert run.info.status == "FINISHED"
    assert run.data.tags["batch_size"] == "2048"
    assert run.data.tags["event.checkpoint"] == '{"value": "full"}'
    assert MLflow(tmp_path).run_id != first.run_id
