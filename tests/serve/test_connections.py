"""Connections that say nothing, too little or too much harm nobody else."""

from __future__ import annotations

import contextlib
import resource
import socket
import threading
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path

import grpc
import httpx
import pytest
from certificates import write_certificates
from servers import Running, Start

from recmill.stages.serve.connections import TooFewFiles, connections_for

PATIENT = {"max_connections": 20, "max_wait_seconds": 5, "deadline_seconds": 10}
LIMITS = {**PATIENT, "send_seconds": 0.5, "idle_seconds": 1.0}
HEAD = b"POST /v1/recommend HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
QUESTION = b'{"user": "u1", "k": 3}'
ASK = HEAD + b"content-length: %d\r\n\r\n%s" % (len(QUESTION), QUESTION)


@pytest.fixture(scope="module")
def small(start: Start) -> Running:
    """A server that takes few connections and waits briefly."""
    return start(**LIMITS)


@pytest.fixture(scope="module")
def patient(start: Start) -> Running:
    """A server that takes few connections, and waits for long."""
    return start(**PATIENT)


def address(server: Running, transport: str) -> tuple[str, int]:
    host, _, port = getattr(server, transport).rpartition("//")[2].rpartition(":")
    return host, int(port)


def connect(server: Running, transport: str = "http") -> socket.socket:
    return socket.create_connection(address(server, transport), timeout=10)


def answer_of(connection: socket.socket) -> bytes:
    """All that comes until the server closes the connection."""
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(65_536):
            parts.append(part)
    return b"".join(parts)


@contextlib.contextmanager
def silent(server: Running, transport: str, number: int) -> Iterator[list[socket.socket]]:
    with contextlib.ExitStack() as held:
        yield [held.enter_context(connect(server, transport)) for _ in range(number)]


def eventually(is_so: object) -> None:
    end = time.monotonic() + 60
    while not is_so():  # type: ignore[operator]
        assert time.monotonic() < end
        time.sleep(0.05)


def grpc_is_well(server: Running) -> bool:
    with grpc.insecure_channel(server.grpc) as channel:
        try:
            channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=5)
            channel.unary_unary("/recmill.v1.Recommender/Status")(b"", timeout=5)
        except grpc.RpcError:
            return False
    return True


def test_silent_http_connections_make_room_for_others(patient: Running) -> None:
    with silent(patient, "http", 60):
        for _ in range(2):
            assert httpx.get(f"{patient.http}/health/ready").status_code == 200
            assert httpx.post(f"{patient.http}/v1/recommend", json={"user": "u1"}).status_code == 200


def test_silent_grpc_connections_make_room_for_others(patient: Running) -> None:
    with silent(patient, "grpc", 60):
        eventually(lambda: grpc_is_well(patient))


def test_connections_that_never_begin_a_tls_handshake_make_room(start: Start, tmp_path: Path) -> None:
    write_certificates(tmp_path)
    server = start(**LIMITS, tls_cert=tmp_path / "server.pem", tls_key=tmp_path / "server.key")
    with silent(server, "http", 40) as connections:
        eventually(lambda: sum(is_closed(one) for one in connections) >= 20)


def is_closed(connection: socket.socket) -> bool:
    connection.settimeout(0)
    try:
        return connection.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


def test_health_answers_when_every_connection_is_in_use(start: Start) -> None:
    server = start(max_connections=16)
    with contextlib.ExitStack() as held:
        for _ in range(16):
            one = held.enter_context(connect(server))
            one.sendall(HEAD + b"content-length: 9\r\nexpect: 100-continue\r\n\r\n")
            assert one.recv(100).startswith(b"HTTP/1.1 100 ")  # its body is waited for
        assert httpx.get(f"{server.http}/v1/status").status_code == 503
        assert httpx.get(f"{server.http}/health/live").status_code == 200
    eventually(lambda: httpx.get(f"{server.http}/v1/status").status_code == 200)


@pytest.mark.parametrize("transport", ["http", "grpc"])
def test_a_connection_without_a_request_is_closed(small: Running, transport: str) -> None:
    with connect(small, transport) as connection:
        if transport == "grpc":
            connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
        answer_of(connection)


