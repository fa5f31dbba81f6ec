"""Graphs as functions: inputs by name, errors that say what to do, memory that stays where it is."""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from recmill.artifacts.bundle.sessions import Graph
from recmill.errors import ArtifactError

WEIGHTS = np.arange(64 * 256, dtype=np.float32).reshape(64, 256) / 1000


def graph_bytes() -> bytes:
    """logits = sum over columns of relu(item @ WEIGHTS + user)."""
    nodes = [
        helper.make_node("Gemm", ["item", "weights", "user"], ["mixed"]),
        helper.make_node("Relu", ["mixed"], ["positive"]),
        helper.make_node("ReduceSum", ["positive", "axes"], ["logits"], keepdims=0),
    ]
    graph = helper.make_graph(
        nodes,
        "sums",
        [
            helper.make_tensor_value_info("user", TensorProto.FLOAT, [1, 256]),
            helper.make_tensor_value_info("item", TensorProto.FLOAT, ["rows", 64]),
        ],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["rows"])],
        [numpy_helper.from_array(WEIGHTS, "weights"), numpy_helper.from_array(np.array([1]), "axes")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.checker.check_model(model)
    return bytes(model.SerializeToString())


def inputs(num_rows: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(num_rows)
    return {
        "user": random.standard_normal((1, 256), np.float32),
        "item": random.standard_normal((num_rows, 64), np.float32),
    }


def expected(user: np.ndarray, item: np.ndarray) -> np.ndarray:
    return np.maximum(item @ WEIGHTS + user, 0).sum(axis=1)


def test_a_graph_is_run_by_the_names_of_its_inputs(tmp_path: Path) -> None:
    path = tmp_path / "sums.onnx"
    path.write_bytes(graph_bytes())
    for graph in (Graph(path), Graph(graph_bytes())):
        assert (graph.inputs, graph.output) == (("user", "item"), "logits")
        for num_rows in (1, 7, 500):
            given = inputs(num_rows)
            np.testing.assert_allclose(graph.run(**given), expected(**given), rtol=1e-5, atol=1e-5)


def test_inputs_that_the_graph_does_not_have_are_left_out() -> None:
    found = Graph(graph_bytes()).run(**inputs(3), item_numbers=np.empty((3, 0), np.float32))
    np.testing.assert_allclose(found, expected(**inputs(3)), rtol=1e-5, atol=1e-5)


def test_many_threads_may_run_one_graph() -> None:
    graph = Graph(graph_bytes())
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda num_rows: graph.run(**inputs(num_rows)), range(1, 200)))
    for num_rows, answer in enumerate(answers, start=1):
        np.testing.assert_allclose(answer, expected(**inputs(num_rows)), rtol=1e-5, atol=1e-4)


@pytest.mark.processes
def test_memory_does_not_grow_with_the_sizes_that_came() -> None:
    # In a process of its own: other tests leave holes that the allocator fills when it likes.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as process:
        assert process.submit(growth_over_many_sizes).result() < 16 << 20


def growth_over_many_sizes() -> int:
    graph, most = Graph(graph_bytes()), inputs(3000)

    def round_of_sizes(step: int) -> None:
        with ThreadPoolExecutor(8) as pool:
            sizes = range(1, 3000, step)
            list(pool.map(lambda size: graph.run(user=most["user"], item=most["item"][:size]).sum(), sizes))

    round_of_sizes(2)
    before = resident_bytes()
    for step in (3, 5, 7):
        round_of_sizes(step)
    return resident_bytes() - before


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_graph_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"rank.onnx does not exist. Run `recmill export` again"):
        Graph(tmp_path / "rank.onnx")


def test_a_damaged_graph_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rank.onnx"
    path.write_bytes(graph_bytes()[:-500])
    with pytest.raises(ArtifactError, match=r"rank.onnx cannot be loaded: .* Run `recmill export` again"):
        Graph(path)
