"""A server as users start it: ready once warm, drained on SIGTERM, several processes, TLS, tokens."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from certificates import write_certificates
from servers import Start

from recmill.stages.serve.config import ServeConfig
from recmill.stages.serve.proto import recmill_pb2 as pb
from recmill.stages.serve.supervisor import settings_from_json, settings_to_json

READ, ADMIN = "read-token-0123456789", "admin-token-0123456789"


class Program:
    """`recmill serve` in a process of its own."""

    def __init__(self, bundles: Path, *flags: object) -> None:
        ports = ["--http-port", "0", "--grpc-port", "0", "--json"]
        command = [sys.executable, "-m", "recmill", "serve", "--bundle", bundles, *ports, *flags]
        self.process = subprocess.Popen(
            list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.communicate()[1]
        self.ready: dict[str, Any] = json.loads(line)

    def recommend(self, client: Any = httpx, **more: Any) -> httpx.Response:
        return client.post(
            f"{self.ready['http']}/v1/recommend", json={"user": "u1", "k": 3, **more}, timeout=20
        )

    def end(self, with_signal: int = signal.SIGTERM) -> tuple[int, str]:
        """Exit code, and what it said to people."""
        self.process.send_signal(with_signal)
        _, errors = self.process.communicate(timeout=60)
        return self.process.returncode, errors


@contextlib.contextmanager
def program(bundles: Path, *flags: object) -> Iterator[Program]:
    started = Program(bundles, *flags)
    with started.process:
        try:
            yield started
        finally:
            started.process.kill()


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_says_where_it_answers_and_ends_when_told(bundles: Path, number: int) -> None:
    with program(bundles, "--threads", 1) as server:
        assert server.recommend().status_code == 200
        assert httpx.get(f"{server.ready['http']}/health/ready").json() == {"ready": True}
        assert server.end(number) == (0, "")


@pytest.mark.processes
def test_what_is_under_way_is_answered_after_sigterm(bundles: Path) -> None:
    with program(bundles, "--threads", 1, "--max-wait-ms", 20_000, "--deadline-ms", 20_000) as server:
        codes: list[int] = []
        with httpx.Client() as client:
            assert server.recommend(client).status_code == 200
            queries = {"queries": [{"user": f"u{number}", "k": 50} for number in range(100)]}

            def ask() -> None:
                answer = client.post(f"{server.ready['http']}/v1/recommend", json=queries, timeout=30)
                codes.append(answer.status_code)

            asking = threading.Thread(target=ask)
            asking.start()
            time.sleep(0.05)
            code, _ = server.end()
            asking.join()
    assert (code, codes) == (0, [200])


@pytest.mark.processes
def test_several_processes_share_the_ports_and_one_that_ends_is_replaced(bundles: Path) -> None:
    with program(bundles, "--processes", 2, "--threads", 1) as server:
        children = processes_of(server.process.pid)
        assert len(children) == 2
        assert server.recommend().status_code == 200
        with grpc.insecure_channel(server.ready["grpc"]) as channel:
            status = channel.unary_unary("/recmill.v1.Recommender/Status")(b"", timeout=10)
            assert pb.StatusReply.FromString(status).status["version"] == server.ready["version"]
        os.kill(children[0], signal.SIGKILL)
        wait_until(lambda: len(set(processes_of(server.process.pid)) - {children[0]}) == 2)
        assert server.recommend().status_code == 200
        code, errors = server.end()
        assert code == 0
        assert "ended with code -9; another is started" in errors
        assert processes_of(server.process.pid) == []


@pytest.mark.processes
def test_a_process_that_stands_still_is_replaced(bundles: Path) -> None:
    with program(bundles, "--processes", 2, "--threads", 1) as server:
        stopped = processes_of(server.process.pid)[0]
        os.kill(stopped, signal.SIGSTOP)
        wait_until(lambda: stopped not in processes_of(server.process.pid))
        wait_until(lambda: len(processes_of(server.process.pid)) == 2)
        assert server.recommend().status_code == 200
        code, errors = server.end()
        assert code == 0
        assert "sent no heartbeat for 5 s and is killed" in errors


@pytest.mark.processes
def test_connections_that_come_while_a_process_stands_still_are_answered_by_the_other(bundles: Path) -> None:
    with program(bundles, "--processes", 2, "--threads", 1) as server:
        stopped = processes_of(server.process.pid)[0]
        os.kill(stopped, signal.SIGSTOP)
        wait_until(lambda: state_of(stopped) == "T")
        codes = [server.recommend().status_code for _ in range(20)]
        assert state_of(stopped) == "T", "it was replaced before all were answered"
    assert codes == [200] * 20


@pytest.mark.processes
def test_a_process_that_is_stopped_before_it_is_ready_is_replaced(bundles: Path) -> None:
    lowered = "import sys; from recmill.stages.serve import supervisor; supervisor._SILENT_START_SECONDS = 10"
    command = [sys.executable, "-c", f"{lowered}; from recmill.cli import main; sys.exit(main(sys.argv[1:]))"]
    flags = ["--http-port", 0, "--grpc-port", 0, "--json", "--processes", 2, "--threads", 1]
    with subprocess.Popen(
        [*command, "serve", "--bundle", str(bundles), *map(str, flags)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            wait_until(lambda: len(processes_of(process.pid)) == 2)
            stopped = processes_of(process.pid)[0]
            os.kill(stopped, signal.SIGSTOP)
            wait_until(lambda: stopped not in processes_of(process.pid))
            assert process.stdout is not None
            ready = json.loads(process.stdout.readline())
            assert httpx.get(f"{ready['http']}/health/ready").json() == {"ready": True}
            assert len(processes_of(process.pid)) == 2
            process.terminate()
            _, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 0
    assert "sent no heartbeat for 10 s and is killed" in errors


@pytest.mark.processes
def test_processes_end_when_their_parent_is_killed(bundles: Path) -> None:
    with program(bundles, "--processes", 2, "--threads", 1) as server:
        children = processes_of(server.process.pid)
        server.process.kill()
        wait_until(lambda: not any(Path(f"/proc/{child}").exists() for child in children))


def processes_of(parent: int) -> list[int]:
    """Children of a process that run."""
    found = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            state, owner = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            if int(owner) == parent and state != "Z":
                found.append(int(folder.name))
    return sorted(found)


def state_of(process: int) -> str:
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]


def wait_until(is_so: Any, seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--host", "0.0.0.0"], "--insecure if anyone may use"),
        (["--tls-cert", "c.pem"], "--tls-cert and --tls-key go together"),
        (["--role", "recommend"], "add --recall-at, --features-at, --rank-at"),
        (["--recall-at", "a:1"], "go with --role recommend"),
        (["--token-file", "none"], "cannot be read"),
        (["--canary", "x"], "must be a version and a fraction"),
        (["--http-port", "99999"], "must be a port"),
        (["--bundle", "nowhere"], "nowhere"),
    ],
)
def test_what_cannot_be_served_is_said_before_anything_starts(
    bundles: Path, recmill: Any, flags: list[str], words: str
) -> None:
    code, _, errors = recmill("serve", "--bundle", bundles, "--http-port", 0, "--grpc-port", 0, *flags)
    assert code != 0
    assert words in errors


def test_a_port_that_is_taken_is_named(start: Start, recmill: Any, bundles: Path) -> None:
    port = start().http.rpartition(":")[2]
    code, _, errors = recmill("serve", "--bundle", bundles, "--http-port", port, "--grpc-port", 0)
    assert code == 1
    assert f"Port {port} of 127.0.0.1 cannot be used" in errors


def test_draining_says_not_ready_and_refuses_new_connections(start: Start) -> None:
    server = start()
    assert server.stop() == 0
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.http}/health/ready")


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    write_certificates(folder)
    return folder


def ask_status(address: str, credentials: grpc.ChannelCredentials, **more: Any) -> bytes:
    with grpc.secure_channel(address, credentials) as channel:
        return channel.unary_unary("/recmill.v1.Recommender/Status")(b"", timeout=30, **more)


def test_tls_protects_both_transports(start: Start, certificates: Path) -> None:
    server = start(tls_cert=certificates / "server.pem", tls_key=certificates / "server.key")
    context = ssl.create_default_context(cafile=str(certificates / "ca.pem"))
    assert server.http.startswith("https://")
    assert httpx.get(f"{server.http}/health/live", verify=context).status_code == 200
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.http}/health/live")
    authority = (certificates / "ca.pem").read_bytes()
    assert ask_status(server.grpc, grpc.ssl_channel_credentials(authority))
    with pytest.raises(grpc.RpcError, match="UNAVAILABLE"):
        ask_status(server.grpc, grpc.ssl_channel_credentials())


def test_mutual_tls_wants_a_certificate_of_the_client(start: Start, certificates: Path) -> None:
    ca, pem, key = (certificates / name for name in ("ca.pem", "client.pem", "client.key"))
    server = start(
        tls_cert=certificates / "server.pem", tls_key=certificates / "server.key", tls_client_ca=ca
    )
    known = ssl.create_default_context(cafile=str(ca))
    with pytest.raises((httpx.ReadError, httpx.ConnectError, httpx.RemoteProtocolError)):
        httpx.get(f"{server.http}/health/live", verify=known)
    known.load_cert_chain(pem, key)
    assert httpx.get(f"{server.http}/health/live", verify=known).status_code == 200
    with pytest.raises(grpc.RpcError, match="UNAVAILABLE"):
        ask_status(server.grpc, grpc.ssl_channel_credentials(ca.read_bytes()))
    both = grpc.ssl_channel_credentials(ca.read_bytes(), key.read_bytes(), pem.read_bytes())
    assert ask_status(server.grpc, both)


def test_grpc_asks_for_tokens_too(start: Start, tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text(f"{READ} read\n{ADMIN} admin\n")
    server = start(token_file=tmp_path / "tokens")

    def code_of(method: str, token: str | None) -> str:
        metadata = [("authorization", f"Bearer {token}")] if token else []
        with grpc.insecure_channel(server.grpc) as channel:
            try:
                channel.unary_unary(f"/recmill.v1.Recommender/{method}")(b"", timeout=30, metadata=metadata)
            except grpc.RpcError as error:
                return error.code().name
        return "OK"

    assert [code_of("Status", token) for token in (None, "x" * 20, READ)] == ["UNAUTHENTICATED"] * 2 + ["OK"]
    assert [code_of("RemoveItems", token) for token in (READ, ADMIN)] == ["PERMISSION_DENIED", "OK"]
    with grpc.insecure_channel(server.grpc) as channel:
        assert channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=30)


def test_overload_is_refused_at_both_transports(start: Start) -> None:
    server = start(threads=1, max_waiting=2)
    queries = {"queries": [{"user": "u1"}] * 3}
    refused = httpx.post(f"{server.http}/v1/recommend", json=queries)
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    request = pb.RecommendRequest(queries=[pb.Query()] * 3).SerializeToString()
    with (
        grpc.insecure_channel(server.grpc) as channel,
        pytest.raises(grpc.RpcError, match="RESOURCE_EXHAUSTED"),
    ):
        channel.unary_unary("/recmill.v1.Recommender/Recommend")(request, timeout=30)


def test_settings_go_to_processes_and_come_back() -> None:
    settings = ServeConfig(
        bundle=Path("b"),
        canary=("v", 0.05),
        recall_at=("a:1", "b:2"),
        tls_cert=Path("c"),
        tls_key=Path("k"),
        max_k=7,
    )
    assert settings_from_json(settings_to_json(settings)) == settings


def test_the_bundle_of_a_run_is_found_in_its_folder(bundles: Path, tmp_path: Path) -> None:
    from recmill.cli.flags import UsageError
    from recmill.cli.serve import bundle_of

    (tmp_path / "bundle").symlink_to(bundles)
    assert bundle_of(str(tmp_path), None) == tmp_path / "bundle"
    assert bundle_of(None, str(bundles)) == bundles
    for run, bundle in ((None, None), (str(tmp_path), str(bundles))):
        with pytest.raises(UsageError, match="one of them"):
            bundle_of(run, bundle)
    with pytest.raises(UsageError, match="has no folder `bundle`"):
        bundle_of(str(bundles), None)
