"""launch: training on Ray. Ray Train starts, watches and restarts the workers; each worker runs `train`.

The state of a run is in its folder of checkpoints and nowhere else: restarted workers, fewer or more than before,
continue from the last checkpoint in it. Every checkpoint is reported to Ray as a path, without a copy.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.torch
from ray.util.metrics import Gauge
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from recmill.artifacts.lock import lock_folder
from recmill.artifacts.manifest import write_whole
from recmill.distributed.data_tasks import DataWorkers, node_affinity_resource
from recmill.distributed.status import SECONDS_BETWEEN_NEWS, StatusActor, StatusBars, StatusDisplay
from recmill.distributed.workers import WorkerLost, from_environment
from recmill.engines.ray_connection import connected
from recmill.errors import (
    RecmillError,
    ResourceError,
    TrainingError,
    first_line,
    is_out_of_memory,
)
from recmill.recipe import recipe as r
from recmill.reporting.machine import available_cores
from recmill.reporting.progress import Progress as Bars
from recmill.stages.train.config import RayTrainConfig, TrainConfig
from recmill.stages.train.feed import FedData
from recmill.stages.train.source import TrainingData
from recmill.stages.train.train import (
    ALONE,
    OnStep,
    TrainContext,
    TrainResult,
    open_folder,
    resolved,
    train_locked,
)
from recmill.stages.train.trainer import Metrics, TrainProgress

# takes the function that prints notes; runs on every node
MakeSource = Callable[[Callable[[str], None]], TrainingData]

_train: Any = ray.train  # Ray's types describe the version of Ray Train before this one
_SNAPSHOT = "checkpoint_manager_snapshot.json"  # Ray Train's list of a run's checkpoints
_STARTS_WITHOUT_ROOM = 5  # attempts, a minute each, in which Ray Train waits for CPUs before a run fails
_SECONDS_FOR_THE_REASON = 2.0  # for a worker that ended without a reported reason
_COLLECTIVE_SECONDS = 600


def launch(
    recipe: r.Recipe,
    make_source: MakeSource,
    into: Path,
    options: TrainConfig,
    scale: RayTrainConfig,
    bars: Bars | None = None,
    note: Callable[[str], None] = lambda line: None,
    context: TrainContext = ALONE,
) -> list[TrainResult]:
    """Train on Ray what `train` would train here. Log, Table and `into` must have the same path on all nodes.

    The death of a worker or a node costs the steps since the last checkpoint; more than `max_failures` of them end
    the run. Our own errors (an invalid recipe, a loss that is not finite) end it at once.
    """
    into = into.resolve()
    with lock_folder(into):
        source = make_source(note)
        recipe = resolved(recipe, source)
        open_folder(recipe, source, into, options)  # errors are reported before anything starts
        return _launch(recipe, make_source, into, options, scale, bars, note, context)


def _launch(
    recipe: r.Recipe,
    make_source: MakeSource,
    into: Path,
    options: TrainConfig,
    scale: RayTrainConfig,
    bars: Bars | None,
    note: Callable[[str], None],
    context: TrainContext,
) -> list[TrainResult]:
    with connected(scale.address, max(available_cores(), scale.num_cpus)):
        _check_room(scale, note)
        status_actor = _on_this_node(StatusActor)
        resuming = replace(options, resume=True)  # restarted workers continue where others stopped
        job = _WorkerJob(recipe, make_source, into, resuming, scale, status_actor, context.on_step)
        return _RunThread(lambda: _fit(job)).follow(
            status_actor, bars or Bars(quiet=True), note, context.warn
        )


def _silent(message: str) -> None:
    pass


# the cluster


def _resources() -> dict[str, float]:
    """The total resources of the cluster's nodes."""
    return dict(ray.cluster_resources())  # type: ignore[no-untyped-call]


def _check_room(scale: RayTrainConfig, note: Callable[[str], None]) -> None:
    resources = _resources()
    if resources.get("CPU", 0) < scale.num_cpus:
        note(
            f"the cluster has {resources.get('CPU', 0):g} CPUs, the run asks for {scale.num_cpus}: "
            "it waits for nodes, or goes on with fewer data workers"
        )
    for resource in (scale.worker_resource, scale.data_resource):
        if resource and resource not in resources:
            note(f"no node has the resource {resource} yet: the run waits for one")


def _not_where_data_is_read(scale: RayTrainConfig) -> dict[str, str] | None:
    """Exclude nodes reserved for data workers from training, as long as there are others."""
    resource = scale.data_resource
    if resource is None or scale.worker_resource is not None:
        return None
    nodes = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    kept = [node["NodeID"] for node in nodes if resource in node["Resources"]]
    return {"ray.io/node-id": f"!in({', '.join(kept)})"} if kept and len(kept) < len(nodes) else None


