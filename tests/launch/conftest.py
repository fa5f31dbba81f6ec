"""A Ray cluster of two nodes on this machine; only the second has the resource `data`."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from ray_folder import own_ray_folder

# One thread for each slice of a batch; torch itself stays single-threaded.
torch.set_num_threads(1)
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

STORE_BYTES = 200 << 20


@pytest.fixture(scope="package")
def cluster() -> Iterator[object]:
    import ray
    from ray.cluster_utils import Cluster

    ray.shutdown()  # a connection that other tests left
    with own_ray_folder(), pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)
        cluster = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": 3,
                "object_store_memory": STORE_BYTES,
                "_system_config": {"metrics_report_interval_ms": 1000},
            },
        )
        cluster.add_node(num_cpus=2, object_store_memory=STORE_BYTES, resources={"data": 1})
        ray.init(cluster.address, log_to_driver=False, logging_level="error")
        cluster.wait_for_nodes()
        yield cluster
        ray.shutdown()
        cluster.shutdown()