@pytest.mark.parametrize(
    ("begin", "trickle", "words"),
    [
        (b"", b"\r\n", b""),
        (b"GET /", b"a", b" 408 "),
        (HEAD, b"a", b" 408 "),
        (HEAD + b"content-length: 1000\r\n\r\n", b"x", b" 408 "),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n", b"1\r\nx\r\n", b" 408 "),
    ],
)
def test_a_trickle_ends(small: Running, begin: bytes, trickle: bytes, words: bytes) -> None:
    with connect(small) as connection:
        connection.sendall(begin)
        connection.settimeout(0.1)
        found, end = b"", time.monotonic() + 60
        with contextlib.suppress(ConnectionError):
            while time.monotonic() < end:
                try:
                    part = connection.recv(4_096)
                    found += part
                    if not part:
                        break
                except TimeoutError:
                    connection.sendall(trickle)
        assert time.monotonic() < end
        assert words in found


@pytest.mark.parametrize(
    "head",
    [
        b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 20_000,
        b"GET / HTTP/1.1\r\na: " + b"b" * 100_000,
        b"GET /" + b"a" * 100_000,
        b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 12_000 + b"\r\n",
    ],
)
def test_headers_are_bounded(small: Running, head: bytes) -> None:
    with connect(small) as connection:
        connection.sendall(head)
        answer = answer_of(connection)
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert b'{"error":"The head of the request has more than 65,536 bytes."}' in answer


def test_trailers_are_bounded(small: Running) -> None:
    with connect(small) as connection:
        connection.sendall(HEAD + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\na: ")
        with contextlib.suppress(ConnectionError):
            for _ in range(100):
                connection.sendall(b"b" * 65_536)
            pytest.fail("six megabytes of a trailer were taken")


def test_a_client_may_end_its_side_after_the_request(small: Running) -> None:
    with connect(small) as connection:
        connection.sendall(ASK)
        connection.shutdown(socket.SHUT_WR)
        assert answer_of(connection).startswith(b"HTTP/1.1 200 ")


def test_chunked_bodies_expectations_and_requests_sent_ahead_are_answered(small: Running) -> None:
    chunked = HEAD + b"transfer-encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(QUESTION), QUESTION)
    last = ASK.replace(b"host: x", b"host: x\r\nconnection: close")
    with connect(small) as connection:
        connection.sendall(chunked + ASK * 20 + last)
        assert answer_of(connection).count(b"HTTP/1.1 200 ") == 22
    with connect(small) as connection:
        head, _, _ = last.partition(b"\r\n\r\n")
        connection.sendall(head + b"\r\nexpect: 100-continue\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 100 ")
        connection.sendall(QUESTION)
        assert answer_of(connection).startswith(b"HTTP/1.1 200 ")


def test_requests_sent_ahead_are_bounded(small: Running) -> None:
    with connect(small) as connection:
        connection.sendall(ASK * 2_000)
        answer_of(connection)
    assert httpx.get(f"{small.http}/health/ready").status_code == 200


def test_what_comes_while_a_server_drains_is_answered_as_the_last_of_its_connection(start: Start) -> None:
    server = start(**LIMITS)
    kept = HTTPConnection(*address(server, "http"), timeout=20)

    def ask() -> tuple[int, str | None]:
        kept.request("POST", "/v1/recommend", QUESTION, {"content-type": "application/json"})
        answer = kept.getresponse()
        answer.read()
        return answer.status, answer.getheader("connection")

    assert ask() == (200, None)
    stopping = threading.Thread(target=server.stop)
    stopping.start()
    eventually(lambda: status_of(server, "/health/ready") == 503)
    assert ask() == (200, "close")
    stopping.join()
    with pytest.raises(ConnectionRefusedError):
        connect(server)


def status_of(server: Running, path: str) -> int:
    with connect(server) as connection:
        connection.sendall(b"GET %s HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n" % path.encode())
        return int(answer_of(connection).split()[1])


def test_connections_follow_from_the_limit_of_open_files() -> None:
    assert connections_for(None, 1 << 20) == 10_000
    assert connections_for(None, 1_256) == 400
    assert connections_for(None, 100) == 16
    assert connections_for(400, 1_256) == 400
    with pytest.raises(TooFewFiles, match=r"--max-connections 401 .* need 1,258 open files"):
        connections_for(401, 1_256)


def test_a_server_raises_its_limit_of_open_files(small: Running) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert soft == hard
