"""Ray for tests: two raylets on this machine, which this process stays connected to until it ends."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import warnings
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import ray
from ray.cluster_utils import Cluster
from ray_folder import own_ray_folder

import recmill

PYTHONPATH = os.pathsep.join([str(Path(recmill.__file__).parents[1]), str(Path(__file__).parent)])
OBJECT_STORE_BYTES = 150 << 20
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_num_workers_soft_limit": "6",  # a process that ends is one that must be started again
    "RAY_idle_worker_killing_time_threshold_ms": "600000",
    "POLARS_MAX_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "PYTHONPATH": PYTHONPATH,
}


@cache
def shared_ray() -> Cluster:
    """The one Ray of this test process; it ends with the process."""
    os.environ.pop("RAY_ADDRESS", None)
    os.environ.update(ENVIRONMENT)
    until_exit = ExitStack()
    atexit.register(until_exit.close)
    until_exit.enter_context(own_ray_folder())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # Ray leaves a socket to the garbage collector
        cluster = _two_raylets()
        gc.collect()
    until_exit.callback(cluster.shutdown)
    until_exit.callback(ray.shutdown)
    return cluster


def _two_raylets() -> Cluster:
    node = {"num_cpus": 1, "object_store_memory": OBJECT_STORE_BYTES, "include_dashboard": False}
    soon = {"_system_config": {"metrics_report_interval_ms": 1000}}
    cluster = Cluster(initialize_head=True, connect=False, head_node_args={**node, **soon})
    cluster.add_node(**node)
    ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
    return cluster
