"""Trackers of a run's numbers: JSON lines always, TensorBoard, MLPerf-style lines and MLflow on request."""

from __future__ import annotations

import importlib
import json
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol

from recmill.errors import MissingPackage, RecmillError

# success: the run finished; aborted: it was stopped; failed: it raised an error.
Status = Literal["success", "aborted", "failed"]

JSONL_FILE = "history.jsonl"
MLLOG_FILE = "mllog.txt"
TENSORBOARD_DIRECTORY = "tensorboard"
MLFLOW_DIRECTORY = "mlruns"
MLFLOW_RUN_FILE = "mlflow_run.txt"

# Facts that have a name of their own in MLPerf.
MLLOG_NAMES: Mapping[str, str] = {
    "batch_size": "global_batch_size",
    "learning_rate": "opt_base_learning_rate",
    "optimizer": "opt_name",
    "embedding_learning_rate": "opt_sparse_base_learning_rate",
    "embedding_optimizer": "opt_sparse_name",
    "warmup_steps": "opt_learning_rate_warmup_steps",
    "decay_start_step": "opt_learning_rate_decay_start_step",
    "decay_steps": "opt_learning_rate_decay_steps",
    "train_rows": "train_samples",
    "eval_rows": "eval_samples",
    "model": "submission_benchmark",
}
_MLPREFIX = ":::MLLOG "
_MLFLOW_STATUS: Mapping[Status, str] = {"success": "FINISHED", "aborted": "KILLED", "failed": "FAILED"}


class Tracker(Protocol):
    """The interface of trackers for one run: `begin` first, `end` last; steps only grow."""

    def begin(self, facts: Mapping[str, Any]) -> None:
        """Facts about the whole run: batch size, seed, rows, learning rate and the like."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers at a step; at most one call per step."""

    def event(
        self,
        key: str,
        value: Any = None,
        metadata: Mapping[str, Any] | None = None,
        step: int | None = None,
    ) -> None:
        """An event at a step, or at the last step that was given.

        Names that end in _start and _stop mark an interval.
        """

    def end(self, status: Status) -> None:
        """The end of the run; everything must be written."""


class Trackers:
    """Several trackers as one; as a context, it reports how the run ended."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self.trackers = tuple(trackers)

    def begin(self, facts: Mapping[str, Any]) -> None:
        for tracker in self.trackers:
            tracker.begin(facts)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for tracker in self.trackers:
            tracker.log(step, values)

    def event(
        self,
        key: str,
        value: Any = None,
        metadata: Mapping[str, Any] | None = None,
        step: int | None = None,
    ) -> None:
        for tracker in self.trackers:
            tracker.event(key, value, metadata, step)

    def end(self, status: Status) -> None:
        for tracker in self.trackers:
            tracker.end(status)

    def __enter__(self) -> Trackers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.end("success")
        else:
            self.end("failed" if issubclass(kind, Exception) else "aborted")


def open_trackers(names: Iterable[str], directory: Path, resume_from: int | None = None) -> Trackers:
    """JSON lines and the named trackers, writing below a directory.

    A run that resumes from a step drops what was written about later ones; a new run (None) drops everything.
    """
    chosen = dict.fromkeys(["jsonl", *names])
    unknown = [name for name in chosen if name not in TRACKERS]
    if unknown:
        raise RecmillError(f'Tracker "{unknown[0]}" is unknown; there are: {", ".join(TRACKERS)}.')
    directory.mkdir(parents=True, exist_ok=True)
    return Trackers([TRACKERS[name](directory, resume_from) for name in chosen])


class JsonLines:
    """One JSON object per line; each line is in the file once the call returns."""

    def __init__(self, directory: Path, resume_from: int | None = None) -> None:
        self.lines = _JsonLines(directory / JSONL_FILE, "", _step_of_record, resume_from)
        self.step = self.resumed_from = resume_from

    def begin(self, facts: Mapping[str, Any]) -> None:
        resumed = {} if self.resumed_from is None else {"resumed_from": self.resumed_from}
        self.lines.add({"begin": dict(facts), "time_ms": _now_ms(), **resumed})

    def log(self, step: int, values: Mapping[str, float]) -> None:
        assert not {"step", "time_ms", "event"} & set(values), "these names are the tracker's own"
        self.step = step
        self.lines.add({"step": step, "time_ms": _now_ms(), **values})

    def event(
        self,
        key: str,
        value: Any = None,
        metadata: Mapping[str, Any] | None = None,
        step: int | None = None,
    ) -> None:
        self.step = self.step if step is None else step
        happened = {"event": key, "step": self.step or 0, "time_ms": _now_ms(), "value": value}
        self.lines.add({**happened, "metadata": dict(metadata or {})})

    def end(self, status: Status) -> None:
        self.lines.add({"end": status, "time_ms": _now_ms()})


class MLPerfLines:
    """Lines in the format of MLPerf's loggers: `:::MLLOG` and a JSON object."""

    def __init__(self, directory: Path, resume_from: int | None = None) -> None:
        self.lines = _JsonLines(directory / MLLOG_FILE, _MLPREFIX, _step_of_mllog, resume_from)
        self.step = resume_from or 0
        self.steps_per_epoch: float | None = None

    def begin(self, facts: Mapping[str, Any]) -> None:
        self.steps_per_epoch = facts.get("steps_per_epoch")
        self._add("init_start", None, {})
        for name, value in facts.items():
            self._add(MLLOG_NAMES.get(name, name), value, {})

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.step = step
        self._add("tracked_stats", dict(values), {})
        if "auc" in values:  # MLPerf's recommendation benchmark calls it accuracy
            self._add("eval_accuracy", values["auc"], {})

    def event(
        self,
        key: str,
        value: Any = None,
        metadata: Mapping[str, Any] | None = None,
        step: int | None = None,
    ) -> None:
        self.step = self.step if step is None else step
        self._add(key, value, metadata or {})

    def end(self, status: Status) -> None:
        self._add("run_stop", None, {"status": "success" if status == "success" else "aborted"})

    def _add(self, key: str, value: Any, metadata: Mapping[str, Any]) -> None:
        epoch = {"epoch_num": self.step / self.steps_per_epoch} if self.steps_per_epoch else {}
        self.lines.add(
            {
                "namespace": "",
                "time_ms": _now_ms(),
                "event_type": _event_type(key),
                "key": key,
                "value": value,
                "metadata": {**_caller(), "step": self.step, **epoch, **metadata},
            }
        )


