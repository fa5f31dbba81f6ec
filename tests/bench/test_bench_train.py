"""bench train: every contestant trains on the same batches, and none is left out of the result."""

from __future__ import annotations

import subprocess
import sys
import time
import venv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from recmill.dataset.loader import Batches
from recmill.dataset.table import Table
from recmill.errors import RecmillError
from recmill.stages.bench.config import TrainBenchConfig
from recmill.stages.bench.contest import CoreUse, measured_neighbours
from recmill.stages.bench.peers import Peer, find_peers
from recmill.stages.bench.race import MemoryBatch, Task, memory_batches, write_batches
from recmill.stages.bench.train import bench_train, describe, make_task, run_trainer, summarize

DLRM = Task(
    shape="dlrm",
    log="",
    folder="",
    batch_size=64,
    num_numbers=13,
    sizes=[10] * 26,
    embedding_dim=16,
    bottom=[512, 256, 64, 16],
    top=[512, 256],
    hidden=[],
    dense_rate=0.01,
    sparse_rate=0.1,
    wide_rate=0.1,
    threads=1,
    seconds=0.0,
    min_steps=3,
)
WIDE_DEEP = replace(DLRM, shape="wide_deep", embedding_dim=32, hidden=[1024, 512, 256])

pytestmark = pytest.mark.processes


def run_of(speed: float, loss: float) -> dict[str, object]:
    return {
        "samples_per_second": speed,
        "samples_per_cpu_second": speed,
        "loss": loss,
        "others": 0.25,
        "steal": 0.0,
        "versions": {},
    }


def test_useful_work_counts_each_product_three_times_but_numbers_need_no_gradient() -> None:
    bottom = 13 * 512 + 512 * 256 + 256 * 64 + 64 * 16
    top = 432 * 512 + 512 * 256 + 256
    assert DLRM.flops_per_sample() == 6 * (bottom + top) - 2 * 13 * 512 == 3_032_576
    deep = (13 + 26 * 32) * 1024 + 1024 * 512 + 512 * 256 + 256
    assert WIDE_DEEP.flops_per_sample() == 6 * deep - 2 * 13 * 1024 == 9_098_752


def test_useful_work_of_dot_and_cross_has_pairs_and_cross_layers() -> None:
    bottom = 13 * 512 + 512 * 256 + 256 * 64 + 64 * 16
    pairs = 27 * 26 // 2
    top = (16 + pairs) * 512 + 512 * 256 + 256
    dot = replace(DLRM, shape="dlrm_dot")
    assert dot.flops_per_sample() == 6 * (bottom + top + pairs * 16) - 2 * 13 * 512
    cross = replace(DLRM, shape="dlrm_cross", cross=(3, 64))
    assert cross.flops_per_sample() == DLRM.flops_per_sample() + 6 * 3 * 2 * 64 * 432


def test_a_shape_that_no_peer_trains_is_refused_beside_peers() -> None:
    with pytest.raises(RecmillError, match=r"No peer trains dlrm_dot\. Measure it without --peer"):
        bench_train("dlrm_dot", TrainBenchConfig(peer=("torch_embedding_bag",)))


def test_cores_that_other_programs_take_are_measured() -> None:
    uses: list[CoreUse] = []
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other:
        try:
            with measured_neighbours(uses):
                time.sleep(2)  # a child counts as ours only when it was waited for
        finally:
            other.kill()
    assert uses[0].others > 0.1
    assert uses[0].steal >= 0


@pytest.mark.parametrize("shape", ["dlrm", "wide_deep"])
def test_peers_train_on_the_batches_that_we_read(shape: str, tmp_path: Path) -> None:
    task = make_task(shape, TrainBenchConfig(rows=3000, seconds=0, min_steps=3), tmp_path)  # type: ignore[arg-type]
    ours = Batches(Table.open(Path(task.folder) / "table"), task.batch_size)
    first, _ = next(ours.read())
    theirs = memory_batches(task)[0]
    assert (theirs.numbers == first.numbers).all()
    assert (theirs.ids[:, 3] == first.keys["c4"].values).all()
    assert (theirs.labels == first.labels["click"]).all()
    assert all(theirs.ids.max(axis=0) < task.sizes)


@pytest.mark.parametrize("shape", [DLRM, WIDE_DEEP], ids=["dlrm", "wide_deep"])
@pytest.mark.parametrize("peer", find_peers("train", ["all"]), ids=lambda peer: peer.name)
def test_a_peer_learns_a_truth_that_is_only_in_its_tables(peer: Peer, shape: Task, tmp_path: Path) -> None:
    """Even ids of the first feature click, odd ones do not."""
    random = np.random.default_rng(0)
    ids = random.integers(0, 10, (6400, 4))
    rows = MemoryBatch(np.zeros((6400, 2), np.float32), ids, (ids[:, 0] % 2 == 0).astype(np.float32))
    write_batches(iter([rows]), tmp_path / "batches")
    small = {
        "num_numbers": 2,
        "sizes": [10] * 4,
        "embedding_dim": 4,
        "bottom": [4],
        "top": [8],
        "hidden": [8],
    }
    task = replace(shape, folder=str(tmp_path), min_steps=90, **small)
    result = run_trainer(peer, task)
    if "absent" in result:
        assert result["absent"].startswith("not installed: pip install")
        pytest.skip(result["absent"])
    assert result["loss"] < 0.1


