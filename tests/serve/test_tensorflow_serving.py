"""TensorFlow Serving's API: requests as its clients write them, byte by byte, get the bundle's probabilities."""

from __future__ import annotations

import base64
import struct
from typing import Any

import grpc
import httpx
import numpy as np
import polars as pl
import pytest
from servers import Running, Start

from recmill import open_bundle
from recmill.errors import BadRequest, NotFound
from recmill.stages.serve import tensorflow_serving as tfs
from recmill.stages.serve.limits import Limits
from recmill.stages.serve.proto import tensorflow_serving_pb2 as pb

USERS = ["u1", "u2", "nobody"]
ITEMS = ["i1", "i2", "i3"]
PRICES = [1.5, 2.0, 4.0]
POSITIONS = [1, 2, 3]
DT_FLOAT, DT_STRING, DT_INT64 = 1, 7, 9
PREDICT = "/v1/models/ranking:predict"


# The wire format of protobuf, by field numbers of TensorFlow's .proto files: nothing of ours encodes these requests.


def varint(number: int) -> bytes:
    head, rest = number & 0x7F, number >> 7
    return bytes([head | 0x80]) + varint(rest) if rest else bytes([head])


def field(number: int, value: int | str | bytes) -> bytes:
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(data)) + data


def shape(*sizes: int) -> bytes:
    return field(2, b"".join(field(2, field(1, size)) for size in sizes))


def tensor(dtype: int, content: bytes, *sizes: int) -> bytes:
    return field(1, dtype) + shape(*sizes) + content


def texts(values: list[str]) -> bytes:
    return b"".join(field(8, value) for value in values)


def predict_request(
    name: str, inputs: dict[str, bytes], more: bytes = b"", signature: str = "predict"
) -> bytes:
    spec = field(1, name) + field(3, signature) + more
    return field(1, spec) + b"".join(
        field(2, field(1, key) + field(2, value)) for key, value in inputs.items()
    )


INPUTS = {
    "user_id": tensor(DT_STRING, texts(USERS), 3),
    "item_id": tensor(DT_STRING, texts(ITEMS), 3, 1),
    "price": tensor(DT_FLOAT, field(4, struct.pack("<3f", *PRICES)), 3, 1),
    "position": tensor(DT_INT64, field(10, bytes(POSITIONS)), 3),
}


def example(row: int) -> bytes:
    features = {
        "user_id": field(1, field(1, USERS[row])),
        "item_id": field(1, field(1, ITEMS[row])),
        "price": field(2, field(1, struct.pack("<f", PRICES[row]))),
        "position": field(3, field(1, bytes([POSITIONS[row]]))),
    }
    return field(1, b"".join(field(1, field(1, key) + field(2, value)) for key, value in features.items()))


@pytest.fixture(scope="module")
def server(start: Start) -> Running:
    return start(model_name="wide_deep")


@pytest.fixture(scope="module")
def expected(bundles: Any) -> np.ndarray:
    columns = {"user_id": USERS, "item_id": ITEMS, "price": PRICES, "position": POSITIONS}
    return open_bundle(bundles).score(pl.DataFrame(columns))


def ask(server: Running, method: str, request: bytes) -> bytes:
    with grpc.insecure_channel(server.grpc) as channel:
        return channel.unary_unary(f"/tensorflow.serving.PredictionService/{method}")(request, timeout=30)


def test_predict_gives_the_outputs_of_a_classifier(server: Running, expected: np.ndarray) -> None:
    reply = pb.PredictResponse.FromString(ask(server, "Predict", predict_request("wide_deep", INPUTS)))
    shapes = {name: [dim.size for dim in one.tensor_shape.dim] for name, one in reply.outputs.items()}
    assert {name: (reply.outputs[name].dtype, sizes) for name, sizes in shapes.items()} == {
        "logistic": (DT_FLOAT, [3, 1]),
        "probabilities": (DT_FLOAT, [3, 2]),
        "class_ids": (DT_INT64, [3, 1]),
        "classes": (DT_STRING, [3, 1]),
    }
    np.testing.assert_allclose(reply.outputs["logistic"].float_val, expected, atol=1e-6)
    both = np.reshape(reply.outputs["probabilities"].float_val, (3, 2))
    np.testing.assert_allclose(both, np.stack([1 - expected, expected], axis=1), atol=1e-6)
    assert list(reply.outputs["class_ids"].int64_val) == (expected > 0.5).astype(int).tolist()
    assert (reply.model_spec.name, reply.model_spec.signature_name) == ("wide_deep", "predict")


def test_a_version_is_the_step_of_the_bundle(server: Running, bundles: Any) -> None:
    step = int(open_bundle(bundles).version.partition("-")[0])
    request = predict_request("ranking", INPUTS, field(2, field(1, step))) + field(3, "classes")
    reply = pb.PredictResponse.FromString(ask(server, "Predict", request))
    assert (reply.model_spec.version.value, list(reply.outputs)) == (step, ["classes"])
    with pytest.raises(grpc.RpcError) as error:
        ask(server, "Predict", predict_request("ranking", INPUTS, field(2, field(1, step + 1))))
    assert error.value.code() == grpc.StatusCode.NOT_FOUND
    assert f"Version {step + 1} of ranking is not served now; {step} is." in error.value.details()


def test_examples_are_classified_and_regressed(server: Running, expected: np.ndarray) -> None:
    examples = field(2, field(1, b"".join(field(1, example(row)) for row in range(3))))
    request = field(1, field(1, "ranking")) + examples
    classified = pb.ClassificationResponse.FromString(ask(server, "Classify", request)).result.classifications
    assert [[one.label for one in row.classes] for row in classified] == [["0", "1"]] * 3
    np.testing.assert_allclose([row.classes[1].score for row in classified], expected, atol=1e-6)
    regressed = pb.RegressionResponse.FromString(ask(server, "Regress", request)).result.regressions
    np.testing.assert_allclose([one.value for one in regressed], expected, atol=1e-6)