class TensorBoard:
    """Event files for `tensorboard --logdir`; facts and events are its texts."""

    def __init__(self, directory: Path, resume_from: int | None = None) -> None:
        try:
            package = importlib.import_module("torch.utils.tensorboard")
        except ImportError:
            raise MissingPackage('Tracker "tensorboard"', "tensorboard", "tensorboard") from None
        folder = directory / TENSORBOARD_DIRECTORY
        if resume_from is None:
            _remove_events(folder)
        purge_step = None if resume_from is None else resume_from + 1
        self.writer: Any = package.SummaryWriter(str(folder), purge_step=purge_step, flush_secs=10)
        self.step = resume_from or 0

    def begin(self, facts: Mapping[str, Any]) -> None:
        for name, value in facts.items():
            self.writer.add_text(f"facts/{name}", str(value), self.step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.step = step
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def event(
        self,
        key: str,
        value: Any = None,
        metadata: Mapping[str, Any] | None = None,
        step: int | None = None,
    ) -> None:
        self.step = self.step if step is None else step
        self.writer.add_text(f"events/{key}", _json({"value": value, **(metadata or {})}), self.step)

    def end(self, status: Status) -> None:
        self.writer.add_text("events/end", status, self.step)
        self.writer.close()


class MLflow:
    """A run of the experiment "recmill", at MLFLOW_TRACKING_URI, or by default in files beside the run.

    MLflow cannot delete: a resumed run continues the old one and skips steps that are already there.
    """

    def __init__(self, directory: Path, resume_from: int | None = None) -> None:
        self.client = _mlflow_client(directory)
        self.run_file = directory / MLFLOW_RUN_FILE
        resumes = resume_from is not None and self.run_file.is_file()
        self.run_id = self.run_file.read_text().strip() if resumes else self._create_run()
        self.last_steps = self._last_steps()

    def begin(self, facts: Mapping[str, Any]) -> None:
        self.client.update_run(self.run_id, status="RUNNING")
        for name, value in facts.items():
            self.client.set_tag(self.run_id, _mlflow_name(name), str(value))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            if step > self.last_steps.get(_mlflow_name(name), -1):
                self.client.log_metric(self.run_id, _mlflow_name(name), float(value), step=step)

    def event(
        self,
        key: str,
        value: Any = None,
        metadata: Mapping[str, Any] | None = None,
        step: int | None = None,
    ) -> None:
        text = _json({"value": value, **(metadata or {})})
        self.client.set_tag(self.run_id, _mlflow_name(f"event.{key}"), text)

    def end(self, status: Status) -> None:
        self.client.set_terminated(self.run_id, _MLFLOW_STATUS[status])

    def _create_run(self) -> str:
        found = self.client.get_experiment_by_name("recmill")
        experiment = found.experiment_id if found else self.client.create_experiment("recmill")
        run_id = str(self.client.create_run(experiment, run_name=self.run_file.parent.name).info.run_id)
        self.run_file.write_text(run_id + "\n", encoding="utf-8")
        return run_id

    def _last_steps(self) -> dict[str, int]:
        names = self.client.get_run(self.run_id).data.metrics
        history = {name: self.client.get_metric_history(self.run_id, name) for name in names}
        return {name: max(metric.step for metric in metrics) for name, metrics in history.items()}


TRACKERS: Mapping[str, Callable[[Path, int | None], Tracker]] = {
    "jsonl": JsonLines,
    "tensorboard": TensorBoard,
    "mllog": MLPerfLines,
    "mlflow": MLflow,
}


def read_history(path: Path) -> list[dict[str, Any]]:
    """The numbers logged at each step, in order; events and a torn last line are left out."""
    lines = path.read_bytes().splitlines(keepends=True)
    records = [record for line in lines if (record := _whole_record(line, "")) is not None]
    return [record for record in records if "step" in record and "event" not in record]


class _JsonLines:
    """A file of JSON lines that grows by whole lines; first, what a resumed run does not keep is cut off."""

    def __init__(
        self, path: Path, prefix: str, step_of: Callable[[dict[str, Any]], int], resume_from: int | None
    ) -> None:
        self.path = path
        self.prefix = prefix
        self.step_of = step_of
        self.resume_from = resume_from
        self.is_cut = False

    def add(self, record: Mapping[str, Any]) -> None:
        if not self.is_cut:
            self._cut()
        # Unbuffered: a line is one system call, so a killed run loses at most the line it was writing.
        with open(self.path, "ab", buffering=0) as file:
            file.write(f"{self.prefix}{_json(record)}\n".encode())

    def _cut(self) -> None:
        self.is_cut = True
        if self.path.exists():
            last = self.resume_from
            kept = 0 if last is None else _bytes_until(self.path, self.prefix, self.step_of, last)
            os.truncate(self.path, kept)


def _bytes_until(path: Path, prefix: str, step_of: Callable[[dict[str, Any]], int], last_step: int) -> int:
    """The size of a file up to its last line before later steps."""
    kept = 0
    for line in path.read_bytes().splitlines(keepends=True):
        record = _whole_record(line, prefix)
        if record is None or step_of(record) > last_step:
            break
        kept += len(line)
    return kept


def _whole_record(line: bytes, prefix: str) -> dict[str, Any] | None:
    """The object of one line; None for an incomplete line."""
    with suppress(ValueError):
        record = json.loads(line.decode().removeprefix(prefix)) if line.endswith(b"\n") else None
        return record if isinstance(record, dict) else None
    return None


def _step_of_record(record: dict[str, Any]) -> int:
    return int(record.get("step", 0))


def _step_of_mllog(record: dict[str, Any]) -> int:
    return int(record["metadata"].get("step", 0))


def _json(value: Any) -> str:
    return json.dumps(plain(value), allow_nan=False)


def plain(value: Any) -> Any:
    """The value in JSON types: NaN and infinities become null, numbers of arrays plain ones, the rest text."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    number = getattr(value, "tolist", None)  # numpy and torch have it
    return plain(number()) if callable(number) else str(value)


def _event_type(key: str) -> str:
    if key.endswith("_start"):
        return "INTERVAL_START"
    return "INTERVAL_END" if key.endswith("_stop") else "POINT_IN_TIME"


def _caller() -> dict[str, Any]:
    """File and line of the caller of this module."""
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return {"file": Path(frame.f_code.co_filename).name, "lineno": frame.f_lineno}


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _remove_events(folder: Path) -> None:
    """Remove old event files: TensorBoard shows every one in a folder."""
    for file in folder.glob("events.out.tfevents.*"):
        file.unlink()


def _mlflow_name(name: str) -> str:
    """MLflow allows few special characters in a name: recall@10 becomes recall_10."""
    return re.sub(r"[^\w\-. :/]", "_", name)


def _mlflow_client(directory: Path) -> Any:
    # Read when mlflow is imported. Its file store is frozen and needs to be allowed; the others need a database.
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    try:
        package = importlib.import_module("mlflow")
    except ImportError:
        raise MissingPackage('Tracker "mlflow"', "mlflow", "mlflow") from None
    local = (directory / MLFLOW_DIRECTORY).absolute().as_uri()
    return package.MlflowClient(tracking_uri=os.environ.get("MLFLOW_TRACKING_URI") or local)