def test_a_peer_that_is_not_installed_is_in_the_result(tmp_path: Path) -> None:
    venv.create(tmp_path / "bare", symlinks=True)
    bare = str(tmp_path / "bare" / "bin" / "python")
    config = TrainBenchConfig(
        rows=3000,
        repeat=1,
        threads=(1,),
        peer=("torch_embedding_bag",),
        peer_python={"tensorflow": bare},
        data=tmp_path,
        seconds=0,
        min_steps=3,
    )
    result = bench_train("dlrm", config)
    ours = ["recmill_table", "recmill_log", "dense_floor"]
    assert list(result["contestants"]) == [*ours, "torch_embedding_bag", "tensorflow"]
    measured = {name: of["threads"]["1"] for name, of in result["contestants"].items()}
    assert measured["recmill_log"]["loss"] == measured["recmill_table"]["loss"]
    assert measured["torch_embedding_bag"]["samples_per_second"]["min"] > 0
    assert measured["tensorflow"]["absent"].startswith("not installed: pip install tensorflow-cpu")
    assert "not installed: pip install tensorflow-cpu" in describe(result)


def test_medians_are_compared_with_ours_and_with_the_peak() -> None:
    runs = {
        "gemm_peak": {1: [{"gflops": 90.0}, {"gflops": 100.0}]},
        "recmill_table": {1: [run_of(20_000, 0.50), run_of(22_000, 0.50), run_of(90_000, 0.50)]},
        "fbgemm": {1: [run_of(11_000, 0.51), run_of(11_000, 0.51), run_of(1, 0.51)]},
        "tensorflow": {1: [run_of(33_000, 0.69)] * 3},
    }
    peers = {name: Peer(name, "train", "") for name in ("fbgemm", "tensorflow")}
    result = summarize(runs, peers, DLRM, rows=1000, repeat=3)
    entries = {name: of["threads"]["1"] for name, of in result["contestants"].items()}
    assert entries["recmill_table"]["samples_per_second"]["median"] == 22_000
    assert entries["recmill_table"]["of_gemm_peak"] == round(22_000 * 3_032_576 / 100e9, 3)
    assert (entries["fbgemm"]["ours_over_this"], entries["fbgemm"]["loss_matches"]) == (2.0, True)
    assert entries["fbgemm"]["samples_per_second"] == {"median": 11_000, "min": 1, "max": 11_000}
    assert entries["tensorflow"]["loss_matches"] is False
    lines = describe(result).splitlines()
    assert entries["fbgemm"]["others"] == 0.25
    assert [line.split()[0] for line in lines if "loss differs from ours" in line] == ["tensorflow"]


def test_a_peer_needs_numpy_and_no_other_package_of_ours() -> None:
    code = """
import sys, recmill.stages.bench.race
names = {name.partition(".")[0] for name in sys.modules} - sys.stdlib_module_names
print(sorted(name for name in names - {"sitecustomize"} if not name.startswith("_")))
"""
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "['numpy', 'recmill']"


def test_an_interpreter_that_is_not_there_is_an_error() -> None:
    with pytest.raises(RecmillError, match="--peer-python fbgemm=/no/python cannot be run: No such file"):
        run_trainer(Peer("fbgemm", "train", "", python="/no/python"), DLRM)


def test_an_unknown_peer_is_named_with_the_known_ones() -> None:
    with pytest.raises(
        RecmillError, match='no peer "mxnet"; peers: torch_embedding_bag, fbgemm, tensorflow, or all'
    ):
        bench_train("dlrm", TrainBenchConfig(peer=("mxnet",)))


def test_an_installed_package_without_a_checkout_has_no_peers(tmp_path: Path) -> None:
    assert find_peers("train", [], checkout=tmp_path) == []
    with pytest.raises(RecmillError, match="--peer needs the folder benchmarks/ of a checkout"):
        find_peers("train", ["all"], checkout=tmp_path)


def test_more_threads_than_cores_are_refused() -> None:
    with pytest.raises(RecmillError, match="asked for 4096 threads, but this process may use"):
        bench_train("dlrm", TrainBenchConfig(threads=(1, 4096)))


def test_too_few_rows_for_one_batch_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RecmillError, match="at least one batch of 2048 rows, but 100 rows have only"):
        bench_train("dlrm", TrainBenchConfig(rows=100, threads=(1,), data=tmp_path))
