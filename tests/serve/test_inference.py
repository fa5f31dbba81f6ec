"""The Open Inference Protocol: tritonclient works unchanged, over HTTP and gRPC; scores are those of the bundle."""

from __future__ import annotations

import gc
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import msgspec
import numpy as np
import polars as pl
import pytest
import tritonclient.grpc
import tritonclient.http
from servers import Running, Start
from tritonclient.utils import InferenceServerException

from recmill import open_bundle
from recmill.errors import BadRequest
from recmill.stages.serve import inference
from recmill.stages.serve.limits import Limits
from recmill.stages.serve.proto import predict_v2_pb2 as pb
from recmill.stages.serve.tensors import column_from_bytes, frame_of

USERS = ["u1", "u2", "u3", "nobody", ""]
ITEMS = ["i1", "i2", "i3", "i4", "i5"]
PRICES = [1.5, 2.0, float("nan"), 4.0, 5.5]


@pytest.fixture(scope="module")
def expected(bundles: Any) -> np.ndarray:
    """What the bundle says in process."""
    users = pl.Series("user_id", [user or None for user in USERS])
    prices = pl.Series("price", PRICES).fill_nan(None)
    rows = pl.DataFrame([users, pl.Series("item_id", ITEMS), prices, pl.Series("position", [1, 2, 3, 4, 5])])
    return open_bundle(bundles).score(rows)


def tensors(module: Any, shape: list[int]) -> list[Any]:
    columns = {
        "user_id": np.array([user.encode() for user in USERS], object),
        "item_id": np.array(ITEMS, object),
        "price": np.array(PRICES, np.float64),
        "position": np.array([1, 2, 3, 4, 5], np.int64),
    }
    types = {"user_id": "BYTES", "item_id": "BYTES", "price": "FP64", "position": "INT64"}
    found = []
    for name, values in columns.items():
        tensor = module.InferInput(name, shape, types[name])
        tensor.set_data_from_numpy(values.reshape(shape))
        found.append(tensor)
    return found


@contextmanager
def http_client(server: Running) -> Iterator[Any]:
    """Its greenlets must end in the thread that began them, so it is collected here and not whenever."""
    client = tritonclient.http.InferenceServerClient(server.http.removeprefix("http://"))
    yield client
    client.close()
    del client
    gc.collect()


@pytest.mark.services
@pytest.mark.parametrize("shape", [[5], [5, 1]])
def test_tritonclient_scores_over_http(server: Running, expected: np.ndarray, shape: list[int]) -> None:
    with http_client(server) as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("ranking")
        assert client.get_server_metadata()["name"] == "recmill"
        inputs = {one["name"]: one["datatype"] for one in client.get_model_metadata("ranking")["inputs"]}
        assert (inputs["user_id"], inputs["price"], inputs["position"]) == ("BYTES", "FP64", "INT64")
        answer = client.infer("ranking", tensors(tritonclient.http, shape), request_id="seven")
        np.testing.assert_allclose(answer.as_numpy("probability"), expected, atol=1e-6)
        assert answer.get_response()["id"] == "seven"
        assert answer.get_response()["model_version"] == server.version


@pytest.mark.services
@pytest.mark.parametrize("binary", [True, False])
def test_tritonclient_asks_for_the_output_as_bytes_or_json(
    server: Running, expected: np.ndarray, binary: bool
) -> None:
    with http_client(server) as client:
        output = tritonclient.http.InferRequestedOutput("probability", binary_data=binary)
        packed = {"request_compression_algorithm": "gzip"}
        answer = client.infer("ranking", tensors(tritonclient.http, [5]), outputs=[output], **packed)
        np.testing.assert_allclose(answer.as_numpy("probability"), expected, atol=1e-6)
        with pytest.raises(InferenceServerException, match='no model "other"'):
            client.infer("other", tensors(tritonclient.http, [5]))


