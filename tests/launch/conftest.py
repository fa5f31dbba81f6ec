"""Two more nodes of Ray on this machine; only the second has the resource `data`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "engines"))

# One thread for each slice of a batch; torch itself stays single-threaded.
torch.set_num_threads(1)
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

STORE_BYTES = 150 << 20


@pytest.fixture(scope="package")
def cluster() -> Iterator[object]:
    from ray_cluster import shared_ray

    cluster = shared_ray()
    nodes = [
        cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES),
        cluster.add_node(num_cpus=2, object_store_memory=STORE_BYTES, resources={"data": 1}),
    ]
    cluster.wait_for_nodes()
    yield cluster
    for node in nodes:
        cluster.remove_node(node)
