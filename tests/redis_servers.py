"""Real Redis servers on free ports of this machine, for as long as a test takes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import redis
from ports import free_redis_port

PASSWORD = "s3cret/pa:ss@word"


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@dataclass
class Server:
    """One redis-server, which can be killed, frozen and started again on the same port."""

    folder: Path
    flags: Sequence[str] = ()
    port: int = field(default_factory=free_redis_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def client(self) -> redis.Redis:
        return redis.Redis(port=self.port, socket_timeout=5)

    def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        where = ("--bind", "127.0.0.1", "--dir", str(self.folder), "--save", "")
        listen = () if "--tls-port" in self.flags else ("--port", str(self.port))
        with open(self.folder / "log.txt", "ab") as log:
            command = ["redis-server", *where, *listen, *self.flags]
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        wait_until(lambda: listens(self.port), f"redis-server on port {self.port}")

    def signal(self, number: int) -> None:
        assert self.process is not None
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        if self.process is not None:
            self.signal(signal.SIGKILL)
            self.process.wait()
            self.process = None


def wait_until(happened: object, what: str, seconds: float = 20) -> None:
    assert callable(happened)
    ends_at = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < ends_at, f"{what}: not within {seconds} s"
        time.sleep(0.02)


@contextmanager
def running(folder: Path, *flags: str) -> Iterator[Server]:
    server = Server(folder, flags)
    server.start()
    try:
        yield server
    finally:
        server.kill()


@contextmanager
def running_with_password(folder: Path) -> Iterator[str]:
    from urllib.parse import quote

    with running(folder, "--requirepass", PASSWORD) as server:
        yield f"redis://:{quote(PASSWORD, safe='')}@127.0.0.1:{server.port}"


@contextmanager
def running_with_tls(folder: Path) -> Iterator[str]:
    folder.mkdir(parents=True)
    key, cert = folder / "key.pem", folder / "cert.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *("-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"),
            *("-keyout", str(key), "-out", str(cert)),
        ],
        check=True,
        capture_output=True,
    )
    port = free_redis_port()
    server = Server(
        folder,
        (
            *("--port", "0", "--tls-port", str(port), "--tls-auth-clients", "no"),
            *("--tls-cert-file", str(cert), "--tls-key-file", str(key), "--tls-ca-cert-file", str(cert)),
        ),
        port,
    )
    try:
        server.start()
        yield f"rediss://127.0.0.1:{port}?ca={cert}"
    finally:
        server.kill()


@dataclass
class Watched:
    """A master, its replica, and the URL of the sentinel that watches them."""

    url: str
    master: Server
    replica: Server
    sentinel: Server


@contextmanager
def running_with_sentinel(folder: Path) -> Iterator[Watched]:
    with ExitStack() as stack:
        master = stack.enter_context(running(folder / "master"))
        replica = stack.enter_context(
            running(folder / "replica", "--replicaof", "127.0.0.1", str(master.port))
        )
        config = folder / "sentinel.conf"
        config.write_text(
            f"sentinel monitor shop 127.0.0.1 {master.port} 1\n"
            "sentinel down-after-milliseconds shop 500\nsentinel failover-timeout shop 2000\n"
        )
        sentinel = Server(folder / "sentinel")
        sentinel.folder.mkdir()
        with open(sentinel.folder / "log.txt", "wb") as log:
            sentinel.process = subprocess.Popen(
                [
                    "redis-server",
                    str(config),
                    "--sentinel",
                    "--port",
                    str(sentinel.port),
                    "--bind",
                    "127.0.0.1",
                ],
                stdout=log,
                stderr=log,
            )
        stack.callback(sentinel.kill)
        wait_until(lambda: listens(sentinel.port), "redis-sentinel")
        client = sentinel.client()
        wait_until(lambda: len(client.sentinel_slaves("shop")) == 1, "the sentinel to know the replica", 30)
        client.close()
        yield Watched(f"redis+sentinel://127.0.0.1:{sentinel.port}/shop", master, replica, sentinel)


@contextmanager
def running_cluster(folder: Path) -> Iterator[tuple[str, list[Server]]]:
    with ExitStack() as stack:
        flags = ("--cluster-enabled", "yes", "--cluster-node-timeout", "2000")
        nodes = [stack.enter_context(running(folder / str(number), *flags)) for number in range(3)]
        hosts = [f"127.0.0.1:{node.port}" for node in nodes]
        subprocess.run(
            ["redis-cli", "--cluster", "create", *hosts, "--cluster-yes"], check=True, capture_output=True
        )

        def agrees(node: Server) -> bool:
            client = node.client()
            try:
                return dict(client.execute_command("CLUSTER INFO"))["cluster_state"] == "ok"
            finally:
                client.close()

        wait_until(lambda: all(agrees(node) for node in nodes), "the cluster to agree", 30)
        yield f"redis+cluster://{','.join(hosts[:2])}", nodes
