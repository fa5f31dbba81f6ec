"""`recmill start`: from a file to an answer over HTTP with one command."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from shop import Shop


@pytest.mark.stages
@pytest.mark.processes
def test_a_log_becomes_answers_over_http_with_one_command(tmp_path: Path) -> None:
    # Even users like even items: user 4 must be shown one.
    rows = [
        (u, (2 * n + u * 6) % 20 + u % 2, 1_600_000_000 + 1000 * n + u) for u in range(40) for n in range(8)
    ]
    events, items = tmp_path / "events.csv", tmp_path / "items.csv"
    events.write_text("user,item,time\n" + "".join(f"{u},{i},{t}\n" for u, i, t in rows))
    items.write_text("item,title\n" + "".join(f"{i},Film {i}\n" for i in range(22)))
    command = [sys.executable, "-m", "recmill", "start", events, items, "--into", tmp_path / "run", "--quiet"]
    ports = ["--http-port", "0", "--grpc-port", "0"]
    with subprocess.Popen([*command, *ports], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        lines = []
        for line in server.stdout:
            lines.append(line)
            if line.startswith("ready"):
                break
        said = "".join(lines)
        assert "positive: every row is an interaction" in said
        assert "is recommended   Film " in said
        address = lines[-1].split()[1]
        request = urllib.request.Request(
            f"{address}v1/recommend",
            json.dumps({"user": 4, "k": 2}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            assert all(item["id"] % 2 == 0 for item in json.load(answer)["items"])
        server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0
    assert (tmp_path / "run" / "recipe.toml").exists()


@pytest.mark.processes
def test_demo_serves_the_shop_page_over_a_run_that_is_there(shop: Shop, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "bundle").symlink_to(shop.bundles)
    command = [
        sys.executable,
        "-m",
        "recmill",
        "demo",
        tmp_path / "run",
        "--http-port",
        "0",
        "--grpc-port",
        "0",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        ready = server.stdout.readline()
        with urllib.request.urlopen(ready.split()[1], timeout=30) as answer:
            assert "<title>Shop" in answer.read().decode()
        server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0
