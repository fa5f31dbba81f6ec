"""Whatever comes in, a server neither breaks nor answers with a mistake of its own."""

from __future__ import annotations

import random
import socket
import subprocess
import sys
from pathlib import Path

import grpc
import httpx
import pytest
from servers import Running, Start

from recmill.stages.serve.grpc_server import INFERENCE, METHODS, SERVICE, method_name
from recmill.stages.serve.proto import predict_v2_pb2, recmill_pb2

OUR_MISTAKES = {"INTERNAL", "UNKNOWN", "UNAVAILABLE", "DATA_LOSS"}
INFERENCE_METHODS = {
    "ServerLive": predict_v2_pb2.ServerLiveRequest,
    "ServerReady": predict_v2_pb2.ServerReadyRequest,
    "ModelReady": predict_v2_pb2.ModelReadyRequest,
    "ServerMetadata": predict_v2_pb2.ServerMetadataRequest,
    "ModelMetadata": predict_v2_pb2.ModelMetadataRequest,
    "ModelInfer": predict_v2_pb2.ModelInferRequest,
}


@pytest.fixture(scope="module")
def fuzzed(start: Start) -> Running:
    """A server that may be changed, and takes small bodies only."""
    return start(max_body=100_000, max_wait_seconds=5, deadline_seconds=10)


# A request that fits the document may still be refused: a condition in SQL, a whole number written 3.0. A deadline
# that passes is an answer too.
SCHEMATHESIS = """
[checks]
positive_data_acceptance.enabled = false
negative_data_rejection.expected-statuses = ["400", "404", "405", "413", "415", "429", "504"]
not_a_server_error.expected-statuses = ["2xx", "3xx", "4xx", "504"]
"""


@pytest.mark.services
def test_the_server_does_what_its_document_says(fuzzed: Running, tmp_path: Path) -> None:
    (tmp_path / "schemathesis.toml").write_text(SCHEMATHESIS)
    program = Path(sys.executable).with_name("schemathesis")
    flags = ["--max-examples", "2", "--seed", "5", "--phases", "examples,coverage,fuzzing", "--no-color"]
    command = [program, "run", f"{fuzzed.http}/openapi.json", *flags]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert found.returncode == 0, "\n".join(line[:300] for line in found.stdout.splitlines())
    assert is_well(fuzzed)


def is_well(server: Running) -> bool:
    """Both transports still answer."""
    answer = httpx.post(f"{server.http}/v1/recommend", json={"user": "u1", "k": 3}, timeout=20)
    with grpc.insecure_channel(server.grpc) as channel:
        channel.unary_unary(f"/{SERVICE}/Status")(b"", timeout=20)
    return answer.status_code == 200


def code_of(channel: grpc.Channel, method: str, data: bytes) -> str:
    try:
        channel.unary_unary(method)(data, timeout=20)
    except grpc.RpcError as error:
        return error.code().name
    return "OK"


def damaged(data: bytes, chance: random.Random) -> bytes:
    """A message with some bytes changed, cut out or put in."""
    found = bytearray(data)
    for _ in range(chance.randint(1, 5)):
        index = chance.randrange(len(found) + 1)
        what = chance.randrange(3)
        if what == 0:
            found[index:index] = chance.randbytes(chance.randint(1, 8))
        elif what == 1:
            del found[index : index + chance.randint(1, 8)]
        elif index < len(found):
            found[index] = chance.randrange(256)
    return bytes(found)


def some_message() -> bytes:
    pb = recmill_pb2
    query = pb.Query(
        user=pb.Id(text="u1"),
        context={"device": pb.Value(text="phone"), "position": pb.Value(number=3)},
        recent=[pb.Id(text="i1"), pb.Id(number=4)],
        where="price > 3",
        channels=["popular"],
    )
    return pb.RecommendRequest(queries=[query, query], k=5, trace=True).SerializeToString()


def some_rows() -> bytes:
    pb = predict_v2_pb2.ModelInferRequest
    tensors = [
        pb.InferInputTensor(name="item_id", datatype="BYTES", shape=[2]),
        pb.InferInputTensor(name="price", datatype="FP64", shape=[2, 1]),
    ]
    raw = [b"\x02\0\0\0i1\x02\0\0\0i2", bytes(16)]
    return pb(model_name="ranking", inputs=tensors, raw_input_contents=raw).SerializeToString()