def test_predict_takes_serialised_examples_too(server: Running, expected: np.ndarray) -> None:
    rows = b"".join(field(8, example(row)) for row in range(3))
    request = predict_request(
        "ranking", {"examples": tensor(DT_STRING, rows, 3)}, signature="serving_default"
    )
    reply = pb.PredictResponse.FromString(ask(server, "Predict", request))
    np.testing.assert_allclose(reply.outputs["logistic"].float_val, expected, atol=1e-6)


def test_rest_takes_rows_or_columns(server: Running, expected: np.ndarray) -> None:
    columns = {"user_id": USERS, "item_id": ITEMS, "price": PRICES, "position": POSITIONS}
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    rows[0]["user_id"] = {"b64": base64.b64encode(b"u1").decode()}  # type: ignore[assignment]
    url = f"{server.http}/v1/models/wide_deep"
    predicted = httpx.post(f"{url}:predict", json={"instances": rows}).json()["predictions"]
    np.testing.assert_allclose([row["probabilities"][1] for row in predicted], expected, atol=1e-6)
    outputs = httpx.post(f"{url}:predict", json={"inputs": columns}).json()["outputs"]
    np.testing.assert_allclose(np.ravel(outputs["logistic"]), expected, atol=1e-6)
    context = {"context": {"position": 1}, "examples": [{**row, "position": 1} for row in rows]}
    assert len(httpx.post(f"{url}:classify", json=context).json()["result"]) == 3
    assert httpx.post(f"{url}:regress", json={"examples": rows}).json()["result"] == pytest.approx(
        expected, abs=1e-6
    )


def test_rest_tells_status_and_signature(server: Running, bundles: Any) -> None:
    step = str(int(open_bundle(bundles).version.partition("-")[0]))
    url = f"{server.http}/v1/models/ranking"
    (status,) = httpx.get(url).json()["model_version_status"]
    assert (status["version"], status["state"]) == (step, "AVAILABLE")
    metadata = httpx.get(f"{url}/versions/{step}/metadata").json()["metadata"]
    signature = metadata["signature_def"]["signature_def"]["predict"]
    assert signature["inputs"]["price"]["dtype"] == "DT_DOUBLE"
    assert signature["outputs"]["probabilities"]["tensor_shape"]["dim"][1]["size"] == "2"


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/v1/models/other:predict", {}, 404, 'There is no model "other". Models here: ranking, wide_deep.'),
        (
            "/v1/models/ranking:guess",
            {},
            404,
            'There is no method "guess"; expected predict, classify, regress.',
        ),
        ("/v1/models/ranking/versions/7:predict", {}, 404, "Version 7 of ranking is not served now"),
        (PREDICT, {}, 400, 'The body must have "instances" or "inputs".'),
        (PREDICT, {"instances": [1]}, 400, "Expected `object`, got `int`"),
        (
            PREDICT,
            {"instances": [{"price": [[1, 2]]}]},
            400,
            'Input "price" must have one value or a list of values a row',
        ),
        (
            PREDICT,
            {"instances": [{"price": {"b64": "?"}}]},
            400,
            "a b64 that is not base64",
        ),
        (PREDICT, {"instances": [{"price": [1, 2]}]}, 400, "The rows cannot be scored"),
        (
            PREDICT,
            {"instances": [], "signature_name": "x"},
            404,
            'There is no signature "x"',
        ),
    ],
)
def test_wrong_requests_are_refused(server: Running, path: str, body: Any, status: int, words: str) -> None:
    answer = httpx.post(server.http + path, json=body)
    assert (answer.status_code, words in answer.json()["error"]) == (status, True), answer.text


def test_one_value_stands_for_a_whole_tensor_within_the_limits() -> None:
    four = field(6, struct.pack("<d", 4.0))
    _, frame = tfs.predict_query(predict_request("m", {"price": tensor(2, four, 5)}), Limits())
    assert frame["price"].to_list() == [4.0] * 5
    huge = tensor(2, four, 10**9)
    with pytest.raises(BadRequest, match='Input "price" has 1 values, but its shape has 1,000,000,000'):
        tfs.predict_query(predict_request("m", {"price": huge}), Limits())


def test_tensors_and_examples_that_cannot_be_columns_are_refused() -> None:
    with pytest.raises(BadRequest, match='Input "x" has the dtype 8; expected one of 1'):
        tfs.predict_query(predict_request("m", {"x": tensor(8, b"", 1)}), Limits())
    with pytest.raises(BadRequest, match="Versions have no labels here"):
        tfs.predict_query(predict_request("m", INPUTS, field(4, "canary")), Limits())
    with pytest.raises(NotFound, match="no signature"):
        tfs.predict_query(predict_request("m", INPUTS, signature="regression"), Limits())
    kinds = [pb.Feature(int64_list={"value": [1]}), pb.Feature(float_list={"value": [1.0]})]
    rows = [pb.Example(features={"feature": {"x": kind}}) for kind in kinds]
    with pytest.raises(BadRequest, match="must be of one kind in all examples, got float_list, int64_list"):
        tfs.frame_of_examples(rows)
    many = pb.Example(features={"feature": {"x": pb.Feature(int64_list={"value": [1, 2]})}})
    assert tfs.frame_of_examples([many, pb.Example()])["x"].to_list() == [[1, 2], []]