def _on_this_node(actor: Any) -> Any:
    """An actor that lives as long as the driver's node."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return ray.remote(actor).options(num_cpus=0, scheduling_strategy=here, max_concurrency=8).remote()


# the driver


@dataclass(frozen=True)
class _WorkerJob:
    """Everything that a worker needs."""

    recipe: r.Recipe
    make_source: MakeSource
    into: Path
    options: TrainConfig
    scale: RayTrainConfig
    status_actor: Any
    on_step: OnStep | None


def _fit(job: _WorkerJob) -> list[TrainResult]:
    scale, into = job.scale, job.into
    _forget_missing(into)
    # A report waits until Ray has polled the one before; Ray's default is a poll every two seconds.
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.5")
    least, most = scale.workers
    trainer = _train.torch.TorchTrainer(
        _work,
        train_loop_config={"job": job},
        torch_config=_train.torch.TorchConfig(backend="gloo", timeout_s=_COLLECTIVE_SECONDS),
        scaling_config=_train.ScalingConfig(
            num_workers=(least, most) if least < most else least,
            resources_per_worker={
                "CPU": scale.cpus_per_worker,
                **node_affinity_resource(scale.worker_resource),
            },
            label_selector=_not_where_data_is_read(scale),
        ),
        run_config=_train.RunConfig(
            name=into.name,
            storage_path=str(into.parent),
            failure_config=_train.FailureConfig(
                max_failures=scale.max_failures, controller_failure_limit=_STARTS_WITHOUT_ROOM
            ),
            checkpoint_config=_train.CheckpointConfig(),  # we prune checkpoints, by the recipe
            worker_runtime_env={
                "env_vars": {"OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE")}
            },
            logging_config=_train.LoggingConfig(log_level="ERROR"),
        ),
    )
    try:
        return list(trainer.fit().return_value)
    except _train.WorkerGroupError as error:
        raise _too_many_failures(error, job) from None
    except _train.ControllerError as error:
        raise _no_room(error, job) from None
    finally:
        _forget_missing(into)


def _too_many_failures(error: Any, job: _WorkerJob) -> TrainingError:
    reasons = {str(failure).strip().splitlines()[-1] for failure in error.worker_failures.values()}
    return TrainingError(
        f"Workers were lost more often than --max-failures {job.scale.max_failures} allows; the last time: "
        f"{'; '.join(sorted(reasons))}. Checkpoints in {job.into} are whole: find the cause, then go on with --resume."
    )


def _no_room(error: Any, job: _WorkerJob) -> RecmillError:
    scale, num_cpus = job.scale, _resources().get("CPU", 0)
    if "WorkerGroupStartup" not in type(error.controller_failure).__name__:
        return TrainingError(f"Ray Train gave up: {error.controller_failure}")
    return ResourceError(
        f"The cluster has {num_cpus:g} CPUs, too few for {scale.workers[0]} workers of {scale.cpus_per_worker} CPUs, "
        f"and no more came. Add nodes, or allow fewer workers, such as --workers 1..{scale.workers[1]}; "
        "then go on with --resume."
    )


def _forget_missing(into: Path) -> None:
    """Remove pruned or rewritten checkpoints from Ray's list: it rejects a list with missing ones."""
    path = into / _SNAPSHOT
    try:
        snapshot = json.loads(path.read_text())
        exists = [
            (into / result["checkpoint_dir_name"]).is_dir() for result in snapshot["checkpoint_results"]
        ]
        for name in ("checkpoint_results", "checkpoint_report_indices"):
            snapshot[name] = [
                entry for entry, is_there in zip(snapshot[name], exists, strict=True) if is_there
            ]
    except (OSError, ValueError, KeyError, TypeError):  # Ray's list is dispensable: a damaged one is deleted
        snapshot = {}
    if snapshot.get("ray_version") != ray.__version__ or not snapshot["checkpoint_results"]:
        path.unlink(missing_ok=True)
        return
    snapshot["latest_checkpoint_result"] = snapshot["checkpoint_results"][-1]
    write_whole(path, json.dumps(snapshot))