def test_damaged_messages_are_refused_or_answered(fuzzed: Running) -> None:
    chance = random.Random(7)
    methods = [f"/{SERVICE}/{name}" for name in map(method_name, METHODS)] + [
        f"/{INFERENCE}/{name}" for name in INFERENCE_METHODS
    ]
    with grpc.insecure_channel(fuzzed.grpc) as channel:
        for method in methods:
            good = some_rows() if method.endswith("ModelInfer") else some_message()
            for _ in range(40):
                data = damaged(good, chance)
                assert code_of(channel, method, data) not in OUR_MISTAKES, (method, data)
        assert code_of(channel, f"/{SERVICE}/Recommend", chance.randbytes(1_000_000)) == "RESOURCE_EXHAUSTED"
        assert code_of(channel, "/recmill.v1.Recommender/Nothing", b"") == "UNIMPLEMENTED"
    assert is_well(fuzzed)


BIG = "9" * 400
INPUT = '{"inputs": [{"name": "%s", "shape": [1], "datatype": "%s", %s}]%s}'


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/items", '{"items": [{"id": "new", "values": {"price": BIG}}]}'.replace("BIG", BIG)),
        (
            "/v1/events",
            '{"events": [{"user": "u1", "item": "i1", "values": {"price": -BIG}}]}'.replace("BIG", BIG),
        ),
        ("/v1/recommend", '{"context": {"price_shown": BIG}}'.replace("BIG", BIG)),
        ("/v2/models/ranking/infer", INPUT % ("price", "FP64", f'"data": [{BIG}]', "")),
        (
            "/v2/models/ranking/infer",
            INPUT % ("price", "FP64", f'"parameters": {{"binary_data_size": {BIG}}}', ""),
        ),
    ],
)
def test_numbers_that_no_column_can_hold_are_refused(fuzzed: Running, path: str, body: str) -> None:
    answer = httpx.post(f"{fuzzed.http}{path}", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text


def test_a_timeout_of_ages_is_none(fuzzed: Running) -> None:
    body = INPUT % ("price", "FP64", '"data": [1]', f', "parameters": {{"timeout": {BIG}}}')
    path = f"{fuzzed.http}/v2/models/ranking/infer"
    assert httpx.post(path, content=body, headers={"content-type": "application/json"}).status_code == 200


@pytest.mark.parametrize("length", [0xFFFFFFFF, 0x7FFFFFFF, 3])
def test_lengths_of_texts_that_are_not_there_are_refused(fuzzed: Running, length: int) -> None:
    data = length.to_bytes(4, "little") + b"i1"
    text = (INPUT % ("item_id", "BYTES", f'"parameters": {{"binary_data_size": {len(data)}}}', "")).encode()
    path = f"{fuzzed.http}/v2/models/ranking/infer"
    headers = {"inference-header-content-length": str(len(text)), "content-type": "application/octet-stream"}
    assert httpx.post(path, content=text + data, headers=headers).status_code == 400


@pytest.mark.parametrize("length", ["-1", "", "x", "1e3", "9" * 400, "0" * 400, "3, 4"])
def test_a_wrong_length_of_the_json_is_refused(fuzzed: Running, length: str) -> None:
    path = f"{fuzzed.http}/v2/models/ranking/infer"
    headers = {"inference-header-content-length": length, "content-type": "application/octet-stream"}
    assert httpx.post(path, content=b'{"inputs": []}', headers=headers).status_code == 400


@pytest.mark.parametrize("transport", ["http", "grpc"])
def test_random_bytes_on_a_port_harm_nobody(fuzzed: Running, transport: str) -> None:
    chance = random.Random(11)
    host, _, port = getattr(fuzzed, transport).removeprefix("http://").rpartition(":")
    beginnings = [b"", b"GET / HTTP/1.1\r\n", b"POST /v1/recommend HTTP/1.1\r\ncontent-length: 50\r\n\r\n"]
    beginnings += [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x16\x03\x01\x02\x00\x01"]
    for number in range(60):
        with socket.create_connection((host, int(port)), timeout=30) as connection:
            connection.settimeout(0.05)
            try:
                connection.sendall(beginnings[number % 5] + chance.randbytes(chance.randint(0, 3_000)))
                answer = connection.recv(4_096)
            except OSError:
                continue
            assert b" 500 " not in answer.split(b"\r\n")[0]
    assert is_well(fuzzed)


def test_paths_never_reach_the_file_system(fuzzed: Running) -> None:
    for path in (
        "/../../etc/passwd",
        "/console/../../../etc/passwd",
        "/console/%2e%2e/__init__.py",
        "//etc/passwd",
    ):
        host, _, port = fuzzed.http.removeprefix("http://").rpartition(":")
        with socket.create_connection((host, int(port)), timeout=30) as connection:
            connection.sendall(f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
            assert b" 404 " in connection.recv(4_096).split(b"\r\n")[0]
    for version in ("../../etc", "/etc/passwd", "..", "current"):
        answer = httpx.post(f"{fuzzed.http}/v1/recommend", json={"version": version})
        assert answer.status_code == 404
        assert httpx.post(f"{fuzzed.http}/v1/rollback", json={"version": version}).status_code == 404
