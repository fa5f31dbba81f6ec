"""docs/tutorial.md as somebody would follow it: each block of `sh` and `python`, in order, in an empty folder."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PAGE = Path(__file__).parent.parent / "docs" / "tutorial.md"
BLOCK = re.compile(r"^```(sh|python)\n(.*?)^```", re.MULTILINE | re.DOTALL)
SERVE = re.compile(r"^recmill serve (.*)$", re.MULTILINE)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Follower:
    """Runs blocks in one folder; servers stay until the end."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        bin_folder = Path(sys.executable).parent
        threads = {"OMP_NUM_THREADS": "1"}
        self.environment = {**os.environ, **threads, "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}"}
        self.servers: list[subprocess.Popen[str]] = []

    def run(self, language: str, text: str) -> str:
        text = text.replace("127.0.0.1:8080", f"127.0.0.1:{self.port}")
        if language == "sh" and (served := SERVE.search(text)):
            return self.serve(served[1])
        command = [sys.executable, "-c", text] if language == "python" else ["bash", "-euc", text]
        done = subprocess.run(
            command, cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def serve(self, arguments: str) -> str:
        ports = ["--http-port", str(self.port), "--grpc-port", "0"]
        command = ["recmill", "serve", *arguments.split(), *ports]
        server = subprocess.Popen(
            command, cwd=self.folder, env=self.environment, stdout=subprocess.PIPE, text=True
        )
        self.servers.append(server)
        assert server.stdout is not None
        return server.stdout.readline()

    def close(self) -> None:
        for server in self.servers:
            server.send_signal(signal.SIGTERM)
            server.communicate(timeout=60)


@pytest.fixture
def follower(tmp_path: Path) -> Iterator[Follower]:
    running = Follower(tmp_path)
    yield running
    running.close()


@pytest.mark.stages
@pytest.mark.processes
def test_the_tutorial_can_be_followed_word_for_word(follower: Follower) -> None:
    said = [follower.run(*block) for block in BLOCK.findall(PAGE.read_text(encoding="utf-8"))]
    assert any("user   user_id" in text for text in said)
    assert any("served recall@10" in text for text in said)
    answers = [text for text in said if '"why"' in text]
    assert '"title"' in answers[0]
    assert "because you" in said[-1] or "popular" in said[-1]
