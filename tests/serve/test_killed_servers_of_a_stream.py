"""`kill -9` of a server, and of Redis, while events come."""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.request
from pathlib import Path

import pytest
from redis_servers import running, wait_until
from shop import Shop

from recmill.artifacts.checkpoint.checkpoint import Checkpoint
from recmill.client import Client
from recmill.errors import RecmillError
from recmill.stages.bench.serve.server import start_server
from recmill.stages.serve.messages import Event
from recmill.stages.train.follow import FollowConfig, Follower

pytestmark = [pytest.mark.services, pytest.mark.processes]


def history(address: str | None, user: str) -> list[str]:
    """Over a new connection, which any process of the server may take."""
    body = json.dumps({"user": user}).encode()
    request = urllib.request.Request(
        f"http://{address}/v1/features", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=20) as reply:
        return list(json.load(reply)["user"]["values"].get("item_id_history") or [])


def send_until_taken(client: Client, event: Event) -> None:
    ends_at = time.monotonic() + 60
    while True:
        try:
            client.add_events([event])
            return
        except RecmillError:
            assert time.monotonic() < ends_at
            time.sleep(0.05)


def test_each_event_counts_once_though_the_server_the_trainer_and_redis_are_killed(
    shop: Shop, own_bundles: Path, tmp_path: Path
) -> None:
    with running(tmp_path / "redis", "--appendonly", "yes") as redis:
        url = f"{redis.url}/shop:events"
        follower = Follower(Checkpoint.open(shop.checkpoint), url, own_bundles, FollowConfig(tables=shop.log))
        with (
            start_server(own_bundles, ["--events", url]) as server,
            Client(f"http://{server.http}") as client,
        ):
            send_until_taken(client, Event(user="new", item="i3", id="e1"))
            assert follower.publish_once() is not None
            redis.kill()
            redis.start()
            send_until_taken(client, Event(user="new", item="i4", id="e2"))
            os.kill(int(server.pid or 0), signal.SIGKILL)
            follower.close()  # and nothing of it is used again
        again = Follower(Checkpoint.open(shop.checkpoint), url, own_bundles, FollowConfig(tables=shop.log))
        two = ["--events", url, "--processes", "2", "--threads", "1"]
        with start_server(own_bundles, two) as server, Client(f"http://{server.http}") as client:
            send_until_taken(client, Event(user="new", item="i4", id="e2"))
            send_until_taken(client, Event(user="new", item="i5", id="e3"))
            published = again.publish_once()
            assert published is not None
            assert (published.number, published.num_rows) == (2, 2)
            wait_until(lambda: client.status().deltas == 2, "the delta")
            for _ in range(6):
                wait_until(lambda: history(server.http, "new") == ["i3", "i4", "i5"], "each event once", 5)
        again.close()