@pytest.mark.services
@pytest.mark.parametrize("shape", [[5], [5, 1]])
def test_tritonclient_scores_over_grpc(server: Running, expected: np.ndarray, shape: list[int]) -> None:
    client = tritonclient.grpc.InferenceServerClient(server.grpc)
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("ranking")
    assert client.get_server_metadata().extensions == ["binary_tensor_data"]
    assert client.get_model_metadata("ranking").outputs[0].name == "probability"
    answer = client.infer("ranking", tensors(tritonclient.grpc, shape), request_id="seven", client_timeout=10)
    np.testing.assert_allclose(answer.as_numpy("probability"), expected, atol=1e-6)
    assert answer.get_response().id == "seven"
    with pytest.raises(InferenceServerException, match="is not served now"):
        client.infer("ranking", tensors(tritonclient.grpc, shape), model_version="1")
    with pytest.raises(InferenceServerException, match="no_such_column"):
        client.infer("ranking", [tensors(tritonclient.grpc, shape)[0], bad_column()])
    client.close()


def bad_column() -> Any:
    tensor = tritonclient.grpc.InferInput("no_such_column", [5], "INT64")
    tensor.set_data_from_numpy(np.arange(5))
    return tensor


@pytest.mark.services
def test_requests_at_the_same_time_get_their_own_rows(start: Start, bundles: Any) -> None:
    server, own = start(max_wait_seconds=10), open_bundle(bundles)

    def ask(number: int) -> bool:
        items = [f"i{number + index}" for index in range(1 + number % 3)]
        body = {"inputs": [{"name": "item_id", "shape": [len(items)], "datatype": "BYTES", "data": items}]}
        body["parameters"] = {"timeout": 20_000_000}
        answer = httpx.post(f"{server.http}/v2/models/ranking/infer", json=body, timeout=20)
        assert answer.status_code == 200, answer.text
        found = answer.json()["outputs"][0]["data"]
        return np.allclose(found, own.score(pl.DataFrame({"item_id": items})), atol=1e-6)

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(ask, range(40)))


def json_rows(**tensor: Any) -> Any:
    whole = {"name": "price", "shape": [2], "datatype": "FP64", "data": [1, 2.5], **tensor}
    return inference.rows_from_http(msgspec.json.encode({"inputs": [whole]}), None, Limits())


def test_json_holds_rows_flat_or_nested_and_null_is_missing() -> None:
    assert json_rows().frame["price"].to_list() == [1.0, 2.5]
    assert json_rows(shape=[2, 1], data=[[1], [None]]).frame["price"].to_list() == [1.0, None]
    assert json_rows(datatype="BYTES", data=["a", ""]).frame["price"].to_list() == ["a", None]
    assert json_rows(datatype="BOOL", data=[True, None]).frame["price"].to_list() == [True, None]


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        ({"shape": [3]}, "has 2 values, but its shape has 3"),
        ({"shape": [2, 2]}, "has 2 values, but its shape has 4"),
        (
            {"shape": [2, 1, 1]},
            r"must have the shape \[n\], or \[n, length\] for lists of 1 to 10,000 values",
        ),
        ({"shape": [2**40, 0]}, "must have the shape"),
        ({"shape": []}, "must have the shape"),
        ({"shape": [-1]}, "must have the shape"),
        ({"data": ["a", "b"]}, "must hold values of FP64 alone"),
        ({"datatype": "INT64", "data": [1, 2**64]}, "must hold values of INT64 alone"),
        ({"datatype": "INT64", "data": [1, 2.5]}, "must hold values of INT64 alone"),
        ({"datatype": "BOOL", "data": [1, 2]}, "must hold values of BOOL alone"),
        ({"datatype": "FP16"}, "Invalid enum value 'FP16'"),
        ({"parameters": {"binary_data_size": 16}}, "more than the request has"),
    ],
)
def test_wrong_tensors_are_refused_with_their_name(tensor: dict[str, Any], words: str) -> None:
    with pytest.raises(BadRequest, match=words):
        json_rows(**tensor)


