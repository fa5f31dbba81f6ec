"""A real S3 server on a free port of this machine, moto's, and a proxy before it that does harm when told to."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Protocol

from ports import free_port
from pyarrow import fs

BUCKET = "shop"
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_EC2_METADATA_DISABLED": "true",
}


class Address(Protocol):
    def __call__(self, name: str) -> str:
        """The URL of a name that only one test uses."""


@dataclass
class S3Server:
    """moto's server, which can be frozen and killed. What it holds lives in its memory."""

    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    def url(self, path: str, port: int | None = None) -> str:
        options = f"endpoint_override=127.0.0.1:{port or self.port}&scheme=http&region=us-east-1"
        return f"s3://{BUCKET}/{path}?{options}"

    def start(self) -> None:
        serve = "from moto.server import main; main()"
        command = [sys.executable, "-W", "ignore", "-c", serve, "-H", "127.0.0.1", "-p", str(self.port)]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        ends_at = time.monotonic() + 60
        while not _listens(self.port):
            assert self.process.poll() is None, "moto's server ended"
            assert time.monotonic() < ends_at, "moto's server does not answer"
            time.sleep(0.05)
        filesystem, _ = fs.FileSystem.from_uri(f"{self.url('')}&allow_bucket_creation=true")
        filesystem.create_dir(BUCKET)

    def freeze(self) -> None:
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        if self.process is not None:
            self._signal(signal.SIGKILL)
            self.process.wait()
            self.process = None

    def _signal(self, number: int) -> None:
        assert self.process is not None
        os.kill(self.process.pid, number)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def running_s3() -> Iterator[S3Server]:
    server = S3Server()
    server.start()
    try:
        yield server
    finally:
        server.kill()


UNAVAILABLE = b"HTTP/1.1 503 Slow Down\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class FaultyProxy:
    """Passes connections on to a server. Of the next requests whose line contains a word, so many go wrong."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.faults: list[tuple[str, str]] = []  # (kind, word): unavailable, truncated, silent or dropped
        self.num_done = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def fail(self, kind: str, word: str, times: int = 1) -> None:
        self.faults += [(kind, word)] * times

    def close(self) -> None:
        self._is_over.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while not self._is_over.is_set():
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _fault(self, line: str) -> str:
        with self._lock:
            for fault in self.faults:
                if fault[1] in line:
                    self.faults.remove(fault)
                    self.num_done += 1
                    return fault[0]
        return ""

    def _serve(self, client: socket.socket) -> None:
        """One request for each connection: each side is told to close it."""
        with client, suppress(OSError):
            head, body = _read_head(client)
            if not head:
                return
            line, _, rest = head.partition(b"\r\n")
            kind = self._fault(line.decode())
            if kind == "unavailable":
                client.sendall(UNAVAILABLE)
                return
            if kind == "dropped":
                return
            if kind == "silent":
                self._is_over.wait(20)
                return
            self._pass_on(client, line + b"\r\nconnection: close\r\n" + _without_connection(rest), body, kind)

    def _pass_on(self, client: socket.socket, head: bytes, body: bytes, kind: str) -> None:
        with socket.create_connection(("127.0.0.1", self.target)) as server:
            server.sendall(head + b"\r\n\r\n" + body)
            threading.Thread(target=_copy, args=(client, server), daemon=True).start()
            answer, content = _read_head(server)
            # curl, which asked for a connection to keep, must not wait for more on this one.
            client.sendall(answer + b"\r\nconnection: close\r\n\r\n")
            if kind == "truncated":
                client.sendall(content[: len(content) // 2])
                return
            client.sendall(content)
            _copy(server, client)


def _read_head(source: socket.socket) -> tuple[bytes, bytes]:
    """The lines before the body, and what came of the body with them."""
    found = b""
    while b"\r\n\r\n" not in found:
        if not (more := source.recv(65_536)):
            return b"", b""
        found += more
    head, _, body = found.partition(b"\r\n\r\n")
    return head, body


def _without_connection(head: bytes) -> bytes:
    lines = [line for line in head.split(b"\r\n") if not line.lower().startswith(b"connection:")]
    return b"\r\n".join(lines)


def _copy(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while more := source.recv(65_536):
            target.sendall(more)


@contextmanager
def faulty(server: S3Server) -> Iterator[FaultyProxy]:
    proxy = FaultyProxy(server.port)
    try:
        yield proxy
    finally:
        proxy.close()