class _RunThread:
    """A run on a thread of its own, so that the main thread shows its progress and receives Ctrl-C."""

    def __init__(self, fit: Callable[[], list[TrainResult]]) -> None:
        self._fit = fit
        self._results: list[TrainResult] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="ray-train", daemon=True)

    def _work(self) -> None:
        try:
            self._results = self._fit()
        except BaseException as error:  # raised by `follow`, on the waiting thread
            self._error = error

    def follow(
        self, status_actor: Any, bars: Bars, note: Callable[[str], None], warn: Callable[[str], None]
    ) -> list[TrainResult]:
        self._thread.start()
        with StatusDisplay(bars, note, warn) as shown:
            while self._thread.is_alive():
                self._thread.join(2 * SECONDS_BETWEEN_NEWS)
                shown.show(ray.get(status_actor.news.remote()))
        failure = ray.get(status_actor.failure.remote())
        if failure is not None:
            raise failure
        if self._error is not None:
            raise self._error
        return self._results


# on a worker


def _work(config: Mapping[str, Any]) -> list[TrainResult]:
    """The function that Ray Train runs in every worker.

    Our errors go to the status actor; Ray sees a worker that ended.
    """
    job: _WorkerJob = config["job"]
    workers = from_environment()
    try:
        if ray.get(job.status_actor.failure.remote()) is not None:
            return []
        if workers.is_first:
            job.status_actor.began.remote(workers.size)
        source = job.make_source(_remote_call(job.status_actor.note) if workers.is_first else _silent)
        if job.scale.data_workers is not None:
            data_workers = DataWorkers(job.scale.data_workers, job.scale.data_resource)
            source = FedData(source, workers, data_workers)
        options = replace(job.options, threads=job.options.threads or job.scale.cpus_per_worker)
        context = TrainContext(
            workers,
            on_report=_report_to_ray,
            on_step=_both(Gauges(job.into.name).show, job.on_step),
            warn=_remote_call(job.status_actor.warn),
        )
        bars = StatusBars(job.status_actor)
        return train_locked(job.recipe, source, job.into, options, bars, context=context)
    except WorkerLost:
        if _reason(job.status_actor) is None:
            raise
        return []
    except RecmillError as error:
        ray.get(job.status_actor.fail.remote(_picklable(error)))
        return []
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        ray.get(job.status_actor.fail.remote(_lack_of_memory(workers.rank, error)))
        return []
    finally:
        workers.close()


def _lack_of_memory(rank: int, error: Exception) -> ResourceError:
    """A restart would not help."""
    return ResourceError(
        f"Worker {rank} ran out of memory: {first_line(error)}. Use a smaller batch "
        "(--set ranking.train.batch_size=256), more --workers, or --table-memory; then go on with --resume."
    )


def _both(first: OnStep, second: OnStep | None) -> OnStep:
    """Call both, where the second is optional."""

    def after_step(model: str, progress: TrainProgress) -> None:
        first(model, progress)
        if second is not None:
            second(model, progress)

    return after_step


def _remote_call(method: Any) -> Callable[[str], None]:
    return lambda line: method.remote(line) and None


def _reason(status_actor: Any) -> RecmillError | None:
    """Why another worker failed, when it was one of our errors; None when it was killed."""
    end = time.monotonic() + _SECONDS_FOR_THE_REASON
    while (reason := ray.get(status_actor.failure.remote())) is None and time.monotonic() < end:
        time.sleep(SECONDS_BETWEEN_NEWS)
    return reason  # type: ignore[no-any-return]


def _picklable(error: RecmillError) -> RecmillError:
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except (TypeError, pickle.PicklingError):
        return RecmillError(str(error))


def _report_to_ray(metrics: Metrics, path: Path | None) -> None:
    """Report to Ray on every rank; the first one adds the checkpoint, which is in Ray's storage already."""
    is_first = _train.get_context().get_world_rank() == 0
    checkpoint = _train.Checkpoint(str(path)) if path is not None and is_first else None
    _train.report(dict(metrics), checkpoint, checkpoint_upload_mode=_train.CheckpointUploadMode.NO_UPLOAD)


class Gauges:
    """The run's numbers in Ray's metrics, which every node exposes to Prometheus: ray_recmill_train_<name>."""

    def __init__(self, run: str) -> None:
        self.run = run
        self._gauges: dict[str, Gauge] = {}

    def show(self, model: str, progress: TrainProgress) -> None:
        numbers = {
            "step": progress.step,
            "samples": progress.samples,
            "loss": progress.loss,
            "samples_per_second": progress.samples_per_second,
            "data_wait": progress.data_wait,
            **progress.metrics,
        }
        for name, value in numbers.items():
            self._gauge(name).set(float(value), {"run": self.run, "model": model})

    def _gauge(self, name: str) -> Gauge:
        if name not in self._gauges:
            plain = "recmill_train_" + re.sub(r"\W", "_", name.replace("@", "_at_"))
            self._gauges[name] = Gauge(plain, f"{name} of a training run", ("run", "model"))
        return self._gauges[name]