@pytest.mark.parametrize(
    ("datatype", "rows", "data", "words"),
    [
        ("INT64", 2, b"1234567", "has 7 bytes; 2 values of INT64 have 16"),
        ("BYTES", 2, b"\x01\0\0\0a", "must hold 2 texts"),
        ("BYTES", 1, b"\x09\0\0\0a", "must hold 1 texts"),
        ("BYTES", 1, b"\x01\0\0\0ab", "must hold 1 texts"),
        ("BYTES", 2**40, b"\x01\0\0\0a", "must hold"),
        ("BYTES", 1, b"\x01\0\0\0\xff", "is not all UTF-8"),
        ("FP8", 1, b"1", "has the datatype"),
    ],
)
def test_wrong_bytes_are_refused(datatype: str, rows: int, data: bytes, words: str) -> None:
    with pytest.raises(BadRequest, match=words):
        column_from_bytes("price", datatype, rows, data)


def test_bytes_hold_texts_after_their_lengths() -> None:
    texts = ["", "a", "ünder", "日本"]
    data = b"".join(struct.pack("<I", len(text.encode())) + text.encode() for text in texts)
    assert column_from_bytes("x", "BYTES", 4, data).to_list() == texts


def test_grpc_contents_are_read_like_raw_bytes() -> None:
    tensor = pb.ModelInferRequest.InferInputTensor(
        name="position", datatype="INT32", shape=[2], contents=pb.InferTensorContents(int_contents=[4, 5])
    )
    _, _, rows = inference.rows_from_grpc(pb.ModelInferRequest(inputs=[tensor]).SerializeToString())
    assert rows.frame["position"].to_list() == [4, 5]
    request = pb.ModelInferRequest(inputs=[tensor], raw_input_contents=[b"", b""])
    with pytest.raises(BadRequest, match="1 inputs, but 2 raw_input_contents"):
        inference.rows_from_grpc(request.SerializeToString())


def test_lists_end_before_what_fills_them_up_or_as_long_as_their_lengths_say() -> None:
    def found(datatype: str, data: list[Any], *lengths: int) -> list[Any]:
        inputs = [{"name": "seen", "shape": [2, 3], "datatype": datatype, "data": data}]
        if lengths:
            inputs.append({"name": "seen.lengths", "shape": [2], "datatype": "INT64", "data": list(lengths)})
        frame = inference.rows_from_http(msgspec.json.encode({"inputs": inputs}), None, Limits()).frame
        assert frame.columns == ["seen"]
        return frame["seen"].to_list()

    assert found("BYTES", ["a", "b", "", "", "", ""]) == [["a", "b"], []]
    assert found("FP64", [[1, None, 3], [2, None, None]]) == [[1.0, None, 3.0], [2.0]]
    assert found("INT64", [1, 2, 3, 4, 0, 0]) == [[1, 2, 3], [4, 0, 0]]
    assert found("INT64", [1, 2, 3, 4, 0, 0], 3, 1) == [[1, 2, 3], [4]]
    assert found("INT32", [1, 2, 3, 4, 0, 0], 0, 2) == [[], [4, 0]]
    with pytest.raises(BadRequest, match=r"seen\.lengths\" must have integers from 0 to 10,000"):
        found("INT64", [1, 2, 3, 4, 0, 0], -1, 2)
    with pytest.raises(BadRequest, match='has the lengths of "x", which is not among the inputs'):
        frame_of([pl.Series("a", [1]), pl.Series("x.lengths", [1])])


def test_columns_must_fit_together() -> None:
    with pytest.raises(BadRequest, match="occurs twice"):
        frame_of([pl.Series("a", [1]), pl.Series("a", [1])])
    with pytest.raises(BadRequest, match="same number of rows, got 1, 2"):
        frame_of([pl.Series("a", [1]), pl.Series("b", [1, 2])])
    with pytest.raises(BadRequest, match="inputs is empty"):
        frame_of([])
