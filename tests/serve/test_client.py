"""The typed client and the page about it, against real servers."""

from __future__ import annotations

import asyncio
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from ports import free_port
from servers import Running, Start

from recmill.client import AsyncClient, Client, Event, ServerUnavailable
from recmill.errors import BadRequest, NotFound, TooLate, Unauthenticated

PAGE = (Path(__file__).parents[2] / "docs" / "client.md").read_text(encoding="utf-8")
Connect = Callable[..., Client]
DEFAULT = "http://127.0.0.1:8080"


@pytest.fixture
def connect() -> Iterator[Callable[..., Client]]:
    """Clients that are closed at the end."""
    clients: list[Client] = []

    def connect(address: str, **settings: Any) -> Client:
        clients.append(Client(address, **{"timeout_seconds": 20, **settings}))
        return clients[-1]

    yield connect
    for client in clients:
        client.close()


@pytest.fixture
def client(connect: Connect, server: Running) -> Client:
    return connect(server.http)


def blocks(kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", PAGE, re.DOTALL)


def test_it_loads_nothing_heavy() -> None:
    heavy = ("numpy", "polars", "pyarrow", "torch", "grpc")
    code = f"import sys, recmill.client; print(*(set({heavy}) & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == ""


@pytest.mark.services
def test_the_code_of_the_page_runs(start: Start) -> None:
    own = start()
    for block in blocks("python"):
        code = block.replace(DEFAULT, own.http).replace("timeout_seconds=2.0", "timeout_seconds=20")
        found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert found.returncode == 0, found.stderr
        assert found.stdout.strip()
    commands = [one for block in blocks("sh") for one in block.strip().split("\n\n")]
    assert len(commands) == 5
    for command in commands:
        text = command.replace(DEFAULT, own.http).replace("curl -s", "curl -s --fail-with-body")
        found = subprocess.run(text, shell=True, capture_output=True, text=True)
        assert found.returncode == 0, found.stdout


def test_answers_are_those_of_the_server(client: Client, server: Running) -> None:
    answer = client.recommend("u1", k=3, fields=["title"])
    by_http = httpx.post(f"{server.http}/v1/recommend", json={"user": "u1", "k": 3}).json()
    assert [item.id for item in answer.items] == [item["id"] for item in by_http["items"]]
    assert all(isinstance(item.fields["title"], str) for item in answer.items)
    assert (answer.known, answer.version) == (True, server.version)
    assert client.recommend("nobody").known is False
    assert len(client.rank("u1", ["i1", "i2"]).scores) == 2
    assert client.status().num_items > 0


def test_refusals_are_typed_and_have_the_servers_sentence(client: Client) -> None:
    with pytest.raises(BadRequest, match='no column "titel"; fields can be: item_id, title'):
        client.trending(fields=["titel"])
    with pytest.raises(BadRequest, match="It takes: user, context"):
        client.recommend("u1", n=3)  # type: ignore[call-arg]
    with pytest.raises(NotFound):
        client._ask("nothing", None, Any)


def test_tokens(start: Start, tmp_path: Path, connect: Connect) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("reader-0123456789 read\n")
    tokens.chmod(0o600)
    address = start(token_file=tokens).http
    with pytest.raises(Unauthenticated):
        connect(address).status()
    assert connect(address, token="reader-0123456789").status().ready


def test_it_waits_for_a_server_that_is_not_there_yet(start: Start, connect: Connect) -> None:
    port = free_port()
    client = connect(f"http://127.0.0.1:{port}", timeout_seconds=60, max_attempts=100)
    answers: list[Any] = []
    asking = threading.Thread(target=lambda: answers.append(client.recommend("u1", k=2)))
    asking.start()
    start(http_port=port)
    asking.join(60)
    assert len(answers[0].items) == 2


def test_a_server_that_restarts_is_asked_again_over_a_new_connection(start: Start, connect: Connect) -> None:
    first = start()
    client = connect(first.http, timeout_seconds=60, max_attempts=100)
    assert client.recommend("u1", k=2).items
    first.stop()
    start(http_port=int(first.http.rpartition(":")[2]))
    assert client.recommend("u1", k=2).items


def test_nobody_there_is_said_after_a_few_attempts(connect: Connect) -> None:
    began = time.monotonic()
    with pytest.raises(ServerUnavailable, match="cannot be reached"):
        connect(f"http://127.0.0.1:{free_port()}", timeout_seconds=30).status()
    assert time.monotonic() - began < 10


class Scripted:
    """A server that answers each request with the next of some bytes, and counts them."""

    def __init__(self, *answers: bytes) -> None:
        self.requests: list[bytes] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve, args=(answers,), daemon=True)
        self._thread.start()

    def _serve(self, answers: tuple[bytes, ...]) -> None:
        with self._listener:
            self._answer(answers)

    def _answer(self, answers: tuple[bytes, ...]) -> None:
        for answer in answers:
            connection, _ = self._listener.accept()
            with connection:
                self.requests.append(connection.recv(65_536))
                connection.sendall(answer)


def response(status: str, body: bytes, more: str = "") -> bytes:
    head = f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\nconnection: close\r\n{more}\r\n"
    return head.encode() + body


GOOD = response("200 OK", b'{"number": 1, "version": "v"}')
BUSY = response("503 Service Unavailable", b'{"error": "every connection is in use"}')


def test_503_is_tried_again_and_its_sentence_is_the_error_in_the_end(connect: Connect) -> None:
    recovers, stays = Scripted(BUSY, BUSY, GOOD), Scripted(BUSY, BUSY)
    event = [Event(user="u", item="i")]
    assert connect(recovers.address).add_events(event).number == 1
    assert len(recovers.requests) == 3
    with pytest.raises(ServerUnavailable, match="every connection is in use"):
        connect(stays.address, max_attempts=2).add_events(event)


def test_events_are_not_sent_again_when_the_connection_broke_after_them(connect: Connect) -> None:
    breaks = Scripted(b"")
    with pytest.raises(ServerUnavailable, match="closed the connection"):
        connect(breaks.address).add_events([Event(user="u", item="i")])
    assert len(breaks.requests) == 1


def test_retry_after_beyond_the_deadline_is_not_waited_for(connect: Connect) -> None:
    busy = Scripted(response("429 Too Many", b'{"error": "full"}', "retry-after: 60\r\n"))
    began = time.monotonic()
    with pytest.raises(Exception, match="full"):
        connect(busy.address).status()
    assert time.monotonic() - began < 10


def test_a_server_that_does_not_answer_in_time_is_too_late(connect: Connect) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(TooLate):
            connect(address, timeout_seconds=0.3).status()


def test_many_calls_at_once_in_an_event_loop(server: Running) -> None:
    async def ask() -> list[Any]:
        async with AsyncClient(server.http, timeout_seconds=20, max_calls=4) as client:
            return await asyncio.gather(*(client.recommend(f"u{number}", k=2) for number in range(1, 21)))

    answers = asyncio.run(ask())
    with Client(server.http, timeout_seconds=20) as client:
        for number, answer in enumerate(answers, 1):
            assert [item.id for item in answer.items] == [
                item.id for item in client.recommend(f"u{number}", k=2).items
            ]
